"""Position embeddings: what is added to the embeddings, rotated in queries and keys, or added to the scores.

Every kind is a `PositionEmbedding`; each overrides the one method in which it acts.
"""

import copy
import math
from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_anyformer import AnyformerConfig
from .registry import POSITION_EMBEDDINGS
from .validation import rotary_dim

Rotation = tuple[torch.Tensor, torch.Tensor]


@POSITION_EMBEDDINGS.register("none")
class PositionEmbedding(nn.Module):
    """No positions: order is known from the causal mask alone (Kazemnejad et al. 2023, arXiv:2305.19466).

    Args:
        causal: queries look back only.

    Attributes:
        adds_bias: `bias` is to be called.
        turning: lengths of texts beyond which `rotations` are others, with the rope_type.
    """

    adds_bias = False
    turning: Mapping[int, str] = {}

    def __init__(self, config: AnyformerConfig, causal: bool = True) -> None:
        super().__init__()
        self.config, self.causal = config, causal

    def reset(self, std: float) -> None:
        """Fill weights and buffers from the config; a load leaves buffers as uninitialised memory."""

    def check(self, position_ids: torch.Tensor, below: int | None) -> None:
        """Refuse positions that there are none of; called before `embed`, and not while compiling.

        Args:
            position_ids: [batch or 1, length].
            below: no position reaches this number; None where only their values tell.

        Raises:
            ValueError: names the first one beyond the end.
        """

    def embed(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[batch, length, hidden_size] -> the same; `position_ids` [batch or 1, length]."""
        return inputs_embeds

    def rotations(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> dict[int, Rotation]:
        """cos and sin, each [batch or 1, length, rotary_dim], by index of a layer; none for what is not rotated.

        Args:
            lengths: [batch or 1, length or 1], tokens of the text that each stands in, where rotations turn.
        """
        return {}

    def bias(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """What is added to the scores, [batch, heads, queries, keys].

        Args:
            query_positions: [batch, queries]; key_positions: [batch, keys]; counted in the row, whatever `position_ids`
                say: these kinds know distances alone.
        """
        raise NotImplementedError


@POSITION_EMBEDDINGS.register("learned")
class LearnedPositions(PositionEmbedding):
    """A trained vector a position (Gehring et al. 2017, arXiv:1705.03122; BERT, GPT-2)."""

    def __init__(self, config: AnyformerConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        rows = config.max_position_embeddings + config.position_offset
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size))

    def reset(self, std: float) -> None:
        init.normal_(self.weight, mean=0.0, std=std)

    def check(self, position_ids: torch.Tensor, below: int | None) -> None:
        # An index beyond the table is an error of the device on GPUs, after which nothing works. Looking at values
        # makes a GPU wait, so there it is done only where sizes do not answer.
        longest = self.config.max_position_embeddings
        if position_ids.device.type != "cpu" and below is not None and below <= longest:
            return
        if position_ids.max() >= longest:
            raise ValueError(
                f"position {position_ids.max().item()} lies beyond max_position_embeddings={longest}: learned "
                "positions end there. Shorten the text"
            )

    def embed(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        rows = position_ids + self.config.position_offset
        return inputs_embeds + nn.functional.embedding(rows, self.weight)


@POSITION_EMBEDDINGS.register("sinusoidal")
class SinusoidalPositions(PositionEmbedding):
    """Sines and cosines of geometric wavelengths (Vaswani et al. 2017, arXiv:1706.03762, sec. 3.5).

    `position_layout` "interleaved" is the paper's, "half" puts all sines first (tensor2tensor, Marian).
    """

    def embed(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        size = inputs_embeds.shape[-1]
        precise = torch.float32 if inputs_embeds.device.type == "mps" else torch.float64
        exponent = torch.arange(0, size, 2, device=inputs_embeds.device, dtype=precise) / size
        phase = position_ids[..., None].to(precise) * 10000.0**-exponent  # [batch, length, size / 2]
        pair = (phase.sin(), phase.cos())
        table = torch.cat(pair, -1) if self.config.position_layout == "half" else torch.stack(pair, -1).flatten(-2)
        return inputs_embeds + table.to(inputs_embeds.dtype)


@POSITION_EMBEDDINGS.register("alibi")
class AlibiPositions(PositionEmbedding):
    """-slope * distance added to the scores, a slope a head (Press et al. 2022, arXiv:2108.12409)."""

    adds_bias = True

    def slopes(self) -> list[float]:
        """2^(-8/heads), 2^(-16/heads), ...; for other counts than powers of two the paper's interpolation."""
        heads, last = self.config.num_attention_heads, self.config.alibi_bias_max
        power = 2 ** math.floor(math.log2(heads))
        slopes = [2.0 ** (-last * i / power) for i in range(1, power + 1)]
        return slopes + [2.0 ** (-last * i / (2 * power)) for i in range(1, 2 * (heads - power), 2)]

    def bias(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        slopes = torch.tensor(self.slopes(), device=key_positions.device)
        distance = (query_positions[:, :, None] - key_positions[:, None, :]).abs().float()  # [batch, queries, keys]
        return -slopes[None, :, None, None] * distance[:, None]


@POSITION_EMBEDDINGS.register("relative")
class RelativePositions(PositionEmbedding):
    """A learned bias a bucket of distances and a head, shared by all layers (T5, arXiv:1910.10683, sec. 2.1)."""

    adds_bias = True

    def __init__(self, config: AnyformerConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        self.relative_attention_bias = nn.Embedding(config.relative_attention_num_buckets, config.num_attention_heads)

    def bias(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        buckets = self.buckets(key_positions[:, None, :] - query_positions[:, :, None])  # [batch, queries, keys]
        # Once, where each layer would do it.
        return self.relative_attention_bias(buckets).permute(0, 3, 1, 2).contiguous()

    def buckets(self, relative: torch.Tensor) -> torch.Tensor:
        """Bucket of each relative position (key minus query): exact when near, logarithmic when far."""
        count, farthest = self.config.relative_attention_num_buckets, self.config.relative_attention_max_distance
        offset = torch.zeros_like(relative)
        if self.causal:
            distance = (-relative).clamp(min=0)
        else:
            count //= 2
            offset = (relative > 0).long() * count
            distance = relative.abs()
        exact = count // 2
        far = (
            exact
            + (torch.log(distance.clamp(min=1).float() / exact) / math.log(farthest / exact) * (count - exact)).long()
        )
        return offset + torch.where(distance < exact, distance, far.clamp(max=count - 1))


@POSITION_EMBEDDINGS.register("rope")
class RotaryPositions(PositionEmbedding):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864), one table for each set of rope parameters.

    Attributes:
        tables: by the index of the first layer that uses each.
        table_of: name in `tables`, by index of a layer; those without rotation are left out.
    """

    def __init__(self, config: AnyformerConfig, causal: bool = True) -> None:
        super().__init__(config, causal)
        self.tables = nn.ModuleDict()
        self.table_of: dict[int, str] = {}
        seen: list[tuple[dict, str]] = []
        for layer in range(config.num_hidden_layers):
            rope = config.rope_of(layer)
            if rope is None:
                continue
            name = next((name for known, name in seen if known == rope), None)
            if name is None:
                name = str(layer)
                self.tables[name] = RotaryTable(config, rope)
                seen.append((rope, name))
            self.table_of[layer] = name
        self.turning = config.turning_lengths

    def rotations(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> dict[int, Rotation]:
        made = {name: table(hidden_states, position_ids, lengths) for name, table in self.tables.items()}
        return {layer: made[name] for layer, name in self.table_of.items()}


def frequencies_turn(turning: Mapping[int, str], before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Whether texts of `now` tokens are rotated by other frequencies than of `before` tokens."""
    turned = torch.zeros(torch.broadcast_shapes(before.shape, now.shape), dtype=torch.bool, device=now.device)
    for length, kind in turning.items():
        turned |= (now > length) != (before > length)
        if kind == "dynamic":
            turned |= (now > length) & (now != before)
    return turned


class RotaryTable(nn.Module):
    """Frequencies of one set of rope parameters.

    Those of most scalings are fixed: linear (Chen et al. 2023, arXiv:2306.15595), yarn (Peng et al. 2023,
    arXiv:2309.00071; the ramp runs over the pairs' indices, as in the authors' code), llama3 (Meta's code, Llama 3.1),
    proportional (Gemma). Two turn with the length of the text beyond the one that the model was trained for, each
    text of a batch by its own: dynamic (NTK-aware, arXiv:2309.00071, sec. 3.3) with every token, longrope (Ding et al.
    2024, arXiv:2402.13753) once, to its long factors.

    The frequencies stay in fp32 whatever the model is cast to: in bf16 the phase at position 8,000 would be off
    by tens of radians.
    """

    def __init__(self, config: AnyformerConfig, rope: dict) -> None:
        super().__init__()
        # The library's functions read the parameters, and head_dim, from a config.
        self.config = copy.copy(config)
        self.config.__dict__["rope_parameters"] = rope
        self.interleaved = config.position_layout == "interleaved"
        self.rope_type = rope["rope_type"]
        self._fill(None)

    def _fill(self, device: torch.device | None) -> None:
        """Make the buffers anew: `inv_freq` of texts within the trained length, and longrope's `long_inv_freq`."""
        inv_freq, self.attention_scaling = self.frequencies(device)
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)  # [rotary_dim / 2]
        if self.rope_type == "longrope":
            self.long_inv_freq = nn.Buffer(self.frequencies(device, long=True)[0], persistent=False)

    def frequencies(self, device: torch.device | None = None, long: bool = False) -> tuple[torch.Tensor, float]:
        """The inverse frequencies [rotary_dim / 2] in fp32 and the factor on cos and sin, from the config alone.

        Args:
            long: longrope's, of texts beyond the trained length.
        """
        rope = self.config.rope_parameters
        if self.rope_type == "default":
            dim = rotary_dim(self.config, rope)
            exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
            return 1.0 / rope["rope_theta"] ** exponent, 1.0
        length = rope["original_max_position_embeddings"] + 1 if long else None
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[self.rope_type](self.config, device, seq_len=length)
        return inv_freq.float(), scaling

    def frequencies_at(self, lengths: torch.Tensor | None) -> torch.Tensor:
        """The inverse frequencies of texts of `lengths` [batch or 1, length or 1]: [..., rotary_dim / 2] in fp32."""
        if self.rope_type == "longrope":
            long = lengths[..., None] > self.config.rope_parameters["original_max_position_embeddings"]
            return torch.where(long, self.long_inv_freq, self.inv_freq)
        if self.rope_type != "dynamic":
            return self.inv_freq
        rope, trained = self.config.rope_parameters, self.config.max_position_embeddings
        dim, factor = rotary_dim(self.config, rope), rope["factor"]
        # The base times scale^(dim / (dim - 2)): pair i of dim / 2 turns slower by scale^(-2i / (dim - 2)).
        scale = factor * lengths.clamp(min=trained).float() / trained - (factor - 1)
        pair = torch.arange(0, dim, 2, dtype=torch.float32, device=lengths.device) / (dim - 2)
        return self.inv_freq * scale[..., None] ** -pair

    def reset_buffers(self) -> None:
        """Fill the buffers from the config; a load leaves them as uninitialised memory."""
        inv_freq, self.attention_scaling = self.frequencies()
        init.copy_(self.inv_freq, inv_freq)
        if self.rope_type == "longrope":
            init.copy_(self.long_inv_freq, self.frequencies(long=True)[0])

    def _apply(self, fn, recurse: bool = True):
        was_meta = self.inv_freq.is_meta  # `to_empty` leaves uninitialised memory
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 or (was_meta and not self.inv_freq.is_meta):
            self._fill(self.inv_freq.device)
        return self

    @torch.no_grad()
    def forward(
        self, hidden_states: torch.Tensor, position_ids: torch.Tensor, lengths: torch.Tensor | None = None
    ) -> Rotation:
        """cos and sin, each [batch, length, rotary_dim], in the dtype of `hidden_states`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            # [batch, length, rotary_dim / 2]
            phase = position_ids[..., None].float() * self.frequencies_at(lengths)
            phase = phase.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat((phase, phase), dim=-1)
            cos, sin = phase.cos() * self.attention_scaling, phase.sin() * self.attention_scaling
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


def _quarter_turn(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Each pair (a, b) as (-b, a)."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rotary_of(rotation: Rotation, head_dim: int, interleaved: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    """`apply_rotary` by one rotation, for many layers' heads [batch, heads, length, head_dim]; for inference."""
    cos, sin = rotation
    if interleaved or cos.shape[-1] != head_dim:
        return lambda x: apply_rotary(x, cos, sin, interleaved)
    half = head_dim // 2
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    signed = torch.cat((-sin[..., :half], sin[..., half:]), dim=-1)  # so that the halves need only change places
    return lambda x: torch.addcmul(x * cos, x.roll(half, -1), signed)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotate the first values of each head [batch, heads, length, head_dim] by phases [batch, length, rotary_dim]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    size = cos.shape[-1]
    turned = x[..., :size]
    turned = turned * cos + _quarter_turn(turned, interleaved) * sin
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)
