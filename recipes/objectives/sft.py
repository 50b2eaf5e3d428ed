"""Objective `sft`: supervised fine-tuning with TRL's SFTTrainer, on tokens that this suite has labelled."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .base import Objective, Row
from .trainers import built, check_smoothing, train_routers

if TYPE_CHECKING:
    from ..data import Splits
    from ..tokens.report import TokenizationReport, TokenizedData, Tokenizing


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

    def sequences(self, report: "TokenizationReport") -> int:
        # Packed rows are about full; the best-fit packing of the trainer decides the exact number.
        packed = self.arguments.packing and self.arguments.max_length
        return math.ceil(report.tokens / self.arguments.max_length) if packed else report.rows_kept

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from trl import SFTTrainer

        trainer = built(
            SFTTrainer,
            model,
            self.arguments,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            peft_config=adapter,
        )
        if model.config.num_experts:
            train_routers(trainer, model)
        return trainer

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        from ..evaluation import held_out_loss

        size = self.recipe.eval.batch_size
        return held_out_loss(
            model, prepared.dataset, pad_token_id=self.tokenizer.pad_token_id, batch_size=size
        ).as_dict()
