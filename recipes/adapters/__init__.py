"""What a recipe's `adapter` section means for a model."""

from .attach import attach, continue_from, fit_vocabulary, peft_config, train_in_place
from .heads import head_of_saved, load_under_head
from .report import AdapterPlan, plan_adapter
from .results import (
    bare,
    base_of,
    merge,
    open_adapter,
    opens_by_itself,
    put_on,
    restore_forward,
    save_adapter,
    save_unmerged,
)
from .saved import BadAdapterError, rows_needed
from .watch import Watch, check_weights, use_lora_plus

__all__ = [
    "AdapterPlan",
    "BadAdapterError",
    "Watch",
    "attach",
    "bare",
    "base_of",
    "check_weights",
    "continue_from",
    "fit_vocabulary",
    "head_of_saved",
    "load_under_head",
    "merge",
    "open_adapter",
    "opens_by_itself",
    "peft_config",
    "plan_adapter",
    "put_on",
    "restore_forward",
    "rows_needed",
    "save_adapter",
    "save_unmerged",
    "train_in_place",
    "use_lora_plus",
]
