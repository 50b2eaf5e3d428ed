"""Objective `sft`: supervised fine-tuning with TRL's SFTTrainer, on tokens that this suite has labelled."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from trl import SFTConfig, SFTTrainer


def training_arguments(train: dict[str, Any]) -> "SFTConfig":
    """The trainer's config for a recipe's `train` section.

    What the recipe leaves open and the machine decides: bf16 mixed precision only where the processor multiplies
    bf16 faster than fp32, pinned memory only beside a GPU.

    Raises:
        UserError: values that the trainer's own config refuses.
    """
    import torch
    from trl import SFTConfig

    gpu = torch.cuda.is_available()
    values: dict[str, Any] = {"dataloader_pin_memory": gpu, "report_to": "none", "disable_tqdm": False}
    values["logging_nan_inf_filter"] = False  # a loss that is not a number must be seen, not averaged away
    if "bf16" not in train and not train.get("fp16"):
        values["bf16"] = torch.cuda.is_bf16_supported() if gpu else _cpu_has_amx()
    try:
        arguments = SFTConfig(**(values | train))
        _try_optimizer_and_schedule(arguments)
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"train: {error}") from error
    return arguments


def _try_optimizer_and_schedule(arguments: "SFTConfig") -> None:
    """The trainer would find a missing package or a wrong keyword only once the weights are loaded."""
    import torch
    from transformers import Trainer, get_scheduler

    Trainer.get_optimizer_cls_and_kwargs(arguments)
    get_scheduler(
        arguments.lr_scheduler_type,
        torch.optim.SGD([torch.zeros(1, requires_grad=True)]),
        num_warmup_steps=1,
        num_training_steps=10,
        scheduler_specific_kwargs=arguments.lr_scheduler_kwargs or {},  # type: ignore[arg-type]  # a dict by now
    )


def _cpu_has_amx() -> bool:
    flags = Path("/proc/cpuinfo")
    return flags.is_file() and "amx_bf16" in flags.read_text(encoding="utf-8", errors="replace")


def build_trainer(
    model: Any,
    tokenizer: Any,
    arguments: "SFTConfig",
    train_rows: Any,
    eval_rows: Any,
    adapter_config: Any,
) -> "SFTTrainer":
    """The trainer over data sets with `input_ids` and `labels`; the adapter is attached in it, seeded."""
    from transformers import set_seed
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from trl import SFTTrainer

    from .progress import TrainingProgress

    set_seed(arguments.seed)
    try:
        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=train_rows,
            eval_dataset=eval_rows if arguments.eval_strategy != "no" else None,
            processing_class=tokenizer,
            peft_config=adapter_config,
        )
    except (ValueError, TypeError, ImportError, RuntimeError, AttributeError, IndexError, KeyError) as error:
        raise UserError(f"train: the trainer refuses these settings: {error}") from error
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(TrainingProgress)
    if model.config.num_experts:
        _train_routers(trainer, model)
    return trainer


def _train_routers(trainer: Any, model: Any) -> None:
    """Let a mixture of experts train as its config says.

    The trainer's own forward knows the load-balancing loss of a softmax router alone; the model answers for all kinds.
    """
    from transformers import TrainerCallback

    config = model.config
    if config.router_aux_loss_coef or config.router_z_loss_coef:
        fused = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            seen: list[Any] = []
            # Only for this call: what stayed would hold the graph of every later one.
            hook = model.base_model.register_forward_hook(lambda body, given, output: seen.append(output.router_logits))
            try:
                outputs = fused(*args, **kwargs)
            finally:
                hook.remove()
            if seen and seen[-1] is not None:
                outputs["aux_loss"] = model.router_losses(seen[-1], [kwargs.get("attention_mask")])[0]
            return outputs

        model.forward = forward
        # What comes back is weighted already.
        trainer.aux_loss_enabled, trainer.router_aux_loss_coef = True, 1.0

    class MoveRouterBiases(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            model.update_router_biases()

    if config.router_bias_update_rate:
        trainer.add_callback(MoveRouterBiases())
