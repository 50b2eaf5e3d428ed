"""The verb `plan`: what it finds under a name, and what it says of it."""

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from anyformer import AnyformerConfig
from anyformer.modeling import HEADS
from anyformer.recipes.loading import load_preset, shipped
from anyformer.recipes.planning import optimum
from anyformer.recipes.planning.optimizers import bytes_a_value
from anyformer.recipes.planning.units import duration, read_bytes, read_count
from anyformer.scripts.cli import app


def run(*words, status=0):
    result = CliRunner().invoke(app, ["plan", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output


def plan(*words):
    return json.loads(run(*words, "--json"))


@pytest.mark.parametrize("name", shipped("models"))
def test_parameters_are_those_of_the_built_model(name):
    found = plan(name)
    config = AnyformerConfig(**load_preset(name))
    head = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "seq2seq_lm"}[config.architecture]
    with torch.device("meta"):
        model = HEADS[head](config)
    model.tie_weights()
    built = sum(p.numel() for p in model.parameters())
    parameters = found["parameters"]
    assert parameters["total"] == sum(parameters["parts"].values()) == parameters["trainable"] == built
    assert found["memory"]["weights"] == pytest.approx(4 * built, rel=1e-3)  # a few buffers beside
    assert found["memory"]["gradients"] == 4 * built
    assert found["memory"]["optimizer"] == pytest.approx(8 * built, rel=1e-3)
    assert found["memory_with_checkpointing"]["activations"] < found["memory_without_checkpointing"]["activations"]


def test_known_values_of_llama_3_70b():
    found = plan("llama-3-70b", "--context", 32768)
    assert found["cache"]["bytes"]["float16"] == 10_737_418_240
    assert round(found["parameters"]["bytes"]["float16"] / 1e9) == 141
    # Of all parameters, embeddings and head included.
    assert found["parameters"]["parts"]["mlp"] / found["parameters"]["total"] == pytest.approx(0.799, abs=5e-4)
    text = run("llama-3-70b", "--context", 32768)
    assert "141.11 GB in 16 bits" in text and "79.9%" in text
    assert "10.74 GB in 16 bits for one text of 32,768 tokens" in text


def test_known_values_of_blocks():
    fields = "{hidden_size: 512, num_attention_heads: 8, num_key_value_heads: 8, head_dim: 64, num_hidden_layers: 1}"
    assert plan("llama-2-7b", f"model.config={fields}")["parameters"]["parts"]["attention"] == 1_048_576
    wide = "model.config={hidden_size: 4096, num_attention_heads: 32, num_hidden_layers: 1}"
    adapted = plan("llama-2-7b", wide, "adapter={kind: lora, r: 16, target_modules: [q_proj]}")
    assert adapted["parameters"]["trainable"] == adapted["parameters"]["adapter"] == 131_072
    assert adapted["parameters"]["total"] > 1e8  # the model's alone


def test_experts_are_active_in_part():
    found = plan("deepseek-v3")["parameters"]
    assert found["total"] / 1e9 == pytest.approx(671, rel=0.005) and found["active"] / 1e9 == pytest.approx(
        37, rel=0.02
    )


def test_a_recipe_is_planned_with_its_overrides():
    found = plan("pretrain", "train.per_device_train_batch_size=3", "train.gradient_accumulation_steps=5")
    assert found["step"]["batch"] == 3 and found["step"]["accumulation"] == 5 and found["step"]["length"] == 128
    assert found["step"]["tokens"] == 3 * 5 * 128
    assert found["run"]["steps"] == 200 and found["run"]["tokens"] == 200 * found["step"]["tokens"]
    assert found["run"]["flops"] == pytest.approx(found["flops"]["a_token"] * found["run"]["tokens"])
    other = plan("pretrain", "--batch", 6, "--length", 64)["step"]
    assert (other["batch"], other["length"]) == (6, 64)


def test_a_quantised_base_is_told_as_it_is_stored():
    found, text = plan("qlora")["parameters"], run("qlora")
    rest = found["parts"]["embeddings"] + found["parts"].get("head", 0)  # which stay as they are
    packed = (found["total"] - rest) * (0.5 + 1 / 64)  # nf4 with scales that are packed again, to within the norms
    assert found["bytes"]["stored"] == pytest.approx(packed + 4 * (rest + found["adapter"]), rel=0.03)
    assert "but for the base in 4 bits" in text and "of it the adapter" in text


def test_tokens_and_throughput_give_steps_and_time():
    found = plan("llama-3-8b", "--tokens", "1B", "--throughput", "50k")
    assert found["run"]["steps"] == math.ceil(1e9 / found["step"]["tokens"]) and found["run"]["seconds"] == 20_000
    by_peak = plan("llama-3-8b", "--tokens", "1B", "--flops", "H100", "--gpus", 8)
    assert by_peak["run"]["seconds"] == pytest.approx(by_peak["run"]["flops"] / (0.4 * 8 * 989.4e12))
    assert "--tokens says it" in run("llama-3-8b")


@pytest.fixture
def ran(tmp_path):
    """A run's folder as far as a plan reads it."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "recipe.yaml").write_text(
        f"""
model: {{preset: mini-gpt, tokenizer: "builtin:bytes"}}
data: {{source: rows.txt}}
objective: {{kind: pretrain, max_length: 64}}
train: {{output_dir: {folder}, max_steps: 9}}
""",
        encoding="utf-8",
    )
    metrics = {"plan": {"tokens_seen": 5000, "steps": 9, "tokens": 800, "supervised_tokens": 600}}
    metrics["training"] = {"tokens_per_second": 250.0}
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    return folder


def test_a_runs_folder_gives_its_throughput(ran):
    found = plan(ran)
    assert found["run"]["seconds"] == 20 and found["run"]["steps"] == 9 and found["step"]["supervised"] == 0.75
    assert plan("llama-3-8b", "--tokens", "1M", "--throughput", ran)["run"]["seconds"] == 4000


def test_a_foreign_config_needs_no_weights(tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(vocab_size=1000, hidden_size=64, intermediate_size=96, num_hidden_layers=3)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 4, 2, 16
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    found = plan(tmp_path, "--length", 128)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96 + 2 * 64
    assert found["parameters"]["total"] == 2 * 1000 * 64 + 3 * layer + 64
    assert found["cache"]["bytes"]["float32"] == 2048 * 3 * 2 * 2 * 16 * 4


def test_what_grows_by_layers_follows_their_number():
    """The trial has one layer of each kind; a model of twice the depth has twice what layers hold."""
    few, many = (plan("mini-llama", f"model.config.num_hidden_layers={n}", "--batch", 4) for n in (8, 16))
    for part in ("weights", "activations"):
        grown = many["memory"][part] - few["memory"][part]
        once = (
            few["memory"][part] - plan("mini-llama", "model.config.num_hidden_layers=4", "--batch", 4)["memory"][part]
        )
        assert grown == 2 * once


# Where the law is flat: 6 N D at the optimum for a size gives that size back.
def test_the_optimum_is_one():
    for parameters in (1e8, 8.03e9, 70e9):
        best = optimum.tokens_for(parameters)
        size, tokens = optimum.optimum_of_compute(6 * parameters * best)
        assert size == pytest.approx(parameters) and tokens == pytest.approx(best)
        here = optimum.loss_of(size, tokens)
        for factor in (0.8, 1.25):
            assert optimum.loss_of(size * factor, tokens / factor) > here


def test_chinchilla_lies_near_the_optimum_of_its_compute():
    """70 B parameters on 1.4 T tokens, about 20 a parameter, were found best for 5.76e23 FLOPs (arXiv:2203.15556)."""
    size, tokens = optimum.optimum_of_compute(5.76e23)
    assert size == pytest.approx(70e9, rel=0.1) and tokens / size == pytest.approx(20, rel=0.1)
    found = plan("llama-3-8b", "--tokens", "15T")["optimum"]
    assert found["tokens"] / found["parameters"] == pytest.approx(15e12 / 8.03e9, rel=1e-3)
    assert found["best_tokens"] < found["tokens"] and found["best_parameters"] > found["parameters"]
    assert found["best_loss"] < found["loss"]


def test_far_below_what_the_law_was_fitted_to_that_is_said():
    assert "a guess here" in run("mini-gpt", "--tokens", "1M")
    assert "a guess here" not in run("llama-3-8b", "--tokens", "15T")


def test_the_example_of_the_docs_is_what_the_command_says():
    text = (Path(__file__).parents[3] / "docs" / "plan.md").read_text(encoding="utf-8")
    block = text[text.index("$ anyformer plan ") :].split("```", 1)[0]
    command, shown = block.split("\n", 1)
    assert run(*command.split()[3:]).rstrip().splitlines() == shown.rstrip().splitlines()


def test_what_fits_needs_no_change():
    found = plan("mini-gpt", "--gpu", "80GB")["fit"]
    assert found["fits"] and not found["single"] and not found["combined"]


def test_changes_that_make_it_fit_are_ranked():
    before = plan("llama-3-8b", "--gpu", "140GB", "--batch", 8)
    fit = before["fit"]
    names = [one["changes"] for one in fit["single"]]
    assert not fit["fits"] and fit["peak"] == before["memory"]["peak"]
    assert names.index(["one row at a time"]) < names.index(["checkpointing"]) < names.index(["LoRA"])
    peaks = {one["changes"][0]: one["peak"] for one in fit["single"]}
    assert peaks["QLoRA"] < peaks["LoRA"] < fit["peak"] and peaks["one row at a time"] < fit["peak"]
    for one in fit["single"]:
        assert one["fits"] == (one["peak"] <= fit["usable"])


@pytest.mark.parametrize(
    "words",
    [
        ("llama-3-8b", "--gpu", "140GB", "--batch", "8"),
        ("llama-3-8b", "--gpu", "80GB"),
        ("llama-3-8b", "train.optim=adamw_torch_4bit", "--gpu", "40GB", "--gpus", "2"),
        ("mini-llama", "train.global_batch_size=32", "train.per_device_train_batch_size=8", "--gpu", "300MB"),
        ("reward", "--gpu", "1GB"),
        ("classify", "--gpu", "300MB"),
        ("deepseek-v3", "--gpu", "80GB", "--gpus", "8"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_proposed_is_what_a_plan_with_its_words_finds(words):
    fit = plan(*words)["fit"]
    proposals = [*fit["single"], *fit["combined"]]
    assert not fit["fits"] and proposals
    for one in proposals:
        more = [word for override in one["overrides"] for word in override.split(" ")]
        options = {word for word in more if word.startswith("--")}
        given = list(words)
        for option in options & set(given):  # what is given anew stands instead
            del given[given.index(option) : given.index(option) + 2]
        again = plan(*given, *more)
        assert again["memory"]["peak"] == one["peak"] and again["fit"]["fits"] == one["fits"]
        if one["changes"] == ["one row at a time"]:
            step, before = again["step"], plan(*words)["step"]
            assert step["batch"] * step["accumulation"] == before["batch"] * before["accumulation"]


def test_changes_are_combined_where_none_is_enough():
    fit = plan("llama-3-70b", "--gpu", "80GB", "--gpus", 8)["fit"]
    assert not any(one["fits"] for one in fit["single"]) and len(fit["combined"]) == 3
    for one in fit["combined"]:
        assert one["fits"] and len(one["changes"]) > 1 and one["peak"] <= fit["usable"]
    assert "devices" in fit["combined"][-1]["changes"][-1]
    assert "does not fit" in run("llama-3-70b", "--gpu", "80GB", "--gpus", 8)


def test_a_cheaper_combination_stands_beside_what_is_enough_alone():
    """More devices, or an adapter, are dearer than a training that stays the same."""
    fit = plan("llama-3-8b", "--gpu", "80GB")["fit"]
    assert {one["changes"][0] for one in fit["single"] if one["fits"]} == {"LoRA", "QLoRA", "4 devices"}
    assert [one["changes"] for one in fit["combined"]] == [
        ["checkpointing", "weights in bf16"],
        ["checkpointing", "2 devices"],
    ]
    fit = plan("mixtral-8x7b", "--gpu", "80GB")["fit"]
    assert ["checkpointing", "LoRA", "2 devices"] in [one["changes"] for one in fit["combined"]]


def test_devices_share_the_rows_of_a_step():
    words = ("mini-llama", "train.global_batch_size=4", "--gpu", "30MB")
    assert "4 rows a step cannot be shared by 8 processes" in run(*words, "--gpus", 8, status=2)
    fit = plan(*words)["fit"]
    given = [words for one in (*fit["single"], *fit["combined"]) for words in one["overrides"] if "--gpus" in words]
    assert not {"--gpus 8", "--gpus 16", "--gpus 32"} & set(given)


def test_where_nothing_is_enough_that_is_said_with_what_comes_nearest():
    fit = plan("mini-gpt", "--gpu", "50MB")["fit"]
    (nearest,) = fit["combined"]
    assert not nearest["fits"] and "rows of 256 tokens" in nearest["changes"]
    assert nearest["peak"] < min(one["peak"] for one in fit["single"])
    assert "nothing that was tried is enough" in run("mini-gpt", "--gpu", "50MB")
    (shorter,) = plan("mini-gpt", "--gpu", "150MB")["fit"]["combined"][-1:]
    assert shorter["fits"]


def test_devices_share_weights_gradients_and_state():
    one, eight = (plan("llama-3-8b", "--gpus", count)["memory"] for count in (1, 8))
    for part in ("weights", "gradients", "optimizer"):
        assert eight[part] == pytest.approx(one[part] / 8, rel=1e-6)
    assert eight["gathered"] > 0 and one["gathered"] == 0 and eight["peak"] < one["peak"]


def test_optimisers_differ_in_what_they_keep():
    whole = plan("mini-llama", "train.optim=adamw_torch")["memory"]
    size = whole["weights"] / 4
    for name, a_value in {"sgd": 0, "adamw_torch": 8, "adamw_bnb_8bit": 2.03, "lion_32bit": 4}.items():
        state = plan("mini-llama", f"train.optim={name}")["memory"]["optimizer"]
        assert state == pytest.approx(a_value * size, rel=0.02, abs=1e4)
    assert plan("mini-llama", "train.optim=adafactor")["memory"]["optimizer"] < 0.1 * size
    assert 4 * size < plan("mini-llama", "train.optim=muon")["memory"]["optimizer"] < 8 * size


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adamw_torch", "adamw_torch_fused", "adamw_bnb_8bit", "lion_32bit"])
def test_the_short_plan_of_a_run_keeps_the_same_state(name):
    found = plan("mini-llama", f"train.optim={name}")
    state, trained = found["memory"]["optimizer"], found["parameters"]["trainable"]
    assert bytes_a_value(name, torch.float32) * trained == pytest.approx(state, rel=0.02, abs=1e4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lama-3-8b"], "did you mean llama-3-8b"),
        ([""], "the name is empty: give a recipe, a preset"),
        (["qickstart"], "did you mean quickstart"),
        (["llama-3-8b", "--gpu", "80GP"], "--gpu: '80GP' is no size of memory"),
        (["llama-3-8b", "--gpu", "much"], "write 80GB"),
        (["llama-3-8b", "--tokens", "-3"], "--tokens: '-3' is no number from 1"),
        (["llama-3-8b", "--tokens", "1e400"], "--tokens: '1e400' is no number from 1 to 1e+24"),
        (["llama-3-8b", "--gpu", "0GB"], "--gpu: '0GB' is no size of memory"),
        (["llama-3-8b", "--throughput", "runs/none"], "or a run's folder (there is no runs/none"),
        (
            ["llama-3-8b", "--length", "1048576", "--batch", "65536"],
            "65,536 rows of 1,048,576 tokens: a forward pass of more than",
        ),
        (["gpt2", "--context", "4000"], "--context 4000: the model has learned positions for 1024"),
        (["bert-base", "--context", "100"], "--context: an encoder generates no text"),
        (["medusa"], "objective.kind: 'medusa' trains a drafter"),
        (["llama-3-8b", "--flops", "fast"], "and no GPU that is known"),
        (["llama-3-8b", "train.optim=lomo"], "train.optim: what 'lomo' keeps in memory is not known"),
        (["llama-3-8b", "train.optimm=sgd"], "optim"),
        (["llama-3-8b", "model.config.hidden_size=100"], "hidden_size"),
        (["llama-3-8b", "adapter={kind: lora, target_modules: [qproj]}"], "did you mean 'q_proj'"),
        (["gemma2-9b", "model.attn_implementation=sdpa"], "model.attn_implementation: sdpa"),
        (["gpt2", "--length", "4000"], "--length 4000: the model has learned positions for 1024"),
        (["rlhf"], "name one with --stage"),
        (["pretrain", "--stage", "1"], "--stage: pretrain is one recipe"),
    ],
)
def test_mistakes_are_told_in_one_message(words, said):
    out = run(*words, status=2)
    assert said in out and "Traceback" not in out and len(out.strip().splitlines()) == 1


def test_folders_that_cannot_be_planned(tmp_path):
    assert "holds neither a model" in run(tmp_path, status=2)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    out = run(tmp_path, status=2)
    assert "model_type 'mamba' has no family file" in out
    file = tmp_path / "recipe.yaml"
    file.write_text("model: {preset: mini-gpt, tokenizer: 'builtin:bytes'}\ndata: {sorce: x}\n", encoding="utf-8")
    assert f"{file}:2" in run(file, status=2).replace(", line ", ":")
    file.write_text("hidden_size: wide\n", encoding="utf-8")
    assert "hidden_size" in run(file, status=2)


def test_sizes_and_numbers_as_people_write_them():
    assert read_bytes("80GB", "--gpu") == 80 * 10**9 and read_bytes("24 GiB", "--gpu") == 24 * 2**30
    assert read_bytes("80", "--gpu") == 80 * 10**9
    assert read_count("15T", "x") == 15e12 and read_count("1.5e9", "x") == 1.5e9 and read_count("20,000", "x") == 20000
    assert duration(90) == "90 seconds" and duration(7200) == "2.0 hours"
