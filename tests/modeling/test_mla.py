"""Multi-head latent attention: the absorbed way against the expanded one, what the cache holds, and who may absorb."""

import itertools

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_model import ids
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from anyformer import AnyformerConfig
from anyformer.modeling.mla import LatentAttention
from anyformer.recipes.loading import load_preset

# Weights a little smaller than the other tests', so that logits stay below 5 and 1e-5 is a bound for fp32.
LATENT = {
    "attention": "mla",
    "num_key_value_heads": None,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "initializer_range": 0.2,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "mscale_all_dim": 1.0}
WIDTH = 16 + 8
CUTS = ((0, 5), (5, 6), (6, 10), (10, 11))  # one query, and several at once behind a context
GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


@pytest.fixture
def way(monkeypatch):
    """Forces the absorbed way (True) or the expanded one (False), or leaves the choice (None); `taken` lists calls."""
    choose = LatentAttention._absorbing_pays

    def force(absorbs):
        pays = choose if absorbs is None else lambda *_: absorbs
        monkeypatch.setattr(LatentAttention, "_absorbing_pays", pays)
        force.taken.clear()

    def watched(name):
        real = getattr(LatentAttention, name)

        def spy(self, *args, **kwargs):
            force.taken.append(name)
            return real(self, *args, **kwargs)

        return spy

    force.taken = []
    for name in ("_absorbed", "_expanded"):
        monkeypatch.setattr(LatentAttention, name, watched(name))
    return force


def new_cache(model, kind):
    return DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=24)


def in_parts(model, tokens, mask, kind):
    """The logits of a row that is read in parts into a cache."""
    cache = new_cache(model, kind)
    parts = []
    for start, end in CUTS:
        seen = None if mask is None else mask[:, :end]
        parts.append(model(tokens[:, start:end], attention_mask=seen, cache=cache).logits)
    return torch.cat(parts, 1)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("fields", [{}, {"q_lora_rank": None, "rope_parameters": YARN}], ids=["plain", "yarn"])
def test_absorbed_equals_expanded_and_uncached(tiny, way, fields, backend, kind, padded):
    model = tiny(attn_implementation=backend, **(LATENT | fields))
    tokens, mask = ids(2, CUTS[-1][1]), None
    if padded:
        mask = torch.ones_like(tokens)
        mask[1, :3] = 0
    real = torch.ones_like(tokens).bool() if mask is None else mask.bool()
    uncached = model(tokens, attention_mask=mask, use_cache=False).logits
    way(True)
    absorbed = in_parts(model, tokens, mask, kind)
    assert way.taken == ["_absorbed"] * 2 * len(CUTS)
    way(False)
    expanded = in_parts(model, tokens, mask, kind)
    assert way.taken == ["_expanded"] * 2 * len(CUTS)
    torch.testing.assert_close(absorbed[real], expanded[real], rtol=0, atol=1e-5)
    torch.testing.assert_close(absorbed[real], uncached[real], rtol=0, atol=1e-5)


def test_prefill_of_a_static_cache_does_not_look_ahead(tiny, way):
    # sdpa gets no mask here although most places of the cache are empty, and the absorbed way is the cheaper one.
    model = tiny(**LATENT)
    tokens = ids(2, 6)
    way(None)
    got = model(tokens, cache=StaticCache(model.config, max_cache_len=64)).logits
    assert way.taken == ["_absorbed"] * 2
    torch.testing.assert_close(got, model(tokens, use_cache=False).logits, rtol=0, atol=1e-5)


def test_softcap_and_sinks_are_absorbed_too(tiny, way):
    fields = LATENT | {"attn_logit_softcapping": 1.5, "attention_sinks": True}
    model = tiny(attn_implementation="eager", **fields)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.sinks.data, std=2.0)
    tokens = ids(2, CUTS[-1][1])
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    logits = {}
    for absorbs, kind in itertools.product((True, False), ("dynamic", "static")):
        way(absorbs)
        logits[absorbs, kind] = in_parts(model, tokens, mask, kind)[mask.bool()]
    for kind in ("dynamic", "static"):
        torch.testing.assert_close(logits[True, kind], logits[False, kind], rtol=0, atol=1e-5)
    way(True)
    for name, value in (("attn_logit_softcapping", None), ("sinks", None)):
        changed = tiny(attn_implementation="eager", **fields)
        changed.load_state_dict(model.state_dict())
        for layer in changed.model.layers:
            owner = changed.config if name == "attn_logit_softcapping" else layer.self_attn
            setattr(owner, name, value)
        without = in_parts(changed, tokens, mask, "dynamic")[mask.bool()]
        assert (without - logits[True, "dynamic"]).abs().max() > 1e-2, f"{name} changes nothing here"


@pytest.mark.parametrize("absorbs", [True, False], ids=["absorbed", "expanded"])
def test_the_cache_holds_latents_and_rotary_keys_alone(tiny, way, absorbs):
    model = tiny(**LATENT)
    way(absorbs)
    assert model.config.counts().cache_values_per_token == 2 * WIDTH
    for kind, places in (("dynamic", 11), ("static", 24)):
        cache = new_cache(model, kind)
        for start, end in CUTS:
            model(ids(2, 11)[:, start:end], cache=cache)
        for layer in cache.layers:
            assert layer.keys.numel() + layer.values.numel() == 2 * places * WIDTH, kind
            stored = layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes()
            assert stored == 2 * places * WIDTH * 4, f"{kind}: a view of something larger"


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_generate_keeps_latents_and_absorbs(tiny, way, kind):
    model = tiny(**LATENT)
    tokens = ids(2, 30)
    options = GREEDY | {"attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, use_cache=False, **options)
    way(None)
    output = model.generate(tokens, cache_implementation=kind, return_dict_in_generate=True, **options)
    assert torch.equal(output.sequences, expected)
    assert way.taken == ["_expanded"] * 2 + ["_absorbed"] * 2 * 7  # the last token is not read
    for layer in output.cache.layers:
        places = layer.keys.shape[2]
        assert places == 37
        assert layer.keys.numel() + layer.values.numel() == 2 * places * WIDTH


def test_an_adapter_on_the_up_projection_is_not_absorbed_away(tiny, way):
    model = tiny(**LATENT)
    tokens = ids(2, 30)
    options = GREEDY | {"attention_mask": torch.ones_like(tokens)}
    way(None)
    plain = model.generate(tokens, **options)
    assert "_absorbed" in way.taken
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules=["kv_b_proj"], init_lora_weights=False)).eval()
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=1.0)
    expected = tuned.generate(input_ids=tokens, use_cache=False, **options)
    assert not torch.equal(expected, plain), "the adapter changes nothing here"
    for kind in ("dynamic", "static"):
        way(None)
        assert torch.equal(tuned.generate(input_ids=tokens, cache_implementation=kind, **options), expected), kind
        assert set(way.taken) == {"_expanded"}
    way(None)
    assert torch.equal(tuned.merge_and_unload().generate(tokens, **options), expected)
    assert "_absorbed" in way.taken, "a merged adapter is a plain projection again"


def test_a_4_bit_up_projection_is_not_absorbed(tiny, way):
    reason = "needs 4-bit weights: pip install 'anyformer[quantization]'"
    bitsandbytes = pytest.importorskip("bitsandbytes", reason=reason)
    model = tiny(**LATENT)
    for layer in model.model.layers:
        old = layer.self_attn.kv_b_proj
        new = bitsandbytes.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        new.support_avx512bf16_for_cpu = False  # its kernel computes in bf16
        new.weight = bitsandbytes.nn.Params4bit(old.weight.data, requires_grad=False, quant_type="nf4")
        layer.self_attn.kv_b_proj = new.to("cpu").eval()
        assert layer.self_attn.kv_b_proj.weight.dtype == torch.uint8
    tokens = ids(2, 30)
    options = GREEDY | {"attention_mask": torch.ones_like(tokens)}
    expected = model.generate(tokens, use_cache=False, **options)
    way(None)
    assert torch.equal(model.generate(tokens, **options), expected)
    assert set(way.taken) == {"_expanded"}


def test_hooks_and_weights_of_another_class_keep_the_projection_whole(tiny):
    model = tiny(**LATENT)
    attention = model.model.layers[0].self_attn
    assert attention._absorbing_pays(1, 64, None)
    seen = []
    for register in (attention.kv_b_proj.register_forward_hook, attention.kv_b_proj.register_forward_pre_hook):
        handle = register(lambda *call: seen.append(call))
        cache = DynamicCache(config=model.config)
        model(ids(1, 30), cache=cache)
        seen.clear()
        model(ids(1, 1), cache=cache)
        assert len(seen) == 1, "a hook does not see the decoding step"
        handle.remove()
    assert attention._absorbing_pays(1, 64, None)

    class Packed(torch.Tensor):
        """As the weights of quantisers that leave the module an nn.Linear."""

    attention.kv_b_proj.weight = nn.Parameter(attention.kv_b_proj.weight.data.as_subclass(Packed))
    assert not attention._absorbing_pays(1, 64, None)


def test_an_attention_function_of_the_user_sees_every_step(tiny):
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("counting", counting)
    AttentionMaskInterface.register("counting", sdpa_mask)
    model = tiny(attn_implementation="counting", **LATENT)
    got = in_parts(model, ids(2, 11), None, "dynamic")
    assert len(calls) == 2 * len(CUTS)
    torch.testing.assert_close(got, tiny(**LATENT)(ids(2, 11)).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("absorbs", [True, False], ids=["absorbed", "expanded"])
def test_gradients_through_a_cache(tiny, way, absorbs):
    tokens = ids(2, 11)
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0

    def gradients(model, cached):
        if cached:
            cache = DynamicCache(config=model.config)
            model(tokens[:, :7], attention_mask=mask[:, :7], cache=cache)
            logits = model(tokens[:, 7:], attention_mask=mask, cache=cache).logits
        else:
            logits = model(tokens, attention_mask=mask, use_cache=False).logits[:, 7:]
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 7:].flatten()).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    way(absorbs)
    got = gradients(tiny(**LATENT).train(), cached=True)
    assert set(way.taken) == {"_absorbed" if absorbs else "_expanded"}
    expected = gradients(tiny(**LATENT).train(), cached=False)
    for name, gradient in expected.items():
        assert got[name] is not None and got[name].isfinite().all(), name
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-5, msg=name)
        assert gradient.abs().sum() > 0, name


def test_absorbing_pays_where_deepseek_v3_decodes():
    with torch.device("meta"):
        attention = LatentAttention(AnyformerConfig(**load_preset("deepseek-v3")), 0)
    assert (attention.heads, attention.rank, attention.nope_dim, attention.rope_dim) == (128, 512, 128, 64)
    assert attention._absorbing_pays(1, 4096, None)
    assert attention._absorbing_pays(4, 4096, None), "a few speculated tokens"
    assert not attention._absorbing_pays(4096, 4096, None)
    assert not attention._absorbing_pays(1024, 8192, None), "a long chunk behind a context"
    assert not attention._absorbing_pays(1, 4096, object()), "a block mask is for the kernel that built it"


def test_a_decoding_step_makes_nothing_larger_than_the_scores(tiny):
    # As matmul would, by copying the up-projection for each row of the batch.
    model = tiny(**LATENT)
    attention, batch = model.model.layers[0].self_attn, 64
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            made = function(*args, **(kwargs or {}))
            if isinstance(made, torch.Tensor):
                largest = max(largest, made.untyped_storage().nbytes() // made.element_size())
            return made

    latent, rope_key = torch.randn(batch, 1, 12, 16), torch.randn(batch, 1, 12, 8)
    nope, rope = torch.randn(batch, 4, 1, 6), torch.randn(batch, 4, 1, 8)
    with torch.no_grad(), Watch():
        attention._absorbed(nope, rope, latent, rope_key, None)
    assert largest <= latent.numel(), "a temporary tensor is larger than the cached latents"
    assert largest < batch * attention.kv_b_proj.weight.numel() // 4
