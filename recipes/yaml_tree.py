"""YAML as a tree in which every value knows the file and line it came from.

Files are composed (`merge`) and changed from the command line (`apply_override`) as trees, so that an error found
much later can still point at the line that caused it.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

# A user access token of the Hub, which must never be shown or stored.
TOKEN = re.compile(r"(?<![A-Za-z0-9_])hf_[A-Za-z0-9]{16,}(?![A-Za-z0-9_])")

# Before the name of a pipeline's stage: what that stage makes, see `stages`.
STAGE = "stage:"
MAX_BYTES = 256 * 1024  # a recipe is a page or two; beyond this, the file is something else
_MAX_NODES = 20_000
_TAG = "tag:yaml.org,2002:"


def redact(text: str) -> str:
    """Replace every access token in a text."""
    return TOKEN.sub("hf_***", text)


class Place(NamedTuple):
    """Where something stands. `line` counts from 1; 0 stands for a whole file or a command-line override."""

    file: str
    line: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


class Problem(NamedTuple):
    """One mistake: where it stands, the full path of its key, and what is wrong and would be right."""

    place: Place
    path: str
    message: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (str(self.place), self.path, self.message)))


@dataclass
class Node:
    """A scalar, a list of nodes or a mapping of keys to nodes.

    `place` is where the key stands, for a member of a mapping, else where the value begins.
    """

    value: Any
    place: Place


Path: TypeAlias = tuple[str | int, ...]


def dotted(path: Path) -> str:
    return ".".join(map(str, path))


def plain(node: Node) -> Any:
    """The tree's values without places, as dicts, lists and scalars."""
    if isinstance(node.value, dict):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [plain(child) for child in node.value]
    return node.value


def locate(root: Node, path: Path) -> Place:
    """The place of what a path names, or of the nearest existing thing above it."""
    node = root
    for step in path:
        child = _child(node, step)
        if child is None:
            break
        node = child
    return node.place


def _child(node: Node, step: str | int) -> Node | None:
    if isinstance(node.value, dict):
        return node.value.get(step)
    if isinstance(node.value, list) and isinstance(step, int) and 0 <= step < len(node.value):
        return node.value[step]
    return None


# Reading


def read_yaml(raw: bytes, name: str) -> tuple[Node | None, list[Problem]]:
    """Read one YAML 1.2 document.

    Args:
        raw: the file's content.
        name: the file's name for messages.

    Returns:
        The tree, or None where the text cannot be read at all, and every problem found.
    """
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        reason = f"byte 0x{raw[error.start]:02X} is not UTF-8: save the file as UTF-8"
        return None, [Problem(Place(name, line), "", reason)]
    other_version = re.match(r"%YAML\s+(?!1\.2\b)", text)
    if other_version:
        return None, [Problem(Place(name, 1), "", "recipes are YAML 1.2: remove the %YAML line")]
    return _Reader(name).read(text)


def parse_value(text: str, place: Place) -> tuple[Node | None, list[Problem]]:
    """Read the value of a command-line override; empty text is null."""
    if text.startswith("*"):
        return Node(text, place), []  # a glob: there is no anchor that this could be the alias of
    root, problems = _Reader(place.file, place).read(text)
    return (Node(None, place) if root is None and not problems else root), problems


class _Reader:
    def __init__(self, name: str, place: Place | None = None) -> None:
        self.name, self.fixed = name, place
        self.problems: list[Problem] = []
        self.count = 0
        self.open: list[int] = []
        self.constructor = YAML(typ="safe", pure=True).constructor

    def read(self, text: str) -> tuple[Node | None, list[Problem]]:
        root = None
        try:
            document = YAML(typ="safe", pure=True).compose(text)
            root = None if document is None else self.convert(document, ())
        except MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.report(mark.line + 1 if mark else 0, "", _explain(error))
        except ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            self.report(line, "", f"broken YAML: the character U+{_codepoint(error.character):04X} is not allowed")
        except YAMLError as error:
            self.report(0, "", f"broken YAML: {str(error).splitlines()[0]}")
        except RecursionError:
            self.report(0, "", "broken YAML: nested too deeply")
        except _TooLarge:
            self.report(0, "", f"aliases unfold to more than {_MAX_NODES} values")
        return root, self.problems

    def report(self, line: int, path: str, message: str) -> None:
        self.problems.append(Problem(self.place(line), path, redact(message)))

    def place(self, line: int) -> Place:
        return self.fixed or Place(self.name, line)

    def convert(self, node: Any, path: Path) -> Node:
        line = node.start_mark.line + 1
        self.count += 1
        if self.count > _MAX_NODES:
            raise _TooLarge
        if id(node) in self.open:
            self.report(line, dotted(path), "an alias holds itself")
            return Node(None, self.place(line))
        self.open.append(id(node))
        try:
            if isinstance(node, MappingNode):
                return Node(self.mapping(node, path), self.place(line))
            if isinstance(node, SequenceNode):
                return Node([self.convert(item, (*path, i)) for i, item in enumerate(node.value)], self.place(line))
            return Node(self.scalar(node, path), self.place(line))
        finally:
            self.open.pop()

    def mapping(self, node: MappingNode, path: Path) -> dict[str, Node]:
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == f"{_TAG}merge":
                self.merge_key(value_node, path, merged)
                continue
            key = self.key(key_node, path)
            if key is None:
                continue
            child = self.convert(value_node, (*path, key))
            if key in own:
                first = own[key].place.line
                self.report(line, dotted((*path, key)), f"duplicate key, first on line {first}: keep one of them")
                continue
            own[key] = Node(child.value, self.place(line))
        return merged | own

    def merge_key(self, node: Any, path: Path, merged: dict[str, Node]) -> None:
        sources = node.value if isinstance(node, SequenceNode) else [node]
        for source in sources:
            if not isinstance(source, MappingNode):
                self.report(node.start_mark.line + 1, dotted((*path, "<<")), "must name a mapping")
                return
            for key, child in self.mapping(source, path).items():
                merged.setdefault(key, child)

    def key(self, node: Any, path: Path) -> str | None:
        value = self.scalar(node, path) if isinstance(node, ScalarNode) else None
        if isinstance(value, str):
            return value
        shown = node.value if isinstance(node, ScalarNode) else "a list or mapping"
        remedy = f'; write "{shown}" in quotes' if isinstance(node, ScalarNode) else ""
        self.report(node.start_mark.line + 1, dotted(path), f"keys must be text, found {shown}{remedy}")
        return None

    def scalar(self, node: ScalarNode, path: Path) -> Any:
        kind = str(node.tag).removeprefix(_TAG)
        if kind in ("str", "timestamp"):  # YAML 1.2 has no dates: they stay text
            return node.value
        if kind not in ("null", "bool", "int", "float"):
            self.report(node.start_mark.line + 1, dotted(path), f"the tag {node.tag} is not supported")
            return None
        try:
            return self.constructor.construct_object(node)
        except (ValueError, KeyError, YAMLError):
            self.report(node.start_mark.line + 1, dotted(path), f"cannot be read as {kind}: {node.value[:40]!r}")
            return None


class _TooLarge(Exception):
    pass


def _codepoint(character: Any) -> int:
    return ord(character) if isinstance(character, str) and len(character) == 1 else int(character)


def _explain(error: MarkedYAMLError) -> str:
    problem = " ".join((error.problem or error.context or "cannot be read").split())
    context = " ".join((error.context or "").split())
    if "'\\t'" in problem:
        return "broken YAML: a tab stands where YAML wants spaces"
    if "mapping values are not allowed" in problem:
        return "broken YAML: a second ':' in one line; check the indentation, or put the value in quotes"
    if "undefined alias" in problem:
        return f"broken YAML: {problem}; a value that begins with '*' wants quotes"
    if "single document" in (context + problem):
        return "broken YAML: a second document begins here; a recipe is one document"
    return f"broken YAML: {problem}" + (f" ({context})" if context and context != problem else "")


# Composing


def merge(parent: Node, child: Node, drop: Callable[[Path, Node, Node], set[str]], path: Path = ()) -> Node:
    """Lay a tree over another: mappings are merged key by key, anything else is replaced.

    Args:
        drop: given a path and the mappings that meet there, the parent's keys that must not survive.
    """
    if not isinstance(parent.value, dict) or not isinstance(child.value, dict):
        return child
    gone = drop(path, parent, child)
    result = {key: node for key, node in parent.value.items() if key not in gone}
    for key, node in child.value.items():
        result[key] = merge(result[key], node, drop, (*path, key)) if key in result else node
    return Node(result, child.place)


def apply_override(
    root: Node, text: str, drop: Callable[[Path, Node, Node], set[str]], *, given: str | None = None
) -> list[Problem]:
    """Change a tree as `a.b=c`, `a.list.0=c` or `~a.b` says; returns what is wrong with the override.

    Args:
        given: what messages quote; default: `text`.
    """
    place = Place(f"override {redact(given or text)!r}")
    if text.startswith("~"):
        return _remove(root, text[1:], place)
    name, equals, value = text.partition("=")
    if not equals:
        return [Problem(place, "", "has no '=': write section.key=value to set a key, ~section.key to remove one")]
    steps = name.strip().split(".")
    if not all(steps):
        return [Problem(place, "", "must begin with the path of a key, such as train.learning_rate=1e-4")]
    if steps[0] == "extends":
        return [Problem(place, "extends", "is read from files only; set the keys you want instead")]
    node, problems = parse_value(value.strip(), place)
    if node is None or problems:
        # A path of the file's own kind is of no use here: the override is quoted in full.
        hint = "; put the value in quotes: key='\"value\"'"
        return [Problem(place, name, problem.message + hint) for problem in problems]
    return _set(root, steps, node, place, drop)


def _set(
    root: Node, steps: list[str], node: Node, place: Place, drop: Callable[[Path, Node, Node], set[str]]
) -> list[Problem]:
    parent, path = root, tuple[str, ...]()
    for index, step in enumerate(steps):
        last = index == len(steps) - 1
        path = (*path, step)
        if parent.value is None:
            parent.value = {}
        if isinstance(parent.value, list):
            position = int(step) if step.isdecimal() else -1
            if not 0 <= position <= len(parent.value) or (position == len(parent.value) and not last):
                size = len(parent.value)
                return [Problem(place, dotted(path), f"the list has {size} items: give a number from 0 to {size}")]
            if last:
                parent.value[position : position + 1] = [node]
            else:
                parent = parent.value[position]
        elif not isinstance(parent.value, dict):
            above = dotted(path[:-1])
            return [Problem(place, dotted(path), f"{above} is {kind_of(parent.value)}, not a mapping: it has no keys")]
        elif last:
            gone = drop(path[:-1], parent, Node({step: node}, place))
            parent.value = {key: child for key, child in parent.value.items() if key not in gone} | {step: node}
        else:
            parent = parent.value.setdefault(step, Node({}, place))
    return []


def _remove(root: Node, name: str, place: Place) -> list[Problem]:
    if "=" in name:
        return [Problem(place, "", "a removal takes no value: write ~section.key")]
    *above, last = name.strip().split(".")
    parent = root
    for index, step in enumerate(above):
        child = _child(parent, _step(parent, step))
        if child is None:
            return [_nothing_there(parent, step, [*above[:index], step], place)]
        parent = child
    if _child(parent, _step(parent, last)) is None:
        return [_nothing_there(parent, last, [*above, last], place)]
    del parent.value[_step(parent, last)]
    return []


def _step(node: Node, step: str) -> str | int:
    return int(step) if isinstance(node.value, list) and step.isdecimal() else step


def _nothing_there(parent: Node, step: str, path: list[str], place: Place) -> Problem:
    if isinstance(parent.value, dict):
        near = difflib.get_close_matches(step, parent.value, n=1)
        there = f"did you mean {near[0]!r}?" if near else f"there: {', '.join(parent.value) or 'no keys'}"
        return Problem(place, ".".join(path), f"the recipe sets no such key; {there}")
    return Problem(place, ".".join(path), f"the recipe sets no such key; it stands in {kind_of(parent.value)}")


def kind_of(value: Any) -> str:
    """What a value is, in YAML's terms."""
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "a mapping"}
    names |= {list: "a list", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def show(value: Any) -> str:
    """A value for a message: short, and never an access token."""
    if isinstance(value, dict | list):
        return kind_of(value)
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = redact(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def write_yaml(data: dict[str, Any]) -> str:
    """Write plain values as YAML 1.2 that `read_yaml` reads back unchanged."""
    from io import StringIO

    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 10_000
    yaml.representer.ignore_aliases = lambda *_: True
    stream = StringIO()
    yaml.dump(data, stream)
    return stream.getvalue()
