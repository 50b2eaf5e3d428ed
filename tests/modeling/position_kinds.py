"""Every kind of position, with a trained length that texts of the tests exceed."""

import torch

TRAINED = 16  # tokens
BASE = 1e4
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [2.0, 3.0, 4.0, 5.0]}
KNOWN = {"original_max_position_embeddings": TRAINED}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0} | KNOWN,
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | KNOWN,
    "longrope": {"rope_type": "longrope", "factor": 4.0} | FACTORS | KNOWN,
    "proportional": {"rope_type": "proportional", "factor": 4.0, "partial_rotary_factor": 0.5},
}
ROPES = {name: rope | {"rope_theta": BASE} for name, rope in ROPES.items()}
KINDS = {f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()}
KINDS |= {name: {"position_embedding": name} for name in ("sinusoidal", "alibi", "relative", "none")}
KINDS["relative"] |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": TRAINED}
MLA = {"attention": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
MLA |= {"num_key_value_heads": 4}
GREEDY = {"max_new_tokens": 10, "min_new_tokens": 10, "do_sample": False}


def ids(*shape, seed=1):
    return torch.randint(3, 101, shape, generator=torch.Generator().manual_seed(seed))


def behind_padding(tokens, width):
    """The tokens behind `width` pads, and their mask."""
    padded = torch.nn.functional.pad(tokens, (width, 0))
    return padded, torch.nn.functional.pad(torch.ones_like(tokens), (width, 0))
