"""Prompts that are conversations: what a policy cannot answer is refused before a weight is loaded."""

import json

import pytest
from transformers import AutoTokenizer

from anyformer.recipes.errors import UserError
from anyformer.recipes.run import run_recipe

USER = {"role": "user", "content": "Count."}


@pytest.fixture
def policy(recipe, tmp_path):
    """A function: a recipe of an objective on these prompts."""

    def build(kind, prompts, *overrides):
        data = tmp_path / "prompts.jsonl"
        data.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
        groups = () if kind == "ppo" else ("train.num_generations=4",)
        return recipe(
            f"objective={{kind: {kind}, reward: pep257}}",
            f"data={{source: {data}, eval_fraction: 0}}",
            "~train.max_length",
            "~eval.max_new_tokens",
            "train.max_completion_length=4",
            *groups,
            *overrides,
        )

    return build


@pytest.mark.parametrize("kind", ["grpo", "rloo", "ppo"])
def test_conversations_need_a_chat_template(policy, tiny_checkpoint, tmp_path, kind):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(UserError, match="conversations, but the tokenizer has no chat template"):
        run_recipe(policy(kind, [[USER]] * 4, f"model.tokenizer={tmp_path / 'plain'}"), dry_run=True)


def test_a_template_that_refuses_a_prompt_is_told(policy, tiny_checkpoint, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path / "strict")
    prompts = [[USER], [{"role": "system", "content": "Be brief."}, USER]]
    with pytest.raises(UserError, match="Row 2: the chat template refuses the prompt: no system here"):
        run_recipe(policy("grpo", prompts, f"model.tokenizer={tmp_path / 'strict'}"), dry_run=True)


def test_a_prompt_ends_before_the_answer(policy):
    answered = [USER, {"role": "assistant", "content": "One."}]
    with pytest.raises(UserError, match=r"prompts\.jsonl.*prompt ends with an assistant message"):
        run_recipe(policy("grpo", [[USER], answered]), dry_run=True)
    run_recipe(policy("grpo", [[USER], [*answered, USER]]), dry_run=True)
