"""Objective `kto`: answers that are good or bad by themselves, with TRL's KTOTrainer."""

from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from .base import Row
from .preference import ReferencedTuning

if TYPE_CHECKING:
    from ..log_probs import LogProbs
    from ..tokens.report import TokenizedData, Tokenizing
    from ..tokens.views import RowView


class KahnemanTverskyTuning(ReferencedTuning):
    """KTO (Ethayarajh et al. 2024, arXiv:2402.01306), or APO-zero on single answers; pairs are taken apart."""

    formats: tuple[str, ...] = ("unpaired-preference", "preference")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Of the reference; and, to estimate the KL divergence, of both on mismatched answers.
        self.passes = 3 if self.arguments.loss_type == "kto" else 1

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.preferences import tokenize_labelled

        return super().tokenizing()._replace(function=tokenize_labelled)

    def prepare(self, rows: Sequence[Row]) -> "TokenizedData":
        data = super().prepare(unpaired(rows, seed=self.recipe.data.seed))
        if self.arguments.loss_type == "kto":
            data = data._replace(dataset=with_mismatched(data.dataset, self.arguments.per_device_train_batch_size))
        return data

    def view(self, row: Row) -> "RowView":
        from ..tokens.views import Length, RowView, answered

        sequence = answered(row["prompt_ids"], row["completion_ids"])
        wanted = "desirable" if row["label"] else "undesirable"
        lengths = {"row": Length(len(sequence.ids), self.max_length)}
        return RowView((sequence,), lengths=lengths, label=wanted, classes=(wanted,))

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from trl import KTOTrainer

        class Trainer(KTOTrainer):
            def _prepare_dataset(self, dataset: Any, *given: Any) -> Any:
                return dataset  # tokenised already, mismatched answers included

        trainer = self.build_from_start(Trainer, model, train, held_out, adapter)
        if trainer.calculate_KL:
            trainer.not_additive = "the KL divergence is estimated on a batch"
        return trainer

    def held_out_log_probs(self, model: Any, dataset: Any) -> "LogProbs":
        return self.log_probs(model, [(row["prompt_ids"], row["completion_ids"]) for row in dataset])

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        """With r = beta (log p(answer) - log p_start(answer)):

        `loss`: mean of 1 - sigmoid(r) over desirable and of sigmoid(r) over undesirable answers, weighted as in
        training: the KTO loss (Ethayarajh et al. 2024, eq. 7) with a reference point of 0, which does not depend on
        batches; 0.5 before training with weights of 1. `accuracy`: share of answers whose r has the right sign, so 0
        before training. `margin`: mean r of the desirable answers less that of the undesirable ones.
        """
        import torch

        from ..held_rows import mean_rows

        start, now = self.start_and_now(model, prepared.dataset)
        good = torch.tensor(prepared.dataset["label"])
        rewards = self.arguments.beta * (now.answer - start.answer)
        signed = torch.where(good, rewards, -rewards)
        weights = torch.where(good, self.arguments.desirable_weight, self.arguments.undesirable_weight)
        both = bool(good.any() and not good.all())
        by_answer = {"loss": weights * torch.sigmoid(-signed), "accuracy": (signed > 0).double()}
        self.held_rows = mean_rows(prepared.dataset, **by_answer)
        return {
            **{name: values.mean().item() for name, values in by_answer.items()},
            "margin": (rewards[good].mean() - rewards[~good].mean()).item() if both else signed.mean().item(),
            "rows": len(good),
            "tokens": int(now.tokens.sum()),
        }


def unpaired(rows: Sequence[Row], *, seed: int) -> list[Row]:
    """Rows of one answer and a label in the order in which they are trained on: the trainer does not shuffle them.

    Pairs become a desirable and an undesirable row each, in turns, half the data apart: so a batch holds both kinds,
    and neighbours, whose answers are exchanged to estimate the KL divergence, have different prompts.
    """
    rows = list(rows)
    Random(seed).shuffle(rows)
    if not rows or "chosen" not in rows[0]:
        return rows
    half = len(rows) // 2
    return [
        {name: row[name] for name in ("prompt", "tools") if name in row}
        | {"completion": row[side], "label": side == "chosen"}
        for index in range(len(rows))
        for row, side in ((rows[index], "chosen"), (rows[(index + half) % len(rows)], "rejected"))
    ]


def with_mismatched(dataset: Any, batch_size: int) -> Any:
    """Add `KL_completion_ids`: the answer of the neighbour in the batch, the last one's for the first.

    The KL divergence is estimated on them (Ethayarajh et al. 2024, section 4.1), in batches of the trainer's size.
    """
    answers = dataset["completion_ids"][:]
    batches = [answers[first : first + batch_size] for first in range(0, len(answers), batch_size)]
    return dataset.add_column("KL_completion_ids", [ids for batch in batches for ids in [batch[-1], *batch[:-1]]])
