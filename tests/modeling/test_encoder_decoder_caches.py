"""What is done to caches of encoder-decoders: rows are reordered, chosen, repeated, ends are cut, all is emptied."""

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from anyformer.modeling.cache_layers import CroppableEncoderDecoderCache
from anyformer.modeling.growing_cache import GrowingCache
from anyformer.modeling.quantized_cache import Int8Cache

BOTH = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
LATENT = {"attention": "mla", "num_key_value_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": 4}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 6}
ATTENTIONS = {
    "grouped": {},
    "latent": LATENT,
    "window": {"sliding_window": 4},
    "relative": {"position_embedding": "relative"},
}
MADE = {
    "growing": GrowingCache,
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, max_cache_len=16),
    "quantized": Int8Cache,
}
ROWS = [2, 0, 0]
# What is done to a cache -> the same done to tokens and to what the encoder gave.
OPERATIONS = {
    "crop": (lambda cache: cache.crop(-2), lambda tokens: tokens[:, :-2], lambda rows: rows),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor(ROWS)), *2 * (lambda rows: rows[ROWS],)),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), *2 * (lambda rows: rows[[2, 0]],)),
    "repeat": (
        lambda cache: cache.batch_repeat_interleave(2),
        *2 * (lambda rows: rows.repeat_interleave(2, 0),),
    ),
}


def ids(*shape, seed):
    return torch.randint(3, 101, shape, generator=torch.Generator().manual_seed(seed))


def read(model, source, mask, tokens, cache, parts):
    """Logits of tokens that come in parts."""
    got = []
    for part in tokens.split(parts, dim=1):
        outputs = model(encoder_outputs=(source,), attention_mask=mask, decoder_input_ids=part, cache=cache)
        got.append(outputs.logits)
    return torch.cat(got, dim=1)


def near(cache, right):
    """Numbers in 8 bits are rounded."""
    return 0.05 * right.abs().max().item() if cache == "quantized" else 1e-5


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("cache", MADE)
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_what_is_done_to_rows_and_ends(tiny, attention, cache, operation):
    if cache == "static" and operation in ("select", "repeat"):
        pytest.skip("a static cache is made for its number of rows")
    model = tiny(**BOTH, **ATTENTIONS[attention]).double()
    windows = operation == "crop" and attention == "window"
    if windows and cache == "static":
        pytest.skip("the library's static window cannot be cropped once it is full")
    change, expected, of_rows = OPERATIONS[operation]
    texts, tokens, mask = ids(3, 7, seed=5), ids(3, 9, seed=6), torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    source = model.get_encoder()(texts, attention_mask=mask).last_hidden_state
    # Of the library's, a static part cannot be cut.
    both = CroppableEncoderDecoderCache if cache == "static" else EncoderDecoderCache
    made = both(MADE[cache](model.config), DynamicCache())
    if windows:
        made.self_attention_cache.activate_past_recording()
    read(model, source, mask, tokens, made, [6, 1, 2])
    change(made)
    kept, source, mask = expected(tokens), of_rows(source), of_rows(mask)
    more = ids(len(kept), 3, seed=7)
    # The encoder's states are not read any more: its keys and values are in the cache, rows as they are now.
    got = []
    for step in more.split(1, dim=1):
        got.append(read(model, torch.zeros_like(source), mask, step, made, 1))
        if windows:
            made.crop(0)
    right = model(
        encoder_outputs=(source,), attention_mask=mask, decoder_input_ids=torch.cat((kept, more), 1), use_cache=False
    ).logits[:, kept.shape[1] :]
    torch.testing.assert_close(torch.cat(got, 1), right, rtol=0, atol=near(cache, right))


@pytest.mark.parametrize("cache", MADE)
@pytest.mark.parametrize("attention", ATTENTIONS)
@torch.no_grad()
def test_a_cache_that_was_emptied_begins_anew(tiny, attention, cache):
    """Also with the keys of another source."""
    model = tiny(**BOTH, **ATTENTIONS[attention]).double()
    made = EncoderDecoderCache(MADE[cache](model.config), DynamicCache())
    for seed in (1, 2):
        texts, tokens = ids(2, 5, seed=seed), ids(2, 9, seed=seed + 2)
        source = model.get_encoder()(texts).last_hidden_state
        right = model(encoder_outputs=(source,), decoder_input_ids=tokens, use_cache=False).logits
        got = read(model, source, torch.ones_like(texts), tokens, made, [5, 1, 3])
        torch.testing.assert_close(got, right, rtol=0, atol=near(cache, right))
        made.reset()
        assert int(made.get_seq_length()) == 0


@pytest.mark.parametrize("cache", [None, "dynamic", "static", "quantized", "offloaded", "offloaded_static"])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_beams_reorder_both_parts(tiny, attention, cache):
    model = tiny(**BOTH, **ATTENTIONS[attention])
    options = {"num_beams": 3, "max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    texts = ids(2, 6, seed=3)
    mask = torch.ones_like(texts)
    mask[0, 4:] = 0
    options |= {"attention_mask": mask, "output_scores": True, "return_dict_in_generate": True}
    right = model.generate(texts, use_cache=False, **options)
    got = model.generate(texts, cache_implementation=cache, **options)
    moved = [row.unique().numel() > 1 for row in right.beam_indices]
    assert any(moved)
    if cache == "quantized":
        torch.testing.assert_close(
            got.scores[0], right.scores[0], rtol=0, atol=0.05 * right.scores[0].abs().max().item()
        )
    else:
        assert torch.equal(got.sequences, right.sequences)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@torch.no_grad()
def test_of_a_source_that_is_all_padding_nothing_is_seen_with_a_cache_too(tiny, backend):
    model = tiny(**BOTH, attn_implementation=backend)
    texts, tokens, mask = ids(2, 7, seed=5), ids(2, 5, seed=6), torch.ones(2, 7, dtype=torch.long)
    mask[0] = 0
    source = model.get_encoder()(texts, attention_mask=mask).last_hidden_state
    right = model(encoder_outputs=(source,), attention_mask=mask, decoder_input_ids=tokens).logits
    cache = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache())
    torch.testing.assert_close(read(model, source, mask, tokens, cache, 1), right, rtol=0, atol=1e-5)
