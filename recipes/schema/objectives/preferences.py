"""Objectives on preferences: reward, dpo, kto, orpo, cpo, simpo."""

from typing import Annotated, Any, Literal

from pydantic import Field

from ..fields import Kind
from .base import NO_EFFECT, ROUTED, TOKENIZER, TRAINER_REFUSED, UNSMOOTHED, ObjectiveSection


class RewardObjective(ObjectiveSection):
    """`objective: {kind: reward}`: a reward model from pairs."""

    kind: Literal["reward"] = "reward"


class DpoObjective(ObjectiveSection):
    """`objective: {kind: dpo}`: direct preference optimisation, in all variants that `train.loss_type` names."""

    kind: Literal["dpo"] = "dpo"


class KtoObjective(ObjectiveSection):
    """`objective: {kind: kto}`: answers that are good or bad by themselves."""

    kind: Literal["kto"] = "kto"


class OrpoObjective(ObjectiveSection):
    """`objective: {kind: orpo}`: supervised tuning with an odds ratio of chosen and rejected."""

    kind: Literal["orpo"] = "orpo"


class CpoObjective(ObjectiveSection):
    """`objective: {kind: cpo}`: contrastive preference optimisation."""

    kind: Literal["cpo"] = "cpo"


class SimpoObjective(ObjectiveSection):
    """`objective: {kind: simpo}`: preferences between log-probabilities a token, with a margin."""

    kind: Literal["simpo"] = "simpo"


# What trainers on preferences would do with rows that the suite has tokenised.
_PREFERENCE_REFUSED = (
    TRAINER_REFUSED
    | UNSMOOTHED
    | ROUTED
    | {
        "truncation_mode": "is data.truncation",
        "trust_remote_code": "is model.trust_remote_code",
        "model_init_kwargs": "is not used: see the model: section (dtype, attn_implementation, revision, config)",
        **dict.fromkeys(("pad_token", "eos_token", "padding_value", "chat_template_path"), TOKENIZER),
        **dict.fromkeys(("dataset_num_proc", "remove_unused_columns", "max_completion_length"), NO_EFFECT),
        **dict.fromkeys(("is_encoder_decoder", "padding_free"), NO_EFFECT),
        "generate_during_eval": "is eval.samples, which shows answers before and after",
    }
)
_REFERENCE_REFUSED = _PREFERENCE_REFUSED | {
    "disable_dropout": "is always true: under dropout the policy would differ from its own reference",
}
_SMOOTHED_PAIRS = "is not part of this objective's loss; for noisy preferences set train.label_smoothing"
_DPO_REFUSED = _REFERENCE_REFUSED | {"label_smoothing_factor": f"{_SMOOTHED_PAIRS} and loss_type: robust"}
_CPO_REFUSED = _PREFERENCE_REFUSED | {"label_smoothing_factor": _SMOOTHED_PAIRS}
_SIMPO_REFUSED = _CPO_REFUSED | {"loss_type": "is simpo; for another write objective: {kind: cpo}"}
_PAD_MULTIPLE = Annotated[int, Field(ge=1)] | Literal["auto"] | None
_PREFERENCE_TYPES: dict[str, Any] = {
    "pad_to_multiple_of": _PAD_MULTIPLE,
    "beta": Annotated[float, Field(gt=0)],
    "precompute_ref_batch_size": Annotated[int, Field(ge=1)] | None,
}
DPO_LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired"),
    *("apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm"),
)
_DPO_LOSS = Literal[DPO_LOSSES]  # type: ignore[valid-type]
_DPO_TYPES = _PREFERENCE_TYPES | {
    "loss_type": _DPO_LOSS | Annotated[list[_DPO_LOSS], Field(min_length=1)],
    "f_divergence_type": Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"],
    "label_smoothing": Annotated[float, Field(ge=0, lt=0.5)],
    "ld_alpha": Annotated[float, Field(ge=0, le=1)] | None,
    "discopop_tau": Annotated[float, Field(gt=0)],
}
_KTO_TYPES = _PREFERENCE_TYPES | dict.fromkeys(
    ("desirable_weight", "undesirable_weight"), Annotated[float, Field(ge=0)]
)
_CPO_TYPES = _PREFERENCE_TYPES | {
    "label_smoothing": Annotated[float, Field(ge=0, lt=0.5)],
    "cpo_alpha": Annotated[float, Field(ge=0)],
    "simpo_gamma": Annotated[float, Field(ge=0)],
}
_REWARD_TYPES = {
    "pad_to_multiple_of": _PAD_MULTIPLE,
    "center_rewards_coefficient": Annotated[float, Field(ge=0)] | None,
}
_UNSPLIT = "an answer is judged whole, on its prompt"
_CPO_CONFIG = ("trl.experimental.cpo.cpo_config", "CPOConfig")
KINDS = {
    "reward": Kind(
        RewardObjective,
        ("trl.trainer.reward_config", "RewardConfig"),
        code="reward:RewardModelling",
        refused=_PREFERENCE_REFUSED,
        unsplit=_UNSPLIT,
        types=_REWARD_TYPES,
    ),
    "dpo": Kind(
        DpoObjective,
        ("trl.trainer.dpo_config", "DPOConfig"),
        code="preference:DirectPreferenceTuning",
        refused=_DPO_REFUSED,
        unsplit=_UNSPLIT,
        types=_DPO_TYPES,
    ),
    "kto": Kind(
        KtoObjective,
        ("trl.trainer.kto_config", "KTOConfig"),
        code="kto:KahnemanTverskyTuning",
        refused=_REFERENCE_REFUSED,
        unsplit=_UNSPLIT,
        types=_KTO_TYPES,
    ),
    "orpo": Kind(
        OrpoObjective,
        ("trl.experimental.orpo.orpo_config", "ORPOConfig"),
        code="reference_free:OddsRatioTuning",
        refused=_PREFERENCE_REFUSED,
        unsplit=_UNSPLIT,
        types=_PREFERENCE_TYPES,
    ),
    "cpo": Kind(
        CpoObjective,
        _CPO_CONFIG,
        code="reference_free:ContrastiveTuning",
        refused=_CPO_REFUSED,
        unsplit=_UNSPLIT,
        types=_CPO_TYPES,
    ),
    # Meng et al. 2024 (arXiv:2405.14734), section 3.2 and table 8: no likelihood term, beta 2, gamma half of it.
    "simpo": Kind(
        SimpoObjective,
        _CPO_CONFIG,
        code="reference_free:ContrastiveTuning",
        refused=_SIMPO_REFUSED,
        unsplit=_UNSPLIT,
        types=_CPO_TYPES,
        defaults={"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
    ),
}
