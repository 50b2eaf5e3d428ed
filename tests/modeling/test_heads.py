"""Every head: its loss against a formula, its Auto class with and without remote code, both padding sides."""

import os
import subprocess
import sys

import pytest
import torch
import transformers
from torch import nn

from anyformer.modeling import AUTO_MAP, HEADS, AnyformerConfig
from anyformer.modeling.head_base import shift_right

BOTH = {"architecture": "encoder-decoder", "decoder_start_token_id": 1}
SHAPES = {"decoder": {}, "encoder": {"architecture": "encoder", "pooler": True, "type_vocab_size": 2}, "both": BOTH}
CASES = [
    ("base", "decoder"),
    ("base", "encoder"),
    ("base", "both"),
    ("causal_lm", "decoder"),
    ("masked_lm", "encoder"),
    ("pretraining", "encoder"),
    ("seq2seq_lm", "both"),
    *(
        (head, shape)
        for head in ("sequence_classification", "token_classification", "question_answering")
        for shape in SHAPES
    ),
]
cases = pytest.mark.parametrize(("head", "shape"), CASES)
AUTO = {reference.rpartition(".")[2]: name for name, reference in AUTO_MAP.items()}


def ids(*shape, low=3, high=101, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def inputs(model):
    tokens = ids(2, 8)
    needs_decoder = model.config.is_encoder_decoder and type(model).__name__.endswith(("Model", "Generation"))
    return {"input_ids": tokens} | ({"decoder_input_ids": ids(2, 6, seed=2)} if needs_decoder else {})


def first_tensor(output):
    names = ("logits", "prediction_logits", "start_logits", "last_hidden_state")
    return next(output[name] for name in names if name in output)


ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "anyformer":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch, transformers
folder, auto_name = sys.argv[1:]
model = getattr(transformers, auto_name).from_pretrained(folder, trust_remote_code=True).eval()
torch.save({k: v for k, v in model.state_dict().items()}, folder + "/seen.pt")
arguments = torch.load(folder + "/inputs.pt")
torch.save(model(**arguments)[0].detach(), folder + "/output.pt")
"""


@cases
def test_auto_class_opens_the_folder(tiny, tmp_path, head, shape):
    model = tiny(head=head, **SHAPES[shape])
    model.save_pretrained(tmp_path)
    again = getattr(transformers, AUTO[type(model).__name__]).from_pretrained(tmp_path)
    assert type(again) is type(model)
    torch.testing.assert_close(first_tensor(again(**inputs(model))), first_tensor(model(**inputs(model))))


@pytest.mark.slow
@pytest.mark.parametrize(("head", "shape"), [c for c in CASES if c[1] != "decoder" or c[0] != "causal_lm"])
def test_auto_class_opens_the_folder_without_the_project(tiny, tmp_path, head, shape):
    model = tiny(head=head, **SHAPES[shape])
    model.save_pretrained(tmp_path)
    torch.save(inputs(model), tmp_path / "inputs.pt")
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ""}
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path), AUTO[type(model).__name__]]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    torch.testing.assert_close(torch.load(tmp_path / "output.pt"), model(**inputs(model))[0])


@pytest.mark.parametrize("head", [h for h in HEADS if h not in ("base", "pretraining")])
def test_a_head_on_the_wrong_shape_names_the_right_ones(tiny, head):
    shapes = HEADS[head].shapes
    for shape, fields in SHAPES.items():
        architecture = fields.get("architecture", "decoder")
        if architecture not in shapes:
            with pytest.raises(ValueError, match=f"needs architecture=.*the config says '{architecture}'"):
                tiny(head=head, **SHAPES[shape])


def test_masked_lm_loss_is_not_shifted_and_pretraining_adds_the_pair(tiny):
    tokens, labels = ids(2, 8), ids(2, 8, seed=3)
    labels[:, ::2] = -100
    model = tiny(head="masked_lm", architecture="encoder")
    output = model(tokens, labels=labels)
    expected = nn.functional.cross_entropy(output.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(model(tokens, labels=labels, num_items_in_batch=16).loss, expected / 2)
    model = tiny(head="pretraining", **SHAPES["encoder"])
    follows = torch.tensor([0, 1])
    output = model(tokens, labels=labels, next_sentence_label=follows)
    expected = nn.functional.cross_entropy(output.prediction_logits.flatten(0, 1), labels.flatten())
    expected = expected + nn.functional.cross_entropy(output.seq_relationship_logits, follows)
    torch.testing.assert_close(output.loss, expected)
    halves = [
        model(
            tokens[i : i + 1], labels=labels[i : i + 1], next_sentence_label=follows[i : i + 1], num_items_in_batch=8
        ).loss
        for i in (0, 1)
    ]
    torch.testing.assert_close(sum(halves), expected)
    # Rows of unlike numbers of masked tokens: what the rows give one by one is what the batch gives.
    labels[0, :3] = -100
    both = {"labels": labels, "next_sentence_label": follows}
    parts = [{name: value[i : i + 1] for name, value in both.items()} for i in (0, 1)]
    total = sum(model(tokens[i : i + 1], **part, num_items_in_batch=5).loss for i, part in enumerate(parts))
    torch.testing.assert_close(model(tokens, **both, num_items_in_batch=5).loss, total, rtol=0, atol=1e-5)


def test_seq2seq_shifts_once_and_ignored_labels_never_reach_the_decoder(tiny):
    model = tiny(head="seq2seq_lm", **BOTH)
    source, labels = ids(2, 7), ids(2, 5, seed=4)
    labels[1, 3:] = -100
    output = model(source, labels=labels)
    decoder_input = torch.cat([torch.ones(2, 1, dtype=torch.long), labels[:, :-1]], 1).masked_fill_(
        torch.zeros(2, 5, dtype=torch.bool), 0
    )
    decoder_input[decoder_input == -100] = 0
    assert torch.equal(model.prepare_decoder_input_ids_from_labels(labels), decoder_input)
    logits = model(source, decoder_input_ids=decoder_input).logits
    torch.testing.assert_close(output.loss, nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_the_start_token_stands_before_the_first_real_one():
    config = AnyformerConfig(**BOTH, pad_token_id=0)
    tokens = torch.tensor([[0, 0, 5, 6], [5, 6, 7, 8]])
    assert shift_right(tokens, config, (tokens != 0).long()).tolist() == [[1, 0, 1, 5], [1, 5, 6, 7]]
    with pytest.raises(ValueError, match="decoder_start_token_id is not set"):
        shift_right(tokens, AnyformerConfig(architecture="encoder-decoder"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
def test_a_classifier_reads_the_same_on_either_padding_side(tiny, shape, pooling):
    model = tiny(head="sequence_classification", **SHAPES[shape], classifier_pooling=pooling, num_labels=3)
    tokens, pads = ids(1, 5), torch.zeros(1, 4, dtype=torch.long)
    plain = model(tokens).logits
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(tokens)], 1)
    left = model(torch.cat([pads, tokens], 1), attention_mask=mask).logits
    right = model(torch.cat([tokens, pads], 1), attention_mask=mask.flip(1)).logits
    torch.testing.assert_close(left, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(right, plain, rtol=0, atol=1e-5)


def test_a_reward_is_read_at_the_last_real_token(tiny):
    model = tiny(head="sequence_classification", num_labels=1)
    tokens = ids(2, 6)
    mask = torch.tensor([[1, 1, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1]])
    states = model.model(tokens, attention_mask=mask).last_hidden_state
    expected = model.score(torch.stack([states[0, 2], states[1, 5]]))
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits, expected)


def test_classification_losses(tiny):
    tokens = ids(2, 6)
    model = tiny(head="sequence_classification", num_labels=3)
    logits, labels = model(tokens).logits, torch.tensor([2, 0])
    torch.testing.assert_close(model(tokens, labels=labels).loss, nn.functional.cross_entropy(logits, labels))
    torch.testing.assert_close(
        model(tokens, labels=labels, num_items_in_batch=4).loss, nn.functional.cross_entropy(logits, labels) / 2
    )
    several = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    expected = nn.functional.binary_cross_entropy_with_logits(logits, several)
    torch.testing.assert_close(model(tokens, labels=several).loss, expected)
    # The trainer counts each label: two rows of three are half of a batch of four rows.
    torch.testing.assert_close(model(tokens, labels=several, num_items_in_batch=12).loss, expected / 2)
    model = tiny(head="sequence_classification", num_labels=1)
    values = torch.tensor([0.3, -1.0])
    expected = nn.functional.mse_loss(model(tokens).logits.squeeze(-1), values)
    torch.testing.assert_close(model(tokens, labels=values).loss, expected)
    model = tiny(head="question_answering")
    output = model(tokens, start_positions=torch.tensor([1, 99]), end_positions=torch.tensor([3, 2]))
    start = nn.functional.cross_entropy(output.start_logits[:1], torch.tensor([1]))
    end = nn.functional.cross_entropy(output.end_logits, torch.tensor([3, 2]))
    torch.testing.assert_close(output.loss, (start + end) / 2)


def test_a_classifier_on_a_language_models_checkpoint_starts_anew_but_never_loses_its_own_head(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    tiny().save_pretrained(tmp_path / "lm")
    model = HEADS["sequence_classification"].from_pretrained(tmp_path / "lm")
    assert model.score.weight.isfinite().all() and torch.equal(
        model.model.embed_tokens.weight, tiny().model.embed_tokens.weight
    )
    model.save_pretrained(tmp_path / "reward")
    path = tmp_path / "reward" / "model.safetensors"
    tensors = load_file(path)
    del tensors["score.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for score\.weight"):
        HEADS["sequence_classification"].from_pretrained(tmp_path / "reward")


def test_what_is_recorded_is_the_same_every_time(tiny):
    model = tiny(head="seq2seq_lm", num_encoder_layers=3, num_experts=4, router_aux_loss_coef=0.1, **BOTH)
    tokens = ids(2, 6)
    wanted = {"output_hidden_states": True, "output_router_logits": True}
    model.set_attn_implementation("eager")
    outputs = [model(tokens, labels=tokens, output_attentions=True, **wanted) for _ in range(3)]
    for output in outputs:
        assert (len(output.encoder_hidden_states), len(output.decoder_hidden_states)) == (4, 3)
        assert (len(output.encoder_attentions), len(output.decoder_attentions), len(output.cross_attentions)) == (
            3,
            2,
            2,
        )
        assert len(output.router_logits) == 5
        torch.testing.assert_close(output.loss, outputs[0].loss)


def test_padding_behind_the_labels_changes_no_router_loss(tiny):
    model = tiny(head="seq2seq_lm", num_experts=4, router_aux_loss_coef=0.1, **BOTH)
    tokens = ids(2, 5)
    longer = torch.cat([tokens, torch.full((2, 6), -100)], 1)
    torch.testing.assert_close(model(tokens, labels=longer).aux_loss, model(tokens, labels=tokens).aux_loss)


@pytest.mark.parametrize("head", ["sequence_classification", "token_classification", "question_answering"])
def test_classifiers_add_the_router_losses(tiny, head):
    tokens, experts = ids(2, 6), {"num_experts": 4, "num_labels": 3}
    labels = {"sequence_classification": {"labels": torch.tensor([0, 2])}}
    labels |= {"token_classification": {"labels": tokens % 3}}
    labels |= {"question_answering": {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([2, 3])}}
    plain = tiny(head=head, **experts)(tokens, **labels[head])
    output = tiny(head=head, router_aux_loss_coef=0.5, **experts)(tokens, **labels[head])
    torch.testing.assert_close(output.loss, plain.loss + 0.5 * output.aux_loss)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("positions", ["rope", "relative"])
@pytest.mark.parametrize(("head", "shape"), [("causal_lm", "decoder"), ("seq2seq_lm", "both")])
def test_checkpointing_gives_the_same_gradients_on_every_shape(tiny, reentrant, positions, head, shape):
    fields = SHAPES[shape] | {"head": head, "position_embedding": positions}
    tokens, models = ids(2, 7), [tiny(**fields).train() for _ in range(2)]
    models[1].gradient_checkpointing_enable({"use_reentrant": reentrant})
    models[1].enable_input_require_grads()
    for model in models:
        model(tokens, labels=tokens).loss.backward()
    for (name, a), (_, b) in zip(*(m.named_parameters() for m in models), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


@pytest.mark.parametrize("shared", [True, False])
def test_resized_embeddings_are_resized_on_both_sides(tiny, tmp_path, shared):
    model = tiny(head="seq2seq_lm", share_embeddings=shared, **BOTH)
    model.resize_token_embeddings(120)
    tokens = ids(2, 6, low=100, high=120)
    expected = model(tokens, labels=tokens).logits
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert again.config.vocab_size == 120 and torch.equal(again(tokens, labels=tokens).logits, expected)


def test_a_shared_config_over_two_tables_says_so(tiny, tmp_path):
    import json

    model = tiny(head="seq2seq_lm", share_embeddings=False, **BOTH)
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"share_embeddings": True}))
    again = type(model).from_pretrained(tmp_path)
    assert again.config.share_embeddings is False
    again.tie_weights()
    tokens = ids(2, 6)
    assert torch.equal(again(tokens, labels=tokens).logits, model(tokens, labels=tokens).logits)


def test_left_padded_decoder_prompts_count_positions_in_every_cache(tiny):
    model = tiny(head="seq2seq_lm", position_embedding="learned", **BOTH)
    source, prompt = ids(2, 6), ids(2, 5, seed=2)
    mask = (torch.arange(5) >= torch.tensor([[0], [3]])).long()
    options = {"decoder_attention_mask": mask, "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    expected = model.generate(source, decoder_input_ids=prompt, use_cache=False, **options)
    for implementation in ("dynamic", "static"):
        got = model.generate(source, decoder_input_ids=prompt, cache_implementation=implementation, **options)
        assert torch.equal(got, expected), implementation
    alone = model.generate(
        source[1:], decoder_input_ids=prompt[1:, 3:], max_new_tokens=5, min_new_tokens=5, do_sample=False
    )
    assert torch.equal(expected[1, -5:], alone[0, -5:])
