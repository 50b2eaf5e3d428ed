"""`anyformer merge`: the head of the run, with the weights that the adapter holds for it."""

import json

import pytest
import torch
from labelled import write_recipe
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification
from tuning import PAIRS
from typer.testing import CliRunner

from anyformer import AnyformerForSequenceClassification
from anyformer.recipes.run import run_recipe
from anyformer.scripts.cli import app

TAGS = {"cat": "A", "dog": "B"}
TAGGED = [{"tokens": [str(i), w, "sat"], "tags": ["O", tag, "O"]} for i in range(6) for w, tag in TAGS.items()]
ROWS = {
    "reward": PAIRS,
    "classify": [{"text": f"{word} {i}", "label": word} for i in range(4) for word in ("one", "two", "three")],
    "token-classify": TAGGED,
}
LABELS = {"reward": 1, "classify": 3, "token-classify": 3}
SHORT = ("train.max_steps=3", "train.learning_rate=5e-2", "eval.samples=0", "data.eval_fraction=0.2")


def merge(*words: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["merge", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output


def stock_class(objective):
    return AutoModelForTokenClassification if objective == "token-classify" else AutoModelForSequenceClassification


@pytest.mark.parametrize("objective", ROWS)
def test_a_trained_head_is_merged_with_its_adapter(objective, tiny_checkpoint, tmp_path):
    model = f"model={{path: {tiny_checkpoint}, config: {{classifier_dropout: 0.25}}}}"
    recipe = write_recipe(tmp_path, objective, ROWS[objective], shape="decoder")
    more = ("train.max_length=64",) if objective == "reward" else ()
    run = run_recipe(recipe(model, "adapter={kind: lora, r: 4}", *SHORT, *more))
    said = merge(run / "adapter", tmp_path / "merged", "--base", tiny_checkpoint)
    assert f"{stock_class(objective).__name__}.from_pretrained" in said
    merged = stock_class(objective).from_pretrained(tmp_path / "merged").eval()

    # Somebody else's class and loader: the stock Llama under PEFT.
    base = stock_class(objective).from_pretrained(tiny_checkpoint, num_labels=LABELS[objective])
    adapted = PeftModel.from_pretrained(base, run / "adapter").eval()
    batch = {"input_ids": torch.randint(3, 200, (2, 9)), "attention_mask": torch.ones(2, 9, dtype=torch.long)}
    with torch.no_grad():
        expected, got = adapted(**batch).logits, merged(**batch).logits
    assert got.shape[-1] == LABELS[objective]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)

    # A base that the adapter does not name is the one of the run's recipe.
    config = run / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}), "utf-8")
    merge(run / "adapter", tmp_path / "again")
    again = stock_class(objective).from_pretrained(tmp_path / "again").state_dict()
    assert all(weight.equal(again[name]) for name, weight in merged.state_dict().items())
    (run / "recipe.yaml").unlink()
    assert "give it with --base" in merge(run / "adapter", tmp_path / "never", status=2)

    own = stock_class(objective).from_pretrained(run).config
    for name in ("id2label", "problem_type", "pad_token_id", "classifier_dropout"):
        assert getattr(merged.config, name) == getattr(own, name), name


def test_without_the_run_the_labels_are_counted(tiny_checkpoint, tmp_path):
    base = AutoModelForSequenceClassification.from_pretrained(tiny_checkpoint, num_labels=5)
    config = LoraConfig(task_type="SEQ_CLS", target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(base, config).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = torch.randint(3, 200, (1, 9))
    merge(tmp_path / "adapter", tmp_path / "merged")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert type(merged) is AnyformerForSequenceClassification and merged.config.num_labels == 5
    torch.testing.assert_close(merged(tokens).logits, adapted(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("saved_as", "named", "message"),
    [
        ("SEQ_CLS", "FEATURE_EXTRACTION", "score.weight, for which the AnyformerForCausalLM of its base has no place"),
        (None, "SEQ_CLS", "does not hold score.weight of it"),
    ],
    ids=["a head without a place", "a head without weights"],
)
def test_half_a_head_is_refused(tiny_checkpoint, tmp_path, saved_as, named, message):
    base = AutoModelForSequenceClassification.from_pretrained(tiny_checkpoint, num_labels=1)
    get_peft_model(base, LoraConfig(task_type=saved_as, target_modules=["q_proj"])).save_pretrained(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    fields = json.loads(file.read_text(encoding="utf-8")) | {"task_type": named}
    file.write_text(json.dumps(fields), encoding="utf-8")
    assert message in merge(tmp_path / "a", tmp_path / "merged", status=2)
    assert not (tmp_path / "merged").exists()
