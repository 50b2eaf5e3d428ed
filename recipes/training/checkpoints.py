"""Checkpoints that are whole or not there, for any trainer of transformers or TRL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerState

from ..disk import write_fault
from ..errors import UserError
from ..parallel.world import current, of_first_process
from .manifest import STATE, missing_part
from .unfinished import PREFIX, SAVING, begin, discard, finish, remove_oldest


class WholeCheckpoints:
    """Mixin before a `transformers.Trainer`.

    The trainer writes into `.saving/checkpoint-N` of the run's folder. The folder gets its name when all processes
    have written and every file is on the disk, listed with its checksum in `manifest.json`; only then are older ones
    removed. A failure anywhere ends all processes, with the earlier checkpoints as they were.
    """

    args: Any
    state: Any
    accelerator: Any
    _saving_in: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return self._saving_in or super()._get_output_dir(trial)  # type: ignore[misc]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Raises:
        UserError: it cannot be written.
        """
        run, name = Path(self._get_output_dir(trial)), f"{PREFIX}{self.state.global_step}"
        writes = self.args.should_save
        try:
            self._together(run, lambda: begin(run, name) if writes else None)
            self._together(run, lambda: self._write(run, model, trial))
            self._name_best(run)
            self._together(run, lambda: self._finish(run, name) if writes else None)
        except BaseException:
            if writes:
                discard(run)
            raise
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(run / name))  # type: ignore[misc]

    def _write(self, run: Path, model: Any, trial: Any) -> None:
        """The library's own checkpoint, in the folder of unfinished ones."""
        # Without a best step the library looks for no folder of it, which has not got its name yet, and waits for no
        # other process: one that failed would never come.
        best, self.state.best_global_step = self.state.best_global_step, None
        self._saving_in = str(run / SAVING)
        try:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        finally:
            self._saving_in, self.state.best_global_step = None, best

    def _name_best(self, run: Path) -> None:
        """The folder of the best step, under the name that it will have."""
        step = self.state.best_global_step
        best = run / f"{PREFIX}{step}"
        if step and (step == self.state.global_step or best.is_dir()):
            self.state.best_model_checkpoint = str(best)

    def _finish(self, run: Path, name: str) -> None:
        self.state.save_to_json(str(run / SAVING / name / STATE))  # again: now with the best one's name
        finish(run, name)
        best = self.state.best_model_checkpoint
        remove_oldest(run, self.args.save_total_limit, newest=self.state.global_step, best=best)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._saving_in is None:  # else it is pushed when it has its name
            super()._push_from_checkpoint(checkpoint_folder)  # type: ignore[misc]

    def _together(self, run: Path, act: Callable[[], None]) -> None:
        """Act in all processes; where one fails, all raise.

        Raises:
            UserError: the disk is full or cannot be written, here or in another process.
        """
        from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

        failed: BaseException | None = None
        try:
            act()
        except (Exception, CheckpointException) as error:
            failed = error
        told = [] if failed is None else [_said(failed, run)]
        # Of sharded weights all processes write at once and hear of each other's failures from torch. One that fails
        # by itself must end here: the others may wait for it in there, and its end ends them.
        if self.args.world_size > 1 and not (failed and self._is_sharded):
            from accelerate.utils import gather_object

            told = gather_object(told)
        if failed is not None and not write_fault(failed):
            raise failed
        if told:
            raise UserError(told[0]) from failed

    @property
    def _is_sharded(self) -> bool:
        return current().sharded or bool(getattr(self, "is_fsdp_enabled", False))

    # Resuming

    def _init_training_state(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class, which forgets the best checkpoint of a run whose folder has moved."""
        started = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        checkpoint = kwargs.get("resume_from_checkpoint") or (args[3] if len(args) > 3 else None)
        if checkpoint is not None:
            stored = TrainerState.load_from_json(str(Path(checkpoint) / STATE))
            self.state.best_model_checkpoint = best_beside(Path(checkpoint), stored)
        return started

    def _load_best_model(self) -> None:
        """Raises:
        UserError: the best checkpoint is damaged.
        """
        best = Path(self.state.best_model_checkpoint)

        def check() -> None:
            if part := missing_part(best, checksums=True):
                raise UserError(f"the best checkpoint {best} cannot be loaded: {part}")

        of_first_process(check)
        super()._load_best_model()  # type: ignore[misc]


def best_beside(checkpoint: Path, state: Any) -> str | None:
    """The best checkpoint that a state names, where it lies beside the checkpoint that the state is of."""
    if state.best_model_checkpoint is None:
        return None
    best = checkpoint.parent / Path(state.best_model_checkpoint).name
    return str(best) if best.is_dir() else None


def _said(error: BaseException, run: Path) -> str:
    reason = write_fault(error)
    if not reason:
        return str(error) if isinstance(error, UserError) else f"{run}: {type(error).__name__}: {error}"
    kept = "The earlier ones are whole: mend it, then go on with --resume"
    return f"no checkpoint can be written into {run}: {reason}. {kept}"
