"""`AnyformerConfig`: one config for any Transformer."""

import copy
import difflib
import math
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig

from .counting import Counts, count
from .registry import CHOICES

AUTO_MAP = {
    "AutoConfig": "configuration_anyformer.AnyformerConfig",
    "AutoModel": "modeling_anyformer.AnyformerModel",
    "AutoModelForCausalLM": "modeling_anyformer.AnyformerForCausalLM",
}

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
}

# Keyword arguments that the base class takes beside its fields.
_BASE_ARGUMENTS = {
    "attn_implementation",
    "experts_implementation",
    "model_type",
    "name_or_path",
    "_name_or_path",
    "_commit_hash",
    "num_labels",
    "output_attentions",
    "partial_rotary_factor",  # reaches rope_parameters, where it is refused with the reason
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
    "torchscript",
}


@strict
class AnyformerConfig(PreTrainedConfig):
    """Describes a Transformer; a config that makes no sense does not construct.

    Args:
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        intermediate_size: inner width of the feed-forward block; default 4 * hidden_size.
        num_hidden_layers: number of layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key/value heads: equal to the query heads (MHA, the default), 1 (MQA) or a
            divisor between (GQA).
        head_dim: width of a head; default hidden_size / num_attention_heads.
        max_position_embeddings: longest length the model is trained for, in tokens.
        attention, position_embedding, norm, norm_position, mlp: named variants, see `registry.py`.
        rope_parameters: `rope_type` (default, linear, dynamic, yarn, longrope, llama3), `rope_theta` and the keys
            of that type.
        hidden_act: activation of the feed-forward block, a name of transformers' `ACT2FN`.
        norm_eps: epsilon of every norm (`rms_norm_eps` and `layer_norm_eps` are accepted for it).
        attention_bias: bias on the query, key and value projections.
        attention_out_bias: bias on the output projection; default: as `attention_bias`.
        mlp_bias, lm_head_bias: bias on the feed-forward projections, on the head.
        attention_dropout, hidden_dropout, embedding_dropout: probabilities on the attention weights, on what each
            block adds to the residual stream, on the embeddings.
        tie_word_embeddings: the head shares the input embedding's weight.
        initializer_range: standard deviation of the initial weights.

    Raises:
        StrictDataclassError: wrong type, impossible value or combination; names field, value and remedy.
        TypeError: a keyword that is no field; names the nearest field.
    """

    model_type = "anyformer"
    attribute_map = {"rms_norm_eps": "norm_eps", "layer_norm_eps": "norm_eps"}  # noqa: RUF012
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
    base_model_pp_plan = {  # noqa: RUF012
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    attention: str = "gqa"
    position_embedding: str = "rope"
    rope_parameters: dict[str, Any] | None = None
    norm: str = "rmsnorm"
    norm_position: str = "pre"
    norm_eps: int | float = 1e-6
    mlp: str = "gated"
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_out_bias: bool | None = None
    mlp_bias: bool = False
    lm_head_bias: bool = False
    attention_dropout: int | float = 0.0
    hidden_dropout: int | float = 0.0
    embedding_dropout: int | float = 0.0
    tie_word_embeddings: bool = False
    initializer_range: int | float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    auto_map: dict[str, Any] = field(default_factory=lambda: dict(AUTO_MAP))

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        self._refuse_contradictions(kwargs)
        self.rope_parameters = copy.deepcopy(self.rope_parameters)  # the base class writes into it
        # Sizes that make no sense must not break the derived values: validation names them afterwards.
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // max(self.num_attention_heads, 1)
        if self.attention_out_bias is None:
            self.attention_out_bias = self.attention_bias
        super().__post_init__(**kwargs)
        if self.position_embedding == "none":
            self.rope_parameters = None

    @classmethod
    def _refuse_unknown(cls, kwargs: Mapping[str, Any]) -> None:
        names = {f.name for f in fields(cls)}
        generation = GenerationConfig._get_default_generation_params()
        known = names | _BASE_ARGUMENTS | set(cls.attribute_map) | set(generation)
        problems = []
        for key in kwargs:
            if key in known or key.startswith("_"):
                continue
            near = difflib.get_close_matches(key, names | set(cls.attribute_map), n=1)
            hint = f"did you mean {near[0]!r}?" if near else "see AnyformerConfig for the fields there are"
            problems.append(f"{key!r} (value {kwargs[key]!r}) is no field of AnyformerConfig; {hint}")
        if problems:
            raise TypeError("\n".join(problems))

    def _refuse_contradictions(self, kwargs: Mapping[str, Any]) -> None:
        """Two names of one field with two values: the base class would drop one of them."""
        aliases = {name: kwargs[name] for name in self.attribute_map if name in kwargs}
        default = type(self).norm_eps
        if aliases and self.norm_eps != default:
            aliases["norm_eps"] = self.norm_eps
        rope, scaling, theta = self.rope_parameters, kwargs.get("rope_scaling"), kwargs.get("rope_theta")
        thetas = [d["rope_theta"] for d in (rope, scaling) if isinstance(d, dict) and "rope_theta" in d]
        if len(set(aliases.values())) > 1:
            raise TypeError(f"{aliases} are names of one field: give norm_eps alone")
        if (rope and scaling and rope != scaling) or (theta is not None and any(t != theta for t in thetas)):
            raise TypeError(
                f"rope_parameters={rope!r}, rope_scaling={scaling!r} and rope_theta={theta!r} contradict each other: "
                "give rope_parameters alone"
            )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As the base class, but an override that names no field is refused instead of dropped."""
        wants_unused = kwargs.get("return_unused_kwargs", False)
        result = super().from_dict(dict(config_dict), **{**kwargs, "return_unused_kwargs": True})
        config, unused = result
        # Overrides are set one by one after construction: what they add up to is checked here.
        if config.rope_parameters:
            config.standardize_rope_params()
        config.validate()
        if wants_unused:
            return config, unused
        if "rope_theta" in unused:
            raise TypeError("rope_theta is no field of AnyformerConfig: override rope_parameters")
        cls._refuse_unknown({k: v for k, v in unused.items() if k not in ("code_revision", "return_dict")})
        return config

    def validate_architecture(self) -> None:
        """All impossible sizes and combinations, at once."""
        problems = [*self._size_problems(), *self._choice_problems(), *self._probability_problems()]
        if problems:
            raise ValueError("\n".join(problems))

    def validate_rope(self) -> None:
        """Every key of `rope_parameters`: the base class only warns about most of what it finds."""
        if self.position_embedding == "rope":
            problems = list(self._rope_problems(self.rope_parameters or {}))
            if problems:
                raise ValueError("\n".join(problems))

    def _size_problems(self):
        sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
        sizes += ["num_key_value_heads", "head_dim", "max_position_embeddings"]
        wrong = [n for n in sizes if getattr(self, n) < 1]
        yield from (f"{n}={getattr(self, n)!r} must be a whole number of at least 1" for n in wrong)
        if wrong:
            return
        if self.is_encoder_decoder:
            yield "is_encoder_decoder=True: this is a decoder alone; leave it out"
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if heads % kv_heads:
            divisors = [n for n in range(1, heads + 1) if heads % n == 0]
            yield f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}: one of {divisors}"
        if self.hidden_size % heads and self.head_dim == self.hidden_size // heads:
            yield (
                f"hidden_size={self.hidden_size} is no multiple of num_attention_heads={heads}: "
                "change one of them, or state head_dim"
            )
        if self.position_embedding == "rope" and self.head_dim % 2:
            yield f"head_dim={self.head_dim} must be even: rotary embedding turns pairs of values"
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            for token in value if isinstance(value, list) else [value]:
                if token is not None and not 0 <= token < self.vocab_size:
                    yield f"{name}={token} lies outside the vocabulary: 0 to {self.vocab_size - 1}, or null"

    def _choice_problems(self):
        for name, registry in CHOICES.items():
            if (value := getattr(self, name)) not in registry:
                near = difflib.get_close_matches(value, list(registry), n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                yield f"{name}={value!r} is not known; {hint}choices: {', '.join(registry)}"
        if self.hidden_act not in ACT2FN:
            near = difflib.get_close_matches(self.hidden_act, list(ACT2FN), n=3)
            yield f"hidden_act={self.hidden_act!r} is not known; near: {', '.join(near) or ', '.join(ACT2FN)}"

    def _probability_problems(self):
        for name in ("attention_dropout", "hidden_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                yield f"{name}={getattr(self, name)!r} must be a probability: at least 0 and below 1"
        if not 0 < self.norm_eps < 1:
            yield f"norm_eps={self.norm_eps!r} must lie between 0 and 1, as 1e-6 does"
        if not 0 < self.initializer_range < 10:
            yield f"initializer_range={self.initializer_range!r} must be a positive standard deviation, as 0.02 is"

    def _rope_problems(self, rope: dict[str, Any]):
        kind = rope.get("rope_type", "default")
        if not isinstance(kind, str) or kind not in ROPE_KEYS:
            yield f"rope_parameters.rope_type={kind!r} is not known; choices: {', '.join(ROPE_KEYS)}"
            return
        if rope.get("type", kind) != kind:
            yield f"rope_parameters.type={rope['type']!r} contradicts rope_type={kind!r}: give rope_type alone"
        if kind == "dynamic" and self.head_dim <= 2:
            yield f"head_dim={self.head_dim} must exceed 2 for rope_type='dynamic'"
        required, optional = ROPE_KEYS[kind]
        known = required | optional | {"rope_type", "type", "rope_theta"}
        for key in sorted(set(rope) - known):
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"keys of {kind!r}: {', '.join(sorted(known))}"
            yield f"rope_parameters.{key}={rope[key]!r} is not used by rope_type={kind!r}; {hint}"
        for key in sorted((required | {"rope_theta"}) - {k for k, v in rope.items() if v is not None}):
            yield f"rope_parameters.{key} is missing: rope_type={kind!r} needs it"
        yield from self._rope_value_problems(rope)

    def _rope_value_problems(self, rope: dict[str, Any]):
        def number(value: Any, low: float, above: bool = False) -> bool:
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                return False
            return value > low if above else value >= low

        at_least = {"factor": 1, "high_freq_factor": 0, "mscale": 0, "mscale_all_dim": 0}
        above = {"rope_theta": 1, "low_freq_factor": 0, "beta_fast": 0, "beta_slow": 0, "attention_factor": 0}
        for key, value in rope.items():
            if value is None:  # as if absent
                continue
            if key in at_least and not number(value, at_least[key]):
                yield f"rope_parameters.{key}={value!r} must be a number of at least {at_least[key]}"
            if key in above and not number(value, above[key], above=True):
                yield f"rope_parameters.{key}={value!r} must be a number above {above[key]}"
            if key == "original_max_position_embeddings" and (type(value) is not int or value < 1):
                yield f"rope_parameters.{key}={value!r} must be a whole number of at least 1"
            if key == "truncate" and not isinstance(value, bool):
                yield f"rope_parameters.{key}={value!r} must be true or false"
            if key in ("short_factor", "long_factor"):
                size = self.head_dim // 2
                if not isinstance(value, list) or len(value) != size or not all(number(v, 0, True) for v in value):
                    yield f"rope_parameters.{key} must be a list of head_dim / 2 = {size} numbers above 0"
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            if number(rope.get(low), 0) and number(rope.get(high), 0) and rope[low] >= rope[high]:
                yield f"rope_parameters.{high}={rope[high]!r} must exceed {low}={rope[low]!r}"

    def counts(self, sequence_length: int = 1) -> Counts:
        """Parameters by part, forward FLOPs of one sequence and cache bytes, from the config alone.

        Args:
            sequence_length: tokens of the sequence whose FLOPs are counted.
        """
        return count(self, sequence_length)
