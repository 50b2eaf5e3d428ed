"""What `generation_config` in a request may hold: the JSON of the library's GenerationConfig, of which its handlers
take everything, unchecked."""

from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, model_validator

from .fields import Length, Penalty, Probability, Stop, Strict, Temperature, Token

# Settings that have an effect where tokens are drawn.
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
# Of an answer's own under continuous batching, and those that change nothing in the answer to one prompt.
PER_ANSWER = ("max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id")
# About a saved file, not about generation.
_LABELS = ("transformers_version", "_from_model_config", "_commit_hash")


class Settings(Strict):
    """The settings that are honoured. `transformers chat` sends whatever stands in a `generation_config.json`: others
    must have the library's default value."""

    max_new_tokens: Length | None = None
    min_new_tokens: Annotated[int, Field(ge=0)] | None = None
    do_sample: bool | None = None
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Probability | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Probability | None = None
    repetition_penalty: Penalty | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0)] | None = None
    stop_strings: Stop | None = None
    eos_token_id: Token | Annotated[list[Token], Field(min_length=1)] | None = None
    pad_token_id: Token | None = None
    bos_token_id: Token | None = None

    @model_validator(mode="after")
    def _nothing_else(self) -> "Settings":
        for name, value in (self.model_extra or {}).items():
            if name not in _LABELS:
                _require_default(name, value)
        return self

    @model_validator(mode="after")
    def _make_sense_together(self) -> "Settings":
        if (self.min_new_tokens or 0) > (self.max_new_tokens or self.min_new_tokens or 0):
            raise ValueError(f"min_new_tokens={self.min_new_tokens} is more than max_new_tokens={self.max_new_tokens}")
        if self.no_repeat_ngram_size == 1:
            raise ValueError("no_repeat_ngram_size=1 forbids each token once it was seen: 0 forbids nothing, 2 pairs")
        return self


def _require_default(name: str, value: Any) -> None:
    known = defaults()
    if name not in known:
        raise ValueError(f"{name!r} is no setting; those that are honoured are {', '.join(Settings.model_fields)}")
    default = known[name]
    kinds = (int, float) if type(default) is float else (type(default),)
    if (type(value) not in kinds or value != default) and not (default is None and value is False):
        raise ValueError(
            f"{name}={value!r} is not supported by this server: leave it out"
            + ("" if default is None else f", or send {default!r}")
        )


@lru_cache
def defaults() -> dict[str, Any]:
    """Of all settings that the library knows, as `generate` fills them."""
    from transformers import GenerationConfig

    config = GenerationConfig()
    known = dict.fromkeys(name for name in vars(config) if not name.startswith("_"))
    return known | config._get_default_generation_params()
