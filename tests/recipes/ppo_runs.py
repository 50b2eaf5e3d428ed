"""Tiny policies, prompts and trainers that the tests of PPO share."""

from typing import Any

import torch

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.recipes.ppo import PPOTrainer
from anyformer.recipes.ppo_config import PPOConfig

VOCAB = 32
DROPOUT = {"attention_dropout": 0.4, "hidden_dropout": 0.4, "activation_dropout": 0.4, "embedding_dropout": 0.4}


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", bos_token="t1", eos_token="t2")


def prompts(count: int, seed: int = 1) -> list[dict[str, Any]]:
    """Rows of 1 to 6 tokens, with a column of their own."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 7, (count,), generator=generator).tolist()
    return [
        {"prompt_ids": torch.randint(3, VOCAB, (length,), generator=generator).tolist(), "wanted": 3 + i % 5}
        for i, length in enumerate(lengths)
    ]


def mean_id(prompts, completions, completion_ids, **columns):
    return [sum(ids) / len(ids) / VOCAB for ids in completion_ids]


def share_of_seven(prompts, completions, completion_ids, **columns):
    return [ids.count(7) / len(ids) for ids in completion_ids]


def trainer_factory(tmp_path, tiny):
    """Builds a trainer over a tiny policy; keywords are fields of `PPOConfig`."""

    def build(model=None, reward=mean_id, rows=None, folder="run", callbacks=None, **values):
        defaults = {
            "per_device_train_batch_size": 4,
            "max_completion_length": 6,
            "learning_rate": 1e-3,
            "max_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "use_cpu": True,
            "dataloader_pin_memory": False,
        }
        arguments = PPOConfig(output_dir=str(tmp_path / folder), **(defaults | values))
        model = tiny(vocab_size=VOCAB) if model is None else model
        return PPOTrainer(model, arguments, tokenizer(), rows or prompts(16), reward, callbacks)

    return build


def with_lora(model, trained: bool = False):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
    model = get_peft_model(model, config)
    if trained:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.3)
    return model


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def logged(trainer: PPOTrainer, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return dict(trainer.model.state_dict()) | {f"value_head.{n}": p for n, p in trainer.value_head.state_dict().items()}


def with_prompt(model):
    from peft import PromptTuningConfig, get_peft_model

    return get_peft_model(model, PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))


def distributed_run(folder: str, per_device: int, accumulation: int) -> dict[str, Any]:
    """A run whose completions depend on the prompts alone, so that it can be cut across processes."""

    class Fixed(PPOTrainer):
        def _sample(self, prompts):
            rows = [[*prompt, *[(3 * prompt[0] + i) % 29 + 3 for i in range(1 + prompt[0] % 5)]] for prompt in prompts]
            width, longest = max(map(len, prompts)), max(1 + prompt[0] % 5 for prompt in prompts)
            ids = torch.zeros(len(rows), width + longest, dtype=torch.long)
            mask = torch.zeros_like(ids)
            for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
                start = width - len(prompt)
                ids[i, start : start + len(row)] = torch.tensor(row)
                mask[i, start : start + len(row)] = 1
            return ids, mask, mask[:, width:].bool(), torch.zeros(len(rows), dtype=torch.bool)

    torch.manual_seed(0)
    config = AnyformerConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=2,
    )
    arguments = PPOConfig(
        output_dir=folder,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=accumulation,
        max_steps=2,
        num_ppo_epochs=2,
        optim="sgd",
        learning_rate=0.05,
        kl_target=0.01,
        kl_horizon=10,
        beta=0.5,
        whiten_rewards=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )

    def reward(prompts, completions, completion_ids, **_):
        return [ids.count(7) + 0.1 * len(ids) for ids in completion_ids]

    trainer = Fixed(AnyformerForCausalLM(config), arguments, tokenizer(), prompts(16), reward)
    trainer.train()
    names = ("reward", "kl", "kl_per_token", "policy_loss", "value_loss", "ratio", "beta", "completion_length")
    return {"weights": weights(trainer), "beta": trainer.kl.beta} | {name: logged(trainer, name) for name in names}
