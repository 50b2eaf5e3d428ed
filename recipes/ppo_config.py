"""Arguments of proximal policy optimisation, in a file of their own: recipes are checked against its source."""

from dataclasses import dataclass, field
from typing import Literal

from transformers import TrainingArguments


@dataclass
class PPOConfig(TrainingArguments):
    """Arguments of `PPOTrainer`; those of `transformers.TrainingArguments` keep their meaning but for what follows.

    One step of the trainer is one rollout and all updates on it. On each device a rollout has
    `per_device_train_batch_size * gradient_accumulation_steps` completions, one for each prompt that is drawn. Forward
    and backward passes take `per_device_train_batch_size` of them at a time; how the rollout is split into these two
    factors changes the memory, not the result (but of a mixture of experts, whose load is balanced within a pass). The
    optimiser makes `num_ppo_epochs * num_mini_batches` updates a step.
    `max_steps`, `logging_steps`, `save_steps` and the learning rate schedule count steps, `num_train_epochs` passes
    over the prompts.

    Args:
        max_prompt_length: longer prompts lose their beginning; None: no limit.
        max_completion_length: tokens after which sampling stops.
        temperature: of sampling; the logits behind all log-probabilities are divided by it too.
        top_p: sample from the smallest set of tokens with this probability. Log-probabilities are those of the whole
            vocabulary, so only 1 samples from the very distribution that is optimised.
        num_ppo_epochs: passes over each rollout.
        num_mini_batches: updates in each pass.
        cliprange: how far the probability ratio may move from 1 (epsilon in arXiv:1707.06347, eq. 7).
        cliprange_value: how far a value may move from that of the rollout.
        vf_coef: weight of the value loss.
        gamma: discount of later rewards.
        lam: lambda of generalised advantage estimation (arXiv:1506.02438, eq. 16).
        beta: weight of the divergence from the reference policy; the first weight where `kl_target` is set.
        kl_target: divergence per completion, in nats, to which beta is steered (arXiv:1909.08593, sec. 2.2);
            None: beta stays.
        kl_horizon: completions over which a steady error of 100 % would change beta by that much; smaller is faster.
        kl_estimator: k1, log(pi / ref), is unbiased and may be negative; k3, (ref / pi - 1) - log(ref / pi), is
            never negative and varies less.
        whiten_advantages: shift and scale the advantages of a rollout to mean 0 and variance 1.
        whiten_rewards: scale the rewards of a rollout's tokens to variance 1; their mean stays.
        missing_eos_penalty: taken off the score of a completion that does not end by itself; None: nothing is.

    Raises:
        ValueError: a value out of its range.
    """

    # Reward functions get all columns, and one step is a whole rollout: these two have other defaults than the base.
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Remove all columns but `prompt_ids`: reward functions then get no others."}
    )
    logging_steps: float = field(default=1, metadata={"help": "Log every so many steps; a step is a whole rollout."})

    max_prompt_length: int | None = field(
        default=None, metadata={"help": "Longer prompts lose their beginning. None: no limit."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Tokens after which sampling stops."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling, and of all log-probabilities."})
    top_p: float = field(
        default=1.0, metadata={"help": "Sample from the smallest set of tokens with this probability."}
    )
    num_ppo_epochs: int = field(default=4, metadata={"help": "Passes over each rollout."})
    num_mini_batches: int = field(default=1, metadata={"help": "Updates of the weights in each pass."})
    cliprange: float = field(default=0.2, metadata={"help": "How far the probability ratio may move from 1."})
    cliprange_value: float = field(default=0.2, metadata={"help": "How far a value may move from the rollout's."})
    vf_coef: float = field(default=0.1, metadata={"help": "Weight of the value loss."})
    gamma: float = field(default=1.0, metadata={"help": "Discount of later rewards."})
    lam: float = field(default=0.95, metadata={"help": "Lambda of generalised advantage estimation."})
    beta: float = field(default=0.05, metadata={"help": "Weight of the divergence from the reference policy."})
    kl_target: float | None = field(
        default=None,
        metadata={"help": "Divergence per completion, in nats, that beta is steered to. None: beta stays."},
    )
    kl_horizon: float = field(
        default=10_000.0, metadata={"help": "Completions in which beta may change by its own size; smaller is faster."}
    )
    kl_estimator: Literal["k1", "k3"] = field(
        default="k1", metadata={"help": "k1 is unbiased, k3 never negative and of less variance."}
    )
    whiten_advantages: bool = field(
        default=True, metadata={"help": "Shift and scale the advantages of a rollout to mean 0 and variance 1."}
    )
    whiten_rewards: bool = field(
        default=False, metadata={"help": "Scale the rewards of a rollout's tokens to variance 1."}
    )
    missing_eos_penalty: float | None = field(
        default=None, metadata={"help": "Taken off the score of a completion that does not end by itself."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_seed is None:
            # Else the order of the prompts would follow whatever seed was set last, and a resumed run another one.
            self.data_seed = self.seed
        for name in ("max_prompt_length", "max_completion_length", "num_ppo_epochs", "num_mini_batches"):
            self._require(name, "at least 1", getattr(self, name) is None or getattr(self, name) >= 1)
        for name in ("temperature", "cliprange", "cliprange_value", "kl_target", "kl_horizon"):
            self._require(name, "above 0", getattr(self, name) is None or getattr(self, name) > 0)
        for name in ("vf_coef", "beta"):
            self._require(name, "at least 0", getattr(self, name) >= 0)
        for name in ("gamma", "lam"):
            self._require(name, "between 0 and 1", 0 <= getattr(self, name) <= 1)
        self._require("top_p", "above 0 and at most 1", 0 < self.top_p <= 1)
        self._require("kl_estimator", "k1 or k3", self.kl_estimator in ("k1", "k3"))
        self._require("beta", "above 0 where kl_target is set", self.kl_target is None or self.beta > 0)
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps
        self._require(
            "num_mini_batches",
            f"at most {rows}, the completions of a rollout (per_device_train_batch_size * gradient_accumulation_steps)",
            self.num_mini_batches <= rows,
        )

    def _require(self, name: str, right: str, holds: bool) -> None:
        if not holds:
            raise ValueError(f"{name} is {getattr(self, name)!r}: it must be {right}")
