"""Parts of the library's server that know one model, which is loaded already."""

import copy
import functools
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseGenerateManager, CBGenerateManager, GenerateManager, GenerationState

from ..generator import Generator
from .fields import BadRequest
from .requests import asks_to_sample

# Tokens of an answer whose request says nothing: the library's number.
UNSAID_LENGTH = 1024
# Tokens of a text where the kind of positions sets no end.
LONGEST_TEXT = 2**20


def text_limit(generator: Generator) -> int:
    """Tokens of a prompt and its answer: as many as the model was trained for, because a client could not be told that
    what lies beyond is worse."""
    trained = generator.trained_length or LONGEST_TEXT
    return min(trained, generator.longest_prompt + 1)


class Models(ModelManager):
    """Hands out the one model.

    Args:
        name: what clients call it.
    """

    def __init__(self, name: str, generator: Generator) -> None:
        self.generator = generator
        super().__init__(force_model=name)

    @staticmethod
    def process_model_name(model_id: str) -> str:
        """The name as it is: it was opened already."""
        return model_id

    def _load_processor(self, *args: Any, **kwargs: Any) -> Any:
        tokenizer = copy.copy(self.generator.tokenizer)
        tokenizer.apply_chat_template = _or_refused(tokenizer.apply_chat_template)
        return tokenizer

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        return self.generator.model


def _or_refused(apply_chat_template: Callable) -> Callable:
    """A template runs over what the client has sent, and may stumble in any way."""

    @functools.wraps(apply_chat_template)
    def apply(*args: Any, **kwargs: Any) -> Any:
        try:
            return apply_chat_template(*args, **kwargs)
        except Exception as error:
            raise BadRequest(f"the chat template cannot write these messages: {error}") from error

    return apply


class OwnReading:
    """How a handler reads requests; stands before one of the library's among the bases."""

    async def handle_request(self, body: dict, request_id: str) -> Any:
        """As the base class, without the fields that say nothing, at which it stumbles."""
        said = {name: value for name, value in body.items() if value is not None and value != {} and value != []}
        return await super().handle_request(said, request_id)  # type: ignore[misc]

    def _build_generation_config(self, body: dict, *args: Any, **kwargs: Any) -> Any:
        """As the base class; a temperature asks to draw tokens, and the seed waits for the turn of the request."""
        seed = body.pop("seed", None)
        config = super()._build_generation_config(body, *args, **kwargs)  # type: ignore[misc]
        sampled = asks_to_sample(body.get("temperature"), body.get("top_p"))
        if sampled is not None:
            config.do_sample = sampled
        if "logit_bias" in body:  # which of two endpoints one reads
            config.sequence_bias = {(int(token),): float(bias) for token, bias in body["logit_bias"].items()}
        config.seed = seed
        return config


@dataclass(frozen=True)
class _Seeded:
    """A model whose answer starts from a seed, when its turn has come."""

    model: Any
    seed: int

    def generate(self, **kwargs: Any) -> Any:
        import torch

        device = self.model.device
        # What others draw does not start from this seed.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(self.seed)
            return self.model.generate(**kwargs)


class _OneByOne(GenerateManager):
    """`generate`, one request after another; answers end where the model's positions do."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any):
        model = self._prepared(model, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ):
        model = self._prepared(model, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    def _prepared(self, model: Any, inputs: Any, gen_config: Any) -> Any:
        _fit(self.generator, inputs, gen_config)
        return model if gen_config.seed is None else _Seeded(model, gen_config.seed)


class _Together(CBGenerateManager):
    """Continuous batching; as above, and a request that its cache could never hold is the client's mistake."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    @property
    def settings(self) -> dict[str, Any]:
        """Of all requests, once it runs."""
        return self._cb.generation_config.to_dict()  # type: ignore[union-attr]

    def generate_streaming(
        self,
        model: Any,
        processor: Any,
        inputs: Any,
        gen_config: Any,
        request_id: str,
        response_parser: Any = None,
    ):
        _fit(self.generator, inputs, gen_config)
        own = _own_id(request_id)
        try:
            return super().generate_streaming(model, processor, inputs, gen_config, own, response_parser)
        except ValueError as error:
            raise BadRequest(str(error)) from error

    async def generate_non_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, request_id: str):
        _fit(self.generator, inputs, gen_config)
        own = _own_id(request_id)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, own)
        except ValueError as error:
            raise BadRequest(str(error)) from error


def _own_id(request_id: str) -> str:
    """Clients choose ids; of two requests with one the first would never be answered."""
    return f"{request_id}-{uuid.uuid4()}"


def _fit(generator: Generator, inputs: dict[str, Any], gen_config: Any) -> None:
    """Let the answer end where the positions do.

    Raises:
        BadRequest: the prompt leaves no room for one.
    """
    ids = inputs["input_ids"]
    length = len(ids) if isinstance(ids, list) else ids.shape[-1]
    limit = text_limit(generator)
    if not 0 < length < limit:
        raise BadRequest(f"the prompt has {length} tokens: 1 to {limit - 1} can be answered")
    gen_config.max_new_tokens = min(gen_config.max_new_tokens or UNSAID_LENGTH, limit - length)


class State(GenerationState):
    """What runs the model."""

    def __init__(self, generator: Generator, continuous_batching: bool) -> None:
        super().__init__(continuous_batching=continuous_batching)
        self.one_by_one = _OneByOne(generator)
        self.together = _Together(generator)
        if continuous_batching:
            self._cb_manager = self.together  # where the library looks for one that has died

    def get_manager(self, model_id: str, use_cb: bool = False) -> BaseGenerateManager:
        """Of the one model, whatever its name."""
        return self.together if use_cb else self.one_by_one
