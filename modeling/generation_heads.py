"""Heads that generate: decoders and encoder-decoders.

Experts: @use_experts_implementation (the library looks for this word in the file of a class).
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation import GenerationMixin
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple

from .cache_layers import CroppableEncoderDecoderCache
from .configuration_anyformer import AnyformerConfig
from .generation_checks import check_asked
from .growing_cache import GrowingCache
from .head_base import shift_right
from .inference import GENERATION
from .language_heads import LanguageModelHead
from .long_texts import LongTextGeneration
from .losses import (
    IGNORED,
    causal_lm_loss,
    next_tokens,
)
from .masks import REAL_INDICES, attention_masks, real_indices
from .modeling_anyformer import one_cache
from .outputs import AnyformerHeadOutput
from .paged import PagedGeneration
from .positions import frequencies_turn
from .quantized_cache import Int8Cache
from .registry import POSITION_EMBEDDINGS
from .soft_prompts import SoftPromptGeneration
from .speculative_generation import SpeculativeGeneration

# What moves to the host's memory layer by layer, and what the same is where it is there already.
ON_THE_HOST = {"offloaded": "dynamic", "offloaded_static": "static"}


class GenerationHead(
    LanguageModelHead,
    PagedGeneration,
    LongTextGeneration,
    SoftPromptGeneration,
    SpeculativeGeneration,
    GenerationMixin,
):
    """What `generate` needs of a head."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; what can be nothing is refused first, see `check_asked`."""
        if not GENERATION.texts:  # a draft model is asked again for every draft, with tokens that were looked at
            check_asked(self, args, kwargs)
        with GENERATION.begun():
            return super().generate(*args, **kwargs)

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As the base class, with the cache under the name that PEFT's prompt learning still reads.

        `inputs_embeds` stands in the signature because `generate` looks for it there.
        """
        mask = kwargs.get("decoder_attention_mask")
        if self.config.is_encoder_decoder and isinstance(mask, torch.Tensor) and mask.dim() == 2:
            # A static cache gets its masks built ahead, in which the padding of a prompt can no longer be counted.
            kwargs["decoder_position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        if inputs_embeds is None and self._frequencies_turn(args[0] if args else kwargs["input_ids"], kwargs):
            # All is computed anew: once for longrope, at every step for dynamic.
            kwargs |= {"cache": None, "next_sequence_length": None}
        inputs = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        if "cache" in inputs:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs

    def _frequencies_turn(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        """Whether what is cached was rotated by other frequencies than a text gets that is as long as one is now.

        Raises:
            ValueError: so it is, and the tokens that were cached are not there to be rotated anew.
        """
        cache, turning = kwargs.get("cache"), self.model.positions.turning
        if not turning or cache is None or kwargs.get("text_lengths") is not None:
            return False
        mask = kwargs.get("decoder_attention_mask" if self.config.is_encoder_decoder else "attention_mask")
        past, virtual = cache.get_seq_length(), self.virtual_tokens()
        if not past:
            return False
        if mask is None:
            mask = torch.ones_like(input_ids)
        before, now = (mask[:, :end].sum(-1) + virtual for end in (past - virtual, mask.shape[1]))  # [batch]
        turned = bool(frequencies_turn(turning, before, now).any())
        if turned and input_ids.shape[1] < mask.shape[1]:
            raise ValueError(
                f"the text grows beyond {min(turning)} tokens, where its rotary frequencies turn: give `generate` the "
                "whole text, not only what is new behind the cache"
            )
        return turned

    @staticmethod
    def create_masks_for_generate(
        config: AnyformerConfig, inputs_embeds: torch.Tensor, attention_mask: Any, cache: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Masks ahead of a compiled step: the library's function does not know every layer type."""
        own = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
        masks = attention_masks(config, config.layer_types, inputs_embeds, attention_mask, own)
        positions: Any = POSITION_EMBEDDINGS[config.position_embedding]
        # Only biases ask for distances once the masks are there.
        counted = real_indices(attention_mask) if positions.adds_bias else None
        return masks if counted is None else {**masks, REAL_INDICES: counted}

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """As the base class: the dynamic cache grows in place, nothing is moved off a CPU to a CPU, and "quantized"
        is in 8 bits where `cache_config` names no backend."""
        # Where `max_length` counts the prompt too, its share is not known here.
        GENERATION.expect(generation_config.max_new_tokens or 0)
        given, kind = model_kwargs.get("cache"), generation_config.cache_implementation
        in_8_bits = given is None and kind == "quantized" and "backend" not in (generation_config.cache_config or {})
        if in_8_bits and generation_config.cache_config:
            raise ValueError(
                f"cache_config={generation_config.cache_config} names no backend, and without one the cache is in 8 "
                "bits and has no options: add 'backend', which is 'quanto', 'hqq' or 'fp8'"
            )
        if in_8_bits or (given is None and self.device.type == "cpu" and kind in ON_THE_HOST):
            generation_config.cache_implementation = ON_THE_HOST.get(kind, "dynamic")
        super()._prepare_cache_for_generation(
            generation_config, model_kwargs, generation_mode, batch_size, max_cache_length
        )
        cache = model_kwargs.get("cache")
        if cache is None or cache is given:
            return
        own, both = cache, isinstance(cache, EncoderDecoderCache)
        if both:
            own = cache.self_attention_cache
        if in_8_bits:
            own = Int8Cache(self.config)
        elif type(own) is DynamicCache and not own.offloading:
            own = GrowingCache(self.config, longest=max_cache_length)
        if generation_config.is_assistant:  # the tokens that are refused are taken back
            own.activate_past_recording()
        # The library sizes the encoder's part by the decoder's windows, which would cut its keys.
        model_kwargs["cache"] = CroppableEncoderDecoderCache(own, DynamicCache()) if both else own


class AnyformerForCausalLM(GenerationHead):
    """A decoder that predicts the next token."""

    shapes = ("decoder",)

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.loss_function = causal_lm_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`, and:

        Args:
            labels: [batch, length], -100 where nothing is to be learned; shifted here.
            logits_to_keep: positions whose logits are wanted: 0 for all, n for the last n, or indices.
            kwargs: `output_last_hidden_state`: return the states [batch, length, hidden_size] that the head reads too.

        Returns:
            `logits` [batch, kept, vocab_size] (None where the loss is computed in chunks: see
            `AnyformerConfig.loss_chunk_size`), `cache`, and with labels `loss`, divided by `num_items_in_batch`
            where the trainer passes it.
        """
        wants_states = kwargs.pop("output_last_hidden_state", False)
        targets = kwargs.get("shift_labels") if labels is None else labels[:, 1:]
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **self._router_arguments(targets, kwargs),
        )
        kept = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        total = kwargs.get("num_items_in_batch")
        loss = logits = extra = z = None
        # A loss function that somebody has put in its place wants logits.
        if targets is not None and self._chunks(kept) and self.loss_function is causal_lm_loss:
            pairs = next_tokens(kept, labels, kwargs.get("shift_labels"))
            loss, z = self._chunked_loss(*pairs, total, kwargs.get("ignore_index", IGNORED))
        else:
            logits = self.logits_of(kept)
            if targets is not None:
                loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
                pairs = next_tokens(logits, labels, kwargs.get("shift_labels"))
                loss, z = self._with_z_loss(loss, *pairs, total, kwargs.get("ignore_index", IGNORED))
        if targets is not None:
            items = (targets != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, [attention_mask], items, total)
        states = outputs.last_hidden_state if wants_states else None
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra, z_loss=z, last_hidden_state=states)


class AnyformerForConditionalGeneration(GenerationHead):
    """An encoder-decoder that predicts the next token of its decoder."""

    shapes = ("encoder-decoder",)

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels: torch.Tensor) -> torch.Tensor:
        """Labels one place to the right behind `decoder_start_token_id`; -100 becomes the padding token."""
        return shift_right(labels, self.config)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        encoder_outputs: Any = None,
        cache: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Any = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`, and:

        Args:
            labels: [batch, length] of the decoder, -100 where nothing is to be learned. Without `decoder_input_ids`
                these are the labels shifted right, so that the decoder predicts each label from those before it.

        Returns:
            `logits` [batch, kept, vocab_size], `cache`, and with labels `loss`, as `AnyformerForCausalLM.forward`.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            if labels is None:
                raise ValueError("Pass decoder_input_ids, decoder_inputs_embeds or labels: the decoder has no input")
            decoder_input_ids = shift_right(labels, self.config)
            if decoder_attention_mask is None and self.config.num_experts:
                # Routers would count the padding behind the last label.
                targets = (labels != IGNORED).long()
                decoder_attention_mask = targets.flip(-1).cummax(-1).values.flip(-1)
                if (held := one_cache(cache, past_key_values)) is not None:  # the prefix of prefix tuning
                    seen = int(held.get_seq_length())
                    decoder_attention_mask = nn.functional.pad(decoder_attention_mask, (seen, 0), value=1)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            decoder_attention_mask=decoder_attention_mask,
            decoder_position_ids=decoder_position_ids,
            encoder_outputs=encoder_outputs,
            cache=one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            decoder_inputs_embeds=decoder_inputs_embeds,
            use_cache=use_cache,
            **self._router_arguments(labels, kwargs),
        )
        kept = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        loss, logits, z = self._loss_and_logits(kept, labels, num_items_in_batch)
        extra = None
        if labels is not None:
            masks, items = [attention_mask, decoder_attention_mask], (labels != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, masks, items, num_items_in_batch)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra, z_loss=z)
