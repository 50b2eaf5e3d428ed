"""Runs jobs in one process of several; started by torchrun, see `processes.py`.

    worker.py JOBS RESULTS

JOBS is a JSON list of {recipe, overrides, strategy, resume, fault, check}; RESULTS gets, by the first process, a list
of what became of each: "" or the text of the UserError.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch._dynamo

from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.parallel import world as joined
from anyformer.recipes.parallel.strategy import Parallel
from anyformer.recipes.parallel.world import begun, leave
from anyformer.recipes.run import run_recipe


@contextmanager
def fsdp_silently_ddp(rank: int) -> Iterator[None]:
    """Accelerate's state says CPU, so that it makes DDP of FSDP."""
    with patch("anyformer.recipes.parallel.world.shard_on_cpus", lambda arguments: None):
        yield


@contextmanager
def deepspeed_silently_ddp(rank: int) -> Iterator[None]:
    """Nobody tells Accelerate of DeepSpeed."""
    with patch("anyformer.recipes.parallel.zero.environment", lambda settings: {}):
        yield


@contextmanager
def apart(rank: int) -> Iterator[None]:
    """The model is not wrapped, so that nothing is reduced."""
    from accelerate import Accelerator

    with patch.object(Accelerator, "prepare_model", lambda self, model, **options: model):
        yield


@contextmanager
def another_recipe(rank: int) -> Iterator[None]:
    from anyformer.recipes.schema import Recipe

    whole = Recipe.to_yaml
    with patch.object(Recipe, "to_yaml", lambda self: whole(self) + f"# {rank}\n"):
        yield


@contextmanager
def is_compiled(rank: int) -> Iterator[None]:
    """Nothing is spoiled: a run that compiles nothing fails."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@contextmanager
def best_at_four(rank: int) -> Iterator[None]:
    """The held-out loss is the lowest at step 4, whatever it was."""
    from anyformer.recipes.progress import TrainingProgress

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        metrics["eval_loss"] = abs(state.global_step - 4) + 1.0

    with patch.object(TrainingProgress, "on_evaluate", on_evaluate):
        yield


SPOILED = {
    "": lambda rank: nullcontext(),
    "nobody asked": lambda rank: nullcontext(),
    "fsdp silently DDP": fsdp_silently_ddp,
    "deepspeed silently DDP": deepspeed_silently_ddp,
    "apart": apart,
    "another recipe": another_recipe,
    "is compiled": is_compiled,
    "best at four": best_at_four,
}


def main() -> None:
    torch.set_num_threads(1)
    joined._AFTER_THE_FIRST = 0.0  # no launcher is there to end the others
    jobs, results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), []
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    for job in jobs:
        recipe = load_recipe(job["recipe"], job["overrides"])
        if job["strategy"] == "one" and world > 1:  # processes that know nothing of each other cannot share a folder
            folder = f"train.output_dir={recipe.train['output_dir']}-{rank}"
            recipe = load_recipe(job["recipe"], [*job["overrides"], folder])
        parallel = Parallel(job["strategy"], world, rank) if job["strategy"] != "one" else Parallel()
        try:
            with SPOILED[job.get("fault", "")](rank), begun(parallel):
                run_recipe(recipe, resume=job.get("resume", False), check=job.get("check", False))
            results.append("")
        except UserError as error:
            results.append(str(error))
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")
    leave()


if __name__ == "__main__":
    main()
