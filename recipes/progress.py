"""The progress bar of training, with one short line for each time the trainer logs."""

import time
from typing import Any

from transformers.trainer_callback import ProgressCallback

# Logged name -> (shown name, format).
SHOWN = {
    "loss": ("loss", ".4f"),
    "reward": ("reward", ".4f"),
    "kl": ("KL", ".4f"),
    "completions/mean_length": ("length", ".1f"),
    "eval_loss": ("held-out loss", ".4f"),
    "grad_norm": ("gradient norm", ".2f"),
    "learning_rate": ("learning rate", ".1e"),
}
# What TRL's trainers and transformers' call the tokens that were seen.
COUNTED = ("num_tokens", "num_input_tokens_seen")


class TrainingProgress(ProgressCallback):
    """The library's bar; its raw dictionaries become `step 10/75  loss 3.1234  …  240 tokens/s`."""

    def __init__(self) -> None:
        super().__init__()
        self.before = (time.monotonic(), 0.0)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self.before = (time.monotonic(), 0.0)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or self.training_bar is None:
            return
        parts = [f"{name} {float(logs[key]):{form}}" for key, (name, form) in SHOWN.items() if key in logs]
        counts = [float(logs[key]) for key in COUNTED if key in logs]
        if "loss" in logs and counts:
            now, tokens = time.monotonic(), counts[0]
            then, counted = self.before
            # After a resume the count starts above zero: the first interval says nothing.
            if counted or state.global_step <= args.logging_steps:
                parts.append(f"{(tokens - counted) / max(now - then, 1e-9):.0f} tokens/s")
            self.before = (now, tokens)
        if parts:
            self.training_bar.write(f"step {state.global_step}/{state.max_steps}  " + "  ".join(parts))
