"""`AnyformerDrafterConfig`: what drafts tokens for a frozen base model in speculative decoding."""

from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

from .configuration_anyformer import AnyformerConfig, UnknownOverrideError, refuse_unknown
from .registry import DRAFTERS

DRAFTER_AUTO_MAP = {
    "AutoConfig": "configuration_drafter.AnyformerDrafterConfig",
    "AutoModel": "drafters.AnyformerDrafter",
}
LONGEST_DRAFT = 64  # a longer one is a mistake: no drafter is right that often

# What a drafter's layer has from its base.
_LAYER_FIELDS = (
    *("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("max_position_embeddings", "attention", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"),
    *("v_head_dim", "attention_bias", "attention_out_bias", "attention_multiplier", "attn_logit_softcapping"),
    *("attention_sinks", "qk_norm", "clip_qkv", "position_layout", "alibi_bias_max"),
    *("relative_attention_num_buckets", "relative_attention_max_distance", "norm", "norm_position", "norm_eps"),
    *("final_norm", "residual_multiplier", "mlp", "hidden_act", "mlp_bias", "swiglu_limit"),
    *("initialization", "initializer_range", "initializer_ranges"),
)
# What is kept of the base: from it the layer is built, and another base is told by it.
_BASE_FIELDS = (
    *_LAYER_FIELDS,
    *("vocab_size", "num_hidden_layers", "layer_types", "sliding_window", "num_global_tokens", "position_embedding"),
    *("position_offset", "rope_parameters", "rope_thetas", "no_rope_layers"),
)
# These may differ: the base may have been told of longer texts since, and weights start once.
_FREE_FIELDS = {"max_position_embeddings", "rope_parameters", "rope_thetas", "position_offset"} | {
    name for name in _LAYER_FIELDS if name.startswith("initializ")
}


@strict
class AnyformerDrafterConfig(PreTrainedConfig):
    """Describes an `AnyformerDrafter`; a config that makes no sense does not construct.

    Args:
        kind: "medusa", "eagle" or "mtp"; see `draft_heads.py`.
        num_draft_tokens: tokens drafted before the base checks them: Medusa heads, EAGLE steps, MTP depths.
        base: the fields of the base's `AnyformerConfig` that a drafter depends on; `of_base` takes them from it.

    Raises:
        StrictDataclassError: wrong type or impossible value; names field, value and remedy.
        TypeError: a keyword that is no field; names the nearest field.
    """

    model_type = "anyformer_drafter"

    kind: str = "medusa"
    num_draft_tokens: int = 4
    base: dict[str, Any] = field(default_factory=dict)
    auto_map: dict[str, Any] = field(default_factory=lambda: dict(DRAFTER_AUTO_MAP))

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_unknown(type(self), kwargs)
        super().__post_init__(**kwargs)

    @classmethod
    def of_base(cls, base: AnyformerConfig, **fields: Any) -> "AnyformerDrafterConfig":
        """The config of a drafter for a base with this config.

        Raises:
            ValueError: the base is no decoder.
        """
        if base.architecture != "decoder":
            raise ValueError(
                f"a drafter drafts for architecture='decoder'; the base has {base.architecture!r}. Use a draft model "
                "(assistant_model) there"
            )
        return cls(base={name: getattr(base, name) for name in _BASE_FIELDS}, **fields)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any):
        """As the base class, but an override that names no field is refused instead of dropped."""
        wants_unused = kwargs.get("return_unused_kwargs", False)
        config, unused = super().from_dict(dict(config_dict), **{**kwargs, "return_unused_kwargs": True})
        config.validate()
        if wants_unused:
            return config, unused
        try:
            refuse_unknown(cls, {k: v for k, v in unused.items() if k not in ("code_revision", "return_dict")})
        except TypeError as error:
            raise UnknownOverrideError(str(error)) from None
        return config

    @property
    def vocab_size(self) -> int:
        """Of the base."""
        return self.base["vocab_size"]

    @property
    def hidden_size(self) -> int:
        """Of the base."""
        return self.base["hidden_size"]

    def validate_drafter(self) -> None:
        """All impossible values, at once."""
        problems = []
        if self.kind not in DRAFTERS:
            problems.append(f"kind={self.kind!r} is not known; choices: {', '.join(DRAFTERS)}")
        if not 1 <= self.num_draft_tokens <= LONGEST_DRAFT:
            problems.append(f"num_draft_tokens={self.num_draft_tokens} must be a number from 1 to {LONGEST_DRAFT}")
        absent = [name for name in ("vocab_size", "hidden_size", "num_hidden_layers") if name not in self.base]
        if absent:
            problems.append(f"base lacks {', '.join(absent)}: take it from a model with AnyformerDrafterConfig.of_base")
        if problems:
            raise ValueError("\n".join(problems))
        self.layer_config()

    def layer_config(self) -> AnyformerConfig:
        """The config of one decoder layer as the base's are, but dense and with full attention.

        Positions that the base adds to its embeddings come with these; others are the layer's own.
        """
        base = AnyformerConfig(**self.base)
        fields: dict[str, Any] = {name: getattr(base, name) for name in _LAYER_FIELDS}
        if base.attention == "mla":
            fields.pop("head_dim")
        positions = base.position_embedding
        if positions == "rope":
            ropes = [(base.layer_types[i], rope) for i in range(base.num_hidden_layers) if (rope := base.rope_of(i))]
            full = [pair for pair in ropes if pair[0] == "full_attention"]
            positions = "rope" if ropes else "none"
            if ropes:
                fields["rope_parameters"] = (full or ropes)[-1][1]
        elif positions in ("learned", "sinusoidal"):
            positions = "none"
        # No embedding is stored, and no layer asks for the size of the vocabulary.
        return AnyformerConfig(**fields, position_embedding=positions, vocab_size=1, num_hidden_layers=1)

    def check_base(self, base: Any) -> None:
        """Refuse a base that this drafter was not made for.

        Args:
            base: a model's config.

        Raises:
            ValueError: names what differs.
        """
        if getattr(base, "architecture", "decoder") != "decoder":
            raise ValueError(f"a drafter drafts for architecture='decoder'; this model has {base.architecture!r}")
        if getattr(base, "model_type", None) != AnyformerConfig.model_type:
            raise ValueError(
                f"this drafter drafts for anyformer models, not for {getattr(base, 'model_type', base)!r}: convert the "
                "base with `anyformer.from_hf`"
            )
        differ = [
            f"{name} {getattr(base, name)!r} (drafter: {value!r})"
            for name, value in self.base.items()
            if name not in _FREE_FIELDS and getattr(base, name) != value
        ]
        if differ:
            raise ValueError(
                f"this drafter was made for another base: {', '.join(differ[:4])}. Use the drafter that was trained on "
                "this model, or train one"
            )
