"""What a recipe's adapter will train, said before a weight is loaded."""

import copy
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from .attach import attach, peft_config, train_in_place
from .fit import check_fit, check_values
from .saved import SOFT_PROMPTS, BadAdapterError
from .targets import check_effect

if TYPE_CHECKING:
    from ...modeling import AnyformerConfig
    from ..objectives.base import Objective


@dataclass(frozen=True)
class AdapterPlan:
    """What is trained and what is not.

    Attributes:
        trainable: number of parameters that get gradients.
        names: of those parameters, as the trainer's model calls them.
        adapted: part of the model -> module or parameter -> in how many layers it is adapted.
        whole: part -> number of its own parameters that are trained whole.
        frozen: part -> number of parameters, where nothing of the part is trained or adapted.
        virtual_tokens: of a soft prompt.
        in_place: the model's own weights are trained.
    """

    kind: str
    trainable: int
    names: frozenset[str] = field(repr=False)
    adapted: dict[str, dict[str, int]]
    whole: dict[str, int]
    frozen: dict[str, int]
    virtual_tokens: int
    in_place: bool

    def as_dict(self) -> dict[str, Any]:
        keys = ("kind", "trainable", "adapted", "whole", "frozen", "virtual_tokens")
        return {key: getattr(self, key) for key in keys}

    def describe(self) -> list[tuple[str, str]]:
        """(name, value) lines for the plan."""
        from ..planning import count

        if self.kind == "none":
            return []
        said = []
        for part, modules in self.adapted.items():
            said.append(f"{part} ({', '.join(f'{number} {name}' for name, number in modules.items())})")
        if self.whole:
            said.append("whole: " + ", ".join(f"{part} {count(number)}" for part, number in self.whole.items()))
        if self.virtual_tokens:
            said.append(f"{self.virtual_tokens} virtual tokens")
        frozen = ", ".join(f"{part} {count(number)}" for part, number in self.frozen.items()) or "no part"
        return [("adapter", f"{self.kind}: {'; '.join(said)}"), ("untouched", frozen)]


def plan_adapter(config: "AnyformerConfig", adapter: Any, objective: "type[Objective] | Objective") -> AdapterPlan:
    """What the adapter will train, seen on a model without storage.

    Raises:
        UserError: the adapter names modules that the model does not have, or is saved otherwise than it fits here.
    """
    import torch
    from transformers.initialization import no_init_weights

    from ...modeling import HEADS

    with torch.device("meta"), no_init_weights():
        model: Any = HEADS[objective.head](copy.deepcopy(config))  # PEFT may write into it
        model.tie_weights()
        foreign = peft_config(adapter, objective, model)
        if foreign is not None:
            model = attach(model, without_values(foreign))
            if adapter.path is None:
                check_effect(model, foreign, adapter.arguments().get("exclude_modules"))
            else:
                _check_saved(model, adapter)
        else:
            train_in_place(model, adapter)
    return _seen(model, adapter)


def _check_saved(model: Any, adapter: Any) -> None:
    """The file of an adapter that training goes on from, against what its config makes of this model."""
    try:
        check_values(adapter.path)
        if adapter.kind not in SOFT_PROMPTS:
            check_fit(model, adapter.path)
    except (UserError, BadAdapterError) as error:
        raise UserError(f"adapter.path: {error}") from error


def without_values(config: Any) -> Any:
    """A config whose first values need no weights and no files; MiCA stays, for it trains less."""
    config = copy.deepcopy(config)
    config.base_model_name_or_path = None  # of which PEFT would say that the model without storage is another
    if getattr(config, "init_lora_weights", "mica") != "mica":
        config.init_lora_weights = True
    if hasattr(config, "prompt_tuning_init"):
        config.prompt_tuning_init = "RANDOM"
    return config


def _seen(model: Any, adapter: Any) -> AdapterPlan:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    from ...modeling.counting import part_of

    adapted: dict[str, Counter[str]] = defaultdict(Counter)
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            own = getattr(module, "parameter_name", "weight")  # stacked experts are parameters of one module
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            last = plain.rpartition(".")[2]
            adapted[part_of(f"{plain}.{own}")][last if own == "weight" else f"{last}.{own}"] += 1
    wrapped = [n for n, m in model.named_modules() if isinstance(m, AuxiliaryTrainingWrapper)]
    whole: Counter[str] = Counter()
    untouched: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        if "prompt_encoder" in name:
            continue
        part = part_of(name.removeprefix("base_model.").removeprefix("model.").replace(".base_layer", ""))
        trained = parameter.requires_grad
        if trained and (adapter.in_place or any(name.startswith(f"{wrapper}.") for wrapper in wrapped)):
            whole[part] += parameter.numel()
        elif not trained:
            untouched[part] += parameter.numel()
    frozen = {part: number for part, number in untouched.items() if part not in whole and part not in adapted}
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return AdapterPlan(
        kind=adapter.kind,
        trainable=sum(p.numel() for _, p in trained),
        names=frozenset(name for name, _ in trained),
        adapted={part: dict(sorted(modules.items())) for part, modules in adapted.items()},
        whole=dict(whole),
        frozen=frozen,
        virtual_tokens=adapter.virtual_tokens,
        in_place=adapter.in_place,
    )
