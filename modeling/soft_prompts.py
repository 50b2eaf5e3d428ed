"""`generate` under PEFT's prompt learning: prompt tuning, p-tuning, prefix tuning."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, StaticLayer
from transformers.generation import GenerationMode

from .configuration_anyformer import AnyformerConfig

# Those kinds whose virtual tokens come as keys and values in a cache; the others come as embeddings.
IN_CACHE = ("PREFIX_TUNING", "CARTRIDGE")
_ONE_BY_ONE = (
    "a soft prompt (prompt tuning, p-tuning, prefix tuning) generates one token at a time from an empty cache: leave "
    "out prompt_lookup_num_tokens, assistant_model, prefill_chunk_size and the cache of an earlier call"
)


def soft_prompt_of(model: Any) -> Any:
    """The PEFT config of the soft prompt that `generate` is running with, or None.

    PEFT lends the model its own `prepare_inputs_for_generation` while it generates. That calls the model's, and puts
    the soft prompt before what comes back.
    """
    lender = getattr(model.__dict__.get("prepare_inputs_for_generation"), "__self__", None)
    config = getattr(lender, "active_peft_config", None)
    return config if getattr(config, "is_prompt_learning", False) else None


class SoftPromptGeneration:
    """`generate` with a soft prompt equals the training-time forward; stands before `GenerationMixin` among the bases.

    PEFT widens a 2-D mask by the virtual tokens and cuts the input to one token once the cache holds something. So a
    mask is not built ahead here, and what feeds several tokens to a filled cache is refused.
    """

    config: AnyformerConfig

    def virtual_tokens(self) -> int:
        """How many virtual tokens of a soft prompt the decoder has before its text, in this call of `generate`."""
        soft = soft_prompt_of(self)
        in_encoder = soft is not None and self.config.is_encoder_decoder and soft.peft_type not in IN_CACHE
        return 0 if soft is None or in_encoder else soft.num_virtual_tokens

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the base class.

        Raises:
            ValueError: several tokens at once behind a soft prompt that is in the cache already.
        """
        count = self.virtual_tokens()
        if not count:
            return super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        # Seen by the base class, a static cache would get its masks now, without columns for the soft prompt.
        cache = kwargs.pop("cache", None)
        filled = cache is not None and bool(cache.get_seq_length())
        if filled and kwargs.get("use_cache") is False:
            # A prefix lives in a cache whatever `use_cache` says, and what came back holds the text as well.
            kwargs["next_sequence_length"] = 1
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        if filled or (cache is not None and soft_prompt_of(self).peft_type not in IN_CACHE):
            inputs["cache"] = cache  # in place of an empty one PEFT makes the cache with the prefix
        if self.config.is_encoder_decoder:
            return _behind_prefix(inputs, count)
        if filled and inputs["input_ids"].shape[1] > 1:
            raise ValueError(_ONE_BY_ONE)
        return inputs

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> Any:
        count = self.virtual_tokens()
        if not count:
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
            )
        in_cache = soft_prompt_of(self).peft_type in IN_CACHE  # PEFT makes the cache with the prefix itself
        given, max_cache_length = model_kwargs.get("cache"), max_cache_length + count
        at_once = generation_mode == GenerationMode.ASSISTED_GENERATION or generation_config.prefill_chunk_size
        if at_once or (given is not None and given.get_seq_length()):
            raise ValueError(_ONE_BY_ONE)
        # Masks with the padding between soft prompt and text depend on values, which compiled steps cannot look at.
        generation_config.disable_compile = True
        result = super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        if given is None and not in_cache and model_kwargs.get("cache") is not None:
            _keep_static_whole(model_kwargs["cache"], max_cache_length)
        return result


def _behind_prefix(inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """Inputs of a decoder behind a prefix in the cache: PEFT widens those of decoders without an encoder alone."""
    mask, positions = inputs.get("decoder_attention_mask"), inputs.get("decoder_position_ids")
    if isinstance(mask, torch.Tensor):
        inputs["decoder_attention_mask"] = nn.functional.pad(mask, (count, 0), value=1)
    if positions is not None:
        inputs["decoder_position_ids"] = positions + count
    return inputs


def _keep_static_whole(cache: Cache, length: int) -> None:
    """Static layers of a window keep all columns: behind left padding the soft prompt is nearer than its columns."""
    static = [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
    longest = max([length, *(layer.max_cache_len for layer in static)])  # masks have one width for all layers
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticLayer) and layer.is_sliding:
            cache.layers[index] = StaticLayer(max_cache_len=longest)
