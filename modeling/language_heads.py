"""Heads over the vocabulary: their base, and those of encoders.

Experts: @use_experts_implementation (the library looks for this word in the file of a class).
"""

from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.utils import can_return_tuple
from transformers.utils.import_utils import is_tracing

from .configuration_anyformer import AnyformerConfig
from .head_base import AnyformerHead
from .linear import project
from .losses import (
    IGNORED,
    Count,
    is_sharded,
    linear_cross_entropy,
    recomputed_cross_entropy,
    supervised_loss,
    token_loss,
    z_loss,
)
from .norms import build_norm
from .outputs import AnyformerHeadOutput
from .plain import is_plain


class LanguageModelHead(AnyformerHead):
    """A head over the vocabulary."""

    _tp_plan = {"lm_head": "colwise_gather_output"}  # noqa: RUF012
    _pp_plan = {"lm_head": (["hidden_states"], ["logits"])}  # type: ignore[dict-item]  # noqa: RUF012
    _fsdp_plan = {"lm_head": "keep_full_weight"}  # noqa: RUF012

    def __init__(self, config: AnyformerConfig, pooled: bool = False) -> None:
        super().__init__(config, pooled)
        self.lm_head_transform = HeadTransform(config) if config.head_transform else None
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)

    def logits_of(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> [..., vocab_size]."""
        return self._scaled(project(self.lm_head, self._transformed(hidden_states)))

    def _transformed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if self.lm_head_transform is None else self.lm_head_transform(hidden_states)

    def _scaled(self, logits: torch.Tensor) -> torch.Tensor:
        if self.config.logit_scale != 1:
            logits = logits * self.config.logit_scale
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _chunks(self, hidden_states: torch.Tensor) -> bool:
        """Whether a loss of hidden states [..., hidden_size] is computed without the logits of all of them."""
        if not self.training or not 0 < self.config.loss_chunk_size < hidden_states.shape[:-1].numel():
            return False
        parts = [part for part in (self.lm_head_transform, self.lm_head) if part is not None]
        return not is_tracing(hidden_states) and not any(is_sharded(part) for part in parts)

    def _chunked_loss(
        self, hidden_states: torch.Tensor, targets: torch.Tensor, items: Count, ignore_index: int = IGNORED
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`_with_z_loss` of the `token_loss` of hidden states [..., hidden_size], `config.loss_chunk_size` tokens at a
        time."""
        size, z_coef = self.config.loss_chunk_size, self.config.z_loss_coef

        def total_of(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            if is_plain(self.lm_head) and type(self).logits_of is LanguageModelHead.logits_of:
                return linear_cross_entropy(
                    self._transformed(states), targets, self.lm_head, self._scaled, size, z_coef
                )
            return recomputed_cross_entropy(states, targets, self.logits_of, size, z_coef)

        loss = supervised_loss(hidden_states, targets, total_of, items, ignore_index)
        return (loss[0], loss[1].detach()) if z_coef else (loss, None)

    def _with_z_loss(
        self, loss: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, items: Count, ignore_index: int = IGNORED
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A loss with `config.z_loss_coef` times the z-loss, and the z-loss alone without gradient; in training mode
        only, and None where there is none.

        Args:
            logits: [..., vocab_size] that belong to targets [...].
        """
        if not (self.training and self.config.z_loss_coef):
            return loss, None
        z = z_loss(logits, targets, items, ignore_index)
        return loss + self.config.z_loss_coef * z, z.detach()

    def _loss_and_logits(self, hidden_states: torch.Tensor, labels: Any, items: Count) -> tuple[Any, Any, Any]:
        """The loss of labels that stand beside the hidden states they belong to, the logits, and the z-loss; None for
        what is not.

        Args:
            hidden_states: [batch, length, hidden_size]. labels: [batch, length] or None.
            items: number of targets of the whole batch, or None.
        """
        if labels is not None and self._chunks(hidden_states):
            loss, z = self._chunked_loss(hidden_states, labels, items)
            return loss, None, z
        logits = self.logits_of(hidden_states)
        if labels is None:
            return None, logits, None
        loss, z = self._with_z_loss(token_loss(logits, labels, items), logits, labels, items)
        return loss, logits, z


class HeadTransform(nn.Module):
    """norm(act(W x)) before a masked-LM head (BERT, arXiv:1810.04805)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=config.head_transform_bias)
        self.act_fn = ACT2FN[config.hidden_act]
        self.norm = build_norm(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act_fn(project(self.dense, hidden_states)))


class AnyformerForMaskedLM(LanguageModelHead):
    """An encoder that predicts masked tokens."""

    shapes = ("encoder",)

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerModel.forward`; `labels` [batch, length] are -100 except at masked tokens.

        Returns:
            `logits` [batch, length, vocab_size], and with labels `loss`, as `AnyformerForCausalLM.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **self._router_arguments(labels, kwargs),
        )
        loss, logits, z = self._loss_and_logits(outputs.last_hidden_state, labels, num_items_in_batch)
        extra = None
        if labels is not None:
            items = (labels != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, [attention_mask], items, num_items_in_batch)
        return self._output(outputs, loss=loss, logits=logits, aux_loss=extra, z_loss=z)


class AnyformerForPreTraining(LanguageModelHead):
    """BERT's pair of objectives: masked tokens, and whether the second text follows the first (arXiv:1810.04805)."""

    shapes = ("encoder",)

    def __init__(self, config: AnyformerConfig) -> None:
        if not config.pooler:
            raise ValueError("AnyformerForPreTraining reads the pooler: set pooler=True in the config")
        super().__init__(config, pooled=True)
        self.nsp_head = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        next_sentence_label: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
        **kwargs: Any,
    ) -> AnyformerHeadOutput:
        """As `AnyformerForMaskedLM.forward`, and:

        Args:
            next_sentence_label: [batch], 0 where the second text follows the first, 1 where it does not.

        Returns:
            `prediction_logits` [batch, length, vocab_size] (as `logits` of `AnyformerForCausalLM.forward`),
            `seq_relationship_logits` [batch, 2], and the sum of the losses whose labels are given.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            **self._router_arguments(labels, kwargs),
        )
        loss, prediction, z = self._loss_and_logits(outputs.last_hidden_state, labels, num_items_in_batch)
        relation = self.nsp_head(outputs.pooler_output)
        extra = None
        if labels is not None:
            items = (labels != IGNORED).sum()
            loss, extra = self._add_router_losses(loss, outputs, [attention_mask], items, num_items_in_batch)
        if next_sentence_label is not None:
            targets = next_sentence_label.view(-1)
            if num_items_in_batch is None or labels is None:
                follows = token_loss(relation, targets)
            else:
                # A row weighs as its masked tokens do: of an accumulated batch a call knows no other share.
                each = nn.functional.cross_entropy(relation.float(), targets, reduction="none")  # [batch]
                follows = (each * (labels != IGNORED).sum(-1)).sum() / num_items_in_batch
            loss = follows if loss is None else loss + follows
        logits = {"prediction_logits": prediction, "seq_relationship_logits": relation}
        return self._output(outputs, loss=loss, **logits, aux_loss=extra, z_loss=z)
