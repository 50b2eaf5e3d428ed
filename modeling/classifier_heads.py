"""Heads that label texts, tokens and spans.

Experts: @use_experts_implementation (the library looks for this word in the file of a class).
"""

from typing import Any

import torch
from torch import nn
from transformers.utils import can_return_tuple

from .configuration_anyformer import AnyformerConfig
from .head_base import AnyformerHead, shift_right
from .losses import (
    IGNORED,
    problem_type_of,
    sequence_classification_loss,
    token_loss,
)
from .modeling_anyformer import one_cache, pool
from .outputs import AnyformerHeadOutput, AnyformerModelOutput


class ClassifierHead(AnyformerHead):
    """A linear layer over hidden states; of an encoder-decoder, those of its decoder reading the text shifted right."""

    def __init__(self, config: AnyformerConfig, pooled: bool = False) -> None:
        super().__init__(config, pooled)
        dropout = config.hidden_dropout if config.classifier_dropout is None else config.classifier_dropout
        self.dropout = nn.Dropout(dropout)

    def _run(
        self, input_ids: Any, attention_mask: Any, labels: Any, kwargs: dict[str, Any]
    ) -> tuple[AnyformerModelOutput, list[Any]]:
        """The body's outputs, and the masks that its routers saw."""
        if self.config.is_encoder_decoder and kwargs.get("decoder_input_ids") is None:
            if input_ids is None:
                raise ValueError("a classifier on an encoder-decoder needs input_ids: its decoder reads them too")
            kwargs["decoder_input_ids"] = shift_right(input_ids, self.config, attention_mask)
            kwargs["decoder_attention_mask"] = attention_mask
        kwargs["cache"] = one_cache(kwargs.pop("cache", None), kwargs.pop("past_key_values", None))
        outputs = self.model(
            input_ids=input_ids, attention_mask=attention_mask, **self._router_arguments(labels, kwargs)
        )
        both = [attention_mask, kwargs.get("decoder_attention_mask")]
        return outputs, both if self.config.is_encoder_decoder else both[:1]


class AnyformerForSequenceClassification(ClassifierHead):
    """One set of logits for a text: a classifier, or with `num_labels` 1 a reward model."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config, pooled=config.classifier_pooling == "first")
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=config.classifier_bias)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`, and:

        Args:
            labels: [batch] classes (several labels: [batch, labels] of 0 and 1; one label: [batch] values).

        Returns:
            `logits` [batch, labels], read at the first or last real token, or their mean, as `classifier_pooling`
            says, on either padding side. Without a mask, the last one is the last that is not `pad_token_id`.
        """
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        outputs, masks = self._run(input_ids, attention_mask, labels, kwargs)
        which, mask = self.config.classifier_pooling, attention_mask
        if which == "last" and mask is None and input_ids is not None and self.config.pad_token_id is not None:
            mask = (input_ids != self.config.pad_token_id).long()
        pooled = outputs.pooler_output if which == "first" else None
        if pooled is None:
            pooled = pool(outputs.last_hidden_state, mask, which)
        logits = self.score(self.dropout(pooled))
        loss = extra = None
        if labels is not None:
            kind = self.config.problem_type or problem_type_of(self.num_labels, labels)
            loss = sequence_classification_loss(logits, labels, kind, num_items_in_batch)
            loss, extra = self._add_router_losses(loss, outputs, masks, labels.numel(), num_items_in_batch)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra)


class AnyformerForTokenClassification(ClassifierHead):
    """Logits for each token."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`; `labels` [batch, length], -100 for none. `logits` [batch, length, labels]."""
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        outputs, masks = self._run(input_ids, attention_mask, labels, kwargs)
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = extra = None
        if labels is not None:
            loss = token_loss(logits, labels, num_items_in_batch)
            items = (labels != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, masks, items, num_items_in_batch)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra)


class AnyformerForQuestionAnswering(ClassifierHead):
    """Where an answer starts and ends in the text (BERT, arXiv:1810.04805, sec. 4.2)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        end_positions: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`, and:

        Args:
            start_positions, end_positions: [batch], first and last token of the answer; outside the text: none.

        Returns:
            `start_logits` and `end_logits` [batch, length], and the mean of both losses.
        """
        kwargs |= {"position_ids": position_ids, "past_key_values": past_key_values, "inputs_embeds": inputs_embeds}
        outputs, masks = self._run(input_ids, attention_mask, start_positions, kwargs)
        start, end = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = extra = None
        if start_positions is not None and end_positions is not None:
            length = start.shape[-1]
            halves = []
            for logits, positions in ((start, start_positions), (end, end_positions)):
                inside = (positions >= 0) & (positions < length)
                halves.append(token_loss(logits, positions.masked_fill(~inside, IGNORED), num_items_in_batch))
            loss = (halves[0] + halves[1]) / 2
            loss, extra = self._add_router_losses(loss, outputs, masks, len(start), num_items_in_batch)
        return self._output(outputs, loss=loss, start_logits=start, end_logits=end, aux_loss=extra)
