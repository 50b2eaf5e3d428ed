"""Beyond the trained length each kind of position does what its paper says: formulas, stock classes, caches."""

import math
from contextlib import contextmanager

import pytest
import torch
from position_kinds import BASE, FACTORS, GREEDY, KINDS, MLA, ROPES, TRAINED, behind_padding, ids
from transformers import DynamicCache, StaticCache
from transformers.utils import logging as library_logging

from anyformer import from_hf
from anyformer.modeling.interop import FAMILIES, compare_logits
from anyformer.modeling.interop.parity import random_stock
from anyformer.modeling.positions import LearnedPositions

kinds = pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS.keys())
TURNING = {name: {"rope_parameters": ROPES[name]} for name in ("longrope", "dynamic")}
turning = pytest.mark.parametrize("fields", TURNING.values(), ids=TURNING.keys())


# Frequencies, pair by pair, from the equations of the papers


def plain(pair, size):
    return BASE ** (-2 * pair / size)


def linear(pair, size, length):
    return plain(pair, size) / 4.0  # arXiv:2306.15595, eq. 4: positions times L / L'


def ntk(pair, size, length):
    """arXiv:2309.00071, sec. 3.1 and appendix B.2: base s^(d / (d - 2)); transformers' scale is a s - (a - 1)."""
    scale = 4.0 * max(length, TRAINED) / TRAINED - 3.0
    return (BASE * scale ** (size / (size - 2))) ** (-2 * pair / size)


def yarn(pair, size, length):
    """arXiv:2309.00071, sec. 3.2, with the authors' ramp: linear in the pair's index between the two that turn
    beta_fast = 32 times and beta_slow = 1 time within the trained length, rounded outwards."""

    def pair_that_turns(times):
        return size * math.log(TRAINED / (times * 2 * math.pi)) / (2 * math.log(BASE))

    low, high = max(math.floor(pair_that_turns(32)), 0), min(math.ceil(pair_that_turns(1)), size - 1)
    share = min(max((pair - low) / max(high - low, 0.001), 0), 1)  # of interpolation
    return plain(pair, size) * ((1 - share) + share / 4.0)


def llama3(pair, size, length):
    """Meta's code of Llama 3.1: by wavelength, with a linear transition between L / 4 and L / 1."""
    wavelength = 2 * math.pi / plain(pair, size)
    if wavelength < TRAINED / 4.0:
        return plain(pair, size)
    if wavelength > TRAINED / 1.0:
        return plain(pair, size) / 4.0
    smooth = (TRAINED / wavelength - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * plain(pair, size) / 4.0 + smooth * plain(pair, size)


def longrope(pair, size, length):
    """arXiv:2402.13753, eq. 1 and sec. 3.3: theta_i / lambda_i, the short factors within the trained length."""
    return plain(pair, size) / FACTORS["long_factor" if length > TRAINED else "short_factor"][pair]


def proportional(pair, size, length):
    return plain(pair, size) / 4.0 if pair < size // 4 else 0.0  # the first half of the pairs turns


FORMULAS = {"linear": linear, "dynamic": ntk, "yarn": yarn, "llama3": llama3, "longrope": longrope}
FORMULAS |= {"proportional": proportional, "default": lambda pair, size, length: plain(pair, size)}
MAGNITUDES = {"yarn": 0.1 * math.log(4) + 1, "longrope": math.sqrt(1 + math.log(4) / math.log(TRAINED))}


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("size", [8, 64])
def test_cos_and_sin_are_those_of_the_equations_at_every_length(tiny, name, size):
    if name == "longrope" and size == 64:
        pytest.skip("has a factor a pair")
    model = tiny(rope_parameters=dict(ROPES[name]), head_dim=size, max_position_embeddings=TRAINED)
    table = model.model.positions.tables["0"]
    for length in (10, TRAINED, TRAINED + 1, 3 * TRAINED, 40 * TRAINED):
        frequencies = [FORMULAS[name](pair, size, length) for pair in range(size // 2)]
        at = torch.tensor([0, 1, length // 2, length - 1])
        cos, sin = table(torch.zeros(1, 1), at[None], torch.tensor([[length]]))
        phase = at[:, None].double() * torch.tensor(frequencies, dtype=torch.float64).repeat(2)
        magnitude = MAGNITUDES.get(name, 1.0)
        # fp32 holds a phase of 639 to 3e-5.
        torch.testing.assert_close(cos[0].double(), magnitude * phase.cos(), rtol=0, atol=1e-6 + 1e-7 * length)
        torch.testing.assert_close(sin[0].double(), magnitude * phase.sin(), rtol=0, atol=1e-6 + 1e-7 * length)


def test_the_equations_tell_the_scalings_apart():
    rows = {name: [FORMULAS[name](pair, 8, 64) for pair in range(4)] for name in FORMULAS}
    assert len({tuple(row) for row in rows.values()}) == len(rows)
    assert 0 < yarn(1, 8, 64) / plain(1, 8) < 1 and yarn(0, 8, 64) == 1.0 and yarn(3, 8, 64) == plain(3, 8) / 4


def test_yarn_scales_the_scores_of_latent_attention_as_deepseek_does(tiny):
    rope = ROPES["yarn"] | {"mscale": 0.707, "mscale_all_dim": 1.0}
    attention = tiny(rope_parameters=rope, **MLA).model.layers[0].self_attn
    assert attention.scaling == pytest.approx(16**-0.5 * (0.1 * math.log(4) + 1) ** 2)


# Stock classes


# Milder weights than the usual ones: over a hundred tokens, rounding comes near the tolerance.
BEYOND = {"max_position_embeddings": TRAINED, "initializer_range": 0.2}
STOCK = {
    "bloom, alibi": ("bloom", {}),
    "t5, relative": ("t5", FAMILIES["t5"].examples[0] | {"relative_attention_max_distance": 20}),
    **{
        f"llama, {name}": ("llama", BEYOND | {"rope_parameters": dict(rope)})
        for name, rope in ROPES.items()
        if name not in ("longrope", "proportional")  # Phi-3 has the first, Gemma 4 the second
    },
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": TRAINED, "rope_parameters": ROPES["longrope"]}),
}


@pytest.mark.parametrize(("family", "example"), STOCK.values(), ids=STOCK.keys())
def test_logits_beyond_the_trained_length_equal_the_stock_class(family, example):
    stock = random_stock(FAMILIES[family], example)
    # A third, a quarter and a sixth of the text are the rows of a padded batch: of the third, 16, none is beyond.
    comparison = compare_logits(from_hf(stock), stock, ids(99))
    assert comparison.plain <= 1e-5
    if "dynamic" not in str(example):  # stock frequencies stay those of the longest text that was read before
        assert comparison.padded <= 1e-5


# Caches and padding, uncached is right


@kinds
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation_beyond_the_trained_length_equals_the_uncached_run(tiny, fields, cache):
    model = tiny(**fields, max_position_embeddings=TRAINED)
    tokens = ids(1, 11)  # the trained length lies within what is generated
    whole = tokens
    for _ in range(GREEDY["max_new_tokens"]):
        whole = torch.cat((whole, model(whole, use_cache=False).logits[:, -1:].argmax(-1)), dim=-1)
    for width in (0, 4):
        padded, mask = behind_padding(tokens, width)
        got = model.generate(padded, attention_mask=mask, cache_implementation=cache, **GREEDY)
        assert got[0, width:].tolist() == whole[0].tolist()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("fields", [*KINDS.values(), MLA], ids=[*KINDS.keys(), "latent"])
def test_an_encoder_decoder_goes_on_on_both_sides(tiny, fields, cache):
    shape = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
    model = tiny(**shape, **fields, max_position_embeddings=TRAINED)
    source, begun = ids(2, 2 * TRAINED), ids(2, 11, seed=2)
    read = torch.ones_like(source)
    read[0, TRAINED - 4 :] = 0  # this row's source is short
    options = {"attention_mask": read, "decoder_input_ids": begun} | GREEDY
    expected = model.generate(source, **options, use_cache=False)
    assert model.generate(source, **options, cache_implementation=cache).tolist() == expected.tolist()
    alone = model.generate(source[:1, : TRAINED - 4], decoder_input_ids=begun[:1], **GREEDY, use_cache=False)
    assert alone.tolist() == expected[:1].tolist()


def test_the_bias_of_relative_positions_stays_in_the_last_bucket(tiny):
    model = tiny(**KINDS["relative"])
    bias = model.model.positions.bias(torch.tensor([[1000]]), torch.arange(1001)[None])[0, :, 0]  # [heads, keys]
    far = model.model.positions.relative_attention_bias.weight[7]  # of 8 buckets
    assert torch.equal(bias[:, : 1000 - TRAINED], far[:, None].expand(-1, 1000 - TRAINED))
    assert not torch.equal(bias[:, 1000 - 3], far)


def test_the_bias_of_alibi_goes_on_falling(tiny):
    positions = tiny(position_embedding="alibi").model.positions
    bias = positions.bias(torch.tensor([[30_000]]), torch.tensor([[0, 29_999]]))[0, :, 0]
    for head, slope in enumerate((0.25, 0.0625, 0.015625, 0.00390625)):  # 2^(-8/4), ...
        assert bias[head].tolist() == [-slope * 30_000, -slope]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_sinusoids_go_on(tiny, layout):
    positions = tiny(position_embedding="sinusoidal", position_layout=layout).model.positions
    got = positions.embed(torch.zeros(1, 1, 32), torch.tensor([[50_000]]))[0, 0].double()
    angles = [50_000 / 10000 ** (2 * i / 32) for i in range(16)]  # arXiv:1706.03762, sec. 3.5
    pairs = [(math.sin(a), math.cos(a)) for a in angles]
    right = [v for pair in pairs for v in pair] if layout == "interleaved" else [p[i] for i in (0, 1) for p in pairs]
    torch.testing.assert_close(got, torch.tensor(right, dtype=torch.float64), rtol=0, atol=1e-6)


# Frequencies that turn with the length


@turning
def test_a_row_is_rotated_by_its_own_length(tiny, fields):
    model = tiny(**fields, max_position_embeddings=TRAINED)
    long, short = ids(1, 24), ids(1, 12, seed=2)
    padded, mask = behind_padding(short, 12)
    both = torch.cat((long, padded)), torch.cat((torch.ones_like(long), mask))
    got = model(both[0], attention_mask=both[1]).logits
    torch.testing.assert_close(got[0], model(long).logits[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(got[1, 12:], model(short).logits[0], rtol=0, atol=1e-5)
    answers = model.generate(both[0], attention_mask=both[1], **GREEDY)  # the short row crosses, the long one is beyond
    for row, alone in zip(answers, (long, short), strict=True):
        assert row[-10:].tolist() == model.generate(alone, use_cache=False, **GREEDY)[0, -10:].tolist()


@turning
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_packed_document_is_rotated_by_its_own_length(tiny, fields, compiled):
    model = tiny(**fields, max_position_embeddings=TRAINED)
    first, second = ids(1, 9), ids(1, 20, seed=2)
    positions = torch.cat((torch.arange(9), torch.arange(20)))[None]
    run = torch.compile(model, backend="eager") if compiled else model
    got = run(torch.cat((first, second), dim=1), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got[:, :9], model(first).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(got[:, 9:], model(second).logits, rtol=0, atol=1e-5)


@turning
def test_keys_of_other_frequencies_are_refused_and_text_lengths_help(tiny, fields):
    model = tiny(**fields, max_position_embeddings=TRAINED)
    tokens, cache = ids(2, 24), DynamicCache()
    model(tokens[:, :10], cache=cache)
    model(tokens[:, 10:TRAINED], cache=cache)
    with pytest.raises(ValueError, match="beyond 16 tokens the rotary frequencies turn"):
        model(tokens[:, TRAINED:], cache=cache)
    cache, lengths = DynamicCache(), torch.tensor([24, 24])
    parts = [model(tokens[:, a:b], cache=cache, text_lengths=lengths).logits for a, b in ((0, 10), (10, 24))]
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens).logits, rtol=0, atol=2e-5)  # logits reach 20


@turning
def test_a_cache_that_was_emptied_is_of_no_length(tiny, fields):
    model = tiny(**fields, max_position_embeddings=TRAINED)
    tokens, cache = ids(1, 24), StaticCache(config=model.config, max_cache_len=24)
    with torch.no_grad():
        model(tokens, cache=cache)
        cache.reset()
        torch.testing.assert_close(model(tokens[:, :9], cache=cache).logits, model(tokens[:, :9]).logits)


@turning
def test_a_conversation_goes_on_from_its_cache_across_the_length(tiny, fields):
    model = tiny(**fields, max_position_embeddings=TRAINED)
    first = model.generate(ids(1, 6), return_dict_in_generate=True, **GREEDY | {"max_new_tokens": 8})
    text = torch.cat((first.sequences, ids(1, 5, seed=3)), dim=1)
    expected = model.generate(text, use_cache=False, **GREEDY)
    assert model.generate(text, cache=first.cache, **GREEDY).tolist() == expected.tolist()
    again = model.generate(ids(1, 6), return_dict_in_generate=True, **GREEDY | {"max_new_tokens": 8})
    assert model.generate(text, cache=again.cache, prefill_chunk_size=3, **GREEDY).tolist() == expected.tolist()


@turning
def test_speculation_across_the_length_is_refused(tiny, fields):
    model, options = tiny(**fields, max_position_embeddings=TRAINED), {"prompt_lookup_num_tokens": 3} | GREEDY
    with pytest.raises(ValueError, match=r"turn beyond 16 tokens .* and speculative decoding would read"):
        model.generate(ids(1, 9), **options)
    within = ids(1, 4)
    expected = model.generate(within, **GREEDY)
    assert model.generate(within, **options).tolist() == expected.tolist()
    if fields is TURNING["longrope"]:  # all of it beyond: one set of frequencies
        beyond = ids(1, 20)
        assert model.generate(beyond, **options).tolist() == model.generate(beyond, **GREEDY).tolist()


# Learned positions end


@contextmanager
def heard(caplog):
    """The library's warnings in `caplog`."""
    library_logging.enable_propagation()
    with caplog.at_level("WARNING", logger="transformers"), caplog.at_level("WARNING", logger="anyformer"):
        yield
    library_logging.disable_propagation()


def learned(tiny, **fields):
    return tiny(position_embedding="learned", max_position_embeddings=TRAINED, **fields)


def test_learned_positions_count_real_tokens(tiny):
    model = learned(tiny)
    tokens = ids(1, TRAINED)
    padded, mask = behind_padding(tokens, 5)
    torch.testing.assert_close(
        model(padded, attention_mask=mask).logits[:, 5:], model(tokens).logits, rtol=0, atol=1e-5
    )
    with pytest.raises(ValueError, match="position 20 lies beyond max_position_embeddings=16"):
        model(padded)
    with pytest.raises(ValueError, match="position 40 lies beyond"):
        model(tokens, position_ids=torch.arange(25, 41)[None])
    cache = DynamicCache()
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="position 16 lies beyond"):
        model(tokens[:, :1], cache=cache)


def test_a_compiled_model_reads_no_row_beyond_the_table(tiny):
    run = torch.compile(learned(tiny), backend="aot_eager")
    run(ids(1, TRAINED), use_cache=False)
    with pytest.raises((IndexError, RuntimeError), match=r"out of range|out of bounds"):
        run(ids(1, TRAINED + 1), use_cache=False)


def test_sizes_tell_what_a_device_need_not_be_asked(tiny):
    """On a GPU looking at values waits for it: tensors without any stand in for those of one."""
    positions: LearnedPositions = learned(tiny).model.positions
    unseen = torch.zeros(1, 4, dtype=torch.long, device="meta")
    positions.check(unseen, TRAINED)
    for below in (TRAINED + 1, None):
        with pytest.raises(RuntimeError, match="meta"):
            positions.check(unseen, below)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}, {"use_cache": False}])
def test_generation_ends_with_the_learned_positions_and_says_so(tiny, options, caplog):
    model = learned(tiny)
    padded, mask = behind_padding(ids(2, 12), 3)
    with heard(caplog):
        answers = model.generate(padded, attention_mask=mask, **(GREEDY | options))
    # 12 tokens have positions, 4 more get one, and the last is predicted from the last position.
    assert answers.shape[1] == 15 + 5
    assert "learned positions end at max_position_embeddings=16: texts end there, up to 5 tokens before" in caplog.text
    assert model.generate(ids(1, TRAINED), **(GREEDY | options)).shape[1] == TRAINED + 1
    with pytest.raises(ValueError, match="position 16 lies beyond"):
        model.generate(ids(1, TRAINED + 1), **(GREEDY | options))


def test_an_encoder_decoder_ends_with_its_learned_positions(tiny):
    shape = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
    model = learned(tiny, **shape)
    assert model.generate(ids(1, TRAINED), **GREEDY | {"max_new_tokens": 30}).shape[1] == TRAINED + 1
    with pytest.raises(ValueError, match="position 16 lies beyond"):
        model.generate(ids(1, TRAINED + 1), **GREEDY)


def test_positions_that_go_on_are_reported_once(tiny, caplog):
    model = tiny(max_position_embeddings=TRAINED)
    library_logging.warning_once.cache_clear()
    with heard(caplog):
        for _ in range(2):
            assert model.generate(ids(1, 14), **GREEDY).shape[1] == 24
    said = {id(r) for r in caplog.records if "exceeded the model's predefined maximum length (16)" in r.message}
    assert len(said) == 1
