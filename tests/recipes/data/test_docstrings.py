import subprocess
import sys

import pytest

from anyformer.recipes.data.builtin import docstrings
from anyformer.recipes.errors import UserError


@pytest.fixture(scope="module")
def data():
    return docstrings.load_docstrings()


@pytest.fixture
def tree(tmp_path):
    """A small stand-in for a standard library, each file with a trap."""

    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    write(
        "alpha/decoder.py",
        "class Outer(Base):\n"
        "    @property\n"
        "    def size(self) -> int:\n"
        '        """Return   the\n        current size.\n\n        More text.\n        """\n'
        "    class Inner:\n"
        "        async def go(self, *, fast=True): 'Run the thing now.'\n"
        "if True:\n"
        "    def late(x: str = 'a', /): 'Defined under a condition.'\n"
        "def short(): 'Too short'\n"
        "def none(): pass\n"
        "def _hidden(): 'A private helper function.'\n"
        "def __init__(): 'Set up the thing.'\n"
        "def doctest():\n    '''>>> doctest() and more words'''\n"
        f"def long(): '{'word ' * 61}'\n",
    )
    write("beta.py", "def late(x: str = 'a', /): 'Defined under a condition.'\n")  # a copy of alpha's
    write("latin.py", "# -*- coding: latin-1 -*-\ndef f(): 'Grüße an alle Leser.'\n".encode("latin-1"))
    write("undecodable.py", b"def f(): 'caf\xe9 is not UTF-8 here'\n")
    write("broken.py", "def f(:\n")
    write("test/test_x.py", "def f(): 'A test is not data.'\n")
    write("alpha/tests/x.py", "def f(): 'A test is not data either.'\n")
    write("site-packages/other.py", "def f(): 'Somebody else wrote this one.'\n")
    return tmp_path


def test_rows_of_a_small_tree(tree):
    data = docstrings.load_docstrings(tree)
    found = {row["completion"][0]["content"]: (row["module"], row["prompt"][0]["content"]) for row in data.rows}
    assert list(found) == [
        "Return the current size.",
        "Run the thing now.",
        "Defined under a condition.",
        "Set up the thing.",
        "Grüße an alle Leser.",
    ]
    assert found["Return the current size."] == (
        "alpha.decoder",
        "Write a one-line docstring for this Python function.\n\n```python\n# alpha.decoder\n"
        "class Outer(Base):\n\n    @property\n    def size(self) -> int:\n        ...\n```",
    )
    assert "class Inner:\n\n        async def go(self, *, fast=True):" in found["Run the thing now."][1]
    # The copy in beta is dropped, so that the two cannot stand on both sides.
    assert found["Defined under a condition."][0] == "alpha.decoder"
    assert sorted(path.rsplit("/", 1)[-1] for path, _ in data.unreadable) == ["broken.py", "undecodable.py"]


def test_private_names_on_request(tree):
    rows = docstrings.load_docstrings(tree, include_private=True).rows
    assert "A private helper function." in [row["completion"][0]["content"] for row in rows]


def test_real_library_gives_thousands_of_sound_rows(data):
    assert len(data.rows) > 3000
    prompts = [row["prompt"][0]["content"] for row in data.rows]
    assert len(set(prompts)) == len(prompts)
    modules = [row["module"] for row in data.rows]
    assert modules == sorted(modules)
    assert not {"test", "tests", "site-packages", "idle_test"} & {p for m in modules for p in m.split(".")}
    for row in data.rows:
        (answer,) = row["completion"]
        assert answer["role"] == "assistant" and row["prompt"][0]["role"] == "user"
        assert 3 <= len(answer["content"].split()) <= 60
        assert answer["content"] == " ".join(answer["content"].split())
    assert "json.decoder" in modules


def test_two_runs_agree(data):
    assert docstrings.load_docstrings().rows == data.rows


def test_held_out_modules_depend_on_name_and_seed_alone(data):
    modules = sorted({row["module"] for row in data.rows})
    held = {m for m in modules if docstrings.is_held_out(m, eval_fraction=0.1, seed=0)}
    assert held and len(held) < len(modules)
    assert not {m.split(".")[0] for m in held} & {m.split(".")[0] for m in set(modules) - held}
    assert held != {m for m in modules if docstrings.is_held_out(m, eval_fraction=0.1, seed=1)}
    # Pinned: a change would move rows that were trained on into the held-out part of later runs.
    assert [docstrings.is_held_out(m, eval_fraction=0.1, seed=0) for m in PINNED] == list(PINNED.values())
    # A smaller share holds out a part of what a larger one does.
    assert {m for m in modules if docstrings.is_held_out(m, eval_fraction=0.05, seed=0)} <= held


@pytest.mark.parametrize("twins", [("io", "_pyio"), ("abc", "_py_abc"), ("weakref", "_weakref", "weakref.deep.er")])
def test_twins_stay_on_one_side(twins):
    sides = [{docstrings.is_held_out(m, eval_fraction=0.5, seed=seed) for m in twins} for seed in range(30)]
    assert all(len(side) == 1 for side in sides)
    assert {True} in sides and {False} in sides


def test_share_over_many_names():
    names = [f"module{i}" for i in range(4000)]
    share = sum(docstrings.is_held_out(n, eval_fraction=0.1, seed=3) for n in names) / len(names)
    assert share == pytest.approx(0.1, abs=0.02)  # four standard deviations of a binomial


def test_no_sources_is_a_clear_error(tmp_path):
    (tmp_path / "only.pyc").write_bytes(b"\0")
    with pytest.raises(UserError, match=r"holds no readable Python sources.*data\.source"):
        docstrings.load_docstrings(tmp_path)
    with pytest.raises(UserError, match="holds no readable Python sources"):
        docstrings.load_docstrings(tmp_path / "absent")


def test_data_modules_import_without_heavy_libraries():
    code = (
        "import sys, anyformer.recipes.data.builtin.docstrings, anyformer.recipes.data\n"
        "import anyformer.recipes.tokens.supervised\n"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'trl') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


PINNED = {"asyncio.events": True, "turtle": True, "io": False, "_pyio": False, "json.decoder": False, "os": False}
