"""How fast a run is and what it uses: figures for the trainer's logs, for `metrics.csv` and for the result."""

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from ..objectives.preference import plain_model
from ..tokens.report import IGNORE
from .metrics_file import MetricsFile
from .peaks import Peak, peak_of

if TYPE_CHECKING:
    from ...modeling.counting import ForwardFlops
    from ..planning import Plan

# Under this name a checkpoint's trainer_state.json keeps what was counted up to its step.
KEPT = "anyformer"
# The mask of what a pass reads; collators of pairs have one for each side.
MASKS = ("attention_mask", "chosen_attention_mask", "rejected_attention_mask")


@dataclass
class Usage:
    """What steps took, over all processes.

    Attributes:
        tokens: read, without padding; of an encoder-decoder on both sides.
        flops: of the model, forward and backward.
        seconds: of steps, from asking for the batch to the update: no evaluation, no checkpoint.
        waited: seconds of these in which the data loader was waited for, the mean of the processes.
        capacity: FLOPs that all devices could have done in that time.
        memory: bytes, the peak of the fullest process.
    """

    tokens: float = 0.0
    flops: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    capacity: float = 0.0
    memory: float = 0.0

    def add(self, other: "Usage") -> None:
        for name in ("tokens", "flops", "seconds", "waited", "capacity"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.memory = max(self.memory, other.memory)

    def rates(self) -> dict[str, float]:
        """The figures of a log; `mfu` only where FLOPs are counted, nothing of no time."""
        if not self.seconds:
            return {}
        found = {"tokens_per_second": self.tokens / self.seconds, "data_wait": self.waited / self.seconds}
        if self.flops and self.capacity:
            found["mfu"] = self.flops / self.capacity
        return found | {"memory_gb": self.memory / 1e9}


class Meter(TrainerCallback):
    """Counts tokens, FLOPs, time and memory of a run; `Metered` tells it of batches and logs.

    Args:
        flops: of a forward pass of the model; None: FLOPs are not counted.
        passes: forward passes that a step costs, the backward pass among them.
        peak_tflops: of one device, where the recipe states it.
        file: where each log becomes a row; None: nowhere.
    """

    def __init__(
        self, flops: "ForwardFlops | None", passes: int, *, peak_tflops: float | None = None, file: Path | None = None
    ) -> None:
        self.flops, self.passes, self.stated = flops, passes, peak_tflops
        self.file = None if file is None else MetricsFile(file)
        self.peak: Peak | None = None
        self.total, self.interval = Usage(), Usage()
        self.trainer: Any = None
        self._reset()

    def attach(self, trainer: Any) -> "Meter":
        self.trainer = trainer
        trainer.meter = self
        trainer.add_callback(self)
        return self

    def _reset(self) -> None:
        self.counted: Any = 0.0  # a tensor [2] once there is a batch: tokens, FLOPs
        self.seconds = self.waited = 0.0
        self.began: float | None = None
        self.ended: float | None = None

    # What the trainer tells

    def begin_step(self) -> None:
        self._close()
        self.began = time.perf_counter()

    def timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches; waiting for each counts."""
        while True:
            start = time.perf_counter()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.waited += time.perf_counter() - start
            yield batch

    def count(self, batches: Sequence[Any]) -> None:
        for batch in batches:
            if isinstance(batch, Mapping) and (found := self._count(batch)) is not None:
                self.counted = found + self.counted

    def _count(self, batch: Mapping[str, Any]) -> Any:
        """Tokens and FLOPs of a batch [2]; None where it does not hold what the model reads."""
        lengths = lengths_of(batch, both_sides=self.trainer.model.config.is_encoder_decoder)
        if lengths is None:
            return None
        target, source, logits = lengths
        flops = torch.zeros_like(target) if self.flops is None else self.flops.of(target, logits, source)
        return torch.stack([target.sum() + source.sum(), self.passes * flops.sum()])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.restore(state)
        self.trainer.z_steps = state.global_step
        self.trainer.accelerator.wait_for_everyone()  # processes that share a processor measure it while they share it
        self.measure_peak()
        if self.file is not None and state.is_world_process_zero:
            self.file.begin(state.global_step)
        self._reset()
        self.interval, self.seen = Usage(), float(state.num_input_tokens_seen)

    def take_over(self, state: Any) -> None:
        """Have the figures of a run whose last step is behind it."""
        self.restore(state)
        self.measure_peak()

    def measure_peak(self) -> None:
        args = self.trainer.args
        if self.flops is not None and self.peak is None:
            dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else self.trainer.model.dtype
            self.peak = peak_of(args.device, dtype, tf32=bool(args.tf32), stated=self.stated)

    def restore(self, state: Any) -> None:
        """Go on from what the checkpoint of a trainer's state has counted."""
        kept = state.stateful_callbacks.get(KEPT) if isinstance(state.stateful_callbacks, dict) else None
        self.total = Usage(**kept) if kept else Usage()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (control.should_save or control.should_evaluate) and args.device.type != "cpu":
            torch.accelerator.synchronize(args.device)  # what the step still computes is not part of what follows
        self.ended = time.perf_counter()
        if control.should_save:
            self.gather(state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if control.should_save:
            self.gather(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gather(state)  # the steps behind the last log

    def _close(self) -> None:
        if self.began is not None and self.ended is not None:
            self.seconds += self.ended - self.began
        self.began = self.ended = None

    # Figures

    def gather(self, state: Any) -> None:
        """Add what all processes counted since the last time; every process must call it."""
        self._close()
        device, trainer = self.trainer.args.device, self.trainer
        dtype = torch.float32 if device.type == "mps" else torch.float64
        counted = self.counted if isinstance(self.counted, torch.Tensor) else torch.zeros(2)
        seen = float(state.num_input_tokens_seen)
        capacity = self.seconds * (0.0 if self.peak is None else self.peak.flops)
        own = torch.tensor([self.seconds, self.waited, capacity, peak_memory(device)], dtype=dtype, device=device)
        own = torch.cat([counted.to(device, dtype), own])
        rows = trainer.accelerator.gather(own[None])  # [processes, 6]
        # Processes that share a batch's tensors have counted the same tokens.
        tokens, flops = (rows[:, :2].sum(0) / trainer.get_tp_size()).tolist()
        # Where batches hold no tokens because the model writes them, the trainer counts them.
        tokens = tokens or seen - self.seen
        seconds, waited = rows[:, 2].max().item(), rows[:, 3].mean().item()
        found = Usage(tokens, flops, seconds, waited, rows[:, 4].sum().item(), rows[:, 5].max().item())
        self.interval.add(found)
        self.total.add(found)
        self._reset()
        self.seen = seen
        state.stateful_callbacks[KEPT] = asdict(self.total)

    def figures(self, state: Any) -> dict[str, float]:
        """What a log says beside the loss; every process must call it."""
        if self.ended is not None:
            self.ended = time.perf_counter()  # the loss has been waited for
        self.gather(state)
        found = {"tokens": round(self.total.tokens), **self.interval.rates()}
        self.interval = Usage()
        return found

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        summary = "train_loss" in (logs or {})
        if self.file is not None and state.is_world_process_zero and logs and not summary:
            self.file.add({"step": state.global_step, **logs})

    def summary(self) -> dict[str, Any]:
        """The figures of the whole run, of its sessions before a resume too."""
        found: dict[str, Any] = {"tokens": round(self.total.tokens), **self.total.rates()}
        if self.total.flops:
            found["total_flos"] = self.total.flops
        if self.peak is not None:
            found |= {"peak_tflops": self.peak.flops / 1e12, "peak_source": self.peak.source}
        return found


class Metered:
    """Mixin of a trainer: what it logs goes with the figures of its `meter`, if it has one.

    Where the model adds a z-loss to what it learns from, the loss that the trainer reports is the one without it, and
    `z_loss` stands beside it in the logs.
    """

    meter: Meter | None = None
    z_sum: Any = None  # of the steps since the last log
    z_steps: int = 0

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list[Any], Any]:
        base: Any = super()
        if self.meter is None:
            return base.get_batch_samples(epoch_iterator, num_batches, device)
        self.meter.begin_step()
        found = base.get_batch_samples(self.meter.timed(epoch_iterator), num_batches, device)
        self.meter.count(found[0])
        return found

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        step = super().training_step  # type: ignore[misc]
        coefficient = getattr(plain_model(self.model).config, "z_loss_coef", 0.0)  # type: ignore[attr-defined]
        if not coefficient:
            return step(model, inputs, num_items_in_batch)
        seen: list[Any] = []
        # On the outermost wrapper, so that the graph of a compiled model stays whole.
        hook = model.register_forward_hook(lambda module, given, output: seen.append(getattr(output, "z_loss", None)))
        try:
            loss = step(model, inputs, num_items_in_batch)
        finally:
            hook.remove()
        found = [z for z in seen if z is not None]
        if not found:
            return loss
        z = torch.stack(found).sum() * self._loss_scale(num_items_in_batch)
        self.z_sum = z if self.z_sum is None else self.z_sum + z
        return loss - coefficient * z

    def _loss_scale(self, items: Any) -> float:
        """What the trainer multiplies a model's loss by before it is added up over batches and averaged over
        processes."""
        trainer: Any = self
        if items is None:
            return 1 / trainer.current_gradient_accumulation_steps
        if not trainer.args.average_tokens_across_devices:
            return 1.0
        return trainer.accelerator.num_processes // trainer.get_tp_size()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        trainer: Any = self
        if "loss" in logs:
            if self.z_sum is not None:
                steps = max(trainer.state.global_step - self.z_steps, 1)
                logs["z_loss"] = trainer.accelerator.gather(self.z_sum).mean().item() / steps
            self.z_sum, self.z_steps = None, trainer.state.global_step
            if self.meter is not None:
                logs |= self.meter.figures(trainer.state)
        super().log(logs, start_time)  # type: ignore[misc]


def lengths_of(batch: Mapping[str, Any], *, both_sides: bool) -> tuple[Any, Any, Any] | None:
    """Lengths of the rows of a batch without padding, as three tensors [rows]: of the target, of the source (0 but for
    an encoder-decoder), and the places whose logits are learned from; None where there are no rows of tokens. A row
    without a label, as it fills the last batch of several processes, has length 0."""
    masks = [batch[name] for name in MASKS if isinstance(batch.get(name), torch.Tensor) and batch[name].dim() == 2]
    labels = batch.get("labels")
    if not masks:
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
            return None
        masks = [torch.ones_like(ids)]
    read = _sums(masks)
    # Classes of whole texts are no places of a text.
    learned = isinstance(labels, torch.Tensor) and labels.dim() == 2 and len(labels) == len(read)
    if not both_sides:
        # A decoder predicts none of the first tokens, an encoder may: one place of a row in a long text.
        logits = _sums([labels != IGNORE]) if learned else read
        return read * (logits > 0), torch.zeros_like(read), logits
    own = batch.get("decoder_attention_mask")
    if isinstance(own, torch.Tensor) and own.dim() == 2:
        target = _sums([own])
    elif learned:
        target = _sums([labels != IGNORE])
    else:
        return None
    logits = _sums([labels != IGNORE]) if learned else target
    return target * (logits > 0), read * (logits > 0), logits


def _sums(masks: Sequence[Any]) -> Any:
    dtype = torch.float32 if masks[0].device.type == "mps" else torch.float64
    return torch.cat([mask.sum(-1, dtype=dtype) for mask in masks])


def peak_memory(device: torch.device) -> float:
    """Bytes: the most that tensors took on a GPU, or that the process took of the machine's memory."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def metered(trainer: Any, objective: Any, plan: "Plan", *, peak_tflops: float | None, file: Path | None) -> Meter:
    """Give a trainer its meter.

    Args:
        objective: says whether the FLOPs of its steps are those of passes over the batch.
        peak_tflops: of one device, where the recipe states it.
        file: of the figures, step by step.
    """
    from ...modeling.counting import forward_flops

    flops = forward_flops(plain_model(trainer.model).config, objective.head) if objective.reads_batches_alone else None
    return Meter(flops, plan.passes, peak_tflops=peak_tflops, file=file).attach(trainer)
