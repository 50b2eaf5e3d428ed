"""Llama 1 to 3 and what is built like them, as SmolLM and TinyLlama (Touvron et al. 2023, arXiv:2302.13971)."""

from .family import Family

LLAMA = Family(
    model_type="llama",
    causal_lm="LlamaForCausalLM",
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "intermediate_size": "intermediate_size",
        "num_hidden_layers": "num_hidden_layers",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "max_position_embeddings": "max_position_embeddings",
        "rope_parameters": "rope_parameters",
        "norm_eps": "rms_norm_eps",
        "hidden_act": "hidden_act",
        "attention_bias": "attention_bias",
        "attention_out_bias": "attention_bias",
        "mlp_bias": "mlp_bias",
        "attention_dropout": "attention_dropout",
    },
    fixed={
        "attention": "gqa",
        "position_embedding": "rope",
        "norm": "rmsnorm",
        "norm_position": "pre",
        "mlp": "gated",
        "lm_head_bias": False,
        "hidden_dropout": 0.0,
        "embedding_dropout": 0.0,
    },
    foreign_fixed={"pretraining_tp": 1},
    weights={
        name: name
        for name in (
            "model.embed_tokens.weight",
            "model.layers.{layer}.input_layernorm.weight",
            "model.layers.{layer}.self_attn.q_proj.weight",
            "model.layers.{layer}.self_attn.q_proj.bias",
            "model.layers.{layer}.self_attn.k_proj.weight",
            "model.layers.{layer}.self_attn.k_proj.bias",
            "model.layers.{layer}.self_attn.v_proj.weight",
            "model.layers.{layer}.self_attn.v_proj.bias",
            "model.layers.{layer}.self_attn.o_proj.weight",
            "model.layers.{layer}.self_attn.o_proj.bias",
            "model.layers.{layer}.post_attention_layernorm.weight",
            "model.layers.{layer}.mlp.gate_proj.weight",
            "model.layers.{layer}.mlp.gate_proj.bias",
            "model.layers.{layer}.mlp.up_proj.weight",
            "model.layers.{layer}.mlp.up_proj.bias",
            "model.layers.{layer}.mlp.down_proj.weight",
            "model.layers.{layer}.mlp.down_proj.bias",
            "model.norm.weight",
            "lm_head.weight",
        )
    },
    ignored_weights=("model.layers.{layer}.self_attn.rotary_emb.inv_freq",),
)
