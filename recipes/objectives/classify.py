"""Objective `classify`: a class, several labels or a value for each text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..label_metrics import accuracy, macro_f1, micro_f1
from ..tokens.labelled import checked_label, target_of, tokenize_texts
from ..tokens.truncation import cut
from .base import Row
from .labelled import Labelled, listed
from .trainers import check_smoothing

if TYPE_CHECKING:
    import torch

    from ..data import Splits
    from ..evaluation import Sample
    from ..scoring.statistics import ByRow
    from ..tokens.report import TokenizedData, Tokenizing
    from ..tokens.views import RowView


class TextClassification(Labelled):
    """Cross-entropy over the classes of a text; binary cross-entropy for several labels at once; or squared error."""

    head = "sequence_classification"
    formats = ("classification",)
    task_type = "SEQ_CLS"

    def configure(self, splits: "Splits") -> None:
        check_smoothing(self.arguments, self.config)
        self.set_start_token()
        problem = self.options.problem
        labels: Any = ([checked_label(row["label"], problem) for row in rows] for rows in (splits.train, splits.eval))
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

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.report import Tokenizing

        settings = {"max_length": self.max_length, "problem": self.options.problem}
        settings |= {"truncation": self.recipe.data.truncation}
        return Tokenizing(tokenize_texts, settings | {"names": self.names, "numbered": self.options.labels})

    def view(self, row: Row) -> "RowView":
        from ..tokens.views import Length, RowView, read_only

        ids, target = row["input_ids"], row["labels"]
        lengths = {"row": Length(len(ids), self.max_length)}
        if self.options.problem == "regression":
            return RowView((read_only(ids),), lengths=lengths, label=self._named(target), value=target)
        classes = self._on(target) if isinstance(target, list) else [self.names[target]]
        return RowView((read_only(ids),), lengths=lengths, label=self._named(target), classes=tuple(classes))

    def _on(self, target: list[float]) -> list[str]:
        """The names of a text's labels."""
        return [name for name, on in zip(self.names, target, strict=True) if on]

    def _named(self, target: Any) -> str:
        if isinstance(target, list):
            return ", ".join(self._on(target)) or "none"
        return self.names[target] if self.names else f"{target:g}"

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        import torch
        from torch.nn import functional

        from ..held_rows import mean_rows
        from ..scoring.statistics import values_of

        of_rows, data = self.logits_of(model, prepared.dataset)
        logits, targets = torch.stack(of_rows), torch.tensor([row["labels"] for row in data])
        if self.options.problem == "single-label":
            major = targets.eq(self.numbers[self.majority]).double()
            losses = functional.cross_entropy(logits, targets, reduction="none")
            kept = mean_rows(data, loss=losses, majority_share=major)
        elif self.options.problem == "multi-label":
            losses = functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
            kept = mean_rows(data, loss=losses)
        else:
            of_mean = (targets - self.mean) ** 2
            kept = mean_rows(data, loss=(logits[:, 0] - targets) ** 2, loss_of_the_mean=of_mean)
        by_row = self._by_row(logits, targets)
        self.held_rows = kept.adding(**by_row)
        return kept.figures() | values_of(by_row) | {"rows": len(data)}

    def _by_row(self, logits: "torch.Tensor", targets: "torch.Tensor") -> "dict[str, ByRow]":
        """Figures of logits [rows, labels] against targets as they are trained on."""
        from ..scoring.statistics import ByRow

        if self.options.problem == "regression":
            return {"mean_absolute_error": ByRow.of_values((logits[:, 0] - targets).abs().tolist())}
        classes = range(len(self.names))
        if self.options.problem == "multi-label":
            wanted, given = ([row.nonzero().flatten().tolist() for row in on] for on in (targets, logits > 0))
            return {"micro_f1": micro_f1(wanted, given), "macro_f1": macro_f1(wanted, given, classes, sets=True)}
        wanted, given = targets[:, None].tolist(), logits.argmax(-1)[:, None].tolist()
        return {"accuracy": accuracy(wanted, given), "macro_f1": macro_f1(wanted, given, classes)}

    def evaluated(self, prediction: Any) -> dict[str, float]:
        import torch

        from ..scoring.statistics import values_of

        logits, labels = torch.from_numpy(prediction.predictions), torch.from_numpy(prediction.label_ids)
        return values_of(self._by_row(logits.float(), labels))

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        from ..evaluation import Sample, spread

        found = []
        for row in spread(rows, self.recipe.eval.samples):
            ids = cut(self.tokenizer, [row["text"]], self.max_length, self.recipe.data.truncation)["input_ids"]
            if not ids[0]:
                continue
            logits, _ = self.logits_of(model, [{"input_ids": ids[0]}])
            target = target_of(row["label"], self.options.problem, self.numbers, self.options.labels)
            found.append(Sample(row["text"], self._named(target), self._answer(logits[0])))
        return found

    def _answer(self, logits: "torch.Tensor") -> str:
        if self.options.problem == "regression":
            return f"{logits[0].item():.4g}"
        if self.options.problem == "multi-label":
            return self._named((logits > 0).float().tolist())
        best = int(logits.argmax())
        return f"{self.names[best]} ({logits.softmax(-1)[best].item():.0%})"
