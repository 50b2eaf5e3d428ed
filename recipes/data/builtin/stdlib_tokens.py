"""Tagged words that every Python machine has: lines of the standard library's modules, each token with its role in the
syntax.

The role of an operator or a number shows in itself; that of a name (called, assigned, passed, imported) mostly in what
stands around it.
"""

import ast
import importlib.util
import io
import keyword
import re
import sysconfig
import tokenize
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from ...errors import UserError
from ..files import Skipped
from .base import Loaded
from .docstrings import library_modules, library_unit

TAGS = (
    "argument",  # the name before = in a call
    "attribute",
    "call",  # a name that is called
    "class",  # where it is defined
    "function",  # where it is defined
    "import",  # a name taken from a module
    "keyword",
    "method",  # an attribute that is called
    "module",
    "number",
    "operator",
    "parameter",
    "string",
    "variable",
)
MIN_TOKENS, MAX_TOKENS, MAX_CHARACTERS = 4, 40, 30

Place = tuple[int, int]
_KINDS = {tokenize.OP: "operator", tokenize.NUMBER: "number", tokenize.STRING: "string"}
_F_STRING = re.compile(r"[rR]?[fF][rR]?['\"]")
_SILENT = (tokenize.INDENT, tokenize.DEDENT, tokenize.NL, tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER)


def load(root: str | Path | None = None) -> Loaded:
    """`{"tokens": ["x", "=", "f", "(", ")"], "tags": ["variable", "operator", "call", "operator", "operator"]}`, a
    logical line of a module each (packages are left out: these are enough), ordered by module name; lines that came
    before are left out.

    Args:
        root: a folder of Python packages; the running interpreter's standard library by default.

    Raises:
        UserError: the folder has no Python sources (zipped or byte-code-only installations).
    """
    folder = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))
    loaded, seen = Loaded(), set()
    for module, path in sorted(library_modules(folder)):
        if path.parent != folder:
            continue
        try:
            lines = list(tagged_lines(importlib.util.decode_source(path.read_bytes())))
        except (SyntaxError, ValueError, RecursionError, tokenize.TokenError, OSError) as error:
            loaded.skipped.append(Skipped(str(path), 0, type(error).__name__))
            continue
        for words, tags in lines:
            if words not in seen:
                seen.add(words)
                loaded.add({"tokens": list(words), "tags": list(tags)}, library_unit(module))
    if not loaded.rows:
        raise UserError(
            f"the standard library at {folder} holds no readable Python sources. Use a Python "
            "installation that ships its .py files, or name files of your own in data.source."
        )
    return loaded


def tagged_lines(source: str) -> Iterator[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The tokens and tags of each logical line of `MIN_TOKENS` to `MAX_TOKENS` tokens.

    Left out are lines with a token of more than `MAX_CHARACTERS`, with an f-string (which Python tokenises otherwise
    from 3.12 on), with characters beyond ASCII (their columns are counted otherwise in the tree), and with a name that
    the tree gives no place to, as those of patterns.

    Raises:
        SyntaxError, tokenize.TokenError: it is no Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in others' sources
        roles = _roles(ast.parse(source))
    line: list[tokenize.TokenInfo] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.NEWLINE:
            words, tags = tuple(t.string for t in line), _tags(line, roles)
            if tags and MIN_TOKENS <= len(words) <= MAX_TOKENS and _plain(words):
                yield words, tags
            line = []
        elif token.type not in _SILENT:
            line.append(token)


def _plain(words: tuple[str, ...]) -> bool:
    return all(word.isascii() and word.isprintable() and len(word) <= MAX_CHARACTERS for word in words)


def _roles(tree: ast.Module) -> dict[Place, str]:
    """(line, column) of names -> tag, for those whose place the tree knows."""
    called: set[int] = set()
    roles: dict[Place, str] = {}
    for node in ast.walk(tree):  # a node comes before what is inside it
        if isinstance(node, ast.Call):
            called.add(id(node.func))
        elif isinstance(node, ast.Name):
            roles[node.lineno, node.col_offset] = "call" if id(node) in called else "variable"
        elif isinstance(node, ast.arg):
            roles[node.lineno, node.col_offset] = "parameter"
        elif isinstance(node, ast.keyword) and node.arg:
            roles[node.lineno, node.col_offset] = "argument"
        elif isinstance(node, ast.Attribute) and node.end_lineno and node.end_col_offset:
            place = node.end_lineno, node.end_col_offset - len(node.attr)
            roles[place] = "method" if id(node) in called else "attribute"
    return roles


def _tags(line: list[tokenize.TokenInfo], roles: dict[Place, str]) -> tuple[str, ...]:
    """The tag of each token of a logical line; nothing where one has none."""
    if any(not token.line.isascii() or _F_STRING.match(token.string) for token in line):
        return ()
    imports = line[0].string in ("import", "from") if line else False
    tags: list[str] = []
    for before, token in pairwise([None, *line]):
        assert token is not None
        if token.type == tokenize.NAME and keyword.iskeyword(token.string):
            tags.append("keyword")
        elif token.type == tokenize.NAME and imports:
            after = line[0].string == "from" and any(t.string == "import" for t in line[: len(tags)])
            tags.append("import" if after else "module")
        elif token.type == tokenize.NAME:
            tags.append(_role(token, before, line[0], roles))
        else:
            tags.append(_KINDS.get(token.type, ""))
    return tuple(tags) if all(tags) else ()


def _role(
    token: tokenize.TokenInfo, before: tokenize.TokenInfo | None, first: tokenize.TokenInfo, roles: dict[Place, str]
) -> str:
    """The tag of a name that is no keyword; "" where it is not known."""
    word = before.string if before else ""
    if word in ("def", "class"):
        return "function" if word == "def" else "class"
    if first.string in ("global", "nonlocal") or (first.string == "except" and word == "as"):
        return "variable"
    return roles.get(token.start, "")
