"""`generate` of long texts: prompts that are read in chunks, and texts that reach the end of their positions."""

from collections.abc import Iterator
from typing import Any

import torch
from transformers.generation import GenerationMode
from transformers.utils import logging

from .configuration_anyformer import AnyformerConfig
from .positions import frequencies_turn

logger = logging.get_logger(__name__)


class LongTextGeneration:
    """Stands before `GenerationMixin` among the bases."""

    config: AnyformerConfig
    model: Any

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        """As the base class; a text ends where learned positions end, and that is said."""
        chunk = generation_config.prefill_chunk_size
        if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
            raise ValueError(
                f"prefill_chunk_size={chunk!r}: a number of tokens from 1, or None to read the prompt whole"
            )
        mask = self._own_mask(model_kwargs)
        padding = int((mask == 0).sum(-1).min()) if mask is not None else 0
        # Positions that the longest row will take; the last token that is generated needs none.
        longest = max_cache_length - padding + self.virtual_tokens()  # type: ignore[attr-defined]
        limit = self.config.position_limit
        if limit is not None and longest > limit:
            logger.warning(
                f"learned positions end at max_position_embeddings={limit}: texts end there, up to {longest - limit} "
                "tokens before the length that was asked for"
            )
            generation_config.max_length -= longest - limit
            max_cache_length -= longest - limit
        if generation_mode == GenerationMode.ASSISTED_GENERATION:
            if generation_config.prefill_chunk_size:
                raise ValueError(
                    "speculative decoding reads its prompt whole: leave out prefill_chunk_size, or "
                    "prompt_lookup_num_tokens and assistant_model"
                )
            told = torch.tensor([getattr(generation_config, "_mask_length", 1)])  # of a mask of ones
            self._require_one_set_of_frequencies(told if mask is None else mask.sum(-1), longest + 1)
        return super()._prepare_cache_for_generation(  # type: ignore[misc]
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )

    def _own_mask(self, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The decoder's own mask [batch, past + length], where it is one of tokens."""
        name = "decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask"
        mask = model_kwargs.get(name)
        return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None

    def _require_one_set_of_frequencies(self, begun: torch.Tensor, longest: int) -> None:
        """Raises:
        ValueError: the frequencies turn between texts of `begun` [batch] and `longest` tokens, where speculation reads
            ahead.
        """
        turning = self.model.positions.turning
        if turning and bool(frequencies_turn(turning, begun, torch.full_like(begun, longest)).any()):
            raise ValueError(
                f"rotary frequencies turn beyond {min(turning)} tokens (rope_type={', '.join(turning.values())}), and "
                "speculative decoding would read tokens with those of a longer text: leave out "
                "prompt_lookup_num_tokens and assistant_model, or let the text end before"
            )

    def _prefill(
        self,
        input_ids: torch.Tensor,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        is_first_iteration: bool = True,
    ) -> Any:
        """As the base class; `prefill_chunk_size` holds for embeddings and for the decoder of two as well, and chunks
        are rotated by the frequencies of the whole prompt."""
        if generation_config.prefill_chunk_size is None:
            return super()._prefill(  # type: ignore[misc]
                input_ids, generation_config, model_kwargs, is_first_iteration=is_first_iteration
            )
        if model_kwargs.get("cache") is None:
            raise ValueError("prefill_chunk_size needs a cache, which use_cache=False leaves out: drop one of the two")
        model: Any = self
        compiles = model._valid_auto_compile_criteria(model_kwargs, generation_config)
        forward = model.get_compiled_call(generation_config.compile_config) if compiles else model.__call__
        outputs = None
        for ids, length, part in self._prompt_chunks(input_ids, generation_config, model_kwargs, is_first_iteration):
            inputs = model.prepare_inputs_for_generation(
                ids, next_sequence_length=length, is_first_iteration=is_first_iteration, **part
            )
            outputs = forward(**inputs, return_dict=True)
            model_kwargs["cache"] = outputs.cache
        return outputs

    def _prompt_chunks(
        self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any], is_first_iteration: bool
    ) -> Iterator[tuple[torch.Tensor, int, dict[str, Any]]]:
        """Of each chunk the ids [batch, up to its end], its length, and the arguments as they are at its end."""
        both = self.config.is_encoder_decoder
        embeds = model_kwargs.get("inputs_embeds") if is_first_iteration and not both else None
        columns = (input_ids if embeds is None else embeds).shape[1]
        mask, cache = self._own_mask(model_kwargs), model_kwargs["cache"]
        # Behind a cache, a prompt comes whole or as what is new alone.
        told = columns if both else getattr(generation_config, "_mask_length", columns)  # of a mask of ones
        width = told if mask is None else mask.shape[1]
        past = cache.get_seq_length()
        begin = past if width == columns else 0
        turning: dict[str, Any] = {}
        if self.model.positions.turning:
            lengths = mask.sum(-1) if mask is not None else input_ids.new_full((len(input_ids),), width)
            before = getattr(cache, "rotated_for", None) if past else None
            if before is not None and frequencies_turn(self.model.positions.turning, before, lengths[:, None]).any():
                begin, model_kwargs["cache"] = 0, None  # computed anew
            turning = {"text_lengths": lengths}
        # Which of these there are differs by shape; all end with the last token of the prompt.
        long = ("attention_mask", "position_ids", "token_type_ids", "inputs_embeds")
        names = ("decoder_attention_mask", "decoder_position_ids") if both else long
        for start in range(begin, columns, generation_config.prefill_chunk_size):
            end = min(start + generation_config.prefill_chunk_size, columns)
            part = model_kwargs | turning
            for name in names:
                if isinstance(value := part.get(name), torch.Tensor) and value.dim() in (2, 3):
                    part[name] = value.narrow(1, 0, value.shape[1] - (columns - end))
            yield input_ids[:, :end], end - start, part
