"""Objectives on preferences: what they share, and `dpo` with TRL's DPOTrainer."""

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .base import Objective, Row
from .trainers import built, train_routers

if TYPE_CHECKING:
    from ..evaluation import Sample
    from ..log_probs import LogProbs
    from ..tokens.report import TokenizedData, Tokenizing
    from ..tokens.views import RowView

# How far a policy may be from its reference before the first step: rounding only, since both run the same kernels.
START_TOLERANCE = 1e-6


class PreferenceTuning(Objective):
    """What objectives on pairs of a chosen and a rejected answer share."""

    formats: tuple[str, ...] = ("preference",)
    shown: tuple[str, ...] = ("loss", "accuracy", "margin")

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.preferences import tokenize_pairs
        from ..tokens.report import Tokenizing

        return Tokenizing(tokenize_pairs, {"max_length": self.max_length, "truncation": self.recipe.data.truncation})

    def view(self, row: Row) -> "RowView":
        from ..tokens.views import Length, RowView, learned, read_only

        prompt = read_only(row["prompt_ids"], "prompt")
        sides = tuple(learned(row[f"{name}_ids"], name) for name in ("chosen", "rejected"))
        longer = len(prompt.ids) + max(len(side.ids) for side in sides)
        return RowView((prompt,), sides, lengths={"prompt and longer answer": Length(longer, self.max_length)})

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        # Of a pair, the chosen answer is the one to look at.
        return super().samples(model, [{**row, "completion": row.get("chosen", row.get("completion"))} for row in rows])

    def reproduced(self, again: dict[str, float], after: dict[str, float]) -> bool:
        return all(abs(again[name] - after[name]) <= 1e-4 * max(1.0, abs(after[name])) for name in ("loss", "margin"))

    def build(self, trainer_class: Any, model: Any, train: Any, held_out: Any, adapter: Any, **options: Any) -> Any:
        """The trainer on rows that are tokenised already; `options` go to its class."""
        self.arguments.max_length = self.max_length
        # The data sets hold what the collator reads, and the lengths that group_by_length sorts by.
        self.arguments.remove_unused_columns = False
        return built(
            trainer_class,
            model,
            self.arguments,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            peft_config=adapter,
            **options,
        )

    def pair_log_probs(self, model: Any, pairs: Any) -> "list[LogProbs]":
        """Log-probabilities of the chosen and of the rejected answers of a tokenised data set."""
        sides = [(row["prompt_ids"], row[side]) for side in ("chosen_ids", "rejected_ids") for row in pairs]
        return self.log_probs(model, sides).split(2)

    def log_probs(self, model: Any, sequences: Sequence[tuple[list[int], list[int]]]) -> "LogProbs":
        from ..log_probs import log_probs

        size = self.recipe.eval.batch_size
        return log_probs(model, sequences, pad_token_id=self.tokenizer.pad_token_id, batch_size=size)


class ReferencedTuning(PreferenceTuning):
    """What objectives share that hold the policy near the model as it was before training.

    With a fresh adapter the reference is the model with the adapter disabled. An adapter that is trained further, or
    a model that is trained whole, is no longer there once training has begun: the log-probabilities of its start are
    computed once before, so that no second copy is held. Without an adapter, `train.precompute_ref_log_probs: false`
    or `train.sync_ref_model: true` keep a frozen copy instead.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.start: Any = None  # log-probabilities of the held-out answers before training
        self.plain = self.recipe.adapter.in_place
        asked = self.recipe.train.get("precompute_ref_log_probs")
        if self.plain and asked is None and not self.arguments.sync_ref_model:
            self.arguments.precompute_ref_log_probs = True

    def beside(self) -> dict[str, int]:
        if not self.plain or self.arguments.precompute_ref_log_probs:
            return {}
        return {"reference": self.config.counts(head=self.head).total_parameters}

    def start_and_now(self, model: Any, dataset: Any) -> "tuple[LogProbs, LogProbs]":
        """Log-probabilities of the held-out answers under the model as it was when first asked, which is before
        training, and as it is."""
        now = self.held_out_log_probs(model, dataset)
        if self.start is None:
            self.start = now
        return self.start, now

    def held_out_log_probs(self, model: Any, dataset: Any) -> "LogProbs":
        """Log-probabilities of all held-out answers."""
        raise NotImplementedError

    def build_from_start(self, trainer_class: Any, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        """The trainer with its reference, which is checked on the first batch.

        Raises:
            UserError: the policy does not start at its reference.
        """
        from peft import PeftModel

        if held_out is not None and self.start is None:
            self.start_and_now(model, held_out)
        continued = isinstance(model, PeftModel)
        reference = None
        if continued:
            self.arguments.precompute_ref_log_probs = True
            if getattr(model, "is_quantized", False):
                model.train()  # 8-bit products are computed otherwise in evaluation
        elif adapter is None and not self.arguments.precompute_ref_log_probs:
            reference = copy.deepcopy(model).eval().requires_grad_(False)
        trainer = self.build(trainer_class, model, train, held_out, adapter, ref_model=reference)
        if continued:
            # The trainer has taken its log-probabilities from this copy and needs it no more; it would be saved.
            model.delete_adapter("ref")
        if model.config.num_experts:
            train_routers(trainer, plain_model(model))
        check_start(trainer)
        return trainer


class DirectPreferenceTuning(ReferencedTuning):
    """DPO (Rafailov et al. 2023, arXiv:2305.18290), with the other losses of TRL's DPOTrainer."""

    shown = ("loss", "accuracy", "margin", "log_ratio")
    passes = 1

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from trl import DPOTrainer

        class Trainer(DPOTrainer):
            def _prepare_dataset(self, dataset: Any, *given: Any) -> Any:
                return dataset  # tokenised already

        trainer = self.build_from_start(Trainer, model, train, held_out, adapter)
        if {"aot", "aot_unpaired", "sft"} & set(self.arguments.loss_type):
            trainer.not_additive = "the loss is taken over a batch, not pair by pair"
        return trainer

    def held_out_log_probs(self, model: Any, dataset: Any) -> "LogProbs":
        import torch

        from ..log_probs import LogProbs

        chosen, rejected = self.pair_log_probs(model, dataset)
        return LogProbs(*(torch.cat(both) for both in zip(chosen, rejected, strict=True)))

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        """With r = log p(answer) - log p_start(answer), and beta of the trainer:

        `margin`: mean of beta (r_chosen - r_rejected); `accuracy`: share of pairs in which it is above 0, so 0 before
        training; `loss`: mean of -log sigmoid of it, whichever loss is trained (Rafailov et al. 2023, eq. 7), so
        ln 2 before training; `log_ratio`: mean of log p(chosen) - log p(rejected), in nats.
        """
        from torch.nn.functional import softplus

        from ..held_rows import mean_rows

        start, now = self.start_and_now(model, prepared.dataset)
        chosen, rejected = (now.answer - start.answer).chunk(2)
        margins = self.arguments.beta * (chosen - rejected)
        likelier, other = now.answer.chunk(2)
        by_pair = {
            "loss": softplus(-margins),
            "accuracy": (margins > 0).double(),
            "margin": margins,
            "log_ratio": likelier - other,
        }
        self.held_rows = mean_rows(prepared.dataset, **by_pair)
        return {
            **{name: values.mean().item() for name, values in by_pair.items()},
            "rows": len(margins),
            "tokens": int(now.tokens.sum()),
        }


def plain_model(model: Any) -> Any:
    """The model inside its adapter, where it has one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def check_start(trainer: Any) -> None:
    """Compute the loss of the first batch before training: the policy must be its own reference.

    All log-ratios are 0 there, so DPO's sigmoid loss is ln 2 whatever the model is. In training mode, so that
    dropout shows.

    Raises:
        UserError: they are not.
    """
    import torch

    arguments, dataset = trainer.args, trainer.train_dataset
    # The very batch of which log-probabilities were computed beforehand, so that padding and rounding are the same.
    size = arguments.precompute_ref_batch_size or arguments.per_device_train_batch_size
    rows = [dataset[index] for index in range(min(size, len(dataset)))]
    batch = {
        name: value.to(trainer.accelerator.device) if isinstance(value, torch.Tensor) else value
        for name, value in trainer.data_collator(rows).items()
    }
    model, was_training, routed = trainer.model, trainer.model.training, trainer.aux_loss_enabled
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]  # routers count tokens while they train
    model.train()
    trainer.aux_loss_enabled = False
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            loss = trainer.compute_loss(model, batch).item()
    finally:
        model.train(was_training)
        trainer.aux_loss_enabled = routed
        for buffer, value in kept:
            buffer.copy_(value)
    seen = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    trainer._metrics["train"].clear()
    trainer._total_train_tokens = 0
    off = max(abs(seen.get(name, 0.0)) for name in ("rewards/chosen", "rewards/rejected", "rewards/margins", "kl"))
    if arguments.loss_type == ["sigmoid"] and not arguments.use_weighting:
        off = max(off, abs(loss - math.log(2)))
    if not off <= START_TOLERANCE:
        raise UserError(
            f"the policy is not its own reference before the first step: on the first batch the loss is {loss:.6f} and "
            f"what must be 0 or ln 2 is off by {off:.2e}. An adapter must leave the model as it is at its start: with "
            "LoRA set adapter.init_lora_weights to true or gaussian"
        )
