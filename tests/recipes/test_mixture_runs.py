"""Sources with weights in real runs: what each epoch trains on, and going on with it."""

import json
import re
from collections import Counter

import pytest
from tuning import assert_equal_weights

from anyformer.recipes.errors import UserError
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe

WORDS = ["one", "two", "three", "four", "five"]


@pytest.fixture
def sources(tmp_path):
    """Overrides: 24 rows of one source and 6 of another, which an epoch takes as often."""
    for name, count in (("many", 24), ("few", 6)):
        rows = [
            {"prompt": f"{name} {i}: count from {WORDS[i % 5]}", "completion": " ".join(WORDS[: i % 5 + 1])}
            for i in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    items = ", ".join(f"{{path: {tmp_path / name}.jsonl, weight: 1}}" for name in ("many", "few"))
    return (f"data={{source: [{items}], eval_fraction: 0}}", "train.max_length=96", "train.save_strategy=no")


def trained_on(prepared, epoch):
    """How often each row of the files is trained on in an epoch."""
    rows = prepared.objective.training_rows(prepared.train.dataset)
    rows.set_epoch(epoch)
    texts = Counter()
    for index in range(len(rows)):
        text = prepared.tokenizer.decode(rows[index]["input_ids"])
        texts.update(re.findall(r"(?:many|few) \d+", text))
    return texts


@pytest.mark.parametrize("packing", ["false", "true"])
def test_an_epoch_holds_sources_in_the_ratio_of_their_weights(recipe, sources, packing):
    prepared = prepare(recipe(*sources, f"train.packing={packing}", "~train.max_steps", "train.num_train_epochs=3"))
    assert prepared.train.report.rows_kept == 30
    seen: Counter[str] = Counter()
    for epoch in range(3):
        texts = trained_on(prepared, epoch)
        assert sum(n for name, n in texts.items() if name.startswith("many")) == 15
        assert {n for name, n in texts.items() if name.startswith("few")} <= {2, 3}
        seen += texts
    assert max(seen[f"many {i}"] for i in range(24)) - min(seen[f"many {i}"] for i in range(24)) <= 1
    assert trained_on(prepared, 0) != trained_on(prepared, 1)
    rows = prepared.objective.training_rows(prepared.train.dataset)
    assert len(rows) == prepared.plan.sequences and (len(rows) < 30) == (packing == "true")


def test_rows_that_are_dropped_leave_the_ratio(recipe, sources, tmp_path):
    with (tmp_path / "many.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"prompt": "many 99: " + "x " * 300, "completion": "one"}) + "\n")
    prepared = prepare(recipe(*sources))
    assert prepared.train.report.dropped == {"longer than max_length": 1}
    assert prepared.objective.mixture.sizes == [24, 6] and prepared.objective.mixture.rows_per_epoch == [15, 15]
    (tmp_path / "few.jsonl").write_text(json.dumps({"prompt": "x " * 300, "completion": "one"}) + "\n")
    with pytest.raises(UserError, match=r"data\.source .*few\.jsonl: None of the 1 rows is left"):
        prepare(recipe(*sources))


@pytest.mark.parametrize(("drops", "epochs"), [("false", 2), ("true", 3)])
def test_a_last_batch_that_is_dropped_makes_more_epochs(recipe, sources, drops, epochs):
    """16 steps of 4 of 30 rows: 8 an epoch, 7 without the last."""
    prepared = prepare(recipe(*sources, "train.max_steps=16", f"train.dataloader_drop_last={drops}"))
    assert prepared.objective.drawn["epochs"](30) == epochs


@pytest.mark.parametrize("packing", ["false", "true"])
def test_resume_is_bit_equal(recipe, sources, tmp_path, interrupted, packing):
    overrides = (*sources[:2], f"train.packing={packing}", "train.max_steps=18", "train.save_steps=7")
    whole = run_recipe(recipe(*overrides, f"train.output_dir={tmp_path / 'whole'}"))
    with interrupted():
        run_recipe(recipe(*overrides))
    assert_equal_weights(run_recipe(recipe(*overrides), resume=True), whole)
