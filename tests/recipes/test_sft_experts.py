"""Mixtures of experts under the trainer: their own router losses, and biases that move."""

import pytest
import torch
from datasets import Dataset
from trl import SFTTrainer

from anyformer.recipes.arguments import training_arguments
from anyformer.recipes.objectives.trainers import built, train_routers


@pytest.fixture
def trainer_of(tiny, tiny_checkpoint, tmp_path):
    from transformers import AutoTokenizer

    def build(steps=1, **fields):
        model = tiny(num_experts=4, num_experts_per_tok=2, **fields).train()
        rows = [{"input_ids": list(range(3, 3 + n)), "labels": list(range(3, 3 + n))} for n in (7, 11)]
        train = {"output_dir": str(tmp_path), "max_steps": steps, "per_device_train_batch_size": 2, "use_cpu": True}
        train |= {"bf16": False, "gradient_checkpointing": False, "save_strategy": "no"}
        arguments = training_arguments(("trl", "SFTConfig"), train)
        tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
        data = {"train_dataset": Dataset.from_list(rows), "eval_dataset": None, "processing_class": tokenizer}
        trainer = built(SFTTrainer, model, arguments, **data)
        train_routers(trainer, model)
        return trainer, model

    return build


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("z", [0.0, 0.05])
def test_the_trainers_loss_is_the_models(trainer_of, router, z):
    trainer, model = trainer_of(router=router, router_aux_loss_coef=0.1, router_z_loss_coef=z)
    batch = next(iter(trainer.get_train_dataloader()))
    loss = trainer.compute_loss(trainer.model, dict(batch))
    del model.forward  # the class's own
    expected = model(**{k: batch[k] for k in ("input_ids", "attention_mask", "labels")}).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)


def test_choosing_biases_move_by_their_rate_at_each_step(trainer_of):
    trainer, model = trainer_of(steps=3, router_score_bias=True, router_bias_update_rate=0.25)
    trainer.train()
    for layer in model.model.layers:
        bias = layer.mlp.router.e_score_correction_bias
        assert bias.abs().max() > 0
        torch.testing.assert_close(bias / 0.25, (bias / 0.25).round())
        assert (layer.mlp.router.load == 0).all()


def test_nothing_is_kept_of_a_step(trainer_of):
    trainer, model = trainer_of(router_aux_loss_coef=0.1)
    trainer.train()
    assert not model.model._forward_hooks  # a hook that stayed would hold the graph of every later call


def test_smoothed_labels_of_experts_are_refused_before_a_weight_is_loaded(tiny_checkpoint, tmp_path):
    from tuning import objective_of

    from anyformer.recipes.errors import UserError

    tuned = objective_of("sft", tiny_checkpoint, tmp_path, "train.label_smoothing_factor=0.1")
    tuned.config.num_experts = 4
    with pytest.raises(UserError, match=r"train\.label_smoothing_factor: .*mixture of experts"):
        tuned.configure(None)
