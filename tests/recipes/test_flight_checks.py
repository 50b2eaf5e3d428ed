"""Each fault that a run can end well with, planted, and seen caught."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoTokenizer, Trainer

import anyformer.modeling.modeling_anyformer as bodies
from anyformer.recipes.errors import UserError
from anyformer.recipes.flight_checks import FlightChecks, check_adapters_move, check_stops
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe

QUICK = ("train.max_steps=3", "train.save_steps=2", "eval.samples=0")


def test_sixteen_bit_weights_that_do_not_move_are_said(recipe, capsys):
    full = ("adapter={kind: none}", "model.dtype=bfloat16", "train.bf16=false")
    run_recipe(recipe(*QUICK, *full, "train.learning_rate=1e-6"))
    assert "of the 16-bit weights moved in a step" in capsys.readouterr().out
    run_recipe(recipe(*QUICK, *full, "train.learning_rate=1e-1"), overwrite=True)
    assert "16-bit" not in capsys.readouterr().out
    run_recipe(recipe(*QUICK, "adapter={kind: none}", "train.learning_rate=1e-6"), overwrite=True)
    assert "16-bit" not in capsys.readouterr().out


def test_an_adapter_without_a_gradient_stops_the_run_after_two_steps(recipe, monkeypatch):
    begin, steps = FlightChecks.on_train_begin, []

    def dead(self, args, state, control, model=None, **kwargs):
        begin(self, args, state, control, model=model, **kwargs)
        for name, parameter in model.named_parameters():
            if "layers.0.self_attn.q_proj.lora_B" in name:
                parameter.register_hook(torch.zeros_like)

    monkeypatch.setattr(FlightChecks, "on_train_begin", dead)
    monkeypatch.setattr(FlightChecks, "on_step_begin", lambda self, *args, **kwargs: steps.append(1))
    with pytest.raises(UserError, match=r"1 adapter matrices are still zero after two steps.*layers\.0\.self_attn"):
        run_recipe(recipe("train.max_steps=8", "train.warmup_steps=2", "eval.samples=0"))
    assert len(steps) == 2


def test_zero_matrices_are_named(tiny):
    model = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    with pytest.raises(UserError, match="2 adapter matrices"):
        check_adapters_move(model)


def test_a_resume_that_wraps_a_fresh_adapter_is_caught(recipe, monkeypatch, interrupted):
    with interrupted():
        run_recipe(recipe(*QUICK))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_load_from_checkpoint", lambda *args, **kwargs: None)
        with pytest.raises(UserError, match=r"is not the one of .*checkpoint-2.*differs"):
            run_recipe(recipe(*QUICK), resume=True)
    run_recipe(recipe(*QUICK), resume=True)


TALK = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three four five"}]
SILENT = [TALK[0], TALK[1] | {"train": True}, TALK[0], TALK[1] | {"train": False}]
PAIR = {"prompt": TALK[:1], "chosen": TALK[1:], "rejected": [{"role": "assistant", "content": "ten"}]}
CUT, ENDLESS = "4 of 4 rows are cut at the longest length", "4 of 4 rows do not end in a learned stop token"
# Only answers end.
TEMPLATE = """{% for turn in messages %}{% if turn.role == "assistant" %}A: {{ turn.content }}<|im_end|>
{% else %}Q: {{ turn.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"""


@pytest.mark.parametrize(
    ("rows", "overrides", "said"),
    [
        ([{"messages": TALK}] * 4, (), None),
        ([{"messages": SILENT}] * 4, (), None),  # its first answer ends, and that is learned
        ([{"messages": TALK}] * 4, ("objective.loss_on=[user]", "model.tokenizer=OTHER"), ENDLESS),
        ([{"messages": TALK}] * 4, ("train.max_length=LESS", "data.truncation=keep_start"), CUT),
        ([PAIR] * 4, ("objective.kind=dpo",), None),
        ([PAIR] * 4, ("objective.kind=dpo", "train.max_length=LESS", "data.truncation=keep_start"), CUT),
    ],
)
def test_rows_that_do_not_teach_to_stop_are_counted(recipe, tmp_path, tiny_checkpoint, capsys, rows, overrides, said):
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "other")
    file = tmp_path / "talks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    common = (f"data.source={file}", "data.eval_fraction=0")
    longest = prepare(recipe(*common, *(o for o in overrides if "objective" in o))).train.report.longest
    # The end token, and the line break that a template may write behind it.
    overrides = [o.replace("LESS", str(longest - 2)).replace("OTHER", str(tmp_path / "other")) for o in overrides]
    run_recipe(recipe(*common, *overrides), dry_run=True)
    output = capsys.readouterr().out
    assert ("does not learn to stop" in output) == (said is not None)
    assert said is None or said in output


def test_a_generation_config_that_stops_elsewhere_is_caught(tiny):
    model = tiny()
    model.generation_config.eos_token_id = [2, 5]
    check_stops(model, [5, 2])
    with pytest.raises(UserError, match=r"stops at \[2, 5\], the training data at \[2\]"):
        check_stops(model, [2])


PACKED = ("train.packing=true", "train.max_length=64", "train.per_device_train_batch_size=1")


def test_documents_that_see_each_other_are_caught(recipe, monkeypatch):
    folder = run_recipe(recipe(*QUICK, *PACKED), check=True)
    checks = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["checks"]
    assert checks["packed documents do not see each other"] == "passed"
    monkeypatch.setattr(bodies, "packed_documents", lambda *arguments: None)
    with pytest.raises(UserError, match="packed documents see each other"):
        run_recipe(recipe(*QUICK, *PACKED), check=True, overwrite=True)


def test_a_gradient_that_depends_on_accumulation_is_caught(recipe, monkeypatch):
    from anyformer.recipes.objectives.sft import trainer_class

    folder = run_recipe(recipe(*QUICK, "model.config={hidden_dropout: 0.1}"), check=True)
    checks = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["checks"]
    assert checks["accumulated gradients equal those of one batch"] == "passed"
    right = trainer_class().compute_loss

    def mean_of_each(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return right(self, model, inputs, return_outputs, None)

    monkeypatch.setattr(trainer_class(), "compute_loss", mean_of_each)
    with pytest.raises(UserError, match=r"depends on train\.gradient_accumulation_steps"):
        run_recipe(recipe(*QUICK), check=True, overwrite=True)


def test_checking_changes_nothing(recipe, tmp_path):
    plain = run_recipe(recipe(*QUICK, f"train.output_dir={tmp_path / 'plain'}"))
    checked = run_recipe(recipe(*QUICK, f"train.output_dir={tmp_path / 'checked'}"), check=True)
    figures = [json.loads((f / "metrics.json").read_text(encoding="utf-8"))["after"]["loss"] for f in (plain, checked)]
    assert figures[0] == figures[1]


def test_texts_that_share_blocks_by_design_are_said(recipe, rows):
    lines = [json.loads(line) for line in rows.read_text(encoding="utf-8").splitlines()]
    rows.write_text("".join(json.dumps({"text": line["prompt"]}) + "\n" for line in lines), encoding="utf-8")
    blocks = ("objective={kind: pretrain, max_length: 64}", "~train.max_length")
    folder = run_recipe(recipe(*QUICK, *blocks), check=True)
    checks = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["checks"]
    assert "texts share blocks by design" in checks["packed documents do not see each other"]
    folder = run_recipe(recipe(*QUICK, *blocks, "objective.packing=none"), check=True, overwrite=True)
    checks = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["checks"]
    assert checks["packed documents do not see each other"] == "no rows are packed"
