"""lm-evaluation-harness on our models, against loops over single texts."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

import anyformer  # noqa: F401 - registers the model with the Auto classes
from anyformer.recipes.errors import UserError
from anyformer.recipes.scoring.harness import run_harness, shipped_tasks
from anyformer.recipes.scoring.intervals import interval
from anyformer.recipes.scoring.statistics import exp_ratio

POSITIONS = 48
TEXTS = ["the cat sat on the mat", "a dog, a log and a much longer line of text " * 3, "x"]
PAIRS = [("one two", " three"), ("the cat sat on the", " mat and slept"), ("", "nothing before"), ("a b c", " d")]


@pytest.fixture(scope="module")
def harness() -> Any:
    return pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install lm_eval")


def build(positions: int, architecture: str = "decoder") -> tuple[Any, Any]:
    import torch

    from anyformer.modeling import HEADS, AnyformerConfig
    from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer

    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = AnyformerConfig(
        architecture=architecture,
        decoder_start_token_id=tokenizer.bos_token_id,
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.3,
    )
    head = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "seq2seq_lm"}[architecture]
    return HEADS[head](config).eval(), tokenizer


@pytest.fixture(scope="module")
def small() -> tuple[Any, Any]:
    return build(POSITIONS)


@pytest.fixture(scope="module")
def wrapped(harness: Any, small: tuple[Any, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The harness's class `hf` on a folder that we saved."""
    from lm_eval.api.registry import get_model

    folder = tmp_path_factory.mktemp("model")
    for part in small:
        part.save_pretrained(folder)
    return get_model("hf").create_from_arg_obj({"pretrained": str(folder)}, {"batch_size": 3, "device": "cpu"})


def log_likelihood(model: Any, ids: list[int], count: int) -> tuple[float, bool]:
    """Of the last `count` tokens, given those before, and whether each of them is the likeliest."""
    import torch

    with torch.no_grad():
        log_probs = model(torch.tensor([ids[:-1]])).logits[0, -count:].log_softmax(-1)
    wanted = torch.tensor(ids[-count:])
    return log_probs.gather(1, wanted[:, None]).sum().item(), bool((log_probs.argmax(-1) == wanted).all())


def requests(kind: str, arguments: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, index) for index, given in enumerate(arguments)]


def test_it_opens_our_folder_as_our_class(wrapped: Any, small: tuple[Any, Any]) -> None:
    assert type(wrapped.model) is type(small[0])
    assert wrapped.max_length == POSITIONS


def test_log_likelihoods_are_those_of_a_loop(wrapped: Any, small: tuple[Any, Any]) -> None:
    model, tokenizer = small
    found = wrapped.loglikelihood(requests("loglikelihood", PAIRS))
    for (context, answer), (value, greedy) in zip(PAIRS, found, strict=True):
        before = tokenizer(context)["input_ids"] or [wrapped.prefix_token_id]
        after = tokenizer(answer)["input_ids"]
        expected, likeliest = log_likelihood(model, before + after, len(after))
        assert value == pytest.approx(expected, abs=1e-4)  # a sum over up to 14 tokens
        assert greedy == likeliest


def test_an_encoder_decoder_reads_what_it_is_given_and_answers(harness: Any) -> None:
    import torch
    from lm_eval.models.huggingface import HFLM

    model, tokenizer = build(POSITIONS, "encoder-decoder")
    pairs = [pair for pair in PAIRS if pair[0]]
    found = HFLM(model, backend="seq2seq", tokenizer=tokenizer, batch_size=2).loglikelihood(
        requests("loglikelihood", pairs)
    )
    for (context, answer), (value, _) in zip(pairs, found, strict=True):
        read, ids = (torch.tensor([tokenizer(text)["input_ids"]]) for text in (context, answer))
        shifted = torch.cat([torch.full((1, 1), tokenizer.bos_token_id), ids[:, :-1]], dim=1)
        with torch.no_grad():
            log_probs = model(input_ids=read, decoder_input_ids=shifted).logits.log_softmax(-1)
        assert value == pytest.approx(log_probs.gather(2, ids[..., None]).sum().item(), abs=1e-4)


def rolling(model: Any, ids: list[int], prefix: int) -> float:
    """Windows of the model's length that do not overlap; the last one sees as much of the text as fits."""
    total = 0.0
    for start in range(0, len(ids), POSITIONS):
        part = ids[start : start + POSITIONS]
        before = [prefix, *ids[:start]][-(POSITIONS + 1 - len(part)) :]
        total += log_likelihood(model, before + part, len(part))[0]
    return total


def test_rolling_log_likelihoods_are_those_of_a_loop(wrapped: Any, small: tuple[Any, Any]) -> None:
    model, tokenizer = small
    found = wrapped.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,) for text in TEXTS]))
    expected = [rolling(model, tokenizer(text)["input_ids"], wrapped.prefix_token_id) for text in TEXTS]
    assert max(len(tokenizer(text)["input_ids"]) for text in TEXTS) > 2 * POSITIONS
    assert found == pytest.approx(expected, rel=1e-5)


def test_generated_texts_are_those_of_a_loop(wrapped: Any, small: tuple[Any, Any]) -> None:
    import torch

    model, tokenizer = small
    prompts, expected = ["one two", "the cat sat on the mat", "a", "b c"], []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        for _ in range(12):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            if ids[-1] == tokenizer.eos_token_id:
                break
        expected.append(tokenizer.decode(ids[len(tokenizer(prompt)["input_ids"]) :], skip_special_tokens=True))
    stop = max(expected, key=len)[4]
    expected, whole = [text.split(stop)[0] for text in expected], expected
    assert expected != whole and any(expected)
    options = {"until": [stop], "max_gen_toks": 12, "do_sample": False}
    assert wrapped.generate_until(requests("generate_until", [(p, dict(options)) for p in prompts])) == expected


@pytest.fixture
def own_task(tmp_path: Path) -> Path:
    """A task of one's own on a local file."""
    rows = [{"q": q, "c": c, "l": n % 2} for n, (q, c) in enumerate(zip("abcdef", [[" x", " yz"]] * 6, strict=True))]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = tmp_path / "own.yaml"
    task.write_text(
        f"task: own\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        'output_type: multiple_choice\ndoc_to_text: "{{q}}"\ntarget_delimiter: ""\ndoc_to_choice: c\ndoc_to_target: l\n'
        "metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\nmetadata: {version: 2.0}\n",
        encoding="utf-8",
    )
    return task


@pytest.mark.usefixtures("harness")
def test_a_task_of_ones_own(own_task: Path, small: tuple[Any, Any], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    model, tokenizer = small
    right = []
    for number, question in enumerate("abcdef"):
        texts = [(tokenizer(question)["input_ids"], tokenizer(answer)["input_ids"]) for answer in (" x", " yz")]
        values = [log_likelihood(model, before + after, len(after))[0] for before, after in texts]
        right.append(values.index(max(values)) == number % 2)
    for batch_size in (1, 5):
        (score,) = run_harness(model, tokenizer, [str(own_task)], batch_size=batch_size)
        share = sum(right) / 6
        error = math.sqrt(share * (1 - share) / 5)  # of a mean, with n - 1
        assert (score.name, score.value, score.count, score.better) == ("own acc", share, 6, "higher")
        assert score.low == pytest.approx(max(share - 1.959964 * error, 0), abs=1e-6)
        assert score.high == pytest.approx(min(share + 1.959964 * error, 1), abs=1e-6)
        assert score.details["version"] == 2.0
    assert 0 < share < 1


@pytest.mark.usefixtures("harness")
def test_shipped_tasks_run_without_a_network(small: tuple[Any, Any]) -> None:
    model, tokenizer = build(2048)
    names = ["anyformer_text", "anyformer_docstrings", "anyformer_passkey"]
    assert set(names) < set(shipped_tasks())
    scores = {score.name: score for score in run_harness(model, tokenizer, names, limit=3)}
    assert set(scores) == {
        "anyformer_text word_perplexity",
        "anyformer_text byte_perplexity",
        "anyformer_text bits_per_byte",
        "anyformer_docstrings acc",
        "anyformer_docstrings acc_norm",
        "anyformer_passkey exact_match",
    }
    bytewise, bits = scores["anyformer_text byte_perplexity"], scores["anyformer_text bits_per_byte"]
    assert bytewise.better == bits.better == "lower"
    assert bytewise.low < bytewise.value < bytewise.high
    for edge in ("value", "low", "high"):
        assert math.log2(getattr(bytewise, edge)) == pytest.approx(getattr(bits, edge), rel=1e-6)


@pytest.mark.usefixtures("harness")
def test_the_perplexity_task_is_that_of_a_loop(monkeypatch: pytest.MonkeyPatch, small: tuple[Any, Any]) -> None:
    from anyformer.recipes.data.builtin import BUILT_IN, Loaded

    model, tokenizer = small
    loaded = Loaded()
    for number in range(300):  # 2 of 100 are held out
        loaded.add({"text": f"{number} {{{{text}}}} " * (1 + number % 5)}, str(number))
    monkeypatch.setitem(vars(BUILT_IN["stdlib-text"]), "load", lambda: loaded)
    from anyformer.recipes.scoring.task_documents import text

    texts = text(rows=8)["test"]["text"][:]
    assert 2 <= len(texts) <= 8
    prefix = tokenizer.bos_token_id
    rows = [(-rolling(model, tokenizer(t)["input_ids"], prefix), len(t.encode())) for t in texts]
    scores = {score.name: score for score in run_harness(model, tokenizer, ["anyformer_text"])}
    score = scores["anyformer_text byte_perplexity"]
    assert score.count == len(texts)
    assert score.value == pytest.approx(math.exp(sum(r[0] for r in rows) / sum(r[1] for r in rows)), rel=1e-5)
    assert (score.low, score.high) == pytest.approx(interval(rows, exp_ratio), rel=1e-5)


def test_the_choices_of_a_document_are_one_right_and_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from anyformer.recipes.data.builtin import BUILT_IN, Loaded
    from anyformer.recipes.scoring.task_documents import docstrings

    loaded = Loaded()
    for number in range(3000):
        asked, said = ({"role": role, "content": f"{number % 2500}"} for role in ("user", "assistant"))
        loaded.add({"prompt": [asked], "completion": [said]}, str(number))
    monkeypatch.setitem(vars(BUILT_IN["stdlib-docstrings"]), "load", lambda: loaded)
    documents = docstrings(rows=40)["test"]
    assert len(documents) == 40
    assert documents.to_list() == docstrings(rows=40, pretrained="x")["test"].to_list()
    for document in documents:
        assert len(set(document["choices"])) == 4
        assert document["choices"][document["label"]] == document["question"]
    assert set(documents["label"]) == {0, 1, 2, 3}


@pytest.mark.usefixtures("harness")
def test_mistakes_are_told(small: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shipped: anyformer_docstrings"):
        run_harness(*small, [])
    with pytest.raises(UserError, match="this one is an encoder"):
        run_harness(*build(POSITIONS, "encoder"), ["anyformer_text"])
    broken = tmp_path / "broken.yaml"
    broken.write_text(
        "task: broken\ndataset_path: json\ndataset_kwargs: {data_files: /none.jsonl}\ntest_split: train\n"
    )
    with pytest.raises(UserError, match=r"lm-evaluation-harness, .*broken\.yaml: "):
        run_harness(*small, [str(broken)])


@pytest.mark.slow  # the harness's own tasks are thousands of files
@pytest.mark.usefixtures("harness")
def test_an_unknown_task_is_named(small: tuple[Any, Any]) -> None:
    with pytest.raises(UserError, match="has no task 'anyformer_texts', and there is no such file; shipped"):
        run_harness(*small, ["anyformer_texts"])


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"pip install 'anyformer\[harness\]'"):
        run_harness(None, None, ["anyformer_text"])
