"""Defined ends of a training: a loss that is not a number, and SIGTERM."""

from pathlib import Path
from typing import Any

import torch

from ..errors import Terminated, UserError
from ..parallel.whole import own_part
from ..parallel.world import current
from .batch_rows import rows_of_batch
from .manifest import missing_part
from .sigterm import Sigterm
from .unfinished import PREFIX, checkpoint_folders

# Rows named in a message.
_SHOWN = 8


class DefinedEnds:
    """Mixin before a `transformers.Trainer`, in front of `WholeCheckpoints`.

    Once a step, after its gradients are there and before the optimizer uses them, the processes agree on two facts:
    that a loss or the gradient's norm is not finite somewhere, which ends all of them with the weights as they were,
    and that a SIGTERM has arrived somewhere, which ends all of them after this step and a checkpoint.

    transformers' own `enable_jit_checkpoint` is not used: it waits three seconds before it heeds a SIGTERM, each
    process then decides for itself at which step it saves, its checkpoint is taken within a step as well as after it,
    before the state counts that step, and the run ends as if it had been trained to its end.

    Under DeepSpeed the engine makes its step within the backward pass, so what is not finite is found right after it.
    """

    args: Any
    state: Any
    control: Any
    accelerator: Any
    model: Any
    _sigterm: Sigterm | None = None
    _stops = False
    _saved_at = -1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._losses: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class.

        Raises:
            UserError: a loss or gradient is not finite.
            Terminated: stopped by SIGTERM, after a checkpoint.
        """
        self._stops = False
        with Sigterm() as self._sigterm:
            result = super().train(*args, **kwargs)  # type: ignore[misc]
            # In the last step nobody was asked any more.
            if self._agreed([self._sigterm.received])[0]:
                raise Terminated(f"Stopped by SIGTERM after step {self.state.global_step}, the last one")
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        self._losses.append(loss.detach())
        return loss

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """As the base class; called once a step, before the optimizer's.

        Raises:
            UserError: something is not finite; in all processes.
        """
        norm = super()._get_grad_norm(model, grad_norm)  # type: ignore[misc]
        losses, self._losses = self._losses, []
        finite = [torch.isfinite(loss).all() for loss in losses]
        # A scaler of 16-bit gradients looks for too large a factor by finding infinite ones, and skips these steps.
        if norm is not None and self.accelerator.scaler is None:
            norm_tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else torch.as_tensor(norm)
            finite.append(torch.isfinite(norm_tensor).to(finite[0].device if finite else norm_tensor.device))
        broken = ~torch.stack(finite).all() if finite else False
        spoiled, stops = self._agreed([broken, self._sigterm is not None and self._sigterm.received])
        if spoiled:
            self._end_spoiled(losses, norm)
        self._stops = self._stops or stops
        return norm

    def _agreed(self, flags: list[Any]) -> list[bool]:
        """What is true in any process."""
        if self.args.world_size == 1:
            return [bool(flag) for flag in flags]
        told = torch.stack([torch.as_tensor(flag, device=self.args.device).float() for flag in flags])
        return [value > 0 for value in self.accelerator.reduce(told, "sum").tolist()]

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """As the base class; a run that stops saves whatever its settings say.

        Raises:
            Terminated: it stops here.
        """
        if not self._stops:
            return super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        model, trial = args[2], args[3]
        evaluates = self.control.should_evaluate
        if evaluates:  # which may take longer than whoever sent the signal waits
            self._save_checkpoint(model, trial)
        self.control.should_log = True  # the mean loss since the last line is not in the checkpoint
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]
        if evaluates or self._saved_at != self.state.global_step:
            self._save_checkpoint(model, trial)
        step = self.state.global_step
        raise Terminated(f"Stopped by SIGTERM after step {step}: {PREFIX}{step} is written")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """As the base class.

        Raises:
            UserError: the weights are not finite.
        """
        # The losses of the next step would tell, when the last checkpoint is spoiled already.
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        finite = [own_part(parameter).detach().isfinite().all() for parameter in trained]
        if self._agreed([~torch.stack(finite).all() if finite else False])[0]:
            raise UserError(
                f"step {self.state.global_step}: the weights are not finite numbers any more, so nothing is saved. "
                f"{self._advice()}"
            )
        super()._save_checkpoint(model, trial)  # type: ignore[misc]
        self._saved_at = self.state.global_step

    # What is said of a loss that is not a number

    def _end_spoiled(self, losses: list[torch.Tensor], norm: Any) -> None:
        told = self._spoiled_here([loss.float().mean().item() for loss in losses], norm)
        if self.args.world_size > 1:
            from accelerate.utils import gather_object

            told = list(dict.fromkeys(gather_object(told)))
            told = [said for said in told if "the loss" in said] or told  # of which the gradient is the consequence
        raise UserError(f"step {self.state.global_step + 1}: {'; '.join(told)}. {self._advice()}")

    def _spoiled_here(self, losses: list[float], norm: Any) -> list[str]:
        """What is not finite in this process, and the rows that it came from."""
        count, finite = len(losses), [abs(loss) < float("inf") for loss in losses]  # not a number is below nothing
        process = f" of process {self.args.process_index}" if self.args.world_size > 1 else ""
        told = [
            f"in micro-batch {number + 1} of {count}{process} the loss is {losses[number]}{self._rows([number])}"
            for number in range(count)
            if not finite[number]
        ]
        if told:
            return told[:1]
        value = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if self.args.world_size > 1:  # all processes have the sum of all gradients: which one's rows is not known
            return [f"the gradient norm is {value}"] if abs(value) >= float("inf") or value != value else []
        return [f"the gradient norm is {value}{self._rows(list(range(count)))}"]

    def _rows(self, micro_batches: list[int]) -> str:
        found: list[int] = []
        for number in micro_batches:
            rows = rows_of_batch(self, number)
            if rows is None:
                return ""
            found += rows
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        return f", from rows {', '.join(map(str, found[:_SHOWN]))}{more} of the tokenised training data (from 0)"

    def _advice(self) -> str:
        whole = [folder for folder in checkpoint_folders(Path(self.args.output_dir)) if not missing_part(folder)]
        kept = f"{whole[-1]} is whole, and --resume goes on from it" if whole else "No checkpoint had been written"
        changed = "its step is lost" if current().strategy == "deepspeed" else "no weight was changed by it"
        return (
            f"Training has diverged or a row is bad: {changed}. {kept}. Lower train.learning_rate, "
            "set train.max_grad_norm: 1.0 or a warmup, use bf16 or fp32 in place of fp16, or look at these rows"
        )
