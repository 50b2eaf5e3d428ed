"""Recipes on preferences that cannot work are refused when they are read."""

import pytest
from recipe_files import GOOD, fault, faults, write

from anyformer.recipes.loading import load_recipe
from anyformer.recipes.schema import DPO_LOSSES


def preference(kind, *overrides):
    return GOOD, f"objective.kind={kind}", *overrides


REFUSED = [
    (("dpo", "train.loss_type=sigmod"), "train.loss_type.*did you mean 'sigmoid'"),
    (("dpo", "train.loss_type=[sigmoid, nll]"), "train.loss_type"),
    (("dpo", "train.loss_type=[sigmoid, sft]", "train.loss_weights=[1.0]"), "holds 1 weights for 2 losses"),
    (("dpo", "train.label_smoothing=0.1"), "no effect on the loss sigmoid.*robust"),
    (("dpo", "train.label_smoothing=0.5", "train.loss_type=robust"), "label_smoothing.*below 0.5"),
    (("dpo", "train.loss_type=exo_pair"), "exo_pair needs label_smoothing above 0"),
    (
        ("dpo", "train.loss_type=aot", "train.f_divergence_type=forward_kl"),
        "forward_kl is not defined for the loss aot",
    ),
    (("dpo", "train.f_divergence_type=reverse"), "f_divergence_type.*did you mean 'reverse_kl'"),
    (("dpo", "train.loss_type=aot", "train.use_weighting=true"), "use_weighting: weighs single pairs"),
    (("dpo", "train.disable_dropout=false"), "disable_dropout: is always true"),
    (("kto", "train.disable_dropout=false"), "disable_dropout: is always true"),
    (("dpo", "train.beta=0"), "beta.*greater than 0"),
    (
        ("dpo", "train.label_smoothing_factor=0.1"),
        "label_smoothing_factor.*set train.label_smoothing and loss_type: rob",
    ),
    (("simpo", "train.label_smoothing_factor=0.1"), "label_smoothing_factor.*set train.label_smoothing"),
    *(
        ((kind, "train.label_smoothing_factor=0.1"), "label_smoothing_factor: is not part")
        for kind in ("kto", "orpo", "reward")
    ),
    (("dpo", "train.truncation_mode=keep_end"), "is data.truncation"),
    (("dpo", "train.padding_free=true"), "no effect"),
    (("dpo", "train.sync_ref_model=true", "adapter={kind: lora}"), "sync_ref_model.*adapter.kind to none"),
    (("kto", "train.sync_ref_model=true", "train.precompute_ref_log_probs=true"), "remove one of the two"),
    (("dpo", "adapter={kind: lora, init_lora_weights: pissa}"), "init_lora_weights: pissa changes the model"),
    (("kto", "adapter={kind: lora, init_lora_weights: false}"), "init_lora_weights: false changes the model"),
    (("kto", "train.train_sampling_strategy=group_by_length"), "must be sequential.*apo_zero_unpaired"),
    (("kto", "train.per_device_train_batch_size=1"), "at least 2.*apo_zero_unpaired"),
    (("kto", "train.loss_type=bco"), "kto or apo_zero_unpaired"),
    (("kto", "train.desirable_weight=-1"), "desirable_weight.*at least 0"),
    (("orpo", "train.is_encoder_decoder=false"), "no effect"),
    (("orpo", "train.generate_during_eval=true"), "is eval.samples"),
    (("cpo", "train.loss_type=ipo", "train.label_smoothing=0.1"), "label_smoothing: has no effect on the loss ipo"),
    (("simpo", "train.loss_type=sigmoid"), "loss_type: is simpo.*kind: cpo"),
    (("simpo", "train.betta=2"), "did you mean 'beta'"),
    (("reward", "train.pad_token=x"), "belongs to the tokenizer"),
    (("reward", "train.center_rewards_coefficient=-1"), "at least 0"),
    (("reward", "objective.loss_on=all"), "unknown key"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=lambda v: " ".join(v) if isinstance(v, tuple) else "")
def test_what_cannot_work_is_refused(given, message, tmp_path, monkeypatch):
    import re

    monkeypatch.chdir(tmp_path)
    assert re.search(message, fault(*preference(*given)))


ACCEPTED = [
    *(("dpo", f"train.loss_type={name}") for name in DPO_LOSSES if name != "exo_pair"),
    ("dpo", "train.loss_type=[sigmoid, sft]", "train.loss_weights=[1.0, 0.2]"),
    ("dpo", "train.loss_type=robust", "train.label_smoothing=0.1"),
    ("dpo", "train.f_divergence_type=js_divergence", "train.ld_alpha=0.5"),
    ("dpo", "train.sync_ref_model=true", "adapter={kind: freeze, train: [norms]}"),
    ("dpo", "adapter={kind: lora, init_lora_weights: gaussian, lora_dropout: 0.1}"),
    ("kto", "train.loss_type=apo_zero_unpaired", "train.train_sampling_strategy=group_by_length"),
    ("simpo", "train.beta=2.5", "train.simpo_gamma=1.4", "train.alpha=0.1"),
    ("reward", "train.disable_dropout=false", "adapter={kind: lora, init_lora_weights: pissa}"),
    ("orpo", "train.beta=0.2"),
]


@pytest.mark.parametrize("given", ACCEPTED, ids=" ".join)
def test_what_can_work_is_accepted(given, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, *overrides = preference(*given)
    assert load_recipe(write(text), overrides).objective.kind == given[0]


def test_all_faults_are_told_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ("kto", "train.per_device_train_batch_size=1", "train.train_sampling_strategy=random")
    lines = faults(*preference(*given, "adapter={kind: lora, init_lora_weights: olora}"))
    assert len([line for line in lines if "must be" in line or "changes the model" in line]) == 3
