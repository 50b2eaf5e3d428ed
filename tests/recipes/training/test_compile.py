"""`train.torch_compile` on a processor: the losses of the model as it is, packed or not.

The graphs are traced and differentiated as for every backend; writing and compiling C++ for them would take minutes.
"""

from functools import partial

import pytest
import torch
from accelerate.utils import has_compiled_regions
from datasets import Dataset
from transformers import Trainer

from anyformer.recipes.arguments import training_arguments
from anyformer.recipes.objectives.trainers import library_trainer
from anyformer.recipes.tokens.padding import pad_rows

ARGUMENTS = ("transformers.training_args", "TrainingArguments")


def rows(packed):
    """Rows of four lengths, so that graphs must take more than the first; packed ones hold two documents."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for length in (16, 12, 16, 9):
        ids = torch.randint(3, 101, (length,), generator=generator).tolist()
        row = {"input_ids": ids, "labels": ids}
        if packed:
            half = length // 2
            row["position_ids"] = [*range(half), *range(length - half)]
        found.append(row)
    return found


def losses(model, folder, packed, **train):
    values = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "save_strategy": "no", "logging_steps": 1}
    values |= {"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5}
    trainer = library_trainer(
        Trainer,
        model,
        training_arguments(ARGUMENTS, values | train),
        adapter=None,
        train_dataset=Dataset.from_list(rows(packed)),
        data_collator=partial(pad_rows, pad_token_id=0),
    )
    trainer.train()
    assert has_compiled_regions(trainer.model_wrapped) == bool(train)
    return [(entry["loss"], entry.get("z_loss", 0.0)) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_losses_are_those_of_the_model_as_it_is(tiny, tmp_path, packed):
    fields = {"initializer_range": 0.05, "num_hidden_layers": 2, "z_loss_coef": 1e-3, "loss_chunk_size": 8}
    plain = losses(tiny(**fields), tmp_path, packed)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = losses(tiny(**fields), tmp_path, packed, torch_compile=True, torch_compile_backend="aot_eager")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    for found, expected in zip(compiled, plain, strict=True):
        assert found == pytest.approx(expected, abs=1e-4)
    if packed:  # what the two documents of a row must not see makes a difference
        assert abs(plain[0][0] - losses(tiny(**fields), tmp_path, False)[0][0]) > 1e-4
