"""Schedules of the learning rate against their closed formulas, and wrong keywords."""

import math

import pytest
import torch
from transformers import get_scheduler

from anyformer.recipes.arguments import training_arguments
from anyformer.recipes.checks_training import SCHEDULES
from anyformer.recipes.errors import UserError
from anyformer.recipes.run import run_recipe

ARGUMENTS = ("transformers.training_args", "TrainingArguments")
STEPS, WARMUP, RATE = 40, 8, 0.5


def rates(kind, **options):
    """The learning rate of each step, as the trainer makes it."""
    values = {"output_dir": "x", "use_cpu": True, "learning_rate": RATE, "warmup_steps": WARMUP} | options
    arguments = training_arguments(ARGUMENTS, values | {"lr_scheduler_type": kind, "max_steps": STEPS})
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=RATE)
    scheduler = get_scheduler(
        arguments.lr_scheduler_type,
        optimizer,
        num_warmup_steps=arguments.get_warmup_steps(STEPS),
        num_training_steps=STEPS,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
    )
    found = []
    for _ in range(STEPS):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def left(step):
    """The share of the run behind the warmup that has passed."""
    return (step - WARMUP) / (STEPS - WARMUP)


def stable_decay(step, shape, least, decay=12):
    if step < WARMUP:
        return least + (1 - least) * step / WARMUP
    begun = STEPS - decay
    if step < begun:
        return 1.0
    passed = (step - begun) / decay
    fall = {
        "linear": 1 - passed,
        "cosine": (1 + math.cos(math.pi * passed)) / 2,
        "1-sqrt": 1 - math.sqrt(passed),
    }[shape]
    return least + (1 - least) * fall


CASES = {
    "linear": ("linear", {}, lambda s: s / WARMUP if s < WARMUP else 1 - left(s)),
    "cosine": ("cosine", {}, lambda s: s / WARMUP if s < WARMUP else (1 + math.cos(math.pi * left(s))) / 2),
    "cosine to a tenth": (
        "cosine_with_min_lr",
        {"min_lr_rate": 0.1},
        lambda s: s / WARMUP if s < WARMUP else 0.1 + 0.9 * (1 + math.cos(math.pi * left(s))) / 2,
    ),
    **{
        f"stable, {shape} decay": (
            "warmup_stable_decay",
            {"num_decay_steps": 12, "decay_type": shape, "min_lr_ratio": 0.1},
            lambda s, shape=shape: stable_decay(s, shape, 0.1),
        )
        for shape in ("linear", "cosine", "1-sqrt")
    },
}


@pytest.mark.parametrize(("kind", "options", "formula"), CASES.values(), ids=CASES)
def test_closed_formulas(kind, options, formula):
    found = rates(kind, lr_scheduler_kwargs=options or None)
    assert found == pytest.approx([RATE * formula(step) for step in range(STEPS)], abs=1e-9)


def test_a_warmup_below_one_is_a_share_of_the_steps():
    assert rates("linear", warmup_steps=0.2) == rates("linear")


WRONG = [
    ("lr_scheduler_kwargs: {min_lr: 0.1}", "lr_scheduler_kwargs.min_lr: is no keyword of the schedule linear"),
    (
        "lr_scheduler_type: warmup_stable_decay",
        "lr_scheduler_type: warmup_stable_decay needs lr_scheduler_kwargs: {num_decay_steps: 100}",
    ),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_stepss: 3, num_decay_steps: 3}",
        "num_decay_stepss: is no keyword of the schedule warmup_stable_decay, which takes num_decay_steps",
    ),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 3, decay_type: cosin}",
        "decay_type: must be linear, cosine or 1-sqrt, found 'cosin'",
    ),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 0.1}",
        "num_decay_steps: must be a whole number of at least 0, found 0.1",
    ),
    (
        "lr_scheduler_type: warmup_stable_decay, lr_scheduler_kwargs: {num_decay_steps: 3, min_lr_ratio: 2}",
        "min_lr_ratio: must be a share from 0 to 1, found 2",
    ),
    (
        "lr_scheduler_type: cosine, lr_scheduler_kwargs: {num_decay_steps: 3}",
        "num_decay_steps: is no keyword of the schedule cosine, which takes num_cycles",
    ),
]


@pytest.mark.parametrize(("train", "message"), WRONG, ids=[case[1][:40] for case in WRONG])
def test_wrong_keywords_are_refused_when_the_recipe_is_read(tmp_path, train, message):
    from anyformer.recipes.loading import load_recipe

    path = tmp_path / "r.yaml"
    path.write_text(f"model: {{path: a}}\ndata: {{source: b}}\ntrain: {{output_dir: c, {train}}}\n", encoding="utf-8")
    with pytest.raises(UserError) as told:
        load_recipe(path)
    assert "r.yaml:3: train." in str(told.value) and message in str(told.value)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_the_functions_that_keywords_are_read_of_are_the_librarys(kind):
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_utils import SchedulerType

    assert TYPE_TO_SCHEDULER_FUNCTION[SchedulerType(kind)].__name__ == SCHEDULES[kind]


def test_phases_longer_than_the_run_are_refused_before_weights_are_loaded(recipe):
    wsd = ("train.lr_scheduler_type=warmup_stable_decay", "train.warmup_steps=4", "train.max_steps=12")
    with pytest.raises(UserError, match="4 steps of warmup and 9 of decay are more than the 12 of the run"):
        run_recipe(recipe(*wsd, "train.lr_scheduler_kwargs={num_decay_steps: 9}"), dry_run=True)
    with pytest.raises(UserError, match="leave num_stable_steps out"):
        kwargs = "{num_decay_steps: 4, num_stable_steps: 3}"
        run_recipe(recipe(*wsd, f"train.lr_scheduler_kwargs={kwargs}"), dry_run=True)
    run_recipe(recipe(*wsd, "train.lr_scheduler_kwargs={num_decay_steps: 8}"), dry_run=True)
