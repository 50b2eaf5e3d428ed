"""Objective `token-classify`: a tag for each word of a text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..label_metrics import accuracy, macro_f1, marks_spans, span_f1
from ..tokens.labelled import beginnings, tokenize_words
from ..tokens.report import IGNORE
from ..tokens.truncation import cut
from .base import Row
from .labelled import Labelled
from .trainers import check_smoothing

if TYPE_CHECKING:
    from ..data import Splits
    from ..evaluation import Sample
    from ..scoring.statistics import ByRow
    from ..tokens.report import TokenizedData, Tokenizing
    from ..tokens.views import RowView


class TokenClassification(Labelled):
    """Cross-entropy over the tags of words, read at the first token of each word."""

    head = "token_classification"
    formats = ("token-classification",)
    task_type = "TOKEN_CLS"
    what = "word"

    def configure(self, splits: "Splits") -> None:
        check_smoothing(self.arguments, self.config)
        self.set_start_token()
        if not self.tokenizer.is_fast:
            raise UserError(
                f"model.tokenizer: {type(self.tokenizer).__name__} does not say which word a token belongs to: the "
                "objective needs a fast tokenizer, one with a tokenizer.json"
            )
        train, held_out = ((tag for row in rows for tag in row["tags"]) for rows in (splits.train, splits.eval))
        self.adopt(train, held_out)
        self.by_spans = marks_spans(self.names)
        first = ("entity_f1", "token_accuracy") if self.by_spans else ("token_accuracy", "macro_f1")
        self.shown = (*first, "loss", "majority_share")
        self.check_best_metric()

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.report import Tokenizing

        settings = {"max_length": self.max_length, "names": self.names, "numbered": self.options.labels}
        return Tokenizing(tokenize_words, settings | {"truncation": self.recipe.data.truncation})

    def view(self, row: Row) -> "RowView":
        from ..tokens.views import Length, RowView, TokenSequence

        ids, labels = row["input_ids"], row["labels"]
        tags = {place: self.names[label] for place, label in enumerate(labels) if label != IGNORE}
        lengths = {"row": Length(len(ids), self.max_length)}
        return RowView((TokenSequence(ids, labels, notes=tags),), lengths=lengths, classes=tuple(tags.values()))

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        import torch

        from ..held_rows import HeldRows, digest_of
        from ..scoring.statistics import values_of

        logits, data = self.logits_of(model, prepared.dataset)
        targets = [torch.tensor(row["labels"]) for row in data]
        # Rows are padded on the right: a row's own tokens come first.
        own = [row[: len(target)] for row, target in zip(logits, targets, strict=True)]
        wanted, given = [target.tolist() for target in targets], [row.argmax(-1).tolist() for row in own]
        losses = [_loss_of(*pair) for pair in zip(own, targets, strict=True)]
        by_row = self._by_row(given, wanted)
        kept, count = HeldRows(tuple(map(digest_of, data)), {"loss": losses}), int(sum(count for _, count in losses))
        self.held_rows = kept.adding(**by_row)
        return kept.figures() | values_of(by_row) | {"rows": len(data), "tokens": count}

    def _by_row(self, predicted: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> "dict[str, ByRow]":
        """Figures of predicted classes against targets, where a target is."""
        from ..scoring.statistics import ByRow

        pairs = [
            [(self.names[b], self.names[a]) for a, b in zip(given, wanted, strict=True) if b != IGNORE]
            for given, wanted in zip(predicted, targets, strict=True)
        ]
        wanted, given = ([[pair[side] for pair in row] for row in pairs] for side in (0, 1))
        major = [(row.count(self.majority), len(row)) for row in wanted]
        found = {"token_accuracy": accuracy(wanted, given), "macro_f1": macro_f1(wanted, given, self.names)}
        found["majority_share"] = ByRow(np.array(major, dtype=np.float64))
        return found | ({"entity_f1": span_f1(wanted, given)} if self.by_spans else {})

    def kept(self, logits: Any, labels: Any) -> Any:
        return super().kept(logits, labels).argmax(-1)

    def evaluated(self, prediction: Any) -> dict[str, float]:
        # Batches of another length are padded with -100 on both sides.
        found = self._by_row(prediction.predictions.tolist(), prediction.label_ids.tolist())
        return {name: of.value for name, of in found.items() if name != "majority_share"}

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        from ..evaluation import Sample, spread

        found = []
        for row in spread(rows, self.recipe.eval.samples):
            policy = self.recipe.data.truncation
            encoded = cut(self.tokenizer, [row["tokens"]], self.max_length, policy, is_split_into_words=True)
            begins = beginnings(encoded.word_ids(0))
            if not begins:
                continue
            logits, _ = self.logits_of(model, [{"input_ids": encoded["input_ids"][0]}])
            best = logits[0].argmax(-1).tolist()
            words = [(row["tokens"][word], self.name_of(row["tags"][word]), place) for place, word in begins]
            reference = " ".join(f"{word}/{tag}" for word, tag, _ in words)
            answer = " ".join(f"{word}/{self.names[best[place]]}" for word, _, place in words)
            found.append(Sample(" ".join(row["tokens"]), reference, answer))
        return found


def _loss_of(logits: Any, labels: Any) -> tuple[float, float]:
    """The summed cross-entropy of a row's labels, and their number."""
    import torch

    total = torch.nn.functional.cross_entropy(logits.float(), labels, ignore_index=IGNORE, reduction="sum")
    return total.item(), float((labels != IGNORE).sum())
