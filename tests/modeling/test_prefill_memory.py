"""A long prompt in chunks: the largest tensors grow with the chunk, and not with the square of the text."""

import pytest
import torch
from position_kinds import MLA, ids
from steps import operators_of, profiler

LENGTH, CHUNK, WINDOW = 32768, 512, 256
ONE_KEY = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 64}
LAST = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}


def read(model, tokens, chunk):
    """The logits [1, vocab_size] behind a prompt that is read in chunks, the cache, and what was written, in bytes."""
    profiled = profiler()
    with profiled:
        output = model.generate(tokens, prefill_chunk_size=chunk, **LAST)
    return output.logits[0], output.cache, [size for op in operators_of(profiled) for size in op.written]


def test_a_prompt_of_32k_tokens(tiny):
    model = tiny(num_hidden_layers=1, max_position_embeddings=LENGTH + 1, **ONE_KEY)
    tokens = ids(1, LENGTH)
    logits, cache, written = read(model, tokens, CHUNK)
    keys = cache.layers[0].keys.nbytes
    assert keys == 4 * LENGTH * 8
    assert max(written) == 4 * CHUNK * LENGTH  # a chunk's mask in numbers; the square would be 4.3 GB
    masks = {CHUNK * context * size for context in range(CHUNK, LENGTH + 1, CHUNK) for size in (1, 4)}
    assert max(size for size in written if size not in masks) <= 2 * keys  # a buffer that doubles
    whole = model.generate(tokens, **LAST).logits[0]
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)


def test_what_windows_need_does_not_grow_with_the_text(tiny):
    layers = 2
    model = tiny(num_hidden_layers=layers, sliding_window=WINDOW, position_embedding="none", **ONE_KEY)
    largest = {}
    for length in (LENGTH // 8, LENGTH):
        tokens = ids(1, length)
        logits, _, written = read(model, tokens, CHUNK)
        columns = {8 * (length + more) for more in (0, 1)} | {length}  # token ids, positions, a mask of them
        largest[length] = max(size for size in written if size not in columns)
        # The last position sees no more than this, and without positions it does not matter where it stands.
        seen = tokens[:, -(layers * (WINDOW - 1) + 1) :]
        torch.testing.assert_close(logits, model(seen).logits[:, -1], rtol=0, atol=1e-5)
    assert set(largest.values()) == {4 * CHUNK * (CHUNK + WINDOW - 1)}


@pytest.mark.parametrize(
    ("fields", "a_score"),
    [
        (ONE_KEY | {"position_embedding": "alibi"}, 2 * 4),  # biases of heads
        (ONE_KEY | {"position_embedding": "relative"}, 2 * 4),
        (MLA, 4),  # a mask in numbers
    ],
    ids=["alibi", "relative", "latent"],
)
def test_biases_and_masks_are_those_of_a_chunk(tiny, fields, a_score):
    length, chunk = 2048, 128
    model, tokens = tiny(**fields), ids(1, length)
    logits, _, written = read(model, tokens, chunk)
    assert max(written) <= a_score * chunk * length
    whole, _, of_whole = read(model, tokens, length)
    torch.testing.assert_close(logits, whole, rtol=0, atol=1e-5)
    assert fields == MLA or max(of_whole) >= a_score * length**2
