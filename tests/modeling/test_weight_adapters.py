"""LoRA, rsLoRA, DoRA and IA3: generation equals the forward, and merged equals unmerged."""

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

STEPS, LENGTHS = 4, (7, 4)
LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
KINDS = {
    "lora": lambda: LoraConfig(**LORA),
    "rslora": lambda: LoraConfig(**LORA, use_rslora=True),
    "dora": lambda: LoraConfig(**LORA, use_dora=True),
    "ia3": lambda: IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"], task_type="CAUSAL_LM"
    ),
}
MODELS = {
    "rope": {"head_dim": 16, "attention_bias": True, "mlp_bias": True},
    "learned, window": {"position_embedding": "learned", "sliding_window": 4},
    "alibi, global": {
        "position_embedding": "alibi",
        "layer_types": ["global_sliding_attention"],
        "sliding_window": 3,
        "num_global_tokens": 1,
    },
}
CACHES = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
}
GREEDY = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "output_logits": True, "return_dict_in_generate": True}
kinds = pytest.mark.parametrize("kind", KINDS)
models = pytest.mark.parametrize("fields", MODELS.values(), ids=MODELS)


def ids(*shape, low=3, high=101, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


TOKENS = ids(2, LENGTHS[0]) * (torch.arange(LENGTHS[0]) >= torch.tensor([[0], [LENGTHS[0] - LENGTHS[1]]]))
MASK = (TOKENS > 0).long()


def adapted(model, kind):
    """The model under an adapter whose every weight is moved, so that it changes much."""
    tuned = get_peft_model(model, KINDS[kind]()).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in tuned.named_parameters():
            if weight.requires_grad:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_(noise * (0.3 if weight.dim() == 1 or kind == "ia3" else 0.1))
                assert "lora_" in name or "ia3_" in name
    return tuned


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def check_generation(model):
    for options in CACHES.values():
        output = model.generate(input_ids=TOKENS, attention_mask=MASK, do_sample=False, **GREEDY, **options)
        for i, length in enumerate(LENGTHS):
            row = output.sequences[i : i + 1, LENGTHS[0] - length : -1]
            close(torch.stack([logits[i] for logits in output.logits]), model(input_ids=row).logits[0, -STEPS:])


@models
@kinds
def test_generation_equals_the_forward_and_merged_equals_unmerged(tiny, kind, fields):
    model = tiny(**{"initializer_range": 0.2} | fields)
    row = ids(1, 9)
    with torch.no_grad():
        plain = model(row).logits
        tuned = adapted(model, kind)
        expected = tuned(input_ids=row).logits
        assert (expected - plain).abs().max() > 0.1, "the adapter changes nothing here"
        check_generation(tuned)
        merged = tuned.merge_and_unload()
        close(merged(row).logits, expected)
        check_generation(merged)


@kinds
def test_training_goes_on_from_a_saved_adapter(tiny, kind, tmp_path):
    row = ids(1, 9)
    tuned = adapted(tiny(initializer_range=0.2), kind)
    expected = tuned(input_ids=row).logits.detach()
    tuned.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny(initializer_range=0.2), tmp_path, is_trainable=True)
    close(again(input_ids=row).logits, expected)
    optimizer = torch.optim.SGD([weight for weight in again.parameters() if weight.requires_grad], lr=0.1)
    before = again(input_ids=row, labels=row).loss
    before.backward()
    optimizer.step()
    assert again(input_ids=row, labels=row).loss < before
    frozen = {name: weight for name, weight in again.base_model.model.named_parameters() if not weight.requires_grad}
    assert frozen and all(weight.grad is None for weight in frozen.values())
