"""Rows that are scored together are of like length, so that little of a batch is padding."""

import torch

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.recipes.scoring import losses

LENGTHS = [30, 3, 29, 4, 28, 5, 27, 6]


class Meter:
    def add(self, *given):
        """Nothing is shown."""


def test_batches_hold_rows_of_like_length():
    assert list(losses.by_length(LENGTHS, 4)) == [[1, 3, 5, 7], [6, 4, 2, 0]]
    assert list(losses.by_length([losses._MOST, 1, 1], 8)) == [[1, 2], [0]]  # no more than so many tokens


def test_the_model_reads_them_so():
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, read = AnyformerForCausalLM(AnyformerConfig(vocab_size=20, **sizes)), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    rows = [{"input_ids": [5] * length, "labels": [-100] + [5] * (length - 1)} for length in LENGTHS]
    found = losses.token_losses(model, rows, LENGTHS, pad_token_id=0, batch_size=4, shift=1, meter=Meter())
    assert read == [(4, 6), (4, 30)]
    assert [len(one) for one in found] == LENGTHS and all(torch.isfinite(one).all() for one in found)
