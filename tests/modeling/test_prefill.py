"""Prompts in chunks: the same tokens as without a cache, for every kind of layer, cache, padding and shape."""

import pytest
import torch
from position_kinds import GREEDY, KINDS, MLA, TRAINED, behind_padding, ids

LAYERS = {
    "full": {},
    "sliding": {"sliding_window": 5},
    "full and sliding": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5},
    "global and sliding": {
        "layer_types": ["global_sliding_attention", "full_attention"],
        "sliding_window": 5,
        "num_global_tokens": 2,
    },
    "latent": MLA,
    "soft cap and sinks": {"attention_sinks": True, "attn_logit_softcapping": 5.0, "attn_implementation": "eager"},
    "learned": {"position_embedding": "learned"},
    "alibi and sliding": {"position_embedding": "alibi", "sliding_window": 5},
    "experts": {"num_experts": 4, "moe_intermediate_size": 16},
    # Frequencies turn with the length: chunks are rotated by those of the whole prompt.
    **{name: fields | {"max_position_embeddings": TRAINED} for name, fields in KINDS.items()},
}
BOTH = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
CACHES = ("dynamic", "static")
SIZES = (1, 4, 7, 50)
LENGTH = 23


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("fields", LAYERS.values(), ids=LAYERS.keys())
def test_a_prompt_in_chunks_gives_the_tokens_of_the_uncached_run(tiny, fields, padded):
    model, tokens = tiny(**fields), ids(2, LENGTH)
    mask = torch.ones_like(tokens)
    mask[0, : 6 * padded] = 0
    options = {"attention_mask": mask} | GREEDY
    expected = model.generate(tokens * mask, use_cache=False, **options).tolist()
    for cache in CACHES:
        for size in SIZES:
            got = model.generate(tokens * mask, cache_implementation=cache, prefill_chunk_size=size, **options)
            assert got.tolist() == expected, (cache, size)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize(
    "fields", [MLA, {"sliding_window": 5}, *KINDS.values()], ids=["latent", "sliding", *KINDS.keys()]
)
def test_the_decoder_of_two_reads_its_prompt_in_chunks(tiny, fields, padded):
    model = tiny(**BOTH, **fields, max_position_embeddings=TRAINED)
    source, begun = ids(2, 9), ids(2, LENGTH, seed=3)
    read, own = torch.ones_like(source), torch.ones_like(begun)
    read[1, 6:], own[0, : 6 * padded] = 0, 0
    options = {"attention_mask": read, "decoder_input_ids": begun * own, "decoder_attention_mask": own} | GREEDY
    if not padded:
        del options["decoder_attention_mask"]
    expected = model.generate(source, use_cache=False, **options).tolist()
    # The start token that is put before the padding makes it a hole, which static windows cannot keep.
    for cache in CACHES if not (padded and "sliding_window" in fields) else ("dynamic",):
        for size in SIZES:
            got = model.generate(source, cache_implementation=cache, prefill_chunk_size=size, **options)
            assert got.tolist() == expected, (cache, size)


@pytest.mark.parametrize("fields", [{}, MLA, {"position_embedding": "alibi"}], ids=["rope", "latent", "alibi"])
def test_embeddings_beams_and_later_turns_in_chunks(tiny, fields):
    model, (tokens, mask) = tiny(**fields), behind_padding(ids(2, LENGTH), 2)
    options = {"attention_mask": mask} | GREEDY
    chunked = options | {"prefill_chunk_size": 5}
    embeddings = model.get_input_embeddings()(tokens)
    expected = model.generate(inputs_embeds=embeddings, use_cache=False, **options)
    assert model.generate(inputs_embeds=embeddings, **chunked).tolist() == expected.tolist()
    expected = model.generate(tokens, num_beams=3, use_cache=False, **options)
    assert model.generate(tokens, num_beams=3, **chunked).tolist() == expected.tolist()
    first = model.generate(tokens, return_dict_in_generate=True, **chunked)
    text = torch.cat((first.sequences, ids(2, 9, seed=4)), dim=1)
    longer = torch.nn.functional.pad(mask, (0, text.shape[1] - mask.shape[1]), value=1)
    expected = model.generate(text, use_cache=False, **options | {"attention_mask": longer})
    got = model.generate(text, cache=first.cache, **chunked | {"attention_mask": longer})
    assert got.tolist() == expected.tolist()


def test_what_is_new_behind_a_cache_is_read_in_chunks(tiny):
    model, tokens = tiny(), ids(1, LENGTH)
    first = model.generate(tokens, return_dict_in_generate=True, **GREEDY)
    new = torch.cat((first.sequences[:, -1:], ids(1, 9, seed=4)), dim=1)
    text = torch.cat((first.sequences, new[:, 1:]), dim=1)
    expected = model.generate(text, use_cache=False, **GREEDY)[:, text.shape[1] :]
    got = model.generate(new, cache=first.cache, attention_mask=torch.ones_like(text), prefill_chunk_size=4, **GREEDY)
    assert got[:, new.shape[1] :].tolist() == expected.tolist()


def test_chunks_bound_what_a_layer_sees_and_one_position_gets_logits(tiny):
    model, seen = tiny(), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape[1]))
    model.generate(ids(1, LENGTH), prefill_chunk_size=10, **GREEDY | {"max_new_tokens": 1, "min_new_tokens": 1})
    assert seen == [10, 1, 10, 1, 3, 1]


def test_chunks_without_a_cache_are_refused(tiny):
    with pytest.raises(ValueError, match="prefill_chunk_size needs a cache"):
        tiny().generate(ids(1, 9), prefill_chunk_size=4, use_cache=False, **GREEDY)


def test_chunks_of_a_prompt_that_speculation_would_read_whole_are_refused(tiny):
    with pytest.raises(ValueError, match="speculative decoding reads its prompt whole"):
        tiny().generate(ids(1, 9), prefill_chunk_size=4, prompt_lookup_num_tokens=2, **GREEDY)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "all"])
def test_a_chunk_is_a_number_of_tokens(tiny, size):
    with pytest.raises(ValueError, match=r"prefill_chunk_size=.*a number of tokens from 1, or None"):
        tiny().generate(ids(1, 5), prefill_chunk_size=size, **GREEDY)
