"""Mixtures of experts under policy optimisation and distillation: the model's own router losses, biases that move."""

import pytest
import torch
from ppo_runs import VOCAB, columns, prompts, trainer_factory
from tuning import message, objective_of, trainer_of

from anyformer.modeling.moe import AnyformerRouter

make = pytest.fixture(trainer_factory)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "router": "sigmoid"}
LOSSES = {"router_aux_loss_coef": 0.1, "router_z_loss_coef": 0.05}
MOVING = {"router_score_bias": True, "router_bias_update_rate": 0.25}
PROMPTS = [{"prompt": message("user", text)} for text in ("one", "two three", "the cat", "the dog sat")]
ROWS = [row | {"completion": message("assistant", "on the mat")} for row in PROMPTS]


def nothing(prompts, completions, **columns):
    return [0.0] * len(completions)


@pytest.fixture
def objective(tiny_checkpoint, tmp_path):
    """A function: an objective whose rewards say nothing, so that all advantages are 0."""
    file = tmp_path / "reward.py"
    file.write_text("def nothing(prompts, completions, **c):\n    return [0.0] * len(completions)\n", encoding="utf-8")
    policy = ("~train.max_length", "train.num_generations=2", "train.max_completion_length=4", "train.beta=0")

    def build(kind):
        if kind == "distill":
            alone = (f"objective.teacher={tiny_checkpoint}", "train.lmbda=1.0", "train.max_new_tokens=4")
            return objective_of(kind, tiny_checkpoint, tmp_path, *alone, "train.max_steps=3")
        named = f"objective.reward={file}:nothing"
        return objective_of(kind, tiny_checkpoint, tmp_path, *policy, named, "train.max_steps=3")

    return build


def router_loss(model, input_ids, attention_mask):
    """What the body's router logits come to under the model's own rule."""
    routed = model.model(input_ids=input_ids, attention_mask=attention_mask, output_router_logits=True)
    return model.router_losses(routed.router_logits, [attention_mask])[0]


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_where_rewards_say_nothing_the_loss_is_the_routers_own(objective, tiny, kind):
    tuned = objective(kind)
    model = tiny(vocab_size=291, **EXPERTS, **LOSSES).train()
    trainer = trainer_of(tuned, PROMPTS, model=model)
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    loss = trainer.compute_loss(trainer.model, inputs)
    ids, mask = (
        torch.cat([inputs[f"{side}_{what}"] for side in ("prompt", "completion")], 1) for what in ("ids", "mask")
    )
    expected = router_loss(model, ids, mask)
    assert expected > 0.05
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


def test_a_distilled_mixture_of_experts_keeps_its_router_losses(objective, tiny):
    from anyformer.recipes.objectives.distillation import divergence

    tuned = objective("distill")
    model = tiny(vocab_size=291, **EXPERTS, **LOSSES).train()
    trainer = trainer_of(tuned, ROWS, model=model)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, batch)
    inputs, on = {n: batch[n] for n in ("input_ids", "attention_mask")}, batch["labels"][:, 1:] != -100
    apart = divergence(*(m(**inputs).logits[:, :-1][on] for m in (model, tuned.teacher)), tuned.arguments.beta).mean()
    torch.testing.assert_close(loss, apart + router_loss(model, **inputs), rtol=0, atol=1e-5)
    assert not model.model._forward_hooks and not model.model._forward_pre_hooks


@pytest.mark.parametrize("passes", [1, 2])
def test_ppo_trains_the_routers_of_each_pass_by_its_share_of_the_tokens(make, tiny, passes):
    model = tiny(vocab_size=VOCAB, **EXPERTS, **LOSSES)
    trainer = make(model, reward=nothing, whiten_advantages=False)
    rollout = trainer.rollout(columns(prompts(6)))
    parts = list(torch.arange(6).split(6 // passes))
    model.zero_grad()
    means = trainer._backward(model, rollout, parts)
    got = [layer.mlp.router.weight.grad.clone() for layer in model.model.layers]
    model.zero_grad()
    whole = rollout.attention_mask.sum()
    expected = sum(
        router_loss(model, part.input_ids, part.attention_mask) * part.attention_mask.sum() / whole
        for part in (rollout[rows] for rows in parts)
    )
    expected.backward()
    assert means[:2].tolist() == [0.0, 0.0] and expected > 0.05
    torch.testing.assert_close(means[4], expected.detach(), rtol=0, atol=1e-6)
    for gradient, layer in zip(got, model.model.layers, strict=True):
        assert gradient.abs().max() > 1e-4
        torch.testing.assert_close(gradient, layer.mlp.router.weight.grad, rtol=0, atol=1e-6)


@pytest.fixture
def loads(monkeypatch):
    """The load of a router at each update of its bias."""
    seen = []
    update = AnyformerRouter.update_bias
    monkeypatch.setattr(
        AnyformerRouter, "update_bias", lambda router: seen.append(int(router.load.sum())) or update(router)
    )
    return seen


def assert_moved(model):
    for layer in model.model.layers:
        bias = layer.mlp.router.e_score_correction_bias / 0.25
        assert bias.abs().max() > 0
        torch.testing.assert_close(bias, bias.round())


@pytest.mark.parametrize("kind", ["grpo", "rloo", "distill"])
def test_biases_move_at_each_step_by_the_load_of_what_is_learned(objective, tiny, loads, kind):
    """Not by that of answers being sampled, nor of a reference."""
    tuned = objective(kind)
    model = tiny(vocab_size=291, **EXPERTS, **MOVING).train()
    trainer = trainer_of(tuned, ROWS if kind == "distill" else PROMPTS, model=model)
    learned, compute = [], trainer.compute_loss

    def recorded(given, inputs, *rest, **named):
        masks = ("attention_mask",) if kind == "distill" else ("prompt_mask", "completion_mask")
        learned.append(sum(int(inputs[name].sum()) for name in masks))
        return compute(given, inputs, *rest, **named)

    trainer.compute_loss = recorded
    trainer.train()
    layers, chosen = len(model.model.layers), 2
    assert len(learned) == 3  # an odd number: two moves may undo each other
    assert loads == [tokens * chosen for tokens in learned for _ in range(layers)]
    assert_moved(model)


def test_ppo_moves_biases_at_each_update_and_keeps_the_references(make, tiny, loads):
    model = tiny(vocab_size=VOCAB, **EXPERTS, **MOVING)
    trainer = make(model, num_ppo_epochs=2, max_steps=2)
    rollouts, sample = [], trainer.rollout
    trainer.rollout = lambda given: rollouts.append(sample(given)) or rollouts[-1]
    trainer.train()
    tokens = [int(rollout.attention_mask.sum()) for rollout in rollouts for _ in range(2)]
    assert loads == [2 * count for count in tokens for _ in model.model.layers]
    assert_moved(model)
    started = {name: value for name, value in trainer.reference.items() if "e_score_correction_bias" in name}
    assert len(started) == len(model.model.layers) and not any(value.any() for value in started.values())
