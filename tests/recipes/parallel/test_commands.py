"""Commands in two processes: token shards as data, a run that is replaced, and one that may not be."""

import pytest
from processes import assert_same_run, figures, write_recipe, write_texts

STEPS = ["train.max_steps=4", "train.save_steps=4", "eval.samples=0"]
DDP = ["--launch", "ddp"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    root = tmp_path_factory.mktemp("commands")
    return write_recipe(root, write_texts(root / "texts.jsonl"))


def run(zygote, recipe, folder, *more, processes=2):
    """Exit statuses, and all that was said."""
    command = ["train", str(recipe), *STEPS, f"train.output_dir={folder}", *more]
    return zygote.run(command, processes=processes), zygote.log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "strategy"), [("blocks", "ddp"), ("documents", "fsdp2")])
def test_token_shards_are_the_same_data_for_one_process_and_two(zygote, recipe, shards, tmp_path, strategy, packing):
    data = [f"data.source={shards}", f"objective.packing={packing}"]
    one, two = tmp_path / "one", tmp_path / "two"
    assert run(zygote, recipe, one, *data, processes=1)[0] == [0]
    assert run(zygote, recipe, two, *data, "--launch", strategy)[0] == [0, 0], zygote.log.read_text()[-3000:]
    assert_same_run(one, two, steps=4)


@pytest.fixture(scope="module")
def shards(zygote, recipe):
    """A folder that `anyformer tokenize` has written."""
    folder = recipe.parent / "shards"
    command = ["tokenize", str(recipe.parent / "texts.jsonl"), str(folder), "--tokenizer", "builtin:bytes"]
    assert zygote.run([*command, "--workers", "1"]) == [0], zygote.log.read_text()[-3000:]
    return folder


def test_an_old_run_is_replaced_only_when_that_is_asked_for(zygote, recipe, tmp_path):
    folder = tmp_path / "run"
    assert run(zygote, recipe, folder, *DDP)[0] == [0, 0]
    before = figures(folder, "loss")
    (folder / "of the old run").touch()
    statuses, said = run(zygote, recipe, folder, "train.learning_rate=5e-3", *DDP)
    assert statuses == [2, 2] and "Traceback" not in said
    assert f"{folder} holds a finished run: give --overwrite to replace it" in said
    assert (folder / "of the old run").is_file() and figures(folder, "loss") == before
    assert run(zygote, recipe, folder, "train.learning_rate=5e-3", "--overwrite", *DDP)[0] == [0, 0]
    assert not (folder / "of the old run").exists()
    after = figures(folder, "loss")
    assert after[0] == before[0] and after[-1] != before[-1] and len(after) == 4


def test_both_flags_at_once_are_refused(zygote, recipe, tmp_path):
    statuses, said = run(zygote, recipe, tmp_path / "run", "--overwrite", "--resume", *DDP)
    assert statuses == [2, 2] and "give one of them" in said and "Traceback" not in said
