"""Objective `reward`: a reward model from pairs, with TRL's RewardTrainer."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .base import Row
from .preference import PreferenceTuning, plain_model
from .trainers import train_routers

if TYPE_CHECKING:
    import torch

    from ..data import Splits
    from ..evaluation import Sample
    from ..tokens.report import TokenizedData


class RewardModelling(PreferenceTuning):
    """One number for a conversation, higher for the chosen answer (Bradley and Terry 1952)."""

    head = "sequence_classification"
    task_type = "SEQ_CLS"
    shown = ("accuracy", "loss", "margin")
    higher_is_better = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.measured: Any = None  # the pairs last measured, to show some of

    def configure(self, splits: "Splits") -> None:
        self.config.num_labels = 1
        self.config.pad_token_id = self.tokenizer.pad_token_id

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from trl import RewardTrainer

        class Trainer(RewardTrainer):
            aux_loss_enabled = False  # `train_routers` says otherwise

            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None
            ) -> Any:
                if self.aux_loss_enabled:
                    inputs = {**inputs, "output_router_logits": True}
                loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                if self.aux_loss_enabled:
                    loss = loss + outputs.aux_loss  # weighted already
                return (loss, outputs) if return_outputs else loss

        trainer = self.build(Trainer, model, _whole(train), held_out and _whole(held_out), adapter)
        if model.config.num_experts:
            train_routers(trainer, plain_model(model))
        return trainer

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        """With d = reward(chosen) - reward(rejected): `accuracy`, the share of pairs with d > 0; `loss`, the mean of
        -log sigmoid(d - margin of the row); `margin`, the mean of d."""
        import torch

        from ..held_rows import mean_rows

        pairs = self.measured = _whole(prepared.dataset)
        chosen, rejected = self.rewards(model, [row[side] for side in _SIDES for row in pairs]).chunk(2)
        difference = chosen - rejected
        wanted = torch.tensor(pairs["margin"][:] if "margin" in pairs.column_names else 0.0, dtype=torch.float64)
        by_pair = {
            "accuracy": (difference > 0).double(),
            "loss": torch.nn.functional.softplus(wanted - difference),
            "margin": difference,
        }
        self.held_rows = mean_rows(pairs, **by_pair)
        return {**{name: values.mean().item() for name, values in by_pair.items()}, "rows": len(difference)}

    def rewards(self, model: Any, sequences: Sequence[list[int]]) -> "torch.Tensor":
        """The rewards of whole sequences, [sequences] in float64 on the CPU."""
        import torch

        from ..evaluation import evaluating
        from ..tokens.padding import pad_rows

        size, values = self.recipe.eval.batch_size, torch.zeros(len(sequences), dtype=torch.float64)
        order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
        with evaluating(model), torch.no_grad():
            for first in range(0, len(order), size):
                chosen = order[first : first + size]
                padded = pad_rows([{"input_ids": sequences[index]} for index in chosen], self.tokenizer.pad_token_id)
                batch = {name: tensor.to(model.device) for name, tensor in padded.items()}
                values[chosen] = model(**batch, use_cache=False).logits[:, 0].double().cpu()
        return values

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        """The rewards of some pairs: a reward model answers nothing."""
        from ..evaluation import Sample, spread

        pairs = spread(self.measured.to_list(), self.recipe.eval.samples)
        rewards = self.rewards(model, [row[side] for side in _SIDES for row in pairs]).chunk(2)
        return [
            Sample(
                prompt=self.tokenizer.decode(row["chosen_ids"]),
                reference=f"chosen above rejected, which reads: {self.tokenizer.decode(row['rejected_ids'])}",
                answer=f"chosen {first:.3f}, rejected {second:.3f}",
            )
            for row, first, second in zip(pairs, *rewards, strict=True)
        ]


_SIDES = ("chosen_ids", "rejected_ids")


def _whole(pairs: Any) -> Any:
    """Pairs with the prompt in both sides, as the trainer reads them."""
    from datasets import Dataset

    columns = {side: [row["prompt_ids"] + row[side] for row in pairs] for side in _SIDES}
    return Dataset.from_dict(
        columns | {name: pairs[name][:] for name in ("length", "margin") if name in pairs.column_names}
    )
