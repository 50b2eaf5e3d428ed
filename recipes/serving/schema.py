"""The requests that the endpoints take. A field that is not named here is refused: no handler would read it."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, Discriminator, Field, Json, Tag, model_validator

from .fields import Bias, Filled, Length, Probability, Seed, Stop, Strict, Temperature, TokenName
from .settings import Settings

# What a message may say beside what is read: of an answer that comes back, and of items of `/v1/responses`.
_ECHOED = ("id", "status", "reasoning_content")
_USUAL_TIERS = ("auto", "default")


class _Part(Strict):
    type: Literal["text", "input_text", "output_text"]
    text: str
    role: None = None  # by which the handlers tell messages


class _Function(Strict):
    name: Filled
    arguments: Json[dict[str, Any]] | dict[str, Any]


class _Call(Strict):
    function: _Function


class Message(Strict):
    """One turn."""

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part] | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content")
        for name, value in (self.model_extra or {}).items():
            if value and name not in _ECHOED:
                raise ValueError(f"{name!r} of a message is not read by this server")
        return self


class _CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: Filled
    arguments: Json[dict[str, Any]]


class _ResultItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str


def _kind(item: Any) -> str:
    fields = item if isinstance(item, dict) else {}
    if fields.get("type") in ("function_call", "function_call_output"):
        return fields["type"]
    return "message" if "role" in fields or "text" not in fields else "part"


_Item = Annotated[
    Annotated[Message, Tag("message")]
    | Annotated[_Part, Tag("part")]
    | Annotated[_CallItem, Tag("function_call")]
    | Annotated[_ResultItem, Tag("function_call_output")],
    Discriminator(_kind),
]


class _Named(Strict):
    name: Filled


class _Tool(Strict):
    type: Literal["function"]
    function: _Named


class _FlatTool(_Named):
    type: Literal["function"]
    function: None = None


class Sampling(Strict):
    """What the endpoints have in common.

    Attributes:
        lengths: names of the longest answer, in tokens; the first that is given holds.
        only: fields that the handlers ignore -> the values that ask for nothing else than what they do.
        labels: fields that ask for nothing.
    """

    lengths: ClassVar[tuple[str, ...]] = ("max_tokens",)
    only: ClassVar[dict[str, tuple[Any, ...]]] = {}
    labels: ClassVar[tuple[str, ...]] = ("user",)

    model: str | None = None
    stream: bool | None = None
    stream_options: dict[str, bool] | None = None
    temperature: Temperature | None = None
    top_p: Probability | None = None
    seed: Seed | None = None
    generation_config: Json[Settings] | None = None


class BiasedSampling(Sampling):
    """What `/v1/responses` lacks."""

    frequency_penalty: Annotated[float, Field(ge=-0.99, le=2)] | None = None
    logit_bias: dict[TokenName, Bias] | None = None
    stop: Stop | None = None
    max_tokens: Length | None = None


class ChatRequest(BiasedSampling):
    """Of `/v1/chat/completions`."""

    lengths = ("max_completion_tokens", "max_tokens")
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "logprobs": (False,),
        "top_logprobs": (0,),
        "presence_penalty": (0,),
        "response_format": ({"type": "text"},),
        "tool_choice": ("auto",),
        "parallel_tool_calls": (True,),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "service_tier": _USUAL_TIERS,
        "store": (False,),
    }
    labels = ("user", "metadata", "safety_identifier", "prompt_cache_key")

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Length | None = None
    tools: list[_Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(BiasedSampling):
    """Of `/v1/completions`."""

    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "n": (1,),
        "best_of": (1,),
        "echo": (False,),
        "presence_penalty": (0,),
    }

    prompt: Filled
    suffix: str | None = None


class ResponseRequest(Sampling):
    """Of `/v1/responses`."""

    lengths = ("max_output_tokens",)
    only: ClassVar[dict[str, tuple[Any, ...]]] = {
        "background": (False,),
        "include": ([],),
        "store": (False,),
        "text": ({"format": {"type": "text"}},),
        "tool_choice": ("auto",),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
        "service_tier": _USUAL_TIERS,
    }
    labels = ("user", "metadata", "safety_identifier", "prompt_cache_key")

    input: Filled | Annotated[list[_Item], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Length | None = None
    tools: list[_Tool | _FlatTool] | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _is_one_message_or_several(self) -> "ResponseRequest":
        kinds = {type(item) for item in self.input} if isinstance(self.input, list) else set()
        if _Part in kinds and len(kinds) > 1:
            raise ValueError("input: parts of a message stand alone, or in the content of a message")
        if isinstance(self.input[0], _CallItem | _ResultItem):
            raise ValueError("input: calls and their results follow a message; put one before them")
        return self


class OtherRequest(Strict):
    """Of `/v1/systemone`, whose handler checks the rest itself."""

    model: str | None = None


class LoadRequest(Strict):
    """Of `/load_model`, which `transformers chat` asks first."""

    model: str


REQUESTS: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponseRequest,
    "/v1/systemone": OtherRequest,
    "/load_model": LoadRequest,
}
