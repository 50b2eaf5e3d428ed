"""The verb `data`, as a user calls it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer.testing
from transformers import AutoTokenizer

from anyformer.recipes.errors import UserError
from anyformer.recipes.inspection.pieces import Gap, pieces, visible
from anyformer.recipes.inspection.show import show_data
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.run import run_recipe
from anyformer.recipes.shards import write_shards
from anyformer.recipes.tokens.views import RowView, TokenSequence, document_starts, row_text
from anyformer.scripts.cli import app

COMMAND = [sys.executable, "-c", "from anyformer.scripts.cli import main; main()", "data"]
ROWS = [
    {"prompt": "count from one\n", "completion": " two three"},
    {"prompt": "count from two\n", "completion": " three"},
    {"prompt": "count from one\n", "completion": " two three"},
    {"prompt": "count from two\n", "completion": " four"},
    {"prompt": "secret sauce\n", "completion": " one two three four five"},
    {"prompt": "way " * 60, "completion": " too long"},
    {"prompt": "broken"},
]


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch, tiny_checkpoint):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    Path("held.jsonl").write_text(json.dumps(ROWS[4]))
    Path("r.yaml").write_text(
        f"model: {{path: {tiny_checkpoint}}}\n"
        "data: {source: rows.jsonl, eval_source: held.jsonl, on_bad_row: skip}\n"
        "train: {max_length: 64}\n"
    )


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def test_piped():
    done = run("r.yaml", "--rows", "2", "--html", "page.html")
    assert (done.returncode, "\x1b[" in done.stdout) == (0, False)
    text = " ".join(done.stdout.split())
    for words in (
        "8 rows; 6 to train on, 1 held out",
        "skipped 1: is prompt alone",
        "(first: rows.jsonl, line 7)",
        "1 longer than max_length",
        "100 % of 5 learned parts end in one",
        "1 training rows equal to an earlier one: rows 1 (rows.jsonl, line 1), 3 (rows.jsonl, line 3)",
        "2 training rows with a prompt that has several answers: rows 2 (rows.jsonl, line 2), 4 (rows.jsonl, line 4)",
        "1 held-out rows that are training rows too: held-out row 1 (held.jsonl, line 1) = row 5 (rows.jsonl, line 5)",
        "<|im_end|>⟧",
    ):
        assert words in text, words
    assert "⟦·t" in text and "╎" in text and "↵" in text
    assert Path("page.html").read_text().startswith("<!doctype html>")


def test_json_alone(capsys):
    show_data("r.yaml", as_json=True, rows=0)
    out = capsys.readouterr().out
    found = json.loads(out)
    assert "secret" not in out
    assert (
        found["data"]["skipped"]["rows"] == 1 and found["data"]["skipped"]["causes"][0]["first"] == "rows.jsonl, line 7"
    )
    assert found["rows"]["train"]["dropped"] == {"longer than max_length": 1}
    assert found["repeats"]["repeated_examples"] == [[1, 3]]
    assert found["repeats"]["places"]["held_out"] == {"1": "held.jsonl, line 1"}
    assert found["tokens"]["train"]["stops"] == {"checked": 5, "stopped": 5, "others": []}
    assert found["tokens"]["held_out"]["rows"] == 1


def test_what_a_function_prints_is_no_figure(capsys):
    Path("made.py").write_text("def rows():\n    print('noise')\n    yield {'prompt': 'one', 'completion': 'two'}\n")
    show_data("r.yaml", ["data.source=made.py:rows"], as_json=True)
    out, err = capsys.readouterr()
    assert json.loads(out)["tokens"]["train"]["rows"] == 1 and "noise" in err


def test_rows_that_are_split_are_counted(capsys):
    split = ["train.max_length=8", "data.truncation=split", "data.source=rows.jsonl"]
    show_data("r.yaml", split, rows=0)
    assert "split into several; 0 cut; pieces of longer rows: " in " ".join(capsys.readouterr().out.split())


def test_no_more_of_a_row_than_is_shown(capsys):
    show_data("r.yaml", rows=0)
    out = capsys.readouterr().out
    assert "sauce" not in out.partition("Rows ")[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.yaml"], "no such recipe"),
        (["r.yaml", "train.sed=1"], "train.sed"),
        (["r.yaml", "data.source=none.jsonl"], "no file matches"),
        (["r.yaml", "--stage", "sft"], "no folder of stages"),
        (["r.yaml", "--html", "."], "--html"),
        (["r.yaml", "--html", "no/such/folder.html"], "cannot be written"),
        (["rlhf"], "--stage sft | reward | policy"),
        (["rlhf", "--stage", "sfd"], "no stage 'sfd'"),
    ],
)
def test_mistakes_end_with_2(arguments, said):
    done = typer.testing.CliRunner().invoke(app, ["data", *arguments])
    assert done.exit_code == 2
    assert said in done.output and "Traceback" not in done.output


def test_a_stage_of_a_folder(capsys, tiny_checkpoint):
    Path("stages").mkdir()
    stage = "data: {source: rows.jsonl, on_bad_row: skip, eval_source: held.jsonl}\ntrain: {max_length: 64}\n"
    Path("stages/1-first.yaml").write_text(f"model: {{path: {tiny_checkpoint}}}\n{stage}")
    Path("stages/2-second.yaml").write_text(f"model: {{path: 'stage:first'}}\n{stage}")
    show_data("stages", ["second.train.max_length=32"], stage="second", rows=1)
    out = capsys.readouterr().out
    assert "Data of stages, stage second" in out and "32 tokens" in out


@pytest.mark.parametrize(
    "more", [["data.streaming=true"], ["data.source=[{path: rows.jsonl, weight: 2}, {path: more.jsonl, weight: 1}]"]]
)
def test_streams_and_weighted_sources(more, capsys):
    more_rows = [{"prompt": f"more {n}\n", "completion": " one"} for n in range(4)]
    Path("more.jsonl").write_text("\n".join(map(json.dumps, more_rows)))
    show_data("r.yaml", more, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["repeats"]["repeated_examples"] == [[1, 3]]
    assert found["repeats"]["places"]["train"]["3"] == "rows.jsonl, line 3"
    assert found["tokens"]["train"]["rows"] >= 5
    show_data("r.yaml", more)
    assert "Row 1" in capsys.readouterr().out


@pytest.mark.parametrize("packing", ["blocks", "documents", "none"])
def test_token_shards(packing, capsys, tiny_checkpoint):
    Path("texts.jsonl").write_text("".join(json.dumps({"text": f"one two {n}"}) + "\n" for n in range(6)))
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    write_shards(["texts.jsonl"], Path("shards"), tokenizer, workers=1, shard_tokens=100)
    Path("shards.yaml").write_text(
        f"model: {{path: {tiny_checkpoint}}}\n"
        "data: {source: shards, eval_fraction: 0}\n"
        f"objective: {{kind: pretrain, packing: {packing}, max_length: 16}}\n"
    )
    show_data("shards.yaml", html=Path("page.html"))
    assert "<|im_end|>⟧" in capsys.readouterr().out and "two" in Path("page.html").read_text()


def test_labels_do_not_steer_the_terminal(capsys):
    Path("labels.jsonl").write_text(
        "".join(json.dumps({"text": n, "label": n}) + "\n" for n in ("\x1b[31m", "a", "a "))
    )
    Path("labels.yaml").write_text(
        Path("r.yaml").read_text().split("data:")[0]
        + "data: {source: labels.jsonl, eval_fraction: 0}\nobjective: {kind: classify}\n"
    )
    show_data("labels.yaml")
    out = capsys.readouterr().out
    assert "\x1b" not in out and "⟦‹U+001B›[31m⟧" in out and "⟦a⟧" in out and "a· █" in out
    run_recipe(load_recipe("labels.yaml"), dry_run=True)
    out = capsys.readouterr().out
    assert "\x1b" not in out and "‹U+001B›[31m" in out


# Tokens


def test_every_blank_is_to_be_seen():
    assert visible("a b\n\tc\u200b\x07") == "a·b↵⇥c‹U+200B›‹U+0007›"


def test_pieces_make_the_text_again(tiny_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    text = "the cat  sat\nünd 漢 <|im_end|>"
    ids = tokenizer(text)["input_ids"]
    found = pieces(TokenSequence(ids, [-100, *ids[1:]]), tokenizer, limit=1000)
    assert [piece.id for piece in found] == ids
    assert [piece.learned for piece in found] == [False, *[True] * (len(ids) - 1)]
    shown = "".join(piece.text for piece in found)
    # Of a character that is several tokens its bytes are shown.
    assert shown == "the·cat··sat↵‹C3›‹BC›nd·‹E6›‹BC›‹A2›·<|im_end|>"
    assert [piece.special for piece in found].count(True) == 1 and found[-1].special


def test_long_sequences_show_both_ends(tiny_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    found = pieces(TokenSequence(list(range(3, 103)), [-100] * 100, starts=(7, 15, 94, 95)), tokenizer, limit=20)
    assert [piece.place for piece in found[:15]] == list(range(15))
    assert found[15] == Gap(80, 2) and found[15].words == "… 80 tokens, 2 documents begin …"
    assert [piece.place for piece in found if getattr(piece, "starts", False)] == [7, 95]
    assert [piece.place for piece in found[16:]] == [95, 96, 97, 98, 99]


def test_where_documents_begin():
    assert document_starts({"position_ids": [0, 1, 2, 0, 0, 1]}) == [3, 4]
    assert document_starts({"seq_lengths": [3, 1, 2]}) == [3, 4]
    assert document_starts({"input_ids": [1, 2]}) == []


def test_a_row_as_text(tiny_checkpoint):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    ids = tokenizer("the cat sat")["input_ids"]
    view = RowView((TokenSequence(ids, [-100, *ids[1:]], notes={1: "noun"}, name="x"),), label="good")
    first, second, *rest = tokenizer.batch_decode([[token] for token in ids])
    assert row_text(view, tokenizer) == f"x: {first}⟦{second}→noun⟧⟦{''.join(rest)}⟧ ⟦good⟧"


def test_a_folder_is_no_page():
    with pytest.raises(UserError, match=r"is a folder; give the name of a file"):
        show_data("r.yaml", html=Path())
