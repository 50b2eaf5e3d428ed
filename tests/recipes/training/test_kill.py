"""Runs that are killed at random moments and started again by the same command end as if nothing had happened."""

import shutil
import time

import pytest
from killing import moments
from tuning import assert_equal_weights

from anyformer.recipes.run_folder import RunFolder
from anyformer.recipes.training.unfinished import SAVING

pytestmark = pytest.mark.slow
KILLS = 20


@pytest.mark.parametrize("packing", ["false", "true"])
def test_a_run_killed_at_random_moments_ends_bit_for_bit_as_one_that_was_not(zygote, recipe, tmp_path, packing):
    """Dropout on, over epochs, keeping two checkpoints; the moments are of a run's whole life, loading included."""
    recipe()  # writes the file
    common = ["train", str(tmp_path / "recipe.yaml"), "adapter={kind: none}", "model.config={attention_dropout: 0.1}"]
    common += ["train.max_steps=24", "train.save_steps=2", "train.save_total_limit=2", f"train.packing={packing}"]
    common += ["train.learning_rate=1e-3", "eval.samples=0", "data.eval_fraction=0", "model.verify_import=false"]
    common += ["logging.plot=false", "train.num_train_epochs=100"]
    started = time.monotonic()
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert zygote.run([*common, f"train.output_dir={whole}"]) == [0], zygote.log.read_text()[-4000:]
    command = [*common, f"train.output_dir={killed}", "--resume"]
    chosen = moments(KILLS // 2, time.monotonic() - started, killed / SAVING, seed=int(packing == "true"))
    kills = while_written = 0
    while chosen:
        if zygote.killed(chosen[0](), command):
            del chosen[0]
            kills, while_written = kills + 1, while_written + (killed / SAVING).is_dir()
        else:  # it came to its end before the moment: the next one begins again
            assert_equal_weights(whole, killed)
            shutil.rmtree(killed)
    if not RunFolder(killed).finished:
        assert zygote.run(command) == [0], zygote.log.read_text()[-4000:]
    assert kills == KILLS // 2 and while_written >= KILLS // 8
    assert_equal_weights(whole, killed)
    assert not (killed / SAVING).exists() and len(RunFolder(killed).checkpoints) == 2
