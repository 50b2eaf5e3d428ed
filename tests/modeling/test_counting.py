"""What a config says about itself, against the built model and published figures."""

import math

import pytest
import torch
from test_model import VARIANTS
from torch.utils.flop_counter import FlopCounterMode

from anyformer import AnyformerConfig
from anyformer.modeling import HEADS
from anyformer.recipes.loading import load_preset, shipped

LATENT = {"attention": "mla", "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MORE = {
    "latent": LATENT | {"num_key_value_heads": None},
    "experts": EXPERTS | {"first_k_dense_replace": 1, "shared_expert_intermediate_size": 12},
    "alibi": {"position_embedding": "alibi"},
    "parallel": {"norm_position": "parallel", "position_embedding": "learned", "qk_norm": "full"},
}
DECODERS = VARIANTS | MORE


@pytest.mark.parametrize("fields", DECODERS.values(), ids=DECODERS.keys())
def test_flops_and_cache_of_each_variant(tiny, fields):
    # torch counts neither the CPU kernel of sdpa nor grouped products
    model = tiny(attn_implementation="eager", **fields)
    model.set_experts_implementation("batched_mm")
    counts = model.config.counts(sequence_length=24)
    assert counts.total_parameters == sum(p.numel() for p in model.parameters())
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        cache = model(torch.ones(1, 24, dtype=torch.long)).cache
    assert counter.get_total_flops() == pytest.approx(counts.forward_flops, rel=0.01)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    assert held == 24 * counts.cache_bytes_per_token(4)


@pytest.mark.parametrize(("head", "architecture"), [("masked_lm", "encoder"), ("seq2seq_lm", "encoder-decoder")])
def test_flops_of_the_other_shapes(tiny, head, architecture):
    model = tiny(head=head, architecture=architecture, attn_implementation="eager", decoder_start_token_id=1)
    tokens = torch.ones(1, 24, dtype=torch.long)
    counts = model.config.counts(sequence_length=24, head=head)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(tokens, **({"decoder_input_ids": tokens} if head == "seq2seq_lm" else {}))
    assert counter.get_total_flops() == pytest.approx(counts.forward_flops, rel=0.01)


# Published counts; of encoders the body with its pooler.
KNOWN = {
    "bart-base": 139_420_416 + 50_265,  # with the bias of the head
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "gemma2-9b": 9_241_705_984,
    "gpt2": 124_439_808,
    "llama-2-7b": 6_738_415_616,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    # By hand: tables of tokens, positions and types with their norm, four layers of weights and biases, pooler.
    "mini-bert": (2048 + 128 + 2) * 256 + 512 + 4 * (262_144 + 1024 + 524_288 + 1280 + 1024) + 65_792,
    "mini-gpt": 19_665_408,
    # By hand: one table, four layers of attention, gated feed-forward and two norms, the last norm.
    "mini-llama": 2048 * 320 + 4 * (409_600 + 860_160 + 640) + 320,
    # By hand: the shared table, three encoder and three decoder layers, two last norms.
    "mini-transformer": 32000 * 128 + 3 * (65_536 + 131_712 + 512) + 3 * (131_072 + 131_712 + 768) + 512,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "mpt-7b": 6_649_286_656,
    "qwen3-8b": 8_190_735_360,
    "smollm2-135m": 134_515_008,
    "t5-base": 222_903_552,
}
# Published in words; (total, active) in billions.
ROUNDED = {"gpt3-175b": (175, 175), "deepseek-v3": (671, 37), "transformer-big": (0.214, 0.214)}
ROUNDED |= {"transformer-base": (0.063, 0.063), "mixtral-8x7b": (46.7, 12.9)}


def test_every_preset_is_checked():
    assert set(shipped("models")) == set(KNOWN) | set(ROUNDED)


@pytest.mark.parametrize("name", shipped("models"))
def test_presets_build_and_count_as_published(name):
    config = AnyformerConfig(**load_preset(name))
    counts = config.counts()
    head = {"decoder": "causal_lm", "encoder": "base", "encoder-decoder": "seq2seq_lm"}[config.architecture]
    with torch.device("meta"):
        model = HEADS[head](config)
    model.tie_weights()
    assert counts.total_parameters == sum(p.numel() for p in model.parameters())
    assert counts.total_parameters == KNOWN.get(name, counts.total_parameters)
    if name in ROUNDED:
        total, active = ROUNDED[name]
        assert counts.total_parameters / 1e9 == pytest.approx(total, rel=0.005)
        assert counts.active_parameters / 1e9 == pytest.approx(active, rel=0.02)


def test_parts_of_a_preset():
    parts = AnyformerConfig(**load_preset("llama-3-70b")).counts().parameters
    assert parts["mlp"] == 80 * 3 * 8192 * 28672
    assert parts["embeddings"] == parts["head"] == 128256 * 8192
    assert parts["norms"] == 161 * 8192
    assert math.isclose(parts["mlp"] / sum(parts.values()), 0.799, abs_tol=5e-4)


def test_llama_3_70b_cache_at_32768_tokens_in_half_precision():
    counts = AnyformerConfig(**load_preset("llama-3-70b")).counts()
    assert 32768 * counts.cache_bytes_per_token(2) == 10_737_418_240


def test_deepseek_v3_keeps_576_values_a_token_and_layer():
    assert AnyformerConfig(**load_preset("deepseek-v3")).counts().cache_values_per_token == 61 * 576


def test_a_registered_block_counts_by_itself(tiny):
    from anyformer.modeling import MLPS
    from anyformer.modeling.mlp import GatedMLP

    class Wide(GatedMLP):
        def __init__(self, config, size=None):
            super().__init__(config, 2 * config.intermediate_size)

    MLPS.register("test_wide")(Wide)
    plain, wide = tiny().config.counts().parameters, tiny(mlp="test_wide").config.counts().parameters
    assert wide["mlp"] == 2 * plain["mlp"]
