"""What a path to a model may be, and what is said of one that leads nowhere, without asking the Hub."""

import pytest

from anyformer.recipes.errors import UserError
from anyformer.recipes.generator import open_generator
from anyformer.recipes.model_paths import check_there


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    (tmp_path / "runs" / "quickstart" / "recipe.yaml").touch()
    (tmp_path / "notes").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("runs/quickstrat", "; did you mean runs/quickstart?"),
        ("./runs/other", ""),
        ("runs/quickstart/model/", ""),
        ("~/no/such", ""),
        ("model.gguf", ""),
        ("../elsewhere", ""),
    ],
)
def test_a_path_that_leads_nowhere_is_told_at_once(runs, path, near):
    with pytest.raises(UserError) as told:
        check_there(path)
    assert str(told.value) == f"{path}: no such folder or file{near}"


@pytest.mark.parametrize("path", ["gpt2", "user/name", "notes/name", "runs/quickstart", "builtin:bytes", "package:p/f"])
def test_what_may_be_a_hub_id_and_what_exists_may_be_opened(runs, path):
    check_there(path)


def test_an_empty_text_is_no_model():
    with pytest.raises(UserError, match="an empty text names no model"):
        open_generator("")
