"""Sampled answers that do not depend on what else is in their batch."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..generation import sampling

if TYPE_CHECKING:
    import torch


class SeededDraws:
    """Tokens from the whole distribution at a temperature, those of each answer with a seed of its own.

    `generate` draws the tokens of a batch from one stream of random numbers, so that an answer depends on the rows
    beside it. Here each answer has a stream: a number u a token, which stands for the first token at which the
    probabilities add up to more than u.

    Args:
        temperature: above 0.
        seeds: of each answer, any number of whole numbers.

    Raises:
        UserError: a temperature so small that the probabilities overflow.
    """

    def __init__(self, temperature: float, seeds: Sequence[Sequence[int]]) -> None:
        self.temperature, self.seeds = sampling(temperature)["temperature"], seeds

    def options(self, places: Sequence[int]) -> dict[str, Any]:
        """Those of `generate` for a batch of answers, by their numbers."""
        keys = [self.seeds[place] for place in places]
        streams = [np.random.default_rng(np.random.SeedSequence(key[0], spawn_key=tuple(key[1:]))) for key in keys]

        def draw(input_ids: "torch.Tensor", scores: "torch.Tensor") -> "torch.Tensor":
            """Scores [rows, vocabulary] where all but the token that is drawn are ruled out."""
            import torch

            sums = (scores.double() / self.temperature).softmax(-1).cumsum(-1)
            places = torch.tensor([[stream.random()] for stream in streams], dtype=sums.dtype, device=sums.device)
            chosen = torch.searchsorted(sums, places * sums[:, -1:], right=True)
            ruled_out = torch.full_like(scores, float("-inf"))
            return ruled_out.scatter(1, chosen.clamp(max=scores.shape[1] - 1), 0)

        return {"do_sample": False, "logits_processor": [draw]}
