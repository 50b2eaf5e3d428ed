"""What a config costs, without weights: parameters, FLOPs and cache bytes.

Parameters are counted on the model itself, built without storage, so that a block that somebody registers counts by
itself. FLOPs and cache are closed formulas.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Counts:
    """The costs of one architecture.

    Attributes:
        parameters: number by part (embeddings, attention, mlp, experts, router, norms, head); what is tied counts once.
        active_parameters: those that one token uses: of the routed experts, `num_experts_per_tok`.
        forward_flops: multiplications and additions of one forward pass over one sequence, logits of every
            position included; attention counts the full square, as the kernels compute it. An encoder-decoder
            reads a sequence of that length on both sides.
        cache_values_per_token: numbers kept a token in the cache, over all layers, within their windows.
    """

    parameters: dict[str, int]
    active_parameters: int
    forward_flops: int
    cache_values_per_token: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    def cache_bytes_per_token(self, bytes_per_value: int) -> int:
        """Cache bytes of one token, for values of 2 (bf16) or 4 (fp32) bytes."""
        return self.cache_values_per_token * bytes_per_value


@dataclass(frozen=True)
class ForwardFlops:
    """FLOPs of a forward pass over rows of any lengths.

    An encoder-decoder has a source, read by the encoder, and a target; other shapes have a target alone.

    Attributes:
        token, source_token: of each token of the target and the source.
        logit: of each place of the target whose logits are computed.
        pair, source_pair, crossing: of each pair of positions within the target, within the source, and of one of each.
    """

    token: int
    logit: int
    pair: int
    source_token: int = 0
    source_pair: int = 0
    crossing: int = 0

    def of(self, target: Any, logits: Any, source: Any = 0) -> Any:
        """FLOPs of rows of `target` and `source` tokens with `logits` places in the head: numbers or tensors [rows]."""
        alone = self.token * target + self.pair * target * target + self.logit * logits
        return alone + (self.source_token + self.source_pair * source + self.crossing * target) * source


PARTS = {
    "router": (".router.", ".shared_expert_gate."),
    "experts": (".experts.",),
    "norms": ("norm",),
    "embeddings": ("embed_tokens", "token_type_embeddings", "positions."),
    "attention": ("self_attn.", "cross_attn."),
    "mlp": (".mlp.",),
}


def part_of(name: str) -> str:
    """The part of `Counts.parameters` that a parameter belongs to."""
    return next((part for part, marks in PARTS.items() if any(mark in name for mark in marks)), "head")


def count(config: Any, sequence_length: int = 1, head: str | None = None) -> Counts:
    """The `Counts` of a config for one sequence of `sequence_length` tokens.

    Args:
        head: a key of `heads.HEADS`; default: "causal_lm", for an encoder-decoder "seq2seq_lm", for an encoder "base".

    Raises:
        ValueError: an unknown head, or one that the shape does not have.
    """
    model = _empty_model(config, head or _HEADS[config.architecture])
    tied = model.get_expanded_tied_weights_keys()
    parameters = dict.fromkeys(("embeddings", "attention", "mlp", "experts", "router", "norms", "head"), 0)
    for name, parameter in model.named_parameters():
        if name not in tied:
            parameters[part_of(name)] += parameter.numel()
    idle = 0
    if config.num_experts:
        idle = parameters["experts"] // config.num_experts * (config.num_experts - config.num_experts_per_tok)
    sides = (sequence_length, sequence_length, sequence_length if config.architecture == "encoder-decoder" else 0)
    return Counts(
        parameters,
        sum(parameters.values()) - idle,
        _flops_of(model, config).of(*sides),
        0 if config.architecture == "encoder" else config.num_hidden_layers * cached_values(config),
    )


def forward_flops(config: Any, head: str | None = None) -> ForwardFlops:
    """The FLOPs of a forward pass, for rows whose lengths are not known yet; arguments and errors as of `count`."""
    return _flops_of(_empty_model(config, head or _HEADS[config.architecture]), config)


def _flops_of(model: Any, config: Any) -> ForwardFlops:
    token = source = logit = 0
    for name, module in model.named_modules():
        flops = _linear_flops(name, module, config)
        if ".encoder." in f".{name}" or name.endswith(("cross_attn.k_proj", "cross_attn.v_proj")):
            source += flops
        elif ".lm_head" in f".{name}":
            logit += flops
        else:
            token += flops
    heads, layers = 2 * config.num_attention_heads, config.num_hidden_layers
    width = config.qk_head_dim + config.v_head_dim if config.attention == "mla" else 2 * config.head_dim
    if config.architecture != "encoder-decoder":
        return ForwardFlops(token, logit, heads * width * layers)
    crossing = heads * 2 * (config.qk_head_dim or config.head_dim) * layers
    return ForwardFlops(
        token, logit, heads * width * layers, source, heads * width * config.num_encoder_layers, crossing
    )


_HEADS = {"decoder": "causal_lm", "encoder": "base", "encoder-decoder": "seq2seq_lm"}


def _empty_model(config: Any, head: str) -> Any:
    """The model without storage."""
    from transformers.initialization import no_init_weights

    from .heads import HEADS

    if head not in HEADS:
        raise ValueError(f"head={head!r} is not known; choices: {', '.join(HEADS)}")
    with torch.device("meta"), no_init_weights():
        return HEADS[head](copy.deepcopy(config))


def _linear_flops(name: str, module: torch.nn.Module, config: Any) -> int:
    """FLOPs a token of the matrix products that a module itself does."""
    if isinstance(module, torch.nn.Linear):
        return 2 * module.in_features * module.out_features
    if name.endswith(".experts"):
        matrices = [p for p in module.parameters(recurse=False) if p.dim() == 3]
        return 2 * config.num_experts_per_tok * sum(p.shape[1] * p.shape[2] for p in matrices)
    if name.endswith(".router"):
        return 2 * config.hidden_size * config.num_experts
    return 0


def cached_values(config: Any) -> int:
    """Numbers that one layer keeps of one token; the encoder's keys and values are kept once, not a token."""
    if config.attention == "mla":
        return config.kv_lora_rank + config.qk_rope_head_dim
    return 2 * config.num_key_value_heads * config.head_dim
