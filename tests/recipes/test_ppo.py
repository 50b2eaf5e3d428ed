"""PPO's rollouts and updates against passes without padding and losses written out."""

import copy
import math
from typing import Any

import pytest
import torch
from ppo_runs import (
    DROPOUT,
    VOCAB,
    columns,
    logged,
    mean_id,
    prompts,
    trainer_factory,
    weights,
    with_lora,
    with_prompt,
)

from anyformer.recipes.errors import UserError
from anyformer.recipes.ppo import PPOTrainer
from anyformer.recipes.ppo import trainer as trainer_module

make = pytest.fixture(trainer_factory)
KINDS = ["plain", "lora", "trained lora", "prompt", "plain bf16", "lora bf16", "checkpointing"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_update_starts_at_the_reference_exactly(kind, tiny, make, monkeypatch):
    model = tiny(vocab_size=VOCAB, **DROPOUT)
    if "lora" in kind:
        model = with_lora(model, trained="trained" in kind)
    elif kind == "prompt":
        model = with_prompt(model)
    differences = []
    original = trainer_module.clipped_policy_loss

    def spy(logps, old_logps, advantages, mask, *rest):
        differences.append((logps - old_logps)[mask].detach())
        return original(logps, old_logps, advantages, mask, *rest)

    monkeypatch.setattr(trainer_module, "clipped_policy_loss", spy)
    trainer = make(
        model,
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        bf16="bf16" in kind,
        gradient_checkpointing=kind == "checkpointing",
    )
    trainer.train()
    assert logged(trainer, "kl") == [0.0] and logged(trainer, "kl_per_token") == [0.0]
    first, later = torch.cat(differences[:2]), torch.cat(differences[2:])
    assert torch.equal(first.exp(), torch.ones_like(first))
    assert later.abs().max() > 1e-4  # the updates after the first have moved


def test_a_checkpointed_layer_is_recomputed_and_learns_the_same(tiny, make):
    results, calls = [], []
    for checkpointing in (False, True):
        model = tiny(vocab_size=VOCAB, **DROPOUT)
        seen = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(torch.is_grad_enabled()))
        trainer = make(model, max_steps=1, gradient_checkpointing=checkpointing)
        trainer.train()
        results.append(weights(trainer))
        calls.append(sum(seen))
    assert calls[1] == 2 * calls[0]
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("position_embedding", ["rope", "learned", "alibi"])
def test_padding_changes_no_log_probability(position_embedding, tiny, make):
    trainer = make(tiny(vocab_size=VOCAB, position_embedding=position_embedding), temperature=0.7)
    torch.nn.init.normal_(trainer.value_head.weight)
    trainer.base.generation_config.eos_token_id = list(range(2, 8))
    rollout = trainer.rollout(columns(prompts(6)))
    assert 0 in rollout.attention_mask[:, 0] and not rollout.mask.all()
    width = rollout.mask.shape[1]
    for row in range(6):
        real = rollout.attention_mask[row].bool()
        ids, length = rollout.input_ids[row][real][None], int(rollout.mask[row].sum())
        with torch.no_grad():
            outputs = trainer.model(ids, output_hidden_states=True)
            logps = (outputs.logits / 0.7).log_softmax(-1)[0, -length - 1 : -1].gather(-1, ids[0, -length:, None])
            values = trainer.value_head(trainer.model.model(ids).last_hidden_state)[0, -length - 1 : -1, 0]
        assert rollout.input_ids.shape[1] - width + length >= ids.shape[1]
        torch.testing.assert_close(rollout.logps[row, :length], logps[:, 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(rollout.values[row, :length], values, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["plain", "lora", "trained lora"])
def test_the_reference_stays_where_training_began(kind, tiny, make):
    model = tiny(vocab_size=VOCAB)
    base = copy.deepcopy(model)
    if kind != "plain":
        model = with_lora(model, trained=kind == "trained lora")
    start = copy.deepcopy(model).eval()
    trainer = make(model, max_steps=3, learning_rate=1e-2)
    trainer.train()
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        wanted = start(ids).logits.log_softmax(-1)[0, 1:4].gather(-1, ids[0, 2:, None])[:, 0]
        moved = trainer.model.eval()(ids).logits.log_softmax(-1)[0, 1:4].gather(-1, ids[0, 2:, None])[:, 0]
        of_base = base(ids).logits.log_softmax(-1)[0, 1:4].gather(-1, ids[0, 2:, None])[:, 0]
        logps = trainer.score_tokens(trainer._reference_policy, ids, torch.ones_like(ids), 3)[0][0]
        policy = trainer.score_tokens(trainer.model, ids, torch.ones_like(ids), 3)[0][0]
    torch.testing.assert_close(logps, wanted, rtol=0, atol=1e-5)
    torch.testing.assert_close(policy, moved, rtol=0, atol=1e-5)
    assert (moved - wanted).abs().max() > 1e-2
    assert (kind == "trained lora") == bool((of_base - wanted).abs().max() > 1e-2)


def test_only_what_is_trained_is_kept_twice(tiny, make):
    trainer = make(with_lora(tiny(vocab_size=VOCAB)))
    assert trainer.reference and all("lora_" in name for name in trainer.reference)


def test_the_score_stands_at_the_last_token(make):
    # Without discount, divergence and values, what is to come at every token is the score.
    trainer = make(beta=0.0, gamma=1.0, lam=1.0, whiten_advantages=False)
    rollout = trainer.rollout(columns(prompts(8)))
    for row in range(8):
        length = int(rollout.mask[row].sum())
        completion = rollout.input_ids[row, -rollout.mask.shape[1] :][:length].tolist()
        assert rollout.returns[row, :length].tolist() == pytest.approx([sum(completion) / length / VOCAB] * length)
    assert not rollout.returns[~rollout.mask].any()


def test_rewards_of_tokens_are_their_divergence(make):
    trainer = make(
        beta=0.3, gamma=0.0, lam=0.0, whiten_advantages=False, reward=lambda prompts, texts, **_: [0.0] * len(texts)
    )
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)
    rollout = trainer.rollout(columns(prompts(8)))
    reference = trainer.score_tokens(
        trainer._reference_policy, rollout.input_ids, rollout.attention_mask, rollout.mask.shape[1]
    )[0]
    wanted = -0.3 * (rollout.logps - reference)[rollout.mask]
    assert wanted.abs().max() > 0.01
    torch.testing.assert_close(rollout.returns[rollout.mask], wanted, rtol=0, atol=1e-5)


def test_rewards_get_ids_texts_and_columns(make):
    calls: list[dict[str, Any]] = []

    def first(prompts, completions, completion_ids, *, wanted):
        calls.append({"prompts": prompts, "completions": completion_ids, "texts": completions, "wanted": wanted})
        return [1.0] * len(completions)

    def second(prompts, completions, completion_ids, **_):
        return [float(i) for i in range(len(completions))]

    rows = prompts(4)
    trainer = make(reward=[first, second], max_prompt_length=3, beta=0.0, whiten_advantages=False, lam=1.0)
    rollout = trainer.rollout(columns(rows))
    (call,) = calls
    assert call["prompts"] == [row["prompt_ids"][-3:] for row in rows]
    assert call["wanted"] == [row["wanted"] for row in rows]
    for row, (ids, text) in enumerate(zip(call["completions"], call["texts"], strict=True)):
        assert ids == rollout.input_ids[row, -rollout.mask.shape[1] :][rollout.mask[row]].tolist()
        assert text == " ".join(f"t{i}" for i in ids if i > 2)
    assert rollout.returns[:, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert trainer._metrics["reward/first"] == [1.0] and trainer._metrics["reward/second"] == [1.5]


def test_stop_tokens_are_those_of_the_generation_config(make):
    trainer = make(missing_eos_penalty=0.5, beta=0.0, lam=1.0, whiten_advantages=False, max_completion_length=8)
    trainer.base.generation_config.eos_token_id = [2, 16, 17, 18]
    rollout = trainer.rollout(columns(prompts(16)))
    lengths = rollout.mask.sum(-1)
    completions = rollout.input_ids[:, -rollout.mask.shape[1] :]
    ends = [completions[row, length - 1].item() for row, length in enumerate(lengths)]
    ended = [end in (2, 16, 17, 18) for end in ends]
    assert 0 < sum(ended) < 16 and all(e or n == rollout.mask.shape[1] for e, n in zip(ended, lengths, strict=True))
    scores = mean_id(None, None, [c[m].tolist() for c, m in zip(completions, rollout.mask, strict=True)])
    wanted = [score - (0 if e else 0.5) for score, e in zip(scores, ended, strict=True)]
    assert rollout.returns[:, 0].tolist() == pytest.approx(wanted)
    assert trainer._metrics["ended"] == [sum(ended) / 16]


def test_sampling_takes_nothing_else_from_the_generation_config(make):
    completions = []
    for own in ({}, {"top_k": 1, "repetition_penalty": 5.0, "suppress_tokens": [7, 8, 9], "min_new_tokens": 6}):
        trainer = make()
        trainer.base.generation_config.update(**own)
        before = trainer.base.generation_config
        torch.manual_seed(5)
        completions.append(trainer.rollout(columns(prompts(8))).input_ids)
        assert trainer.base.generation_config is before
    assert torch.equal(*completions)


def test_a_small_top_p_samples_the_likeliest_token(make):
    trainer = make(top_p=1e-6)
    rows = prompts(4)
    rollout = trainer.rollout(columns(rows))
    for row in range(4):
        ids = torch.tensor([rows[row]["prompt_ids"]])
        greedy = trainer.model.generate(ids, do_sample=False, max_new_tokens=6, use_cache=True)[0, ids.shape[1] :]
        completion = rollout.input_ids[row, -rollout.mask.shape[1] :][rollout.mask[row]]
        assert completion.tolist() == greedy[: len(completion)].tolist()


def test_a_mini_batch_is_averaged_over_its_tokens_however_it_is_split(make):
    results = []
    for size, accumulation in ((8, 1), (4, 2), (1, 8), (3, 3)):
        count = size * accumulation
        trainer = make(
            rows=prompts(8),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            num_mini_batches=1,
            learning_rate=1e-2,
            optim="sgd",  # whose steps are as exact as the gradients
        )
        trainer.train()
        assert count >= 8  # an epoch of eight prompts is one rollout in each case
        results.append((weights(trainer), logged(trainer, "policy_loss"), logged(trainer, "loss")))
    for other, policy_loss, loss in results[1:]:
        assert policy_loss == pytest.approx(results[0][1], abs=1e-5)
        assert loss == pytest.approx(results[0][2], abs=1e-5)
        for name, value in results[0][0].items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=1e-6)


def test_gradients_are_those_of_the_loss_written_out(make):
    trainer = make(rows=prompts(6), per_device_train_batch_size=2, gradient_accumulation_steps=3, vf_coef=0.5)
    trainer.create_optimizer()
    torch.nn.init.normal_(trainer.value_head.weight)
    rollout = trainer.rollout(columns(prompts(6)))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.05)
    statistics = trainer._backward(trainer.model, rollout, [torch.tensor([4, 0]), torch.tensor([3])])
    gradients = [p.grad.clone() for p in (*trainer.model.parameters(), *trainer.value_head.parameters())]
    trainer.model.zero_grad()
    trainer.value_head.zero_grad()
    policy, value, clipped, tokens = 0.0, 0.0, 0, 0
    for row in (4, 0, 3):
        real = rollout.attention_mask[row].bool()
        ids, length = rollout.input_ids[row][real][None], int(rollout.mask[row].sum())
        hidden = trainer.model.model(ids).last_hidden_state[0]
        logps = trainer.model.lm_head(hidden).log_softmax(-1)
        for t in range(length):
            at = ids.shape[1] - length + t
            ratio = (logps[at - 1, ids[0, at]] - rollout.logps[row, t]).exp()
            advantage, old = rollout.advantages[row, t], rollout.values[row, t]
            new = trainer.value_head(hidden[at - 1])[0]
            policy = policy - torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            clipped += int(ratio.clamp(0.8, 1.2) * advantage < ratio * advantage)
            errors = [new - rollout.returns[row, t], old + (new - old).clamp(-0.2, 0.2) - rollout.returns[row, t]]
            value = value + 0.5 * max(error**2 for error in errors)
            tokens += 1
    ((policy + 0.5 * value) / tokens).backward()
    assert clipped > 0
    assert statistics[:3].tolist() == pytest.approx([policy.item() / tokens, value.item() / tokens, clipped / tokens])
    for gradient, parameter in zip(
        gradients, (*trainer.model.parameters(), *trainer.value_head.parameters()), strict=True
    ):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5)


def test_the_number_of_updates_is_passes_times_mini_batches(make):
    from transformers import TrainerCallback

    class Count(TrainerCallback):
        steps = 0

        def on_optimizer_step(self, *args, **kwargs):
            self.steps += 1

    count = Count()
    trainer = make(
        callbacks=[count],
        gradient_accumulation_steps=2,
        num_ppo_epochs=3,
        num_mini_batches=4,
        max_steps=-1,
        num_train_epochs=2,
        rows=prompts(19),
    )
    trainer.train()
    # Three rollouts an epoch, of 8, 8 and 3 prompts: the last has three mini-batches.
    assert trainer.state.global_step == 6
    assert count.steps == 2 * 3 * (4 + 4 + 3)
    for name in ("reward", "kl", "entropy", "clip_fraction", "value_loss", "completion_length", "ended", "beta"):
        assert len(logged(trainer, name)) == 6, name


def test_later_passes_shuffle_the_rows(make, monkeypatch):
    drawn = []
    original = PPOTrainer._backward

    def spy(self, model, rollout, mini_batch):
        drawn.append(torch.cat(mini_batch).tolist())
        return original(self, model, rollout, mini_batch)

    monkeypatch.setattr(PPOTrainer, "_backward", spy)
    make(max_steps=1, per_device_train_batch_size=12, num_mini_batches=3, num_ppo_epochs=3).train()
    passes = [sum(drawn[i : i + 3], []) for i in (0, 3, 6)]  # noqa: RUF017
    assert [len(rows) for rows in drawn] == [4] * 9
    assert passes[0] == list(range(12)) and passes[0] != passes[1] != passes[2]
    assert all(sorted(rows) == passes[0] for rows in passes)


def test_each_update_moves_policy_and_value_head_by_the_clipped_gradient(make):
    options = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "constant", "max_steps": 1, "vf_coef": 10.0}
    for passes in (1, 3):
        trainer = make(max_grad_norm=1e-3, num_ppo_epochs=passes, **options)
        before = {name: value.clone() for name, value in weights(trainer).items()}
        trainer.train()
        moved = {name: (value - before[name]).norm() for name, value in weights(trainer).items()}
        # Steps of 0.5 * 0.001 each, in nearly the same direction.
        assert torch.stack(list(moved.values())).norm().item() == pytest.approx(passes * 5e-4, rel=0.02)
        assert moved["value_head.weight"] > 1e-4
        assert logged(trainer, "grad_norm")[0] > 1.0  # before it was clipped


def test_other_columns_are_removed_on_request(make):
    seen = []

    def reward(prompts, completions, completion_ids, **rest):
        seen.append(sorted(rest))
        return [0.0] * len(completions)

    for remove in (False, True):
        make(max_steps=1, remove_unused_columns=remove, reward=reward).train()
    assert seen == [["wanted"], []]


def test_the_order_of_prompts_follows_the_seed_alone(make):
    orders = []
    for noise in (1, 2):
        trainer = make(rows=prompts(32), max_steps=1, seed=7)
        torch.manual_seed(noise)
        orders.append([row for batch in trainer.get_train_dataloader() for row in batch["prompt_ids"]])
    assert orders[0] == orders[1] != [row["prompt_ids"] for row in prompts(32)]


def test_whitened_rewards_have_variance_one(make):
    trainer = make(
        reward=lambda prompts, completions, completion_ids, **_: [float(ids[0]) for ids in completion_ids],
        whiten_rewards=True,
        whiten_advantages=False,
        gamma=0.0,
        lam=0.0,
    )
    rollout = trainer.rollout(columns(prompts(8)))
    rewards = rollout.returns[rollout.mask]
    assert rewards.var(unbiased=False).item() == pytest.approx(1.0, abs=1e-4)
    assert abs(rewards.mean().item()) > 1e-4


@pytest.mark.parametrize(
    ("scores", "message"),
    [([1.0], "reward fixed: gives 1 numbers for 4 answers"), ([1.0, math.nan, 0, 0], "gives nan for 't")],
)
def test_scores_that_are_none_are_refused(make, scores, message):
    def fixed(prompts, completions, completion_ids, **_):
        return scores

    with pytest.raises(UserError, match=message):
        make(reward=fixed).rollout(columns(prompts(4)))


def test_under_lora_plus_the_value_head_learns_at_its_own_rate(tiny, make):
    """Adam's first step is the learning rate whatever the gradient: B moves 16 times as far as A and as the head."""
    from types import SimpleNamespace

    from anyformer.recipes.adapters import use_lora_plus

    model = with_lora(tiny(vocab_size=VOCAB), trained=True)
    # Adam divides by its epsilon beside the gradient.
    quiet = {"max_steps": 1, "num_ppo_epochs": 1, "lr_scheduler_type": "constant", "optim_args": "eps=1e-12"}
    trainer = make(model, learning_rate=1e-3, max_grad_norm=0.0, **quiet)
    use_lora_plus(trainer, SimpleNamespace(lora_plus_lr_ratio=16, lora_plus_lr_embedding=None))
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    trainer.train()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            moved = (parameter - before[name]).abs().max().item()
            assert moved == pytest.approx(1.6e-2 if "lora_B" in name else 1e-3, rel=1e-3), name
    assert trainer.value_head.weight.abs().max().item() == pytest.approx(1e-3, rel=1e-3)
    assert sum(p is trainer.value_head.weight for g in trainer.optimizer.param_groups for p in g["params"]) == 1
