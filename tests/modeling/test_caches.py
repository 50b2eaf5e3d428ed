"""Every cache gives the same tokens as none, for every attention and shape, and takes the bytes that were predicted."""

import copy
import threading

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    CompileConfig,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
)

from anyformer.modeling import cpu_kernels, flat_step, inference
from anyformer.modeling.cache_sizes import measured_size, predicted_size
from anyformer.modeling.growing_cache import STEP, GrowingCache, GrowingLayer, GrowingSlidingLayer, capacity_for
from anyformer.modeling.quantized_cache import Int8Cache

NEW = 7
LATENT = {"attention": "mla", "num_key_value_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": 4}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 6}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2}
ATTENTIONS = {
    "one key a query": {"num_key_value_heads": 4},
    "grouped": {},
    "one key for all": {"num_key_value_heads": 1},
    "latent": LATENT,
    "latent, queries too": LATENT | {"q_lora_rank": 10},
    "window": {"sliding_window": 4},
    "window and full": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "window and globals": {
        "layer_types": ["global_sliding_attention", "full_attention"],
        "sliding_window": 4,
        "num_global_tokens": 2,
    },
    "latent in a window": LATENT | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "alibi": {"position_embedding": "alibi"},
    "alibi in a window": {"position_embedding": "alibi", "sliding_window": 4},
    "relative": {"position_embedding": "relative"},
    "learned": {"position_embedding": "learned"},
    "sinusoidal": {"position_embedding": "sinusoidal"},
    "no positions": {"position_embedding": "none"},
    "interleaved": {"position_layout": "interleaved"},
    "normed heads": {"qk_norm": "head"},
    "normed together": {"qk_norm": "full"},
    "clipped, biased": {"clip_qkv": 1.0, "attention_bias": True, "mlp_bias": True},
    "soft cap": {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "sinks": {"attention_sinks": True, "attn_implementation": "eager"},
    "eager": {"attn_implementation": "eager"},
    "sandwich": {"norm_position": "sandwich"},
    "parallel": {"norm_position": "parallel", "residual_multiplier": 0.5},
    "gpt": {
        "position_embedding": "learned",
        "norm": "layernorm",
        "mlp": "dense",
        "hidden_act": "gelu",
        "first_norm": False,
    },
    "experts": SPARSE,
    "two": {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1},
    "two, latent": LATENT | {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1},
    "two, window": {
        "head": "seq2seq_lm",
        "architecture": "encoder-decoder",
        "decoder_start_token_id": 1,
        "sliding_window": 4,
    },
}
# Shape -> rows, tokens of a prompt, padding before the first row, beams.
SHAPES = {"one row": (1, 9, 0, 1), "one token": (1, 1, 0, 1), "padded": (3, 6, 3, 1), "beams": (2, 5, 2, 3)}
CACHES = ("dynamic", "growing by hand", "library's dynamic", "static", "quantized", "offloaded", "offloaded_static")


def prompt(model, shape):
    rows, length, padding, beams = SHAPES[shape]
    tokens = torch.randint(3, 101, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    mask[0, :padding] = 0
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "num_beams": beams}
    return {"inputs": tokens * mask, "attention_mask": mask} | options | {"return_dict_in_generate": True}


def run(model, shape, cache):
    given = prompt(model, shape)
    if cache == "none":
        return model.generate(**given, use_cache=False)
    made = {
        "growing by hand": lambda: GrowingCache(model.config),
        "library's dynamic": lambda: DynamicCache(config=model.config),
    }
    if cache in made:
        if model.config.is_encoder_decoder:
            made = {name: lambda own=make: EncoderDecoderCache(own(), DynamicCache()) for name, make in made.items()}
        return model.generate(**given, past_key_values=made[cache]())
    return model.generate(**given, cache_implementation=cache)


def predicted(model, shape, cache):
    """Bytes behind the last step, whose token is not cached any more."""
    rows, length, _, beams = SHAPES[shape]
    source = 0
    if model.config.is_encoder_decoder:
        source, length = length, 1
    tokens = length + NEW - 1
    # The library makes room for one token less than it may generate.
    kinds = {"static": {"places": tokens}, "offloaded_static": {"places": tokens}, "quantized": {"quantized": True}}
    return predicted_size(model.config, tokens, batch=rows * beams, source=source, **kinds.get(cache, {}))


@pytest.fixture(scope="module")
def uncached():
    return {}


EXACT = [cache for cache in CACHES if cache != "quantized"]


@pytest.mark.parametrize("cache", EXACT)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_same_tokens_and_the_predicted_bytes(tiny, uncached, attention, shape, cache):
    model = tiny(**ATTENTIONS[attention])
    key = attention, shape
    if key not in uncached:
        uncached[key] = run(model, shape, "none").sequences
    got = run(model, shape, cache)
    assert torch.equal(got.sequences, uncached[key])
    assert measured_size(got.past_key_values).held == predicted(model, shape, cache)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_eight_bits_round_and_take_the_predicted_bytes(tiny, attention, shape):
    """Random weights decide by hairs, so that tokens may differ; what the model sees must not, beyond the rounding."""
    model, steps = tiny(**ATTENTIONS[attention]), {"output_logits": True}
    exact = model.generate(**prompt(model, shape), use_cache=False, **steps)
    got = model.generate(**prompt(model, shape), cache_implementation="quantized", **steps)
    assert isinstance(got.past_key_values, Int8Cache) or model.config.is_encoder_decoder
    assert measured_size(got.past_key_values).held == predicted(model, shape, "quantized")
    length = exact.sequences.shape[1] - NEW
    first = (exact.sequences != got.sequences).any(0).nonzero().flatten().tolist()
    same = (first[0] - length + 1) if first and SHAPES[shape][3] == 1 else (1 if SHAPES[shape][3] > 1 else NEW)
    for ours, theirs in zip(got.logits[:same], exact.logits[:same], strict=True):
        # Numbers in 8 bits are off by at most 1/254 of the largest beside them; two layers add and multiply them.
        assert (ours - theirs).abs().max() <= 0.05 * theirs.abs().max()


CHANGED = ["grouped", "latent", "window", "window and globals", "latent in a window", "alibi"]
OPERATIONS = {
    "crop": (lambda cache: cache.crop(-2), lambda tokens: tokens[:, :-2]),
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])), lambda tokens: tokens[[2, 0, 0]]),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), lambda tokens: tokens[[2, 0]]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda tokens: tokens.repeat_interleave(2, 0)),
}
MADE = {
    "growing": GrowingCache,
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, max_cache_len=16),
    "quantized": Int8Cache,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("cache", MADE)
@pytest.mark.parametrize(
    "attention", ["grouped", "latent", "window", "window and globals", "latent in a window", "alibi"]
)
@torch.no_grad()
def test_what_is_done_to_rows_and_ends(tiny, attention, cache, operation):
    if cache == "static" and operation in ("select", "repeat"):
        pytest.skip("a static cache is made for its number of rows")
    model = tiny(**ATTENTIONS[attention])
    change, expected = OPERATIONS[operation]
    tokens = torch.randint(3, 101, (3, 9), generator=torch.Generator().manual_seed(5))
    made = MADE[cache](model.config)
    windows = any(kind == "sliding_attention" for kind in model.config.layer_types)
    if operation == "crop" and windows:
        if cache == "static":
            pytest.skip("the library's static window cannot be cropped once it is full")
        made.activate_past_recording()
    for start, end in ((0, 6), (6, 7), (7, 9)):
        model(tokens[:, start:end], cache=made, use_cache=True)
    change(made)
    kept = expected(tokens)
    more = torch.randint(3, 101, (len(kept), 3), generator=torch.Generator().manual_seed(6))
    got = []
    for step in more.split(1, dim=1):
        got.append(model(step, cache=made, use_cache=True).logits)
        if operation == "crop" and windows:
            made.crop(0)
    right = model(torch.cat((kept, more), 1), use_cache=False).logits[:, kept.shape[1] :]
    near = 0.05 * right.abs().max() if cache == "quantized" else 2e-6 * right.abs().max().clamp(min=5)
    torch.testing.assert_close(torch.cat(got, 1), right, rtol=0, atol=near.item())


def test_a_token_copies_only_itself(tiny):
    layer, heads = GrowingLayer(), (2, 3)
    places = set()
    with torch.no_grad():
        for length in (10, *[1] * (4 * STEP)):
            keys, values = layer.update(torch.randn(*heads, length, 4), torch.randn(*heads, length, 4))
            places.add((keys.data_ptr(), values.data_ptr()))
    assert layer.get_seq_length() == keys.shape[-2] == values.shape[-2] == 10 + 4 * STEP
    assert len(places) == 4  # of 64, 128, 256 and 512 tokens


def test_room_is_doubled_but_not_beyond_the_longest_text():
    assert [capacity_for(need, past) for need, past in ((1, 0), (64, 0), (129, 128), (300, 128))] == [64, 128, 256, 320]
    assert capacity_for(129, 128, longest=140) == 192 and capacity_for(200, 128, longest=140) == 256


def test_a_window_is_bounded_whatever_the_text(tiny):
    layer, window = GrowingSlidingLayer(6), 6
    with torch.no_grad():
        for length in (100, *[1] * 300, 50, *[1] * 20):
            keys, _ = layer.update(torch.randn(1, 1, length, 4), torch.randn(1, 1, length, 4))
            assert layer.keys.shape[-2] == window - 1
            assert keys.shape[-2] in (length, window - 1 + length)
    taken = sum(room.nbytes for room in layer.rooms)
    assert taken == 2 * STEP * 4 * 4  # two buffers of 64 tokens, 4 values of 4 bytes


def test_gradients_flow_through_a_growing_cache(tiny):
    model, tokens = tiny(), torch.randint(3, 101, (1, 8), generator=torch.Generator().manual_seed(7))
    gradients = []
    for cuts in ([(0, 8)], [(0, 5), (5, 6), (6, 8)]):
        cache = GrowingCache(model.config)
        logits = torch.cat([model(tokens[:, a:b], cache=cache, use_cache=True).logits for a, b in cuts], 1)
        model.zero_grad()
        logits.square().mean().backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * one.abs().max().clamp(min=1).item())


def test_a_cache_begun_in_inference_mode_goes_on_outside(tiny):
    model, tokens = tiny(), torch.randint(3, 101, (1, 8), generator=torch.Generator().manual_seed(7))
    cache = GrowingCache(model.config)
    with torch.inference_mode():
        model(tokens[:, :5], cache=cache, use_cache=True)
    with torch.no_grad():
        got = model(tokens[:, 5:], cache=cache, use_cache=True).logits
        torch.testing.assert_close(got, model(tokens).logits[:, 5:], rtol=0, atol=1e-5)


def test_a_compiled_static_cache(tiny):
    model = tiny(layer_types=["sliding_attention", "full_attention"], sliding_window=4)
    given = prompt(model, "padded")
    expected = model.generate(**given, use_cache=False).sequences
    compiled = CompileConfig(backend="aot_eager", mode=None)
    compiled._compile_all_devices = True
    got = model.generate(**given, cache_implementation="static", compile_config=compiled)
    assert torch.equal(got.sequences, expected)


@pytest.mark.parametrize("rows", ["one row", "padded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_of_weights_change_nothing_and_end_with_the_text(tiny, monkeypatch, dtype, rows):
    """Two texts on weights that were changed in between, in the way that no counter of versions sees."""
    for name, value in (("SMALLEST", 1), ("STEPS_BEFORE_COPIES", 2)):
        monkeypatch.setattr(inference, name, value)
    monkeypatch.setattr(inference, "is_faster", lambda dtype: cpu_kernels.HAS_ONEDNN)
    monkeypatch.setattr(inference, "columns_are_faster", lambda: cpu_kernels.HAS_ONEDNN)
    monkeypatch.setattr(inference, "sorting_is_faster", lambda dtype: cpu_kernels.HAS_ONEDNN)
    made = []
    for name in ("sorted_copy", "transposed_copy"):
        real = getattr(inference, name)
        monkeypatch.setattr(inference, name, lambda *weights, real=real: made.append(real) or real(*weights))
    model = tiny(attention_bias=True).to(dtype)
    for scale in (1.0, -1.5):
        for parameter in model.parameters():
            parameter.data.mul_(scale)
        given = prompt(model, rows) | {"output_logits": True}
        got = model.generate(**given)
        with monkeypatch.context() as patch:
            patch.setattr(inference, "kind_of_copy", lambda dtype, rows: None)
            patch.setattr(inference, "is_faster", lambda dtype: False)
            expected = model.generate(**given)
        for ours, theirs in zip(got.logits, expected.logits, strict=True):
            atol = 1e-5 * theirs.abs().max().clamp(min=1).item() if dtype is torch.float32 else 0.0
            torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    single = dtype is torch.float32 and rows == "one row"
    kind = cpu_kernels.transposed_copy if single else cpu_kernels.sorted_copy
    assert set(made) == ({kind} if cpu_kernels.HAS_ONEDNN else set())
    assert not inference.GENERATION.texts


@pytest.mark.skipif(not cpu_kernels.HAS_ONEDNN, reason="torch was built without oneDNN")
@torch.no_grad()
def test_a_copy_for_one_row_gives_way_to_one_for_several(monkeypatch):
    """As where drafts come later in a text; and nothing is copied where there is no room."""
    monkeypatch.setattr(inference, "STEPS_BEFORE_COPIES", 2)
    monkeypatch.setattr(inference, "columns_are_faster", lambda: True)
    monkeypatch.setattr(inference, "sorting_is_faster", lambda dtype: True)
    layer = torch.nn.Linear(512, 256)
    asked: list[int] = []

    def prepared(fits):
        made = inference.Prepared()
        made.take = lambda size: fits and not asked.append(size)
        return made

    product = inference.Product([layer], prepared(fits=True))
    kinds = []
    for rows in (1, 1, 1, 1, 4, 1, 4, 4, 4, 1):
        states = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(product(states), layer(states), rtol=0, atol=1e-5)
        kinds.append(type(product.copy).__name__)
    none, columns, in_order = ["NoneType"] * 2, ["Columns"] * 5, ["Sorted"] * 3
    assert kinds == [*none, *columns, *in_order]
    assert asked == [layer.weight.nbytes] * 2
    full = inference.Product([layer], prepared(fits=False))
    for _ in range(5):
        full(states)
    assert full.copy is None


@pytest.mark.skipif(not cpu_kernels.HAS_ONEDNN, reason="torch was built without oneDNN")
@pytest.mark.parametrize(("longest", "steps"), [(inference.LONG_ANSWER - 1, inference.STEPS_BEFORE_COPIES), (64, 1)])
def test_copies_are_made_at_once_where_an_answer_may_become_long(tiny, monkeypatch, longest, steps):
    monkeypatch.setattr(inference, "SMALLEST", 1)
    monkeypatch.setattr(inference, "kind_of_copy", lambda dtype, rows: inference.Sorted)
    made = []
    monkeypatch.setattr(
        inference, "sorted_copy", lambda *weights: made.append(step) or cpu_kernels.sorted_copy(*weights)
    )
    step = 0

    class Counts(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            nonlocal step
            step += 1
            return torch.full((len(input_ids),), step == inference.STEPS_BEFORE_COPIES + 3)

    model = tiny(max_position_embeddings=256)
    criteria = StoppingCriteriaList([Counts()])
    model.generate(
        torch.tensor([[5, 6, 7]]), max_new_tokens=longest, min_new_tokens=longest, stopping_criteria=criteria
    )
    assert set(made) == {steps}


def test_a_step_is_flat_where_it_may_be_and_only_there(tiny):
    """Hooks, adapters and blocks of one's own are seen by every step."""
    flat = []
    tokens = torch.randint(3, 101, (1, 5), generator=torch.Generator().manual_seed(1))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}

    def taken(model):
        flat.clear()
        model.generate(tokens, **options)
        return len(flat)

    real = flat_step.FlatLayer.__call__

    def counted(self, *args):
        flat.append(1)
        return real(self, *args)

    flat_step.FlatLayer.__call__ = counted
    try:
        assert taken(tiny()) == 2 * 3  # two layers, three steps behind the prompt
        assert taken(tiny(position_embedding="alibi")) == taken(tiny(**SPARSE)) == taken(tiny(**LATENT)) == 0
        model, seen = tiny(), []
        model.model.layers[1].mlp.register_forward_hook(lambda *args: seen.append(1))
        assert taken(model) == 0 and len(seen) == 4
        assert taken(tiny().train()) == 0
        bare = tiny()
        bare.model.layers[0].post_attention_layernorm = torch.nn.Identity()
        assert taken(bare) == 2 * 3
        lora = get_peft_model(tiny(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        assert taken(lora) == 0
    finally:
        flat_step.FlatLayer.__call__ = real


def test_a_cache_says_what_it_takes(tiny):
    got = tiny().generate(**prompt(tiny(), "one row")).past_key_values
    assert str(got) == "GrowingCache(2 layers, 3,840 bytes, with room for more in 16,384)"  # 15 of 64 tokens


def test_rows_must_be_as_many_as_the_cache_holds(tiny):
    model, cache = tiny(), GrowingCache(tiny().config)
    with torch.no_grad():
        model(torch.tensor([[5, 6, 7]]), cache=cache, use_cache=True)
        with pytest.raises(ValueError, match="holds 1 rows of 2 heads, and 2 rows"):
            model(torch.tensor([[5], [6]]), cache=cache, use_cache=True)


@torch.no_grad()
def test_copies_of_one_cache_go_on_apart(tiny):
    model, tokens = tiny(), torch.randint(3, 101, (1, 12), generator=torch.Generator().manual_seed(4))
    first = GrowingCache(model.config)
    model(tokens[:, :6], cache=first, use_cache=True)
    second = copy.copy(first)
    second.layers = [copy.copy(layer) for layer in first.layers]
    ways = {0: tokens[:, 6:9], 1: tokens[:, 9:12]}
    got: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for step in range(3):
        for number, cache in enumerate((first, second)):
            got[number].append(model(ways[number][:, step : step + 1], cache=cache, use_cache=True).logits)
    for number, more in ways.items():
        right = model(torch.cat((tokens[:, :6], more), 1)).logits[:, 6:]
        torch.testing.assert_close(torch.cat(got[number], 1), right, rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", ["weights", "hook", "adapter"])
def test_what_changes_between_texts_is_seen_while_another_text_is_written(tiny, monkeypatch, change):
    """A text in another thread keeps nothing alive for this one."""
    monkeypatch.setattr(inference, "SMALLEST", 1)
    monkeypatch.setattr(inference, "STEPS_BEFORE_COPIES", 1)
    begun, finish = threading.Event(), threading.Event()

    class Waits(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            begun.set()
            finish.wait(60)
            return torch.ones(len(input_ids), dtype=torch.bool)

    other, model = tiny(seed=1), tiny().bfloat16()
    run_other = threading.Thread(
        target=lambda: other.generate(torch.tensor([[5, 6]]), stopping_criteria=StoppingCriteriaList([Waits()]))
    )
    run_other.start()
    try:
        assert begun.wait(60)
        given = prompt(model, "one row") | {"output_logits": True}
        model.generate(**given)
        seen = []
        if change == "weights":
            for parameter in model.parameters():
                parameter.data.mul_(-1.5)
        elif change == "hook":
            model.model.layers[0].mlp.register_forward_hook(lambda *args: seen.append(1))
        else:
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
        got = model.generate(**given)
    finally:
        finish.set()
        run_other.join()
    assert change != "hook" or len(seen) == NEW
    again = model.generate(**given, use_cache=False)  # no step of it is flat
    assert (got.logits[1] - again.logits[1]).abs().max() <= 0.05 * again.logits[1].abs().max()  # in 16 bits


@torch.no_grad()
def test_a_bias_with_strides_is_read_as_it_is():
    layer = torch.nn.Linear(256, 256)
    for bias in (layer.weight.detach()[:, 3], torch.tensor(2.5).expand(256)):
        got = cpu_kernels.linear(torch.ones(2, 256), layer.weight, bias)
        torch.testing.assert_close(got, torch.nn.functional.linear(torch.ones(2, 256), layer.weight, bias))
