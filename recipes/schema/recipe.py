"""The whole recipe, and which model checks each of its sections."""

from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, PlainValidator, SerializeAsAny, ValidationError, model_validator

from ..adapters.saved import BadAdapterError, kind_of_saved
from ..introspection import StrictModel
from ..yaml_tree import kind_of, write_yaml
from .adapters import ADAPTERS, AdapterSection, NoAdapter
from .fields import wrong
from .library import library_model
from .objectives import OBJECTIVES, ObjectiveSection, SftObjective
from .sections import DataSection, EvalSection, HubSection, LoggingSection, ModelSection, TrainSection

KINDS = {"adapter": ADAPTERS, "objective": OBJECTIVES}
DEFAULT_KIND = {"adapter": "none", "objective": "sft"}


def adapter_model(kind: str) -> type[BaseModel]:
    """The model of the adapter section for a kind."""
    entry = ADAPTERS[kind]
    return library_model(f"{kind} adapter", entry, entry.section) if entry.config else entry.section


def train_model(objective: str) -> type[BaseModel]:
    """The model of the train section for an objective's kind."""
    return library_model(f"{objective} train", OBJECTIVES[objective], TrainSection)


def section_model(section: str, data: dict[str, Any]) -> type[BaseModel] | None:
    """The model that checks a section of a recipe, given the recipe's plain data; None if `kind` is unknown."""
    if section in KINDS:
        kind = kind_in(section, data.get(section))
        if kind not in KINDS[section]:
            return None
        return adapter_model(kind) if section == "adapter" else OBJECTIVES[kind].section
    if section == "train":
        kind = kind_in("objective", data.get("objective"))
        return train_model(kind if kind in OBJECTIVES else DEFAULT_KIND["objective"])
    return STATIC_SECTIONS.get(section)


def refused_keys(section: str, data: dict[str, Any]) -> set[str]:
    """The library's keys that a section refuses with a remedy."""
    by = "objective" if section == "train" else section
    entry = KINDS[by].get(kind_in(by, data.get(by))) if by in KINDS and section != "objective" else None
    return set(entry.refused) if entry else set()


def kind_in(section: str, value: Any) -> str:
    """The kind that a section's plain data names, or the section's default kind."""
    given = value if isinstance(value, dict) else {}
    kind = given.get("kind")
    if kind is None and section == "adapter" and isinstance(given.get("path"), str):
        try:
            return kind_of_saved(given["path"])
        except BadAdapterError:
            return "lora"  # the path itself is refused, see `adapters.checks`
    return DEFAULT_KIND[section] if kind is None else str(kind)


def _by_kind(section: str) -> PlainValidator:
    def validate(value: Any) -> Any:
        if not isinstance(value, dict):
            remedy = (
                f"; write {section}: {{kind: {value}}}" if isinstance(value, str) and value in KINDS[section] else ""
            )
            raise wrong(f"must be a mapping, found {kind_of(value)}{remedy}")
        model = section_model(section, {section: value})
        if model is None:
            expected = " or ".join(map(repr, KINDS[section]))
            fault = {"type": "literal_error", "loc": ("kind",), "input": value["kind"], "ctx": {"expected": expected}}
            raise ValidationError.from_exception_data(section, [fault])  # type: ignore[list-item]
        return model.model_validate(value)

    return PlainValidator(validate)


class _Train(NamedTuple):
    """A train section as given, and the kind of the objective beside it, which may be faulty itself."""

    given: Any
    objective: str


def _train(value: _Train) -> dict[str, Any]:
    """Check the keys and keep them as given: `10` must not become `10.0` where the class says float."""
    given, kind = value
    if not isinstance(given, dict):
        raise wrong(f"must be a mapping, found {kind_of(given)}")
    if kind in OBJECTIVES:  # else it is not known which keys there are
        train_model(kind).model_validate(given)
    return given


def _objective_kind(value: Any) -> str:
    """The kind of the objective, be it written in place of the section."""
    return value if isinstance(value, str) else kind_in("objective", value)


class Recipe(StrictModel):
    """A checked recipe. `train` holds the trainer's arguments as given, `output_dir` always among them."""

    model: ModelSection
    adapter: Annotated[SerializeAsAny[AdapterSection], _by_kind("adapter")] = Field(default_factory=NoAdapter)
    data: DataSection
    objective: Annotated[SerializeAsAny[ObjectiveSection], _by_kind("objective")] = Field(default_factory=SftObjective)
    train: Annotated[dict[str, Any], PlainValidator(_train)]
    eval: EvalSection = Field(default_factory=EvalSection)
    logging: LoggingSection = Field(default_factory=LoggingSection)
    hub: HubSection | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        given = {k: v for k, v in value.items() if v is not None or k not in SECTIONS}
        data, entry = given.get("data"), OBJECTIVES.get(_objective_kind(given.get("objective")))
        if isinstance(data, dict) and data.get("truncation") is None and entry is not None:
            given["data"] = data | {"truncation": entry.truncation}
        if "train" in given:
            given["train"] = _Train(given["train"], _objective_kind(given.get("objective")))
        return given

    def to_yaml(self) -> str:
        """The resolved recipe: our own sections in full but for what the objective does not read, `train` and
        `adapter` with the keys given."""
        data = self.model_dump(exclude={"adapter"})
        names = [name for name in type(self.adapter).model_fields if name in self.adapter.own]
        own = {n: v for n in names if (v := getattr(self.adapter, n)) is not None}
        adapter = {"kind": own.pop("kind")} | own | self.adapter.arguments()
        if data["hub"] is None:
            del data["hub"]
        for section, name in OBJECTIVES[self.objective.kind].unread:
            del data[section][name]
        if data["model"]["context_extension"] is None:
            del data["model"]["context_extension"]
        quantization = self.model.quantization
        if quantization is None:
            del data["model"]["quantization"]
        else:
            data["model"]["quantization"] = quantization.arguments()
        order = [name for name in type(self).model_fields if name in data or name == "adapter"]
        return write_yaml({name: adapter if name == "adapter" else data[name] for name in order})

    def __eq__(self, other: object) -> bool:
        # Which keys were given and which came from defaults makes no difference to what a recipe does.
        return isinstance(other, Recipe) and self.to_yaml() == other.to_yaml()

    __hash__ = None  # type: ignore[assignment]


STATIC_SECTIONS: dict[str, type[BaseModel]] = {
    "model": ModelSection,
    "data": DataSection,
    "eval": EvalSection,
    "logging": LoggingSection,
    "hub": HubSection,
}
SECTIONS = tuple(Recipe.model_fields)
