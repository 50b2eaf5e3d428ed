"""Mixture of experts: routers, stacked experts, and the block that joins them."""

from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.integrations import use_experts_implementation

from .configuration_anyformer import AnyformerConfig
from .registry import MLPS, ROUTERS


class AnyformerRouter(nn.Module):
    """Chooses `num_experts_per_tok` experts for each token. A subclass says how logits become scores.

    With groups, experts come from the best `topk_group` of `n_group` groups (DeepSeek-V2, arXiv:2405.04434, 2.2.2).
    With `router_score_bias`, a bias takes part in choosing only and is moved by `update_bias` instead of an auxiliary
    loss (Wang et al. 2024, arXiv:2408.15664).
    """

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.router_bias else None
        chooses = config.router_score_bias
        self.e_score_correction_bias = nn.Buffer(torch.zeros(config.num_experts)) if chooses else None
        # Tokens that went to each expert since the last update.
        self.load = nn.Buffer(torch.zeros(config.num_experts), persistent=False) if chooses else None

    def reset(self, std: float) -> None:
        init.normal_(self.weight, mean=0.0, std=std)
        if self.bias is not None:
            init.zeros_(self.bias)
        if self.e_score_correction_bias is not None:
            init.zeros_(self.e_score_correction_bias)
            init.zeros_(self.load)

    def _apply(self, fn, recurse: bool = True):
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            moved = self._buffers[name]
            if buffer.is_meta and not moved.is_meta:  # `to_empty` leaves uninitialised memory
                moved.zero_()
            elif moved.dtype != buffer.dtype:  # steps of 0.001 vanish in bf16: these stay in fp32
                self._buffers[name] = buffer.to(moved.device)
        return self

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """[tokens, experts] -> the same, not negative."""
        raise NotImplementedError

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weights and indices [tokens, num_experts_per_tok] of the chosen experts, and all scores [tokens, experts]."""
        config = self.config
        scores = self.scores(logits.float())
        choice = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if config.n_group > 1:
            grouped = choice.unflatten(-1, (config.n_group, -1))  # [tokens, groups, experts of a group]
            best = 2 if config.group_score == "top2" else 1
            groups = grouped.topk(best, dim=-1).values.sum(-1).topk(config.topk_group, dim=-1).indices
            allowed = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter(1, groups, True)
            choice = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        indices = choice.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, indices)
        if config.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.routed_scaling_factor, indices, scores

    def forward(
        self, hidden_states: torch.Tensor, token_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[tokens, hidden_size] -> logits [tokens, experts], weights and indices [tokens, num_experts_per_tok].

        Args:
            token_mask: [tokens], true for real tokens, which alone count as load.
        """
        with torch.autocast(hidden_states.device.type, enabled=False):  # near-ties must not depend on rounding
            bias = None if self.bias is None else self.bias.float()
            logits = nn.functional.linear(hidden_states.float(), self.weight.float(), bias)
        weights, indices, _ = self.choose(logits)
        # Not the tokens of a reference, or of answers that are being sampled.
        if self.training and torch.is_grad_enabled() and self.e_score_correction_bias is not None:
            with torch.no_grad():
                chosen = nn.functional.one_hot(indices, self.config.num_experts).sum(1)  # [tokens, experts]
                if token_mask is not None:
                    chosen = chosen * token_mask[:, None]
                self.load.add_(chosen.sum(0))
        return logits, weights.to(hidden_states.dtype), indices

    @torch.no_grad()
    def update_bias(self) -> None:
        """Move the bias of each expert by `router_bias_update_rate` towards an even load, over all processes."""
        load = self.load
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(load)
        self.e_score_correction_bias.add_(torch.sign(load.mean() - load), alpha=self.config.router_bias_update_rate)
        self.load.zero_()


@ROUTERS.register("softmax")
class SoftmaxRouter(AnyformerRouter):
    """Shares of a softmax over all experts (Shazeer et al. 2017, arXiv:1701.06538; Mixtral, arXiv:2401.04088)."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.softmax(dim=-1)


@ROUTERS.register("sigmoid")
class SigmoidRouter(AnyformerRouter):
    """A sigmoid for each expert (DeepSeek-V3, arXiv:2412.19437, eq. 15)."""

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.sigmoid()


@use_experts_implementation
class _StackedExperts(nn.Module):
    """Feed-forward blocks of all experts in one tensor a projection; the library multiplies them group by group."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        block = MLPS[config.mlp]
        if not hasattr(block, "has_gate"):
            raise ValueError(f"mlp={config.mlp!r} has no experts: its class states no has_gate (see GatedMLP)")
        inner, hidden, experts = config.moe_intermediate_size, config.hidden_size, config.num_experts
        self._combine, self.limit = getattr(block, "combine", None), config.swiglu_limit
        self._up = "gate_up_proj" if block.has_gate else "up_proj"
        width = inner * (2 if block.has_gate else 1)
        setattr(self, self._up, nn.Parameter(torch.empty(experts, width, hidden)))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, inner))
        if config.mlp_bias:
            setattr(self, f"{self._up}_bias", nn.Parameter(torch.zeros(experts, width)))
            self.down_proj_bias = nn.Parameter(torch.zeros(experts, hidden))
        self.act_dropout = nn.Dropout(config.activation_dropout)
        activation = ACT2FN[config.hidden_act]
        # The library applies this alone where there is no gate.
        self.act_fn = activation if block.has_gate else nn.Sequential(activation, self.act_dropout)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_dropout(self._combine(gate, up, self.act_fn, self.limit))

    def forward(self, hidden_states: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden_size] -> the same; the readable reference (`experts_implementation="eager"`)."""
        output = torch.zeros_like(hidden_states)
        up_bias, down_bias = getattr(self, f"{self._up}_bias", None), getattr(self, "down_proj_bias", None)
        for expert in range(self.num_experts):
            token, slot = torch.where(indices == expert)
            up = getattr(self, self._up)[expert]
            inner = nn.functional.linear(hidden_states[token], up, None if up_bias is None else up_bias[expert])
            inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
            out = nn.functional.linear(inner, self.down_proj[expert], None if down_bias is None else down_bias[expert])
            output = output.index_add(0, token, (out * weights[token, slot, None]).to(output.dtype))
        return output


class AnyformerExperts(_StackedExperts):
    """The experts of one layer, with or without gates and biases as the config says."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__(config)
        # The library's decorator fixes these for a class; here they depend on the config.
        self.has_gate = self._up == "gate_up_proj"
        self.has_bias = config.mlp_bias

    def reset(self, std: float, down_std: float) -> None:
        init.normal_(getattr(self, self._up), mean=0.0, std=std)
        init.normal_(self.down_proj, mean=0.0, std=down_std)
        for name in (f"{self._up}_bias", "down_proj_bias"):
            if self.has_bias:
                init.zeros_(getattr(self, name))


class SparseMLP(nn.Module):
    """Routed experts, and beside them an expert that every token uses (DeepSeekMoE, arXiv:2401.06066, fig. 2c)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.router = ROUTERS[config.router](config)
        self.experts = AnyformerExperts(config)
        self.shared_expert = self.shared_expert_gate = None
        if config.shared_expert_intermediate_size:
            self.shared_expert = MLPS[config.mlp](config, config.shared_expert_intermediate_size)
            if config.shared_expert_gate:
                self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, hidden_states: torch.Tensor, token_mask: Any = None) -> torch.Tensor:
        """[batch, length, hidden_size] -> the same; `token_mask` [batch, length]: true for real tokens."""
        flat = hidden_states.reshape(-1, hidden_states.shape[-1])  # [tokens, hidden_size]
        _, weights, indices = self.router(flat, None if token_mask is None else token_mask.reshape(-1))
        output = self.experts(flat, indices, weights).view_as(hidden_states)
        if self.shared_expert is None:
            return output
        shared = self.shared_expert(hidden_states)
        if self.shared_expert_gate is not None:
            shared = torch.sigmoid(self.shared_expert_gate(hidden_states)) * shared
        return output + shared
