"""Objective `classify`: a class, several labels or a value for each text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..label_metrics import accuracy, macro_f1, set_f1
from ..tokens.labelled import checked_label, target_of, tokenize_texts
from ..tokens.truncation import cut
from .base import Row
from .labelled import Labelled, listed
from .trainers import check_smoothing

if TYPE_CHECKING:
    import torch

    from ..data import Splits
    from ..evaluation import Sample
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

        from ..held_rows import mean_rows

        logits, data = self.logits_of(model, prepared.dataset)
        targets = torch.tensor([row["labels"] for row in data])
        figures = self._figures(torch.stack(logits), targets) | {"rows": len(data)}
        if self.options.problem == "single-label":
            right = torch.stack(logits).argmax(-1).eq(targets).double()
            losses = torch.nn.functional.cross_entropy(torch.stack(logits), targets, reduction="none")
            self.held_rows = mean_rows(data, loss=losses, accuracy=right)
            figures["majority_share"] = targets.eq(self.numbers[self.majority]).float().mean().item()
        if self.options.problem == "regression":
            errors = torch.stack(logits)[:, 0] - targets
            self.held_rows = mean_rows(data, loss=errors**2, mean_absolute_error=errors.abs())
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
