"""Parts of the library's server that know one model, which is loaded already."""

from typing import Any

from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.serving.utils import BaseGenerateManager, CBGenerateManager, GenerateManager, GenerationState

from ..generator import Generator
from .requests import BadRequest


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
        return self.generator.tokenizer

    def _load_model(self, *args: Any, **kwargs: Any) -> Any:
        return self.generator.model


class _OneByOne(GenerateManager):
    """`generate`, one request after another; answers end where the model's positions do."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any):
        _fit(self.generator, inputs, gen_config)
        return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ):
        _fit(self.generator, inputs, gen_config)
        return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)


class _Together(CBGenerateManager):
    """Continuous batching; as above, and a request that its cache could never hold is the client's mistake."""

    def __init__(self, generator: Generator) -> None:
        super().__init__()
        self.generator = generator

    def generate_streaming(self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any):
        _fit(self.generator, inputs, gen_config)
        try:
            return super().generate_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        except ValueError as error:
            raise BadRequest(str(error)) from error

    async def generate_non_streaming(
        self, model: Any, processor: Any, inputs: Any, gen_config: Any, *args: Any, **kwargs: Any
    ):
        _fit(self.generator, inputs, gen_config)
        try:
            return await super().generate_non_streaming(model, processor, inputs, gen_config, *args, **kwargs)
        except ValueError as error:
            raise BadRequest(str(error)) from error


def _fit(generator: Generator, inputs: dict[str, Any], gen_config: Any) -> None:
    """Let the answer end where the positions do.

    Raises:
        BadRequest: the prompt leaves no room for one.
    """
    ids = inputs["input_ids"]
    length = len(ids) if isinstance(ids, list) else ids.shape[-1]
    if not 0 < length <= generator.longest_prompt:
        raise BadRequest(f"the prompt has {length} tokens: 1 to {generator.longest_prompt} can be answered")
    gen_config.max_new_tokens = min(gen_config.max_new_tokens, generator.room(length))


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
