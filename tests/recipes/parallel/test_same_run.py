"""One seed and one global batch: one process, DDP, FSDP2 and tensor parallelism give the same run."""

import json

import pytest
from processes import Job, assert_same_run, figures, run_jobs, weights, write_recipe, write_texts

from anyformer.recipes.loading import load_recipe
from anyformer.recipes.run import run_recipe

pytestmark = pytest.mark.slow

SIZES = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 64, initializer_range: 0.3"
GPT2 = (
    "model.config={position_embedding: learned, norm: layernorm, mlp: dense, attention_bias: true, mlp_bias: true, "
    f"max_position_embeddings: 64, {SIZES}}}"
)
MLA = (
    "model.config={position_embedding: rope, attention: mla, q_lora_rank: 16, kv_lora_rank: 8, qk_nope_head_dim: 8, "
    f"qk_rope_head_dim: 4, v_head_dim: 8, max_position_embeddings: 64, {SIZES}}}"
)
EXPERTS = ["model.config.num_experts=4", "model.config.moe_intermediate_size=32"]
SMALL_BATCH = "train.per_device_train_batch_size=1"
# Name -> overrides, and the strategies that train it.
VARIANTS = {
    "grouped heads": ([], ("ddp", "fsdp2", "tp")),
    "accumulated": ([SMALL_BATCH], ("ddp", "fsdp2", "tp")),
    "tied": (["model.config.tie_word_embeddings=true"], ("fsdp2", "tp")),
    "normed heads": (["model.config.qk_norm=head", SMALL_BATCH], ("fsdp2", "tp")),
    "learned positions": ([GPT2], ("fsdp2", "tp")),
    "latent attention": ([MLA], ("fsdp2", "tp")),
    "experts": (EXPERTS, ("ddp", "fsdp2", "tp")),
    "biases of heads": (["model.config.position_embedding=alibi"], ("fsdp2",)),
    # 31 rows in batches of 3 and steps of 12: neither fills the last one.
    "uneven epochs": (
        [
            "objective.packing=blocks",
            "train.max_steps=-1",
            "train.num_train_epochs=4",
            "train.global_batch_size=12",
            "train.per_device_train_batch_size=3",
        ],
        ("ddp", "fsdp2", "tp"),
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of all runs: variant -> strategy -> folder."""
    root = tmp_path_factory.mktemp("same")
    recipe = write_recipe(root, write_texts(root / "texts.jsonl"))
    jobs = [
        Job(recipe, root / f"{name} {strategy}".replace(" ", "-"), strategy, overrides)
        for name, (overrides, strategies) in VARIANTS.items()
        for strategy in ("one", *strategies)
    ]
    for job in (job for job in jobs if job.strategy == "one"):
        run_recipe(load_recipe(job.recipe, job.as_dict()["overrides"]))
    several = [job for job in jobs if job.strategy != "one"]
    assert not any(run_jobs(several, root))
    return {job.folder.name: job.folder for job in jobs}


@pytest.mark.parametrize(
    ("variant", "strategy"), [(name, s) for name, (_, strategies) in VARIANTS.items() for s in strategies]
)
def test_several_processes_train_what_one_does(runs, variant, strategy):
    name = variant.replace(" ", "-")
    one = runs[f"{name}-one"]
    assert_same_run(one, runs[f"{name}-{strategy}"], steps=len(figures(one, "loss")))


def test_bf16_under_fsdp2_ends_well(runs, tmp_path):
    """FSDP2 measures in 16 bits while it trains; what others open is in 32."""
    recipe = runs["grouped-heads-one"].parent / "recipe.yaml"
    job = Job(recipe, tmp_path / "run", "fsdp2", ["train.bf16=true"])
    assert run_jobs([job], tmp_path) == [""]
    expected, got = figures(runs["grouped-heads-one"], "loss"), figures(tmp_path / "run", "loss")
    apart = max(abs(a - b) / a for a, b in zip(expected, got, strict=True))
    assert 0 < apart < 2**-7  # bf16 has 8 bits of mantissa
    assert all(str(tensor.dtype) == "torch.float32" for tensor in weights(tmp_path / "run").values())


def test_any_accumulation_factor_trains_the_same(runs):
    assert_same_run(runs["grouped-heads-one"], runs["accumulated-one"])


def test_rows_that_fill_the_last_step_count_for_nothing(runs):
    steps = figures(runs["uneven-epochs-one"], "loss")
    assert len(steps) % 4 == 0 and len(steps) >= 8  # four epochs, the last step of each shorter


def test_the_folder_is_an_ordinary_one(runs):
    """What a sharded run leaves is what one process leaves, to the name of each file."""
    one, sharded = runs["grouped-heads-one"], runs["grouped-heads-fsdp2"]
    names = {path.name for path in one.iterdir()} - {"metrics.csv"}
    assert names == {path.name for path in sharded.iterdir()} - {"metrics.csv"}
    assert (one / "config.json").read_text() == (sharded / "config.json").read_text()
    assert weights(one).keys() == weights(sharded).keys()


# Adapters, quantised bases and other objectives

TUNED = {
    "lora": ([], ("ddp", "fsdp2")),
    "lora and an embedding": (["adapter.modules_to_save=[embed_tokens]"], ("fsdp2",)),
    "frozen parts": (["adapter={kind: freeze, train: [attention]}"], ("fsdp2",)),
    "packed": (["train.packing=true"], ("ddp", "fsdp2")),
    "qlora": (["model.quantization={load_in_4bit: true, bnb_4bit_quant_type: nf4}"], ("ddp", "fsdp2")),
    "prompt": (["adapter={kind: prompt-tuning, num_virtual_tokens: 4}", "train.max_length=40"], ("ddp",)),
}
TUNING = """
model: {{path: {base}}}
adapter: {{kind: lora, r: 4, lora_alpha: 8, target_modules: all-linear}}
data: {{source: {rows}, eval_fraction: 0.2}}
train:
  output_dir: unused
  max_steps: 20
  global_batch_size: 8
  learning_rate: 1e-3
  max_length: 60
  logging_steps: 1
  save_steps: 10
  seed: 3
  bf16: false
  use_cpu: true
  gradient_checkpointing: false
eval: {{samples: 1, max_new_tokens: 4}}
logging: {{plot: false}}
"""


@pytest.fixture(scope="module")
def tuned(tmp_path_factory, tiny_checkpoint):
    root = tmp_path_factory.mktemp("tuned")
    rows = root / "rows.jsonl"
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    pairs = [(f"count from {words[i % 7]}", " ".join(words[i % 7 : i % 7 + 2 + i % 3])) for i in range(45)]
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs), encoding="utf-8")
    recipe = root / "recipe.yaml"
    recipe.write_text(TUNING.format(base=tiny_checkpoint, rows=rows), encoding="utf-8")
    jobs = [
        Job(recipe, root / f"{name} {strategy}".replace(" ", "-"), strategy, overrides)
        for name, (overrides, strategies) in TUNED.items()
        for strategy in ("one", *strategies)
    ]
    for job in (job for job in jobs if job.strategy == "one"):
        run_recipe(load_recipe(job.recipe, job.as_dict()["overrides"]))
    assert not any(run_jobs([job for job in jobs if job.strategy != "one"], root))
    return {job.folder.name: job.folder for job in jobs}


@pytest.mark.parametrize(
    ("variant", "strategy"), [(name, s) for name, (_, strategies) in TUNED.items() for s in strategies]
)
def test_adapters_and_quantised_bases(tuned, variant, strategy):
    name = variant.replace(" ", "-")
    assert_same_run(tuned[f"{name}-one"], tuned[f"{name}-{strategy}"])


OTHERS = {
    "mlm": "model: {tokenizer: ENCODER, config: {hidden_size: 32, num_hidden_layers: 2}}\n"
    "data: {source: FOLDER/texts.jsonl, eval_fraction: 0.3}\n",
    "seq2seq": "model: {config: {hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, attention_dropout: 0.0, "
    "hidden_dropout: 0.0, embedding_dropout: 0.0}}\n"
    "data: {source: FOLDER/spelling.jsonl, eval_fraction: 0.3}\n",
}


@pytest.fixture(scope="module")
def others(tmp_path_factory, minilm_folder):
    from small_recipes import SMALL

    root, jobs = tmp_path_factory.mktemp("others"), []
    for kind, text in OTHERS.items():
        recipe = root / f"{kind}.yaml"
        text = text.replace("ENCODER", str(minilm_folder)).replace("FOLDER", str(SMALL))
        train = "max_steps: 20, warmup_steps: 1, per_device_train_batch_size: 2, global_batch_size: 4, logging_steps: 1"
        recipe.write_text(
            f"extends: {kind}\n{text}train: {{{train}, learning_rate: 1e-3, bf16: false, use_cpu: true}}\n"
            "eval: {samples: 1, max_new_tokens: 4}\nlogging: {plot: false}\n",
            encoding="utf-8",
        )
        jobs += [Job(recipe, root / f"{kind}-{strategy}", strategy) for strategy in ("one", "ddp")]
    for job in (job for job in jobs if job.strategy == "one"):
        run_recipe(load_recipe(job.recipe, job.as_dict()["overrides"]))
    assert not any(run_jobs([job for job in jobs if job.strategy != "one"], root))
    return {job.folder.name: job.folder for job in jobs}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_masked_and_grouped_rows(others, kind):
    """Hidden tokens, and rows grouped by length; neither fills the last batch."""
    assert_same_run(others[f"{kind}-one"], others[f"{kind}-ddp"])
