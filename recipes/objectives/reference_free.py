"""Objectives `orpo`, `cpo` and `simpo`: preferences without a reference model, with TRL's experimental trainers."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .base import Row
from .preference import PreferenceTuning, plain_model
from .trainers import train_routers

if TYPE_CHECKING:
    import torch

    from ..log_probs import LogProbs
    from ..tokens.report import TokenizedData


class _ReferenceFree(PreferenceTuning):
    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        class Trainer(self.trainer_class()):  # type: ignore[misc]
            def tokenize_row(self, feature: Any, model: Any = None) -> dict[str, Any]:
                return {}  # tokenised already

        trainer = self.build(Trainer, model, _sides(train), held_out and _sides(held_out), adapter)
        if model.config.num_experts:
            train_routers(trainer, plain_model(model))
            trainer.aux_loss_coef = 1.0  # what comes back is weighted already
        if getattr(self.arguments, "cpo_alpha", 1.0):
            trainer.not_additive = "the likelihood is a mean over a batch's tokens"
        return trainer

    def trainer_class(self) -> Any:
        """TRL's trainer, which `trainer` adapts to rows that are tokens."""
        raise NotImplementedError

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        """`loss`: the trained loss over all held-out pairs at once; `accuracy`: share of pairs in which the chosen
        answer has the higher score; `margin`: beta times the mean difference of the scores. A score is the sum or,
        where the loss is normalised by length, the mean of an answer's log-probabilities."""
        from ..held_rows import mean_rows

        chosen, rejected = self.pair_log_probs(model, prepared.dataset)
        scores = [self.score(side) for side in (chosen, rejected)]
        difference = scores[0] - scores[1]
        by_pair = {"accuracy": (difference > 0).double(), "margin": self.arguments.beta * difference}
        self.held_rows = mean_rows(prepared.dataset, **by_pair)
        return {
            "loss": self.loss(chosen, rejected).item(),
            **{name: values.mean().item() for name, values in by_pair.items()},
            "rows": len(difference),
            "tokens": int(chosen.tokens.sum() + rejected.tokens.sum()),
        }

    def score(self, side: "LogProbs") -> "torch.Tensor":
        """What an answer is ranked by, [pairs]."""
        return side.answer / side.tokens

    def loss(self, chosen: "LogProbs", rejected: "LogProbs") -> "torch.Tensor":
        """The trained loss over all pairs."""
        raise NotImplementedError


class OddsRatioTuning(_ReferenceFree):
    """ORPO (Hong et al. 2024, arXiv:2403.07691)."""

    def trainer_class(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is experimental is said in the documentation
            from trl.experimental.orpo import ORPOTrainer
        return ORPOTrainer

    def loss(self, chosen: "LogProbs", rejected: "LogProbs") -> "torch.Tensor":
        """Eqs. 4 to 7: the likelihood of prompt and chosen answer, and beta times the log odds ratio of the answers."""
        import torch

        likelihood = -chosen.whole.sum() / chosen.length.sum()
        log_odds = [score - torch.log(-torch.expm1(score)) for score in map(self.score, (chosen, rejected))]
        ratio = torch.nn.functional.logsigmoid(log_odds[0] - log_odds[1])
        return likelihood - self.arguments.beta * ratio.mean()


class ContrastiveTuning(_ReferenceFree):
    """CPO (Xu et al. 2024, arXiv:2401.08417); with loss_type simpo SimPO (Meng et al. 2024, arXiv:2405.14734)."""

    def trainer_class(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is experimental is said in the documentation
            from trl.experimental.cpo import CPOTrainer
        return CPOTrainer

    def score(self, side: "LogProbs") -> "torch.Tensor":
        """The log-probability, by length for ipo and simpo; with `alpha` shaped as AlphaPO does (arXiv:2501.03884)."""
        import torch

        value, alpha = side.answer, self.arguments.alpha
        if self.arguments.loss_type in ("ipo", "simpo"):
            value = value / side.tokens
        return (1 - torch.exp(-alpha * value)) / alpha if alpha else value

    def loss(self, chosen: "LogProbs", rejected: "LogProbs") -> "torch.Tensor":
        from torch.nn.functional import logsigmoid, relu

        given = self.arguments
        beta, smooth = given.beta, given.label_smoothing
        difference = self.score(chosen) - self.score(rejected)
        if given.loss_type == "hinge":
            preference = relu(1 - beta * difference)
        elif given.loss_type == "ipo":
            preference = (difference - 1 / (2 * beta)) ** 2
        else:
            reward = beta * difference - (given.simpo_gamma if given.loss_type == "simpo" else 0.0)
            preference = -(1 - smooth) * logsigmoid(reward) - smooth * logsigmoid(-reward)
        likelihood = -chosen.answer.sum() / chosen.tokens.sum()
        return preference.mean() + given.cpo_alpha * likelihood


def _sides(pairs: Any) -> Any:
    """The columns that the collator of TRL's experimental trainers pads."""
    from datasets import Dataset

    columns: dict[str, list[Any]] = {"length": pairs["length"][:]}
    for side in ("chosen", "rejected"):
        rows = [(row["prompt_ids"], row[f"{side}_ids"]) for row in pairs]
        columns[f"{side}_input_ids"] = [prompt + answer for prompt, answer in rows]
        columns[f"{side}_attention_mask"] = [[1] * (len(prompt) + len(answer)) for prompt, answer in rows]
        columns[f"{side}_labels"] = [[-100] * len(prompt) + answer for prompt, answer in rows]
    return Dataset.from_dict(columns)
