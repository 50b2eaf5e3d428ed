"""The progress bar of training, with one short line for each time the trainer logs."""

from typing import Any

from transformers.trainer_callback import ProgressCallback

from .report import check_finite

# Logged name -> (shown name, format).
SHOWN = {
    "loss": ("loss", ".4f"),
    "reward": ("reward", ".4f"),
    "kl": ("KL", ".4f"),
    "completions/mean_length": ("length", ".1f"),
    "eval_loss": ("held-out loss", ".4f"),
    "grad_norm": ("gradient norm", ".2f"),
    "learning_rate": ("learning rate", ".1e"),
    "mfu": ("MFU", ".1%"),
}
# Waiting for data is shown from this share of the time on.
WAITS = 0.02


class TrainingProgress(ProgressCallback):
    """The library's bar; its raw dictionaries become `step 10/75  loss 3.1234  …  240 tokens/s`."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for key in ("loss", "grad_norm"):
            if key in (logs or {}):
                check_finite(float(logs[key]), f"step {state.global_step}: the {SHOWN[key][0]}")
        if not state.is_world_process_zero or self.training_bar is None:
            return
        parts = [f"{name} {float(logs[key]):{form}}" for key, (name, form) in SHOWN.items() if key in logs]
        if logs.get("tokens_per_second"):
            parts.append(f"{logs['tokens_per_second']:,.0f} tokens/s")
        if logs.get("data_wait", 0) >= WAITS:
            parts.append(f"waits for data {logs['data_wait']:.0%}")
        if parts:
            self.training_bar.write(f"step {state.global_step}/{state.max_steps}  " + "  ".join(parts))
