"""What drafts: Medusa heads, an EAGLE layer, multi-token-prediction modules.

Indices: the base has read tokens t[0..n] and gives features f[0..n], its last hidden states, which its head reads; f[i]
predicts t[i+1]. A drafter goes on from f[n] and t[n+1], the token that the base has chosen there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import DynamicCache

from .configuration_anyformer import AnyformerConfig
from .linear import project
from .masks import REAL_INDICES
from .modeling_anyformer import AnyformerStack
from .norms import build_norm
from .registry import DRAFTERS
from .speculation import Drafting, Progress

Embed = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class DraftBatch:
    """What drafting is learned from.

    Attributes:
        features: [batch, length, hidden_size], of the base.
        embed: the base's: tokens and positions [batch, length] -> [batch, length, hidden_size].
        input_ids: [batch, length].
        position_ids: [batch, length]; where they start again, a document does.
        attention_mask: [batch, length], true for real tokens.
        documents: [batch, length], the number of the document of each token; -1 for padding.
    """

    features: torch.Tensor
    embed: Embed
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor
    documents: torch.Tensor


@dataclass
class Predictions:
    """States from which the base's head predicts tokens.

    Attributes:
        states: [batch, kept, hidden_size].
        first: the index in the row of the token that the first of them predicts; the others follow.
    """

    states: torch.Tensor
    first: int


class DraftHead(nn.Module):
    """What the kinds have in common: called with (config of a layer, number of tokens drafted).

    Attributes:
        decay: factor of the loss of a token from one to the next.
    """

    decay = 1.0

    def predictions(self, batch: DraftBatch) -> list[Predictions]:
        """Of each token drafted; a state that would look across the end of a document is there and means nothing."""
        raise NotImplementedError

    def drafting(self, embed: Embed) -> Drafting:
        """A new text."""
        raise NotImplementedError

    def start_like(self, base: Any) -> None:
        """Start from the weights of a base where it has some of the same name and shape."""


@DRAFTERS.register("medusa")
class MedusaHeads(DraftHead):
    """x + SiLU(W x) for each token, then the base's own head (Medusa-1: Cai et al. 2024, arXiv:2401.10774, sec. 2.1).

    The paper gives each its own copy of the head. Here all read the base's: those copies would be 28 million weights
    each for a model like SmolLM2-135M, a fifth of what the base reads for a token. W is 0 at first, where each head
    predicts what the base does.
    """

    decay = 0.8  # sec. 2.2.1

    def __init__(self, config: AnyformerConfig, num_draft_tokens: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.ModuleList(nn.Linear(size, size) for _ in range(num_draft_tokens))
        block: Any
        for block in self.blocks:
            block._initial_std = 0.0

    def states(self, features: torch.Tensor) -> list[torch.Tensor]:
        return [features + nn.functional.silu(project(block, features)) for block in self.blocks]

    def predictions(self, batch: DraftBatch) -> list[Predictions]:
        length = batch.features.shape[1]
        return [
            Predictions(states[:, : max(length - 2 - k, 0)], 2 + k)
            for k, states in enumerate(self.states(batch.features))
        ]

    def drafting(self, embed: Embed) -> Drafting:
        return _MedusaDrafting(self)


class _MedusaDrafting(Drafting):
    def __init__(self, heads: MedusaHeads) -> None:
        self.heads = heads

    def advance(self, progress: Progress) -> None:
        self.last = progress.features[:, -1:]

    def states(self, drafted: list[torch.Tensor]) -> torch.Tensor:
        # All at once: the base's head is read once.
        return torch.cat(self.heads.states(self.last)[len(drafted) :], dim=1)


def _layer(config: AnyformerConfig) -> AnyformerStack:
    """A decoder layer and the norm behind it; embeddings are the base's."""
    stack = AnyformerStack(config, 1, causal=True)
    stack.embed_tokens = None
    return stack


def _start_like(stack: AnyformerStack, projection: nn.Linear, features: slice, base: Any) -> None:
    """Weights with which the base's feature goes through: of two inputs side by side the projection hands on this one
    without the gain of the base's norm, the layer adds nothing yet, and the norm behind it is the base's.

    What the layer will add begins from the base's last layer. (A copy of that layer whole learned slower than random
    weights, and random weights slower than this: it is made for states that are many times as large.)
    """
    body, layer = base.model, stack.layers[0]
    for own, of_base in ((layer, body.layers[-1]), (stack.norm, body.norm)):
        given = of_base.state_dict()
        for name, weight in own.state_dict().items():
            if name in given and given[name].shape == weight.shape:
                weight.copy_(given[name])
    for name, weight in layer.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    gain = torch.ones(projection.out_features)
    if getattr(body.norm, "weight", None) is not None:
        gain = body.norm.weight.float().cpu() + (1 - body.norm.initial_weight)
    projection.weight[:, features].copy_(torch.diag(1 / gain.where(gain.abs() > 0.01, 1)))


@DRAFTERS.register("eagle")
class EagleHead(DraftHead):
    """f[i+1] from f[i] and t[i+1] through one decoder layer, over and over (EAGLE: Li et al. 2024, arXiv:2401.15077).

    The paper learns one step from the base's features. Here each step learns from the states of the one before, which
    is what it will see (HASS: Zhang et al. 2024, arXiv:2408.15766; EAGLE-3: arXiv:2503.01840, fig. 6): at step s the
    layer looks at features of the base up to s - 1 places back, and at those predicted since.
    """

    decay = 0.8

    def __init__(self, config: AnyformerConfig, num_draft_tokens: int) -> None:
        super().__init__()
        self.steps = num_draft_tokens
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.decoder = _layer(config)

    def start_like(self, base: Any) -> None:
        _start_like(self.decoder, self.fc, slice(self.fc.out_features, None), base)

    def inputs(self, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return project(self.fc, torch.cat((embedded, features), dim=-1))

    def predictions(self, batch: DraftBatch) -> list[Predictions]:
        length = batch.features.shape[1] - 1  # pairs of a feature and the token after it
        if length < 1:
            return [Predictions(batch.features[:, :0], 2)] * self.steps
        embedded = batch.embed(batch.input_ids[:, 1:], batch.position_ids[:, 1:])
        features, positions = batch.features[:, :-1], batch.position_ids[:, :-1]
        cache, results = DynamicCache(config=self.decoder.config), []
        for step in range(self.steps):
            masks = {"full_attention": _unrolled_mask(batch, length, step), REAL_INDICES: positions.repeat(1, step + 1)}
            states = self.decoder(
                inputs_embeds=self.inputs(embedded, features),
                attention_mask=masks,
                position_ids=positions,
                cache=cache,
                use_cache=True,
            ).last_hidden_state
            results.append(Predictions(states[:, :-1], 2))
            # What one step predicts of f[i+1], the next reads in its place.
            features = nn.functional.pad(states[:, :-1], (0, 0, 1, 0))
        return results

    def drafting(self, embed: Embed) -> Drafting:
        return _EagleDrafting(self, embed)


def _unrolled_mask(batch: DraftBatch, length: int, step: int) -> torch.Tensor:
    """[batch, 1, length, (step + 1) * length], true where a pair of this step looks: at pairs of the base up to `step`
    places back, and at the one of each step since that leads to it."""
    real, documents = batch.attention_mask[:, :length], batch.documents[:, :length]
    index = torch.arange(length, device=real.device)
    back = index[:, None] - index  # of a query and a key
    same = (documents[:, :, None] == documents[:, None, :]) & real[:, None, :]  # [batch, length, length]
    parts = [same & (back >= step), *(same & (back == step - s) for s in range(1, step + 1))]
    parts[-1] = parts[-1] | (back == 0)  # padding looks at itself, because nothing is no distribution
    return torch.cat(parts, dim=-1)[:, None]


class _Cached:
    """A decoder layer and what it has cached of one text.

    Attributes:
        kept: entries that stay; those behind them belong to a draft.
    """

    def __init__(self, stack: AnyformerStack) -> None:
        self.stack, self.cache, self.kept = stack, stack.new_cache(crosses=False), 0

    def forget_draft(self) -> None:
        self.cache.crop(min(self.kept - self.cache.get_seq_length(), 0))

    def __call__(self, inputs: torch.Tensor, places: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Inputs [1, new, hidden_size] at positions [1, new] behind what is cached -> states of the same shape.

        Args:
            mask: [1, any], true for real tokens; what it has no column for is real.
        """
        if mask is not None:
            columns = self.cache.get_seq_length() + inputs.shape[1]
            mask = nn.functional.pad(mask[:, :columns], (0, max(columns - mask.shape[1], 0)), value=1)
        arguments = {"attention_mask": mask, "position_ids": places, "cache": self.cache, "use_cache": True}
        return self.stack(inputs_embeds=inputs, **arguments).last_hidden_state


class _EagleDrafting(Drafting):
    """Entry i of the cache is the pair of f[i] and t[i+1]."""

    def __init__(self, head: EagleHead, embed: Embed) -> None:
        self.head, self.embed, self.layer = head, embed, _Cached(head.decoder)

    def advance(self, progress: Progress) -> None:
        self.layer.forget_draft()
        self.layer.kept += progress.tokens.shape[1]
        self.mask, places = progress.attention_mask, progress.position_ids
        self._run(progress.tokens, progress.features, places[:, :-1], places[:, 1:])

    def states(self, drafted: list[torch.Tensor]) -> torch.Tensor:
        if drafted:
            self._run(drafted[-1], self.last, self.place, self.place + 1)
        return self.last

    def _run(self, tokens: torch.Tensor, features: torch.Tensor, places: torch.Tensor, after: torch.Tensor) -> None:
        inputs = self.head.inputs(self.embed(tokens, after), features)
        self.last, self.place = self.layer(inputs, places, self.mask)[:, -1:], after[:, -1:]


class MtpModule(nn.Module):
    """proj([norm(h); norm(embedding)]), then a decoder layer (DeepSeek-V3, arXiv:2412.19437, eq. 21-22)."""

    def __init__(self, config: AnyformerConfig) -> None:
        super().__init__()
        self.hnorm, self.enorm = build_norm(config), build_norm(config)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.decoder = _layer(config)

    def inputs(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return project(self.eh_proj, torch.cat((self.hnorm(states), self.enorm(embedded)), dim=-1))


@DRAFTERS.register("mtp")
class MtpModules(DraftHead):
    """A module for each token further ahead (DeepSeek-V3, arXiv:2412.19437, sec. 2.2).

    Depth d = 1, 2, ... makes h_d[i] of h_(d-1)[i] and t[i+d], h_0 being the features, and the head predicts t[i+d+1]
    from it. The head is the base's; the norm before it is the module's own, as in the published weights.
    """

    def __init__(self, config: AnyformerConfig, num_draft_tokens: int) -> None:
        super().__init__()
        self.depths = nn.ModuleList(MtpModule(config) for _ in range(num_draft_tokens))

    def start_like(self, base: Any) -> None:
        depth: Any
        for depth in self.depths:
            _start_like(depth.decoder, depth.eh_proj, slice(depth.eh_proj.out_features), base)

    def predictions(self, batch: DraftBatch) -> list[Predictions]:
        length, states, results = batch.features.shape[1], batch.features, []
        module: Any
        for depth, module in enumerate(self.depths, 1):
            kept = length - depth
            if kept < 1:
                states = states[:, :0]
            else:
                embedded = batch.embed(batch.input_ids[:, depth:], batch.position_ids[:, depth:])
                states = module.decoder(
                    inputs_embeds=module.inputs(embedded, states[:, :kept]),
                    attention_mask=batch.attention_mask[:, :kept],
                    position_ids=batch.position_ids[:, :kept],
                    use_cache=False,
                ).last_hidden_state
            results.append(Predictions(states[:, :-1], depth + 1))
        return results

    def drafting(self, embed: Embed) -> Drafting:
        return _MtpDrafting(self, embed)


class _MtpDrafting(Drafting):
    """Entry i of the cache of depth d is h_(d-1)[i] with t[i+d].

    Of the entries up to the newest feature the last d - 1 hold drafted tokens: they are made again from those chosen.
    """

    def __init__(self, modules: MtpModules, embed: Embed) -> None:
        self.modules, self.embed, self.read = modules, embed, 0
        layers: Any = modules.depths
        self.layers = [_Cached(module.decoder) for module in layers]
        self.before: dict[int, torch.Tensor] = {}  # of each depth, the state of the depth below at its next entry
        self.places = torch.empty(1, 0, dtype=torch.long)

    def advance(self, progress: Progress) -> None:
        self.progress, new = progress, progress.tokens.shape[1]
        for layer in self.layers:
            layer.forget_draft()
        self.read += new
        places = progress.position_ids[:, :-1]
        self.places = torch.cat((self.places.to(places.device), places), dim=-1)[:, -new - len(self.layers) :]
        self.deepest = progress.features

    def states(self, drafted: list[torch.Tensor]) -> torch.Tensor:
        depth = len(drafted) + 1
        layer = self.layers[depth - 1]
        module: Any = self.modules.depths[depth - 1]
        entries = self.read - layer.kept
        below = self.deepest
        if below.shape[1] < entries:
            below = torch.cat((self.before[depth], below), dim=1)
        places = self.places[:, -entries:]
        tokens = torch.cat((self.progress.tokens, *drafted), dim=-1)[:, -entries:]
        inputs = module.inputs(self.embed(tokens, places + depth), below[:, -entries:])
        self.deepest = layer(inputs, places, self.progress.attention_mask)
        layer.kept = max(self.read - depth + 1, 0)
        if depth > 1 and self.read >= depth - 1:
            self.before[depth] = below[:, below.shape[1] - depth + 1 :][:, :1]
        return self.deepest[:, -1:]
