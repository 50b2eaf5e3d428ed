"""Checkpoints are whole or not there, and what is not whole is found."""

import json
import shutil
from pathlib import Path

import pytest
from transformers import TrainerCallback
from tuning import assert_equal_weights

from anyformer.recipes.atomic import sync
from anyformer.recipes.errors import UserError
from anyformer.recipes.run import run_recipe
from anyformer.recipes.run_folder import METRICS, RunFolder
from anyformer.recipes.training.manifest import MANIFEST, STATE, missing_part, write_manifest
from anyformer.recipes.training.unfinished import SAVING, begin, finish, recover, remove_oldest

PARTS = (STATE, "optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors")
FAST = ("adapter={kind: none}", "eval.samples=0", "logging.plot=false", "train.learning_rate=1e-3")


def names(run: Path) -> list[str]:
    return [folder.name for folder in RunFolder(run).checkpoints]


def written(run: Path, step: int, text: str = "x") -> Path:
    """A checkpoint of made-up files, written as a trainer's is."""
    begin(run, f"checkpoint-{step}")
    folder = run / SAVING / f"checkpoint-{step}"
    for part in PARTS:
        (folder / part).write_text("{}" if part == STATE else text)
    finish(run, f"checkpoint-{step}")
    return run / f"checkpoint-{step}"


def unfinish(folder: Path) -> None:
    """As if killed before the last rename."""
    (folder.parent / SAVING).mkdir()
    folder.rename(folder.parent / SAVING / folder.name)


def forget_end(run: Path) -> None:
    """As if killed while the result was measured."""
    metrics = json.loads((run / METRICS).read_text())
    (run / METRICS).write_text(json.dumps({name: metrics[name] for name in metrics if name != "finished"}))


# One checkpoint


def test_every_file_is_on_the_disk_before_a_checkpoint_has_its_name(tmp_path, monkeypatch):
    target, synced = tmp_path / "checkpoint-3", []

    def note(path):
        synced.append((path.name, target.exists()))

    monkeypatch.setattr("anyformer.recipes.atomic.sync", note)
    monkeypatch.setattr("anyformer.recipes.training.unfinished.sync", note)
    written(tmp_path, 3)
    before = {name for name, named in synced if not named}
    assert before >= {*PARTS, MANIFEST, "checkpoint-3"}
    assert synced[-1] == (tmp_path.name, True)  # and then the name itself


def test_a_file_is_synced_and_closed(tmp_path, monkeypatch):
    seen = []

    def note(number):
        seen.append(Path(f"/proc/self/fd/{number}").readlink())

    monkeypatch.setattr("anyformer.recipes.atomic.os.fsync", note)
    (tmp_path / "a").touch()
    sync(tmp_path / "a")
    sync(tmp_path)
    assert seen == [tmp_path / "a", tmp_path]


def test_one_bit_that_flips_is_found(recipe, capsys):
    """The list has the size and SHA-256 of every file; the run goes on from the checkpoint before."""
    folder = run_recipe(recipe(*FAST))
    last = folder / "checkpoint-12"
    listed = json.loads((last / MANIFEST).read_text())["files"]
    assert set(listed) == {path.name for path in last.iterdir()} - {MANIFEST} >= set(PARTS)
    whole = shutil.copytree(folder, folder.with_name("whole"))
    weights = last / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert not missing_part(last) and "checksum" in missing_part(last, checksums=True)
    forget_end(folder)
    capsys.readouterr()
    run_recipe(recipe(*FAST), resume=True)
    assert "checkpoint-12 is passed over: model.safetensors is damaged: its checksum" in capsys.readouterr().out
    assert_equal_weights(whole, folder)
    assert not missing_part(last, checksums=True)  # written again in its place


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_missing_is_named(tmp_path, part):
    folder = written(tmp_path, 3)
    assert not missing_part(folder, checksums=True)
    (folder / part).unlink()
    said = missing_part(folder)
    assert said == ("the weights are missing" if part == "model.safetensors" else f"{part} is missing or damaged")
    folder = written(tmp_path, 3)
    (folder / part).write_text("longer" * 9)
    assert part in missing_part(folder)


def test_a_damaged_list_is_no_list(tmp_path):
    folder = written(tmp_path, 3)
    for text in ("", "[]", '{"files": 3}', '{"files": {"optimizer.pt": {}}}'):
        (folder / MANIFEST).write_text(text)
        assert missing_part(folder) == f"{MANIFEST} is damaged"


def test_a_checkpoint_of_sharded_weights_is_judged(tmp_path):
    """The layout of Accelerate's FSDP2, with a list and, as of a foreign trainer, without."""
    folder = tmp_path / "checkpoint-4"
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name).mkdir(parents=True)
    (folder / STATE).write_text("{}")
    archive = Path(shutil.make_archive(str(tmp_path / "zip"), "zip", folder, STATE))  # as torch.save writes one
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (folder / name / ".metadata").write_text("of __0_0.distcp and of __1_0.distcp")
        for file in ("__0_0.distcp", "__1_0.distcp"):
            (folder / name / file).write_bytes(archive.read_bytes() + b"one" + archive.read_bytes())
    for name in ("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"):
        shutil.copy(archive, folder / name)
    assert missing_part(folder) == ""
    shard = folder / "optimizer_0" / "__1_0.distcp"
    content = shard.read_bytes()
    for cut in (b"", content[:-1]):
        shard.write_bytes(cut)
        assert missing_part(folder) == "optimizer_0 is missing or damaged"
    shard.unlink()
    assert missing_part(folder) == "optimizer_0 is missing or damaged"
    shard.write_bytes(content)
    (folder / "rng_state_1.pth").unlink()  # of the second of two processes
    assert missing_part(folder) == "rng_state_1.pth is missing or damaged"
    shutil.copy(archive, folder / "rng_state_1.pth")
    write_manifest(folder)
    assert missing_part(folder, checksums=True) == ""
    shard.write_bytes(content.replace(b"one", b"two"))
    assert "optimizer_0/__1_0.distcp is damaged" in missing_part(folder, checksums=True)
    shard.unlink()
    assert missing_part(folder) == "optimizer_0/__1_0.distcp is missing or damaged"
    (folder / "pytorch_model_fsdp_0" / ".metadata").unlink()
    assert missing_part(folder) == "the weights are missing"


# On its way


def test_a_kill_between_the_renames_loses_nothing(tmp_path):
    folder = written(tmp_path, 6, text="new")
    unfinish(folder)
    assert names(tmp_path) == []
    recover(tmp_path)
    assert names(tmp_path) == ["checkpoint-6"] and not (tmp_path / SAVING).exists()
    # One that was not whole yet is removed, and one that has its name already is not replaced.
    for spoil in (lambda f: (f / MANIFEST).unlink(), lambda f: (f / "optimizer.pt").write_text("cut")):
        unfinish(written(tmp_path, 8))
        spoil(tmp_path / SAVING / "checkpoint-8")
        recover(tmp_path)
        assert names(tmp_path) == ["checkpoint-6"] and not (tmp_path / SAVING).exists()
    shutil.copytree(folder, tmp_path / SAVING / "checkpoint-6")
    recover(tmp_path)
    assert (folder / "optimizer.pt").read_text() == "new" and not (tmp_path / SAVING).exists()


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path):
    assert (written(tmp_path, 6, "old") / "optimizer.pt").read_text() == "old"
    assert (written(tmp_path, 6, "new") / "optimizer.pt").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-6"]


def test_what_a_kill_left_is_cleared_at_the_next_start(recipe, tmp_path, interrupted):
    with interrupted():
        run_recipe(recipe(*FAST))
    junk = tmp_path / "run" / SAVING / "checkpoint-9"
    junk.mkdir(parents=True)
    (junk / "optimizer.pt").write_bytes(b"half")
    run_recipe(recipe(*FAST), resume=True)
    assert not (tmp_path / "run" / SAVING).exists() and "checkpoint-9" not in names(tmp_path / "run")


# Which are kept


def test_broken_ones_and_those_of_later_steps_go_first(tmp_path):
    for step in (2, 4, 6, 8, 10):
        written(tmp_path, step)
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    remove_oldest(tmp_path, 3, newest=8, best=None)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]
    remove_oldest(tmp_path, 1, newest=8, best=f"elsewhere/{tmp_path.name}/checkpoint-2")
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8"]
    for keep in (None, 0, 5):
        remove_oldest(tmp_path, keep, newest=8, best=None)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8"] and not (tmp_path / SAVING).exists()


class Losses(TrainerCallback):
    """Says at which step the held-out loss is the lowest, whatever it was."""

    lowest = 4

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_loss"] = abs(state.global_step - self.lowest) + 1.0


@pytest.mark.parametrize("strategy", ["steps", "best"])
def test_the_best_one_is_kept_and_loaded_though_the_folder_has_moved(recipe, tmp_path, strategy, monkeypatch):
    """As killed while the result was measured."""
    from anyformer.recipes import progress

    monkeypatch.setattr(progress.TrainingProgress, "on_evaluate", Losses.on_evaluate)
    monkeypatch.setattr(progress.TrainingProgress, "lowest", 4, raising=False)
    common = (
        *FAST,
        "train.eval_strategy=steps",
        "train.eval_steps=2",
        "train.save_steps=2",
        "train.save_total_limit=2",
    )
    common += (f"train.save_strategy={strategy}", "train.load_best_model_at_end=true", "train.max_steps=10")
    whole = run_recipe(recipe(*common, f"train.output_dir={tmp_path / 'whole'}"))
    last, other = (4, 2) if strategy == "best" else (10, 4)
    assert names(whole) == [f"checkpoint-{other}", f"checkpoint-{last}"]
    state = json.loads((whole / f"checkpoint-{last}" / STATE).read_text())
    assert state["best_model_checkpoint"] == str(whole / "checkpoint-4") and state["best_global_step"] == 4
    assert_equal_weights(whole, whole / "checkpoint-4")

    moved = tmp_path / "moved"
    shutil.copytree(whole, moved)
    forget_end(moved)
    (moved / "model.safetensors").unlink()
    shutil.move(whole, tmp_path / "away")
    resumed = run_recipe(recipe(*common, f"train.output_dir={moved}"), resume=True)
    assert_equal_weights(tmp_path / "away", resumed)
    assert_equal_weights(resumed, resumed / "checkpoint-4")


def test_a_damaged_best_one_is_not_loaded(recipe, tmp_path, monkeypatch):
    from anyformer.recipes import progress

    def damage(self, args, state, control, **kwargs):
        if state.global_step == args.max_steps:
            file = Path(state.best_model_checkpoint) / "model.safetensors"
            file.write_bytes(file.read_bytes()[:-1] + b"!")

    monkeypatch.setattr(progress.TrainingProgress, "on_save", damage)
    common = (*FAST, "train.eval_strategy=steps", "train.eval_steps=2", "train.save_steps=2", "train.max_steps=4")
    with pytest.raises(UserError, match=r"best checkpoint .*checkpoint-\d cannot be loaded: model.safetensors is dam"):
        run_recipe(recipe(*common, "train.load_best_model_at_end=true"))
