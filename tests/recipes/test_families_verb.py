"""`anyformer families`, and the documents that it writes: what they say of the families is so."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

from anyformer.modeling.interop import FAMILIES, ConversionError
from anyformer.modeling.interop import parity as measuring
from anyformer.modeling.interop.parity import Parity, random_stock
from anyformer.recipes import families as suite
from anyformer.recipes.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
COMMAND = [sys.executable, "-c", "from anyformer.scripts.cli import main; main()", "families"]
GOOD = Parity(plain=1e-6, left=2e-6, right=3e-6, shifted=4e-6, generated=True, round_trip=True)


def families(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=120)


def cells(text: str) -> list[list[str]]:
    """The rows of a markdown table without its header."""
    found = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[:1] == "|"]
    return found[2:]


def between(start: str, end: str) -> str:
    return DOCUMENT.partition(start)[2].partition(end)[0]


# The verb.


def test_the_list_names_each_family_and_its_classes():
    done = families()
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[::2]] == sorted(FAMILIES)
    assert [line.strip() for line in lines[1::2]] == [", ".join(FAMILIES[n].heads.values()) for n in sorted(FAMILIES)]
    assert lines[0] == "bart         BART (Lewis et al. 2019, arXiv:1910.13461)"


def test_measuring_one_family_prints_its_row_and_nothing_of_the_libraries():
    done = families("gpt2", "--measure", "--markdown")
    assert done.returncode == 0
    assert done.stderr == "[1/1] gpt2\n"
    [[name, what, classes, difference, generated, back]] = cells(done.stdout)
    assert (name, generated, back) == ("`gpt2`", "yes", "yes")
    assert what.startswith("GPT-2, DialoGPT") and classes.startswith("`GPT2LMHeadModel`, `GPT2Model`")
    assert 0 < float(difference) <= 1e-5
    assert len(done.stdout.splitlines()) == 3


def test_an_unknown_name_is_status_2_with_what_is_near():
    done = families("mistrall", "--measure")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "no family is called 'mistrall'; did you mean mistral or ministral or mixtral?\n"


def test_a_family_that_differs_is_status_1():
    """A stock class that computes something else: its last norm is scaled behind the back of the import."""
    code = (
        "import anyformer.modeling.interop.parity as parity\n"
        "random_stock = parity.random_stock\n"
        "import torch\n"
        "def scaled(*arguments):\n"
        "    stock = random_stock(*arguments)\n"
        "    stock.model.norm.register_forward_hook(lambda module, given, out: out * 1.001)\n"
        "    return stock\n"
        "parity.random_stock = scaled\n"
        "from anyformer.scripts.cli import main; main()\n"
    )
    command = [sys.executable, "-c", code, "families", "llama", "--measure"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    header, row = done.stdout.splitlines()
    assert header.split()[:2] == ["family", "difference"]
    assert row.startswith("llama") and float(row.split()[1]) > 1e-3


# What other programs call.


def test_names_are_taken_once_and_in_order():
    assert [f.model_type for f in suite.find_families(["t5", "bert", "t5"])] == ["t5", "bert"]
    with pytest.raises(UserError, match="no family is called 'zzz'; known: bart, bert"):
        suite.find_families(["zzz"])


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({}, True),
        ({"generated": None}, True),
        ({"generated": False}, False),
        ({"round_trip": False}, False),
        ({"right": 2e-5}, False),
        ({"left": float("nan")}, False),
    ],
    ids=str,
)
def test_one_bad_example_makes_the_family_unequal(monkeypatch, change, equal):
    found = iter([GOOD, Parity(**(vars(GOOD) | change)), GOOD])
    monkeypatch.setattr(measuring, "measure", lambda family, example: next(found))
    assert suite.measure(FAMILIES["bert"]).equal is equal


def test_a_stock_class_that_fails_is_reported_and_the_others_still_count(monkeypatch):
    def broken(family, example):
        raise AttributeError("no such buffer")

    monkeypatch.setattr(measuring, "measure", broken)
    found = suite.measure(FAMILIES["bert"])
    assert found.error == "AttributeError: no such buffer" and not found.equal
    assert suite.rows([FAMILIES["bert"]], [found])[1][3:] == ["failed", "-", "-"]


def test_every_family_says_what_it_is():
    for name, family in FAMILIES.items():
        assert re.search(r"\(.+ \d{4}.*\)", suite.describe(family)), f"{name}: no source with a year"


# The documents.


def test_the_table_of_the_docs_has_exactly_the_families_there_are():
    documented = cells(between("<!-- table: begin -->", "<!-- table: end -->"))
    now = cells(suite.as_markdown(suite.rows(suite.find_families())))
    assert [row[:3] for row in documented] == now, "run make families"
    for name, *_, difference, generated, back in documented:
        head = FAMILIES[name.strip("`")].default_head
        assert float(difference) <= suite.TOLERANCE and back == "yes", name
        assert generated == ("yes" if head in ("causal_lm", "seq2seq_lm") else "-"), name


REFUSED = [
    (family.strip("`"), case)
    for family, refused, _ in cells(between("## What is refused", "Export refuses"))
    for case in re.findall(r"`([^`]+)`", refused)
    if family != "all"
]


@pytest.mark.parametrize(("name", "case"), REFUSED, ids=lambda value: value)
def test_what_the_docs_call_refused_is_refused(name, case):
    """A case is a class, `field=value`, or `field != other`, the other a value or a field."""
    family = FAMILIES[name]
    if case.isidentifier():
        assert hasattr(transformers, case)
        with pytest.raises(ConversionError, match=f"not {case}"):
            family.head_of(case)
        return
    field, sign, text = re.fullmatch(r"([\w.]+)( != |=)(.+)", case).groups()
    config = random_stock(family, family.examples[0]).config
    owner, field = (config.attn_config, field.partition(".")[2]) if "." in field else (config, field)
    assert hasattr(owner, field)
    family.from_foreign_config(config)  # without the field it is accepted
    value = getattr(config, text) if text.isidentifier() and hasattr(config, text) else ast.literal_eval(text)
    if sign == " != ":
        value = "relu" if isinstance(value, str) else 2 * value if value else 0.5
    setattr(owner, field, value)
    with pytest.raises(ConversionError, match=re.escape(field)):
        family.from_foreign_config(config)


def test_there_are_refusals_to_check():
    assert len(REFUSED) > 30
    assert ("falcon", "alibi=True") in REFUSED and ("opt", "word_embed_proj_dim != hidden_size") in REFUSED


def test_the_readme_and_the_changelog_count_the_families():
    for name in ("README.md", "CHANGELOG.md"):
        counts = re.findall(r"(\d+) families", (ROOT / name).read_text(encoding="utf-8"))
        assert counts and {int(count) for count in counts} == {len(FAMILIES)}, name


def test_the_worked_example_is_the_file_it_names():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [named] = re.findall(r"This is `(\S+)`, whole", text)
    assert f"```python\n{(ROOT / named).read_text(encoding='utf-8')}```\n" in text


def test_the_code_that_finds_a_difference_finds_none_where_there_is_none(capsys):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(import torch\n.*?hidden_states.*?)```", text, re.DOTALL)
    exec(compile(code, "CONTRIBUTING.md", "exec"), {})
    printed = capsys.readouterr().out.split()
    assert printed[::2] == ["0", "1", "2"]
    assert max(map(float, printed[1::2])) < 1e-12
