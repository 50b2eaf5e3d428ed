"""`data.source` and `data.eval_source`: what may stand there, checked and then kept as it is written."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, PlainSerializer, Tag, WrapValidator, model_validator

from ..data.builtin import BUILT_IN
from ..data.formats import FORMATS
from ..data.sources import PLACES, hub_problem, kind_of_place
from ..user_code import in_file
from .fields import Section, wrong

# Our field names that `data.columns` can map a file's columns to.
DATA_FIELDS = (
    "prompt",
    "completion",
    "messages",
    "text",
    "conversations",
    "instruction",
    "input",
    "output",
    "system",
    "chosen",
    "rejected",
    "margin",
    "completions",
    "responses",
    "scores",
    "rewards",
    "score",
    "tools",
    "label",
    "tokens",
    "tags",
    "source",
    "target",
)


def _columns(value: dict[str, str]) -> dict[str, str]:
    for name in value:
        if name not in DATA_FIELDS:
            raise wrong(f"maps {name!r}, which is no field of ours; known: {', '.join(DATA_FIELDS)}")
    return value


def _place(value: str) -> str:
    if not value.strip():
        raise wrong("is empty: give stdlib-docstrings, a path, a glob or a list of paths")
    kind, where = kind_of_place(value)
    if kind == "hub" and (problem := hub_problem(where)):
        raise wrong(f"names the Hub, but {problem}")
    return value


def _hub(value: str) -> str:
    if problem := hub_problem(value.removeprefix("hub:")):
        raise wrong(problem)
    return value


def _function(value: str) -> str:
    if in_file(value) is None:
        raise wrong(f"must read FILE.py:FUNCTION, found {value!r}")
    return value


Columns = Annotated[dict[str, str], AfterValidator(_columns)]
Format = Literal[("auto", *FORMATS)]  # type: ignore[valid-type]
OnBadRow = Literal["error", "skip"]


class SourceItem(Section):
    """One source with settings of its own. Exactly one of path, hub and python says where its rows are."""

    path: Annotated[str, AfterValidator(_place)] | None = None
    hub: Annotated[str, AfterValidator(_hub)] | None = None
    python: Annotated[str, AfterValidator(_function)] | None = None
    weight: Annotated[float, Field(gt=0)] | None = None
    max_rows: Annotated[int, Field(ge=1)] | None = None
    format: Format | None = None
    columns: Columns | None = None
    on_bad_row: OnBadRow | None = None
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    arguments: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _one_place(self) -> "SourceItem":
        given = [name for name in PLACES if getattr(self, name) is not None]
        if len(given) != 1:
            found = f"found {' and '.join(given)}" if given else "found none"
            raise wrong(f"needs exactly one of {', '.join(PLACES)} to say where the rows are, {found}")
        kind, where = kind_of_place(getattr(self, given[0]), given[0])
        own = PLACES.get(kind, ())
        if kind == "built-in" and self.arguments is not None and (problem := BUILT_IN[where].problem):
            own = ("arguments",)
            if text := problem(self.arguments):
                raise wrong(f"has arguments that {where} cannot take: {text}")
        for place, keys in PLACES.items():
            for key in keys:
                if getattr(self, key) is not None and key not in own:
                    takes = ", ".join(data.name for data in BUILT_IN.values() if data.problem)
                    what = "data set of the Hub" if place == "hub" else f"Python function, or {takes},"
                    raise wrong(f"has {key}, which goes with a {what} only: remove it")
        return self


def _as_written(value: Any, check: Any) -> Any:
    check(value)
    if isinstance(value, list):
        if not value:
            raise wrong("is empty: give stdlib-docstrings, a path, a glob or a list of paths")
        return [_plain(item) for item in value]
    return _plain(value)


def _plain(value: Any) -> Any:
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _form(value: Any) -> str:
    """Which of the forms is meant, so that its faults alone are told."""
    return "mapping" if isinstance(value, dict) else "list" if isinstance(value, list) else "text"


_Text = Annotated[str, AfterValidator(_place), Tag("text")]
_Mapping = Annotated[SourceItem, Tag("mapping")]
_List = Annotated[list[Annotated[_Text | _Mapping, Discriminator(_form)]], Tag("list")]
Source = Annotated[
    Annotated[_Text | _Mapping | _List, Discriminator(_form)],
    WrapValidator(_as_written),
    PlainSerializer(lambda value: value),
]
