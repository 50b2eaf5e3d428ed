"""`AnyformerDrafter`: drafts tokens from what a frozen base model has computed, for speculative decoding."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import initialization as init
from transformers.modeling_outputs import ModelOutput
from transformers.modeling_utils import PreTrainedModel

from .configuration_drafter import AnyformerDrafterConfig
from .draft_heads import DraftBatch, Predictions
from .losses import IGNORED, supervised_loss
from .masks import packed_documents, positions_of
from .norms import AnyformerNorm
from .registry import DRAFTERS
from .speculation import Drafting

SOFT_WEIGHT = 0.1  # of the cross-entropy beside the regression of features (EAGLE, arXiv:2401.15077, sec. 4.2)
CHUNK = 512  # tokens whose logits exist at a time


@dataclass
class DrafterOutput(ModelOutput):
    """Of `AnyformerDrafter.forward`.

    Attributes:
        loss: the weighted sum of the losses of the drafted tokens.
        losses: [num_draft_tokens], of each, without gradient.
        accuracies: [num_draft_tokens], the share of labels that are the drafter's first choice.
    """

    loss: torch.Tensor | None = None
    losses: torch.Tensor | None = None
    accuracies: torch.Tensor | None = None


class AnyformerDrafter(PreTrainedModel):
    """Medusa heads, an EAGLE layer or multi-token-prediction modules for a base, whose embedding and head they share.

    `generate` of the base takes it as `assistant_model`.
    """

    config: AnyformerDrafterConfig
    config_class = AnyformerDrafterConfig
    base_model_prefix = "head"
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: AnyformerDrafterConfig, *inputs: Any, **kwargs: Any) -> None:
        config.validate()
        super().__init__(config, *inputs, **kwargs)
        self.draft_head = DRAFTERS[config.kind](config.layer_config(), config.num_draft_tokens)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=getattr(module, "_initial_std", 0.02))
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, AnyformerNorm):
            module.reset()

    @classmethod
    def from_base(cls, base: Any, kind: str = "medusa", num_draft_tokens: int = 4) -> "AnyformerDrafter":
        """A new drafter for a base, of its dtype and on its device, which starts from its last layer.

        Args:
            base: an `AnyformerForCausalLM`.
            kind, num_draft_tokens: see `AnyformerDrafterConfig`.

        Raises:
            ValueError: the base is no decoder of this project.
        """
        base = language_model(base)
        config = AnyformerDrafterConfig.of_base(base.config, kind=kind, num_draft_tokens=num_draft_tokens)
        drafter: Any = cls(config)
        with torch.no_grad():
            drafter.draft_head.start_like(base)
        return drafter.to(device=base.device, dtype=base.dtype)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any):
        """As the base class, but a weight that the folder lacks is an error, never a random tensor."""
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        drafter, info = loaded
        if info["missing_keys"]:
            raise ValueError(f"The folder has no weights for {', '.join(sorted(info['missing_keys'])[:5])}")
        return (drafter, info) if output_loading_info else drafter

    def check_base(self, base: Any) -> None:
        """Refuse a base that this drafter was not made for; see `AnyformerDrafterConfig.check_base`."""
        self.config.check_base(base.config)

    def _embed(self, base: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        def embed(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return base.model.embed(tokens, None, None, positions).to(self.dtype)

        return embed

    def drafting(self, base: Any) -> Drafting:
        """One text to be drafted for: what `generate` of a base asks for.

        Raises:
            ValueError: another base.
        """
        self.check_base(base)
        return self.draft_head.drafting(self._embed(base))

    def forward(
        self,
        base: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> DrafterOutput:
        """The losses of drafting these texts; the base runs without gradient, as in evaluation.

        Medusa (sec. 2.2.1): cross-entropy of each head, weights 0.8, 0.8^2, ... EAGLE (sec. 4.2): smooth L1 to the
        base's features and 0.1 times the cross-entropy against its distribution; weights 1, 0.8, ... MTP (eq. 24-25):
        the mean of the cross-entropies.

        Args:
            base: an `AnyformerForCausalLM`.
            input_ids: [batch, length].
            attention_mask: [batch, length], 1 for real tokens; padding may stand on either side.
            labels: [batch, length], -100 where nothing is to be learned; default: every real token. Not shifted.
            position_ids: [batch, length]; where they start again a packed document does, and no draft crosses that.
            num_items_in_batch: labels of the whole (accumulated, global) batch: the losses weigh by this call's share.

        Raises:
            ValueError: the drafter was made for another base, the base is in training mode, or `attention_mask` is not
                [batch, length].
        """
        base = language_model(base)
        self.check_base(base)
        batch = self._batch(base, input_ids, attention_mask, position_ids)
        labels = input_ids if labels is None else labels
        labels = labels.masked_fill(~batch.attention_mask, IGNORED)
        results = [
            self._loss(base, batch, prediction, _reachable(labels, batch.documents, step))
            for step, prediction in enumerate(self.draft_head.predictions(batch), 1)
        ]
        losses, accuracies = (torch.stack(values) for values in zip(*results, strict=True))
        loss = (losses * self.loss_weights(losses.device)).sum()
        if num_items_in_batch is not None:
            loss = loss * ((labels[:, 1:] != IGNORED).sum() / num_items_in_batch)
        return DrafterOutput(loss=loss, losses=losses.detach(), accuracies=accuracies)

    def loss_weights(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """[num_draft_tokens], what the loss of each drafted token counts in the whole, see `forward`."""
        count = self.config.num_draft_tokens
        if self.config.kind == "mtp":
            return torch.full((count,), 1 / count, device=device)
        first = 1 if self.config.kind == "medusa" else 0
        return self.draft_head.decay ** torch.arange(first, first + count, device=device)

    def _batch(self, base: Any, input_ids: torch.Tensor, attention_mask: Any, position_ids: Any) -> DraftBatch:
        shape = input_ids.shape
        if attention_mask is not None and attention_mask.shape != shape:
            raise ValueError(
                f"attention_mask is {list(attention_mask.shape)}: a drafter learns from masks of [batch, length], "
                f"{list(shape)}, and from position_ids that start again with each packed document"
            )
        if base.training:
            raise ValueError("the base is in training mode, where it may drop out what it computes: call base.eval()")
        with torch.no_grad():
            features = base.model(
                input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
            ).last_hidden_state
        shaped = input_ids[..., None]
        documents = packed_documents(position_ids, attention_mask, shaped)
        if position_ids is None:
            position_ids = positions_of(attention_mask, 0, shaped)
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return DraftBatch(
            features=features.to(self.dtype),
            embed=self._embed(base),
            input_ids=input_ids,
            position_ids=position_ids.expand(shape),
            attention_mask=real.bool(),
            documents=(torch.zeros_like(input_ids) if documents is None else documents).masked_fill(~real.bool(), -1),
        )

    def _loss(
        self, base: Any, batch: DraftBatch, predicted: Predictions, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean loss of one drafted token, and its accuracy."""
        targets = targets[:, predicted.first :]
        states = predicted.states
        if self.config.kind == "eagle":
            # Beside each state the feature that it should be.
            states = torch.cat((states, batch.features[:, predicted.first - 1 : -1]), dim=-1)
        part = _soft if self.config.kind == "eagle" else _hard

        def total_of(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            chunks = zip(states.split(CHUNK), targets.split(CHUNK), strict=True)
            return torch.stack([checkpoint(part, base, *chunk, use_reentrant=False) for chunk in chunks]).sum(0)

        # Short texts have no token at the later places, which is no fault of the labels.
        reached = (targets != IGNORED).sum().clamp(min=1) if predicted.first > 2 else None
        loss, hits = supervised_loss(states, targets, total_of, reached)
        return loss, hits.detach()


def _hard(base: Any, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the head behind states [tokens, hidden_size], and how often it is right."""
    logits = base.logits_of(states.to(base.dtype)).float()
    loss = nn.functional.cross_entropy(logits, targets, reduction="sum")
    return torch.stack([loss, (logits.argmax(-1) == targets).sum().to(loss.dtype)])


def _soft(base: Any, pairs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed distance of states to features, side by side in [tokens, 2 * hidden_size], and of what the head makes of
    them, and how often it is right."""
    states, features = pairs.chunk(2, dim=-1)
    near = nn.functional.smooth_l1_loss(states.float(), features.float(), reduction="none").mean(-1).sum()
    logits = base.logits_of(states.to(base.dtype)).float()
    with torch.no_grad():
        wanted = base.logits_of(features.to(base.dtype)).float().softmax(-1)
    soft = nn.functional.cross_entropy(logits, wanted, reduction="sum")
    return torch.stack([near + SOFT_WEIGHT * soft, (logits.argmax(-1) == targets).sum().to(near.dtype)])


def _reachable(labels: torch.Tensor, documents: torch.Tensor, step: int) -> torch.Tensor:
    """Labels [batch, length] without those that no draft reaches: the token drafted at `step` comes step + 1 places
    behind the feature that the draft starts from, in one document.

    Args:
        documents: [batch, length], -1 for padding.
    """
    length, span = labels.shape[1], min(step + 1, labels.shape[1])
    start = nn.functional.pad(documents, (span, 0), value=-1)[:, :length]
    return labels.masked_fill((start != documents) | (start == -1), IGNORED)


def language_model(base: Any) -> Any:
    """The model itself, whatever adapter is around it.

    Raises:
        ValueError: no decoder of this project.
    """
    inner = base.get_base_model() if hasattr(base, "get_base_model") else base
    if not hasattr(inner, "logits_of") or getattr(inner.config, "is_encoder_decoder", True):
        raise ValueError(
            f"a drafter drafts for an AnyformerForCausalLM, not for {type(inner).__name__}: convert the base with "
            "`anyformer.from_hf`"
        )
    return inner
