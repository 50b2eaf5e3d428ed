"""What every head shares: the body, the output and the routers' losses.

Experts: @use_experts_implementation (the library looks for this word in the file of a class).
"""

from typing import Any

import torch
from torch import nn

from .configuration_anyformer import AnyformerConfig
from .losses import IGNORED, router_losses
from .modeling_anyformer import AnyformerModel
from .moe import AnyformerRouter
from .outputs import AnyformerHeadOutput, AnyformerModelOutput
from .pretrained import AnyformerPreTrainedModel


class AnyformerHead(AnyformerPreTrainedModel):
    """A body under a head.

    Args:
        pooled: the head reads the pooler, where the config has one.

    Attributes:
        shapes: the architectures that the head fits.
    """

    shapes: tuple[str, ...] = ("decoder", "encoder", "encoder-decoder")

    def __init__(self, config: AnyformerConfig, pooled: bool = False) -> None:
        if config.architecture not in self.shapes:
            from .heads import HEADS

            right = [cls.__name__ for cls in HEADS.values() if config.architecture in getattr(cls, "shapes", ())]
            raise ValueError(
                f"{type(self).__name__} needs architecture={' or '.join(map(repr, self.shapes))}, the config says "
                f"{config.architecture!r}; that goes with {', '.join(right)}"
            )
        super().__init__(config)
        self.model = AnyformerModel(config, add_pooling_layer=pooled)

    def _output(self, outputs: AnyformerModelOutput, **fields: Any) -> AnyformerHeadOutput:
        kept = {name: value for name, value in outputs.items() if name not in ("last_hidden_state", "pooler_output")}
        return AnyformerHeadOutput(**fields, **kept)

    def _router_arguments(self, labels: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Ask the body for router logits where they are wanted or a loss needs them."""
        config = self.config
        needed = labels is not None and (config.router_aux_loss_coef or config.router_z_loss_coef)
        if config.num_experts and (needed or config.output_router_logits):
            kwargs.setdefault("output_router_logits", True)
        return kwargs

    def router_losses(self, router_logits: Any, masks: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """What the routers add to the loss, and their load-balancing loss alone, as `losses.router_losses`.

        Args:
            router_logits: [tokens, experts] of each sparse layer, the encoder's first.
            masks: the attention masks of the encoder and the decoder, of those that there are.
        """
        stacks = [s for s in (self.model.encoder, self.model.layers) if s is not None]
        parts, taken = [], 0
        for stack, mask in zip(stacks, masks, strict=True):
            routers = [m for m in stack.modules() if isinstance(m, AnyformerRouter)]
            logits = router_logits[taken : taken + len(routers)]
            taken += len(routers)
            if not routers:  # an encoder may lack the layers that are sparse in the decoder
                continue
            usable = mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
            if usable is not None and usable.numel() != len(logits[0]):
                usable = usable[:, -(len(logits[0]) // len(usable)) :]
            parts.append(router_losses(logits, routers, self.config, usable))
        added, balance = (torch.stack(values).mean() for values in zip(*parts, strict=True))
        return added, balance

    def _add_router_losses(self, loss: Any, outputs: Any, masks: list[Any], items: Any, total: Any) -> Any:
        """The loss with what the routers add, and their load-balancing loss alone.

        Args:
            items: number of targets here; total: of the whole batch, or None.
        """
        config = self.config
        if loss is None or not (config.router_aux_loss_coef or config.router_z_loss_coef):
            return loss, None
        added, balance = self.router_losses(outputs.router_logits, masks)
        # Weighed by this call's share of the whole batch, as the targets are.
        return loss + (added if total is None else added * (items / total)), balance


def shift_right(tokens: torch.Tensor, config: AnyformerConfig, mask: torch.Tensor | None = None) -> torch.Tensor:
    """[batch, length] tokens one place to the right behind the start token; -100 becomes the padding token.

    Args:
        mask: [batch, length]: the start token stands before the first real one, on either padding side.

    Raises:
        ValueError: the config states no start token, or no padding token where one is needed.
    """
    start, pad = config.decoder_start_token_id, config.pad_token_id
    if start is None:
        raise ValueError("config.decoder_start_token_id is not set: the decoder needs a token to start from")
    shifted = tokens.roll(1, dims=-1)
    shifted[:, 0] = start
    if mask is not None:
        first = mask.bool() & ~nn.functional.pad(mask.bool(), (1, 0))[:, :-1]
        shifted = shifted.masked_fill(first, start)
    ignored = shifted == IGNORED
    if pad is None and ignored.any():
        raise ValueError("config.pad_token_id is not set: labels of -100 need a token to stand in for them")
    return shifted if pad is None else shifted.masked_fill(ignored, pad)
