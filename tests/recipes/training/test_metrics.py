"""What a run measures of itself: tokens, FLOPs, time, the file of figures, and where they are reported."""

import csv
import importlib.util
import itertools
import json
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from anyformer.modeling.counting import forward_flops
from anyformer.recipes.errors import UserError
from anyformer.recipes.run import run_recipe
from anyformer.recipes.training.metrics import Meter, Usage, lengths_of, peak_memory
from anyformer.recipes.training.metrics_file import COLUMNS, MetricsFile
from anyformer.recipes.training.peaks import KNOWN, known_peak, measured_peak, peak_of

PLAIN = ("adapter={kind: none}", "train.bf16=false", "eval.samples=0", "logging.peak_tflops=0.5")


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def metrics_of(folder):
    return json.loads((folder / "metrics.json").read_text(encoding="utf-8"))


# What is counted


@pytest.mark.parametrize("architecture", ["decoder", "encoder", "encoder-decoder"])
def test_flops_of_a_batch_are_those_that_torch_counts(tiny, architecture):
    head = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "seq2seq_lm"}[architecture]
    model = tiny(head=head, architecture=architecture, attn_implementation="eager", decoder_start_token_id=1)
    both = architecture == "encoder-decoder"
    batch = {"attention_mask": torch.ones(2, 12, dtype=torch.long), "labels": torch.ones(2, 7 if both else 12)}
    ids, labels = torch.ones(2, 12, dtype=torch.long), batch["labels"].long()
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=labels).loss.backward()
    target, source, logits = lengths_of(batch, both_sides=both)
    passes = 3 * forward_flops(model.config, head).of(target, logits, source).sum().item()
    assert counter.get_total_flops() == pytest.approx(passes, rel=0.02)


def test_padding_and_places_that_are_not_learned_from_are_not_counted():
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])
    labels = torch.tensor([[-100, 5, 6, -100], [-100, 7, -100, -100]])
    target, source, logits = lengths_of({"attention_mask": mask, "labels": labels}, both_sides=False)
    assert target.tolist() == [3, 2] and source.tolist() == [0, 0] and logits.tolist() == [2, 1]
    classes = {"attention_mask": mask, "labels": torch.tensor([0, 1])}
    assert lengths_of(classes, both_sides=False)[2].tolist() == [3, 2]
    target, source, logits = lengths_of({"attention_mask": mask, "labels": labels}, both_sides=True)
    assert target.tolist() == [2, 1] and source.tolist() == [3, 2] and logits.tolist() == [2, 1]
    pairs = {"chosen_attention_mask": mask, "rejected_attention_mask": mask[:, :3]}
    assert lengths_of(pairs, both_sides=False)[0].tolist() == [3, 2, 3, 2]
    assert lengths_of({"prompt": ["a"]}, both_sides=False) is None


def test_rates_by_hand():
    usage = Usage(tokens=300, flops=6e9, seconds=2.0, waited=0.5, capacity=2e10, memory=5e8)
    expected = {"tokens_per_second": 150.0, "data_wait": 0.25, "mfu": 0.3, "memory_gb": 0.5}
    assert usage.rates() == expected
    usage.add(Usage(tokens=100, flops=0, seconds=2.0, waited=0.5, capacity=2e10, memory=4e8))
    assert usage.rates() == {"tokens_per_second": 100.0, "data_wait": 0.25, "mfu": 0.15, "memory_gb": 0.5}
    assert Usage().rates() == {} and "mfu" not in Usage(tokens=1, seconds=1).rates()


def test_time_of_steps_leaves_out_what_lies_between_them(monkeypatch):
    """Of 10 s a step, 3 s of them waiting; 100 s of evaluation and saving after each."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def loader():
        for _ in range(4):
            now[0] += 3
            yield {"attention_mask": torch.ones(1, 5, dtype=torch.long)}

    model = SimpleNamespace(config=SimpleNamespace(is_encoder_decoder=False))
    args = SimpleNamespace(device=torch.device("cpu"), bf16=False, fp16=False, tf32=None)
    accelerator = SimpleNamespace(gather=lambda tensor: tensor, wait_for_everyone=lambda: None)
    trainer = SimpleNamespace(model=model, args=args, accelerator=accelerator, get_tp_size=lambda: 1)
    state = SimpleNamespace(stateful_callbacks={}, num_input_tokens_seen=0, global_step=0, is_world_process_zero=True)
    control = SimpleNamespace(should_save=False, should_evaluate=True)
    meter = Meter(None, 3)
    meter.trainer = trainer
    meter.on_train_begin(args, state, control)
    batches, found = loader(), []
    for step in range(4):
        meter.begin_step()
        meter.count([next(meter.timed(batches))])
        now[0] += 7
        meter.on_step_end(args, state, control)
        if step % 2:
            found.append(meter.figures(state))
        now[0] += 100
    assert [f["tokens"] for f in found] == [10, 20]
    assert all(f["data_wait"] == pytest.approx(0.3) and f["tokens_per_second"] == 0.5 for f in found)
    assert meter.total.seconds == 40 and state.stateful_callbacks["anyformer"]["tokens"] == 20


def test_memory_is_at_least_what_a_tensor_takes():
    before = peak_memory(torch.device("cpu"))
    held = torch.ones(30_000_000)  # 120 MB, touched
    assert peak_memory(torch.device("cpu")) >= max(before, 1.2e8) and held.numel()


# Peaks


def test_known_gpus_are_found_by_the_names_that_their_drivers_give():
    bf16, fp32 = torch.bfloat16, torch.float32
    names = {
        "NVIDIA H100 80GB HBM3": 989.4,
        "NVIDIA H100 PCIe": 756.4,
        "NVIDIA H200": 989.4,
        "NVIDIA H20": 148.0,
        "NVIDIA A100-SXM4-80GB": 312.0,
        "NVIDIA A10G": 70.0,
        "NVIDIA A10": 125.0,
        "NVIDIA L40S": 362.05,
        "NVIDIA L4": 121.0,
        "Tesla T4": 65.0,
        "NVIDIA GeForce RTX 4090": 165.2,
    }
    assert {name: known_peak(name, bf16) for name in names} == names
    assert known_peak("NVIDIA A100-SXM4-80GB", fp32) == 19.5 and known_peak("NVIDIA A100", fp32, tf32=True) == 156.0
    assert known_peak("A card of tomorrow", bf16) is None
    # A name that holds another one stands before it.
    parts = [part for part, *_ in KNOWN]
    assert not any(a in b for a, b in itertools.combinations(parts, 2))


def test_a_processor_is_measured_and_a_stated_peak_is_taken():
    cpu = torch.device("cpu")
    state = torch.get_rng_state()
    measured = peak_of(cpu, torch.float32)
    assert 1e8 < measured.flops < 1e15 and "1024 x 1024" in measured.source
    assert torch.equal(torch.get_rng_state(), state) and measured_peak(cpu, torch.float32) is measured
    half = peak_of(cpu, torch.bfloat16)  # whichever of the two is faster
    assert half in (measured, measured_peak(cpu, torch.bfloat16)) and half.flops >= measured.flops
    assert peak_of(cpu, torch.float32, stated=2.5).flops == 2.5e12


# The file


def test_rows_behind_the_checkpoint_and_a_torn_one_are_dropped(tmp_path):
    file = MetricsFile(tmp_path / "metrics.csv")
    file.begin(0)
    for step in (2, 4, 6):
        file.add({"step": step, "loss": step / 10, "text": "not a number"})
    with file.path.open("a", encoding="utf-8") as stream:
        stream.write("8,0.3")  # a kill in the middle of a row
    again = MetricsFile(file.path)
    again.begin(4)
    again.add({"step": 6, "loss": 0.7})
    again.add({"step": 6, "eval_loss": 0.9})
    rows = rows_of(file.path)
    assert [(row["step"], row["loss"], row["eval_loss"]) for row in rows] == [
        ("2", "0.2", ""),
        ("4", "0.4", ""),
        ("6", "0.7", ""),
        ("6", "", "0.9"),
    ]
    assert list(rows[0]) == [*COLUMNS, "eval_loss"]
    MetricsFile(file.path).begin(0)
    assert rows_of(file.path) == []


# Runs


def test_a_run_writes_its_figures_and_a_resumed_one_goes_on(recipe, interrupted):
    eight = recipe(*PLAIN, "train.max_steps=8", "train.logging_steps=2", "train.save_steps=5")
    with interrupted():
        run_recipe(eight)
    folder = run_recipe(eight, resume=True)
    rows, metrics = rows_of(folder / "metrics.csv"), metrics_of(folder)
    assert [int(row["step"]) for row in rows] == [2, 4, 6, 8]
    # The same tokens as a run at one go would have read: what a checkpoint in mid-interval has seen is not lost.
    whole = run_recipe(recipe(*PLAIN, "train.max_steps=8", "train.logging_steps=2", f"train.output_dir={folder}-whole"))
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in rows_of(whole / "metrics.csv")]
    training = metrics["training"]
    assert training["tokens"] == int(rows[-1]["tokens"]) and training["peak_tflops"] == 0.5
    assert training["total_flos"] == pytest.approx(metrics_of(whole)["training"]["total_flos"], rel=1e-9)
    history = {entry["step"]: entry for entry in metrics["history"] if "loss" in entry}
    for row in rows:
        entry = history[int(row["step"])]
        for name in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu", "data_wait", "memory_gb"):
            assert float(row[name]) == entry[name] >= 0
        assert 0 < entry["mfu"] < 1 and 0 <= entry["data_wait"] < 1


def test_mfu_is_flops_by_time_and_peak(recipe):
    metrics = metrics_of(run_recipe(recipe(*PLAIN, "train.max_steps=4", "train.save_strategy=no")))
    training, plan = metrics["training"], metrics["plan"]
    seconds = training["tokens"] / training["tokens_per_second"]
    assert training["mfu"] == pytest.approx(training["total_flos"] / (seconds * 0.5e12), rel=1e-6)
    # The plan takes all rows to be of the mean length and counts the logits of all places.
    assert 0.5 < training["total_flos"] / plan["training_flops"] <= 1.05 and plan["passes"] == 3


def test_a_frozen_base_spares_the_gradients_of_its_weights(recipe):
    options = ("train.max_steps=2", "train.save_strategy=no", "eval.samples=0", "train.bf16=false")
    full = metrics_of(run_recipe(recipe(*options, "adapter={kind: none}")))
    lora = metrics_of(run_recipe(recipe(*options), overwrite=True))
    assert lora["training"]["total_flos"] / full["training"]["total_flos"] == pytest.approx(2 / 3)


def test_evaluation_in_training_has_rows_of_its_own(recipe):
    options = ("train.max_steps=4", "train.logging_steps=2", "train.eval_strategy=steps", "train.eval_steps=2")
    folder = run_recipe(recipe(*PLAIN, *options, "train.save_strategy=no"))
    rows = rows_of(folder / "metrics.csv")
    assert [(row["step"], bool(row["loss"]), bool(row["eval_loss"])) for row in rows] == [
        ("2", True, False),
        ("2", False, True),
        ("4", True, False),
        ("4", False, True),
    ]


# Reports


def test_tensorboard_gets_all_figures_in_the_run_folder(recipe):
    pytest.importorskip("tensorboard", reason="pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ("train.max_steps=4", "train.logging_steps=2", "train.save_strategy=no", "train.report_to=tensorboard")
    folder = run_recipe(recipe(*PLAIN, *options))
    (events,) = (folder / "runs").rglob("events.out.*")
    found = EventAccumulator(str(events.parent)).Reload()
    names = set(found.Tags()["scalars"])
    assert {f"train/{name}" for name in ("loss", "tokens_per_second", "mfu", "data_wait", "memory_gb")} <= names
    rows = rows_of(folder / "metrics.csv")
    seen = [(event.step, event.value) for event in found.Scalars("train/mfu")]
    assert seen == [(int(row["step"]), pytest.approx(float(row["mfu"]), rel=1e-6)) for row in rows]


TRACKIO = """
import json, types
LOGGED = []
__version__ = "0.99"
config = type("Config", (dict,), {"update": lambda self, values, allow_val_change=False: dict.update(self, values)})()
context_vars = types.SimpleNamespace(current_space_id=types.SimpleNamespace(get=lambda: None))
def init(**values): LOGGED.append(("init", values))
def log(values, **kw): LOGGED.append(("log", values))
def finish(): LOGGED.append(("finish", None))
"""


def test_trackio_gets_the_name_of_the_run_and_all_figures(recipe, tmp_path, monkeypatch):
    """Through the library's callback, on a package that keeps what it is told."""
    package = tmp_path / "site" / "trackio"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TRACKIO, encoding="utf-8")
    monkeypatch.syspath_prepend(str(package.parent))
    integrations = pytest.importorskip("transformers.integrations.integration_utils")
    monkeypatch.setattr(integrations, "is_trackio_available", lambda: True)
    # TRL would remember for later tests that the package is there.
    monkeypatch.setattr("trl.trainer.utils.is_trackio_available", lambda: False)
    monkeypatch.setitem(sys.modules, "trackio", None)  # so that what is imported now does not outlive the test
    del sys.modules["trackio"]
    options = ("train.max_steps=2", "train.logging_steps=1", "train.save_strategy=no", "train.report_to=trackio")
    run_recipe(recipe(*PLAIN, *options))
    import trackio

    (start,) = [values for what, values in trackio.LOGGED if what == "init"]
    assert start["name"] == "run"  # the folder's
    logged = [values for what, values in trackio.LOGGED if what == "log" and "train/loss" in values]
    assert len(logged) == 2
    assert all({"train/mfu", "train/data_wait", "train/tokens_per_second"} <= set(values) for values in logged)


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_what_is_not_installed_is_refused_when_the_recipe_is_read(recipe, monkeypatch, name):
    from anyformer.recipes import checks_training

    find, hidden = importlib.util.find_spec, checks_training.REPORTS[name][0]
    absent = lambda module, *rest: None if module in hidden else find(module, *rest)  # noqa: E731
    monkeypatch.setattr(checks_training.importlib.util, "find_spec", absent)
    with pytest.raises(UserError, match=rf"train.report_to: {name} is not installed: pip install {name}"):
        recipe(f"train.report_to=[{name}]")


def test_what_is_not_known_is_refused_before_weights_are_loaded(recipe):
    with pytest.raises(UserError, match=r"wnadb is not supported, only .*wandb"):
        run_recipe(recipe("train.report_to=wnadb"), dry_run=True)
    with pytest.raises(UserError, match=r"train.report_to: swanlab is not installed: pip install swanlab"):
        run_recipe(recipe("train.report_to=swanlab"), dry_run=True)


# Objectives


@pytest.mark.parametrize(
    "kind", ["pretrain", "mlm", "seq2seq", "classify", "dpo", "orpo", "reward", "kto", "ppo", "grpo"]
)
def test_each_objective_is_measured(kind, tmp_path, tiny_checkpoint, tiny_bert):
    from small_recipes import SMALL, folders, write_small

    from anyformer.recipes.loading import load_recipe

    path = write_small(SMALL / f"{kind}.yaml", tmp_path / f"{kind}.yaml", folders(tiny_checkpoint, tiny_bert))
    options = ["train.max_steps=2", "train.logging_steps=1", "train.save_strategy=no", "eval.samples=0"]
    options += [f"train.output_dir={tmp_path / 'run'}", "eval.before=false", "logging.peak_tflops=0.5"]
    folder = run_recipe(load_recipe(path, options))
    rows = [row for row in rows_of(folder / "metrics.csv") if row["loss"]]
    assert [row["step"] for row in rows] == ["1", "2"]
    assert all(float(row["tokens_per_second"]) > 0 and 0 <= float(row["data_wait"]) < 1 for row in rows)
    assert int(float(rows[0]["tokens"])) < int(float(rows[1]["tokens"]))
    # Of policies a step is mostly sampling: nothing that a pass over the batch could be a share of.
    assert all(bool(row["mfu"]) is (kind not in ("ppo", "grpo")) for row in rows)
