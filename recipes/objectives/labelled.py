"""What a class for a text and a class for a word have in common."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..tokens.labelled import class_name
from ..tokens.padding import by_length, pad_rows
from .base import Objective
from .trainers import check_best_metric, library_trainer

if TYPE_CHECKING:
    import torch


class Labelled(Objective):
    """Names of classes, a trainer, and a majority to beat.

    Attributes:
        names: of the classes, by their number; empty for a regression. numbers: name -> number.
        shares: name -> share of the training labels.
        majority: the most frequent name in training.
    """

    higher_is_better = True
    what = "row"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.names: list[str] = []
        self.numbers: dict[str, int] = {}
        self.shares: dict[str, float] = {}
        self.majority = ""

    # Names

    def adopt(self, train: Iterable[Any], held_out: Iterable[Any], problem_type: str | None = None) -> None:
        """Write the classes into the config: those of the recipe, of a checkpoint that has this head, or of the rows.

        Args:
            train, held_out: the labels of all rows.
            problem_type: the config's, which decides the loss.

        Raises:
            UserError: there is nothing to tell apart, a label has no class, or the checkpoint has other classes.
        """
        given: Counter[Any] = Counter(train)
        counts = Counter({self.name_of(value): given[value] for value in sorted(given)})
        found, known = list(counts), self.names_of_checkpoint()
        names = self.options.labels or (known if set(found) <= set(known) else found)
        self._check_names(names, found, known, problem_type)
        if set(names) == set(known):  # which output stands for which class is the checkpoint's
            names = known
        unseen = sorted({self.name_of(value) for value in held_out} - set(names))
        if unseen:
            raise UserError(
                f"data: the held-out {self.what}s have {listed(unseen)}, which no training {self.what} has: a model "
                "cannot have learned it. Train on more rows (data.max_rows), hold out others (data.seed), or name it "
                "in objective.labels"
            )
        self.names = list(names)
        self.numbers = {name: index for index, name in enumerate(self.names)}
        self.config.id2label, self.config.label2id = dict(enumerate(self.names)), dict(self.numbers)
        self.config.problem_type = problem_type  # type: ignore[assignment]
        self.shares = {name: count / counts.total() for name, count in counts.most_common()}
        self.majority = next(iter(self.shares), "")

    def name_of(self, label: str | int) -> str:
        """The name of a class as a row gives it; a number counts the names in `objective.labels`, if there are any.

        Raises:
            UserError: a number beyond the names.
        """
        return class_name(label, self.options.labels)

    def _check_names(self, names: list[str], found: list[str], known: list[str], problem_type: str | None) -> None:
        if self.options.labels and len(names) < 2 and problem_type != "multi_label_classification":
            raise UserError("objective.labels: names one class alone: there is nothing to tell apart")
        if len(names) < (1 if problem_type == "multi_label_classification" else 2):
            have = f"have the label {listed(names)}" if names else "are without a label"
            raise UserError(f"data: all training {self.what}s {have}: there is nothing to tell apart")
        strange = sorted(set(found) - set(names))
        if strange:
            raise UserError(f"objective.labels: the training {self.what}s have {listed(strange)} too: add it")
        if known and len(names) != len(known):
            raise UserError(
                f"model: {self.recipe.model.path} tells {len(known)} classes apart ({listed(known)}), the data have "
                f"{len(names)} ({listed(names)}): start from the model that it was tuned from"
            )
        if known and set(names) != set(known) and not self.options.labels:
            raise UserError(
                f"model: {self.recipe.model.path} has the classes {listed(known)}, the data {listed(names)}: name "
                "its classes, in its order, in objective.labels, or start from the model that it was tuned from"
            )

    def names_of_checkpoint(self) -> list[str]:
        """The classes of a checkpoint that has this head already."""
        from ...modeling import HEADS

        if HEADS[self.head].__name__ not in (self.config.architectures or ()) or self.recipe.model.preset:
            return []
        named: Any = self.config.id2label
        return [named[index] for index in sorted(named)]

    @property
    def long_rows(self) -> str:
        return "longer rows are cut by the tokenizer"

    def plan_lines(self) -> list[tuple[str, str]]:
        lines = super().plan_lines()
        if not self.names:
            return lines
        shown = [f"{name} {share:.1%}" for name, share in islice(self.shares.items(), 8)]
        more = f" and {len(self.names) - 8} more" if len(self.names) > 8 else ""
        return [*lines, ("labels", f"{len(self.names)}: {', '.join(shown)}{more}")]

    # Trainer

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from transformers import Trainer

        return library_trainer(
            Trainer,
            model,
            self.arguments,
            adapter=adapter,
            train_dataset=train,
            rows=self.training_rows(train),
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            data_collator=partial(pad_rows, pad_token_id=self.tokenizer.pad_token_id),
            compute_metrics=self.evaluated,
            preprocess_logits_for_metrics=self.kept,
        )

    def check_best_metric(self) -> None:
        # The baselines are not measured in training.
        names = [name for name in self.shown if name not in ("majority_share", "loss_of_the_mean")]
        check_best_metric(self.recipe.train, self.arguments, names)

    def kept(self, logits: Any, labels: Any) -> Any:
        """What the trainer keeps of a batch's outputs: an encoder-decoder's hold hidden states too."""
        return logits[0] if isinstance(logits, tuple) else logits

    def evaluated(self, prediction: Any) -> dict[str, float]:
        """Figures of the trainer's own evaluation, beside its loss."""
        raise NotImplementedError

    # Measures

    def logits_of(self, model: Any, dataset: Any) -> "tuple[list[torch.Tensor], list[dict[str, Any]]]":
        """Logits of each row in fp32 (of each token, where the head gives those) and the rows."""
        import torch

        from ..evaluation import evaluating

        rows = [dict(row) for row in dataset]
        pad, size = self.tokenizer.pad_token_id, self.recipe.eval.batch_size
        found: list[Any] = [None] * len(rows)
        with evaluating(model), torch.no_grad():
            for places, batch in by_length(rows, pad, size, model.device):
                batch.pop("labels", None)
                logits = model(**batch, use_cache=False).logits.float().cpu()
                for place, row in zip(places, logits, strict=True):
                    found[place] = row
        return found, rows

    def reproduced(self, again: dict[str, float], after: dict[str, float]) -> bool:
        # Two models may be right on the same rows; they do not have the same loss.
        return super().reproduced(again, after) and abs(again["loss"] - after["loss"]) <= 1e-4

    def remarks(self, metrics: dict[str, Any]) -> list[str]:
        after = metrics["after"]
        name = "token_accuracy" if "token_accuracy" in after else "accuracy"
        if "majority_share" not in after or after[name] > after["majority_share"]:
            return []
        figure, share = f"{name.replace('_', ' ')} of {after[name]:.4f}", f"{after['majority_share']:.4f}"
        return [f"the held-out {figure} does not beat the {share} of always answering {self.majority}"]


def listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:5]))
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
