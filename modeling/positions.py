"""Position embeddings.

Each class answers `forward(hidden_states, position_ids)` with what the attention of every layer needs: for RoPE
the pair (cos, sin), for none None.
"""

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .configuration_anyformer import AnyformerConfig
from .registry import POSITION_EMBEDDINGS


@POSITION_EMBEDDINGS.register("none")
class NoPositionEmbedding(nn.Module):
    """Order known from the causal mask alone (Kazemnejad et al. 2023, arXiv:2305.19466)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> None:
        return None


@POSITION_EMBEDDINGS.register("rope")
class RotaryPositions(nn.Module):
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864) with the library's scalings.

    The frequencies stay in fp32 whatever the model is cast to: in bf16 the phase at position 8,000 would be off
    by tens of radians.
    """

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        inv_freq, self.attention_scaling = self.frequencies()
        self.inv_freq = nn.Buffer(inv_freq, persistent=False)  # [rotary_dim / 2]
        self.original_inv_freq = nn.Buffer(inv_freq.clone(), persistent=False)

    def frequencies(self, device: torch.device | None = None) -> tuple[torch.Tensor, float]:
        """The inverse frequencies [rotary_dim / 2] in fp32 and the factor on cos and sin, from the config alone."""
        if self.rope_type == "default":
            dim = self.config.head_dim
            exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
            return 1.0 / self.config.rope_parameters["rope_theta"] ** exponent, 1.0
        inv_freq, scaling = ROPE_INIT_FUNCTIONS[self.rope_type](self.config, device)
        return inv_freq.float(), scaling

    def reset_buffers(self) -> None:
        """Fill the buffers from the config; a load leaves them as uninitialised memory."""
        inv_freq, self.attention_scaling = self.frequencies()
        init.copy_(self.inv_freq, inv_freq)
        init.copy_(self.original_inv_freq, inv_freq)

    def _apply(self, fn, recurse: bool = True):
        was_meta = self.inv_freq.is_meta  # `to_empty` leaves uninitialised memory
        super()._apply(fn, recurse)
        if self.inv_freq.dtype != torch.float32 or (was_meta and not self.inv_freq.is_meta):
            device = self.inv_freq.device
            self.inv_freq = nn.Buffer(self.frequencies(device)[0], persistent=False)
            self.original_inv_freq = nn.Buffer(self.inv_freq.clone(), persistent=False)
            self.max_seq_len_cached = self.original_max_seq_len
        return self

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, each [batch, length, head_dim], in the dtype of `hidden_states`."""
        with torch.autocast(hidden_states.device.type, enabled=False):
            phase = position_ids[..., None].float() * self.inv_freq  # [batch, length, head_dim / 2]
            phase = torch.cat((phase, phase), dim=-1)
            cos, sin = phase.cos() * self.attention_scaling, phase.sin() * self.attention_scaling
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query and key [batch, heads, length, head_dim] by the phases [batch, length, head_dim]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin
