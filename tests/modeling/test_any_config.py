"""Whatever the config says works with everything else: random configs over the whole space.

More than the fixed draws of an ordinary run: `ANYFORMER_EXAMPLES=5000 pytest tests/modeling/test_any_config.py`.
"""

import os
import tempfile

import pytest
import torch
from any_config import LENGTH, VOCABULARY, configs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from anyformer.modeling import HEADS, AnyformerConfig

EXAMPLES = int(os.environ.get("ANYFORMER_EXAMPLES", "0"))
HEAD = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "seq2seq_lm"}
# Rounding grows with the logits: what is allowed is a share of the largest.
SHARE = 2e-5


def build(fields, seed=0, **changes):
    torch.manual_seed(seed)
    config = AnyformerConfig(**fields)
    model = HEADS[HEAD[config.architecture]](config).eval()
    with torch.no_grad():  # biases start at zero, norms at one: hide no fault there
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer += 0.1 * torch.randn_like(buffer)
    return model


def tokens_of(rows, length, seed=1):
    return torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def run(model, tokens, mask=None, **more):
    """Logits with the same text on every side that the model has."""
    if model.config.is_encoder_decoder:
        return model(tokens, attention_mask=mask, decoder_input_ids=tokens, decoder_attention_mask=mask, **more).logits
    return model(tokens, attention_mask=mask, **more).logits


def near(got, expected, what):
    gap, scale = (got - expected).abs().max().item(), max(expected.abs().max().item(), 1.0)
    assert gap <= SHARE * scale, f"{what}: {gap:.2e} where logits reach {scale:.1f}"


def check_gradients(fields):
    model, tokens = build(fields).train(), tokens_of(2, LENGTH)
    loss = model(tokens, labels=tokens).loss
    assert loss.isfinite()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, f"{name} is used by nothing"
        assert parameter.grad.isfinite().all(), f"gradient of {name}"
    again = build(fields).train()
    again.gradient_checkpointing_enable({"use_reentrant": False})
    other = again(tokens, labels=tokens).loss
    other.backward()
    torch.testing.assert_close(other, loss)
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=f"{name} under checkpointing")


def check_padding(model):
    tokens, pads = tokens_of(2, LENGTH), torch.zeros(2, 3, dtype=torch.long)
    plain = run(model, tokens)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(tokens)], 1)
    near(run(model, torch.cat([pads, tokens], 1), mask)[:, 3:], plain, "left padding")
    near(run(model, torch.cat([tokens, pads], 1), mask.flip(1))[:, :LENGTH], plain, "right padding")


def check_backends(model, fields):
    tokens = tokens_of(2, LENGTH)
    sdpa = run(model, tokens)
    model.set_attn_implementation("eager")
    near(run(model, tokens), sdpa, "eager against the default")
    model.set_attn_implementation(build(fields).config._attn_implementation)


def check_cache(model):
    tokens = tokens_of(2, LENGTH)
    full = run(model, tokens, use_cache=False)
    cuts = [(0, 4), (4, 5), (5, LENGTH - 1), (LENGTH - 1, LENGTH)]
    if model.config.is_encoder_decoder:
        encoded = model.get_encoder()(tokens)
        cache, parts = None, []
        for a, b in cuts:
            output = model(encoder_outputs=encoded, decoder_input_ids=tokens[:, a:b], cache=cache)
            cache = output.cache
            parts.append(output.logits)
    else:
        cache = DynamicCache(config=model.config)
        parts = [model(tokens[:, a:b], cache=cache).logits for a, b in cuts]
    near(torch.cat(parts, 1), full, "cached against uncached")
    if model.config.attention == "mla":
        own = cache.self_attention_cache if model.config.is_encoder_decoder else cache
        width = model.config.kv_lora_rank + model.config.qk_rope_head_dim
        for layer, kind in zip(own.layers, model.config.layer_types, strict=True):
            kept = min(LENGTH, model.config.sliding_window - 1) if kind == "sliding_attention" else LENGTH
            assert layer.keys.numel() + layer.values.numel() == 2 * kept * width


def check_generation(model, implementation):
    tokens = tokens_of(2, 6)
    mask = torch.ones_like(tokens)
    mask[0, :2] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(tokens * mask, use_cache=False, **options)
    got = model.generate(tokens * mask, cache_implementation=implementation, **options)
    assert torch.equal(got, expected), f"{implementation} cache changes the tokens"
    beams = model.generate(tokens * mask, num_beams=2, **options)
    assert torch.equal(beams, model.generate(tokens * mask, num_beams=2, use_cache=False, **options)), "beam search"


def check_packing(fields):
    """Packed with padding behind it, or a document a row: the same logits, loss and gradients."""
    both = fields["architecture"] == "encoder-decoder"
    lengths, targets = (4, 5, 3), (3, 2, 5)
    documents = [tokens_of(1, n, seed=n)[0] for n in lengths]
    answers = [tokens_of(1, n, seed=9 + n)[0] for n in targets]

    def rows(parts, fill=0):
        return torch.nn.utils.rnn.pad_sequence(parts, True, fill)

    def packed(parts):
        return rows([torch.cat(parts[:2]), parts[2]])

    def positions(sizes):
        return packed([torch.arange(n) for n in sizes])

    apart = {"input_ids": rows(documents), "attention_mask": rows([torch.ones_like(d) for d in documents])}
    joined = {"input_ids": packed(documents), "attention_mask": packed([torch.ones_like(d) for d in documents])}
    joined["position_ids"] = positions(lengths)
    if both:
        inputs = [torch.cat([torch.tensor([1]), answer[:-1]]) for answer in answers]
        apart |= {"labels": rows(answers, -100)}
        joined |= {"labels": rows([torch.cat(answers[:2]), answers[2]], -100), "decoder_input_ids": packed(inputs)}
        joined |= {"decoder_attention_mask": packed([torch.ones_like(a) for a in answers])}
        joined |= {"decoder_position_ids": positions(targets)}
    elif fields["architecture"] == "decoder":
        first_hidden = [torch.cat([torch.tensor([-100]), d[1:]]) for d in documents]
        apart |= {"labels": rows(first_hidden, -100)}
        joined |= {"labels": rows([torch.cat(first_hidden[:2]), first_hidden[2]], -100)}
    one, other = build(fields).train(), build(fields).train()
    logits = one(**apart).logits.detach(), other(**joined).logits.detach()
    sizes = targets if both else lengths
    near(logits[1][0, : sizes[0]], logits[0][0, : sizes[0]], "first packed document")
    near(logits[1][0, sizes[0] : sum(sizes[:2])], logits[0][1, : sizes[1]], "second packed document")
    near(logits[1][1, : sizes[2]], logits[0][2, : sizes[2]], "a document beside padding")
    if fields["architecture"] == "encoder":
        return
    losses = one(**apart).loss, other(**joined).loss
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        size = max(a.grad.abs().max().item(), 1.0)
        torch.testing.assert_close(b.grad, a.grad, rtol=0, atol=1e-5 * size, msg=f"{name} in packed rows")


def check_saving(model):
    tokens = tokens_of(2, LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = type(model).from_pretrained(folder)
    where = {name: getattr(again.config, name) for name in ("architectures", "_name_or_path")}
    assert again.config.to_dict() == model.config.to_dict() | where
    loaded = again.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items()), "saved and loaded"
    # Weights from a file lie at other addresses, from which MKL adds up in another order on some processors.
    near(run(again, tokens), run(model, tokens), "saved and loaded")


def check(fields, implementation):
    check_gradients(fields)
    check_packing(fields)
    with torch.no_grad():
        model = build(fields)
        check_padding(model)
        check_backends(model, fields)
        check_saving(model)
        if model.can_generate():
            check_cache(model)
            check_generation(model, implementation)
    counts = model.config.counts(head=HEAD[model.config.architecture])
    assert counts.total_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("architecture", "examples"), [("decoder", 180), ("encoder", 80), ("encoder-decoder", 80)])
def test_random_configs_work_with_everything(architecture, examples):
    @settings(
        max_examples=EXAMPLES or examples,
        derandomize=not EXAMPLES,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(configs(architecture), st.sampled_from(["dynamic", "static"]))
    def anything(fields, implementation):
        check(fields, implementation)

    anything()
