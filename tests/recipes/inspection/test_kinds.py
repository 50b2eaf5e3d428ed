"""Every kind of objective is shown, from the shipped recipe of its name made small."""

import io
import json
import math

import pytest
from rich.console import Console
from small_recipes import SMALL, folders, write_small

from anyformer.recipes.inspection import inspect_recipe
from anyformer.recipes.inspection.page import render
from anyformer.recipes.inspection.terminal import show
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.schema import OBJECTIVES

# Kind -> the shipped recipe, where that has another name.
NAMES = {"sft": "quickstart"}


def printed(inspection, **options) -> str:
    stream = io.StringIO()
    show(Console(file=stream, width=100, highlight=False, **options), inspection)
    return stream.getvalue()


@pytest.fixture
def inspected(tmp_path, tiny_checkpoint, tiny_bert):
    def make(kind: str, *overrides: str):
        name = NAMES.get(kind, kind)
        small = write_small(SMALL / f"{name}.yaml", tmp_path / "small.yaml", folders(tiny_checkpoint, tiny_bert))
        return inspect_recipe(load_recipe(small, overrides), name)

    return make


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_kind(kind, inspected):
    inspection = inspected(kind)
    report, figures = inspection.tokenized["train"], inspection.train
    assert figures.rows == figures.looked_at
    assert (figures.documents or figures.rows) == report.rows_kept or kind == "pretrain"
    assert all(found.largest <= found.limit for found in figures.lengths.values())
    # The objective counts what is learned by itself.
    if kind in ("mlm", "mlm-nsp"):  # drawn anew in each epoch, with a probability of 15 %
        expected = figures.tokens * 0.15
        assert abs(figures.supervised - expected) < 5 * math.sqrt(expected)
    elif kind in ("classify", "grpo", "rloo", "ppo", "medusa", "eagle", "mtp"):  # the last write what they learn
        assert figures.supervised == 0
    else:
        assert figures.supervised == report.supervised_tokens
    text = printed(inspection)
    assert f"Data of {inspection.name}" in text and "\x1b[" not in text
    assert f"Row {figures.longest:,} (" in text.replace("Row 1 (", "Row 1 (") and "the longest" in text
    page = render(inspection)
    assert page.count("<details") == len(inspection.shown)
    json.dumps(inspection.as_dict(), allow_nan=False)


def test_side_by_side_in_the_terminal(inspected):
    inspection = inspected("dpo")
    line = next(line for line in printed(inspection).splitlines() if line.startswith("chosen, "))
    assert "rejected, " in line
    assert inspection.train.pairs is not None and "shorter one is chosen in" in printed(inspection)


def test_tags_stand_at_their_tokens(inspected):
    inspection = inspected("token-classify")
    sequence = inspection.shown[0].view.sequences[0]
    place, tag = next(iter(sequence.notes.items()))
    assert f"→{tag}" in printed(inspection)
    assert sequence.labels[place] != -100
    assert sum(count for _, count in inspection.train.classes) == inspection.train.supervised


def test_hidden_tokens_are_told(inspected):
    inspection = inspected("mlm")
    sequence = inspection.shown[0].view.sequences[0]
    tokens = inspection.tokenizer.convert_ids_to_tokens([label for label in sequence.labels if label != -100])
    assert list(sequence.notes.values()) == tokens and tokens


def test_policies_show_prompts(inspected):
    text = printed(inspected("grpo"))
    assert "answers are sampled" in text and "prompt, " in text and "does not apply" in text


@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("sft", ["train.packing=true", f"data.source={SMALL / 'pairs.jsonl'}", "train.max_length=110"]),
        ("seq2seq", ["objective.packing=documents"]),
    ],
)
def test_packed_rows_are_those_of_the_trainer(kind, overrides, inspected):
    plain, inspection = inspected(kind, *overrides[1:]), inspected(kind, *overrides)
    figures = inspection.train
    # As many documents as there were rows, with all their tokens, in fewer rows.
    assert figures.documents == plain.train.rows > figures.rows
    assert figures.tokens == plain.train.tokens
    assert figures.stops.checked == figures.stops.stopped == plain.train.stops.checked
    fullest = next(shown for shown in inspection.shown if "the most documents" in shown.why)
    for sequence in fullest.view.all_sequences:
        assert len(sequence.documents) > 1
        if kind == "sft":  # the first token of a document is predicted by nothing
            assert all(sequence.labels[start] == -100 for start, _ in sequence.documents)
    assert "--- document ---" in printed(inspection)


def test_colours_where_there_are_some(inspected):
    inspection = inspected("sft")
    coloured = printed(inspection, force_terminal=True, color_system="standard")
    assert "\x1b[30;42m" in coloured  # black on green: learned
    assert "╎" not in coloured and "╎" in printed(inspection)
