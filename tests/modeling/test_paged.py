"""Continuous batching: the same tokens as `generate`, request by request, or a refusal."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from anyformer.modeling.paged import paged_positions

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LATENT = {"attention": "mla", "num_key_value_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": 4}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 6}
SERVED = {
    "grouped queries": {},
    "eager": {"attn_implementation": "eager"},
    "window": WINDOW,
    "learned positions": {"position_embedding": "learned"},
    "alibi": {"position_embedding": "alibi"},
    "alibi in eager": {"position_embedding": "alibi", "attn_implementation": "eager"},
    "alibi in a window": {"position_embedding": "alibi"} | WINDOW,
    "relative": {"position_embedding": "relative"},
    "soft cap": {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "sinks": {"attention_sinks": True, "attn_implementation": "eager"},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2},
    "latent": LATENT,
    "latent in eager": LATENT | {"attn_implementation": "eager"},
    "latent, wide": LATENT | {"kv_lora_rank": 12, "q_lora_rank": 10},
    "latent in a window": LATENT | WINDOW,
}


@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_paged_generation_gives_the_same_tokens(tiny, fields):
    model = tiny(**fields)
    if model.config.attention_sinks:  # they start at 0
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 101, (n,), generator=generator).tolist() for n in (5, 12, 3)]
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False}
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    sizes, backend = (model.config.head_dim, model.config.num_key_value_heads), model.config._attn_implementation
    config = GenerationConfig(**options, eos_token_id=-1, pad_token_id=0)
    # Stated, because the default is a share of the machine's memory.
    pages = ContinuousBatchingConfig(num_blocks=16, page_size=8, max_batch_tokens=64)
    outputs = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=pages)
    assert [outputs[name].generated_tokens for name in sorted(outputs)] == expected  # they come as they finish
    assert (model.config.head_dim, model.config.num_key_value_heads) == sizes
    assert model.config._attn_implementation == backend
    model.train()(torch.tensor([prompts[0]]), labels=torch.tensor([prompts[0]])).loss.backward()


REFUSED = {
    "global tokens": (
        WINDOW | {"layer_types": ["global_sliding_attention"], "num_global_tokens": 1},
        "leaves a window",
    ),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exact_is_refused(tiny, fields, reason):
    with pytest.raises(ValueError, match=f"continuous batching cannot serve.*{reason}"):
        tiny(**fields).generate_batch(inputs=[[5, 6, 7]])


def test_key_positions_of_two_requests():
    # The first decodes one token after three, the second starts with two.
    queries, keys = paged_positions(torch.tensor([[3, 0, 1]]), torch.tensor([0, 1, 3]), torch.tensor([0, 4, 6]), 6)
    assert queries.tolist() == [[3, 0, 1]]
    assert keys.tolist() == [[0, 1, 2, 3, 0, 1]]
