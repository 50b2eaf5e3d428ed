"""What scores completions: functions, and reward models as functions."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..errors import UserError

# (prompts_ids, completions_ids, texts, **columns) -> one number for each completion. Ids are lists without padding, a
# stop token included; texts are the decoded completions; columns are those of the data set.
Reward = Callable[..., list[float]]


class RewardModel:
    """Scores prompt and completion, right-padded, with a sequence classifier of one label.

    Args:
        model: an `AnyformerForSequenceClassification`; with `classifier_pooling` "last" it reads the last real token.
        tokenizer: its own; its vocabulary must be the policy's, because token ids are handed over.
        batch_size: texts scored at a time.

    Raises:
        UserError: the model has more than one label.
    """

    def __init__(self, model: Any, tokenizer: Any, batch_size: int = 8) -> None:
        if model.config.num_labels != 1:
            raise UserError(f"the reward model has {model.config.num_labels} labels: a score needs num_labels 1")
        self.model, self.tokenizer, self.batch_size = model.eval().requires_grad_(False), tokenizer, batch_size

    @torch.no_grad()
    def __call__(
        self, prompts_ids: list[list[int]], completions_ids: list[list[int]], texts: list[str], **columns: Any
    ) -> list[float]:
        whole = [[*prompt, *completion] for prompt, completion in zip(prompts_ids, completions_ids, strict=True)]
        scores: list[float] = []
        for start in range(0, len(whole), self.batch_size):
            ids, mask = padded(whole[start : start + self.batch_size], 0, "right", self.model.device)
            scores += self.model(input_ids=ids, attention_mask=mask).logits[:, 0].float().tolist()
        return scores


def reward_name(reward: Reward) -> str:
    """What a reward is called in logs and messages."""
    return getattr(reward, "__name__", type(reward).__name__)


def call_reward(
    reward: Reward,
    prompts: list[list[int]],
    completions: list[list[int]],
    texts: list[str],
    columns: dict[str, list[Any]],
) -> list[float]:
    """The scores of one reward.

    Raises:
        UserError: not one finite number for each completion.
    """
    scores = [float(score) for score in reward(prompts, completions, texts, **columns)]
    if len(scores) != len(completions):
        raise UserError(
            f"the reward {reward_name(reward)} gave {len(scores)} scores for {len(completions)} completions: it must "
            "give one for each"
        )
    if wrong := [i for i, score in enumerate(scores) if not math.isfinite(score)]:
        raise UserError(
            f"the reward {reward_name(reward)} gave {scores[wrong[0]]} for {texts[wrong[0]]!r}: scores must be finite"
        )
    return scores


def padded(rows: list[list[int]], pad: int, side: str, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and attention mask, both [rows, longest], with the padding on that side."""
    ids = nn.utils.rnn.pad_sequence(
        [torch.tensor(row) for row in rows], batch_first=True, padding_value=pad, padding_side=side
    )
    mask = nn.utils.rnn.pad_sequence(
        [torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True, padding_side=side
    )
    return ids.to(device), mask.to(device)
