"""The order of rows under the library's sampler: one for any number of processes, and none is read twice."""

import json
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from transformers import Trainer

from anyformer.recipes.arguments import training_arguments
from anyformer.recipes.objectives.trainers import library_trainer
from anyformer.recipes.shards.selection import everything
from anyformer.recipes.tokens.padding import pad_rows

ARGUMENTS = ("transformers.training_args", "TrainingArguments")
LENGTH, EPOCHS = 8, 3


class Counting(torch.utils.data.Dataset):
    """Rows that count how often each is asked for."""

    def __init__(self, rows):
        self.rows, self.asked = rows, []

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        self.asked.append(index)
        return self.rows[index]


def train(model, rows, folder, *, resume=None, **settings):
    """The rows that were asked for, and the micro-batches of each step by their first tokens."""
    settings = {"num_train_epochs": EPOCHS, "save_steps": 100, "seed": 7, "learning_rate": 1e-2} | settings
    settings |= {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none", "optim": "sgd"}
    counting = Counting(rows)
    trainer = library_trainer(
        Trainer,
        model,
        training_arguments(ARGUMENTS, settings),
        adapter=None,
        train_dataset=counting,
        eval_dataset=None,
        data_collator=partial(pad_rows, pad_token_id=0),
    )
    steps = []
    step = trainer.training_step

    def recorded(module, inputs, *args, **kwargs):
        steps.append([trainer.state.global_step, inputs["input_ids"].tolist()])
        return step(module, inputs, *args, **kwargs)

    trainer.training_step = recorded
    trainer.train(resume_from_checkpoint=resume)
    return counting.asked, steps


def by_step(*ranks):
    """Global batches: for each step the rows of all processes, micro-batch by micro-batch."""
    found = {}
    for micro in zip(*ranks, strict=True):
        assert len({number for number, _ in micro}) == 1
        for number, rows in micro:
            found.setdefault(number, []).extend(rows)
    return [found[number] for number in sorted(found)]


@pytest.fixture
def rows_of(shards_of, tiny):
    """A function: so many rows of LENGTH tokens, each different."""

    def make(count):
        rng = np.random.default_rng(2)
        texts = ["".join(rng.choice(list("one two"), 30)) for _ in range(count)]
        return everything(shards_of(texts)).prepared(max_length=LENGTH, packing="blocks", truncation="drop").dataset

    def exactly(count):
        rows = make(count)
        assert len(rows) >= count
        rows.count = count
        return rows

    return exactly


def model_of(tiny):
    return tiny(vocab_size=400).train()


@pytest.mark.parametrize("settings", [{}, {"data_seed": 3}, {"train_sampling_strategy": "sequential"}])
def test_every_epoch_asks_for_each_row_once(rows_of, tiny, tmp_path, settings):
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    rows = rows_of(19)
    asked, _ = train(model_of(tiny), rows, tmp_path, **batches, **settings)
    epochs = [asked[i : i + 19] for i in (0, 19, 38)]
    assert len(asked) == 57 and all(sorted(epoch) == list(range(19)) for epoch in epochs)
    assert (epochs[0] == epochs[1]) == ("train_sampling_strategy" in settings)
    # The order is the seed's, whatever random numbers were drawn before.
    torch.rand(3)
    assert train(model_of(tiny), rows, tmp_path, **batches, **settings)[0] == asked


@pytest.mark.parametrize("stop", [3, 5, 7, 10])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_that_goes_on_reads_no_row_that_it_has_seen(rows_of, tiny, tmp_path, stop, accumulation):
    """Within the first epoch, where it ends, and within a later one."""
    rows = rows_of(20)  # five steps of four rows
    settings = {"per_device_train_batch_size": 4 // accumulation, "gradient_accumulation_steps": accumulation}
    settings |= {"save_steps": stop, "save_total_limit": 9}
    asked, steps = train(model_of(tiny), rows, tmp_path, **settings)
    assert len(asked) == 20 * EPOCHS and len(by_step(steps)) == 5 * EPOCHS
    again, rest = train(model_of(tiny), rows, tmp_path, resume=str(tmp_path / f"checkpoint-{stop}"), **settings)
    assert again == asked[stop * 4 :]
    assert rest == steps[stop * accumulation :]


WORKER = """
import json, sys
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from test_shard_order import train
from anyformer import AnyformerForCausalLM
from anyformer.recipes.shards import TokenShards
from anyformer.recipes.shards.selection import everything

folder, settings = Path(sys.argv[2]), json.loads(sys.argv[3])
rows = everything(TokenShards(folder / "shards")).prepared(max_length=8, packing="blocks", truncation="drop").dataset
rows.count = settings.pop("rows")
found = []
for resume in (None, *settings.pop("resume")):
    model = AnyformerForCausalLM.from_pretrained(folder / "model").train()
    resume = resume and str(folder / "two" / f"checkpoint-{resume}")
    found.append(train(model, rows, folder / "two", resume=resume, **settings))
rank = torch.distributed.get_rank()
assert torch.distributed.get_world_size() == 2
weights = {name: tensor.tolist() for name, tensor in model.named_parameters() if "norm" in name}
Path(folder / f"rank{rank}.json").write_text(json.dumps({"found": found, "weights": weights}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch with gloo")
@pytest.mark.parametrize("count", [20, 19])
def test_two_processes_see_the_global_batches_of_one(rows_of, tiny, tmp_path, count):
    """Batch by batch, over three epochs, and where the run goes on within the first and within the second."""
    rows = rows_of(count)
    model = model_of(tiny)
    model.save_pretrained(tmp_path / "model")
    settings = {"max_steps": 15, "save_total_limit": 9}
    _, steps = train(model, rows, tmp_path / "one", per_device_train_batch_size=4, **settings)
    expected = by_step(steps)
    _, accumulated = train(
        model_of(tiny),
        rows,
        tmp_path / "accumulated",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        **settings,
    )
    assert by_step(accumulated) == expected and len(expected) == 15

    settings |= {"per_device_train_batch_size": 2, "save_steps": 1, "save_total_limit": 20}
    settings |= {"rows": count, "resume": [3, 7]}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    (tmp_path / "worker.py").write_text(WORKER, encoding="utf-8")
    here = str(__file__).rsplit("/", 1)[0]
    done = subprocess.run(
        [*command, str(tmp_path / "worker.py"), here, str(tmp_path), json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    for run, stop in enumerate((0, 3, 7)):
        (asked_0, steps_0), (asked_1, steps_1) = (rank["found"][run] for rank in ranks)
        found = by_step(steps_0, steps_1)
        assert len(found) == 15 - stop
        for step, batch in enumerate(found, stop):
            # Of a last batch that is not full the library makes one of its usual size with rows from the beginning.
            whole = expected[step]
            assert batch[: len(whole)] == whole and len(batch) == 4
            assert len(whole) == 4 or batch[len(whole) :] == expected[step // 5 * 5][: 4 - len(whole)]
        assert len(asked_0) == len(asked_1) == 2 * (15 - stop)
    if count % 4 == 0:  # the same steps end in the same weights
        for name, values in ranks[0]["weights"].items():
            one = dict(model.named_parameters())[name]
            torch.testing.assert_close(one.detach(), torch.tensor(values), rtol=0, atol=1e-5)
            assert ranks[1]["weights"][name] == values
