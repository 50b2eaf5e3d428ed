"""Tokens of earlier runs: found where nothing has changed, made anew where anything has."""

import datetime
import errno
import json
import os
import time
from functools import partial

import pytest
from row_functions import CALLS, lengths
from transformers import AutoTokenizer
from tuning import PAIRS, message, objective_of

from anyformer.recipes.errors import UserError
from anyformer.recipes.prepare import prepare
from anyformer.recipes.tokens import cache as cache_module
from anyformer.recipes.tokens import parallel
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer
from anyformer.recipes.tokens.cache import NEW, REPORT, Key, cache_folder, clean, tokenizer_digest, tokens_of
from anyformer.recipes.tokens.labelled import tokenize_texts
from anyformer.recipes.tokens.parallel import TOKENS
from anyformer.recipes.tokens.preferences import tokenize_labelled, tokenize_pairs
from anyformer.recipes.tokens.report import Tokenizing
from anyformer.recipes.tokens.supervised import tokenize_rows

ROWS = [{"messages": [*message("user", f"count {i}"), *message("assistant", "one two " * (i + 1))]} for i in range(6)]
SETTINGS = {"max_length": 40, "loss_on": "completion", "truncation": "drop"}
JOB = Tokenizing(tokenize_rows, SETTINGS)


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("ANYFORMER_CACHE_LIMIT", "1")
    CALLS.clear()
    return cache_folder()


@pytest.fixture
def tokenizer(tiny_checkpoint):
    return AutoTokenizer.from_pretrained(tiny_checkpoint)


def entries(root):
    return sorted(entry.name for entry in root.iterdir()) if root.exists() else []


def rows_of(data):
    return [dict(row) for row in data.dataset]


# The same


def test_a_second_run_has_the_tokens_of_the_first(root, tokenizer):
    whole = tokenize_rows(ROWS, tokenizer, **SETTINGS)
    assert whole.report.dropped  # the report says something
    first, second = (tokens_of(JOB, ROWS, tokenizer) for _ in range(2))
    for data in (first, second):
        assert data.report == whole.report and rows_of(data) == rows_of(whole)
        assert data.dataset.features == whole.dataset.features
    assert first.report.made.endswith("s by 1 process")
    assert second.report.made.startswith(f"from the cache (made {datetime.date.today()}")
    assert len(entries(root)) == 1 and entries(root / entries(root)[0]) == [REPORT, TOKENS]


def test_the_function_is_not_called_again(root):
    job, rows, tokenizer = Tokenizing(lengths, {}), [{"text": "abc"}], byte_tokenizer()
    tokens_of(job, rows, tokenizer)
    tokens_of(job, rows, tokenizer)
    assert CALLS == [1]
    assert tokens_of(job, rows, tokenizer, cache=False).report.made.startswith("made in")
    assert CALLS == [1, 1]


def test_where_a_tokenizer_lies_and_what_it_was_asked_does_not_matter(tokenizer, tmp_path):
    before = tokenizer_digest(tokenizer)
    tokenizer("one two three", truncation=True, max_length=2)
    tokenizer(["one", "one two"], padding=True)
    assert tokenizer_digest(tokenizer) == before
    tokenizer.save_pretrained(tmp_path / "elsewhere")
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tmp_path / "elsewhere")) == before


def test_a_file_that_is_mapped_is_no_place_for_a_trainers_own_files(root, tokenizer):
    data = tokens_of(JOB, ROWS, tokenizer)
    data.dataset.map(lambda row: {"length": len(row["input_ids"])})
    assert entries(root / entries(root)[0]) == [REPORT, TOKENS]


# Another key


def changed_rows():
    changed = json.loads(json.dumps(ROWS))
    changed[3]["messages"][1]["content"] += "!"
    return changed


@pytest.mark.parametrize(
    "rows",
    [
        changed_rows(),
        ROWS[::-1],
        ROWS[:-1],
        [*ROWS[:-1], ROWS[-1] | {"messages": ROWS[-1]["messages"] + ROWS[-1]["messages"]}],
        [{"messages": [{**turn, "train": True} for turn in row["messages"]]} for row in ROWS],
        # A template that writes a tool writes its keys in their order.
        [{"messages": [dict(reversed(turn.items())) for turn in row["messages"]]} for row in ROWS],
    ],
    ids=["content", "order", "fewer", "a turn more", "a key more", "order of keys"],
)
def test_other_rows_have_another_key(rows, tokenizer):
    assert str(Key.of(JOB, rows, tokenizer)) != str(Key.of(JOB, ROWS, tokenizer))


def test_rows_that_run_together_are_told_apart(tokenizer):
    keys = {str(Key.of(JOB, rows, tokenizer)) for rows in ([{"text": "a\nb"}], [{"text": "a"}, {"text": "b"}])}
    assert len(keys) == 2


@pytest.mark.parametrize(
    "job",
    [
        Tokenizing(tokenize_rows, SETTINGS | {"max_length": 39}),
        Tokenizing(tokenize_rows, SETTINGS | {"max_length": None}),
        Tokenizing(tokenize_rows, SETTINGS | {"truncation": "keep_start"}),
        Tokenizing(tokenize_rows, SETTINGS | {"loss_on": "assistant"}),
        Tokenizing(tokenize_rows, SETTINGS | {"loss_on": ["assistant"]}),
        Tokenizing(tokenize_labelled, SETTINGS),
    ],
)
def test_other_settings_and_functions_have_another_key(job, tokenizer):
    assert str(Key.of(job, ROWS, tokenizer)) != str(Key.of(JOB, ROWS, tokenizer))
    assert str(Key.of(JOB._replace(settings=dict(reversed(SETTINGS.items()))), ROWS, tokenizer)) == str(
        Key.of(JOB, ROWS, tokenizer)
    )


CHANGES = {
    "template": lambda t: setattr(t, "chat_template", t.chat_template.replace("'\n'", "'\n\n'")),
    "a token more": lambda t: t.add_tokens(["<new>"]),
    "a special token more": lambda t: t.add_special_tokens({"additional_special_tokens": ["<new>"]}),
    "end token": lambda t: setattr(t, "eos_token", "<|pad|>"),
    "end that is cut": lambda t: setattr(t, "truncation_side", "left"),
    "special tokens split": lambda t: setattr(t, "split_special_tokens", True),
    "language": lambda t: setattr(t, "tgt_lang", "de"),
    "own longest": lambda t: setattr(t, "model_max_length", 7),
    "backend": lambda t: setattr(
        t.backend_tokenizer, "pre_tokenizer", byte_tokenizer().backend_tokenizer.pre_tokenizer
    ),
    "class": lambda t: setattr(t, "__class__", type("Own", (type(t),), {})),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_tokenizer_has_another_key(change, tokenizer):
    before = str(Key.of(JOB, ROWS, tokenizer))
    CHANGES[change](tokenizer)
    assert str(Key.of(JOB, ROWS, tokenizer)) != before


def test_a_template_with_the_date_has_a_key_for_a_day(tokenizer, monkeypatch):
    class Tomorrow(datetime.date):
        @classmethod
        def today(cls):
            return cls(2100, 1, 1)

    plain = tokenizer_digest(tokenizer)
    tokenizer.chat_template = "{{ strftime_now('%d') }}" + tokenizer.chat_template
    dated = tokenizer_digest(tokenizer)
    monkeypatch.setattr(cache_module.datetime, "date", Tomorrow)
    assert tokenizer_digest(tokenizer) not in (dated, plain)
    tokenizer.chat_template = tokenizer.chat_template.partition("}}")[2]
    assert tokenizer_digest(tokenizer) == plain


@pytest.mark.parametrize("what", ["code", "library"])
def test_other_code_has_another_key(what, tokenizer, monkeypatch):
    before = str(Key.of(JOB, ROWS, tokenizer))
    if what == "code":
        monkeypatch.setattr(cache_module, "_code_of_package", lambda: "other")
    else:
        monkeypatch.setattr(cache_module.importlib.metadata, "version", lambda name: "99")
    assert str(Key.of(JOB, ROWS, tokenizer)) != before


def test_a_tokenizer_written_in_python_is_not_cached(root):
    class Slow:
        is_fast = False

    assert tokens_of(Tokenizing(lengths, {}), [{"text": "abc"}], Slow()).report.rows == 1
    assert entries(root) == []


# Faults


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "a bit": lambda entry: flip(entry / TOKENS),
    "cut": lambda entry: (entry / TOKENS).write_bytes((entry / TOKENS).read_bytes()[:-9]),
    "no tokens": lambda entry: (entry / TOKENS).unlink(),
    "no report": lambda entry: (entry / REPORT).unlink(),
    "half a report": lambda entry: (entry / REPORT).write_text((entry / REPORT).read_text()[:40]),
    "another report": lambda entry: (entry / REPORT).write_text('{"size": 1}'),
    "empty": lambda entry: [file.unlink() for file in entry.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_anew(damage, root, tokenizer):
    whole = tokens_of(JOB, ROWS, tokenizer)
    expected = rows_of(whole)
    DAMAGES[damage](root / entries(root)[0])
    again = tokens_of(JOB, ROWS, tokenizer)
    assert again.report.made.startswith("made in") and rows_of(again) == expected
    assert tokens_of(JOB, ROWS, tokenizer).report.made.startswith("from the cache")
    assert len(entries(root)) == 1


def test_a_place_that_cannot_be_written_is_told_and_the_run_goes_on(root, tokenizer):
    root.parent.parent.mkdir()
    root.parent.write_text("a file where a folder should be")
    data = tokens_of(JOB, ROWS, tokenizer)
    whole = tokenize_rows(ROWS, tokenizer, **SETTINGS)
    assert rows_of(data) == rows_of(whole)
    assert len(data.report.warnings) == 1 and "not kept for the next run" in data.report.warnings[0]


@pytest.mark.parametrize("worth", [0, 3], ids=["in a file", "in memory"])
def test_a_full_disk_is_told_and_the_run_goes_on(worth, root, tokenizer, monkeypatch):
    def full(*given):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(parallel, "_join", full)
    monkeypatch.setattr(cache_module, "WORTH", worth)
    data = tokens_of(JOB, ROWS, tokenizer)
    assert rows_of(data) == rows_of(tokenize_rows(ROWS, tokenizer, **SETTINGS))
    assert len(data.report.warnings) == 1 and "No space left on device" in data.report.warnings[0]
    assert entries(root) == []


def test_what_cannot_be_used_or_is_cut_short_leaves_nothing(root, tokenizer):
    with pytest.raises(UserError, match="None of the 6 rows"):
        tokens_of(Tokenizing(tokenize_rows, SETTINGS | {"max_length": 2}), ROWS, tokenizer)

    class Interrupted(list):
        times = 0

        def __iter__(self):
            yield from super().__iter__()
            self.times += 1
            if self.times == 2:  # once for the key
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tokens_of(JOB, Interrupted(ROWS), tokenizer)
    assert entries(root) == []


def test_two_runs_at_once_make_one_entry(root, tokenizer, monkeypatch):
    begin = cache_module.tokenize_into

    def meanwhile(*given):
        monkeypatch.setattr(cache_module, "tokenize_into", begin)
        assert tokens_of(JOB, ROWS, tokenizer).report.made.startswith("made in")  # another run, faster
        return begin(*given)

    monkeypatch.setattr(cache_module, "tokenize_into", meanwhile)
    data = tokens_of(JOB, ROWS, tokenizer)
    assert rows_of(data) == rows_of(tokenize_rows(ROWS, tokenizer, **SETTINGS))
    assert len(entries(root)) == 1


class Stream:
    """Rows without a length; each pass begins at `first` and then one later."""

    def __init__(self, rows, moves=0):
        self.rows, self.moves, self.passes = rows, moves, 0

    def __iter__(self):
        first = self.moves * self.passes
        self.passes += 1
        return iter(self.rows[first:])


def test_a_stream_has_the_key_of_its_rows(root, tokenizer):
    tokens_of(JOB, Stream(ROWS), tokenizer)
    assert tokens_of(JOB, ROWS, tokenizer).report.made.startswith("from the cache")


def test_a_stream_that_changes_is_told_and_not_kept(root, tokenizer):
    data = tokens_of(JOB, Stream(ROWS, moves=1), tokenizer)
    assert entries(root) == [] and "others each time they are read" in data.report.warnings[0]
    assert data.report.rows_kept > 0


def test_tokens_that_are_not_kept_lie_in_a_file_that_ends_with_them(root, tokenizer, monkeypatch, tmp_path):
    monkeypatch.setattr(cache_module, "WORTH", 0)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(cache_module.tempfile, "tempdir", str(tmp_path / "temporary"))
    data = tokens_of(JOB, ROWS, tokenizer, cache=False)
    assert len(entries(tmp_path / "temporary")) == 1 and entries(root) == []
    assert rows_of(data) == rows_of(tokenize_rows(ROWS, tokenizer, **SETTINGS))
    del data
    assert entries(tmp_path / "temporary") == []


# Bounds


def entry(root, name, age_days, size):
    folder = root / name
    folder.mkdir(parents=True)
    (folder / TOKENS).write_bytes(bytes(size))
    (folder / REPORT).write_text("")
    moment = time.time() - age_days * 86400
    for path in (folder / REPORT, folder):
        os.utime(path, (moment, moment))


def test_old_entries_and_the_oldest_of_too_many_go(root):
    for name, age, size in (("unused", 31, 1), ("a", 3, 400), ("b", 2, 400), ("c", 1, 400), ("mine", 29, 100)):
        entry(root, name, age, size)
    entry(root, f"{NEW}killed", 2, 1)
    entry(root, f"{NEW}running", 0, 900)
    clean(root, 1000, keep="mine")
    assert entries(root) == [f"{NEW}running", "b", "c", "mine"]
    clean(root, 450, keep="mine")
    assert entries(root) == [f"{NEW}running", "mine"]


def test_using_an_entry_keeps_it(root, tokenizer):
    tokens_of(JOB, ROWS, tokenizer)
    (name,) = entries(root)
    long_ago = time.time() - 29 * 86400
    os.utime(root / name / REPORT, (long_ago, long_ago))
    tokens_of(JOB, ROWS, tokenizer)
    assert (root / name / REPORT).stat().st_mtime > time.time() - 3600


def test_the_limit_is_a_number_and_nothing_is_kept_with_0(root, tokenizer, monkeypatch):
    monkeypatch.setenv("ANYFORMER_CACHE_LIMIT", "0")
    tokens_of(JOB, ROWS, tokenizer)
    assert entries(root) == []
    monkeypatch.setenv("ANYFORMER_CACHE_LIMIT", "much")
    with pytest.raises(UserError, match="ANYFORMER_CACHE_LIMIT: must be a number of gigabytes"):
        tokens_of(JOB, ROWS, tokenizer)


# Recipes


def test_recipes_use_it(recipe, root):
    first, second = prepare(recipe()), prepare(recipe())
    assert len(entries(root)) == 2  # training and held-out rows
    for name in ("train", "held_out"):
        one, two = getattr(first, name), getattr(second, name)
        assert one.report.made.startswith("made in") and two.report.made.startswith("from the cache")
        assert one.report == two.report and rows_of(one) == rows_of(two)
    assert first.plan == second.plan
    assert prepare(recipe("data.cache=false")).train.report.made.startswith("made in")
    for change in ("train.max_length=63", "objective.loss_on=all", "data.truncation=keep_start"):
        assert prepare(recipe(change)).train.report.made.startswith("made in"), change
    assert prepare(recipe("train.learning_rate=1e-3")).train.report.made.startswith("from the cache")


def test_number_of_processes_is_no_part_of_the_key(recipe):
    prepare(recipe("data.num_proc=1"))
    assert prepare(recipe("data.num_proc=2")).train.report.made.startswith("from the cache")


@pytest.mark.parametrize(
    ("kind", "function"), [("dpo", tokenize_pairs), ("kto", tokenize_labelled), ("reward", tokenize_pairs)]
)
def test_preferences_use_it(kind, function, tiny_checkpoint, tmp_path):
    tuned = partial(objective_of, kind, tiny_checkpoint, tmp_path)
    assert tuned().tokenizing().function is function
    first, second = tuned().prepare(PAIRS), tuned().prepare(PAIRS)
    assert second.report.made.startswith("from the cache")
    assert first.report == second.report and rows_of(first) == rows_of(second)


def test_labels_are_part_of_the_key(tokenizer):
    rows = [{"text": "one", "label": "a"}, {"text": "two", "label": "b"}]
    made = [
        tokens_of(
            Tokenizing(tokenize_texts, {"max_length": 9, "problem": "single-label", "names": names}), rows, tokenizer
        )
        for names in (["a", "b"], ["b", "a"], ["a", "b"])
    ]
    assert [data.dataset["labels"][:] for data in made] == [[0, 1], [1, 0], [0, 1]]
    assert [data.report.made.startswith("from") for data in made] == [False, False, True]
