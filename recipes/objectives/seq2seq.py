"""Objective `seq2seq`, and `sft` of an encoder-decoder: the encoder reads a text, the decoder writes another."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import UserError
from ..introspection import class_fields
from ..label_metrics import accuracy, error_rate
from ..schema import WHOLE_SOURCE
from ..soft_prompts import positions_taken
from ..tokens.chat_template import answer_text, prompt_text
from ..tokens.padding import by_length, pad_rows
from ..tokens.report import IGNORE
from ..tokens.truncation import count_cut, truncation_side
from .base import Objective, Row, checked_length
from .labelled import batches
from .trainers import check_best_metric, check_smoothing, library_trainer

if TYPE_CHECKING:
    from ..data import Splits
    from ..evaluation import Sample
    from ..tokens.report import TokenizationReport, TokenizedData


class SequenceToSequence(Objective):
    """Cross-entropy of the target's tokens, each predicted from the source and the target before it; measured on
    greedy answers to held-out sources too."""

    head = "seq2seq_lm"
    formats: ClassVar[tuple[str, ...]] = ("source-target",)
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

    def encode(self, rows: Sequence[Row], **options: Any) -> list[list[int]]:
        """The tokens of each row's source; `options` are the tokenizer's, for cutting."""
        return self.tokenizer([row["source"] for row in rows], **options)["input_ids"]

    def target(self, row: Row) -> str:
        """The text that the decoder has to write."""
        return row["target"]

    def asked(self, row: Row) -> str:
        """The source as a person reads it."""
        return row["source"]

    def encode_targets(self, texts: Sequence[str]) -> list[list[int]]:
        """Labels: what the tokenizer makes of a target, without the start token that the model puts there itself, and
        with the end token."""
        start, end = self.config.decoder_start_token_id, self.tokenizer.eos_token_id
        found = []
        for ids in self.tokenizer(text_target=list(texts))["input_ids"]:
            body = ids[1:] if ids[:1] == [start] and start != end else ids
            found.append(body if body[-1:] == [end] else [*body, end])
        return found

    def prepare(self, rows: Sequence[Row]) -> "TokenizedData":
        from datasets import Dataset

        from ..tokens.report import TokenizationReport, TokenizedData

        report = TokenizationReport(rows=len(rows))
        sources: list[list[int]] = []
        targets: list[list[int]] = []
        for batch in batches(rows):
            encoded = self.encode(batch), self.encode_targets([self.target(row) for row in batch])
            for row, source, target in zip(batch, *encoded, strict=True):
                kept = self._fitted(row, source, target, report)
                if kept is not None:
                    sources.append(kept[0])
                    targets.append(kept[1])
        report.rows_kept = len(sources)
        report.supervised_tokens = sum(map(len, targets))
        report.tokens = sum(map(len, sources)) + report.supervised_tokens
        if not sources:
            causes = ", ".join(f"{count} {cause}" for cause, count in sorted(report.dropped.items()))
            raise UserError(f"None of the {len(rows)} rows is left to train on: {causes or 'there are none'}")
        return TokenizedData(Dataset.from_dict({"input_ids": sources, "labels": targets}), report)

    def _fitted(
        self, row: Row, source: list[int], target: list[int], report: "TokenizationReport"
    ) -> tuple[list[int], list[int]] | None:
        """A row within the limits, counted in the report; None: it is left out."""
        limits, policy = self.limits, self.recipe.data.truncation
        report.longest = max(report.longest, len(source), len(target))
        cause = self.unusable(row) or ("" if source else "without a token in the source")
        long = [len(ids) > limit for ids, limit in zip((source, target), limits, strict=True)]
        # Without its beginning, a target would teach the decoder to start in the middle.
        too_long = long if policy == "drop" else [False, long[1] and policy == "keep_end"]
        if not cause and any(too_long):
            cause = f"longer than {self.limit_names[too_long.index(True)]} ({limits[too_long.index(True)]})"
        if cause:
            report.dropped[cause] = report.dropped.get(cause, 0) + 1
            return None
        if long[0]:  # the tokenizer cuts, so that what it writes at the ends stays there
            side = "left" if policy == "keep_end" else "right"
            with truncation_side(self.tokenizer, side):
                source = self.encode([row], truncation=True, max_length=limits[0])[0]
        if any(long):
            count_cut(report, policy)
        report.stopped += not long[1]
        return source, target[: limits[1]]  # a cut target does not end, and is not taught to

    def unusable(self, row: Row) -> str:
        """Why a row is left out whatever its length, or nothing."""
        return ""

    def preview(self, prepared: "TokenizedData", count: int) -> list[str]:
        rows = prepared.dataset.select(range(min(count, len(prepared.dataset))))
        return [f"{self.tokenizer.decode(row['input_ids'])} ⟦{self.tokenizer.decode(row['labels'])}⟧" for row in rows]

    # Trainer

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from transformers import Seq2SeqTrainer, Trainer

        def collate(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
            batch = pad_rows(rows, self.tokenizer.pad_token_id)
            if self.arguments.label_smoothing_factor:
                # Smoothed labels never reach the model, so that it cannot make the decoder's input of them.
                batch["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(batch["labels"])
            return batch

        options: dict[str, Any] = {"adapter": adapter, "train_dataset": train, "eval_dataset": held_out}
        options |= {"processing_class": self.tokenizer, "data_collator": collate}
        if not getattr(self.arguments, "predict_with_generate", False):
            return library_trainer(Trainer, model, self.arguments, **options)
        if self.arguments.generation_max_length is None and held_out is not None:
            self.arguments.generation_max_length = self._answer_limit(held_out["labels"]) + 1  # and the start token
        return library_trainer(Seq2SeqTrainer, model, self.arguments, compute_metrics=self.evaluated, **options)

    def evaluated(self, prediction: Any) -> dict[str, float]:
        """Figures of the trainer's own evaluation with `predict_with_generate`."""
        sides = (prediction.predictions, prediction.label_ids)
        answers, references = (
            [self._text([token for token in row if token != IGNORE]) for row in side.tolist()] for side in sides
        )
        return _figures(references, answers)

    # Measures

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        import torch

        from ...modeling.losses import token_loss
        from ..evaluation import evaluating

        data = [dict(row) for row in prepared.dataset]
        total, count = 0.0, 0
        with evaluating(model), torch.no_grad():
            for _, batch in self._batches_of(model, data):
                logits = model(**batch, use_cache=False).logits  # [batch, target, vocabulary]
                total += token_loss(logits, batch["labels"], 1).item()
                count += int((batch["labels"] != IGNORE).sum())
        references = [self._text(row["labels"]) for row in data]
        answers = self.answers(model, data, self._answer_limit([row["labels"] for row in data]))
        return {"loss": total / count, "tokens": count, "rows": len(data), **_figures(references, answers)}

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
        encoded = [{"input_ids": ids} for ids in self.encode(chosen, truncation=True, max_length=self.limits[0])]
        answers = self.answers(model, encoded, min(options.max_new_tokens, self.limits[1]))
        return [Sample(self.asked(row), self.target(row), a) for row, a in zip(chosen, answers, strict=True)]

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
        if wrong := [name for name in idle if name != "max_length"]:
            raise UserError(f"train.{wrong[0]}: has no effect on an encoder-decoder, only on a decoder: remove it")
        super().configure(splits)

    @property
    def limits(self) -> tuple[int, int]:
        # The default of the trainer's config is made for decoders: here it only bounds.
        given = self.recipe.train.get("max_length")
        source, target = self._within_positions(given, given)
        if "max_length" in self.recipe.train:
            return source, target
        return min(source, self.arguments.max_length), min(target, self.arguments.max_length)

    def encode(self, rows: Sequence[Row], **options: Any) -> list[list[int]]:
        texts = [self._source(row) for row in rows]
        # A chat template has written the special tokens already.
        written = bool(_turns(rows[0])) and bool(self.tokenizer.chat_template)
        return self.tokenizer(texts, add_special_tokens=not written, **options)["input_ids"]

    def _source(self, row: Row) -> str:
        turns = _turns(row)
        if not turns:
            return row["prompt"]
        before = turns[:-1]
        if before and self.tokenizer.chat_template:
            return prompt_text(self.tokenizer, before, row.get("tools"))
        if row.get("tools") or any("tool_calls" in turn for turn in turns):
            raise UserError("data: the rows have tools, but the tokenizer has no chat template that could write them")
        if len(before) > 1:
            raise UserError(
                "data: the rows are conversations of several turns, but the tokenizer has no chat template: use one "
                "that has, or give prompt and completion as plain text"
            )
        return before[0]["content"] if before else ""

    def unusable(self, row: Row) -> str:
        turns = _turns(row)
        if turns and turns[-1].get("tool_calls"):
            raise UserError(
                "data: a row ends with a tool call, and how an encoder-decoder writes one no template says: leave it "
                "out, or write the call into the message's content"
            )
        if turns and turns[-1].get("train") is False:
            return "whose last answer is not trained on"
        return "without a message before the answer" if len(turns) == 1 else ""

    def target(self, row: Row) -> str:
        turns = _turns(row)
        return turns[-1]["content"] if turns else row["completion"]

    def asked(self, row: Row) -> str:
        turns = _turns(row)
        return answer_text(turns[-2:][0]) if turns else row["prompt"]


def _turns(row: Row) -> list[dict[str, Any]]:
    """The messages of a row, the answer last; none where it is plain text."""
    if "messages" in row:
        return row["messages"]
    return [*row["prompt"], *row["completion"]] if isinstance(row["prompt"], list) else []


def _figures(references: Sequence[str], answers: Sequence[str]) -> dict[str, float]:
    """Share of answers that are the reference, and edit distances to it in characters and in words."""
    return {
        "exact_match": accuracy(references, answers),
        "character_error_rate": error_rate(references, answers),
        "word_error_rate": error_rate(*([text.split() for text in side] for side in (references, answers))),
    }
