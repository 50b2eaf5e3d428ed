"""What a config costs, without building it: parameters, FLOPs and cache bytes as closed formulas."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NORM_PARAMETERS: dict[str, Callable[[int], int]] = {
    "rmsnorm": lambda size: size,
    "layernorm": lambda size: 2 * size,
}
MLP_MATRICES = {"gated": 3, "dense": 2}


@dataclass(frozen=True)
class Counts:
    """The costs of one architecture.

    Attributes:
        parameters: number by part (embeddings, attention, mlp, norms, head); a tied head counts nothing.
        forward_flops: multiplications and additions of one forward pass over one sequence, logits of every
            position included; attention counts the full square, as the kernels compute it.
        cache_values_per_token: numbers kept a token in the key/value cache, over all layers.
    """

    parameters: dict[str, int]
    forward_flops: int
    cache_values_per_token: int

    @property
    def total_parameters(self) -> int:
        return sum(self.parameters.values())

    def cache_bytes_per_token(self, bytes_per_value: int) -> int:
        """Cache bytes of one token, for values of 2 (bf16) or 4 (fp32) bytes."""
        return self.cache_values_per_token * bytes_per_value


def count(config: Any, sequence_length: int = 1) -> Counts:
    """The `Counts` of a decoder config for one sequence of `sequence_length` tokens.

    Raises:
        NotImplementedError: for a registered variant whose size nobody has stated in this file.
    """
    for field, table in (("norm", NORM_PARAMETERS), ("mlp", MLP_MATRICES)):
        if getattr(config, field) not in table:
            raise NotImplementedError(f"counting.py does not know the size of {field}={getattr(config, field)!r}")
    hidden, layers, inner = config.hidden_size, config.num_hidden_layers, config.intermediate_size
    query = config.num_attention_heads * config.head_dim
    key_value = config.num_key_value_heads * config.head_dim

    projections = hidden * query + 2 * hidden * key_value + query * hidden
    attention = projections + config.attention_bias * (query + 2 * key_value) + config.attention_out_bias * hidden
    matrices = MLP_MATRICES[config.mlp]
    feed_forward = matrices * hidden * inner
    mlp = feed_forward + config.mlp_bias * ((matrices - 1) * inner + hidden)
    head = config.vocab_size * hidden
    parameters = {
        "embeddings": config.vocab_size * hidden,
        "attention": layers * attention,
        "mlp": layers * mlp,
        "norms": (2 * layers + 1) * NORM_PARAMETERS[config.norm](hidden),
        "head": (0 if config.tie_word_embeddings else head) + config.lm_head_bias * config.vocab_size,
    }
    scores = 2 * 2 * query * sequence_length**2  # q k^T and weights v, two FLOPs a multiply-add
    linear = 2 * sequence_length * (layers * (projections + feed_forward) + head)
    return Counts(parameters, linear + layers * scores, 2 * layers * key_value)
