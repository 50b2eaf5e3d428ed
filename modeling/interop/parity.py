"""A family against its stock class, on tiny random models: the figures of `anyformer families` and of the tests."""

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from .convert import from_hf, outputs_of, row_difference, to_hf
from .family import Family

# Our fields -> sizes of a tiny model, given to the stock config under its own names.
TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_encoder_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
# At 0.02, the usual range, most faults vanish in rounding.
INITIALIZER_RANGE = 0.3
NEW_TOKENS = 12


@dataclass(frozen=True)
class Parity:
    """What a comparison found.

    Attributes:
        plain, left, right, shifted: largest absolute difference of the outputs on a batch without padding, with left
            padding, with right padding, at positions from 7 on (where the stock class takes positions).
        generated: 12 greedy tokens with a cache are those of the stock class, for a left-padded batch; None: no head
            that generates.
        round_trip: every weight is bit-equal after import and export, and the config is the same.
    """

    plain: float
    left: float
    right: float
    shifted: float
    generated: bool | None
    round_trip: bool

    @property
    def difference(self) -> float:
        """The largest; not a number if one of them is none."""
        return max_of((self.plain, self.left, self.right, self.shifted))


def max_of(values: Iterable[float]) -> float:
    """The largest; not a number if one of them is none, which `max` may pass over."""
    return torch.tensor(list(values)).max().item()


def random_stock(family: Family, example: Mapping[str, Any], head: str | None = None, seed: int = 0) -> PreTrainedModel:
    """A tiny stock model of the family with large random weights; biases and norms are random too, to hide no fault."""
    values = {theirs: TINY[ours] for ours, theirs in family.config_fields.items() if ours in TINY}
    values |= {"initializer_range": INITIALIZER_RANGE, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    stock_class = getattr(transformers, family.heads[head or family.default_head])
    config = stock_class.config_class(**(values | dict(example)))
    config._attn_implementation = "eager"  # some stock classes are exact in eager alone
    torch.manual_seed(seed)
    model = stock_class(config).eval()
    seen = set()
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            if tensor.data_ptr() in seen or not tensor.is_floating_point() or family.recomputes(name):
                continue
            seen.add(tensor.data_ptr())
            if tensor.dim() == 1 or not tensor.any():
                tensor += INITIALIZER_RANGE * torch.randn_like(tensor)
    return model


def measure(family: Family, example: Mapping[str, Any] | None = None, head: str | None = None) -> Parity:
    """Import a random stock model, compare outputs and generation, export it again."""
    stock = random_stock(family, family.examples[0] if example is None else example, head)
    model = from_hf(stock)
    length = 20
    tokens = torch.randint(3, TINY["vocab_size"], (3, length), generator=torch.Generator().manual_seed(1))
    full = torch.ones_like(tokens)
    left = (torch.arange(length) >= torch.tensor([[0], [5], [13]])).long()

    def difference(mask: torch.Tensor, shift: int = 0) -> float:
        batch = tokens * mask
        ours = outputs_of(model, batch, mask, shift)
        # Stock classifiers that read the first token read padding there.
        first = ours.dim() == 2 and model.config.classifier_pooling == "first"
        if (first or _rows_alone(stock, model)) and not mask.all():
            return max_of(row_difference(stock, *each) for each in zip(ours, batch, mask.bool(), strict=True))
        gap = ours - outputs_of(stock, batch, mask, shift)
        return (gap * mask[..., None] if gap.dim() == 3 else gap).abs().max().item()

    plain, padded_left, padded_right = difference(full), difference(left), difference(left.flip(1))
    return Parity(
        plain,
        padded_left,
        padded_right,
        difference(full, shift=0 if _numbers_padding(stock, model) else 7),
        _same_tokens(model, stock, tokens * left, left) if model.can_generate() else None,
        _round_trip(model, stock, family),
    )


def _numbers_padding(stock: PreTrainedModel, model: Any) -> bool:
    """The stock class counts padding as positions and takes none: a padded row means what it means without padding."""
    absolute = model.config.position_embedding in ("learned", "sinusoidal")
    return absolute and "position_ids" not in inspect.signature(stock.forward).parameters


def _rows_alone(stock: PreTrainedModel, model: Any) -> bool:
    """The stock class reads a row of a batch otherwise than the row by itself: it numbers padding, or turns its rotary
    frequencies for all rows by the longest."""
    return _numbers_padding(stock, model) or bool(model.base_model.positions.turning)


def _same_tokens(model: Any, stock: Any, tokens: torch.Tensor, mask: torch.Tensor) -> bool:
    options = {"attention_mask": mask, "max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    options |= {"do_sample": False, "num_beams": 1, "forced_eos_token_id": None, "forced_bos_token_id": None}
    ours = model.generate(tokens, **options)
    if not _rows_alone(stock, model):
        return torch.equal(ours, stock.generate(tokens, **options))
    del options["attention_mask"]
    rows = [stock.generate(row[real.bool()][None], **options) for row, real in zip(tokens, mask, strict=True)]
    return all(torch.equal(a[-NEW_TOKENS:], b[0, -NEW_TOKENS:]) for a, b in zip(ours, rows, strict=True))


def _round_trip(model: Any, stock: PreTrainedModel, family: Family) -> bool:
    back = to_hf(model, model_type=family.model_type)
    before, after = stock.state_dict(), back.state_dict()
    own = family.own_fields(type(stock.config))
    same = all(getattr(stock.config, n) == getattr(back.config, n) for n in own if n not in family.free_fields)
    return same and before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
