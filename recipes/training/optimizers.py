"""Optimisers that the library does not have by name, and which parameters weights decay."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...modeling.counting import part_of
from ..errors import UserError
from ..objectives.preference import plain_model

MUON = "muon"
# Settings of torch.optim.Muon in `train.optim_args` -> how their text is read.
MUON_SETTINGS: dict[str, Any] = {
    "lr": float,
    "momentum": float,
    "nesterov": lambda text: {"true": True, "false": False}[text.lower()],
    "ns_steps": int,
    "adjust_lr_fn": str,
}


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` for groups marked `use_muon`, `torch.optim.AdamW` for the others, as one optimiser.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) orthogonalises the momentum of a matrix. Both share
    this class's groups and state, so that schedules, checkpoints and wrappers see one optimiser.

    Args:
        groups: parameter groups, each with `use_muon`.
        lr, betas, eps: of AdamW.
        muon: arguments of `torch.optim.Muon`.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        muon: dict[str, Any],
    ) -> None:
        given = [group for group in groups if group["params"]]
        # A kind without parameters has an empty group here and none below.
        of_kind = {kind: [g for g in given if g["use_muon"] is kind] or [{"params": []}] for kind in (False, True)}
        # Logs show the learning rate of the first group: AdamW's.
        self.parts: dict[bool, Any] = {False: torch.optim.AdamW(of_kind[False], lr=lr, betas=betas, eps=eps)}
        self.parts[True] = torch.optim.Muon(of_kind[True], **muon)
        made = [group for part in self.parts.values() for group in part.param_groups]
        super().__init__([group for group in made if group["params"]], {"lr": lr})
        self._share()

    def _share(self) -> None:
        for kind, part in self.parts.items():
            part.param_groups = [group for group in self.param_groups if group["use_muon"] is kind]
            part.state = self.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Of a group that does not say otherwise AdamW takes care."""
        defaults = self.parts[param_group.setdefault("use_muon", False)].defaults
        super().add_param_group({**defaults, **param_group})
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # with other groups and another state, as after a load
        self._share()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts.values():
            part.step()
        return loss


class MuonFactory:
    """What the library's trainer makes an optimiser with that looks at the whole model."""

    def __call__(
        self, model: nn.Module, *, decayed: set[str], weight_decay: float, muon: dict[str, Any], **adamw: Any
    ) -> MuonAdamW:
        """The optimiser of a model.

        Args:
            decayed: names of the parameters that weight decay is for.
            weight_decay: of both parts.
            muon: arguments of `torch.optim.Muon`. adamw: of AdamW.
        """
        matrices = {id(parameter) for parameter in muon_parameters(model)}
        groups: list[dict[str, Any]] = [
            {"params": [], "use_muon": kind, "weight_decay": weight_decay if decays else 0.0}
            for kind in (True, False)
            for decays in (True, False)
        ]
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                kind, decays = id(parameter) in matrices, name in decayed
                groups[2 * (not kind) + (not decays)]["params"].append(parameter)
        if not any(group["use_muon"] and group["params"] for group in groups):
            raise UserError("train.optim: muon is for matrices inside the model, and none of them is trained")
        return MuonAdamW(groups, muon=muon, **adamw)


def muon_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The matrices inside a model: no embeddings, no head over the body, no norm, no bias, no stack of experts."""
    held: Any = plain_model(model)
    body: Any = getattr(held, "base_model", held)
    tables = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    inside = ((n, p) for n, p in body.named_parameters() if p.ndim == 2 and p.requires_grad and id(p) not in tables)
    return [p for n, p in inside if part_of(n) not in ("embeddings", "norms") and not n.endswith("bias")]


def muon_settings(optim_args: str | None, learning_rate: float) -> dict[str, Any]:
    """Arguments of `torch.optim.Muon` from `train.optim_args`.

    By default steps are as long as AdamW's (Liu et al. 2025, arXiv:2502.16982, sec. 2.2), so that one learning rate is
    for both.

    Raises:
        UserError: an unknown name or a value that cannot be read, or a torch without the optimiser.
    """
    if not hasattr(torch.optim, "Muon"):
        raise UserError(f"train.optim: muon needs torch 2.9 or newer, this is {torch.__version__}")
    settings: dict[str, Any] = {"lr": learning_rate, "adjust_lr_fn": "match_rms_adamw"}
    for item in (optim_args or "").replace(" ", "").split(",") if optim_args else ():
        name, given, text = item.partition("=")
        if not given or name not in MUON_SETTINGS:
            known = ", ".join(f"{known}=…" for known in MUON_SETTINGS)
            raise UserError(f"train.optim_args: {item!r} is no setting of muon; it takes {known}, parted by commas")
        try:
            settings[name] = MUON_SETTINGS[name](text)
        except (ValueError, KeyError):
            raise UserError(f"train.optim_args: {name} of muon cannot be {text!r}") from None
    try:
        torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], **settings)
    except ValueError as error:
        raise UserError(f"train.optim_args: {error}") from error
    return settings


def fused_adamw_runs(device: torch.device) -> bool:
    """Whether torch has the fused AdamW for a device."""
    try:
        torch.optim.AdamW([torch.zeros(1, device=device, requires_grad=True)], fused=True)
    except RuntimeError:
        return False
    return True


class Optimizing:
    """Mixin of a trainer: `muon` as an optimiser, and weight decay for matrices alone."""

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The library's choice, which goes by the names of norms and biases, without any other vector."""
        names = set(super().get_decay_parameter_names(model))  # type: ignore[misc]
        # Of a weight that DeepSpeed has taken apart the shape is elsewhere.
        shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in model.named_parameters()}
        return [name for name, shape in shapes.items() if name in names and len(shape) > 1]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        trainer: Any = self
        settings = getattr(trainer.args, MUON, None)
        if settings is not None and trainer.optimizer_cls_and_kwargs is None:
            arguments, trained = trainer.args, trainer.model if model is None else model
            options = {"lr": arguments.learning_rate, "betas": (arguments.adam_beta1, arguments.adam_beta2)}
            decayed = set(trainer.get_decay_parameter_names(trained))
            options |= {"eps": arguments.adam_epsilon, "weight_decay": arguments.weight_decay}
            trainer.optimizer_cls_and_kwargs = (MuonFactory, options | {"muon": settings, "decayed": decayed})
        return super().create_optimizer(model)  # type: ignore[misc]
