"""Objective `classify`: a class, several labels or a value for each text."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..label_metrics import accuracy, macro_f1, set_f1
from ..tokens.truncation import TOO_LONG
from .base import Row
from .labelled import Labelled, batches, listed
from .trainers import check_smoothing

if TYPE_CHECKING:
    import torch

    from ..data import Splits
    from ..evaluation import Sample
    from ..tokens.report import TokenizedData

Label = str | int | float | list[str]


class TextClassification(Labelled):
    """Cross-entropy over the classes of a text; binary cross-entropy for several labels at once; or squared error."""

    head = "sequence_classification"
    formats = ("classification",)
    task_type = "SEQ_CLS"

    def configure(self, splits: "Splits") -> None:
        check_smoothing(self.arguments, self.config)
        self.set_start_token()
        problem = self.options.problem
        labels: Any = ([_checked(row["label"], problem) for row in rows] for rows in (splits.train, splits.eval))
        train, held_out = labels
        if problem == "single-label":
            self.shown = ("accuracy", "macro_f1", "loss", "majority_share")
            self.adopt(train, held_out, "single_label_classification")
        elif problem == "multi-label":
            self.shown = ("micro_f1", "macro_f1", "loss")
            each: Any = (label for labels in train for label in labels)
            self.adopt(each, (label for labels in held_out for label in labels), "multi_label_classification")
        else:
            self.shown, self.higher_is_better = ("loss", "mean_absolute_error", "loss_of_the_mean"), False
            if len(known := self.names_of_checkpoint()) > 1:
                raise UserError(
                    f"objective.problem: {self.recipe.model.path} tells {len(known)} classes apart ({listed(known)}) "
                    "and gives no number: start from the model that it was tuned from"
                )
            self.config.num_labels, self.config.problem_type = 1, "regression"
            self.mean = sum(train) / len(train)
        self.check_best_metric()

    def prepare(self, rows: Sequence[Row]) -> "TokenizedData":
        from datasets import Dataset

        from ..tokens.report import TokenizationReport, TokenizedData

        limit = self.max_length
        report = TokenizationReport(rows=len(rows))
        ids: list[list[int]] = []
        labels: list[Any] = []
        for batch in batches(rows):
            for row, whole in zip(batch, self._encode([row["text"] for row in batch]), strict=True):
                report.longest = max(report.longest, len(whole))
                long = len(whole) > limit
                if not whole or (long and self.recipe.data.truncation == "drop"):
                    cause = TOO_LONG if whole else "without a token"
                    report.dropped[cause] = report.dropped.get(cause, 0) + 1
                    continue
                report.truncated += long
                ids.append(self._cut([row["text"]])[0] if long else whole)
                labels.append(self._target(row["label"]))
        report.rows_kept = report.stopped = report.supervised_tokens = len(ids)  # a label a row
        report.tokens = sum(map(len, ids))
        if not ids:
            causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items()))
            raise UserError(f"None of the {len(rows)} rows is left: {causes}. objective.max_length is {limit}")
        return TokenizedData(Dataset.from_dict({"input_ids": ids, "labels": labels}), report)

    def _encode(self, rows: list[str], **options: Any) -> list[list[int]]:
        return self.tokenizer(rows, **options)["input_ids"]

    def _target(self, label: Label) -> Any:
        if self.options.problem == "single-label":
            return self.numbers[self.name_of(label)]  # type: ignore[arg-type]
        if isinstance(label, list):
            return [float(name in label) for name in self.names]
        return _checked(label, "regression")

    def preview(self, prepared: "TokenizedData", count: int) -> list[str]:
        rows = prepared.dataset.select(range(min(count, len(prepared.dataset))))
        return [f"{self.tokenizer.decode(row['input_ids'])} ⟦{self._named(row['labels'])}⟧" for row in rows]

    def _named(self, target: Any) -> str:
        if isinstance(target, list):
            return ", ".join(name for name, on in zip(self.names, target, strict=True) if on) or "none"
        return self.names[target] if self.names else f"{target:g}"

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        import torch

        logits, data = self.logits_of(model, prepared.dataset)
        targets = torch.tensor([row["labels"] for row in data])
        figures = self._figures(torch.stack(logits), targets) | {"rows": len(data)}
        if self.options.problem == "single-label":
            figures["majority_share"] = targets.eq(self.numbers[self.majority]).float().mean().item()
        if self.options.problem == "regression":
            figures["loss_of_the_mean"] = ((targets - self.mean) ** 2).mean().item()
        return figures

    def _figures(self, logits: "torch.Tensor", targets: "torch.Tensor") -> dict[str, float]:
        """Figures of logits [rows, labels] against targets as they are trained on."""
        from ...modeling.losses import sequence_classification_loss

        loss = sequence_classification_loss(logits, targets, str(self.config.problem_type)).item()
        if self.options.problem == "regression":
            return {"loss": loss, "mean_absolute_error": (logits[:, 0] - targets).abs().mean().item()}
        if self.options.problem == "multi-label":
            wanted, given = ([row.nonzero().flatten().tolist() for row in on] for on in (targets, logits > 0))
            micro, macro = set_f1(wanted, given)
            return {"loss": loss, "micro_f1": micro, "macro_f1": macro}
        wanted, given = targets.tolist(), logits.argmax(-1).tolist()
        return {"loss": loss, "accuracy": accuracy(wanted, given), "macro_f1": macro_f1(wanted, given)}

    def evaluated(self, prediction: Any) -> dict[str, float]:
        import torch

        logits, labels = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
        figures = self._figures(logits.float(), labels)
        del figures["loss"]  # the trainer has its own
        return figures

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        from ..evaluation import Sample, spread

        found = []
        for row in spread(rows, self.recipe.eval.samples):
            ids = self._cut([row["text"]])
            if not ids[0]:
                continue
            logits, _ = self.logits_of(model, [{"input_ids": ids[0]}])
            found.append(Sample(row["text"], self._named(self._target(row["label"])), self._answer(logits[0])))
        return found

    def _answer(self, logits: "torch.Tensor") -> str:
        if self.options.problem == "regression":
            return f"{logits[0].item():.4g}"
        if self.options.problem == "multi-label":
            return self._named((logits > 0).float().tolist())
        best = int(logits.argmax())
        return f"{self.names[best]} ({logits.softmax(-1)[best].item():.0%})"


def _checked(label: Label, problem: str) -> Label:
    """The label as the problem has it.

    Raises:
        UserError: it is of another kind.
    """
    if problem == "single-label":
        if isinstance(label, list):
            raise UserError("objective.problem: the label of a row is a list: set it to multi-label")
        if not isinstance(label, str) and (label < 0 or isinstance(label, float)):
            raise UserError(
                f"objective.problem: the label {label:g} is no class, which is text or a whole number from 0: set it "
                "to regression if it is a value to predict"
            )
    elif problem == "multi-label" and not isinstance(label, list):
        raise UserError("objective.problem: multi-label takes rows whose label is a list, found one that is none")
    elif problem == "regression":
        try:  # text in a CSV file
            value = float(label)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            value = math.nan
        if not math.isfinite(value):
            raise UserError("objective.problem: regression takes rows whose label is a number, found one that is none")
        return value
    return label
