"""Drafts that are right now and then, of every kind."""

import torch

from anyformer import AnyformerDrafter
from anyformer.modeling import AnyformerForCausalLM

TRAINED = ("medusa", "eagle", "mtp")
KINDS = (*TRAINED, "lookup", "model")

# Attention and positions that differ in what is cached, masked or counted.
ATTENTIONS = {
    "gqa": {},
    "mla": {
        "attention": "mla",
        "num_key_value_heads": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
    },
    "sliding": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "alibi": {"position_embedding": "alibi"},
    "learned": {"position_embedding": "learned"},
}


def fit(drafter: AnyformerDrafter, base: AnyformerForCausalLM, text: torch.Tensor, steps: int = 25) -> AnyformerDrafter:
    """Teach a drafter a text [1, length] by heart."""
    base.requires_grad_(False)
    optimizer = torch.optim.Adam(drafter.parameters(), lr=5e-3)
    for _ in range(steps):
        drafter(base=base, input_ids=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.eval()


def drafts_of(kind: str, base: AnyformerForCausalLM, text: torch.Tensor | None = None, count: int = 3) -> dict:
    """The argument of `generate`; with a text [1, length] drafters know all of it but the end."""
    torch.manual_seed(5)
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": count}
    if kind == "model":
        model = AnyformerForCausalLM(base.config).eval()
        model.load_state_dict(base.state_dict())
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.03 * torch.randn_like(weight)
        model.generation_config.assistant_confidence_threshold = 0.0
        model.generation_config.num_assistant_tokens = count
        return {"assistant_model": model}
    drafter = AnyformerDrafter.from_base(base, kind=kind, num_draft_tokens=count)
    return {"assistant_model": drafter if text is None else fit(drafter, base, text[:, :-10])}
