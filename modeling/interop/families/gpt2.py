"""GPT-2, DialoGPT, Cerebras-GPT (Radford et al. 2019, no arXiv number; Dey et al. 2023, arXiv:2304.03208)."""

from collections.abc import Mapping

from ..family import Family
from ..transforms import Split, Transposed
from .llama import heads

# What the decoders before Llama share; their files start from these.
LAYER = "model.layers.{layer}."
KINDS = ("weight", "bias")
QKV = {kind: tuple(f"{LAYER}self_attn.{projection}_proj.{kind}" for projection in "qkv") for kind in KINDS}
HEAD_WEIGHTS = {name: name for name in ("lm_head.weight", "score.weight", "qa_outputs.weight", "qa_outputs.bias")}
# Token classifiers have a bias and a name of their own, sequence classifiers neither.
TOKEN_CLASSIFIER = ({"classifier_bias": True}, {"score.weight": "classifier.weight", "score.bias": "classifier.bias"})


def renamed(modules: Mapping[str, str], ours: str = "", theirs: str = "") -> dict[str, str]:
    """Table entries of modules with weight and bias: our module -> foreign module, each behind its prefix."""
    return {f"{ours}{our}.{kind}": f"{theirs}{their}.{kind}" for our, their in modules.items() for kind in KINDS}


BLOCK = "transformer.h.{layer}."
LINEAR = {"self_attn.o_proj": "attn.c_proj", "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj"}

FAMILY = Family(
    model_type="gpt2",
    heads={"causal_lm": "GPT2LMHeadModel"}
    | heads("GPT2", "base", "sequence_classification", "token_classification", "question_answering"),
    config_fields={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation_function",
        "hidden_dropout": "resid_pdrop",
        "embedding_dropout": "embd_pdrop",
        "attention_dropout": "attn_pdrop",
    },
    fixed={
        "attention": "gqa",
        "attention_bias": True,
        "attention_out_bias": True,
        "position_embedding": "learned",
        "norm": "layernorm",
        "norm_position": "pre",
        "mlp": "dense",
        "mlp_bias": True,
        "lm_head_bias": False,
    },
    foreign_fixed={
        "scale_attn_by_inverse_layer_idx": False,  # a factor that differs by layer
        "reorder_and_upcast_attn": False,  # other rounding in half precision
        "add_cross_attention": False,
    },
    read=lambda foreign: {
        "intermediate_size": foreign.n_inner or 4 * foreign.n_embd,
        "attention_multiplier": None if foreign.scale_attn_weights else 1.0,
    },
    write=lambda config: {
        "n_inner": None if config.intermediate_size == 4 * config.hidden_size else config.intermediate_size,
        "scale_attn_weights": config.attention_multiplier is None,
    },
    # n_inner is read, but None and 4 * n_embd say the same; summary_* belong to a head of multiple choice.
    free_fields=(
        "n_inner",
        "summary_type",
        "summary_use_proj",
        "summary_activation",
        "summary_proj_to_labels",
        "summary_first_dropout",
    ),
    weights=HEAD_WEIGHTS
    | renamed({"embed_tokens": "wte", "positions": "wpe", "norm": "ln_f"}, "model.", "transformer.")
    | renamed({"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"} | LINEAR, LAYER, BLOCK)
    | {f"{LAYER}{ours}.weight": Transposed(f"{BLOCK}{theirs}.weight") for ours, theirs in LINEAR.items()}
    | {QKV[kind]: Split(f"{BLOCK}attn.c_attn.{kind}", parts=3, transposed=True) for kind in KINDS},
    weights_when=(TOKEN_CLASSIFIER,),
    prefix="transformer.",
    ignored_weights=(BLOCK + "attn.bias", BLOCK + "attn.masked_bias"),  # causal masks
    examples=(
        {},
        {"n_inner": 48, "scale_attn_weights": False, "activation_function": "relu", "tie_word_embeddings": False},
    ),
)
