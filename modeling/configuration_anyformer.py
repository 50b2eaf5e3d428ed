"""`AnyformerConfig`: one config for any Transformer."""

import copy
import difflib
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig

from .counting import Counts, count
from .validation import architecture_problems, rope_problems

AUTO_MAP = {
    "AutoConfig": "configuration_anyformer.AnyformerConfig",
    "AutoModel": "modeling_anyformer.AnyformerModel",
    "AutoModelForCausalLM": "generation_heads.AnyformerForCausalLM",
    "AutoModelForMaskedLM": "language_heads.AnyformerForMaskedLM",
    "AutoModelForPreTraining": "language_heads.AnyformerForPreTraining",
    "AutoModelForQuestionAnswering": "classifier_heads.AnyformerForQuestionAnswering",
    "AutoModelForSeq2SeqLM": "generation_heads.AnyformerForConditionalGeneration",
    "AutoModelForSequenceClassification": "classifier_heads.AnyformerForSequenceClassification",
    "AutoModelForTokenClassification": "classifier_heads.AnyformerForTokenClassification",
}
# `transformers serve` opens a folder with this class; without it, it looks for the architecture in the library alone.
DECISION_MAP = {"AutoModelForDecision": AUTO_MAP["AutoModelForCausalLM"]}

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
    "partial_rotary_factor",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
    "torchscript",
}
# Arguments of the loaders of models: programs, `transformers serve` among them, hand all they have to the config too.
_LOADING_ARGUMENTS = {
    "adapter_kwargs",
    "code_revision",
    "device_map",
    "gguf_file",
    "key_mapping",
    "max_memory",
    "offload_buffers",
    "offload_folder",
    "return_dict",
    "state_dict",
    "tp_plan",
    "tqdm_class",
    "use_kernels",
    "variant",
}


class UnknownOverrideError(TypeError, ValueError):
    """An override that names no field. `AutoTokenizer` hands its own options to the config too; it goes on after a
    ValueError."""


def refuse_unknown(cls: Any, given: Mapping[str, Any]) -> None:
    """Refuse keywords that are no field of a config class.

    Raises:
        TypeError: names each and the nearest field.
    """
    names = {f.name for f in fields(cls)}
    generation = GenerationConfig._get_default_generation_params()
    known = names | _BASE_ARGUMENTS | set(cls.attribute_map) | set(generation)
    problems = []
    for key in given:
        if key in known or key.startswith("_"):
            continue
        near = difflib.get_close_matches(key, names | set(cls.attribute_map), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"see {cls.__name__} for the fields there are"
        problems.append(f"{key!r} (value {given[key]!r}) is no field of {cls.__name__}; {hint}")
    if problems:
        raise TypeError("\n".join(problems))


@strict
class AnyformerConfig(PreTrainedConfig):
    """Describes a Transformer; a config that makes no sense does not construct.

    Named choices (`attention`, `position_embedding`, `norm`, `norm_position`, `mlp`, `router`) are classes of
    `registry.py`.

    Args:
        architecture: "decoder" (causal), "encoder" (bidirectional) or "encoder-decoder". `is_encoder_decoder` follows.
        vocab_size: number of token ids.
        hidden_size: width of the residual stream.
        intermediate_size: inner width of the feed-forward block; default 4 * hidden_size.
        num_hidden_layers: number of layers; of an encoder-decoder, those of the decoder.
        num_encoder_layers: layers of an encoder-decoder's encoder; default num_hidden_layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key/value heads: equal to the query heads (MHA, the default), 1 (MQA) or a
            divisor between (GQA).
        head_dim: width of a head; default hidden_size / num_attention_heads (mla: qk_rope_head_dim).
        max_position_embeddings: longest length the model is trained for, in tokens.
        type_vocab_size: token types ("segments") of an encoder; 0: none.
        pooler: an encoder's tanh layer over its first token (BERT).
        share_embeddings: encoder and decoder of an encoder-decoder share one token embedding.
        decoder_start_token_id: first token that the decoder of an encoder-decoder is given.

        attention: "gqa", or "mla" (latent; `q_lora_rank`, `kv_lora_rank`, `qk_nope_head_dim`, `qk_rope_head_dim`,
            `v_head_dim`; `q_lora_rank` None: queries are projected directly).
        attention_bias, attention_out_bias: bias on query, key and value; on the output (default: as attention_bias).
        attention_multiplier: factor on q k^T; default 1 / sqrt(width of a query head).
        attn_logit_softcapping: c: scores become c * tanh(scores / c).
        qk_norm, clip_qkv and attention_sinks, below, act in self-attention alone.
        attention_sinks: a learned logit a head that takes part in the softmax and has no value (GPT-OSS).
        qk_norm: norm of queries and keys: "none", "head" (one weight over head_dim for all heads), "separate" (a
            weight for each head), "full" (over all heads together).
        clip_qkv: bound on the absolute value of queries, keys and values.
        layer_types: of each layer: "full_attention", "sliding_attention", or "global_sliding_attention", which sees
            and is seen by the first `num_global_tokens` tokens too. A shorter list is a pattern, repeated over the
            layers. Default: sliding where `sliding_window` is set, else full. The encoder of an encoder-decoder has
            the pattern of its first layers.
        sliding_window: w: a causal layer sees the last w tokens, itself included; a bidirectional one those at a
            distance of at most w.

        position_embedding: "rope", "learned", "sinusoidal", "alibi", "relative" (T5) or "none".
        position_layout: of rope pairs and sinusoidal values: "half" (i with i + dim/2) or "interleaved" (2i with 2i+1).
        position_offset: unused rows before the first of a learned table (OPT and BART: 2).
        rope_parameters: `rope_type` (default, linear, dynamic, yarn, longrope, llama3, proportional), `rope_theta`,
            `partial_rotary_factor` and the keys of that type; or one such dict for each of "full_attention" and
            "sliding_attention".
        rope_thetas: the base of each layer, in place of `rope_theta`; a shorter list is a pattern.
        no_rope_layers: 0 for each layer without rotation, 1 for the others (the name and values of SmolLM3).
        relative_attention_num_buckets, relative_attention_max_distance: of T5's relative bias.
        alibi_bias_max: the last power of two of ALiBi's slopes (MPT); 8 in the paper.

        norm, norm_eps: kind and epsilon of every norm (`rms_norm_eps`, `layer_norm_eps` are accepted for norm_eps).
        norm_position: "pre", "post", "sandwich" (both), "branch" (on what a block adds: OLMo 2), "parallel"
            (attention and feed-forward side by side behind one norm), "parallel_dual" (each behind its own).
        embedding_norm: a norm over the embeddings. final_norm: one after the last layer; default: unless "post".
        first_norm: False: the first layer's attention has no norm before it (ModernBERT).
        residual_multiplier, embedding_multiplier, logit_scale: factors on what each block adds, on the token
            embeddings, on the logits. final_logit_softcapping: c: logits become c * tanh(logits / c).

        mlp: "gated" (SwiGLU, GeGLU, ReGLU by `hidden_act`), "dense", or "clamped" (GPT-OSS; `swiglu_limit`).
        hidden_act: activation, a name of transformers' `ACT2FN`.
        mlp_bias, lm_head_bias: bias on the feed-forward projections (experts too), on the head.
        num_experts: experts of a sparse layer; 0: every layer is dense. num_experts_per_tok: how many a token uses.
        moe_intermediate_size: inner width of an expert; default intermediate_size.
        mlp_layer_types: "dense" or "sparse" for each layer, or a pattern; default: sparse if there are experts.
        first_k_dense_replace: so many first layers are dense whatever the pattern says.
        router: "softmax" or "sigmoid". router_bias: a bias on its logits. norm_topk_prob: the chosen weights sum
            to 1. routed_scaling_factor: factor on them. n_group, topk_group, group_score: experts are chosen from
            the best `topk_group` of `n_group` groups, scored by their best expert ("max") or best two ("top2").
        router_score_bias: a bias that takes part in choosing but not in weighting (DeepSeek-V3);
            router_bias_update_rate: its step by `update_router_biases()`, 0: never.
        router_aux_loss_coef, router_z_loss_coef: factors of the load-balancing loss and the z-loss.
        shared_expert_intermediate_size: inner width of the expert that every token uses; 0: none.
            shared_expert_gate: it is weighted by a sigmoid gate.

        tie_word_embeddings: the head shares the (decoder's) input embedding's weight.
        head_transform: the masked-LM head first applies a linear layer, an activation and a norm;
            head_transform_bias: with a bias.
        classifier_pooling: token that a sequence classifier reads: "first", "last" or "mean"; default: first for an
            encoder, else last. classifier_bias: bias on classifiers; default: for an encoder.
        classifier_dropout: before a classifier; default hidden_dropout.
        attention_dropout, hidden_dropout, activation_dropout, embedding_dropout: probabilities on the attention
            weights, on what each block adds, inside the feed-forward block, on the embeddings.
        loss_chunk_size: tokens whose logits exist at a time in training mode. A language model given labels for more
            tokens than that computes the same loss chunk by chunk and returns no `logits`; 0: never in chunks.
        z_loss_coef: factor of the z-loss log(Z)^2 that language models add in training mode (PaLM, arXiv:2204.02311,
            sec. 5, has 1e-4).
        initialization: "normal" (standard deviation `initializer_range`), "depth_scaled" (projections into the
            residual stream divided by sqrt(2 * layers): GPT-2) or "fan_in" (1 / sqrt(inputs)).
        initializer_ranges: standard deviations of parts that differ: embeddings, attention, mlp, router, head.

    Raises:
        StrictDataclassError: wrong type, impossible value or combination; names field, value and remedy.
        TypeError: a keyword that is no field; names the nearest field.
    """

    model_type = "anyformer"
    attribute_map = {  # noqa: RUF012
        "rms_norm_eps": "norm_eps",
        "layer_norm_eps": "norm_eps",
        "num_local_experts": "num_experts",
    }
    keys_to_ignore_at_inference = ["cache", "router_logits"]  # noqa: RUF012
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.q_b_proj": "colwise",
        "layers.*.self_attn.kv_a_proj_with_mqa": "mla_kv_a_proj",
        "layers.*.self_attn.kv_b_proj": "colwise",
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

    # Shape
    architecture: str = "decoder"
    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_encoder_layers: int | None = None
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048
    type_vocab_size: int = 0
    pooler: bool = False
    share_embeddings: bool = True
    decoder_start_token_id: int | None = None
    # Attention
    attention: str = "gqa"
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    attention_bias: bool = False
    attention_out_bias: bool | None = None
    attention_multiplier: int | float | None = None
    attn_logit_softcapping: int | float | None = None
    attention_sinks: bool = False
    qk_norm: str = "none"
    clip_qkv: int | float | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    num_global_tokens: int = 0
    # Positions
    position_embedding: str = "rope"
    position_layout: str = "half"
    position_offset: int = 0
    rope_parameters: dict[str, Any] | None = None
    rope_thetas: list[int | float] | None = None
    no_rope_layers: list[int] | None = None
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    alibi_bias_max: int | float = 8
    # Norms and residuals
    norm: str = "rmsnorm"
    norm_position: str = "pre"
    norm_eps: int | float = 1e-6
    embedding_norm: bool = False
    final_norm: bool | None = None
    first_norm: bool = True
    residual_multiplier: int | float = 1.0
    embedding_multiplier: int | float = 1.0
    logit_scale: int | float = 1.0
    final_logit_softcapping: int | float | None = None
    # Feed-forward
    mlp: str = "gated"
    hidden_act: str = "silu"
    mlp_bias: bool = False
    swiglu_limit: int | float = 7.0
    num_experts: int = 0
    num_experts_per_tok: int = 2
    moe_intermediate_size: int | None = None
    mlp_layer_types: list[str] | None = None
    first_k_dense_replace: int = 0
    router: str = "softmax"
    router_bias: bool = False
    norm_topk_prob: bool = True
    routed_scaling_factor: int | float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "max"
    router_score_bias: bool = False
    router_bias_update_rate: int | float = 0.0
    router_aux_loss_coef: int | float = 0.0
    router_z_loss_coef: int | float = 0.0
    output_router_logits: bool = False
    shared_expert_intermediate_size: int = 0
    shared_expert_gate: bool = False
    # Heads
    tie_word_embeddings: bool = False
    lm_head_bias: bool = False
    head_transform: bool = False
    head_transform_bias: bool = True
    classifier_pooling: str | None = None
    classifier_bias: bool | None = None
    classifier_dropout: int | float | None = None
    # Training
    attention_dropout: int | float = 0.0
    hidden_dropout: int | float = 0.0
    activation_dropout: int | float = 0.0
    embedding_dropout: int | float = 0.0
    loss_chunk_size: int = 1024
    z_loss_coef: int | float = 0.0
    initialization: str = "normal"
    initializer_range: int | float = 0.02
    initializer_ranges: dict[str, float] | None = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    auto_map: dict[str, Any] = field(default_factory=lambda: AUTO_MAP | DECISION_MAP)

    def __post_init__(self, **kwargs: Any) -> None:
        refuse_unknown(type(self), kwargs)
        self._refuse_contradictions(kwargs)
        self.rope_parameters = copy.deepcopy(self.rope_parameters)  # the base class writes into it
        self._derive_sizes()
        self._derive_layers()
        super().__post_init__(**kwargs)
        if self.position_embedding != "rope":
            self.rope_parameters = None

    def _derive_sizes(self) -> None:
        """Defaults that follow from other fields. What makes no sense must not break here: validation names it."""
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.moe_intermediate_size is None:
            self.moe_intermediate_size = self.intermediate_size
        if self.num_encoder_layers is None:
            self.num_encoder_layers = self.num_hidden_layers
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.qk_rope_head_dim or self.hidden_size // max(self.num_attention_heads, 1)
        if self.attention_out_bias is None:
            self.attention_out_bias = self.attention_bias
        if self.final_norm is None:
            self.final_norm = self.norm_position != "post"
        if self.classifier_pooling is None:
            self.classifier_pooling = "first" if self.architecture == "encoder" else "last"
        if self.classifier_bias is None:
            self.classifier_bias = self.architecture == "encoder"
        if self.architecture == "encoder-decoder":
            self.is_encoder_decoder = True

    def _derive_layers(self) -> None:
        """Patterns are written out: the library's caches read `layer_types` layer by layer."""
        layers = max(self.num_hidden_layers, 0)
        if not self.layer_types:
            self.layer_types = ["full_attention" if self.sliding_window is None else "sliding_attention"]
        if not self.mlp_layer_types:
            self.mlp_layer_types = ["sparse" if self.num_experts else "dense"]
        self.layer_types = _repeat(self.layer_types, layers)
        if self.rope_thetas:
            self.rope_thetas = _repeat(self.rope_thetas, layers)
        self.mlp_layer_types = _repeat(self.mlp_layer_types, layers)
        dense = min(max(self.first_k_dense_replace, 0), layers)
        self.mlp_layer_types = ["dense"] * dense + self.mlp_layer_types[dense:]

    def _follow_layers(self, given: Mapping[str, Any]) -> None:
        """After an override of the number of layers: what is the same for every layer goes with it."""
        if self.architecture != "encoder-decoder" and "num_encoder_layers" not in given:
            self.num_encoder_layers = self.num_hidden_layers
        for name in ("layer_types", "mlp_layer_types", "rope_thetas"):
            if name not in given and len(set(getattr(self, name) or ())) == 1:
                setattr(self, name, getattr(self, name)[:1] * self.num_hidden_layers)
        if "first_k_dense_replace" in given and "mlp_layer_types" not in given:
            pattern = "sparse" if self.num_experts else "dense"
            dense = min(self.first_k_dense_replace, self.num_hidden_layers)
            self.mlp_layer_types = ["dense"] * dense + [pattern] * (self.num_hidden_layers - dense)

    def nested_rope_parameter_keys(self, rope_parameters: Mapping[str, Any]) -> list[str]:
        """The layer types that `rope_parameters` tells apart: the base class looks for those in use alone."""
        return [name for name, value in rope_parameters.items() if isinstance(value, dict)]

    @property
    def qk_head_dim(self) -> int | None:
        """Width of a latent-attention key: tells the library that a cache cannot be sized from `head_dim`."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim if self.attention == "mla" else None

    def rope_of(self, layer: int) -> dict[str, Any] | None:
        """The rope parameters of a layer; None: it is not rotated."""
        if self.rope_parameters is None:
            return None
        if self.no_rope_layers is not None and not self.no_rope_layers[layer]:
            return None
        key = "sliding_attention" if "sliding" in self.layer_types[layer] else "full_attention"
        rope = self.rope_parameters.get(key, self.rope_parameters)
        return rope if self.rope_thetas is None else rope | {"rope_theta": self.rope_thetas[layer]}

    @property
    def turning_lengths(self) -> dict[int, str]:
        """Lengths beyond which rotary frequencies are others, with their rope_type: "longrope", "dynamic"."""
        ropes = [rope for layer in range(self.num_hidden_layers) if (rope := self.rope_of(layer))]
        trained = "original_max_position_embeddings"
        turning = {r[trained]: r["rope_type"] for r in ropes if r["rope_type"] == "longrope"}
        dynamic = {self.max_position_embeddings: "dynamic"}  # the formula knows no other length
        return turning | (dynamic if any(r["rope_type"] == "dynamic" for r in ropes) else {})

    @property
    def position_limit(self) -> int | None:
        """Tokens that a text can have; None: positions of this kind go on beyond `max_position_embeddings`."""
        return self.max_position_embeddings if self.position_embedding == "learned" else None

    def _refuse_contradictions(self, kwargs: Mapping[str, Any]) -> None:
        """Two names of one field with two values: the base class would drop one of them."""
        for target in set(self.attribute_map.values()):
            aliases = {n: kwargs[n] for n, of in self.attribute_map.items() if of == target and n in kwargs}
            if aliases and getattr(self, target) != getattr(type(self), target):
                aliases[target] = getattr(self, target)
            if len(set(aliases.values())) > 1:
                raise TypeError(f"{aliases} are names of one field: give {target} alone")
        if "is_encoder_decoder" in kwargs or self.is_encoder_decoder:
            given = kwargs.get("is_encoder_decoder", self.is_encoder_decoder)
            if given != (self.architecture == "encoder-decoder"):
                raise TypeError(
                    f"is_encoder_decoder={given!r} contradicts architecture={self.architecture!r}: give architecture "
                    "alone"
                )
        rotary = self.rope_parameters or kwargs.get("rope_theta") or kwargs.get("rope_scaling")
        if self.position_embedding != "rope" and rotary:
            raise TypeError(
                f"rope_parameters={rotary!r} belong to position_embedding='rope', not to "
                f"{self.position_embedding!r}: leave them out"
            )
        rope, scaling, theta = self.rope_parameters, kwargs.get("rope_scaling"), kwargs.get("rope_theta")
        thetas = [d["rope_theta"] for d in (rope, scaling) if isinstance(d, dict) and "rope_theta" in d]
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
        # Overrides are set one by one after construction: what they add up to is derived and checked here.
        config._follow_layers(kwargs)
        if config.rope_parameters:
            config.standardize_rope_params()
        config.validate()
        if wants_unused:
            return config, unused
        if "rope_theta" in unused:
            raise TypeError("rope_theta is no field of AnyformerConfig: override rope_parameters")
        try:
            refuse_unknown(cls, {k: v for k, v in unused.items() if k not in _LOADING_ARGUMENTS})
        except TypeError as error:
            raise UnknownOverrideError(str(error)) from None
        return config

    def validate_architecture(self) -> None:
        """All impossible sizes and combinations, at once."""
        problems = list(architecture_problems(self))
        if problems:
            raise ValueError("\n".join(problems))

    def validate_rope(self) -> None:
        """Every key of `rope_parameters`: the base class only warns about most of what it finds."""
        if self.position_embedding == "rope":
            problems = list(rope_problems(self))
            if problems:
                raise ValueError("\n".join(problems))

    def validate_layer_type(self) -> None:
        """`validate_architecture` checks `layer_types`: the base class knows no "global_sliding_attention"."""

    def counts(self, sequence_length: int = 1, head: str | None = None) -> Counts:
        """Parameters by part, forward FLOPs of one sequence and cache bytes, from the config alone.

        Args:
            sequence_length: tokens of the sequence whose FLOPs are counted.
            head: which class is counted; default: "causal_lm", of an encoder-decoder "seq2seq_lm", of an encoder
                "base", its body with the pooler.
        """
        return count(self, sequence_length, head)


def _repeat(pattern: list, layers: int) -> list:
    """The pattern over so many layers; one that is too long is left for validation to name."""
    return list(pattern) if len(pattern) > layers else [pattern[i % len(pattern)] for i in range(layers)]
