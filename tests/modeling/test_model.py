"""The decoder against closed formulas, uncached runs and the faults that users of such models meet."""

import itertools
import math
import shutil

import pytest
import torch
from torch import nn
from transformers import DynamicCache, QuantizedCache, Trainer, TrainingArguments

from anyformer import from_hf
from anyformer.modeling.attention import eager_attention_forward
from anyformer.modeling.interop import FAMILIES
from anyformer.modeling.interop.parity import random_stock
from anyformer.modeling.positions import RotaryTable

YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {**YARN, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
VARIANTS = {
    "llama": {},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 16},
    "no positions": {"position_embedding": "none"},
    "layernorm, plain mlp": {"norm": "layernorm", "mlp": "dense", "hidden_act": "gelu"},
    "biases": {"attention_bias": True, "mlp_bias": True, "lm_head_bias": True},
    "qkv bias only": {"attention_bias": True, "attention_out_bias": False},
    "tied": {"tie_word_embeddings": True},
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items() if name != "default"},
}
variants = pytest.mark.parametrize("fields", VARIANTS.values(), ids=VARIANTS.keys())


def ids(*shape, low=3, high=101, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


@variants
def test_forward_loss_and_every_gradient(tiny, fields):
    model = tiny(**fields).train()
    tokens = ids(2, 9)
    output = model(tokens, labels=tokens)
    expected = nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, 101), tokens[:, 1:].reshape(-1))
    torch.testing.assert_close(output.loss, expected, rtol=0, atol=1e-6)
    output.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0 or "embed_tokens" in name or "k_proj.bias" in name, name


@variants
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_cached_equals_uncached_on_every_backend(tiny, fields, backend):
    model = tiny(attn_implementation=backend, **fields)
    tokens = ids(2, 12)
    full = model(tokens, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    parts = [model(tokens[:, a:b], past_key_values=cache).logits for a, b in ((0, 5), (5, 6), (6, 10), (10, 12))]
    torch.testing.assert_close(torch.cat(parts, 1), full, rtol=0, atol=2e-5)  # logits reach 20: 1e-6 of it
    torch.testing.assert_close(full, tiny(**fields)(tokens).logits, rtol=0, atol=2e-5)


@variants
def test_left_and_right_padding_leave_real_tokens_alone(tiny, fields):
    model = tiny(**fields)
    tokens = ids(1, 5)
    plain = model(tokens).logits
    pads = torch.zeros(1, 4, dtype=torch.long)
    mask = torch.cat([torch.zeros_like(pads), torch.ones_like(tokens)], 1)
    left = model(torch.cat([pads, tokens], 1), attention_mask=mask).logits[:, 4:]
    right = model(torch.cat([tokens, pads], 1), attention_mask=mask.flip(1)).logits[:, :5]
    torch.testing.assert_close(left, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(right, plain, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="offloaded caches move between a GPU and the host")
@variants
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_greedy_tokens_with_an_offloaded_cache(tiny, fields, implementation):
    model, tokens = tiny(**fields).cuda(), ids(2, 6).cuda()
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    expected = model.generate(tokens, use_cache=False, **options)
    assert torch.equal(model.generate(tokens, cache_implementation=implementation, **options), expected)


@variants
def test_greedy_tokens_do_not_depend_on_cache_or_padding(tiny, fields):
    model = tiny(**fields)
    tokens = ids(2, 6)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    mask = torch.ones_like(tokens)
    expected = model.generate(tokens, attention_mask=mask, use_cache=False, **options)
    for implementation in ("dynamic", "static"):
        got = model.generate(tokens, attention_mask=mask, cache_implementation=implementation, **options)
        assert torch.equal(got, expected), implementation
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    mask = (torch.arange(9) >= 3).long().expand(2, 9)
    for implementation in ("dynamic", "static"):
        got = model.generate(padded, attention_mask=mask, cache_implementation=implementation, **options)
        assert torch.equal(got[:, 3:], expected), implementation


def test_beam_search_equals_the_uncached_run(tiny):
    model = tiny()
    options = {"max_new_tokens": 6, "num_beams": 3, "do_sample": False, "attention_mask": torch.ones(2, 6)}
    assert torch.equal(model.generate(ids(2, 6), **options), model.generate(ids(2, 6), use_cache=False, **options))


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(tiny, reentrant):
    tokens = ids(2, 9)
    plain, checked = tiny().train(), tiny().train()
    checked.gradient_checkpointing_enable({"use_reentrant": reentrant})
    checked.enable_input_require_grads()
    plain(tokens, labels=tokens).loss.backward()
    checked(tokens, labels=tokens).loss.backward()
    for (name, a), (_, b) in zip(plain.named_parameters(), checked.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_cache_answers_to_both_names(tiny):
    model = tiny()
    tokens = ids(1, 6)
    output = model(tokens[:, :4])
    assert output.cache is output.past_key_values
    assert output["cache"].get_seq_length() == 4
    new = model(tokens[:, 4:], cache=output.cache).logits
    old = model(tokens[:, 4:], past_key_values=model(tokens[:, :4]).past_key_values).logits
    torch.testing.assert_close(new, old)
    with pytest.raises(ValueError, match="cache and past_key_values"):
        model(tokens, cache=DynamicCache(), past_key_values=DynamicCache())


def test_logits_to_keep(tiny):
    model = tiny()
    tokens = ids(2, 7)
    full = model(tokens).logits
    torch.testing.assert_close(model(tokens, logits_to_keep=2).logits, full[:, -2:])
    torch.testing.assert_close(model(tokens, logits_to_keep=torch.tensor([1, 4])).logits, full[:, [1, 4]])


def test_hidden_states_attentions_and_tuples(tiny):
    model = tiny(attn_implementation="eager")
    output = model(ids(2, 7), output_hidden_states=True, output_attentions=True)
    assert [h.shape for h in output.hidden_states] == [(2, 7, 32)] * 3
    assert [a.shape for a in output.attentions] == [(2, 4, 7, 7)] * 2
    torch.testing.assert_close(output.attentions[0].sum(-1), torch.ones(2, 4, 7))
    assert isinstance(model(ids(2, 7), return_dict=False), tuple)


def test_inputs_embeds_equal_input_ids(tiny):
    model = tiny()
    tokens = ids(2, 7)
    torch.testing.assert_close(model(inputs_embeds=model.get_input_embeddings()(tokens)).logits, model(tokens).logits)
    with pytest.raises(ValueError, match="exactly one"):
        model()


def test_two_full_rows_of_six_count_ten_targets(tiny):
    model = tiny()
    tokens = ids(2, 6)
    mean = model(tokens, labels=tokens).loss
    torch.testing.assert_close(model(tokens, labels=tokens, num_items_in_batch=torch.tensor(10)).loss, mean)
    torch.testing.assert_close(model(tokens, labels=tokens, num_items_in_batch=20).loss, mean / 2)
    shifted = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, mean)


def test_all_labels_masked_is_zero_not_nan(tiny, caplog):
    model = tiny().train()
    tokens = ids(2, 6)
    loss = model(tokens, labels=torch.full_like(tokens, -100)).loss
    assert "None of the 2 rows" in caplog.text
    assert loss.item() == 0.0
    loss.backward()
    assert all(p.grad is None or (p.grad == 0).all() for p in model.parameters())
    assert model.model.norm.weight.grad is not None


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("extra", [{}, {"attention_mask": 1}, {"use_cache": True}], ids=["plain", "ones", "cache"])
def test_packed_documents_do_not_see_each_other(tiny, backend, extra):
    model = tiny(attn_implementation=backend)
    first, second = ids(1, 4), ids(1, 5, seed=2)
    packed = torch.cat([first, second], 1)
    if "attention_mask" in extra:
        extra = {"attention_mask": torch.ones_like(packed)}
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    logits = model(packed, position_ids=positions, **extra).logits
    torch.testing.assert_close(logits[:, :4], model(first).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(logits[:, 4:], model(second).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_a_packed_row_with_padding_stays_finite_and_apart(tiny, backend):
    model = tiny(attn_implementation=backend).train()
    packed = torch.cat([ids(1, 4), ids(1, 5, seed=2), torch.zeros(1, 3, dtype=torch.long)], 1)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1, 2]])
    mask = (packed != 0).long()
    labels = packed.masked_fill(packed == 0, -100)
    output = model(packed, position_ids=positions, attention_mask=mask, labels=labels)
    torch.testing.assert_close(output.logits[:, 4:9], model(packed[:, 4:9]).logits, rtol=0, atol=1e-5)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
def test_fully_masked_rows_stay_finite(tiny, backend):
    model = tiny(attn_implementation=backend).train()
    tokens = ids(2, 6)
    mask = torch.tensor([[0] * 6, [0, 0, 1, 1, 1, 1]])
    output = model(tokens, attention_mask=mask, labels=tokens.masked_fill(mask == 0, -100))
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_switching_dropout_off_reaches_attention(tiny):
    model = tiny(attention_dropout=0.5, hidden_dropout=0.5, embedding_dropout=0.5).train()
    tokens = ids(2, 9)
    assert not torch.equal(model(tokens).logits, model(tokens).logits)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    torch.testing.assert_close(model(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("where", ["attention_dropout", "hidden_dropout", "embedding_dropout"])
def test_each_dropout_acts_in_training_and_not_in_evaluation(tiny, where):
    model = tiny(**{where: 0.5})
    tokens = ids(2, 9)
    torch.testing.assert_close(model(tokens).logits, model(tokens).logits)
    model.train()
    assert not torch.equal(model(tokens).logits, model(tokens).logits)


YARN_FACTORS = [
    ({"factor": 4.0}, 1.138629),
    ({"factor": 4.0, "attention_factor": 1.0}, 1.0),
    ({"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ({"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.0}, 0.921042),
]


@pytest.mark.parametrize(("keys", "factor"), YARN_FACTORS)
def test_yarn_magnitude_of_cos_and_sin(tiny, keys, factor):
    # The largest angle turns fastest: its cos^2 + sin^2 is the squared magnitude.
    model = tiny(rope_parameters=YARN | keys)
    cos, sin = model.model.positions.tables["0"](torch.zeros(1, 1), torch.arange(50)[None])
    torch.testing.assert_close((cos**2 + sin**2).sqrt(), torch.full_like(cos, factor), rtol=0, atol=2e-6)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_frequencies_survive_load_and_cast(tiny, tmp_path, rope):
    model = tiny(rope_parameters=rope)
    table = model.model.positions.tables["0"]
    expected = table.frequencies()[0]
    long = table.frequencies(long=True)[0] if rope["rope_type"] == "longrope" else None
    model.save_pretrained(tmp_path)
    junk = [torch.full((2, 2), float("nan")) for _ in range(20000)]  # so that fresh memory is not zero by luck
    del junk
    for dtype in (torch.float32, torch.bfloat16):
        rotary = type(model).from_pretrained(tmp_path, dtype=dtype).model.positions.tables["0"]
        assert torch.equal(rotary.inv_freq, expected)
        assert long is None or torch.equal(rotary.long_inv_freq, long)
    rotary = model.to(torch.bfloat16).float().to(torch.bfloat16).model.positions.tables["0"]
    assert torch.equal(rotary.inv_freq, expected)


def test_phases_at_position_8000_in_bfloat16(tiny):
    rotary = tiny(max_position_embeddings=16384).to(torch.bfloat16).model.positions.tables["0"]
    cos, sin = rotary(torch.zeros(1, 1, dtype=torch.bfloat16), torch.tensor([[8000]]))
    phase = 8000 * 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8).repeat(2)
    torch.testing.assert_close(cos[0, 0].double(), phase.cos(), rtol=0, atol=4e-3)  # bf16 rounding of values below 1
    torch.testing.assert_close(sin[0, 0].double(), phase.sin(), rtol=0, atol=4e-3)


def test_rotary_depends_on_distance_alone():
    from anyformer.modeling.positions import apply_rotary

    query, key = torch.randn(1, 1, 1, 8, dtype=torch.float64), torch.randn(1, 1, 1, 8, dtype=torch.float64)
    frequency = 10000.0 ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8).repeat(2)

    def score(at, to):
        q = apply_rotary(query, (at * frequency).cos()[None, None], (at * frequency).sin()[None, None])
        k = apply_rotary(key, (to * frequency).cos()[None, None], (to * frequency).sin()[None, None])
        return (q * k).sum().item()

    assert math.isclose(score(7, 4), score(103, 100), rel_tol=1e-9)
    assert not math.isclose(score(7, 4), score(7, 5), rel_tol=1e-3)


def test_eager_attention_against_a_hand_written_loop():
    module = nn.Module()
    module.num_key_value_groups = 2
    q, k, v = torch.randn(1, 4, 3, 5), torch.randn(1, 2, 6, 5), torch.randn(1, 2, 6, 5)
    got, _ = eager_attention_forward(module, q, k, v, None, scaling=0.7)
    for head in range(4):
        for row in range(3):
            scores = [0.7 * (q[0, head, row] @ k[0, head // 2, j]).item() for j in range(6)]
            weights = [math.exp(s - max(scores)) for s in scores]
            expected = sum(w / sum(weights) * v[0, head // 2, j] for j, w in enumerate(weights))
            torch.testing.assert_close(got[0, row, head], expected, rtol=0, atol=1e-5)


def test_norms_against_their_formulas():
    from anyformer.modeling.norms import AnyformerLayerNorm, AnyformerRMSNorm

    x = torch.randn(3, 8, dtype=torch.float64).float()
    rms, layer = AnyformerRMSNorm(8, 1e-5), AnyformerLayerNorm(8, 1e-5)
    nn.init.normal_(rms.weight), nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    torch.testing.assert_close(rms(x), x / (x**2).mean(-1, keepdim=True).add(1e-5).sqrt() * rms.weight)
    centred = x - x.mean(-1, keepdim=True)
    expected = centred / (centred**2).mean(-1, keepdim=True).add(1e-5).sqrt() * layer.weight + layer.bias
    torch.testing.assert_close(layer(x), expected)


def test_initial_weights_follow_the_range_and_are_reproducible(tiny):
    model = tiny(hidden_size=64, num_attention_heads=8, vocab_size=500, initializer_range=0.05)
    assert abs(model.lm_head.weight.std().item() - 0.05) < 0.002
    assert (model.model.embed_tokens.weight[0] == 0).all()
    again = tiny(hidden_size=64, num_attention_heads=8, vocab_size=500, initializer_range=0.05)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def spread(*weights):
    return torch.cat([w.detach().flatten() for w in weights]).std().item()


def test_parts_start_with_their_own_ranges(tiny):
    wide = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "vocab_size": 500, "initializer_range": 0.05}
    ranges = {"embeddings": 0.1, "attention": 0.02, "mlp": 0.3, "router": 0.5, "head": 0.01}
    model = tiny(**wide, num_experts=4, first_k_dense_replace=1, initializer_ranges=ranges)
    dense, sparse = model.model.layers
    assert math.isclose(spread(model.model.embed_tokens.weight[1:]), 0.1, rel_tol=0.05)
    assert math.isclose(spread(dense.self_attn.q_proj.weight, dense.self_attn.o_proj.weight), 0.02, rel_tol=0.05)
    assert math.isclose(spread(dense.mlp.up_proj.weight, sparse.mlp.experts.gate_up_proj), 0.3, rel_tol=0.05)
    assert math.isclose(spread(sparse.mlp.router.weight), 0.5, rel_tol=0.1)
    assert math.isclose(spread(model.lm_head.weight), 0.01, rel_tol=0.05)


def test_depth_scaled_and_fan_in_starts(tiny):
    wide = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 32, "initializer_range": 0.05}
    shape = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "num_encoder_layers": 8, "num_hidden_layers": 2}
    model = tiny(**wide, **shape, initialization="depth_scaled").model
    for stack, layers in ((model, 2), (model.encoder, 8)):
        into = [(layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight) for layer in stack.layers]
        assert math.isclose(spread(*itertools.chain(*into)), 0.05 / math.sqrt(2 * layers), rel_tol=0.05)
        assert math.isclose(spread(*(layer.mlp.up_proj.weight for layer in stack.layers)), 0.05, rel_tol=0.05)
    layer = tiny(**wide, initialization="fan_in").model.layers[0]
    assert math.isclose(spread(layer.mlp.up_proj.weight), 128**-0.5, rel_tol=0.05)
    assert math.isclose(spread(layer.mlp.down_proj.weight), 48**-0.5, rel_tol=0.05)


def test_a_padding_token_that_also_ends_texts_is_trained(tiny):
    tokens = ids(2, 6)
    tokens[:, 3] = 2
    model = tiny(pad_token_id=2).train()
    model(tokens, labels=tokens).loss.backward()
    assert model.model.embed_tokens.weight.grad[2].abs().sum() > 0
    model = tiny(pad_token_id=0).train()
    model(tokens * (tokens != 2), labels=tokens).loss.backward()
    assert model.model.embed_tokens.weight.grad[0].abs().sum() == 0


def test_a_registered_block_works_everywhere(tiny, tmp_path, caplog):
    from anyformer.modeling import MLPS

    @MLPS.register("test_squared")
    class Squared(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.up_proj = nn.Linear(config.hidden_size, 16)
            self.down_proj = nn.Linear(16, config.hidden_size)

        def forward(self, x):
            return self.down_proj(self.up_proj(x) ** 2)

    model = tiny(mlp="test_squared")
    tokens = ids(2, 6)
    model.save_pretrained(tmp_path)
    assert "mlp='test_squared' is a block of your own" in caplog.text
    model(tokens, labels=tokens).loss.backward()
    assert model.generate(tokens, max_new_tokens=3, min_new_tokens=3).shape == (2, 9)
    with pytest.raises(ValueError, match="already the class"):
        MLPS.register("gated")(Squared)


def test_dynamic_rope_stretches_beyond_the_trained_length(tiny):
    model = tiny(rope_parameters=ROPES["dynamic"], max_position_embeddings=16)
    rotary: RotaryTable = model.model.positions.tables["0"]
    cos, sin = rotary(torch.zeros(1, 1), torch.arange(40)[None], torch.tensor([[40], [10]]))
    # NTK-aware: base * (factor * L / L0 - (factor - 1))^(d / (d - 2)), L = 40, L0 = 16, d = 8
    for row, base in enumerate((10000.0 * (2.0 * 40 / 16 - 1.0) ** (8 / 6), 10000.0)):
        phase = torch.arange(40)[:, None] * base ** (-torch.arange(0, 8, 2) / 8).repeat(2)
        torch.testing.assert_close(cos[row], phase.cos())
        torch.testing.assert_close(sin[row], phase.sin())


def documents_alone(model, tokens, positions):
    """Logits of each row's documents, each run by itself."""
    rows = []
    for row, where in zip(tokens, positions, strict=True):
        starts = [*(where == 0).nonzero().flatten().tolist(), len(row)]
        rows.append(torch.cat([model(row[None, a:b]).logits[0] for a, b in itertools.pairwise(starts)]))
    return torch.stack(rows)


@pytest.mark.parametrize("extra", [{}, {"attention_mask": torch.ones(2, 9, dtype=torch.long)}], ids=["plain", "ones"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_packing_survives_compilation_and_one_row_of_positions(tiny, compiled, extra):
    model, tokens = tiny(), ids(2, 9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    expected = documents_alone(model, tokens, positions.expand(2, -1))
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    with torch.no_grad():
        logits = run(tokens, position_ids=positions, **extra).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_documents_apart_by_padding_do_not_see_each_other_but_holes_split_nothing(tiny):
    model, tokens = tiny(), ids(1, 9)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
    packed = model(tokens, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 0, 0, 0, 1, 2, 3]])).logits
    torch.testing.assert_close(packed[:, 5:], model(tokens[:, 5:]).logits, rtol=0, atol=1e-5)
    holes = model(tokens, attention_mask=mask, position_ids=torch.tensor([[0, 1, 2, 2, 2, 3, 4, 5, 6]])).logits
    real = model(tokens[mask.bool()][None]).logits
    torch.testing.assert_close(holes[mask.bool()][None], real, rtol=0, atol=1e-5)


def test_packing_that_cannot_be_kept_apart_is_refused(tiny):
    model, tokens = tiny(), ids(1, 6)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    with pytest.raises(ValueError, match="cannot follow a cache"):
        model(tokens, position_ids=positions, cache=DynamicCache(config=model.config))
    with pytest.raises(ValueError, match="behind its 4 tokens"):
        model(tokens, position_ids=positions, cache=model(ids(1, 4)).cache)
    with pytest.raises(ValueError, match="pass position_ids"):
        model(tokens, cu_seq_lens_q=torch.tensor([0, 3, 6], dtype=torch.int32))


def test_eager_and_sdpa_read_a_boolean_four_dimensional_mask_alike(tiny):
    tokens, mask = ids(1, 6), torch.ones(1, 1, 6, 6).tril().bool()
    expected = tiny()(tokens).logits
    for backend in ("eager", "sdpa"):
        logits = tiny(attn_implementation=backend)(tokens, attention_mask=mask).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)


def test_generation_from_embeddings_equals_generation_from_ids(tiny):
    model, tokens = tiny(), ids(2, 7)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    embedded = model.generate(inputs_embeds=model.get_input_embeddings()(tokens), **options)
    assert torch.equal(embedded, model.generate(tokens, **options)[:, 7:])


def test_frequencies_come_back_from_the_meta_device(tiny):
    model = tiny()
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    assert torch.equal(empty.model.positions.tables["0"].inv_freq, model.model.positions.tables["0"].inv_freq)


def test_label_smoothing_of_the_trainer_shifts(tiny, tmp_path):
    model, tokens = tiny(), ids(2, 8)
    arguments = TrainingArguments(tmp_path, label_smoothing_factor=0.1, use_cpu=True, report_to=[])
    loss = Trainer(model=model, args=arguments).compute_loss(model, {"input_ids": tokens, "labels": tokens})
    logits = model(tokens).logits[:, :-1].reshape(-1, 101)
    expected = nn.functional.cross_entropy(logits, tokens[:, 1:].reshape(-1), label_smoothing=0.1)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention is compiled for the CPU, which needs g++")
def test_flex_attention_equals_sdpa_behind_left_padding(tiny):
    model = tiny(num_hidden_layers=1, hidden_size=64)
    tokens = ids(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, use_cache=False).logits
        model.set_attn_implementation("flex_attention")
        assert model.config._attn_implementation == "flex_attention"
        got = model(tokens, attention_mask=mask, use_cache=False).logits
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_quantised_cache_rounds_as_under_the_stock_class(family):
    stock = random_stock(FAMILIES[family], FAMILIES[family].examples[0])
    models, tokens = (stock, from_hf(stock)), ids(2, 14)
    cuts = ((0, 8), *((i, i + 1) for i in range(8, 14)))
    runs = []
    for model in models:
        cache = QuantizedCache("fp8", model.config)
        runs.append(torch.cat([model(tokens[:, a:b], cache=cache).logits for a, b in cuts], 1))
    torch.testing.assert_close(runs[1], runs[0], rtol=0, atol=1e-5)
    assert not torch.equal(runs[1], models[1](tokens).logits)
