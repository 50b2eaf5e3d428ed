"""`data.truncation` in a recipe: which objectives follow which policy, and what each makes of longer rows."""

import json

import pytest
from labelled import write_recipe
from recipe_files import write
from tuning import objective_of

from anyformer.recipes import schema
from anyformer.recipes.console import unstopped
from anyformer.recipes.data import load_splits
from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.prepare import prepare
from anyformer.recipes.tokens.sequences import encode_sources

BASE = "model: {path: a/b}\ndata: {source: a.jsonl, truncation: %s}\nobjective: %s\ntrain: {output_dir: run}\n"
OBJECTIVES = {
    "distill": "{kind: distill, teacher: a/b}",
    "pretrain": "{kind: pretrain, packing: none}",
    "grpo": "{kind: grpo, reward: pep257}",
    "rloo": "{kind: rloo, reward: pep257}",
    "ppo": "{kind: ppo, reward: pep257}",
    **{kind: f"{{kind: {kind}, answers: data}}" for kind in ("medusa", "eagle", "mtp")},
}
SPLITS = ("sft", "pretrain", "medusa", "eagle", "mtp")
UNREAD = ("mlm", "mlm-nsp", "grpo", "rloo", "ppo")


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("policy", ["drop", "keep_start", "keep_end", "split"])
@pytest.mark.parametrize("kind", schema.OBJECTIVES)
def test_policies_that_an_objective_cannot_follow_are_refused_when_the_recipe_is_read(kind, policy):
    text = write(BASE % (policy, OBJECTIVES.get(kind, f"{{kind: {kind}}}")))
    if kind in UNREAD:
        with pytest.raises(UserError, match=r"data\.truncation: has no effect"):
            load_recipe(text)
    elif policy == "split" and kind not in SPLITS:
        with pytest.raises(
            UserError, match=rf"data\.truncation: split is not possible with objective {kind}: .*\. Set"
        ):
            load_recipe(text)
    else:
        assert load_recipe(text).data.truncation == policy


@pytest.mark.parametrize("kind", ["medusa", "eagle", "mtp"])
def test_prompts_that_the_base_answers_are_read_whole(kind):
    with pytest.raises(UserError, match=r"data\.truncation: 'keep_end' has no effect: a prompt is read whole"):
        load_recipe(write(BASE % ("keep_end", f"{{kind: {kind}, answers: base}}")))


def test_an_encoder_decoder_is_not_split_and_packed_texts_lose_nothing():
    preset = "model: {preset: t5-base, tokenizer: a/b}\ndata: {source: a.jsonl, truncation: split}\n"
    with pytest.raises(UserError, match=r"data\.truncation: split is not possible .* belong together whole"):
        load_recipe(write(f"{preset}objective: {{kind: sft}}\ntrain: {{output_dir: run}}\n"))
    for packing in ("blocks", "documents"):
        with pytest.raises(UserError, match=rf"data\.truncation: has no effect with objective\.packing: {packing}"):
            load_recipe(write(BASE % ("keep_end", f"{{kind: pretrain, packing: {packing}}}")))
        assert load_recipe(write(BASE % ("drop", f"{{kind: pretrain, packing: {packing}}}")))


@pytest.mark.parametrize(("kind", "policy"), [("sft", "drop"), ("dpo", "drop"), ("classify", "keep_start")])
def test_the_policy_where_a_recipe_does_not_say(kind, policy):
    recipe = load_recipe(write(BASE % ("null", f"{{kind: {kind}}}")))
    assert recipe.data.truncation == policy and f"truncation: {policy}" in recipe.to_yaml()


# What becomes of rows. The byte tokenizer makes a token of every byte, and adds nothing.


def text(ids):
    return bytes(i - 4 for i in ids if i > 3).decode()


@pytest.mark.parametrize(("policy", "kept"), [("drop", []), ("keep_start", ["abcdefgh"]), ("keep_end", ["cdefghij"])])
def test_texts_to_classify(tmp_path, policy, kept):
    rows = [{"text": f"{word} {i}", "label": word} for i in range(8) for word in ("a", "b")]
    recipe = write_recipe(tmp_path, "classify", rows)
    objective = prepare(recipe("objective.max_length=8", f"data.truncation={policy}")).objective
    data = objective.prepare([{"text": "abcdefghij", "label": "a"}, {"text": "b", "label": "b"}])
    assert [text(ids) for ids in data.dataset["input_ids"]] == [*kept, "b"]
    assert data.report.dropped == ({} if kept else {"longer than max_length": 1})
    assert data.report.truncated == len(kept)
    with pytest.raises(UserError, match=r"None of the 1 rows is left: .*objective\.max_length is 8"):
        objective.prepare([{"text": "abcdefghij" if policy == "drop" else "", "label": "a"}])


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ("drop", None),
        ("keep_start", [("abc", "X"), ("def", "Y"), ("g", "X")]),
        # Of `abc` the last byte is left, which is not where its tag is read.
        ("keep_end", [("def", "Y"), ("ghi", "X")]),
    ],
)
def test_words_to_tag(tmp_path, policy, kept):
    rows = [{"tokens": ["a", "b"], "tags": ["X", "Y"]} for _ in range(8)]
    rows += [{"tokens": ["c", f"{i}"], "tags": ["X", "Y"]} for i in range(8)]
    recipe = write_recipe(tmp_path, "token-classify", rows)
    objective = prepare(recipe("objective.max_length=7", f"data.truncation={policy}")).objective
    long = {"tokens": ["abc", "def", "ghi"], "tags": ["X", "Y", "X"]}
    data = objective.prepare([long, rows[0]])
    if kept is None:
        assert data.report.dropped == {"longer than max_length": 1} and len(data.dataset) == 1
        return
    row = data.dataset[0]
    assert len(row["input_ids"]) == 7 and data.report.truncated == 1
    places = [i for i, label in enumerate(row["labels"]) if label != -100]
    ends = [*places[1:], 7]
    found = [
        (text(row["input_ids"][start:end]).strip(), objective.names[row["labels"][start]])
        for start, end in zip(places, ends, strict=True)
    ]
    assert found == kept
    assert any("1 words lie beyond" in line for line in data.report.warnings) == (policy == "keep_end")


def test_sources_lose_their_beginning_and_targets_stay_whole(tmp_path):
    rows = [{"source": f"uno {i}", "target": "one"} for i in range(8)]
    recipe = write_recipe(tmp_path, "seq2seq", rows, shape="encoder-decoder")
    limits = ("objective.max_source_length=8", "objective.max_target_length=6", "data.truncation=keep_end")
    objective = prepare(recipe(*limits)).objective
    side = objective.tokenizer.truncation_side
    data = objective.prepare([{"source": "abcdefghijkl", "target": "xy"}, {"source": "a", "target": "uvwxyzuvw"}])
    (whole,) = encode_sources([{"source": "abcdefghijkl"}], objective.tokenizer)
    assert [row["input_ids"] for row in data.dataset] == [whole[-8:]]
    assert text(data.dataset[0]["labels"]) == "xy"
    report = data.report
    assert report.dropped == {"longer than objective.max_target_length (6)": 1}
    assert (report.truncated, report.beginnings_cut, report.stopped) == (1, 1, 1)
    assert objective.tokenizer.truncation_side == side


def test_an_encoder_decoder_that_is_only_known_once_loaded_refuses_to_split(tmp_path):
    rows = [{"prompt": f"uno {i}", "completion": "one"} for i in range(8)]
    recipe = write_recipe(tmp_path, "sft", rows, shape="encoder-decoder")()
    # As of a checkpoint, whose shape the recipe does not tell.
    object.__setattr__(recipe, "data", recipe.data.model_copy(update={"truncation": "split"}))
    with pytest.raises(UserError, match=r"data\.truncation: split is not possible here: .* belong together whole"):
        prepare(recipe)


def test_splitting_is_told_and_costs_no_warning(tiny_checkpoint, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"count {i}", "completion": " one two three four five" * 8} for i in range(6)]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = f"data: {{source: {rows}, truncation: split, eval_fraction: 0}}\n"
    train = f"train: {{output_dir: {tmp_path / 'run'}, max_length: 16, max_steps: 2}}\n"
    prepared = prepare(
        load_recipe(write(f"model: {{path: {tiny_checkpoint}}}\n{data}objective: {{kind: sft}}\n{train}"))
    )
    report = prepared.train.report
    assert report.pieces == report.rows_kept > 6 and report.stopped == 6 == report.pieces - report.continued
    assert unstopped(report) == []
    assert max(map(len, prepared.train.dataset["input_ids"])) == 16


def test_the_reward_objective_gets_the_margins_of_scored_answers(tiny_checkpoint, tmp_path):
    rows = tmp_path / "scored.jsonl"
    lines = [
        {"prompt": f"count from {word}", "responses": ["one", "two three", "four"], "rewards": [0.5, 2, i]}
        for i, word in enumerate(["one", "two", "three"])
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    objective = objective_of("reward", tiny_checkpoint, tmp_path, f"data.source={rows}", "data.eval_fraction=0")
    splits = load_splits(objective.recipe.data, accepts=objective.formats)
    data = objective.prepare(splits.train)
    # 2 against 0; 2 against 0.5; 2 against 0.5, of two best answers the first.
    assert data.dataset["margin"][:] == [2.0, 1.5, 1.5]
    assert objective.tokenizer.decode(data.dataset[0]["chosen_ids"]).strip().startswith("two three")
    assert objective.tokenizer.decode(data.dataset[0]["rejected_ids"]).strip().startswith("four")
