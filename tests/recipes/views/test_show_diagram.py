"""The verb `show`: the diagram of whatever a config can say, and the table of parameters."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from anyformer import AnyformerConfig
from anyformer.modeling import registry
from anyformer.modeling.attention import AnyformerAttention
from anyformer.modeling.interop import FAMILIES
from anyformer.modeling.interop.parity import random_stock
from anyformer.modeling.layers import PreNormLayer
from anyformer.recipes.loading import load_preset, shipped
from anyformer.recipes.views.build import diagram_of
from anyformer.recipes.views.structure import Box, Group, Layer, fold
from anyformer.recipes.views.text import COLUMN, as_text, cells
from anyformer.scripts.cli import app

LM = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "seq2seq_lm"}
TINY = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
MLA = {"attention": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
MLA |= {"head_dim": None}
MOE = {"num_experts": 8, "moe_intermediate_size": 24}


def run(*words, status=0):
    result = CliRunner().invoke(app, ["show", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output


def text_of(head=None, **fields):
    config = AnyformerConfig(**(TINY | fields))
    return as_text(diagram_of("x", config, head or LM[config.architecture]), [])


def unwrapped(text):
    """Lines of a box that were broken to fit, whole again."""
    return re.sub(r" *│\n[║ │]*│   (?=\S)", " ", text)


# What each field of the config shows: what else the config must say, a value, and words that stand for it.
BOTH, ENCODER = {"architecture": "encoder-decoder"}, {"architecture": "encoder"}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
GLOBAL = {"sliding_window": 9, "layer_types": ["global_sliding_attention"]}
FIELDS = {
    "architecture": ({}, "encoder", "in both directions, the whole text"),
    "vocab_size": ({}, 123, "123 × 32"),
    "hidden_size": ({}, 64, "width 64"),
    "intermediate_size": ({}, 77, "32 → 77 → 32"),
    "num_hidden_layers": ({}, 7, "layers 0–6: × 7"),
    "num_encoder_layers": (BOTH, 3, "layers 0–2: × 3"),
    "num_attention_heads": ({}, 8, "8 heads of 8"),
    "num_key_value_heads": ({}, 2, "4 query heads of 8, 2 key/value heads"),
    "head_dim": ({}, 16, "4 heads of 16"),
    "max_position_embeddings": ({}, 333, "333 tokens"),
    "type_vocab_size": (ENCODER, 2, "+ token types, 2"),
    "pooler": (ENCODER | {"__head": "base"}, True, "first token, 32 → 32, tanh"),
    "share_embeddings": (BOTH, False, "of this side alone"),
    "q_lora_rank": (MLA, 24, "queries from a latent of 24"),
    "kv_lora_rank": (MLA, 20, "keys and values from a latent of 20"),
    "qk_nope_head_dim": (MLA, 12, "queries and keys of 12 + 4"),
    "qk_rope_head_dim": (MLA, 8, "queries and keys of 8 + 8"),
    "v_head_dim": (MLA, 6, "values of 6"),
    "attention_bias": ({}, True, "bias on queries, keys, values and output"),
    "attention_out_bias": ({}, True, "bias on output"),
    "attention_multiplier": ({}, 0.5, "scores × 0.5, not 1/√8"),
    "attn_logit_softcapping": ({}, 50.0, "scores capped softly at 50"),
    "attention_sinks": ({}, True, "a learned sink in each head"),
    "qk_norm": ({}, "separate", "queries and keys normed in each head, a weight for each"),
    "clip_qkv": ({}, 8.0, "clipped at ±8"),
    "layer_types": ({"sliding_window": 9}, ["sliding_attention", "full_attention"], "these 2 in turn, × 2"),
    "sliding_window": ({}, 9, "causal, window of 9 tokens"),
    "num_global_tokens": (GLOBAL | {"num_global_tokens": 1}, 2, "window of 9 tokens and the first 2"),
    "position_embedding": ({}, "alibi", "ALiBi, slopes down to 2^-8"),
    "position_layout": ({}, "interleaved", "neighbouring values paired"),
    "position_offset": ({"position_embedding": "learned"}, 2, "behind 2 unused rows"),
    "rope_parameters": ({}, ROPE, "RoPE, base 5,000"),
    "rope_thetas": ({}, [100.0, 200.0], "RoPE, base 200"),
    "no_rope_layers": ({}, [1, 1, 1, 0], "no rotation in this layer"),
    "relative_attention_num_buckets": ({"position_embedding": "relative"}, 16, "16 buckets up to 128"),
    "relative_attention_max_distance": ({"position_embedding": "relative"}, 64, "32 buckets up to 64"),
    "alibi_bias_max": ({"position_embedding": "alibi"}, 4, "slopes down to 2^-4"),
    "norm": ({}, "layernorm_nobias", "LayerNorm without a bias"),
    "norm_position": ({}, "sandwich", "before and after each block"),
    "norm_eps": ({}, 1e-3, "eps 0.001"),
    "embedding_norm": ({}, True, " ▼ RMSNorm\n │\n╔"),
    "final_norm": ({"norm_position": "post"}, True, " ▼ RMSNorm\n │\n ┌"),
    "first_norm": ({}, False, "layers 1–3: × 3"),
    "residual_multiplier": ({}, 0.22, "⊕◀──╯ × 0.22"),
    "embedding_multiplier": ({}, 12.5, "× 12.5"),
    "logit_scale": ({}, 0.125, "logits × 0.125"),
    "final_logit_softcapping": ({}, 30.0, "logits capped softly at 30"),
    "mlp": ({"hidden_act": "gelu"}, "dense", "Feed-forward, GELU"),
    "hidden_act": ({}, "relu", "Feed-forward, ReGLU"),
    "mlp_bias": ({}, True, "with biases"),
    "swiglu_limit": ({"mlp": "clamped"}, 5.0, "clamped at 5"),
    "num_experts": ({}, 8, "8 experts, 2 for a token"),
    "num_experts_per_tok": (MOE, 3, "8 experts, 3 for a token"),
    "moe_intermediate_size": (MOE, 25, "each SwiGLU, 32 → 25 → 32"),
    "mlp_layer_types": (MOE, ["dense", "sparse"], "these 2 in turn, × 2"),
    "first_k_dense_replace": (MOE, 1, "layers 1–3: × 3"),
    "router": (MOE, "sigmoid", "router: a sigmoid for each expert"),
    "router_bias": (MOE, True, "softmax over all experts, with a bias"),
    "norm_topk_prob": (MOE | {"routed_scaling_factor": 2.0}, False, "weights × 2"),
    "routed_scaling_factor": (MOE, 2.5, "weights sum to 1, × 2.5"),
    "n_group": (MOE, 4, "from the best 1 of 4 groups"),
    "topk_group": (MOE | {"n_group": 4}, 2, "from the best 2 of 4 groups"),
    "group_score": (MOE | {"n_group": 4}, "top2", "by their best two"),
    "router_score_bias": (MOE, True, "a bias chooses but does not weigh"),
    "router_bias_update_rate": (MOE | {"router_score_bias": True}, 0.001, "moved by 0.001"),
    "router_aux_loss_coef": (MOE, 0.01, "balancing 0.01"),
    "router_z_loss_coef": (MOE, 0.002, "router z 0.002"),
    "shared_expert_intermediate_size": (MOE, 40, "a shared expert for every token, width 40"),
    "shared_expert_gate": (MOE | {"shared_expert_intermediate_size": 40}, True, "weighted by a sigmoid gate"),
    "tie_word_embeddings": ({}, True, "tied: the weight of the token embeddings"),
    "lm_head_bias": ({}, True, "32 → 99, bias"),
    "head_transform": (ENCODER, True, "Transform"),
    "head_transform_bias": (ENCODER | {"head_transform": True, "lm_head_bias": True}, False, "│ 32 → 32  "),
    "classifier_pooling": ({"__head": "sequence_classification"}, "mean", "reads the mean of all tokens"),
    "classifier_bias": ({"__head": "sequence_classification"}, True, "32 → 2, bias"),
    "classifier_dropout": ({}, 0.3, "classifier 0.3"),
    "attention_dropout": ({}, 0.3, "attention 0.3"),
    "hidden_dropout": ({}, 0.3, "hidden 0.3"),
    "activation_dropout": ({}, 0.3, "activation 0.3"),
    "embedding_dropout": ({}, 0.3, "embedding 0.3"),
    "z_loss_coef": ({}, 1e-4, "z 0.0001"),
    "initialization": ({}, "depth_scaled", "depth scaled 0.02"),
    "initializer_range": ({}, 0.3, "normal 0.3"),
    "initializer_ranges": ({}, {"embeddings": 1.0}, "embeddings 1"),
}
# What is computed does not depend on these, or they are ids of tokens.
NOT_SHOWN = {"loss_chunk_size", "output_router_logits", "use_cache", "auto_map", "decoder_start_token_id"}
NOT_SHOWN |= {"pad_token_id", "bos_token_id", "eos_token_id"}


def test_every_field_is_shown_or_said_not_to_be():
    base = {
        f.name for cls in AnyformerConfig.__mro__[1:] if dataclasses.is_dataclass(cls) for f in dataclasses.fields(cls)
    }
    own = set(AnyformerConfig.__annotations__) - (base & NOT_SHOWN)
    assert {name for name in own if not name.startswith("_")} - NOT_SHOWN - {"model_type"} == {*FIELDS, "attention"}


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_is_shown(field):
    given, value, words = FIELDS[field]
    head = given.get("__head")
    given = {name: v for name, v in given.items() if name != "__head"}
    before, after = (text_of(head, **(given | extra)) for extra in ({}, {field: value}))
    assert words in unwrapped(after) and words not in unwrapped(before)


def test_a_bias_of_latent_attention_stands_where_it_is():
    assert "Multi-head latent attention" in text_of(**MLA) and "latent" not in text_of()
    assert "bias on projections to the latents and output" in text_of(**MLA, q_lora_rank=24, attention_bias=True)
    assert "bias on projection to the latent and output" in text_of(**MLA, attention_bias=True)


@pytest.mark.parametrize("name", shipped("models"))
def test_a_preset_is_drawn_with_the_parameters_of_the_plan(name):
    found = json.loads(run(name, "--json"))
    config = AnyformerConfig(**load_preset(name))
    counts = config.counts(head=LM[config.architecture])
    assert found["parameters"]["total"] == counts.total_parameters
    assert found["parameters"]["active"] == counts.active_parameters
    assert sum(found["parameters"]["parts"].values()) == counts.total_parameters
    depths = [sum(group["length"] for group in column["groups"]) for column in found["columns"]]
    both = config.architecture == "encoder-decoder"
    assert depths == ([config.num_encoder_layers] if both else []) + [config.num_hidden_layers]
    text = run(name)
    assert f"{counts.total_parameters:,}" in text
    assert all(cells(line) <= 2 * COLUMN + 3 for line in text.splitlines())


def test_a_terminal_that_is_narrow_gets_one_column_below_the_other():
    config = AnyformerConfig(**TINY, architecture="encoder-decoder")
    narrow = as_text(diagram_of("x", config, "seq2seq_lm"), [], width=80)
    assert all(cells(line) <= 80 for line in narrow.splitlines())
    assert narrow.index("the encoder's states") < narrow.index("Decoder")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_foreign_config_is_drawn(name):
    family = FAMILIES[name]
    for example in family.examples:
        config = family.from_foreign_config(random_stock(family, example).config, family.default_head)
        diagram = diagram_of(name, config, family.default_head)
        assert sum(group.length for group in diagram.columns[-1].groups) == config.num_hidden_layers
        assert all(cells(line) <= 2 * COLUMN + 3 for line in as_text(diagram, []).splitlines()[8:])


def _layers(text):
    return [Layer((Box("other", letter),)) for letter in text]


def _unfold(groups):
    for group in groups:
        for _ in range(group.times):
            for part in group.parts:
                yield from _unfold([part]) if isinstance(part, Group) else [part.items[0].title]


@pytest.mark.parametrize(
    ("layers", "labels"),
    [
        ("a", ["layer 0"]),
        ("aaaa", ["layers 0–3: × 4"]),
        ("abab", ["layers 0–3: these 2 in turn, × 2"]),
        ("aaabbbbb", ["layers 0–2: × 3", "layers 3–7: × 5"]),
        ("aab" * 4, ["layers 0–11: these 3 in turn, × 4"]),
        ("aaaaab" * 4 + "aa", ["layers 0–23: these 6 in turn, × 4", "layers 24–25: × 2"]),
        ("xaab" + "aab", ["layer 0", "layers 1–6: these 3 in turn, × 2"]),
        ("abc", ["layer 0", "layer 1", "layer 2"]),
    ],
)
def test_layers_are_folded(layers, labels):
    groups = fold(_layers(layers))
    assert [group.label for group in groups] == labels
    assert "".join(_unfold(groups)) == layers


@pytest.fixture
def registered(monkeypatch):
    """A function that registers a block for one test."""

    def register(registry_, name, cls):
        monkeypatch.setitem(registry_._names, name, cls)

    return register


class Doubling(nn.Module):
    def __init__(self, config, size=None):
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, 2 * config.hidden_size)
        self.scale = nn.Parameter(torch.ones(3))


class Mixing(AnyformerAttention):
    def __init__(self, config, layer_idx, causal=True, layer_type=""):
        super().__init__(config, layer_idx, causal, layer_type)
        self.taps = nn.Linear(config.hidden_size, 5, bias=False)


class TwiceAdded(PreNormLayer):
    def add(self, name, block, hidden_states):
        return hidden_states + 2 * block(hidden_states)


class Whole(nn.Module):
    """A layer that shares nothing with those here."""

    layer_type, place, gradient_checkpointing = "full_attention", 0, False

    def __init__(self, config, layer_idx, causal=True, crosses=False):
        super().__init__()
        self.scan = nn.Linear(config.hidden_size, config.hidden_size)


class Wavelets(registry.POSITION_EMBEDDINGS["none"]):
    adds_bias = True

    def __init__(self, config, causal=True):
        super().__init__(config, causal)
        self.widths = nn.Parameter(torch.ones(config.num_attention_heads, 3))


class Halving(nn.Module):
    def __init__(self, size, eps):
        super().__init__()


class Fixed(registry.ROUTERS["softmax"]):
    pass


def test_whole_layers_positions_norms_and_routers_of_ones_own_are_drawn(registered):
    registered(registry.LAYERS, "whole", Whole)
    registered(registry.POSITION_EMBEDDINGS, "wavelets", Wavelets)
    registered(registry.NORMS, "halving", Halving)
    registered(registry.ROUTERS, "fixed", Fixed)
    text = unwrapped(text_of(norm_position="whole"))
    assert "Whole (norm_position: whole)" in text and "scan: 32 → 32, bias" in text and "× 4" in text
    text = unwrapped(text_of(position_embedding="wavelets", norm="halving", router="fixed", **MOE))
    assert "positions: Wavelets (position_embedding: wavelets)" in text and "widths: 4 × 3" in text
    assert "a bias on the scores by Wavelets" in text
    assert "├─▶ Halving" in text and "▼ Halving" in text and "router: Fixed (router: fixed)" in text


def test_blocks_of_ones_own_are_drawn(registered):
    registered(registry.MLPS, "doubling", Doubling)
    registered(registry.ATTENTIONS, "mixing", Mixing)
    registered(registry.LAYERS, "twice", TwiceAdded)
    text = text_of(mlp="doubling", attention="mixing", norm_position="twice")
    for words in ("Doubling (mlp: doubling)", "mix: 32 → 64, bias", "scale: 3", "Mixing (attention: mixing)"):
        assert words in text
    assert "taps: 32 → 5" in text and "TwiceAdded (norm_position: twice)" in text


def test_a_classifier_of_tokens_reads_every_one():
    assert "reads every token" in text_of("token_classification", **ENCODER)
    assert "reads the first token" in text_of("sequence_classification", **ENCODER)
    assert "reads the last token" in text_of("sequence_classification")


def test_the_document_shows_what_the_command_prints():
    text = (Path(__file__).parents[3] / "docs/show.md").read_text(encoding="utf-8")
    assert f"$ anyformer show llama-3-8b\n{run('llama-3-8b')}```" in text


def test_the_head_is_that_of_the_folder(tiny_bert, tiny_checkpoint):
    text = run(tiny_bert)
    assert "Next sentence" in text and "Pooler" in text
    assert "Language-model head" in run(tiny_checkpoint)
    assert "Classifier" not in run("pretrain")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lama-3-8b"], "did you mean llama-3-8b"),
        (["llama-3-8b", "--svg", "x.png"], "--svg: x.png must end in .svg"),
        (["llama-3-8b", "--svg", "no/where.svg"], "there is no folder no"),
        (["llama-3-8b", "--prompt", "hi"], "need both"),
        (["llama-3-8b", "--attention", "a.svg"], "need both"),
        (["llama-3-8b", "--layers", "0"], "--layers: only for attention maps"),
        (["llama-3-8b", "--prompt", "hi", "--attention", "a.jpg"], "must end in .svg or .png"),
        (["llama-3-8b", "--prompt", "hi", "--attention", "a.svg"], "a preset, which has no weights"),
        (["pretrain", "--prompt", "hi", "--attention", "a.svg"], "run `anyformer train pretrain` first"),
        (["llama-3-8b", "--prompt", "hi", "--attention", "a.svg", "--svg", "a.svg"], "the same file"),
    ],
)
def test_mistakes_are_told_in_a_line(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = run(*words, status=2)
    assert said in output and "Traceback" not in output and len(output.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
