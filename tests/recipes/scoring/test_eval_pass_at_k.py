"""`anyformer eval --metrics pass@k`: samples of a model that answers as it is told, run and counted."""

import json

import pytest
import torch
from eval_models import MODELS, save, write_rows
from test_code import HUMAN_EVAL, MBPP
from typer.testing import CliRunner

from anyformer import AnyformerConfig
from anyformer.modeling import HEADS
from anyformer.recipes.generator import Generator
from anyformer.recipes.scoring import code, run
from anyformer.recipes.scoring.code import pass_at_k, problem_of
from anyformer.recipes.scoring.draws import SeededDraws
from anyformer.recipes.scoring.sandbox import Outcome
from anyformer.scripts.cli import app

WRONG = "    return None\n"


def command(*given):
    return CliRunner().invoke(app, ["eval", *map(str, given)])


def refused(*given):
    result = command(*given)
    assert result.exit_code == 2, result.output
    return result.output


@pytest.fixture
def answering(monkeypatch):
    """The model answers with the texts given, in turn; what it was asked, and how, is kept."""

    def answer_with(*texts):
        asked = []

        def answer(self, prompts, max_new_tokens, **options):
            numbers = range(len(asked), len(asked) + len(prompts))
            asked.extend((self.decode(ids), options) for ids in prompts)
            said = [self.tokenizer(texts[n % len(texts)], add_special_tokens=False)["input_ids"] for n in numbers]
            return [[*ids, self.stops[0]] for ids in said]

        monkeypatch.setattr(Generator, "answer", answer)
        return asked

    return answer_with


def scores_of(model, on, *given):
    result = command(model, "--on", on, "--metrics", "pass@k", "--allow-code", "--json", *given)
    assert result.exit_code == 0, result.output
    return {score["name"]: score for score in json.loads(result.stdout)["scores"]}


@pytest.mark.parametrize("row", [HUMAN_EVAL, MBPP, {**MBPP, "prompt": MBPP["text"], "text": "about"}])
def test_right_programs_pass_and_wrong_ones_do_not(tiny_checkpoint, tmp_path, answering, row):
    on = write_rows(tmp_path / "rows.jsonl", [row])
    asked = answering(problem_of(row).canonical)
    found = scores_of(tiny_checkpoint, on)["pass@1"]
    assert found["value"] == 1.0 and found["details"]["outcomes"] == {"passed": 1}
    assert found["details"]["temperature"] == 0
    ((prompt, options),) = asked
    assert options["do_sample"] is False
    # A program goes on as it stands; a request is a user's message.
    assert (prompt == row["prompt"]) if row is HUMAN_EVAL else (prompt.strip() != problem_of(row).prompt.strip())
    assert problem_of(row).prompt.strip() in prompt
    answering(WRONG)
    assert scores_of(tiny_checkpoint, on)["pass@1"]["value"] == 0.0


def test_samples_are_counted_by_problem(tiny_checkpoint, tmp_path, answering):
    right = HUMAN_EVAL["canonical_solution"]
    on = write_rows(tmp_path / "rows.jsonl", [HUMAN_EVAL, HUMAN_EVAL])
    asked = answering(right, WRONG, WRONG, WRONG, WRONG, WRONG)
    found = scores_of(tiny_checkpoint, on, "--samples", 3, "--k", "2,1")
    for k in (1, 2):
        assert found[f"pass@{k}"]["value"] == pytest.approx((pass_at_k(3, 1, k) + 0) / 2)
        assert found[f"pass@{k}"]["count"] == 2 and found[f"pass@{k}"]["details"]["samples"] == 3
    assert len(asked) == 6 and all(len(options["logits_processor"]) == 1 for _, options in asked)
    assert all(found[f"pass@{k}"]["details"]["temperature"] == 0.8 for k in (1, 2))


def test_samples_are_seeded(tiny_checkpoint, tmp_path, monkeypatch):
    written, on = [], write_rows(tmp_path / "rows.jsonl", [HUMAN_EVAL])
    real = Generator.answer

    def answer(self, *given, **options):
        written.append(real(self, *given, **options))
        return written[-1]

    monkeypatch.setattr(Generator, "answer", answer)
    for seed in (1, 1, 2):
        scores_of(tiny_checkpoint, on, "--samples", 2, "--temperature", 2, "--seed", seed, "--max-new-tokens", 8)
    first, again, other = written
    assert first == again != other
    assert first[0] != first[1]


@pytest.mark.parametrize("shape", ["rope", "encoder-decoder"])
def test_samples_do_not_depend_on_the_batch(tmp_path, shape, monkeypatch):
    """Nor on how many samples there are, or which problems come behind."""
    fields, head = MODELS[shape]
    torch.manual_seed(0)
    config = AnyformerConfig(vocab_size=512, hidden_size=32, num_attention_heads=2, num_hidden_layers=2, **fields)
    model = save(HEADS[head](config), tmp_path / "model")
    problems = [HUMAN_EVAL, {**HUMAN_EVAL, "prompt": HUMAN_EVAL["prompt"] + "    # and on\n"}, HUMAN_EVAL]
    told, real = [], code.code_scores

    def code_scores(problems, texts, **options):
        told.append(texts)
        return real(problems, texts, **options)

    monkeypatch.setattr(code, "code_scores", code_scores)
    for on, samples, size in ((problems, 3, 1), (problems, 3, 4), (problems, 3, 9), (problems[:2], 5, 3)):
        rows = write_rows(tmp_path / "rows.jsonl", on)
        scores_of(model, rows, "--samples", samples, "--batch-size", size, "--max-new-tokens", 12)
    whole = told[0]
    assert told[1] == told[2] == whole and len({text for texts in whole for text in texts}) == 9
    assert [texts[:3] for texts in told[3]] == whole[:2]


def test_tokens_are_drawn_as_often_as_they_are_likely():
    scores = torch.tensor([[2.0, 0.5, -1.0, 0.0, float("-inf")]]).repeat(6000, 1)
    (draw,) = SeededDraws(1.5, [(7, n) for n in range(6000)]).options(range(6000))["logits_processor"]
    chosen = draw(None, scores)
    assert (chosen.isfinite().sum(-1) == 1).all()
    counts = chosen.argmax(-1).bincount(minlength=5)
    wanted = (scores[0].double() / 1.5).softmax(-1) * 6000
    assert counts[4] == 0
    assert (((counts - wanted) ** 2)[:4] / wanted[:4]).sum() < 16.27  # chi-square, 3 degrees of freedom, p = 0.001
    assert not draw(None, scores).equal(chosen)  # the next tokens


def test_nothing_runs_and_nothing_is_opened_without_permission(tiny_checkpoint, tmp_path, answering, monkeypatch):
    file = tmp_path / "written"
    program = f"    open({str(file)!r}, 'w').write('x')\n    return sum(values)\n"
    on = write_rows(tmp_path / "rows.jsonl", [HUMAN_EVAL])
    asked = answering(program)
    monkeypatch.setattr(run, "open_subject", lambda *given, **options: pytest.fail("a model was opened"))
    assert "allow it with --allow-code" in refused(tiny_checkpoint, "--on", on, "--metrics", "pass@k")
    assert not asked and not file.exists()


def test_isolation_that_the_machine_lacks_is_told_and_kept(tiny_checkpoint, tmp_path, answering, monkeypatch):
    monkeypatch.setattr(code, "run_program", lambda *given, **options: Outcome("passed", "", ("a network of its own",)))
    answering(WRONG)
    on, file = write_rows(tmp_path / "rows.jsonl", [HUMAN_EVAL]), tmp_path / "scores.json"
    result = command(tiny_checkpoint, "--on", on, "--metrics", "pass@k", "--allow-code", "--output", file)
    assert "missing: a network of its own" in result.output
    (score,) = json.loads(file.read_text(encoding="utf-8"))["scores"]
    assert score["details"]["isolation_missing"] == ["a network of its own"]


def test_mistakes_with_programs_are_told(tiny_checkpoint, tmp_path, answering):
    on = write_rows(tmp_path / "rows.jsonl", [HUMAN_EVAL])
    asked = answering(WRONG)
    given = (tiny_checkpoint, "--on", on, "--metrics", "pass@k", "--allow-code")
    assert "with --samples 2 each must be from 1 to 2" in refused(*given, "--samples", 2, "--k", "1,3")
    assert "each must be from 1 to 1" in refused(*given, "--k", 0)
    assert "--k a: give whole numbers" in refused(*given, "--k", "a")
    assert "all 2 samples would be alike" in refused(*given, "--samples", 2, "--temperature", 0)
    assert "at least 0.01" in refused(*given, "--samples", 2, "--temperature", 0.001)
    assert "are for --metrics pass@k" in refused(tiny_checkpoint, "--on", on, "--samples", 2)
    plain = write_rows(tmp_path / "plain.jsonl", [{"prompt": "x", "completion": "y"}])
    assert "row 1: is no problem with tests" in refused(*given[:2], plain, *given[3:])
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "x"}])
    assert "is text, which these metrics cannot use" in refused(*given[:2], texts, *given[3:])
    assert not asked
