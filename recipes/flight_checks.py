"""Checks of a run that would end well and leave a bad model: cheap ones in every run, costly ones with `--check`.

Those of the data (nothing supervised, rows that never stop) are made where rows are tokenised, those of a reference
model by the objectives that have one.
"""

from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from .errors import UserError
from .parallel.world import current

# Of each weight this many elements are watched, spread evenly.
WATCHED = 10_000
# Below this share of elements that move in a step, training in 16 bits loses most of its updates to rounding.
ENOUGH = 0.5


class FlightChecks(TrainerCallback):
    """What only the first steps show.

    Args:
        checkpoint: what the run is resumed from, or None.
        say: prints a warning.
        learns_at_once: every step has something to learn.
    """

    def __init__(self, checkpoint: Path | None, say: Any, learns_at_once: bool = True) -> None:
        self.checkpoint, self.say, self.learns_at_once = checkpoint, say, learns_at_once
        self.first_step = 0
        self.before: dict[str, Any] = {}
        self.moved: float | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.first_step = state.global_step
        if self.checkpoint is not None:
            check_resumed(model, self.checkpoint)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if current().strategy == "deepspeed":
            return  # which updates weights in fp32, of which those of the model are copies, and has done so by now
        if state.global_step == self.first_step + 1:  # in the first one a warmup has learning rate 0
            self.before = {name: _watched(p).clone() for name, p in _low_precision(model)}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.before:
            return
        changed = {name: (_watched(p) != self.before[name]) for name, p in _low_precision(model)}
        self.before = {}
        self.moved = sum(int(c.sum()) for c in changed.values()) / max(sum(c.numel() for c in changed.values()), 1)
        if self.moved < ENOUGH:
            self.say(
                f"only {self.moved:.0%} of the 16-bit weights moved in a step, the other updates were rounded away: "
                "set model.dtype: float32 (with train.bf16 products stay as fast), or raise train.learning_rate"
            )

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.learns_at_once and state.global_step == self.first_step + 2:
            check_adapters_move(model)


def _low_precision(model: Any) -> list[tuple[str, Any]]:
    import torch

    kinds = (torch.bfloat16, torch.float16)
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad and p.dtype in kinds]


def _watched(parameter: Any) -> Any:
    from .parallel.whole import own_part

    flat = own_part(parameter).detach().flatten()
    return flat[:: max(flat.numel() // WATCHED, 1)]


def check_adapters_move(model: Any) -> None:
    """After two steps every LoRA matrix B has left its start at zero.

    Raises:
        UserError: one has not; names it.
    """
    from .parallel.whole import whole_tensor

    learned = [(n, p) for n, p in model.named_parameters() if "lora_B" in n and p.requires_grad]
    still = [name for name, parameter in learned if not whole_tensor(parameter).detach().any()]
    if still:
        shown = ", ".join(still[:3]) + (f" and {len(still) - 3} more" if len(still) > 3 else "")
        raise UserError(
            f"{len(still)} adapter matrices are still zero after two steps: {shown}. No gradient reaches them, so they "
            "learn nothing: take their modules out of adapter.target_modules, or check train.learning_rate"
        )


def check_resumed(model: Any, checkpoint: Path) -> None:
    """The adapter in training is the checkpoint's, not a fresh one.

    Raises:
        UserError: a tensor differs; names it.
    """
    import torch
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    from .parallel.whole import whole_tensor
    from .parallel.zero import is_split

    file = checkpoint / "adapter_model.safetensors"
    if not isinstance(model, PeftModel) or not file.is_file():
        return
    whole = {name: whole_tensor(p) if is_split(p) else p for name, p in model.named_parameters()}
    held, saved = get_peft_model_state_dict(model, state_dict=model.state_dict() | whole), load_file(file)
    for name in sorted(held.keys() | saved.keys()):
        same = name in held and name in saved and torch.equal(held[name].cpu().to(saved[name].dtype), saved[name])
        if not same:
            raise UserError(
                f"the adapter in training is not the one of {checkpoint}: {name} differs. The run was not resumed; "
                "please report this"
            )


def check_stops(model: Any, stops: list[int]) -> None:
    """The saved generation config stops where the training data do.

    Raises:
        UserError: it names other tokens.
    """
    named = model.generation_config.eos_token_id
    named = named if isinstance(named, list) else [named]
    if set(named) != set(stops):
        raise UserError(
            f"the saved generation_config stops at {named}, the training data at {stops}: the model would not stop. "
            "Please report this"
        )


# Costly ones, by name.
PACKING = "packed documents do not see each other"
ACCUMULATION = "accumulated gradients equal those of one batch"
# One that every run makes, unless its objective samples its data.
ADAPTERS_MOVE = "adapters move in the first two steps"
PASSED = "passed"


def thorough_checks(trainer: Any) -> dict[str, str]:
    """Name of each costly check -> "passed", or why it does not apply.

    Raises:
        UserError: a check fails.
    """
    import torch

    state = torch.get_rng_state()  # the run must not depend on whether it was checked
    loader = trainer.get_train_dataloader()
    done = {
        PACKING: _check_packing(trainer, loader),
        ACCUMULATION: _check_accumulation(trainer, loader),
    }
    torch.set_rng_state(state)
    return done


def _check_packing(trainer: Any, loader: Any) -> str:
    """Change the first document of a packed row: what the model computes of the second must not move."""
    import torch

    batch = next(iter(loader))
    positions = batch.get("position_ids")
    if positions is None:
        return getattr(trainer, "not_apart", "no rows are packed")  # set where texts share rows on purpose
    sides = [prefix for prefix in ("", "decoder_") if f"{prefix}position_ids" in batch]
    starts = [_document_starts(batch, prefix) for prefix in sides]
    row = max(range(len(positions)), key=lambda index: len(starts[0][index]))
    if len(starts[0][row]) < 2:
        return "no row holds two documents"
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    names = [f"{prefix}{name}" for prefix in sides for name in ("input_ids", "position_ids", "attention_mask")]
    inputs = {name: batch[name][row : row + 1].to(base.device) for name in names if name in batch}
    changed = dict(inputs)
    for prefix, side in zip(sides, starts, strict=True):
        ids = changed[f"{prefix}input_ids"] = inputs[f"{prefix}input_ids"].clone()
        ids[0, : side[row][1]] = (ids[0, : side[row][1]] + 1) % base.config.vocab_size
    second = starts[-1][row][1]  # of the side that the model's output is of
    was_training = base.training
    base.eval()
    with torch.no_grad():
        one, other = (_outputs(model, base, x)[second:] for x in (inputs, changed))
    base.train(was_training)
    moved = (one - other).abs().max().item()
    if moved > 0:
        own = hasattr(trainer.args, "packing")
        setting = "train.packing: false" if own else "objective.packing: blocks or none"
        raise UserError(
            f"packed documents see each other: a change of one moves the next by {moved:.1e}. Set {setting}"
        )
    return PASSED


def _outputs(model: Any, base: Any, inputs: dict[str, Any]) -> Any:
    """[length, size]: what is computed of a row's tokens, behind a soft prompt where there is one."""
    config = getattr(model, "active_peft_config", None)
    if config is not None and config.is_prompt_learning:
        return model(**inputs).logits[0, -inputs["input_ids"].shape[1] :]
    return base.base_model(**inputs, use_cache=False).last_hidden_state[0]


def _document_starts(batch: Any, prefix: str) -> list[list[int]]:
    """Of each row where its documents begin, on one side of the batch."""
    positions = batch[f"{prefix}position_ids"]
    first = positions == 0
    if f"{prefix}attention_mask" in batch:
        first = first & batch[f"{prefix}attention_mask"].bool()
    return [row.nonzero().flatten().tolist() for row in first]


def _check_accumulation(trainer: Any, loader: Any) -> str:
    """Two rows in one step and one after the other must give the same gradient."""
    # Set on trainers whose loss is not a mean over rows.
    if reason := getattr(trainer, "not_additive", ""):
        return reason
    dataset = loader.dataset
    if not hasattr(dataset, "__getitem__") or len(dataset) < 2:
        return "fewer than two rows"
    rows = [dataset[0], dataset[1]]
    both, parts = loader.collate_fn(rows), [loader.collate_fn([row]) for row in rows]
    # Some heads shift their labels and some do not: the trainer knows what it counts.
    items = trainer._get_num_items_in_batch(parts, trainer.args.device)
    with _no_dropout(trainer.model):
        whole = _gradients(trainer, [both], items)
        split = _gradients(trainer, parts, items)
    size = max(g.abs().max().item() for g in whole.values())
    apart = max((whole[name] - split[name]).abs().max().item() for name in whole)
    allowed = 2e-2 if trainer.args.bf16 or trainer.args.fp16 else 1e-4
    if not apart <= allowed * size:
        raise UserError(
            f"the gradient of two rows depends on train.gradient_accumulation_steps: it differs by {apart / size:.1e} "
            "of its largest value. Please report this; gradient_accumulation_steps: 1 is not affected"
        )
    return PASSED


def _gradients(trainer: Any, batches: list[Any], items: Any) -> dict[str, Any]:
    """Gradients of one step over the batches, by name of the parameter; those of the model are cleared again."""
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.model.zero_grad()
    for batch in batches:
        trainer.training_step(trainer.model, dict(batch), num_items_in_batch=items)
    found = {n: p.grad.detach().clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
    trainer.model.zero_grad()
    return found


class _no_dropout:
    """Dropout off, and back on."""

    def __init__(self, model: Any) -> None:
        from torch import nn

        self.modules = [(m, m.p) for m in model.modules() if isinstance(m, nn.Dropout)]

    def __enter__(self) -> None:
        for module, _ in self.modules:
            module.p = 0.0

    def __exit__(self, *error: object) -> None:
        for module, p in self.modules:
            module.p = p
