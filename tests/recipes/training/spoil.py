"""`anyformer` with something that goes wrong in one of its processes: spoil.py WHAT RANK STEP ARGUMENTS…"""

import os
import resource
import signal
import sys

from anyformer.recipes.progress import TrainingProgress
from anyformer.recipes.training.interruptions import DefinedEnds
from anyformer.scripts.cli import main

what, rank, step = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv = ["anyformer", *sys.argv[4:]]


def at_step_end(self, args, state, control, **kwargs):
    if state.global_step != step:
        return
    if what == "terminate":
        os.kill(os.getpid(), signal.SIGTERM)
    elif what == "limit":  # a checkpoint's first larger file is beyond it
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


if int(os.environ["RANK"]) == rank and what == "nan":
    original = DefinedEnds.training_step

    def training_step(self, model, inputs, *args, **kwargs):
        if self.state.global_step == step:
            next(model.parameters()).data.fill_(float("nan"))  # of this process's copy
            print("spoilt:", self.processing_class.batch_decode(inputs["input_ids"]), flush=True)
        return original(self, model, inputs, *args, **kwargs)

    DefinedEnds.training_step = training_step
elif int(os.environ["RANK"]) == rank:
    TrainingProgress.on_step_end = at_step_end
main()
