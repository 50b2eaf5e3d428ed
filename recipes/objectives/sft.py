"""Objective `sft`: supervised fine-tuning with TRL's SFTTrainer, on tokens that this suite has labelled."""

import copy
import functools
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from .base import Objective, Row
from .trainers import built, check_smoothing, train_routers

if TYPE_CHECKING:
    from ..data import Splits
    from ..tokens.packing import TrainingRows
    from ..tokens.report import TokenizedData, Tokenizing


class SupervisedTuning(Objective):
    """Cross-entropy on the answers of conversations, on completions, or on whole texts."""

    formats = ("prompt-completion", "messages", "text")

    def configure(self, splits: "Splits") -> None:
        check_smoothing(self.arguments, self.config)

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.report import Tokenizing
        from ..tokens.supervised import tokenize_rows

        settings = {"max_length": self.max_length, "loss_on": self.options.loss_on}
        return Tokenizing(tokenize_rows, settings | {"truncation": self.recipe.data.truncation})

    def training_rows(self, data: Any) -> "TrainingRows | None":
        from ..tokens.packing import TrainingRows, row_lengths

        if not self.arguments.packing:
            return super().training_rows(data)
        return TrainingRows(data, lengths=row_lengths(data, "input_ids"), capacity=self.max_length, **self.drawn)

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from ..tokens.padding import pad_rows

        arguments, options = self.arguments, {}
        if arguments.packing:
            # The trainer would lay all packed rows of a batch one after another, which attention pays for in squares.
            arguments = copy.copy(arguments)
            arguments.packing = arguments.remove_unused_columns = False
            options["data_collator"] = partial(
                pad_rows, pad_token_id=self.tokenizer.pad_token_id, multiple=arguments.pad_to_multiple_of
            )
        trainer = built(
            trainer_class(),
            model,
            arguments,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            peft_config=adapter,
            rows=self.training_rows(train),
            **options,
        )
        if model.config.num_experts:
            train_routers(trainer, model)
        return trainer

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        from ..evaluation import held_out_loss

        size = self.recipe.eval.batch_size
        found = held_out_loss(model, prepared.dataset, pad_token_id=self.tokenizer.pad_token_id, batch_size=size)
        self.held_rows = found.by_row
        return found.as_dict()


@functools.cache
def trainer_class() -> Any:
    """TRL's trainer with the model's own loss where that is all it would compute."""
    from trl import SFTTrainer

    class Trainer(SFTTrainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            """TRL's takes the head over every token on a processor, and entropies for the log; the model's over those
            alone that are learned from, which is a fraction of a chat."""
            held: Any = self.model
            args: Any = self.args
            plain = args.loss_type == "nll" and self.label_smoother is None and not held.config.num_experts
            if not (plain and model.training and num_items_in_batch is not None) or return_outputs:
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            loss = model(**inputs, use_cache=False, num_items_in_batch=num_items_in_batch).loss
            if self.args.average_tokens_across_devices:  # the items are those of all processes, gradients a mean
                loss = loss * (self.accelerator.num_processes // self.get_tp_size())
            return loss

    return Trainer
