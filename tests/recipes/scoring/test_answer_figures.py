"""SQuAD's figures by values from its script, BLEU and chrF by sacrebleu."""

import sys

import pytest
import sacrebleu
from eval_models import PAIRS, save, values, write_rows

from anyformer.recipes.errors import UserError
from anyformer.recipes.scoring.answers import corpus_score, normalised, token_f1

ANSWERS = ["the cat sat on the mat", "a dog ate my homework today", "it rains in Spain", ""]
REFERENCES = ["the cat sat on a mat", "the dog ate my homework", "it rains in Spain", "always"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("The  Eiffel-Tower, in Paris!", "eiffeltower in paris"),
        ("an apple a day", "apple day"),
        ("theatre", "theatre"),
        ("¿Qué?", "¿qué"),
        ("the", ""),
    ],
)
def test_answers_are_normalised_as_squads_script_does(text, kept):
    assert normalised(text) == kept


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("Denver Broncos", "the Denver Broncos!", 1.0),
        ("Broncos of Denver", "Denver Broncos", 0.8),
        ("one one two", "one two two", 2 / 3),
        ("nothing", "everything", 0.0),
        ("", "the", 1.0),
        ("", "word", 0.0),
    ],
)
def test_token_f1(answer, reference, f1):
    assert token_f1(answer, reference) == pytest.approx(f1)


@pytest.mark.parametrize(("metric", "by_sacrebleu"), [("bleu", sacrebleu.corpus_bleu), ("chrf", sacrebleu.corpus_chrf)])
def test_corpus_figures_are_sacrebleus_with_its_signature(metric, by_sacrebleu):
    score = corpus_score(metric, ANSWERS, REFERENCES, {})
    assert score.value == pytest.approx(by_sacrebleu(ANSWERS, [REFERENCES]).score)
    assert 0 <= score.low <= score.value <= score.high <= 100
    assert score.low < score.high
    assert f"version:{sacrebleu.__version__}" in score.details["signature"]


def test_equal_corpora_have_an_interval_of_one_point():
    score = corpus_score("bleu", REFERENCES[:3], REFERENCES[:3], {})
    assert (score.low, score.value, score.high) == pytest.approx((100, 100, 100))


def test_without_sacrebleu_the_message_says_how_to_install_it(tiny, tmp_path, monkeypatch):
    model = save(tiny(vocab_size=260), tmp_path / "model")
    on = write_rows(tmp_path / "pairs.jsonl", PAIRS)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(UserError, match=r"bleu need sacrebleu: pip install 'anyformer\[evaluation\]'"):
        values(model, on, metrics=("bleu",))
