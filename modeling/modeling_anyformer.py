"""The models: `AnyformerModel` and its heads."""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs

from .attention import AnyformerAttention
from .configuration_anyformer import AnyformerConfig
from .layers import AnyformerLayer
from .losses import causal_lm_loss
from .mlp import DenseMLP, GatedMLP  # noqa: F401  registers the feed-forward blocks
from .norms import build_norm
from .positions import RotaryPositions
from .registry import LAYERS, POSITION_EMBEDDINGS


class AnyformerPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation, common to all heads."""

    config: AnyformerConfig
    config_class = AnyformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": AnyformerLayer,
        "attentions": AnyformerAttention,
    }

    def __init__(self, config: AnyformerConfig, *inputs: Any, **kwargs: Any) -> None:
        config.validate()  # fields may have been set since the config was constructed
        super().__init__(config, *inputs, **kwargs)
        self._no_split_modules = [LAYERS[config.norm_position].__name__]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RotaryPositions):
            module.reset_buffers()

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any):
        """As the base class, but a weight that the checkpoint lacks is an error, never a random tensor.

        Raises:
            ValueError: names the absent weights; for an absent head also the flag `tie_word_embeddings`.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        missing = sorted(info["missing_keys"])
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            hint = ""
            if "lm_head.weight" in missing:
                hint = (
                    f" config.tie_word_embeddings is {model.config.tie_word_embeddings}: set it to true if the head "
                    "shares the input embedding."
                )
            raise ValueError(f"The checkpoint has no weights for {shown}.{hint}")
        if model.config.tie_word_embeddings:
            model._untie_if_head_differs()
        return (model, info) if output_loading_info else model

    def _untie_if_head_differs(self) -> None:
        """Make the config say what the loader did with a tied config over a checkpoint that has another head."""
        head, embedding = self.get_output_embeddings(), self.get_input_embeddings()
        if head is not None and head.weight is not embedding.weight:
            self.config.tie_word_embeddings = False


class AnyformerModel(AnyformerPreTrainedModel):
    """The decoder without a head."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_dropout = nn.Dropout(config.embedding_dropout)
        self.rotary_emb = POSITION_EMBEDDINGS[config.position_embedding](config)
        layer = LAYERS[config.norm_position]
        self.layers = nn.ModuleList(layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = build_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder.

        Args:
            input_ids: [batch, length]; or `inputs_embeds`: [batch, length, hidden_size].
            attention_mask: [batch, past + length], 1 for real tokens; a 4-D mask, or a dict of them by layer type,
                is taken as it is. Padding may stand on either side.
            position_ids: [batch, length]; default: counted over the real tokens of `attention_mask`. Positions that
                start again mark packed documents, which do not see each other.
            cache, past_key_values: the key/value cache, under its new or its old name.

        Returns:
            `last_hidden_state` [batch, length, hidden_size] and `cache` (also `past_key_values`).
        """
        cache = _one_cache(cache, past_key_values)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)  # [batch, length, hidden_size]

        if position_ids is None and not {"cu_seq_lens_q", "seq_idx"}.isdisjoint(kwargs):
            raise ValueError(
                "cu_seq_lens_q or seq_idx tell of packed documents: pass position_ids that start again with each"
            )
        packed = _packed_documents(position_ids, attention_mask, inputs_embeds)
        if cache is not None:
            # The paged cache, which alone comes with cu_seq_lens_q, keeps documents apart by itself.
            if packed is not None and not is_tracing(packed) and "cu_seq_lens_q" not in kwargs:
                raise ValueError("Packed documents (position_ids that start again) cannot follow a cache: drop one")
            packed = None
        # While tracing, `packed` may be one document: it says nothing about whether a cache is of use.
        if use_cache and cache is None and (packed is None or is_tracing(packed)):
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            position_ids = _positions(attention_mask, past, inputs_embeds)

        if isinstance(attention_mask, dict):
            mask = attention_mask["full_attention"]
        else:
            mask = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=None if packed is not None else position_ids,
                and_mask_function=None if packed is None else packed_sequence_mask_function(packed),
            )

        hidden_states = self.embed_dropout(inputs_embeds)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer in self.layers[: self.config.num_hidden_layers]:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), cache=cache)


class AnyformerForCausalLM(AnyformerPreTrainedModel, GenerationMixin):
    """The decoder with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.model = AnyformerModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)
        self.loss_function = causal_lm_loss
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As `AnyformerModel.forward`, and:

        Args:
            labels: [batch, length], -100 where nothing is to be learned; shifted here.
            logits_to_keep: positions whose logits are wanted: 0 for all, n for the last n, or indices.

        Returns:
            `logits` [batch, kept, vocab_size], `cache`, and with labels `loss`, divided by `num_items_in_batch`
            where the trainer passes it.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=_one_cache(cache, past_key_values),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None or kwargs.get("shift_labels") is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def prepare_inputs_for_generation(
        self, *args: Any, inputs_embeds: torch.Tensor | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As the base class, with the cache under the name that PEFT's prompt learning still reads.

        `inputs_embeds` stands in the signature because `generate` looks for it there.
        """
        inputs = super().prepare_inputs_for_generation(*args, inputs_embeds=inputs_embeds, **kwargs)
        if "cache" in inputs:
            inputs["past_key_values"] = inputs.pop("cache")
        return inputs


def _one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values name the same argument: pass one of them")
    return past_key_values if cache is None else cache


def _positions(attention_mask: Any, past: int, inputs_embeds: torch.Tensor) -> torch.Tensor:
    """Positions [batch or 1, length] of the new tokens, counted over the real ones where a 2-D mask tells."""
    length = inputs_embeds.shape[1]
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]
    return torch.arange(past, past + length, device=inputs_embeds.device).unsqueeze(0)


def _packed_documents(
    position_ids: torch.Tensor | None, attention_mask: Any, inputs_embeds: torch.Tensor
) -> torch.Tensor | None:
    """The document number [batch, length] of each token, or None where no row holds more than one document.

    The library sees packing only without a mask and without a cache, and lets documents see each other otherwise.
    While tracing, where nothing may depend on values, the numbers always come.
    """
    batch, length = inputs_embeds.shape[:2]
    if position_ids is None or position_ids.dim() != 2 or length == 1:
        return None
    position_ids = position_ids.expand(batch, -1)
    starts = position_ids.diff(dim=-1) != 1  # [batch, length - 1]: token i + 1 starts a document
    if attention_mask is not None:
        if not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2:
            return None
        real = attention_mask[:, -length:].bool()
        index = torch.arange(length, device=real.device).expand_as(real)
        last = index.masked_fill(~real, 0).cummax(dim=-1).values[:, :-1]  # the real token before each
        # Across padding, positions may jump ahead within a document, but never back.
        restarts = (position_ids[:, 1:] <= position_ids.gather(-1, last)) & (real.cumsum(dim=-1)[:, :-1] > 0)
        starts = torch.where(real[:, :-1], starts, restarts) & real[:, 1:]
    if not is_tracing(starts) and not starts.any():
        return None
    return nn.functional.pad(starts.cumsum(dim=-1), (1, 0))
