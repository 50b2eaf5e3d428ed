"""Dataclass fields read from a library's source, without importing the library.

A recipe is checked against the very classes that will take its values (`trl.SFTConfig`, `peft.LoraConfig`,
`AnyformerConfig`), but importing those costs ten seconds and torch. Their source, read with `ast`, tells names,
types and defaults in a tenth of a second.
"""

import ast
import functools
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, create_model


class Unknown:
    """Stands for a default that is no literal, or that does not exist."""

    def __repr__(self) -> str:
        return "UNKNOWN"


UNKNOWN = Unknown()


@dataclass(frozen=True)
class SourceField:
    """One field of a dataclass as its source declares it.

    Attributes:
        type: a type that pydantic can check; `Any` where the annotation cannot be resolved.
        default: the default if it is a literal, else `UNKNOWN`.
    """

    name: str
    type: Any
    default: Any


class StrictModel(BaseModel):
    """Refuses unknown keys and every conversion of types, except a whole number where a float is wanted."""

    model_config = ConfigDict(extra="forbid", strict=True, protected_namespaces=(), allow_inf_nan=False)


def class_fields(module: str, name: str) -> dict[str, SourceField]:
    """The fields that the constructor of a dataclass takes, in order, those of its base classes included.

    Args:
        module: dotted name of the module that defines the class or imports it.
        name: name of the class.

    Raises:
        LookupError: no such module or class.
    """
    return dict(_fields(*_find_class(module, name)))


def class_constant(module: str, name: str, attribute: str) -> Any:
    """The literal that a class body assigns to `attribute`, or `UNKNOWN`. Base classes are not searched."""
    _, node = _find_class(module, name)
    for statement in node.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == attribute for target in targets):
            return _literal(getattr(statement, "value", None))
    return UNKNOWN


def function_parameters(module: str, name: str) -> dict[str, bool]:
    """The named parameters of a function, in order, and whether each must be given.

    Raises:
        LookupError: no such module or function.
    """
    found = _resolve(_load(module), name)
    if found is None or not isinstance(found[1], ast.FunctionDef):
        raise LookupError(f"{module} has no function {name}")
    given = found[1].args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    needed = len(names) - len(given.defaults)
    parameters = {argument: place < needed for place, argument in enumerate(names)}
    return parameters | {a.arg: default is None for a, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)}


def enum_values(module: str, name: str) -> list[Any]:
    """The values of an Enum, in order."""
    return _enum_values(_find_class(module, name)[1])


# Finding modules and names


@dataclass(frozen=True, eq=False)
class _Module:
    name: str
    package: str
    names: dict[str, ast.AST]  # module-level name -> what binds it first


@functools.cache
def _load(module: str) -> _Module:
    path = _module_file(module)
    names: dict[str, ast.AST] = {}
    _bind(ast.parse(path.read_bytes()).body, names)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return _Module(module, package, names)


def _module_file(module: str) -> Path:
    """The source of a module. Only the top-level package is asked for by name: that imports nothing."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0])
    for depth, part in enumerate(parts[1:], 2):
        folders = list((spec and spec.submodule_search_locations) or ())
        found = next(
            (p for f in folders for p in (Path(f, part, "__init__.py"), Path(f, f"{part}.py")) if p.exists()), None
        )
        parent = ".".join(parts[: depth - 1])
        if found is not None:
            spec = importlib.util.spec_from_file_location(f"{parent}.{part}", found)
            if spec is not None and found.name == "__init__.py":
                spec.submodule_search_locations = [str(found.parent)]
        elif parent in sys.modules:
            # An editable install may keep a subpackage elsewhere. Its parent is imported, so asking is free.
            spec = importlib.util.find_spec(f"{parent}.{part}")
        else:
            spec = None
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        raise LookupError(f"no source found for module {module}")
    return Path(spec.origin)


def _bind(body: list[ast.stmt], names: dict[str, ast.AST]) -> None:
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.setdefault(node.name, node)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, node)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, node)
        elif isinstance(node, ast.If | ast.Try):
            # Lazy packages name their contents under `if TYPE_CHECKING`; optional imports stand in `try`.
            _bind(node.body, names)
            _bind(node.orelse, names)


def _resolve(module: _Module, name: str) -> tuple[_Module, ast.AST] | None:
    """Follow imports to the statement that defines a name; None if that leads nowhere."""
    for _ in range(10):
        node = module.names.get(name)
        if not isinstance(node, ast.ImportFrom):
            return None if node is None else (module, node)
        name = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        source = node.module or ""
        if node.level:
            base = module.package.split(".")
            source = ".".join([*base[: len(base) - node.level + 1], *filter(None, [source])])
        if source.partition(".")[0] in sys.stdlib_module_names:
            return None
        try:
            module = _load(source)
        except (LookupError, SyntaxError, OSError):
            return None
    return None


def _find_class(module: str, name: str) -> tuple[_Module, ast.ClassDef]:
    found = _resolve(_load(module), name)
    if found is None or not isinstance(found[1], ast.ClassDef):
        raise LookupError(f"no class {name} in module {module}")
    return found[0], found[1]


def _bases(module: _Module, node: ast.ClassDef) -> list[tuple[_Module, ast.ClassDef]]:
    found = [_resolve(module, base.id) for base in node.bases if isinstance(base, ast.Name)]
    return [(where, base) for where, base in filter(None, found) if isinstance(base, ast.ClassDef)]


# Fields and types


@functools.cache
def _fields(module: _Module, node: ast.ClassDef) -> dict[str, SourceField]:
    fields: dict[str, SourceField] = {}
    for where, base in reversed(_bases(module, node)):
        fields.update(_fields(where, base))
    if not _is_dataclass(module, node):
        return fields
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(statement.annotation):
            continue
        name, options = statement.target.id, _field_options(statement.value)
        if "init" in options and _literal(options["init"]) is False:
            fields.pop(name, None)
            continue
        default = options.get("default", None if options else statement.value)
        kind = _with_choices(_type(statement.annotation, module), _literal(options.get("metadata"), partly=True))
        fields[name] = SourceField(name, kind, _literal(default))
    return fields


def _is_dataclass(module: _Module, node: ast.ClassDef) -> bool:
    decorators = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
    if decorators & {"dataclass", "dataclass_transform"}:
        return True
    # Subclasses of a class marked with dataclass_transform (PreTrainedConfig) are made dataclasses without
    # a decorator of their own.
    return any(_makes_dataclasses(where, base) for where, base in _bases(module, node))


def _makes_dataclasses(module: _Module, node: ast.ClassDef) -> bool:
    decorators = {ast.unparse(d).partition("(")[0].rpartition(".")[2] for d in node.decorator_list}
    return "dataclass_transform" in decorators or any(_makes_dataclasses(w, b) for w, b in _bases(module, node))


def _field_options(value: ast.expr | None) -> dict[str, ast.expr]:
    """The keywords of `field(...)`; empty for a plain default."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).rpartition(".")[2] == "field":
        return {keyword.arg: keyword.value for keyword in value.keywords if keyword.arg} or {"": ast.Constant(None)}
    return {}


def _literal(node: ast.AST | None, *, partly: bool = False) -> Any:
    """The value of a literal; with `partly`, the literal entries of a dict display."""
    if partly and isinstance(node, ast.Dict):
        return {_literal(k): _literal(v) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    if node is None:
        return UNKNOWN
    try:
        return ast.literal_eval(node)
    except ValueError:
        return UNKNOWN


def _with_choices(kind: Any, metadata: Any) -> Any:
    """Narrow `str` to the choices that a field's metadata lists."""
    choices = metadata.get("choices") if isinstance(metadata, dict) else None
    if not isinstance(choices, list):
        return kind
    members = get_args(kind) if get_origin(kind) is Union else (kind,)
    return _union([Literal[tuple(choices)] if member is str else member for member in members])


_PLAIN: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "None": type(None),
    "dict": dict[str, Any],
    "Dict": dict[str, Any],
    "Mapping": dict[str, Any],
    # YAML has one kind of sequence; the classes turn it into what they want.
    "list": list[Any],
    "List": list[Any],
    "Sequence": list[Any],
    "tuple": list[Any],
    "Tuple": list[Any],
    "set": list[Any],
}


def _type(node: ast.expr, module: _Module) -> Any:
    """An annotation as a type for pydantic."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            try:
                return _type(ast.parse(node.value, mode="eval").body, module)
            except SyntaxError:
                return Any
        return type(None) if node.value is None else Any
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_type(node.left, module), _type(node.right, module)])
    if isinstance(node, ast.Subscript):
        return _generic(node, module)
    if isinstance(node, ast.Attribute):
        return _PLAIN.get(node.attr, Any) if ast.unparse(node.value) == "typing" else Any
    if isinstance(node, ast.Name):
        return _PLAIN[node.id] if node.id in _PLAIN else _named(node.id, module)
    return Any


def _generic(node: ast.Subscript, module: _Module) -> Any:
    name = ast.unparse(node.value).rpartition(".")[2]
    arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    if name == "Literal":
        values = [_literal(argument) for argument in arguments]
        return Any if UNKNOWN in values else Literal[tuple(values)]
    types = [_type(argument, module) for argument in arguments]
    if name == "Optional":
        return _union([types[0], type(None)])
    if name == "Union":
        return _union(types)
    if name == "Annotated":
        return types[0]
    if name in ("dict", "Dict", "Mapping"):
        # Keys of a recipe are text at every depth.
        return dict[str, types[1] if len(types) == 2 else Any]  # type: ignore[misc]
    if name in ("list", "List", "Sequence", "tuple", "Tuple", "set"):
        members = [kind for argument, kind in zip(arguments, types, strict=True) if ast.unparse(argument) != "..."]
        return list[_union(members)]  # type: ignore[misc]
    return Any


def _named(name: str, module: _Module) -> Any:
    found = _resolve(module, name)
    if found is None:
        return Any
    where, node = found
    if isinstance(node, ast.Assign):
        return _type(node.value, where)
    if isinstance(node, ast.ClassDef):
        if any(ast.unparse(base).endswith("Enum") for base in node.bases):
            return Literal[tuple(_enum_values(node))]
        if _is_dataclass(where, node):
            return _nested_model(where, node)
    return Any


@functools.cache
def _nested_model(module: _Module, node: ast.ClassDef) -> type[BaseModel]:
    fields: dict[str, Any] = {field.name: (field.type, None) for field in _fields(module, node).values()}
    return create_model(node.name, __base__=StrictModel, **fields)


def _enum_values(node: ast.ClassDef) -> list[Any]:
    values = [_literal(s.value) for s in node.body if isinstance(s, ast.Assign)]
    return [value for value in values if value is not UNKNOWN]


def _union(types: list[Any]) -> Any:
    flat: list[Any] = []
    for kind in types:
        flat.extend(get_args(kind) if get_origin(kind) is Union else [kind])
    # Text beside an enumeration is a way to write its members, and a mapping beside a dataclass to write that.
    if str in flat and any(get_origin(kind) is Literal for kind in flat):
        flat.remove(str)
    if dict[str, Any] in flat and any(
        isinstance(k, type) and issubclass(k, BaseModel) for k in flat if not get_origin(k)
    ):
        flat.remove(dict[str, Any])
    # What cannot be resolved (torch.dtype) cannot be written in YAML either; the other spellings can.
    known = [kind for kind in flat if kind is not Any]
    if Any in flat and not any(kind is not type(None) for kind in known):
        return Any
    return Union[tuple(dict.fromkeys(known))] if known else Any  # noqa: UP007
