"""Tokens made in parts and by several processes: the same as in one go, to the last bit."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from row_functions import lengths
from transformers import AutoTokenizer
from tuning import PAIRS, message

from anyformer.recipes.errors import UserError
from anyformer.recipes.tokens import parallel
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer
from anyformer.recipes.tokens.labelled import tokenize_texts, tokenize_words
from anyformer.recipes.tokens.parallel import PART_ROWS, TOKENS, tokenize_into
from anyformer.recipes.tokens.plain_text import tokenize_documents, tokenize_pieces
from anyformer.recipes.tokens.preferences import tokenize_labelled, tokenize_pairs
from anyformer.recipes.tokens.report import Tokenizing
from anyformer.recipes.tokens.sequences import tokenize_sequences
from anyformer.recipes.tokens.supervised import tokenize_rows

COUNT = 40
NUMBERS = ["one", "two", "three", "four", "five"]
TEXTS = [" ".join(NUMBERS[(i + j) % 5] for j in range(1 + i % 9)) for i in range(COUNT)]
CHATS = [{"messages": [*message("user", text), *message("assistant", f"{text} {i}")]} for i, text in enumerate(TEXTS)]
LATE_MARGINS = [{**PAIRS[i % 5], **({"margin": 0.5} if i > 30 else {})} for i in range(COUNT)]
CASES = {
    "chat": (tokenize_rows, CHATS, {"max_length": 64, "truncation": "drop"}),
    "chat, cut": (tokenize_rows, CHATS, {"max_length": 30, "truncation": "keep_start", "loss_on": "all"}),
    "text": (tokenize_rows, [{"text": text} for text in TEXTS], {"max_length": 20}),
    "pairs": (tokenize_pairs, LATE_MARGINS, {"max_length": 32, "truncation": "drop"}),
    "answers": (
        tokenize_labelled,
        [{"prompt": "the ", "completion": text, "label": i % 2 == 0} for i, text in enumerate(TEXTS)],
        {"max_length": 24, "truncation": "keep_start"},
    ),
    "classes": (
        tokenize_texts,
        [{"text": text, "label": i % 2} for i, text in enumerate([*TEXTS, ""])],
        {"max_length": 10, "problem": "single-label", "names": ["a", "b"], "numbered": ["a", "b"]},
    ),
    "words": (
        tokenize_words,
        [{"tokens": [*text.split(), ""], "tags": ["x"] * (len(text.split()) + 1)} for text in TEXTS],
        {"max_length": 10, "names": ["x", "y"]},
    ),
    "sequences": (
        tokenize_sequences,
        [{"source": text, "target": text[::-1]} for text in TEXTS],
        {"limits": [16, 30], "limit_names": ["s", "t"], "start_token_id": 1, "truncation": "drop"},
    ),
    "pieces": (
        tokenize_pieces,
        [{"text": text} for text in TEXTS],
        {"max_length": 8, "mlm_probability": 0.15, "whole_word": True},
    ),
    "documents": (
        tokenize_documents,
        [{"text": text} for text in TEXTS],
        {"max_length": 16, "packing": "documents"},
    ),
}


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture
def small_parts(monkeypatch):
    """Parts of 7 rows, for which processes are started at once."""
    monkeypatch.setattr(parallel, "PART_ROWS", 7)
    monkeypatch.setattr(parallel, "WORTH", 0)


def table_in(folder: Path) -> pa.Table:
    return pa.ipc.open_stream(pa.memory_map(str(folder / TOKENS))).read_all()


def texts(count: int, **odd: str) -> list[dict]:
    """Rows `lengths` reads; `odd` are the texts of some, by their number with r in front."""
    rows = [{"text": "x" * (i % 13)} for i in range(count)]
    for number, text in odd.items():
        rows[int(number[1:]) - 1] = {"text": text}
    return rows


def same_as_in_one_go(case, tokenizer, folder, num_proc):
    function, rows, settings = CASES[case]
    whole = function(rows, tokenizer, **settings)
    report, processes = tokenize_into(folder, Tokenizing(function, settings), iter(rows), tokenizer, num_proc)
    assert report == whole.report and report.rows == len(rows) > 0
    assert table_in(folder).equals(whole.dataset.data.table)  # schema and values
    assert sorted(file.name for file in folder.iterdir()) == [TOKENS]
    return processes


@pytest.mark.parametrize("case", CASES)
def test_parts_make_what_one_go_makes(case, tokenizer, tmp_path, small_parts):
    assert same_as_in_one_go(case, tokenizer, tmp_path, 1) == 1


def test_the_cases_drop_cut_and_warn(tokenizer):
    reports = {case: function(rows, tokenizer, **settings).report for case, (function, rows, settings) in CASES.items()}
    assert reports["pairs"].dropped and reports["classes"].dropped and reports["sequences"].dropped
    assert reports["chat, cut"].truncated and reports["words"].truncated
    assert len(reports["words"].warnings) == 2


@pytest.mark.parametrize("case", ["chat", "pairs", "words"])
def test_processes_make_what_one_go_makes(case, tokenizer, tmp_path, small_parts):
    assert same_as_in_one_go(case, tokenizer, tmp_path, 2) == 2


def test_work_is_shared_and_torch_is_not_imported(tmp_path, small_parts):
    report, processes = tokenize_into(tmp_path, Tokenizing(lengths, {}), texts(700), byte_tokenizer(), 2)
    assert processes == 2 and len(report.counted) == 2 and sum(report.counted.values()) == 700
    assert str(os.getpid()) not in report.counted and report.warnings == []


def test_few_rows_start_no_process(tmp_path):
    rows = texts(PART_ROWS)
    report, processes = tokenize_into(tmp_path, Tokenizing(lengths, {}), rows, byte_tokenizer(), 8)
    assert processes == 1 and report.counted == {str(os.getpid()): PART_ROWS}


def test_parts_end_with_rows_or_with_text(monkeypatch):
    monkeypatch.setattr(parallel, "PART_ROWS", 4)
    monkeypatch.setattr(parallel, "PART_SIZE", 100)
    rows = [{"text": "x" * size} for size in (1, 1, 1, 1, 1, 100, 99, 1, 5)]
    assert [(part.number, part.first, len(part.rows)) for part in parallel.parts_of(rows)] == [
        (0, 1, 4),
        (1, 5, 2),
        (2, 7, 2),
        (3, 9, 1),
    ]


# Faults


@pytest.mark.parametrize("num_proc", [1, 2])
def test_the_first_bad_row_is_told_by_its_number(num_proc, tmp_path, small_parts):
    rows = texts(700, r345="bad", r352="bad", r9="fine", r640="bad")
    with pytest.raises(UserError) as told:
        tokenize_into(tmp_path, Tokenizing(lengths, {}), rows, byte_tokenizer(), num_proc)
    assert str(told.value) == "Row 345: bad text"
    with pytest.raises(UserError, match=r"^Row 345: bad text$"):
        lengths(rows, byte_tokenizer())


@pytest.mark.parametrize("num_proc", [1, 2])
@pytest.mark.parametrize(
    ("function", "rows", "settings"),
    [
        (tokenize_rows, CHATS, {"max_length": 3, "truncation": "drop"}),  # nothing left
        (tokenize_pairs, PAIRS * 8, {"max_length": 3}),
        (
            tokenize_texts,
            [{"text": "one", "label": int(i > 30)} for i in range(40)],
            {"max_length": 9, "problem": "single-label", "names": ["a"], "numbered": ["a"]},
        ),
        # A message that counts bad rows, in several parts.
        (
            tokenize_pairs,
            [*PAIRS * 6, *[{"prompt": "a<|im_end|>", "chosen": "", "rejected": "b"}] * 9],
            {"max_length": 64},
        ),
    ],
)
def test_other_faults_are_told_as_in_one_go(function, rows, settings, num_proc, tokenizer, tmp_path, small_parts):
    with pytest.raises(UserError) as whole:
        function(rows, tokenizer, **settings)
    with pytest.raises(UserError) as parts:
        tokenize_into(tmp_path, Tokenizing(function, settings), rows, tokenizer, num_proc)
    assert str(parts.value) == str(whole.value)


def test_a_fault_of_reading_comes_through(tmp_path, small_parts):
    def rows():
        yield from texts(50)
        raise UserError("a.jsonl:51: no JSON")

    with pytest.raises(UserError, match=r"^a.jsonl:51: no JSON$"):
        tokenize_into(tmp_path, Tokenizing(lengths, {}), rows(), byte_tokenizer(), 2)


def test_a_process_that_dies_is_told(tmp_path, small_parts):
    rows = texts(700, r345="deadly")
    with pytest.raises(UserError, match=r"data.num_proc: .* rows 344 to 350 was ended by signal 9.*fewer than 2"):
        tokenize_into(tmp_path, Tokenizing(lengths, {"deadly": "deadly"}), rows, byte_tokenizer(), 2)


def test_a_fault_of_ours_comes_with_its_place(tmp_path, small_parts):
    with pytest.raises(TypeError, match="a fault of ours") as told:
        tokenize_into(tmp_path, Tokenizing(lengths, {}), texts(700, r345="odd"), byte_tokenizer(), 2)
    assert "row_functions.py" in told.value.__notes__[0]


def test_an_interrupt_ends_the_processes(tmp_path, small_parts, monkeypatch):
    started = []
    begin = parallel._Workers.started.__func__

    def watched(cls, *given):
        started.append(begin(cls, *given))
        return started[-1]

    monkeypatch.setattr(parallel._Workers, "started", classmethod(watched))

    def rows():
        yield from texts(100)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokenize_into(tmp_path, Tokenizing(lengths, {}), rows(), byte_tokenizer(), 2)
    processes = started[0].processes
    assert len(processes) == 2 and all(process.returncode == -9 for process in processes)


def test_a_tokenizer_that_cannot_be_sent_stays_here(tmp_path, small_parts):
    tokenizer = byte_tokenizer()
    tokenizer.odd = lambda: None  # cannot be pickled
    report, processes = tokenize_into(tmp_path, Tokenizing(lengths, {}), texts(50), tokenizer, 2)
    assert processes == 1 and report.rows == 50


# Memory, and a script that does not guard against being run again by its processes

SCRIPT = """
import resource, sys
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from anyformer.recipes.tokens.cache import tokens_of
from anyformer.recipes.tokens.report import Tokenizing
from anyformer.recipes.tokens.supervised import tokenize_rows

print("once")
WORD = "x" * 50
raw = Tokenizer(models.WordLevel({"<e>": 0, "<u>": 1, WORD: 2}, unk_token="<u>"))
raw.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<e>", unk_token="<u>")

class Rows:
    def __init__(self, count):
        self.count = count
    def __iter__(self):
        return ({"text": f"{i} " + f"{WORD} " * 40} for i in range(self.count))  # 2,040 characters and more

job = Tokenizing(tokenize_rows, {"max_length": 64})
small = tokens_of(job, Rows(14_000), tokenizer, num_proc=2, cache=sys.argv[1] == "cache")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = tokens_of(job, Rows(25_000), tokenizer, num_proc=2, cache=sys.argv[1] == "cache")
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert small.dataset[13_999]["input_ids"] == [1, *[2] * 40, 0]
assert data.report.rows_kept == len(data.dataset) == 25_000 and data.report.made.endswith("2 processes")
print(grown * 1024, 25_000 * 2_040)
"""


@pytest.mark.parametrize("cache", ["cache", pytest.param("no cache", marks=pytest.mark.slow)])
def test_a_corpus_is_not_held_in_memory(cache, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "ANYFORMER_CACHE_LIMIT": "1"}
    done = subprocess.run([sys.executable, str(script), cache], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    once, sizes = done.stdout.strip().splitlines()
    grown, corpus = map(int, sizes.split())
    assert once == "once" and corpus > 50_000_000
    assert grown < corpus, grown
