"""Objective `token-classify`: a tag for each word of a text."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..label_metrics import accuracy, macro_f1, marks_spans, span_f1
from ..tokens.report import IGNORE
from ..tokens.truncation import TOO_LONG
from .base import Row
from .labelled import Labelled, batches
from .trainers import check_smoothing

if TYPE_CHECKING:
    from ..data import Splits
    from ..evaluation import Sample
    from ..tokens.report import TokenizedData


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

    def prepare(self, rows: Sequence[Row]) -> "TokenizedData":
        from datasets import Dataset

        from ..tokens.report import TokenizationReport, TokenizedData

        limit = self.max_length
        report = TokenizationReport(rows=len(rows))
        ids: list[list[int]] = []
        labels: list[list[int]] = []
        beyond = silent = 0
        for batch in batches(rows):
            encoded = self._encode([row["tokens"] for row in batch])
            for index, row in enumerate(batch):
                words = encoded.word_ids(index)
                report.longest = max(report.longest, len(words))
                kept, place = encoded, index
                silent += len(row["tokens"]) - len(set(words) - {None})
                own = words
                if len(words) > limit and self.recipe.data.truncation == "drop":
                    report.dropped[TOO_LONG] = report.dropped.get(TOO_LONG, 0) + 1
                    continue
                if len(words) > limit:
                    kept, place = self._cut([row["tokens"]]), 0
                    own = kept.word_ids(0)
                    if self.recipe.data.truncation == "keep_end":
                        own = _whole_words(words, own)
                    beyond += len(set(words) - set(own) - {None})
                    report.truncated += 1
                targets = self._targets(own, row["tags"])
                if all(target == IGNORE for target in targets):
                    report.dropped["without a token"] = report.dropped.get("without a token", 0) + 1
                    continue
                ids.append(kept["input_ids"][place])
                labels.append(targets)
        report.rows_kept = report.stopped = len(ids)
        report.tokens = sum(map(len, ids))
        report.supervised_tokens = sum(target != IGNORE for row in labels for target in row)
        if not ids:
            causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items()))
            raise UserError(f"None of the {len(rows)} rows is left: {causes}. objective.max_length is {limit}")
        for count, why in ((beyond, f"lie beyond {limit} tokens"), (silent, "have no token")):
            if count:
                report.warnings.append(f"{count:,} words {why}: they are neither trained on nor measured")
        return TokenizedData(Dataset.from_dict({"input_ids": ids, "labels": labels}), report)

    def _encode(self, rows: list[list[str]], **options: Any) -> Any:
        return self.tokenizer(rows, is_split_into_words=True, **options)

    def _targets(self, words: Sequence[int | None], tags: Sequence[str | int]) -> list[int]:
        """For each token the class of the word that it begins; -100 for the others."""
        targets = [IGNORE] * len(words)
        for place, word in _beginnings(words):
            targets[place] = self.numbers[self.name_of(tags[word])]
        return targets

    def preview(self, prepared: "TokenizedData", count: int) -> list[str]:
        rows = prepared.dataset.select(range(min(count, len(prepared.dataset))))
        return ["".join(self._marked(row)) for row in rows]

    def _marked(self, row: Row) -> Iterator[str]:
        texts = [self.tokenizer.decode([token]) for token in row["input_ids"]]
        for text, label in zip(texts, row["labels"], strict=True):
            yield f"{text} " if label == IGNORE else f"{text}⟦{self.names[label]}⟧ "

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        import torch

        from ...modeling.losses import token_loss

        logits, data = self.logits_of(model, prepared.dataset)
        targets = [torch.tensor(row["labels"]) for row in data]
        # Rows are padded on the right: a row's own tokens come first.
        own = [row[: len(target)] for row, target in zip(logits, targets, strict=True)]
        figures = self._figures([row.argmax(-1).tolist() for row in own], [target.tolist() for target in targets])
        labels = torch.cat(targets)
        supervised = labels[labels != IGNORE]
        figures["loss"] = token_loss(torch.cat(own), labels).item()
        figures["majority_share"] = supervised.eq(self.numbers[self.majority]).float().mean().item()
        return figures | {"rows": len(data), "tokens": len(supervised)}

    def _figures(self, predicted: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> dict[str, float]:
        """Figures of predicted classes against targets, row by row, where a target is."""
        pairs = [
            [(self.names[b], self.names[a]) for a, b in zip(given, wanted, strict=True) if b != IGNORE]
            for given, wanted in zip(predicted, targets, strict=True)
        ]
        wanted, given = ([[pair[side] for pair in row] for row in pairs] for side in (0, 1))
        flat = [[tag for row in rows for tag in row] for rows in (wanted, given)]
        figures = {"token_accuracy": accuracy(*flat), "macro_f1": macro_f1(*flat)}
        return figures | ({"entity_f1": span_f1(wanted, given)} if self.by_spans else {})

    def kept(self, logits: Any, labels: Any) -> Any:
        return super().kept(logits, labels).argmax(-1)

    def evaluated(self, prediction: Any) -> dict[str, float]:
        # Batches of another length are padded with -100 on both sides.
        return self._figures(prediction.predictions.tolist(), prediction.label_ids.tolist())

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        from ..evaluation import Sample, spread

        found = []
        for row in spread(rows, self.recipe.eval.samples):
            encoded = self._cut([row["tokens"]])
            begins = _beginnings(encoded.word_ids(0))
            if not begins:
                continue
            logits, _ = self.logits_of(model, [{"input_ids": encoded["input_ids"][0]}])
            best = logits[0].argmax(-1).tolist()
            words = [(row["tokens"][word], self.name_of(row["tags"][word]), place) for place, word in begins]
            reference = " ".join(f"{word}/{tag}" for word, tag, _ in words)
            answer = " ".join(f"{word}/{self.names[best[place]]}" for word, _, place in words)
            found.append(Sample(" ".join(row["tokens"]), reference, answer))
        return found


def _whole_words(words: Sequence[int | None], kept: Sequence[int | None]) -> list[int | None]:
    """The words of the kept tokens of a row, without one whose first token was cut off."""
    first = next((word for word in kept if word is not None), None)
    cut = kept.count(first) < words.count(first)
    return [None if cut and word == first else word for word in kept]


def _beginnings(words: Sequence[int | None]) -> list[tuple[int, int]]:
    """(place, word) of the first token of each word, from the number of the word that each token belongs to."""
    before = (None, *words[:-1])
    return [(i, word) for i, word in enumerate(words) if word is not None and word != before[i]]
