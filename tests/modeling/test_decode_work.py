"""What a step of plain `generate` must not do: copy keys, build masks, do more than it must with a token or a layer."""

import math

import pytest
import torch
from steps import Steps
from transformers import DynamicCache

from anyformer.modeling.growing_cache import STEP

CONTEXT, WINDOW, STEP_LOOKED_AT = 300, 128, 4
LATENT = {"attention": "mla", "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 8}
BOTH = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
KINDS = {
    "one key a query": {"num_key_value_heads": 4},
    "grouped": {},
    "one key for all": {"num_key_value_heads": 1},
    "latent": LATENT,
    "window": {"sliding_window": WINDOW},
    "window and full": MIXED,
    "latent in a window": LATENT | {"sliding_window": WINDOW},
    "learned": {"position_embedding": "learned"},
    "normed heads": {"qk_norm": "head"},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2},
    "two": BOTH,
    "two, window": BOTH | {"sliding_window": WINDOW},
    "two, latent": BOTH | LATENT,
}
BIASED = {
    "alibi": {"position_embedding": "alibi"},
    "alibi in a window": {"position_embedding": "alibi", "sliding_window": WINDOW},
    "relative": {"position_embedding": "relative"},
    "two, relative": BOTH | {"position_embedding": "relative"},
}


@pytest.fixture
def build(tiny):
    return lambda **fields: tiny(**{"max_position_embeddings": 2048} | fields)


def text_of(model, rows=1, context=CONTEXT, padding=0):
    """Arguments of `generate`; padding stands before the first row, of a source behind it."""
    tokens = torch.randint(3, 101, (rows, context), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    if model.config.is_encoder_decoder:
        mask[0, context - padding :] = 0
        begun = torch.randint(3, 101, (rows, context - 1), generator=torch.Generator().manual_seed(2))
        return {"inputs": tokens * mask, "attention_mask": mask, "decoder_input_ids": begun}
    mask[0, :padding] = 0
    return {"inputs": tokens * mask, "attention_mask": mask}


def look(model, steps, **arguments):
    """A cache behind the steps that are looked at, in which no buffer gets full."""
    new = {"max_new_tokens": steps.end, "min_new_tokens": steps.end, "do_sample": False}
    output = model.generate(**arguments, **new, stopping_criteria=[steps], return_dict_in_generate=True)
    assert steps.done == steps.end
    return output.cache


def copies_of_keys(model, **arguments):
    """What a step writes that is as large as what it reads of one layer, with the operators that do."""
    steps = Steps(STEP_LOOKED_AT)
    cache = look(model, steps, **arguments)
    parts = [cache]
    if model.config.is_encoder_decoder:
        parts = [cache.self_attention_cache, cache.cross_attention_cache]
    smallest = min(x.nbytes for part in parts for layer in part.layers for x in (layer.keys, layer.values))
    return [op for op in steps.operators if any(size >= smallest for size in op.written)]


@pytest.mark.parametrize(("rows", "padding"), [(1, 0), (3, 0), (3, 5)], ids=["one row", "rows", "padded"])
@pytest.mark.parametrize("kind", KINDS | BIASED)
def test_a_step_copies_no_keys(build, kind, rows, padding):
    model = build(**(KINDS | BIASED)[kind])
    assert copies_of_keys(model, **text_of(model, rows, padding=padding)) == []


@pytest.mark.parametrize("kind", ["one key a query", "grouped", "one key for all", "latent"])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_in_16_bits_copies_no_keys(build, kind, rows):
    # So wide that what the products themselves take, as much for any context, is less.
    wide = {"kv_lora_rank": 256, "qk_rope_head_dim": 128} if kind == "latent" else {"head_dim": 128}
    model = build(**KINDS[kind] | wide).bfloat16()
    assert copies_of_keys(model, **text_of(model, rows)) == []


def test_copies_would_be_seen(build):
    """The library's cache and the eager attention make them."""
    model = build()
    names = {op.name for op in copies_of_keys(model, **text_of(model), cache=DynamicCache(config=model.config))}
    assert names == {"aten::cat"}
    model = build(attn_implementation="eager")
    assert {op.parents[0] for op in copies_of_keys(model, **text_of(model)) if op.parents} >= {
        "aten::repeat_interleave"
    }


def test_room_is_made_as_often_as_the_text_doubles(build):
    model, steps = build(num_hidden_layers=1, num_attention_heads=2, head_dim=32), Steps(1, 5 * STEP)
    cache = look(model, steps, **text_of(model, context=STEP // 2))
    full = cache.layers[0].keys[:, :, :STEP].nbytes
    doubled = [op for op in steps.operators if any(size >= full for size in op.written)]
    # Keys and values, a buffer and what is copied into it, of 128, 256 and 512 tokens.
    assert len(doubled) == 4 * math.ceil(math.log2(cache.get_seq_length() / STEP))


def test_a_window_moves_once_in_a_window(build):
    window = STEP
    model = build(num_hidden_layers=1, num_attention_heads=2, head_dim=64, sliding_window=window)
    steps = Steps(1, 3 * window)
    cache = look(model, steps, **text_of(model, context=window))
    held = cache.layers[0].keys.nbytes
    moved = [op for op in steps.operators if any(size >= held for size in op.written)]
    # Keys and values, copied aside (where memory is taken and written) and back.
    assert 0 < len(moved) <= 2 * 3 * 3


def masks_seen(operators, rows, widths):
    """Operators that read or write numbers of [rows, .., columns]: neither views, nor what the library does to write
    down the tokens, their positions and which are real."""
    views = ("slice", "as_strided", "view", "expand", "unsqueeze", "narrow", "select", "alias", "reshape", "unflatten")
    books = ("cat", "new_ones", "new_empty", "resolve_conj", "_unsafe_view")
    found = []
    for op in operators:
        name = op.name.removeprefix("aten::")
        columns = [s[-1] for s in op.shapes if len(s) > 1 and math.prod(s) == rows * s[-1]]
        if name not in views + books and not widths.isdisjoint(columns):
            found.append(name)
    return found


# Whether all tokens of a source are real, which is looked at, but not written down anew.
LOOKED_AT = ["to", "_to_copy", "copy_", "all"]


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_one_query_without_padding_needs_no_mask(build, kind, rows):
    model, steps = build(**KINDS[kind]), Steps(STEP_LOOKED_AT)
    cache = look(model, steps, **text_of(model, rows))
    attended = [op for op in steps.operators if op.name == "aten::scaled_dot_product_attention"]
    assert all(op.shapes[3] == [] for op in attended) and (attended or "latent" in kind)
    seen = masks_seen(steps.operators, rows, {cache.get_seq_length(), WINDOW, CONTEXT})
    assert seen == (LOOKED_AT if model.config.is_encoder_decoder else [])


def deep(kind, layers):
    """Config fields of so many layers."""
    fields = (KINDS | BIASED)[kind] | {"num_hidden_layers": layers}
    return fields | ({"layer_types": MIXED["layer_types"] * (layers // 2)} if "layer_types" in fields else {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_of_one_query_behind_padding_is_made_once_for_all_layers(build, kind):
    """By the fewest operators, and in the form that every layer adds to its scores."""
    made = []
    for layers in (2, 6):
        model, steps = build(**deep(kind, layers)), Steps(STEP_LOOKED_AT)
        cache = look(model, steps, **text_of(model, 3, padding=5 if "window" not in kind else CONTEXT - 20))
        seen = masks_seen(steps.operators, 3, {cache.get_seq_length(), WINDOW, CONTEXT})
        added = {"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "add"}
        made.append([name for name in seen if name not in added])
        assert len(seen) > len(made[-1])
    assert made[0] == made[1]
    # Of a source it is asked too whether there is something to be seen.
    assert len(made[0]) <= (15 if "window" in kind and kind != "two, window" else 12 if "two" in kind else 10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", BIASED)
def test_biases_of_one_query_are_made_once_for_all_layers(build, kind, dtype):
    made = []
    for layers in (2, 6):
        model, steps = build(**deep(kind, layers)).to(dtype), Steps(STEP_LOOKED_AT)
        cache = look(model, steps, **text_of(model))
        keys = WINDOW if "window" in kind else cache.get_seq_length()
        bias = model.config.num_attention_heads * keys * dtype.itemsize
        own = [op for op in steps.operators if "aten::scaled_dot_product_attention" not in op.parents]
        made.append([op.name for op in own if any(size >= bias for size in op.written)])
    assert made[0] == made[1] and made[0]


# What a layer may call: of torch, and functions of Python. The first two run flat, the others through the modules.
MOST_A_LAYER = {
    "grouped": (44, 38),
    "window and full": (45, 45),
    "latent": (100, 250),
    "experts": (110, 230),
    "two": (95, 320),
}


@pytest.mark.parametrize("kind", MOST_A_LAYER)
def test_a_step_is_the_same_for_any_context_and_grows_by_a_constant_a_layer(build, kind):
    counts: dict[int, tuple[int, int]] = {}
    for layers in (2, 4, 8):
        model = build(**deep(kind, layers))
        for context in (64, 512) if "window" not in kind else (2 * WINDOW, 4 * WINDOW):
            operators, python = Steps(STEP_LOOKED_AT), Steps(STEP_LOOKED_AT, look_at="calls of Python")
            look(model, operators, **text_of(model, context=context))
            look(model, python, **text_of(model, context=context))
            calls = sum(bool(op.name) and not op.parents for op in operators.operators), python.python_calls
            assert counts.setdefault(layers, calls) == calls
    a_layer = [(more - few) / 2 for few, more in zip(counts[2], counts[4], strict=True)]
    assert a_layer == [(more - few) / 4 for few, more in zip(counts[4], counts[8], strict=True)]
    assert all(calls <= most for calls, most in zip(a_layer, MOST_A_LAYER[kind], strict=True)), a_layer


PREFILLS = {"whole": {}, "chunks": {"prefill_chunk_size": 128}}


@pytest.mark.parametrize("prefill", PREFILLS)
@pytest.mark.parametrize("kind", ["grouped", "latent", "two"])
def test_the_head_reads_one_position(build, kind, prefill):
    model, seen = build(**KINDS[kind]), []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append((*inputs[0].shape[:2],)))
    model.generate(**text_of(model, 2), **PREFILLS[prefill], max_new_tokens=3, min_new_tokens=3, do_sample=False)
    chunks = 3 if prefill == "chunks" else 1  # of 300 tokens
    assert seen == [(2, 1)] * (chunks + 2)
