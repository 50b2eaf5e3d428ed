"""The bodies: `AnyformerModel` for every shape. What all classes share: `pretrained.py`; heads: `heads.py`.

Experts: @use_experts_implementation (the library looks for this word in the file of a class).
"""

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, ModelOutput
from transformers.utils import can_return_tuple, logging
from transformers.utils.generic import is_flash_attention_requested, merge_with_config_defaults
from transformers.utils.import_utils import is_tracing
from transformers.utils.output_capturing import capture_outputs, maybe_install_capturing_hooks

from .cache_layers import held_by
from .configuration_anyformer import AnyformerConfig
from .flat_step import flat_layers, run_flat
from .growing_cache import GrowingCache
from .masks import (
    attention_masks,
    check_width,
    lengths_of,
    mask_of_source,
    packed_documents,
    packed_lengths,
    positions_behind_prefix,
    positions_for_bias,
    positions_of,
    same_document,
)
from .mla import LatentAttention  # noqa: F401  registers the attention
from .norms import build_norm
from .outputs import AnyformerModelOutput
from .paged import is_paged, paged_positions
from .paged_attention import RequestBatch
from .positions import frequencies_turn
from .pretrained import AnyformerPreTrainedModel
from .registry import LAYERS, POSITION_EMBEDDINGS

logger = logging.get_logger(__name__)


class AnyformerStack(AnyformerPreTrainedModel):
    """Embeddings, layers and final norm of a decoder or an encoder.

    Args:
        layers: how many.
        causal: tokens see only those before them.
        crosses: the layers look at an encoder's output too.
    """

    def __init__(self, config: AnyformerConfig, layers: int, causal: bool, crosses: bool = False) -> None:
        super().__init__(config)
        self.causal = causal
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        # A padding row stays zero and is not trained; one that also starts or ends texts must be.
        shared = config.pad_token_id in (*ends, config.bos_token_id)
        padding = None if shared else config.pad_token_id
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, padding)
        self.token_type_embeddings = None
        if config.type_vocab_size:
            self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.positions = POSITION_EMBEDDINGS[config.position_embedding](config, causal)
        self.embed_norm = build_norm(config) if config.embedding_norm else nn.Identity()
        self.embed_dropout = nn.Dropout(config.embedding_dropout)
        layer = LAYERS[config.norm_position]
        self.layers = nn.ModuleList(layer(config, i, causal, crosses) for i in range(layers))
        self.norm = build_norm(config) if config.final_norm else nn.Identity()
        self.gradient_checkpointing = False

    def embed(
        self, input_ids: Any, inputs_embeds: Any, token_type_ids: Any, position_ids: torch.Tensor
    ) -> torch.Tensor:
        """Token embeddings [batch, length, hidden_size] with everything that is added to them."""
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if self.config.embedding_multiplier != 1:
            # Rounded as a weight of this type would be, which is what checkpoints were trained with.
            hidden_states = hidden_states * torch.tensor(self.config.embedding_multiplier, dtype=hidden_states.dtype)
        hidden_states = self.positions.embed(hidden_states, position_ids)
        if self.token_type_embeddings is not None:
            if token_type_ids is None:
                token_type_ids = torch.zeros(hidden_states.shape[:2], dtype=torch.long, device=hidden_states.device)
            hidden_states = hidden_states + self.token_type_embeddings(token_type_ids)
        return self.embed_dropout(self.embed_norm(hidden_states))

    def position_biases(
        self,
        hidden_states: torch.Tensor,
        attention_mask: Any,
        cache: Any,
        position_ids: torch.Tensor,
        masks: dict[str, Any],
        behind: torch.Tensor | None,
        paging: dict[str, Any],
    ) -> dict[str, torch.Tensor]:
        """What positions add to the scores, by layer type; empty for most kinds.

        Args:
            masks: those made of `attention_mask`, by layer type.
            behind: see `positions_behind_prefix`.
            paging: what comes with a paged cache.
        """
        biases: dict[str, torch.Tensor] = {}
        if not self.positions.adds_bias:
            return biases
        layer: Any
        for index, layer in enumerate(self.layers):
            kind = layer.layer_type
            if kind in biases:
                continue
            if isinstance(cache, RequestBatch):
                pair = cache.positions(kind)
            elif is_paged(cache):
                ends = paging["cu_seq_lens_q"], paging["cu_seq_lens_k"][kind]
                pair = paged_positions(position_ids, *ends, masks[kind].shape[-1])
            else:
                pair = positions_for_bias(index, hidden_states, attention_mask, cache, behind)
            biases[kind] = self.positions.bias(*pair).to(hidden_states.dtype)  # once for all layers
        return biases

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        encoder_attention_mask: torch.Tensor | None = None,
        encoder_documents: torch.Tensor | None = None,
        text_lengths: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> AnyformerModelOutput:
        """See `AnyformerModel.forward`, and:

        Args:
            encoder_hidden_states: [batch, source, hidden_size], what is looked at.
            encoder_documents: [batch, source], numbers of the documents packed into the source.
            text_lengths: [batch], tokens of each text once all its parts are there, where it comes in parts: what
                frequencies that turn with the length go by; default: what there is so far.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids and inputs_embeds")
        shaped = input_ids[..., None] if inputs_embeds is None else inputs_embeds
        if position_ids is None and not {"cu_seq_lens_q", "seq_idx"}.isdisjoint(kwargs):
            raise ValueError(
                "cu_seq_lens_q or seq_idx tell of packed documents: pass position_ids that start again with each"
            )
        packed, behind = packed_documents(position_ids, attention_mask, shaped), None
        if cache is not None and (packed is None or is_tracing(packed) or is_paged(cache)):
            packed = None  # the paged cache keeps documents apart by itself
        elif cache is not None:
            behind = positions_behind_prefix(position_ids, packed, cache)
        if packed is not None and is_flash_attention_requested(self.config):
            if behind is not None or encoder_hidden_states is not None:
                raise ValueError(
                    "Flash attention reads packed documents one after another, without a prefix or an encoder: use "
                    "attn_implementation='sdpa'"
                )
            kwargs = packed_lengths(packed, attention_mask) | kwargs
        # While tracing, `packed` may be one document: it says nothing about whether a cache is of use.
        if self.causal and use_cache and cache is None and (packed is None or is_tracing(packed)):
            cache = self.new_cache(encoder_hidden_states is not None)
        if encoder_hidden_states is not None and isinstance(cache, DynamicCache):  # keys of the decoder, as a prefix
            cache = EncoderDecoderCache(cache, DynamicCache())
        counted = position_ids is None
        # The paged cache knows no one length.
        past: Any = cache.get_seq_length() if cache is not None and not is_paged(cache) else 0
        if counted or getattr(attention_mask, "ndim", 0) == 2:
            check_width(attention_mask, past, shaped)
            if counted:
                position_ids = positions_of(attention_mask, past, shaped)
        # Of the paged cache nothing that is too long asks (see `add_request`), and to look would make a device wait.
        if not is_tracing(position_ids) and not is_paged(cache):
            # Positions that were handed in could be any; a single one is the next, as `generate` counts.
            known = isinstance(past, int) and (counted or shaped.shape[1] == 1)
            self.positions.check(position_ids, past + shaped.shape[1] if known else None)

        together: Any = None
        if is_paged(cache) and RequestBatch.fits(position_ids, kwargs):
            together = RequestBatch(cache, position_ids, kwargs)
            cache = together
            input_ids, position_ids, attention_mask, kwargs = input_ids.T, together.position_ids, together.masks, {}
        hidden_states = self.embed(input_ids, inputs_embeds, token_type_ids, position_ids)
        masks = attention_mask
        if not isinstance(masks, dict):
            types = {str(layer.layer_type) for layer in self.layers}
            masks = attention_masks(
                self.config, types, hidden_states, attention_mask, cache, packed, self.causal, behind
            )
            if "cu_seq_lens_q" in kwargs and is_flash_attention_requested(self.config):
                masks = dict.fromkeys(types)  # what is real, the lengths say
        if encoder_hidden_states is not None:
            same = same_document(packed, encoder_documents)
            encoder_attention_mask = mask_of_source(
                self.config, hidden_states, encoder_attention_mask, encoder_hidden_states, same
            )
        lengths = None
        if self.positions.turning:
            lengths = lengths_of(position_ids, packed) if text_lengths is None else text_lengths[:, None]
            if cache is not None and not is_tracing(lengths):
                self._require_frequencies(cache, past, lengths)
        rotations = self.positions.rotations(hidden_states, position_ids, lengths)
        biases = self.position_biases(hidden_states, attention_mask, cache, position_ids, masks, behind, kwargs)
        # Only routers ask which tokens are real.
        token_mask = _token_mask(attention_mask, hidden_states) if self.config.num_experts else None
        held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if cache is not None and self._checkpoints():
            held, cache = held_by(cache), None  # computed twice, a layer would also write into it twice
        layer: Any
        flat = flat_layers(self, hidden_states, cache)
        if flat is not None:
            hidden_states = run_flat(flat, hidden_states, rotations, masks, cache)
        for index, layer in enumerate(() if flat is not None else self.layers):
            # What has a gradient goes in by position: reentrant checkpointing cuts only that off from the graph.
            hidden_states = layer(
                hidden_states,
                encoder_hidden_states,
                biases.get(layer.layer_type),
                *held.get(index, ()),
                attention_mask=masks,
                position_embeddings=rotations.get(layer.place),
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                encoder_attention_mask=encoder_attention_mask,
                token_mask=token_mask,
                **kwargs,
            )
        hidden_states = self.norm(hidden_states)
        if together is not None:
            hidden_states = hidden_states.transpose(0, 1)
        return AnyformerModelOutput(last_hidden_state=hidden_states, cache=cache)

    def _require_frequencies(self, cache: Any, past: Any, lengths: torch.Tensor) -> None:
        """Raises:
        ValueError: the cache holds keys that were rotated by other frequencies than texts of `lengths` [batch or 1, 1]
            have; a prefix that PEFT put there was not rotated.
        """
        before, turning = getattr(cache, "rotated_for", None) if past else None, self.positions.turning
        if before is not None and len(before) != len(lengths) and 1 not in (len(before), len(lengths)):
            # Rows were selected or repeated, and it is not known which are left.
            before = torch.stack((before.amin(), before.amax()))[:, None, None]
        if before is not None and frequencies_turn(turning, before, lengths).any():
            raise ValueError(
                f"beyond {min(turning)} tokens the rotary frequencies turn with the length of the text, and the cache "
                "holds keys of other ones: run the whole text anew, as `generate` does; where a text comes in parts, "
                "pass text_lengths with the first"
            )
        cache.rotated_for = lengths

    def _checkpoints(self) -> bool:
        """Whether a layer of this pass will be computed again in the backward pass."""
        layers: Any = self.layers
        return self.training and torch.is_grad_enabled() and any(layer.gradient_checkpointing for layer in layers)

    def new_cache(self, crosses: bool) -> Cache:
        """An empty cache; the encoder's keys and values are kept whole whatever window the decoder has."""
        # What an export knows is the library's own.
        own = DynamicCache(config=self.config) if is_tracing() else GrowingCache(self.config)
        return EncoderDecoderCache(own, DynamicCache()) if crosses else own


class AnyformerModel(AnyformerStack):
    """The body without a head: decoder, encoder, or encoder and decoder.

    Args:
        add_pooling_layer: False: leave out the pooler that the config asks for, because the head does not read it.
    """

    def __init__(self, config: AnyformerConfig, add_pooling_layer: bool = True) -> None:
        both = config.architecture == "encoder-decoder"
        super().__init__(config, config.num_hidden_layers, causal=config.architecture != "encoder", crosses=both)
        self.encoder = AnyformerStack(config, config.num_encoder_layers, causal=False) if both else None
        self.pooler = Pooler(config) if config.pooler and add_pooling_layer else None
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        position_ids: torch.Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        decoder_input_ids: torch.Tensor | None = None,
        decoder_attention_mask: torch.Tensor | dict[str, torch.Tensor] | None = None,
        decoder_inputs_embeds: torch.Tensor | None = None,
        decoder_position_ids: torch.Tensor | None = None,
        encoder_outputs: BaseModelOutput | tuple | None = None,
        use_cache: bool | None = None,
        past_key_values: Cache | None = None,
        **kwargs: Any,
    ) -> AnyformerModelOutput:
        """Run the body.

        Args:
            input_ids: [batch, length]; or `inputs_embeds`: [batch, length, hidden_size].
            attention_mask: [batch, past + length], 1 for real tokens; a 4-D mask, or a dict of them by layer type,
                is taken as it is. Padding may stand on either side.
            position_ids: [batch, length]; default: counted over the real tokens of `attention_mask`. Positions that
                start again mark packed documents, which do not see each other; the first document of a decoder sees
                the first of its source, and so on; where all go on from the same cached prefix, their positions
                start behind it. "alibi" and "relative" know distances in the row alone.
            token_type_ids: [batch, length], where the config has token types; default 0.
            decoder_input_ids, decoder_attention_mask, decoder_inputs_embeds, decoder_position_ids: the same for the
                decoder of an encoder-decoder, whose encoder reads the arguments above.
            encoder_outputs: what the encoder gave, to be used instead of running it.
            text_lengths: among `kwargs`, where a text comes in parts: see `AnyformerStack.forward`.
            cache, past_key_values: the key/value cache, under its new or its old name.

        Returns:
            `last_hidden_state` [batch, length, hidden_size] (the decoder's, where there are both), `cache` (also
            `past_key_values`), `pooler_output` [batch, hidden_size] with a pooler.
        """
        cache = one_cache(cache, past_key_values)
        if self.encoder is None:
            outputs = super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                inputs_embeds=inputs_embeds,
                token_type_ids=token_type_ids,
                use_cache=use_cache,
                **kwargs,
            )
            if self.pooler is not None:
                outputs["pooler_output"] = self.pooler(outputs.last_hidden_state, attention_mask)
            return outputs
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                inputs_embeds=inputs_embeds,
                **kwargs,
            )
        encoded = encoder_outputs[0]  # [batch, source, hidden_size]
        documents = packed_documents(position_ids, attention_mask, encoded)
        self._record_decoder_alone()
        outputs = super().forward(
            input_ids=decoder_input_ids,
            attention_mask=decoder_attention_mask,
            position_ids=decoder_position_ids,
            cache=cache,
            inputs_embeds=decoder_inputs_embeds,
            encoder_hidden_states=encoded,
            encoder_attention_mask=attention_mask,
            encoder_documents=documents,
            use_cache=use_cache,
            **kwargs,
        )
        return _with_encoder(outputs, encoder_outputs)

    def _record_decoder_alone(self) -> None:
        """Install the hooks that record outputs, but not in the encoder: it has its own, and would record twice."""
        if not getattr(self, "_output_capturing_hooks_installed", False) and not torch.compiler.is_compiling():
            encoder, self._modules["encoder"] = self._modules["encoder"], None
            try:
                maybe_install_capturing_hooks(self)
            finally:
                self._modules["encoder"] = encoder


class Pooler(nn.Module):
    """tanh(W x) of the first real token (BERT, arXiv:1810.04805, sec. 3.1)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        """[batch, length, hidden_size] -> [batch, hidden_size]."""
        return torch.tanh(self.dense(pool(hidden_states, attention_mask, "first")))


def pool(hidden_states: torch.Tensor, attention_mask: Any, which: str) -> torch.Tensor:
    """The first or last real token's state, or the mean of all real ones: [batch, length, size] -> [batch, size]."""
    batch, length = hidden_states.shape[:2]
    mask = _token_mask(attention_mask, hidden_states)
    if mask is None:
        mask = torch.ones(batch, length, dtype=torch.bool, device=hidden_states.device)
    if which == "mean":
        weight = mask.to(hidden_states.dtype)[..., None]
        return (hidden_states * weight).sum(1) / weight.sum(1).clamp(min=1)
    index = torch.arange(length, device=mask.device)
    # A row without a real token gives its outermost state: finite, and nothing is learned from it.
    at = (index * mask).argmax(-1) if which == "last" else mask.long().argmax(-1)
    return hidden_states[torch.arange(batch, device=at.device), at]


def one_cache(cache: Cache | None, past_key_values: Cache | None) -> Cache | None:
    """The cache under its new or its old name.

    Raises:
        ValueError: both are given and differ.
    """
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache and past_key_values name the same argument: pass one of them")
    return past_key_values if cache is None else cache


def _token_mask(attention_mask: Any, hidden_states: torch.Tensor) -> torch.Tensor | None:
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 2:
        return attention_mask[:, -hidden_states.shape[1] :].to(hidden_states.device).bool()
    return None


def _with_encoder(outputs: AnyformerModelOutput, encoder_outputs: Any) -> AnyformerModelOutput:
    """The decoder's outputs under the names of an encoder-decoder, and the encoder's beside them."""
    encoder: Any = encoder_outputs if isinstance(encoder_outputs, ModelOutput) else BaseModelOutput(*encoder_outputs)
    return AnyformerModelOutput(
        last_hidden_state=outputs.last_hidden_state,
        cache=outputs.cache,
        decoder_hidden_states=outputs.hidden_states,
        decoder_attentions=outputs.attentions,
        cross_attentions=outputs.cross_attentions,
        encoder_last_hidden_state=encoder.last_hidden_state,
        encoder_hidden_states=encoder.hidden_states,
        encoder_attentions=encoder.attentions,
        router_logits=(*(getattr(encoder, "router_logits", None) or ()), *(outputs.router_logits or ())) or None,
    )
