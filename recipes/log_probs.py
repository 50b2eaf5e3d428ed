"""Log-probabilities of whole sequences and of their answers, for held-out measures."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .evaluation import evaluating
from .tokens.padding import pad_rows

if TYPE_CHECKING:
    import torch


class LogProbs(NamedTuple):
    """Of n sequences, each a tensor [n] of float64 on the CPU.

    Attributes:
        answer: sum over the answer's tokens, in nats.
        tokens: tokens of the answer that a causal model predicts.
        whole: sum over every token but the first.
        length: tokens of that sum.
    """

    answer: "torch.Tensor"
    tokens: "torch.Tensor"
    whole: "torch.Tensor"
    length: "torch.Tensor"

    def split(self, parts: int) -> "list[LogProbs]":
        """The sequences in `parts` runs of equal number."""
        return [LogProbs(*pieces) for pieces in zip(*(tensor.chunk(parts) for tensor in self), strict=True)]


def log_probs(
    model: Any, sequences: Sequence[tuple[list[int], list[int]]], *, pad_token_id: int, batch_size: int
) -> LogProbs:
    """Log-probabilities under the model, in evaluation mode.

    Args:
        sequences: (prompt, answer) as ids.
        batch_size: sequences of like length go through the model together; the values do not depend on it.
    """
    import torch

    values = torch.zeros(4, len(sequences), dtype=torch.float64)
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index][0]) + len(sequences[index][1]))
    with evaluating(model), torch.no_grad():
        for first in range(0, len(order), batch_size):
            chosen = order[first : first + batch_size]
            ids = [[*sequences[index][0], *sequences[index][1]] for index in chosen]
            padded = pad_rows([{"input_ids": row, "labels": row} for row in ids], pad_token_id)
            batch = {name: tensor.to(model.device) for name, tensor in padded.items()}
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits[:, :-1]  # [batch, length - 1, vocab]
            real = labels[:, 1:] != -100
            scores = torch.zeros(real.shape, dtype=torch.float64, device=real.device)
            loss = torch.nn.functional.cross_entropy(logits[real].float(), labels[:, 1:][real], reduction="none")
            scores[real] = -loss.double()
            for row, index in enumerate(chosen):
                start = max(len(sequences[index][0]), 1) - 1  # the answer's first token is predicted one before
                size = len(ids[row]) - 1
                answer = scores[row, start:].sum()
                values[:, index] = torch.tensor([answer, size - start, scores[row].sum(), size])
    return LogProbs(*values)
