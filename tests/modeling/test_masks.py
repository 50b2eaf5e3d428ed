"""Who sees whom: windows, global tokens, packed documents and biases, token by token."""

import math
import shutil

import pytest
import torch
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

from anyformer.modeling.positions import AlibiPositions, RelativePositions

WINDOW = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 4}
GLOBAL = WINDOW | {"layer_types": ["global_sliding_attention"], "num_global_tokens": 2}
BOTH_WAYS = {"architecture": "encoder", "head": "masked_lm"}
backends = pytest.mark.parametrize("backend", ["eager", "sdpa"])


def ids(*shape, low=3, high=101, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def seen_by(model, query, tokens, **arguments):
    """Indices of the tokens that move the logits at `query` when they change."""
    with torch.no_grad():
        plain = model(tokens, **arguments).logits[0, query]
        moved = []
        for place in range(tokens.shape[1]):
            changed = tokens.clone()
            changed[0, place] = 3 if tokens[0, place] != 3 else 4
            if not torch.equal(model(changed, **arguments).logits[0, query], plain):
                moved.append(place)
    return moved


@backends
@pytest.mark.parametrize("positions", ["rope", "alibi", "relative", "learned", "none"])
def test_a_causal_window_of_four_sees_exactly_the_last_four(tiny, backend, positions):
    model = tiny(attn_implementation=backend, position_embedding=positions, **WINDOW)
    assert seen_by(model, 11, ids(1, 12)) == [8, 9, 10, 11]
    assert seen_by(model, 2, ids(1, 12)) == [0, 1, 2]


@backends
def test_a_bidirectional_window_reaches_its_width_to_either_side(tiny, backend):
    model = tiny(attn_implementation=backend, **WINDOW, **BOTH_WAYS)
    assert seen_by(model, 6, ids(1, 12)) == [*range(2, 11)]


@backends
def test_global_tokens_are_seen_from_everywhere_and_without_a_mask_see_everything(tiny, backend):
    model = tiny(attn_implementation=backend, **GLOBAL)
    assert seen_by(model, 11, ids(1, 12)) == [0, 1, 8, 9, 10, 11]
    assert seen_by(model, 1, ids(1, 12)) == [0, 1]
    model = tiny(attn_implementation=backend, **GLOBAL, **BOTH_WAYS)
    assert seen_by(model, 11, ids(1, 12)) == [0, 1, *range(7, 12)]
    assert seen_by(model, 1, ids(1, 12)) == [*range(12)]


@backends
def test_global_tokens_behind_padding_are_the_first_real_ones(tiny, backend):
    model = tiny(attn_implementation=backend, **GLOBAL)
    mask = (torch.arange(14) >= 3).long()[None]
    assert seen_by(model, 13, ids(1, 14), attention_mask=mask) == [3, 4, 10, 11, 12, 13]


@backends
def test_each_packed_document_has_global_tokens_of_its_own(tiny, backend):
    model = tiny(attn_implementation=backend, **GLOBAL)
    positions = torch.tensor([[*range(7), *range(9)]])
    assert seen_by(model, 15, ids(1, 16), position_ids=positions) == [7, 8, 12, 13, 14, 15]
    assert seen_by(model, 6, ids(1, 16), position_ids=positions) == [0, 1, 3, 4, 5, 6]


def test_global_tokens_stay_in_every_cache(tiny):
    model = tiny(**GLOBAL | {"num_hidden_layers": 2, "layer_types": ["global_sliding_attention"]})
    tokens = ids(2, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [4]])).long()
    options = {"attention_mask": mask, "max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    expected = model.generate(tokens, use_cache=False, **options)
    for implementation in ("dynamic", "static"):
        assert torch.equal(model.generate(tokens, cache_implementation=implementation, **options), expected)


def test_a_decoders_window_does_not_hide_the_source(tiny):
    model = tiny(head="seq2seq_lm", architecture="encoder-decoder", decoder_start_token_id=1, sliding_window=3)
    source, target = ids(1, 14), ids(1, 8, seed=2)
    cached = model.generate(source, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert torch.equal(
        cached, model.generate(source, max_new_tokens=6, min_new_tokens=6, do_sample=False, use_cache=False)
    )
    cache = model(source, decoder_input_ids=target, use_cache=True).cache
    assert all(layer.keys.shape[2] == 14 for layer in cache.cross_attention_cache.layers)
    assert all(layer.keys.shape[2] == 2 for layer in cache.self_attention_cache.layers)


def test_slopes_of_alibi_for_powers_of_two_and_between(tiny):
    def slopes(heads, last=8):
        config = tiny(
            num_attention_heads=heads, num_key_value_heads=1, hidden_size=8 * heads, position_embedding="alibi"
        )
        config.config.alibi_bias_max = last
        return AlibiPositions(config.config).slopes()

    assert slopes(8) == [2.0**-i for i in range(1, 9)]
    # Published code of the paper for 6 heads: those of 4, then every second of 8.
    assert slopes(6) == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]
    assert slopes(4, last=4) == [2.0**-1, 2.0**-2, 2.0**-3, 2.0**-4]


@pytest.mark.parametrize("causal", [True, False])
def test_buckets_of_relative_positions_are_those_of_t5(tiny, causal):
    config = tiny(position_embedding="relative", relative_attention_num_buckets=32).config
    relative = torch.arange(-200, 201)[None]
    expected = T5Attention._relative_position_bucket(
        relative, not causal, 32, T5Config().relative_attention_max_distance
    )
    assert torch.equal(RelativePositions(config, causal).buckets(relative), expected)


def test_alibi_scores_fall_with_distance(tiny):
    model = tiny(position_embedding="alibi", num_hidden_layers=1, attn_implementation="eager")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.q_proj.weight.zero_()  # equal scores: what is left is the bias
        weights = model(ids(1, 6), output_attentions=True).attentions[0]
    for head, slope in enumerate(model.model.positions.slopes()):
        expected = torch.tensor([-slope * (5 - key) for key in range(6)]).softmax(0)
        torch.testing.assert_close(weights[0, head, 5], expected)
    assert math.isclose(sum(expected.tolist()), 1.0, rel_tol=1e-6)


def test_learned_positions_end_with_the_table(tiny):
    model = tiny(position_embedding="learned", max_position_embeddings=8)
    model(ids(1, 8))
    with pytest.raises(ValueError, match="position 8 lies beyond max_position_embeddings=8"):
        model(ids(1, 9))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention is compiled for the CPU, which needs g++")
@pytest.mark.parametrize(
    "fields",
    [{"position_embedding": "alibi"}, {"position_embedding": "relative"}, GLOBAL],
    ids=["alibi", "relative", "global tokens"],
)
def test_flex_attention_equals_sdpa(tiny, fields):
    model = tiny(**{"num_hidden_layers": 1, "hidden_size": 64} | fields)
    tokens = ids(2, 40)
    mask = torch.ones_like(tokens)
    mask[0, :7] = 0
    with torch.no_grad():
        expected = model(tokens, attention_mask=mask, use_cache=False).logits
        model.set_attn_implementation("flex_attention")
        got = model(tokens, attention_mask=mask, use_cache=False).logits
    torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="flex attention is compiled for the CPU, which needs g++")
@pytest.mark.parametrize(
    "fields",
    [{}, {"position_embedding": "alibi"}, {"layer_types": ["sliding_attention"], "sliding_window": 5}],
    ids=["rope", "alibi", "window"],
)
def test_flex_attention_keeps_packed_documents_apart(tiny, fields):
    model = tiny(**{"num_hidden_layers": 1, "hidden_size": 64} | fields)
    documents = [ids(1, n, seed=n) for n in (17, 14, 9)]
    positions = torch.cat([torch.arange(d.shape[1]) for d in documents])[None]
    with torch.no_grad():
        expected = torch.cat([model(document).logits for document in documents], 1)
        model.set_attn_implementation("flex_attention")
        got = model(torch.cat(documents, 1), position_ids=positions).logits
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_a_backend_that_would_ignore_a_part_is_refused(tiny):
    assert tiny(attn_implementation=None, attn_logit_softcapping=5.0).config._attn_implementation == "eager"
    assert tiny(attn_implementation=None, attention_sinks=True).config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="scaled_dot_product_attention"):
        tiny(attn_implementation="sdpa", attention_sinks=True)


@backends
@pytest.mark.parametrize("positions", ["rope", "alibi", "relative", "learned", "sinusoidal"])
def test_a_hole_in_the_mask_equals_removal(tiny, backend, positions):
    model, tokens = tiny(attn_implementation=backend, position_embedding=positions), ids(1, 9)
    mask = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
    got = model(tokens, attention_mask=mask).logits[:, mask[0].bool()]
    torch.testing.assert_close(got, model(tokens[:, mask[0].bool()]).logits, rtol=0, atol=1e-5)


HOLED = torch.tensor([[1, 1, 1, 0, 0, 1, 1, 1, 1]])
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4, "num_hidden_layers": 2}
windows = pytest.mark.parametrize("window", [WINDOW, GLOBAL, MIXED], ids=["window", "global", "mixed"])


@backends
@windows
@pytest.mark.parametrize("shape", [{}, BOTH_WAYS], ids=["causal", "both ways"])
def test_a_window_counts_the_tokens_beyond_a_hole(tiny, backend, window, shape):
    model, tokens = tiny(attn_implementation=backend, **window, **shape), ids(1, 9)
    real = HOLED[0].bool()
    got = model(tokens, attention_mask=HOLED).logits[:, real]
    torch.testing.assert_close(got, model(tokens[:, real]).logits, rtol=0, atol=1e-5)


@windows
@pytest.mark.parametrize("mask", [HOLED, torch.tensor([[1, 1, 1, 1, 1, 1, 0, 0, 0]])], ids=["hole", "right"])
def test_steps_behind_padding_in_a_row_equal_those_without(tiny, window, mask):
    model, tokens = tiny(**window), ids(1, 9)
    more, real = ids(1, 6, seed=3), mask[0].bool()
    expected = model(torch.cat((tokens[:, real], more), 1)).logits[:, -6:]
    cache = model(tokens, attention_mask=mask, use_cache=True).cache
    for step in range(6):
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        got = model(more[:, step : step + 1], attention_mask=mask, cache=cache).logits[:, -1]
        torch.testing.assert_close(got, expected[:, step], rtol=0, atol=1e-5)


def test_a_cache_that_dropped_what_a_window_needs_is_refused(tiny):
    model, tokens = tiny(**WINDOW), ids(1, 9)
    cache = model(tokens, use_cache=True).cache
    mask = torch.tensor([[1] * 9 + [0, 0, 1]])
    with pytest.raises(ValueError, match="pad on the left"):
        model(ids(1, 3), attention_mask=mask, cache=cache)
    with pytest.raises(ValueError, match="pad on the left"):
        model.generate(tokens, attention_mask=HOLED, cache_implementation="static", max_new_tokens=3)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("positions", ["rope", "alibi", "relative", "learned", "sinusoidal"])
def test_generation_behind_a_hole_equals_that_without(tiny, positions, cache):
    # In fp64, because places of a cache that nobody sees change the order of sums, which fp32 shows from 1e-5 on.
    model, tokens = tiny(position_embedding=positions).double(), ids(1, 9)
    steps = {"max_new_tokens": 6, "min_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(tokens[:, HOLED[0].bool()], **steps)
    got = model.generate(tokens, attention_mask=HOLED, cache_implementation=cache, **steps)
    right = torch.stack(expected.logits)
    torch.testing.assert_close(torch.stack(got.logits), right, rtol=0, atol=1e-5)
    batch = torch.cat((tokens, ids(1, 9, seed=2))), torch.cat((HOLED, torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]])))
    both = model.generate(batch[0], attention_mask=batch[1], cache_implementation=cache, **steps)
    torch.testing.assert_close(torch.stack(both.logits)[:, :1], right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("fields", [{"position_embedding": "alibi"}, {"position_embedding": "relative"}, WINDOW])
def test_a_compiled_model_counts_beyond_a_hole(tiny, fields):
    model, tokens = tiny(**fields), ids(1, 9)
    compiled = torch.compile(model, backend="eager")
    got = compiled(tokens, attention_mask=HOLED, use_cache=False).logits[:, HOLED[0].bool()]
    torch.testing.assert_close(got, model(tokens[:, HOLED[0].bool()]).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", ["alibi", "relative"])
def test_a_decoder_of_two_counts_beyond_a_hole_in_a_static_cache(tiny, positions):
    shape = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
    model, source, target = tiny(position_embedding=positions, **shape), ids(1, 5), ids(1, 9, seed=2)
    steps = {"max_new_tokens": 4, "min_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(source, decoder_input_ids=target[:, HOLED[0].bool()], **steps)
    got = model.generate(
        source, decoder_input_ids=target, decoder_attention_mask=HOLED, cache_implementation="static", **steps
    )
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), rtol=0, atol=1e-5)


@pytest.mark.parametrize("positions", ["rope", "alibi", "none"])
def test_positions_that_jump_ahead_split_nothing(tiny, positions):
    model, tokens = tiny(position_embedding=positions), ids(1, 6)
    spread = model(tokens, position_ids=2 * torch.arange(6)[None]).logits
    ones = model(tokens, position_ids=2 * torch.arange(6)[None], attention_mask=torch.ones_like(tokens)).logits
    torch.testing.assert_close(spread, ones)
    if positions != "rope":
        torch.testing.assert_close(spread, model(tokens).logits)


@backends
@pytest.mark.parametrize("positions", ["rope", "alibi", "relative"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.long])
def test_a_mask_of_ones_and_zeros_in_four_dimensions_hides(tiny, backend, positions, dtype):
    model, tokens = tiny(attn_implementation=backend, position_embedding=positions), ids(1, 6)
    mask = torch.ones(1, 1, 6, 6).tril().to(dtype)
    torch.testing.assert_close(model(tokens, attention_mask=mask).logits, model(tokens).logits, rtol=0, atol=1e-5)


def test_a_mask_of_the_wrong_width_is_refused(tiny):
    model, tokens = tiny(), ids(1, 9)
    cache = model(tokens[:, :6]).cache
    with pytest.raises(ValueError, match="3 columns for 6 cached and 3 new tokens"):
        model(tokens[:, 6:], cache=cache, attention_mask=torch.ones(1, 3))
    with pytest.raises(ValueError, match="11 columns for 0 cached and 9 new tokens"):
        model(tokens, attention_mask=torch.ones(1, 11))


@backends
def test_packed_pairs_of_an_encoder_decoder_see_their_own_source(tiny, backend):
    shape = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
    model = tiny(attn_implementation=backend, **shape)
    sources, targets = [ids(1, 4), ids(1, 6, seed=2)], [ids(1, 5, seed=3), ids(1, 3, seed=4)]
    alone = [model(s, decoder_input_ids=t).logits for s, t in zip(sources, targets, strict=True)]
    positions = [torch.tensor([[p for part in parts for p in range(part.shape[1])]]) for parts in (sources, targets)]
    packed = torch.cat(sources, 1), torch.cat(targets, 1)
    got = model(packed[0], decoder_input_ids=packed[1], position_ids=positions[0], decoder_position_ids=positions[1])
    torch.testing.assert_close(got.logits, torch.cat(alone, 1), rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match="only one side"):
        model(packed[0], decoder_input_ids=packed[1], decoder_position_ids=positions[1])
