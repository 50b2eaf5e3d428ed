"""Activation checkpointing of all layers and of some: the same gradients from less memory."""

from functools import partial

import pytest
import torch
from datasets import Dataset
from transformers import Trainer
from transformers.modeling_layers import GradientCheckpointingLayer

from anyformer.recipes.arguments import training_arguments
from anyformer.recipes.errors import UserError
from anyformer.recipes.objectives.trainers import library_trainer
from anyformer.recipes.tokens.padding import pad_rows

ARGUMENTS = ("transformers.training_args", "TrainingArguments")
SHAPES = {
    "decoder": {},
    "experts": {"num_experts": 4, "first_k_dense_replace": 1},
    "both": {"architecture": "encoder-decoder", "head": "seq2seq_lm", "decoder_start_token_id": 1},
}


def gradients(model, dropout):
    """Gradients, and the bytes that the forward pass kept for the backward one, parameters left out."""
    ids = torch.randint(3, 101, (2, 16), generator=torch.Generator().manual_seed(1))
    held, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            held[place] = tensor.untyped_storage().nbytes()
        return tensor

    torch.manual_seed(7)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(held.values())


@pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_equal_gradients_from_less_memory(tiny, fields, dropout):
    found = {}
    for every in (None, 2, 1):
        model = tiny(num_hidden_layers=4, hidden_dropout=dropout, **fields).train()
        if every is not None:
            model.activation_checkpointing_enable(every_n_layers=every)
        found[every] = gradients(model, dropout)
    plain, bytes_kept = found[None][0], {every: kept for every, (_, kept) in found.items()}
    assert len(plain) > 10
    for every in (2, 1):
        assert found[every][0].keys() == plain.keys()
        for name, gradient in found[every][0].items():
            torch.testing.assert_close(gradient, plain[name], rtol=0, atol=1e-6, msg=name)
    # Half of the layers keep less than all, none the least.
    assert bytes_kept[1] < 0.6 * bytes_kept[None] and bytes_kept[1] < bytes_kept[2] < 0.85 * bytes_kept[None]


@pytest.mark.parametrize(("options", "layers"), [({}, [0, 1, 2, 3]), ({"every_n_layers": 2}, 2), (None, [])])
def test_the_trainer_gives_the_keywords_to_the_model(tiny, tmp_path, options, layers):
    model = tiny(num_hidden_layers=4)
    rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}] * 4
    train = {"output_dir": str(tmp_path), "use_cpu": True, "max_steps": 1, "save_strategy": "no", "bf16": False}
    train |= {} if options is None else {"activation_checkpointing": True, "activation_checkpointing_kwargs": options}
    trainer = library_trainer(
        Trainer,
        model,
        training_arguments(ARGUMENTS, train),
        adapter=None,
        train_dataset=Dataset.from_list(rows),
        data_collator=partial(pad_rows, pad_token_id=0),
    )
    trainer.train()
    own = [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]
    chosen = [index for index, layer in enumerate(own) if layer.gradient_checkpointing]
    assert (len(chosen) if isinstance(layers, int) else chosen) == layers and len(own) == 4


WRONG = [
    ("{every_n_layer: 2}", "every_n_layer: unknown key; known: use_reentrant, .*every_n_layers, offload"),
    ("{every_n_layers: 0}", "every_n_layers: must be a whole number of at least 1, found 0"),
    ("{every_n_layers: true}", "every_n_layers: must be a whole number of at least 1, found true"),
    ("{use_reentrant: 1}", "use_reentrant: must be true or false, found 1"),
]


@pytest.mark.parametrize(("value", "message"), WRONG)
def test_wrong_keywords(recipe, value, message):
    options = ("train.activation_checkpointing=true", f"train.activation_checkpointing_kwargs={value}")
    with pytest.raises(UserError, match=r"train\.activation_checkpointing_kwargs\." + message):
        recipe("~train.gradient_checkpointing", *options)


def test_keywords_of_what_is_off(recipe):
    with pytest.raises(UserError, match="activation_checkpointing_kwargs: has no effect: set"):
        recipe("train.activation_checkpointing_kwargs={every_n_layers: 2}")
