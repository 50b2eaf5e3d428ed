"""Objectives on rewards for the model's own answers: grpo, rloo, ppo."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ..fields import Kind, wrong
from .base import ROUTED, TRAINER_REFUSED, UNSMOOTHED, ObjectiveSection


def _rewards(value: Any) -> Any:
    from ...rewards import reward_problem

    for name in value if isinstance(value, list) else [value]:
        if problem := reward_problem(name):
            raise wrong(problem)
    return value


Rewards = Annotated[str | Annotated[list[str], Field(min_length=1)], AfterValidator(_rewards)]


class GrpoObjective(ObjectiveSection):
    """`objective: {kind: grpo}`: policy optimisation over groups of answers (arXiv:2402.03300)."""

    kind: Literal["grpo"] = "grpo"
    reward: Rewards


class PpoObjective(ObjectiveSection):
    """`objective: {kind: ppo}`: proximal policy optimisation (arXiv:1707.06347)."""

    kind: Literal["ppo"] = "ppo"
    reward: Rewards


class RlooObjective(ObjectiveSection):
    """`objective: {kind: rloo}`: REINFORCE, leave one out (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"
    reward: Rewards


_POLICY_REFUSED = (
    TRAINER_REFUSED
    | UNSMOOTHED
    | ROUTED
    | {
        "trust_remote_code": "is model.trust_remote_code",
        "model_init_kwargs": "is not used: see the model: section (dtype, attn_implementation, revision, config)",
        "remove_unused_columns": "is set by the suite: rewards read the columns; remove it",
        "disable_dropout": "is set by the suite: dropout would part policy and reference at the first step; remove it",
    }
)
_UNREAD = {
    ("data", "truncation"): "has no effect: prompts are never cut, and those without room for an answer of "
    "train.max_completion_length tokens are left out; remove it",
    ("eval", "max_new_tokens"): "has no effect: answers are as long as train.max_completion_length allows; remove it",
}
_PENALTY = {"beta": Annotated[float, Field(ge=0)]}
# What TRL declares as text and looks at in training.
_GRPO_CHOICES: dict[str, Any] = {
    "loss_type": Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "sapo", "luspo", "vespo"],
    "importance_sampling_level": Literal["token", "sequence"],
    "multi_objective_aggregation": Literal["sum_then_normalize", "normalize_then_sum"],
    "scale_rewards": bool | Literal["group", "batch", "none"],
}
KINDS = {
    "grpo": Kind(
        GrpoObjective,
        ("trl.trainer.grpo_config", "GRPOConfig"),
        code="policy:GroupedPolicy",
        refused=_POLICY_REFUSED,
        defaults={"disable_dropout": True},
        types=_PENALTY | _GRPO_CHOICES,
        unread=_UNREAD,
    ),
    "rloo": Kind(
        RlooObjective,
        ("trl.trainer.rloo_config", "RLOOConfig"),
        code="policy:GroupedPolicy",
        refused=_POLICY_REFUSED,
        defaults={"disable_dropout": True},
        types=_PENALTY,
        unread=_UNREAD,
    ),
    "ppo": Kind(
        PpoObjective,
        ("anyformer.recipes.ppo_config", "PPOConfig"),
        code="policy:ProximalPolicy",
        refused=_POLICY_REFUSED
        | {
            "eval_strategy": "is not offered: the reward on held-out prompts is measured before and after; remove it",
            "max_prompt_length": "is not needed: prompts without room for an answer are left out; remove it",
        },
        types=_PENALTY
        | dict.fromkeys(("cliprange", "cliprange_value", "kl_horizon"), Annotated[float, Field(gt=0)])
        | dict.fromkeys(("num_ppo_epochs", "num_mini_batches"), Annotated[int, Field(ge=1)])
        | dict.fromkeys(("gamma", "lam"), Annotated[float, Field(ge=0, le=1)])
        | {"vf_coef": Annotated[float, Field(ge=0)], "kl_target": Annotated[float, Field(gt=0)] | None},
        unread=_UNREAD,
    ),
}
