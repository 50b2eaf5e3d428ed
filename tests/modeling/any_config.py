"""Random valid configs over the whole space, and tiny models of them."""

from hypothesis import strategies as st

VOCABULARY, LENGTH = 61, 9
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "proportional", "factor": 2.0},
]
ACTIVATIONS = ["relu", "gelu", "gelu_pytorch_tanh", "quick_gelu", "silu", "relu2"]
NORMS = ["rmsnorm", "rmsnorm_offset", "rmsnorm_plain", "layernorm", "layernorm_nobias"]
NORMS += ["layernorm_offset", "layernorm_plain"]


@st.composite
def rope_parameters(draw):
    rope = dict(draw(st.sampled_from(ROPES)), rope_theta=draw(st.sampled_from([100.0, 10000.0])))
    if draw(st.booleans()):
        rope["partial_rotary_factor"] = 0.5
    return rope


@st.composite
def attention_fields(draw, architecture):
    heads, head_dim = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([4, 8]))
    fields = {
        "num_attention_heads": heads,
        "attention_bias": draw(st.booleans()),
        "attention_out_bias": draw(st.booleans()),
        "attention_sinks": draw(st.booleans()),
        "attn_logit_softcapping": draw(st.sampled_from([None, None, 5.0])),
        "attention_multiplier": draw(st.sampled_from([None, 0.3])),
    }
    if architecture != "encoder" and draw(st.integers(0, 3)) == 0:
        latent = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": head_dim, "v_head_dim": 6}
        return fields | latent | {"attention": "mla", "q_lora_rank": draw(st.sampled_from([None, 10]))}
    return fields | {
        "head_dim": head_dim,
        "num_key_value_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
        "qk_norm": draw(st.sampled_from(["none", "none", "head", "separate", "full"])),
        "clip_qkv": draw(st.sampled_from([None, 0.8])),
    }


@st.composite
def position_fields(draw, layers, latent, sliding):
    kinds = ["rope"] if latent else ["rope", "rope", "learned", "sinusoidal", "alibi", "relative", "none"]
    kind = draw(st.sampled_from(kinds))
    fields = {"position_embedding": kind, "position_layout": draw(st.sampled_from(["half", "interleaved"]))}
    if kind == "rope":
        fields["rope_parameters"] = draw(rope_parameters())
        if sliding and draw(st.booleans()):
            both = ("full_attention", "sliding_attention")
            fields["rope_parameters"] = {name: draw(rope_parameters()) for name in both}
        if draw(st.booleans()):
            fields["no_rope_layers"] = draw(st.lists(st.integers(0, 1), min_size=layers, max_size=layers))
        if draw(st.integers(0, 3)) == 0:
            fields["rope_thetas"] = draw(st.lists(st.sampled_from([100, 5000.0]), min_size=1, max_size=layers))
    if kind == "learned":
        fields["position_offset"] = draw(st.sampled_from([0, 2]))
    if kind == "relative":
        fields |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}
    return fields


@st.composite
def layer_fields(draw, layers):
    types = draw(
        st.lists(
            st.sampled_from(["full_attention", "full_attention", "sliding_attention", "global_sliding_attention"]),
            min_size=layers,
            max_size=layers,
        )
    )
    fields = {"layer_types": types}
    if any("sliding" in t for t in types):
        fields["sliding_window"] = draw(st.integers(2, 5))
    if "global_sliding_attention" in types:
        fields["num_global_tokens"] = draw(st.integers(1, 2))
    return fields


@st.composite
def feed_forward_fields(draw, layers):
    fields = {
        "mlp": draw(st.sampled_from(["gated", "dense", "clamped"])),
        "hidden_act": draw(st.sampled_from(ACTIVATIONS)),
        "mlp_bias": draw(st.booleans()),
    }
    if fields["mlp"] == "clamped":
        fields["swiglu_limit"] = draw(st.sampled_from([1.0, 7.0]))
    if draw(st.booleans()):
        return fields
    types = draw(st.lists(st.sampled_from(["dense", "sparse"]), min_size=layers, max_size=layers).filter(any_sparse))
    groups = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    shared = draw(st.sampled_from([0, 10]))
    fields |= {
        "num_experts": 4,
        "num_experts_per_tok": draw(st.integers(1, 2)),
        "moe_intermediate_size": 8,
        "mlp_layer_types": types,
        "n_group": groups[0],
        "topk_group": groups[1],
        "group_score": draw(st.sampled_from(["max", "top2"])),
        "shared_expert_intermediate_size": shared,
        "shared_expert_gate": bool(shared) and draw(st.booleans()),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "router_aux_loss_coef": draw(st.sampled_from([0.0, 0.01])),
        "router_z_loss_coef": draw(st.sampled_from([0.0, 0.001])),
    }
    for name in ("router_bias", "router_score_bias", "norm_topk_prob"):
        fields[name] = draw(st.booleans())
    return fields | {"router": draw(st.sampled_from(["softmax", "sigmoid"]))}


def any_sparse(types):
    return "sparse" in types


@st.composite
def configs(draw, architecture):
    """Keyword arguments of a valid `AnyformerConfig` of that shape."""
    layers = draw(st.integers(1, 3))
    attention, pattern = draw(attention_fields(architecture)), draw(layer_fields(layers))
    where = ["pre", "post", "sandwich", "branch"]
    where += [] if architecture == "encoder-decoder" else ["parallel", "parallel_dual"]
    norm_position = draw(st.sampled_from(where))
    fields = {
        "architecture": architecture,
        "vocab_size": VOCABULARY,
        "hidden_size": draw(st.sampled_from([12, 24])),
        "intermediate_size": 20,
        "num_hidden_layers": layers,
        "max_position_embeddings": 32,
        "norm": draw(st.sampled_from(NORMS)),
        "norm_position": norm_position,
        "norm_eps": draw(st.sampled_from([1e-6, 1e-5])),
        "embedding_norm": draw(st.booleans()),
        "final_norm": draw(st.booleans()),
        "first_norm": norm_position != "pre" or draw(st.booleans()),
        "residual_multiplier": draw(st.sampled_from([1.0, 0.5])),
        "embedding_multiplier": draw(st.sampled_from([1.0, 3.5])),
        "logit_scale": draw(st.sampled_from([1.0, 0.25])),
        "final_logit_softcapping": draw(st.sampled_from([None, 10.0])),
        "tie_word_embeddings": draw(st.booleans()),
        "lm_head_bias": draw(st.booleans()),
        "initialization": draw(st.sampled_from(["normal", "depth_scaled", "fan_in"])),
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if architecture == "encoder":
        fields |= {"type_vocab_size": draw(st.sampled_from([0, 2])), "pooler": draw(st.booleans())}
        fields["head_transform"] = draw(st.booleans())
        fields["head_transform_bias"] = not fields["head_transform"] or draw(st.booleans())
    if architecture == "encoder-decoder":
        fields |= {"decoder_start_token_id": 1, "share_embeddings": draw(st.booleans())}
        fields |= {"num_encoder_layers": draw(st.integers(1, 3))}
    latent = attention.get("attention") == "mla"
    sliding = any("sliding" in t for t in pattern["layer_types"])
    positions = draw(position_fields(layers, latent, sliding))
    return fields | attention | pattern | positions | draw(feed_forward_fields(layers))
