"""What a request to the server may hold, checked before the library's handlers read it.

They answer mistakes of the client with status 500, a list of images with text about nothing, and three wanted answers
with one. What they cannot do is refused here.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator


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
        positions: longest prompt or answer, in tokens.
        vocab_size: ids that a token may have.
        shared: the sampling of all requests, under continuous batching; None: each chooses its own.
    """

    model: str
    positions: int
    vocab_size: int
    shared: dict[str, Any] | None = None


def _unicode(text: str) -> str:
    text.encode("utf-8")  # JSON can name half a character, which is none
    return text


Text = Annotated[str, AfterValidator(_unicode)]
Filled = Annotated[Text, Field(min_length=1)]


class _Strict(BaseModel):
    # Integers are no text and no truth values, NaN is no number; what else a client sends, the handlers know or refuse.
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Part(_Strict):
    type: Literal["text", "input_text", "output_text"]
    text: Text


class _Function(_Strict):
    name: Filled
    arguments: Text | dict[str, Any]


class _Call(_Strict):
    function: _Function


class _Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | list[_Part] | None = None
    tool_calls: list[_Call] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "_Message":
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content")
        return self


class _CallItem(_Strict):
    type: Literal["function_call"]
    call_id: Text
    name: Filled
    arguments: Text


class _ResultItem(_Strict):
    type: Literal["function_call_output"]
    call_id: Text
    output: Text


class _Sampling(_Strict):
    """What the endpoints have in common.

    Attributes:
        length: names of the longest answer, in tokens.
        only: fields that the handlers ignore -> the values that ask for nothing else than what they do.
    """

    length: ClassVar[tuple[str, ...]] = ("max_tokens",)
    only: ClassVar[dict[str, tuple[Any, ...]]] = {}

    model: Text | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    frequency_penalty: Annotated[float, Field(gt=-1, le=2)] | None = None
    logit_bias: dict[Annotated[str, Field(pattern=r"^\d+$")], float] | None = None
    stop: Filled | Annotated[list[Filled], Field(min_length=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    generation_config: Text | None = None


class ChatRequest(_Sampling):
    """Of `/v1/chat/completions`."""

    length = ("max_completion_tokens", "max_tokens")
    only = {
        "n": (1,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "presence_penalty": (0,),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto",),
        "modalities": (["text"],),
        "functions": (),
        "function_call": (),
        "audio": (),
        "web_search_options": (),
    }

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Sampling):
    """Of `/v1/completions`."""

    only = {
        "n": (1,),
        "best_of": (1,),
        "echo": (False,),
        "logprobs": (),
        "presence_penalty": (0,),
    }

    prompt: Filled
    suffix: Text | None = None


class ResponseRequest(_Sampling):
    """Of `/v1/responses`."""

    length = ("max_output_tokens",)
    only = {
        "background": (False,),
        "previous_response_id": (),
        "prompt": (),
        "tool_choice": ("auto",),
        "top_logprobs": (0,),
    }

    input: Filled | Annotated[list[_Part] | list[_Message | _CallItem | _ResultItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[dict[str, Any]] | None = None


class LoadRequest(_Strict):
    """Of `/load_model`, which `transformers chat` asks first."""

    model: Text


REQUESTS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/load_model": LoadRequest,
}


def check(path: str, body: bytes, limits: Limits) -> None:
    """Read the body of a request to one of `REQUESTS`.

    Raises:
        BadRequest: no JSON, a field of the wrong type or out of range, or something that the server cannot do.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("the request is no JSON object")
    try:
        request = REQUESTS[path].model_validate(fields)
    except ValidationError as error:
        where, reason = _most_telling(error)
        raise BadRequest(f"{where}: {reason}", where) from error
    model = fields.get("model")
    if model is not None and model != limits.model:
        raise BadRequest(f"model: this server answers as {limits.model!r}, not as {model!r}", "model")
    if isinstance(request, _Sampling):
        for field, reason in _impossible(request, fields, limits):
            raise BadRequest(f"{field}: {reason}", field)


def _most_telling(error: ValidationError) -> tuple[str, str]:
    """The place and the reason; of a union's branches that of the one which went furthest."""
    found = max(error.errors(), key=lambda e: len(e["loc"]))
    # Names of types, which stand for the branches of a union, are none of the client's.
    place = [str(part) for part in found["loc"] if isinstance(part, int) or part.isidentifier()]
    reason = "Input should be an object" if found["type"] == "model_type" else found["msg"]
    return ".".join(place), reason.removeprefix("Value error, ")


def _impossible(request: _Sampling, fields: dict[str, Any], limits: Limits) -> Iterator[tuple[str, str]]:
    for field, harmless in request.only.items():
        if fields.get(field) is not None and fields[field] not in harmless:
            yield field, f"{fields[field]!r} is not supported by this server"
    for token in request.logit_bias or ():
        if int(token) >= limits.vocab_size:
            yield "logit_bias", f"there is no token {token}: the vocabulary has {limits.vocab_size}"
    config = {}
    if request.generation_config is not None:
        try:
            config = _generation_config(request.generation_config)
        except (ValueError, TypeError) as error:
            yield "generation_config", str(error)
    lengths: dict[str, Any] = {name: fields.get(name) for name in request.length}
    lengths["generation_config"] = config.get("max_new_tokens")
    for field, length in lengths.items():
        if length is not None and length > limits.positions:
            yield field, f"{length} tokens are more than an answer can have, which is {limits.positions}"
    if limits.shared is not None:
        yield from _not_shared(request, config, limits.shared)


def _generation_config(text: str) -> dict[str, Any]:
    """The JSON of a generation config, as `transformers chat` sends it.

    Raises:
        ValueError, TypeError: it is none.
    """
    from transformers import GenerationConfig

    fields = json.loads(text)
    if not isinstance(fields, dict):
        raise ValueError("no JSON object")
    GenerationConfig(**fields).validate()
    length = fields.get("max_new_tokens")
    if length is not None and (type(length) is not int or length < 1):
        raise ValueError(f"max_new_tokens={length!r} is no number of tokens")
    return fields


def _not_shared(request: _Sampling, config: dict[str, Any], shared: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Under continuous batching the library samples all requests alike, and ignores what one of them asks for."""
    reason = "under continuous batching all requests are sampled alike ({}); leave it out, or ask a server without it"
    described = ", ".join(f"{name}={value}" for name, value in shared.items())
    sampled = shared["do_sample"]
    asked: dict[str, Any] = {name: getattr(request, name) for name in ("temperature", "top_p")}
    # Without sampling a temperature of 0 says what is done anyway, and so does any other in a generation config.
    usual = {"temperature": shared.get("temperature", 0), "top_p": shared.get("top_p", 1)}
    for field, value in asked.items():
        if value is not None and value != usual[field]:
            yield field, reason.format(described)
    for field in ("seed", "stop", "logit_bias"):
        if getattr(request, field) is not None:
            yield field, reason.format(described)
    if request.frequency_penalty:
        yield "frequency_penalty", reason.format(described)
    if config.get("do_sample", sampled) != sampled:
        yield "generation_config", "do_sample: " + reason.format(described)
