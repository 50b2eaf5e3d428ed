"""Where a run lies by the scaling law of Chinchilla.

L(N, D) = E + A / N^alpha + B / D^beta with N parameters and D tokens, of a compute of C = 6 N D FLOPs (Hoffmann et al.
2022, arXiv:2203.15556, sec. 3.3 and eq. 4), with the constants that Besiroglu et al. 2024 (arXiv:2404.10102, eq. 4)
fitted to the same runs after they had found those of the paper to be rounded and not converged.
"""

from dataclasses import asdict, dataclass
from typing import Any

E, A, B, ALPHA, BETA = 1.8172, 482.01, 2085.43, 0.3478, 0.3658


def loss_of(parameters: float, tokens: float) -> float:
    """L(N, D) in nats a token, for the text and the tokenizer of the paper."""
    return E + A / parameters**ALPHA + B / tokens**BETA


def optimum_of_compute(flops: float) -> tuple[float, float]:
    """Parameters and tokens with the least loss at 6 N D = `flops` (eq. 4)."""
    ratio = (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA))
    parameters = ratio * (flops / 6) ** (BETA / (ALPHA + BETA))
    return parameters, flops / 6 / parameters


def tokens_for(parameters: float) -> float:
    """Tokens for which so many parameters are the best use of compute: alpha A / N^alpha = beta B / D^beta."""
    return (BETA * B / (ALPHA * A) * parameters**ALPHA) ** (1 / BETA)


@dataclass(frozen=True)
class Optimum:
    """A run beside the best use of its compute.

    Attributes:
        parameters: of the model, the active ones of a mixture of experts; tokens: that it sees; None: not known.
        best_tokens: for so many parameters.
        compute: 6 N D; best_parameters, best_tokens_at_compute: with the least loss there.
        loss, best_loss: that the law foretells.
    """

    parameters: int
    tokens: float | None
    best_tokens: float
    compute: float
    best_parameters: float
    best_tokens_at_compute: float
    loss: float
    best_loss: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def optimum_of(parameters: int, tokens: float | None) -> Optimum:
    """Where a run lies; without its tokens, the optimum for its size."""
    best = tokens_for(parameters)
    seen = tokens or best
    compute = 6.0 * parameters * seen
    size, length = optimum_of_compute(compute)
    return Optimum(parameters, tokens, best, compute, size, length, loss_of(parameters, seen), loss_of(size, length))
