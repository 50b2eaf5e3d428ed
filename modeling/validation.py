"""What makes a config impossible, as messages that name field, value and remedy. Free of torch."""

import difflib
import math
from collections.abc import Iterator
from typing import Any

from transformers.activations import ACT2FN

from .registry import CHOICES, LAYER_TYPES, MLP_LAYER_TYPES, VALUES

# Keys of `rope_parameters` by rope_type: (required, optional).
_YARN_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
ROPE_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": ({"factor"}, _YARN_OPTIONAL | {"original_max_position_embeddings"}),
    "longrope": (
        {"short_factor", "long_factor"},
        {"factor", "attention_factor", "original_max_position_embeddings"},
    ),
    "llama3": (
        {"factor", "low_freq_factor", "high_freq_factor"},
        {"original_max_position_embeddings"},
    ),
    "proportional": (set(), {"factor"}),
}
INITIALIZED_PARTS = ("embeddings", "attention", "mlp", "router", "head")
PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def architecture_problems(config: Any) -> Iterator[str]:
    """All that is wrong with everything but the rope parameters."""
    yield from _choice_problems(config)
    sizes = list(_size_problems(config))
    yield from sizes
    if not sizes:  # what follows divides by sizes
        yield from _head_problems(config)
        yield from _layer_problems(config)
        yield from _position_problems(config)
        yield from _expert_problems(config)
        yield from _shape_problems(config)
        yield from _token_problems(config)
    yield from _number_problems(config)


def _near(value: Any, known: Any, count: int = 1) -> list[str]:
    return difflib.get_close_matches(str(value), list(known), n=count)


def _choice_problems(config: Any) -> Iterator[str]:
    for name, known in (CHOICES | VALUES).items():
        if (value := getattr(config, name)) not in known:
            near = _near(value, known)
            hint = f"did you mean {near[0]!r}? " if near else ""
            own = " (a block of your own must be registered first)" if name in CHOICES else ""
            yield f"{name}={value!r} is not known; {hint}choices: {', '.join(known)}{own}"
    if config.problem_type not in (None, *PROBLEM_TYPES):
        yield f"problem_type={config.problem_type!r} is not known; choices: {', '.join(PROBLEM_TYPES)}"
    if config.num_labels < 1:
        yield f"num_labels={config.num_labels} must be at least 1"
    if config.hidden_act not in ACT2FN:
        near = _near(config.hidden_act, ACT2FN, 3)
        yield f"hidden_act={config.hidden_act!r} is not known; near: {', '.join(near) or ', '.join(ACT2FN)}"


def _size_problems(config: Any) -> Iterator[str]:
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_encoder_layers"]
    sizes += ["num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"]
    sizes += ["num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group"]
    sizes += ["relative_attention_num_buckets", "relative_attention_max_distance"]
    sizes += [n for n in ("q_lora_rank", "sliding_window", *_LATENT) if getattr(config, n) is not None]
    for name in sizes:
        if getattr(config, name) < 1:
            yield f"{name}={getattr(config, name)!r} must be a whole number of at least 1"
    counts = ("type_vocab_size", "num_global_tokens", "position_offset", "num_experts", "first_k_dense_replace")
    for name in (*counts, "shared_expert_intermediate_size", "loss_chunk_size"):
        if getattr(config, name) < 0:
            yield f"{name}={getattr(config, name)!r} must be a whole number of at least 0"


def _head_problems(config: Any) -> Iterator[str]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if config.attention == "mla":
        missing = [n for n in _LATENT if getattr(config, n) is None]
        if missing:
            yield f"attention='mla' needs {', '.join(missing)}"
            return
        if config.head_dim != config.qk_rope_head_dim:
            yield (
                f"head_dim={config.head_dim} contradicts qk_rope_head_dim={config.qk_rope_head_dim}: with "
                "attention='mla' leave head_dim out"
            )
        if kv_heads != heads:
            yield f"num_key_value_heads={kv_heads}: attention='mla' has a key for each query head; leave it out"
        if config.position_embedding != "rope":
            yield (
                f"position_embedding={config.position_embedding!r}: attention='mla' has rotary keys of its own; "
                "use 'rope'"
            )
        for name, plain in (("qk_norm", "none"), ("clip_qkv", None)):
            if getattr(config, name) != plain:
                yield f"{name}={getattr(config, name)!r} has no place in attention='mla'; leave it out"
        return
    given = [n for n in ("q_lora_rank", *_LATENT) if getattr(config, n) is not None]
    if given and config.attention in CHOICES["attention"]:
        yield f"only attention='mla' has {', '.join(given)}, not {config.attention!r}"
    if heads % kv_heads:
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        yield f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}: one of {divisors}"
    if config.hidden_size % heads and config.head_dim == config.hidden_size // heads:
        yield (
            f"hidden_size={config.hidden_size} is no multiple of num_attention_heads={heads}: "
            "change one of them, or state head_dim"
        )


def _layer_problems(config: Any) -> Iterator[str]:
    for name, known in (("layer_types", LAYER_TYPES), ("mlp_layer_types", MLP_LAYER_TYPES)):
        types = getattr(config, name)
        for wrong in sorted(set(types) - set(known)):
            near = _near(wrong, known)
            yield f"{name} holds {wrong!r}; {f'did you mean {near[0]!r}? ' if near else ''}choices: {', '.join(known)}"
        if len(types) != config.num_hidden_layers:
            yield f"{name} has {len(types)} entries for num_hidden_layers={config.num_hidden_layers}: change both"
    sliding = [t for t in config.layer_types if "sliding" in t]
    if sliding and config.sliding_window is None:
        yield f"layer_types holds {sliding[0]!r} but sliding_window is not set"
    if config.sliding_window == 1 and config.architecture != "encoder":
        yield "sliding_window=1 must be at least 2: with 1, a token sees itself alone, and caches keep nothing"
    if config.sliding_window is not None and not sliding:
        yield f"sliding_window={config.sliding_window} is used by no layer: layer_types are all full_attention"
    marked = "global_sliding_attention" in config.layer_types
    if marked and not config.num_global_tokens:
        yield "layer_types holds 'global_sliding_attention' but num_global_tokens is 0"
    if config.num_global_tokens and not marked:
        yield (
            f"num_global_tokens={config.num_global_tokens} is used by no layer: layer_types has no "
            "'global_sliding_attention'"
        )
    if config.first_k_dense_replace > config.num_hidden_layers:
        first = config.first_k_dense_replace
        yield f"first_k_dense_replace={first} exceeds num_hidden_layers={config.num_hidden_layers}"
    for name, plain, owner, kind in (
        ("swiglu_limit", 7.0, "mlp", "clamped"),
        ("alibi_bias_max", 8, "position_embedding", "alibi"),
        ("head_transform_bias", True, "head_transform", True),
    ):
        if getattr(config, name) != plain and getattr(config, owner) != kind:
            yield f"{name}={getattr(config, name)!r} belongs to {owner}={kind!r}, not to {getattr(config, owner)!r}"
    if not config.first_norm and config.norm_position != "pre":
        yield f"first_norm=False belongs to norm_position='pre', not to {config.norm_position!r}"


def _position_problems(config: Any) -> Iterator[str]:
    kind = config.position_embedding
    if config.position_offset and kind != "learned":
        yield f"position_offset={config.position_offset} belongs to position_embedding='learned', not to {kind!r}"
    if config.no_rope_layers is not None:
        if kind != "rope":
            yield f"no_rope_layers belongs to position_embedding='rope', not to {kind!r}"
        if len(config.no_rope_layers) != config.num_hidden_layers or set(config.no_rope_layers) - {0, 1}:
            yield (
                f"no_rope_layers={config.no_rope_layers!r} must hold 0 or 1 for each of num_hidden_layers="
                f"{config.num_hidden_layers} layers"
            )
    if config.rope_thetas is not None:
        if kind != "rope":
            yield f"rope_thetas belongs to position_embedding='rope', not to {kind!r}"
        if len(config.rope_thetas) != config.num_hidden_layers:
            yield (
                f"rope_thetas has {len(config.rope_thetas)} entries for num_hidden_layers={config.num_hidden_layers}: "
                "give one a layer, or a pattern"
            )
        for theta in config.rope_thetas:
            if not _is_number(theta, 1, above=True):
                yield f"rope_thetas holds {theta!r}: each must be a number above 1"
    if kind == "sinusoidal" and config.hidden_size % 2:
        yield f"hidden_size={config.hidden_size} must be even: sinusoidal positions are pairs of sine and cosine"
    if kind == "relative":
        buckets, farthest = config.relative_attention_num_buckets, config.relative_attention_max_distance
        # Half of the buckets are exact; an encoder splits them again by direction.
        exact = buckets // (2 if config.architecture == "decoder" else 4)
        if exact < 1:
            yield f"relative_attention_num_buckets={buckets} must be at least {2 if exact else 4}"
        elif farthest <= buckets // 2:
            yield (
                f"relative_attention_max_distance={farthest} must exceed half of relative_attention_num_buckets="
                f"{buckets}"
            )


def _expert_problems(config: Any) -> Iterator[str]:
    sparse = "sparse" in config.mlp_layer_types
    if sparse and not config.num_experts:
        yield "mlp_layer_types holds 'sparse' but num_experts is 0"
    if not config.num_experts:
        for name in ("router_score_bias", "router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate"):
            if getattr(config, name):
                yield f"{name}={getattr(config, name)!r} needs experts: num_experts is 0"
        if config.shared_expert_intermediate_size or config.shared_expert_gate:
            yield "a shared expert needs experts beside it: num_experts is 0"
        plain = {"router": "softmax", "router_bias": False, "norm_topk_prob": True, "routed_scaling_factor": 1.0}
        plain |= {"n_group": 1, "topk_group": 1, "output_router_logits": False, "num_experts_per_tok": 2}
        plain |= {"moe_intermediate_size": config.intermediate_size, "first_k_dense_replace": 0}
        for name, value in plain.items():
            if getattr(config, name) != value:
                yield f"{name}={getattr(config, name)!r} needs experts: num_experts is 0"
        return
    if not sparse:
        yield f"num_experts={config.num_experts} is used by no layer: mlp_layer_types are all dense"
    experts, chosen, groups = config.num_experts, config.num_experts_per_tok, config.n_group
    if chosen > experts:
        yield f"num_experts_per_tok={chosen} exceeds num_experts={experts}"
    if experts % groups:
        yield f"n_group={groups} must divide num_experts={experts}"
    elif config.topk_group > groups:
        yield f"topk_group={config.topk_group} exceeds n_group={groups}"
    elif groups > 1 and chosen > config.topk_group * (experts // groups):
        yield (
            f"num_experts_per_tok={chosen} exceeds the {config.topk_group * (experts // groups)} experts of "
            f"topk_group={config.topk_group} groups"
        )
    elif groups > 1 and config.group_score == "top2" and experts // groups < 2:
        yield f"group_score='top2' needs at least two experts a group: {experts} experts in n_group={groups}"
    if config.router_bias_update_rate and not config.router_score_bias:
        yield "router_bias_update_rate needs router_score_bias=True: that is the bias it updates"
    if config.shared_expert_gate and not config.shared_expert_intermediate_size:
        yield "shared_expert_gate=True needs shared_expert_intermediate_size"


def _shape_problems(config: Any) -> Iterator[str]:
    shape = config.architecture
    if config.is_encoder_decoder != (shape == "encoder-decoder"):
        flag = config.is_encoder_decoder
        yield f"is_encoder_decoder={flag} contradicts architecture={shape!r}: give architecture alone"
    if shape != "encoder" and config.pooler:
        yield f"pooler=True belongs to architecture='encoder', not to {shape!r}"
    if shape != "encoder-decoder" and config.num_encoder_layers != config.num_hidden_layers:
        yield f"num_encoder_layers={config.num_encoder_layers} belongs to architecture='encoder-decoder'; leave it out"
    if shape != "encoder-decoder" and not config.share_embeddings:
        yield "share_embeddings=False belongs to architecture='encoder-decoder'; leave it out"
    if shape == "encoder-decoder" and config.type_vocab_size:
        yield f"type_vocab_size={config.type_vocab_size} has no place in architecture='encoder-decoder'"
    if shape == "encoder-decoder" and config.norm_position.startswith("parallel"):
        yield f"norm_position={config.norm_position!r} has no place for cross-attention; choose another"
    if shape == "encoder" and config.attention == "mla":
        yield "attention='mla' saves cache, which an encoder does not have; use 'gqa'"


def _token_problems(config: Any) -> Iterator[str]:
    for name in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        value = getattr(config, name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and not 0 <= token < config.vocab_size:
                yield f"{name}={token} lies outside the vocabulary: 0 to {config.vocab_size - 1}, or null"


def _number_problems(config: Any) -> Iterator[str]:
    for name in ("attention_dropout", "hidden_dropout", "activation_dropout", "embedding_dropout"):
        if not 0 <= getattr(config, name) < 1:
            yield f"{name}={getattr(config, name)!r} must be a probability: at least 0 and below 1"
    if config.classifier_dropout is not None and not 0 <= config.classifier_dropout < 1:
        yield f"classifier_dropout={config.classifier_dropout!r} must be a probability: at least 0 and below 1"
    if not 0 < config.norm_eps < 1:
        yield f"norm_eps={config.norm_eps!r} must lie between 0 and 1, as 1e-6 does"
    ranges = {"initializer_range": config.initializer_range}
    for part, value in (config.initializer_ranges or {}).items():
        if part not in INITIALIZED_PARTS:
            yield f"initializer_ranges names {part!r}; parts: {', '.join(INITIALIZED_PARTS)}"
        ranges[f"initializer_ranges.{part}"] = value
    for name, value in ranges.items():
        if not 0 < value < 10:
            yield f"{name}={value!r} must be a positive standard deviation, as 0.02 is"
    optional = ("attention_multiplier", "attn_logit_softcapping", "clip_qkv", "final_logit_softcapping")
    always = ("residual_multiplier", "embedding_multiplier", "logit_scale", "alibi_bias_max", "swiglu_limit")
    for name in (*always, "routed_scaling_factor", *(n for n in optional if getattr(config, n) is not None)):
        value = getattr(config, name)
        if not (value > 0 and math.isfinite(value)):
            yield f"{name}={value!r} must be a finite number above 0"
    for name in ("router_aux_loss_coef", "router_z_loss_coef", "router_bias_update_rate", "z_loss_coef"):
        value = getattr(config, name)
        if not (value >= 0 and math.isfinite(value)):
            yield f"{name}={value!r} must be a finite number of at least 0"


def rope_problems(config: Any) -> Iterator[str]:
    """All that is wrong with the rope parameters, flat or by layer type."""
    rope = config.rope_parameters or {}
    nested = {"full_attention", "sliding_attention"}
    if not nested & set(rope):
        yield from _rope_problems(config, rope, "rope_parameters")
        return
    if set(rope) - nested:
        yield f"rope_parameters mixes layer types with {sorted(set(rope) - nested)}: put these inside each layer type"
    used = {"sliding_attention" if "sliding" in t else "full_attention" for t in config.layer_types}
    for name in sorted(used - set(rope)):
        yield f"rope_parameters.{name} is missing: layer_types has such layers"
    for name in sorted(set(rope) & nested):
        if isinstance(rope[name], dict):
            yield from _rope_problems(config, rope[name], f"rope_parameters.{name}")
        else:
            yield f"rope_parameters.{name}={rope[name]!r} must be a mapping with rope_type and rope_theta"


def _rope_problems(config: Any, rope: dict[str, Any], where: str) -> Iterator[str]:
    kind = rope.get("rope_type", "default")
    if not isinstance(kind, str) or kind not in ROPE_KEYS:
        yield f"{where}.rope_type={kind!r} is not known; choices: {', '.join(ROPE_KEYS)}"
        return
    if rope.get("type", kind) != kind:
        yield f"{where}.type={rope['type']!r} contradicts rope_type={kind!r}: give rope_type alone"
    required, optional = ROPE_KEYS[kind]
    known = required | optional | {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
    for key in sorted(set(rope) - known):
        near = _near(key, known)
        hint = f"did you mean {near[0]!r}?" if near else f"keys of {kind!r}: {', '.join(sorted(known))}"
        yield f"{where}.{key}={rope[key]!r} is not used by rope_type={kind!r}; {hint}"
    for key in sorted((required | {"rope_theta"}) - {k for k, v in rope.items() if v is not None}):
        yield f"{where}.{key} is missing: rope_type={kind!r} needs it"
    share = rope.get("partial_rotary_factor")
    if share is not None and not (_is_number(share, 0, above=True) and share <= 1):
        yield f"{where}.partial_rotary_factor={share!r} must be a number above 0, at most 1"
        return
    yield from _rotary_size_problems(config, kind, share, where)
    yield from _rope_value_problems(rope, rotary_dim(config, rope), where)


def _rotary_size_problems(config: Any, kind: str, share: float | None, where: str) -> Iterator[str]:
    size = int(config.head_dim * (1 if share is None or kind == "proportional" else share))
    if size % 2 or size < 2:
        what = f"head_dim={config.head_dim}" if share is None else f"{where}.partial_rotary_factor={share} turns {size}"
        yield f"{what} must be even: rotary embedding turns pairs of values"
    if kind == "dynamic" and size <= 2:
        yield f"head_dim={config.head_dim} must exceed 2 for rope_type='dynamic'"


def rotary_dim(config: Any, rope: dict[str, Any]) -> int:
    """How many values of a head are rotated."""
    if rope.get("rope_type") == "proportional":
        return config.head_dim
    return int(config.head_dim * (rope.get("partial_rotary_factor") or 1.0))


def _is_number(value: Any, low: float, above: bool = False) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return False
    return value > low if above else value >= low


def _rope_value_problems(rope: dict[str, Any], size: int, where: str) -> Iterator[str]:
    at_least = {"factor": 1, "high_freq_factor": 0, "mscale": 0, "mscale_all_dim": 0}
    above = {"rope_theta": 1, "low_freq_factor": 0, "beta_fast": 0, "beta_slow": 0, "attention_factor": 0}
    for key, value in rope.items():
        if value is None:  # as if absent
            continue
        if key in at_least and not _is_number(value, at_least[key]):
            yield f"{where}.{key}={value!r} must be a number of at least {at_least[key]}"
        if key in above and not _is_number(value, above[key], above=True):
            yield f"{where}.{key}={value!r} must be a number above {above[key]}"
        if key == "original_max_position_embeddings" and (type(value) is not int or value < 1):
            yield f"{where}.{key}={value!r} must be a whole number of at least 1"
        if key == "truncate" and not isinstance(value, bool):
            yield f"{where}.{key}={value!r} must be true or false"
        if key in ("short_factor", "long_factor"):
            many = size // 2
            right = isinstance(value, list) and len(value) == many and all(_is_number(v, 0, True) for v in value)
            if not right:
                yield f"{where}.{key} must be a list of head_dim / 2 = {many} numbers above 0"
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if _is_number(rope.get(low), 0) and _is_number(rope.get(high), 0) and rope[low] >= rope[high]:
            yield f"{where}.{high}={rope[high]!r} must exceed {low}={rope[low]!r}"
