import json

import pytest
from huggingface_hub.errors import StrictDataclassError

from anyformer import AnyformerConfig

TINY = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}

LATENT = {"attention": "mla", "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
NESTED = {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e3}}
IMPOSSIBLE = [
    ({"hidden_size": "32"}, ["hidden_size", "int", "'32'"]),
    ({"hidden_size": True}, ["hidden_size", "expected int, got bool"]),
    ({"hidden_size": 0}, ["hidden_size=0", "at least 1"]),
    ({"num_attention_heads": 0}, ["num_attention_heads=0"]),
    ({"num_hidden_layers": -1}, ["num_hidden_layers=-1"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4", "[1, 2, 4]"]),
    ({"hidden_size": 33}, ["hidden_size=33", "num_attention_heads=4", "head_dim"]),
    ({"head_dim": 7}, ["head_dim=7", "even"]),
    ({"norm": "rms_norm"}, ["norm='rms_norm'", "rmsnorm"]),
    ({"mlp": "swiglu"}, ["mlp='swiglu'", "gated, dense"]),
    ({"attention": "mla2"}, ["attention='mla2'"]),
    ({"position_embedding": "rotary"}, ["position_embedding='rotary'", "rope"]),
    ({"norm_position": "before"}, ["norm_position='before'", "pre"]),
    ({"hidden_act": "sillu"}, ["hidden_act='sillu'", "silu"]),
    ({"attention_dropout": 1.0}, ["attention_dropout=1.0", "below 1"]),
    ({"hidden_dropout": -0.1}, ["hidden_dropout=-0.1"]),
    ({"norm_eps": 0.0}, ["norm_eps=0.0"]),
    ({"norm_eps": float("nan")}, ["norm_eps=nan"]),
    ({"initializer_range": -1}, ["initializer_range=-1"]),
    ({"eos_token_id": 50}, ["eos_token_id=50", "0 to 49"]),
    ({"eos_token_id": [1, 99]}, ["eos_token_id=99"]),
    ({"pad_token_id": -1}, ["pad_token_id=-1", "null"]),
    ({"use_cache": "yes"}, ["use_cache", "bool"]),
    ({"rope_parameters": {"rope_type": "yarm"}}, ["yarm", "yarn"]),
    ({"rope_parameters": {"rope_type": "yarn"}}, ["factor", "missing"]),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, ["factor=0.5", "at least 1"]),
    ({"rope_parameters": {"rope_type": "linear", "factor": "2"}}, ["factor='2'"]),
    ({"rope_parameters": {"rope_type": "default", "factor": 2}}, ["factor=2", "not used"]),
    ({"rope_parameters": {"rope_teta": 5}}, ["rope_teta", "rope_theta"]),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}},
        ["short_factor", "head_dim / 2 = 4"],
    ),
    (
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8,
                "low_freq_factor": 4,
                "high_freq_factor": 1,
            }
        },
        ["high_freq_factor=1", "low_freq_factor=4"],
    ),
    ({"rope_parameters": {"rope_theta": float("inf")}}, ["rope_theta=inf"]),
    ({"rope_parameters": {"rope_theta": None}}, ["rope_theta", "missing"]),
    ({"rope_parameters": {"rope_type": "linear", "factor": None}}, ["factor", "missing"]),
    ({"rope_parameters": {"rope_type": ["linear"]}}, ["rope_type=['linear']"]),
    ({"rope_parameters": {"rope_type": "default", "type": "linear"}}, ["type='linear'", "contradicts"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "rope_theta": 1}}, ["rope_theta=1", "above 1"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "mscale": float("nan")}}, ["mscale=nan"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "truncate": "no"}}, ["truncate='no'"]),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 1, "beta_slow": 9}}, ["beta_fast=1"]),
    (
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [0.0] * 4, "long_factor": [1.0] * 4}},
        ["short_factor", "above 0"],
    ),
    ({"head_dim": 2, "rope_parameters": {"rope_type": "dynamic", "factor": 2}}, ["head_dim=2", "exceed 2"]),
    ({"attention": "mla"}, ["attention='mla' needs kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim"]),
    (LATENT | {"position_embedding": "alibi"}, ["position_embedding='alibi'", "use 'rope'"]),
    (LATENT | {"qk_norm": "head"}, ["qk_norm='head' has no place"]),
    (LATENT | {"num_key_value_heads": 2}, ["num_key_value_heads=2", "leave it out"]),
    (LATENT | {"head_dim": 8}, ["head_dim=8 contradicts qk_rope_head_dim=4"]),
    (LATENT | {"architecture": "encoder"}, ["attention='mla'", "encoder", "use 'gqa'"]),
    ({"kv_lora_rank": 8}, ["only attention='mla' has kv_lora_rank, not 'gqa'"]),
    ({"layer_types": ["sliding_atention"]}, ["'sliding_atention'", "did you mean 'sliding_attention'?"]),
    ({"layer_types": ["sliding_attention"]}, ["sliding_window is not set"]),
    ({"layer_types": ["full_attention"] * 3}, ["layer_types has 3 entries for num_hidden_layers=2"]),
    ({"layer_types": ["full_attention"], "sliding_window": 4}, ["sliding_window=4 is used by no layer"]),
    ({"sliding_window": 1}, ["sliding_window=1 must be at least 2"]),
    ({"layer_types": ["global_sliding_attention"], "sliding_window": 4}, ["num_global_tokens is 0"]),
    ({"num_global_tokens": 2}, ["num_global_tokens=2 is used by no layer"]),
    ({"num_experts_per_tok": 3}, ["num_experts_per_tok=3 needs experts"]),
    ({"moe_intermediate_size": 8}, ["moe_intermediate_size=8 needs experts"]),
    ({"first_k_dense_replace": 3}, ["first_k_dense_replace=3 exceeds num_hidden_layers=2"]),
    ({"first_norm": False, "norm_position": "post"}, ["first_norm=False", "'post'"]),
    ({"position_offset": 2}, ["position_offset=2 belongs to position_embedding='learned'"]),
    ({"no_rope_layers": [1]}, ["no_rope_layers=[1]", "num_hidden_layers=2"]),
    ({"no_rope_layers": [1, 2]}, ["must hold 0 or 1"]),
    ({"rope_thetas": [100, 1]}, ["rope_thetas holds 1", "above 1"]),
    ({"rope_thetas": [100] * 3}, ["rope_thetas has 3 entries for num_hidden_layers=2"]),
    ({"rope_thetas": [100], "position_embedding": "alibi"}, ["rope_thetas belongs to position_embedding='rope'"]),
    ({"position_embedding": "sinusoidal", "hidden_size": 33, "head_dim": 8}, ["hidden_size=33 must be even"]),
    ({"position_embedding": "relative", "relative_attention_num_buckets": 1}, ["num_buckets=1 must be at least"]),
    ({"position_embedding": "relative", "relative_attention_max_distance": 16}, ["must exceed half"]),
    ({"alibi_bias_max": 4}, ["alibi_bias_max=4 belongs to position_embedding='alibi'"]),
    ({"swiglu_limit": 1.0}, ["swiglu_limit=1.0 belongs to mlp='clamped'"]),
    ({"mlp_layer_types": ["sparse"]}, ["holds 'sparse' but num_experts is 0"]),
    ({"router": "sigmoid"}, ["router='sigmoid' needs experts"]),
    ({"router_aux_loss_coef": 0.1}, ["router_aux_loss_coef=0.1 needs experts"]),
    ({"shared_expert_intermediate_size": 8}, ["shared expert needs experts"]),
    ({"num_experts": 4, "mlp_layer_types": ["dense"]}, ["num_experts=4 is used by no layer"]),
    ({"num_experts": 4, "num_experts_per_tok": 5}, ["num_experts_per_tok=5 exceeds num_experts=4"]),
    ({"num_experts": 4, "n_group": 3}, ["n_group=3 must divide num_experts=4"]),
    ({"num_experts": 4, "n_group": 2, "topk_group": 3}, ["topk_group=3 exceeds n_group=2"]),
    ({"num_experts": 4, "n_group": 4, "topk_group": 1}, ["num_experts_per_tok=2 exceeds the 1 experts"]),
    (
        {"num_experts": 4, "n_group": 4, "topk_group": 2, "group_score": "top2"},
        ["group_score='top2' needs at least two experts a group"],
    ),
    ({"num_experts": 4, "router_bias_update_rate": 0.1}, ["router_bias_update_rate needs router_score_bias"]),
    ({"num_experts": 4, "shared_expert_gate": True}, ["shared_expert_gate=True needs"]),
    ({"pooler": True}, ["pooler=True belongs to architecture='encoder'"]),
    ({"num_encoder_layers": 3}, ["num_encoder_layers=3 belongs to architecture='encoder-decoder'"]),
    ({"share_embeddings": False}, ["share_embeddings=False belongs"]),
    ({"architecture": "encoder-decoder", "type_vocab_size": 2}, ["type_vocab_size=2 has no place"]),
    ({"architecture": "encoder-decoder", "norm_position": "parallel"}, ["norm_position='parallel'", "cross-attention"]),
    ({"decoder_start_token_id": 50}, ["decoder_start_token_id=50"]),
    ({"attn_logit_softcapping": 0.0}, ["attn_logit_softcapping=0.0", "above 0"]),
    ({"logit_scale": float("nan")}, ["logit_scale=nan"]),
    ({"initializer_ranges": {"heads": 0.1}}, ["initializer_ranges names 'heads'", "head"]),
    ({"initializer_ranges": {"mlp": -1.0}}, ["initializer_ranges.mlp=-1.0"]),
    ({"problem_type": "single_label"}, ["problem_type"]),
    ({"num_labels": 0}, ["num_labels=0"]),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, ["partial_rotary_factor=1.5"]),
    ({"rope_parameters": {"partial_rotary_factor": 0.4}}, ["must be even"]),
    ({"rope_parameters": NESTED | {"factor": 2}}, ["mixes layer types with ['factor']"]),
    (
        {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}},
        ["rope_parameters.full_attention is missing"],
    ),
    ({"rope_parameters": NESTED | {"sliding_attention": 3}}, ["must be a mapping"]),
    ({"architecture": "decoder-only"}, ["architecture='decoder-only'", "did you mean 'decoder'?"]),
]


@pytest.mark.parametrize(("fields", "words"), IMPOSSIBLE, ids=lambda v: str(v)[:50])
def test_impossible_config_names_field_value_and_remedy(fields, words):
    with pytest.raises(StrictDataclassError) as error:
        AnyformerConfig(**(TINY | fields))
    for word in words:
        assert word in str(error.value)


def test_all_impossible_values_are_named_at_once():
    with pytest.raises(StrictDataclassError) as error:
        AnyformerConfig(**TINY, num_key_value_heads=3, norm="x", hidden_dropout=2)
    assert all(name in str(error.value) for name in ("num_key_value_heads=3", "norm='x'", "hidden_dropout=2"))


def test_misspelt_field_is_refused_with_the_nearest():
    with pytest.raises(TypeError, match=r"'hiden_size' \(value 3\).*did you mean 'hidden_size'"):
        AnyformerConfig(hiden_size=3)


def test_misspelt_override_is_refused(tmp_path):
    AnyformerConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="did you mean 'num_hidden_layers'"):
        AnyformerConfig.from_pretrained(tmp_path, num_hiden_layers=3)
    with pytest.raises(StrictDataclassError, match="num_key_value_heads=4 must divide num_attention_heads=6"):
        AnyformerConfig.from_pretrained(tmp_path, num_attention_heads=6)
    assert AnyformerConfig.from_pretrained(tmp_path, num_hidden_layers=3).num_hidden_layers == 3
    # Programs hand the config what is meant for the weights, `transformers serve` among them.
    assert not hasattr(AnyformerConfig.from_pretrained(tmp_path, device_map="auto", gguf_file=None), "device_map")


def test_misspelt_field_in_config_json_is_refused(tmp_path):
    AnyformerConfig(**TINY).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropuot": 0.1}))
    with pytest.raises(TypeError, match="attention_dropout"):
        AnyformerConfig.from_pretrained(tmp_path)


def test_an_impossible_value_set_later_is_caught_when_saved_or_built(tmp_path):
    from anyformer import AnyformerForCausalLM

    config = AnyformerConfig(**TINY)
    config.num_key_value_heads = 3
    with pytest.raises(StrictDataclassError, match="num_key_value_heads=3"):
        AnyformerForCausalLM(config)
    with pytest.raises(StrictDataclassError, match="num_key_value_heads=3"):
        config.save_pretrained(tmp_path)


def test_round_trip_keeps_every_field(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    config = AnyformerConfig(
        **TINY, rope_parameters=rope, mlp="dense", norm="layernorm", attention_bias=True, rms_norm_eps=1e-5
    )
    config.save_pretrained(tmp_path)
    again = AnyformerConfig.from_pretrained(tmp_path)
    ours, theirs = config.to_dict(), again.to_dict()
    assert ours == theirs
    assert again.norm_eps == again.rms_norm_eps == 1e-5
    assert again.attention_out_bias is True
    assert again.rope_parameters["original_max_position_embeddings"] == 2048


def test_defaults_are_derived():
    config = AnyformerConfig(**TINY)
    assert (config.head_dim, config.num_key_value_heads, config.intermediate_size) == (8, 4, 128)
    assert AnyformerConfig(**TINY, position_embedding="none", head_dim=7).rope_parameters is None


@pytest.mark.parametrize(
    "fields",
    [
        {"norm_eps": 1e-5, "rms_norm_eps": 1e-3},
        {"num_experts": 4, "num_local_experts": 8},
        {"is_encoder_decoder": True},
        {"rms_norm_eps": 1e-5, "layer_norm_eps": 1e-3},
        {"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 7.0},
        {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_two_names_of_one_field_must_agree(fields):
    with pytest.raises(TypeError, match="alone"):
        AnyformerConfig(**TINY, **fields)


def test_an_override_of_the_rotary_base_is_refused_not_dropped(tmp_path):
    AnyformerConfig(**TINY).save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="override rope_parameters"):
        AnyformerConfig.from_pretrained(tmp_path, rope_theta=7.0)
    with pytest.raises(StrictDataclassError, match="rope_theta is missing"):
        AnyformerConfig.from_pretrained(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2.0})


def test_the_rope_parameters_passed_in_are_left_alone():
    rope = {"rope_type": "yarn", "factor": 4.0}
    config = AnyformerConfig(**TINY, rope_parameters=rope)
    assert rope == {"rope_type": "yarn", "factor": 4.0}
    assert config.rope_parameters["original_max_position_embeddings"] == 2048


def test_patterns_are_repeated_and_written_out():
    fields = TINY | {"num_hidden_layers": 5, "sliding_window": 4, "num_experts": 4, "first_k_dense_replace": 1}
    config = AnyformerConfig(
        **fields, layer_types=["sliding_attention", "full_attention"], mlp_layer_types=["sparse", "dense"]
    )
    assert config.layer_types == ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    assert config.mlp_layer_types == ["dense", "dense", "sparse", "dense", "sparse"]
    assert AnyformerConfig(**TINY, sliding_window=4).layer_types == ["sliding_attention"] * 2
    assert AnyformerConfig(**TINY).layer_types == ["full_attention"] * 2


def test_overrides_take_what_follows_from_them_along(tmp_path):
    AnyformerConfig(**TINY, num_experts=4).save_pretrained(tmp_path)
    config = AnyformerConfig.from_pretrained(tmp_path, num_hidden_layers=3, first_k_dense_replace=1)
    assert config.mlp_layer_types == ["dense", "sparse", "sparse"]
    assert config.num_encoder_layers == len(config.layer_types) == 3
    with pytest.raises(StrictDataclassError, match="is_encoder_decoder=True contradicts"):
        AnyformerConfig.from_pretrained(tmp_path, is_encoder_decoder=True)


def test_rope_parameters_without_rotation_are_refused():
    with pytest.raises(TypeError, match="belong to position_embedding='rope', not to 'learned'"):
        AnyformerConfig(**TINY, position_embedding="learned", rope_parameters={"rope_theta": 5.0})
    with pytest.raises(TypeError, match="belong to position_embedding='rope'"):
        AnyformerConfig(**TINY, position_embedding="alibi", rope_theta=5.0)
