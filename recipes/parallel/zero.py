"""DeepSpeed's engine and its ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054): what a run asks of them.

Stage 3 leaves parameters empty between their uses; each process keeps its part beside them. Nothing here imports
deepspeed before a run asks for it.
"""

import os
import warnings
from pathlib import Path
from typing import Any

from ..errors import UserError

# A folder of the engine in a checkpoint, one for each step that was saved.
ENGINE = "global_step*"
# How Accelerate calls the keys of its file in the environment of the processes that it starts.
_PREFIX = "ACCELERATE_DEEPSPEED_"
_NAMES = {
    "zero3_init_flag": f"{_PREFIX}ZERO3_INIT",
    "deepspeed_config_file": f"{_PREFIX}CONFIG_FILE",
    "deepspeed_moe_layer_cls_names": f"{_PREFIX}MOE_LAYER_CLS_NAMES",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
}


def environment(settings: dict[str, Any]) -> dict[str, str]:
    """What `accelerate launch` makes of the `deepspeed_config` of its file, for processes that torchrun started."""
    named = {_NAMES.get(key, f"{_PREFIX}{key.upper()}"): str(value) for key, value in settings.items()}
    lower = {name: value.lower() if value in ("True", "False") else value for name, value in named.items()}
    return {"ACCELERATE_USE_DEEPSPEED": "true"} | lower


def get_ready(*, on_cpu: bool) -> None:
    """Before the processes join.

    Raises:
        UserError: the package is not installed.
    """
    from accelerate.utils import is_deepspeed_available

    if not is_deepspeed_available():
        raise UserError("--launch deepspeed needs the package deepspeed: pip install deepspeed")
    if on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else it looks for another one, and says that there is none
    # Of functions of torch.distributed that the engine calls, in every step.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")


def hold_whole() -> None:
    """Let models be made, read and asked by one process alone, whole, as they are before and after the training.

    Once the arguments of a trainer exist, transformers splits each model that is made or read, and lets the processes
    generate together, whatever Accelerate's `zero3_init_flag` says. The trainer turns that on again for itself.
    """
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()


def is_engine(wrapped: Any) -> bool:
    """Whether a prepared model is DeepSpeed's engine."""
    try:
        from deepspeed import DeepSpeedEngine
    except ImportError:
        return False
    return isinstance(wrapped, DeepSpeedEngine)


def shares_work(engine: Any, processes: int) -> bool:
    """Whether an engine counts so many processes, and has split what its stage of ZeRO splits."""
    if engine.dp_world_size != processes:
        return False
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    stage = engine.zero_optimization_stage()
    return stage > 0 and (stage < 3 or all(is_split(p) for p in trained))


def is_split(parameter: Any) -> bool:
    """Whether a parameter is one of ZeRO's stage 3, of which this process has `ds_tensor`."""
    return hasattr(parameter, "ds_tensor")


def whole_parameter(parameter: Any) -> Any:
    """A copy of a split parameter, put together in all processes; each must call it."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def engine_values(engine: Any) -> dict[str, Any]:
    """What an engine's model has learned, on the CPU of the first process; every process calls it.

    In 16-bit training as the optimiser keeps it, in fp32.
    """
    import torch
    from deepspeed.utils import safe_get_full_fp32_param

    main, found = torch.distributed.get_rank() == 0, {}
    for name, parameter in engine.module.named_parameters():
        if not parameter.requires_grad:
            continue
        whole = safe_get_full_fp32_param(parameter)  # the processes gather it together
        if whole is None:
            raise RuntimeError(f"DeepSpeed's optimiser has no {name}")
        if main:
            found[name] = whole.to("cpu", copy=True)
        del whole
    return found


def is_engine_checkpoint(checkpoint: Path) -> bool:
    return next(checkpoint.glob(ENGINE), None) is not None


def check_resumes(checkpoint: Path, *, by_engine: bool, processes: int) -> None:
    """Raises:
    UserError: a checkpoint of DeepSpeed's would be read by another strategy or by other processes, or the reverse.
    """
    if is_engine_checkpoint(checkpoint) != by_engine:
        wrote = "another strategy" if by_engine else "DeepSpeed"
        wanted = "without --launch deepspeed" if by_engine else "with --launch deepspeed"
        raise UserError(f"{checkpoint} was written by {wrote}, whose checkpoints only it reads: go on {wanted}")
    if not by_engine:
        return
    wrote_it = len(list(checkpoint.glob(f"{ENGINE}/*zero_pp_rank_*_optim_states.pt")))
    if wrote_it and wrote_it != processes:
        raise UserError(
            f"{checkpoint} was written by DeepSpeed in {wrote_it} processes, each its part of the optimiser's state: "
            f"go on with --processes {wrote_it}, not {processes}"
        )


def load_whole(model: Any, checkpoint: Path) -> None:
    """Give a model that no engine has split the weights of an engine's checkpoint, in fp32 where it kept them so."""
    import torch
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    saved = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in saved:
                parameter.copy_(saved[name])
            elif parameter.requires_grad:  # frozen ones of an adapter's base are not saved
                raise UserError(f"{checkpoint} holds no {name}: it is of another model")
