"""Objective `seq2seq`, and `sft` of an encoder-decoder: the encoder reads a text, the decoder writes another."""

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..introspection import class_fields
from ..label_metrics import error_rate, exact_match
from ..schema import WHOLE_SOURCE
from ..soft_prompts import positions_taken
from ..tokens.padding import by_length, pad_rows
from ..tokens.report import IGNORE
from ..tokens.sequences import asked_text, encode_sources, target_text, tokenize_sequences
from .base import Objective, Row, checked_length
from .trainers import check_best_metric, check_smoothing, library_trainer

if TYPE_CHECKING:
    from ..data import Splits
    from ..evaluation import Sample
    from ..scoring.statistics import ByRow
    from ..tokens.packing import TrainingRows
    from ..tokens.report import TokenizedData, Tokenizing
    from ..tokens.views import RowView


# Parts that a row's two limits are counted in where rows hold several pairs.
_WHOLE = 4096


class SequenceToSequence(Objective):
    """Cross-entropy of the target's tokens, each predicted from the source and the target before it; measured on
    greedy answers to held-out sources too."""

    head = "seq2seq_lm"
    formats: tuple[str, ...] = ("source-target",)
    task_type = "SEQ_2_SEQ_LM"
    shown = ("loss", "exact_match", "character_error_rate", "word_error_rate")

    def configure(self, splits: "Splits") -> None:
        if self.recipe.data.truncation == "split":
            raise UserError(
                f"data.truncation: split is not possible here: {WHOLE_SOURCE}. Set drop, keep_start or keep_end"
            )
        check_smoothing(self.arguments, self.config)
        generates = getattr(self.arguments, "predict_with_generate", False)
        check_best_metric(self.recipe.train, self.arguments, self.shown if generates else ("loss",))
        self.set_start_token()

    # Rows

    @property
    def limits(self) -> tuple[int, int]:
        """The longest source and the longest target, in tokens."""
        return self._within_positions(self.options.max_source_length, self.options.max_target_length)

    # What the limits are called in messages.
    limit_names = ("objective.max_source_length", "objective.max_target_length")

    def _within_positions(self, *given: int | None) -> tuple[int, int]:
        """Limits of source and target, or the longest that the model and a soft prompt leave room for."""
        adapter = self.recipe.adapter
        taken = positions_taken(adapter.kind, adapter.virtual_tokens, reads_apart=True)
        source, target = (
            checked_length(limit, name, self.config, virtual)
            for limit, name, virtual in zip(given, self.limit_names, taken, strict=True)
        )
        return source, target

    @property
    def behind_soft_prompt(self) -> int:
        source, target = self.limits
        return source if positions_taken(self.recipe.adapter.kind, 1, reads_apart=True)[0] else target

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.report import Tokenizing

        settings: dict[str, Any] = {"limits": list(self.limits), "limit_names": list(self.limit_names)}
        settings |= {"start_token_id": self.config.decoder_start_token_id}
        return Tokenizing(tokenize_sequences, settings | {"truncation": self.recipe.data.truncation})

    def view(self, row: Row) -> "RowView":
        from ..tokens.views import Length, RowView, learned, read_only, starts_in

        starts = [starts_in(row.get(name) or ()) for name in ("position_ids", "decoder_position_ids")]
        source, target = read_only(row["input_ids"], "source"), learned(row["labels"], "target")
        sides = (source._replace(starts=starts[0]), target._replace(starts=starts[1]))
        lengths = {side.name: Length(len(side.ids), limit) for side, limit in zip(sides, self.limits, strict=True)}
        return RowView((), beside=sides, lengths=lengths)

    # Trainer

    @property
    def packs(self) -> bool:
        """Whether rows hold several pairs."""
        return self.options.packing == "documents"

    def training_rows(self, data: Any) -> "TrainingRows | None":
        from ..tokens.packing import TrainingRows, joiner_of_pairs, row_lengths

        if not self.packs:
            return super().training_rows(data)
        # A pair takes of both limits; what it takes more of is what counts.
        lengths = [
            max(-(-length * _WHOLE // limit) for length, limit in zip(pair, self.limits, strict=True))
            for pair in zip(*(row_lengths(data, name) for name in ("input_ids", "labels")), strict=True)
        ]
        start = self.config.decoder_start_token_id
        assert start is not None  # set in `configure`
        join = joiner_of_pairs(start)
        return TrainingRows(data, lengths=lengths, capacity=_WHOLE, join=join, **self.drawn)

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from transformers import Seq2SeqTrainer, Trainer

        def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
            batch = pad_rows(rows, self.tokenizer.pad_token_id)
            if self.arguments.label_smoothing_factor and "decoder_input_ids" not in batch:
                # Smoothed labels never reach the model, so that it cannot make the decoder's input of them.
                batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
            return batch

        arguments = copy.copy(self.arguments)
        if self.packs:
            arguments.remove_unused_columns = False  # those of the decoder would be taken for unused
        options: dict[str, Any] = {"adapter": adapter, "eval_dataset": held_out}
        options |= {"train_dataset": train, "rows": self.training_rows(train)}
        options |= {"processing_class": self.tokenizer, "data_collator": collate}
        if not getattr(self.arguments, "predict_with_generate", False):
            return library_trainer(Trainer, model, arguments, **options)
        if arguments.generation_max_length is None and held_out is not None:
            arguments.generation_max_length = self._answer_limit(held_out["labels"]) + 1  # and the start token
        return library_trainer(Seq2SeqTrainer, model, arguments, compute_metrics=self.evaluated, **options)

    def evaluated(self, prediction: Any) -> dict[str, float]:
        """Figures of the trainer's own evaluation with `predict_with_generate`."""
        from ..scoring.statistics import values_of

        sides = (prediction.predictions, prediction.label_ids)
        answers, references = (
            [self._text([token for token in row if token != IGNORE]) for row in side.tolist()] for side in sides
        )
        return values_of(_by_row(references, answers))

    # Measures

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        import torch

        from ..evaluation import evaluating, row_losses
        from ..held_rows import HeldRows, digest_of
        from ..scoring.statistics import values_of

        data = [dict(row) for row in prepared.dataset]
        order: list[int] = []
        parts: list[tuple[float, float]] = []
        with evaluating(model), torch.no_grad():
            for places, batch in self._batches_of(model, data):
                logits = model(**batch, use_cache=False).logits  # [batch, target, vocabulary]
                parts += row_losses(logits, batch["labels"], batch["labels"] != IGNORE)
                order += places
        count = int(sum(tokens for _, tokens in parts))
        kept = HeldRows(tuple(digest_of(data[place]) for place in order), {"loss": parts})
        references = [self._text(row["labels"]) for row in data]
        answers = self.answers(model, data, self._answer_limit([row["labels"] for row in data]))
        by_row = _by_row(*([side[place] for place in order] for side in (references, answers)))
        self.held_rows = kept.adding(**by_row)
        return kept.figures() | values_of(by_row) | {"tokens": count, "rows": len(data)}

    def _answer_limit(self, targets: Sequence[Sequence[int]]) -> int:
        """Tokens after which an answer is cut off: twice the longest target, within the limit of targets."""
        return min(self.limits[1], 2 * max(map(len, targets)))

    def answers(self, model: Any, rows: Sequence[dict[str, Any]], max_new_tokens: int) -> list[str]:
        """Greedy answers to rows of `input_ids`."""
        import torch

        from ..evaluation import evaluating
        from ..tokens.supervised import stop_ids

        found = [""] * len(rows)
        sources = [{"input_ids": row["input_ids"]} for row in rows]
        with evaluating(model), torch.no_grad():
            for places, batch in self._batches_of(model, sources):
                output = model.generate(
                    **batch,
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    num_beams=1,
                    decoder_start_token_id=self.config.decoder_start_token_id,
                    eos_token_id=stop_ids(self.tokenizer),
                    pad_token_id=self.tokenizer.pad_token_id,
                )
                for place, tokens in zip(places, output.tolist(), strict=True):
                    found[place] = self._text(tokens)
        return found

    def _batches_of(self, model: Any, rows: Sequence[dict[str, Any]]) -> Iterator[tuple[list[int], dict[str, Any]]]:
        return by_length(rows, self.tokenizer.pad_token_id, self.recipe.eval.batch_size, model.device)

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        from ..evaluation import Sample, spread

        options = self.recipe.eval
        chosen = spread(rows, options.samples)
        if not chosen:
            return []
        encoded = [
            {"input_ids": ids}
            for ids in encode_sources(chosen, self.tokenizer, self.limits[0], self.recipe.data.truncation)
        ]
        answers = self.answers(model, encoded, min(options.max_new_tokens, self.limits[1]))
        return [Sample(asked_text(row), target_text(row), a) for row, a in zip(chosen, answers, strict=True)]

    def finish(self, model: Any) -> None:
        super().finish(model)
        model.generation_config.decoder_start_token_id = self.config.decoder_start_token_id


class SupervisedSequences(SequenceToSequence):
    """`sft` of an encoder-decoder: the prompt, or the conversation up to its last answer, is the source, and the
    completion or that answer the target. Earlier answers are read, not learned."""

    formats = ("prompt-completion", "messages")
    limit_names = ("train.max_length", "train.max_length")

    def configure(self, splits: "Splits") -> None:
        if self.options.loss_on != "completion":
            raise UserError(
                "objective.loss_on: an encoder-decoder learns the last answer alone, its decoder writes it: remove it"
            )
        own, shared = (
            class_fields(*where)
            for where in (("trl.trainer.sft_config", "SFTConfig"), ("transformers.training_args", "TrainingArguments"))
        )
        idle = [n for n, value in self.recipe.train.items() if n not in shared and value != own[n].default]
        if wrong := [name for name in idle if name not in ("max_length", "packing")]:
            raise UserError(f"train.{wrong[0]}: has no effect on an encoder-decoder, only on a decoder: remove it")
        super().configure(splits)

    @property
    def packs(self) -> bool:
        return self.arguments.packing

    @property
    def limits(self) -> tuple[int, int]:
        # The default of the trainer's config is made for decoders: here it only bounds.
        given = self.recipe.train.get("max_length")
        source, target = self._within_positions(given, given)
        if "max_length" in self.recipe.train:
            return source, target
        return min(source, self.arguments.max_length), min(target, self.arguments.max_length)


def _by_row(references: Sequence[str], answers: Sequence[str]) -> "dict[str, ByRow]":
    """Share of answers that are the reference, and edit distances to it in characters and in words."""
    return {
        "exact_match": exact_match(references, answers),
        "character_error_rate": error_rate(references, answers),
        "word_error_rate": error_rate(*([text.split() for text in side] for side in (references, answers))),
    }
