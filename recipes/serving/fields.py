"""Kinds of values in requests, their ranges, and what the server that is asked can do."""

from dataclasses import dataclass
from typing import Annotated, Any, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo


class BadRequest(ValueError):
    """A mistake of the client.

    Attributes:
        field: the field of the request that is meant, "" for the whole.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Limits:
    """What the server that is asked can do.

    Attributes:
        model: the only name that it answers to.
        positions: longest text, prompt and answer, in tokens.
        vocab_size: ids that a token may have.
        samples: it draws the tokens of requests that do not say.
        template: the chat template; "": there is none.
        variables: of the template, those that a request may set.
        shared: the settings of all requests, under continuous batching; None: each chooses its own.
    """

    model: str
    positions: int
    vocab_size: int
    samples: bool = False
    template: str = ""
    variables: frozenset[str] = frozenset()
    shared: dict[str, Any] | None = None


class Strict(BaseModel):
    """An object whose integers are no text and no truth values, and whose numbers are finite."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def _limits(info: ValidationInfo) -> Limits:
    return cast(Limits, info.context)


def _token(value: int, info: ValidationInfo) -> int:
    size = _limits(info).vocab_size
    if value >= size:
        raise ValueError(f"there is no token {value}: the vocabulary has {size}")
    return value


def _token_name(value: str, info: ValidationInfo) -> str:
    _token(int(value), info)
    return value


def _length(value: int, info: ValidationInfo) -> int:
    longest = _limits(info).positions - 1  # behind the shortest prompt
    if value > longest:
        raise ValueError(f"{value} tokens are more than an answer can have, which is {longest}")
    return value


def _temperature(value: float) -> float:
    if 0 < value < LOWEST_TEMPERATURE:
        raise ValueError(f"{value} is too near to 0: 0 takes the likeliest token, {LOWEST_TEMPERATURE} nearly always")
    return value


# Scores divided by less leave the range of fp32.
LOWEST_TEMPERATURE = 1e-6
# The criterion holds a row as long as a stop string for each token of the vocabulary.
STOP_LENGTH, STOP_STRINGS = 256, 16

Filled = Annotated[str, Field(min_length=1)]
Token = Annotated[int, Field(ge=0), AfterValidator(_token)]
TokenName = Annotated[str, Field(pattern="^[0-9]{1,9}$"), AfterValidator(_token_name)]
Length = Annotated[int, Field(ge=1), AfterValidator(_length)]
Temperature = Annotated[float, Field(ge=0, le=2), AfterValidator(_temperature)]
Probability = Annotated[float, Field(gt=0, le=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
# A penalty on the probability is finite in fp32 within these.
Penalty = Annotated[float, Field(ge=0.01, le=100)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=STOP_LENGTH)]
Stop = StopString | Annotated[list[StopString], Field(min_length=1, max_length=STOP_STRINGS)]
