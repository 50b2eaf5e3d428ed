"""Runs jobs in one process of several; started by torchrun, see `processes.py`.

    worker.py JOBS RESULTS

JOBS is a JSON list of {recipe, overrides, strategy, resume, overwrite}; RESULTS gets, by the first process, a list of
what became of each: "" or the text of the UserError.
"""

import json
import os
import sys
from pathlib import Path

import torch

from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.parallel.strategy import Parallel
from anyformer.recipes.parallel.world import begun
from anyformer.recipes.run import run_recipe


def main() -> None:
    torch.set_num_threads(1)
    jobs, results = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), []
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for job in jobs:
        recipe = load_recipe(job["recipe"], job["overrides"])
        try:
            with begun(Parallel(job["strategy"], world, rank)):
                run_recipe(recipe, resume=job.get("resume", False), overwrite=job.get("overwrite", False))
            results.append("")
        except UserError as error:
            results.append(str(error))
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
