"""What the models return."""

from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache
from transformers.modeling_outputs import ModelOutput


@dataclass
class AnyformerModelOutput(ModelOutput):
    """Of a body. `past_key_values` is another name of `cache`.

    Attributes:
        last_hidden_state: [batch, length, hidden_size]; of an encoder-decoder, the decoder's.
        pooler_output: [batch, hidden_size].
        hidden_states, attentions, cross_attentions: of each layer, where asked for.
        router_logits: [batch * length, experts] of each sparse layer, where asked for; the encoder's come first.
        encoder_*, decoder_*: of an encoder-decoder.
    """

    last_hidden_state: torch.Tensor | None = None
    cache: Cache | None = None
    pooler_output: torch.Tensor | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class AnyformerHeadOutput(ModelOutput):
    """Of a head; the rest as in `AnyformerModelOutput`.

    Attributes:
        loss: with labels.
        logits: [batch, length, vocab_size], [batch, length, labels] or [batch, labels]; None, as `prediction_logits`,
            where a language model in training computes its loss in chunks (`config.loss_chunk_size`).
        start_logits, end_logits: [batch, length], of an extractive question-answering head.
        prediction_logits, seq_relationship_logits: [batch, length, vocab_size] and [batch, 2] of the pretraining head.
        aux_loss: the load-balancing loss, which `loss` holds times `router_aux_loss_coef`.
        z_loss: in training mode, the mean of log(Z)^2, which `loss` holds times `z_loss_coef`; without gradient.
        last_hidden_state: [batch, length, hidden_size], what the head of a decoder reads, where asked for.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    start_logits: torch.Tensor | None = None
    end_logits: torch.Tensor | None = None
    prediction_logits: torch.Tensor | None = None
    seq_relationship_logits: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    z_loss: torch.Tensor | None = None
    cache: Cache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    cross_attentions: tuple[torch.Tensor, ...] | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    decoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    decoder_attentions: tuple[torch.Tensor, ...] | None = None
    encoder_last_hidden_state: torch.Tensor | None = None
    encoder_hidden_states: tuple[torch.Tensor, ...] | None = None
    encoder_attentions: tuple[torch.Tensor, ...] | None = None
    last_hidden_state: torch.Tensor | None = None
