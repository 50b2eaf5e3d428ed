"""What all classes of the family share: loading, saving, tying and initialisation."""

import math
from typing import Any

from torch import nn
from transformers import initialization as init
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging
from transformers.utils.output_capturing import OutputRecorder

from .attention import AnyformerAttention, CrossAttention
from .configuration_anyformer import AnyformerConfig
from .counting import part_of
from .layers import AnyformerLayer
from .moe import AnyformerExperts, AnyformerRouter
from .norms import AnyformerNorm
from .positions import PositionEmbedding, RotaryTable
from .quantized import keep_unpackable, require_writable
from .registry import CHOICES, LAYERS

logger = logging.get_logger(__name__)

# What a checkpoint of another class may lack.
_NEW_PARTS = ("score.", "qa_outputs.", "nsp_head.", "pooler.", "model.pooler.")


class AnyformerPreTrainedModel(PreTrainedModel):
    """Loading, saving, tying and initialisation, common to all classes."""

    config: AnyformerConfig
    config_class = AnyformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = {"e_score_correction_bias"}  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": AnyformerLayer,
        "attentions": AnyformerAttention,
        "cross_attentions": CrossAttention,
        "router_logits": OutputRecorder(AnyformerRouter, index=0),
    }

    def __init__(self, config: AnyformerConfig, *inputs: Any, **kwargs: Any) -> None:
        config.validate()  # fields may have been set since the config was constructed
        # What a backend would ignore without a word, it must not be chosen for.
        biased = config.position_embedding in ("alibi", "relative") or config.num_global_tokens > 0
        changed = config.attention_sinks or config.attn_logit_softcapping is not None
        object.__setattr__(self, "_supports_sdpa", not changed)
        object.__setattr__(self, "_supports_flash_attn", not (biased or changed or config.attention == "mla"))
        dynamic = "dynamic" in str(config.rope_parameters)  # recomputes its frequencies by length
        object.__setattr__(self, "_can_compile_fullgraph", not dynamic)
        super().__init__(config, *inputs, **kwargs)
        self._no_split_modules = [LAYERS[config.norm_position].__name__]

    def post_init(self) -> None:
        # All that may be tied, by name: what is tied now, the config says (`get_expanded_tied_weights_keys`).
        prefix = "" if self.base_model is self else f"{self.base_model_prefix}."
        tied = {"lm_head.weight": f"{prefix}embed_tokens.weight"} if hasattr(self, "lm_head") else {}
        if getattr(self.base_model, "encoder", None) is not None:
            tied[f"{prefix}encoder.embed_tokens.weight"] = f"{prefix}embed_tokens.weight"
        self._tied_weights_keys = tied
        self._state_ranges()
        super().post_init()

    def _state_ranges(self) -> None:
        """Write on every module the standard deviations that its part of the model starts with."""
        config = self.config
        ranges = config.initializer_ranges or {}
        module: Any
        for name, module in self.named_modules():
            inside = f".{name}."
            part = part_of(inside).replace("experts", "mlp")
            module._initial_std = ranges.get(part, config.initializer_range)
            module._initial_scale = 1.0
            if config.initialization == "depth_scaled" and name.endswith(("o_proj", "down_proj", ".experts")):
                inside_encoder = ".encoder." in inside
                depth = config.num_encoder_layers if inside_encoder else config.num_hidden_layers
                module._initial_scale = 1 / math.sqrt(2 * depth)
            module._by_fan_in = config.initialization == "fan_in" and part not in ranges

    def _std(self, module: Any, inputs: int | None = None) -> float:
        """The standard deviation for a weight; `inputs`: of a matrix, which may start by its fan-in."""
        if inputs is not None and getattr(module, "_by_fan_in", False):
            return inputs**-0.5
        # Modules that come later, as those of resized embeddings, were never told theirs.
        return getattr(module, "_initial_std", self.config.initializer_range)

    def _init_weights(self, module: Any) -> None:
        scale = getattr(module, "_initial_scale", 1.0)
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=self._std(module, module.in_features) * scale)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self._std(module))
            if module.padding_idx is not None and not getattr(module.weight, "_is_hf_initialized", False):
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, AnyformerNorm):
            module.reset()
        elif isinstance(module, AnyformerRouter):
            module.reset(self._std(module, self.config.hidden_size))
        elif isinstance(module, AnyformerExperts):
            down = self._std(module, self.config.moe_intermediate_size) * scale
            module.reset(self._std(module, self.config.hidden_size), down)
        elif isinstance(module, PositionEmbedding):
            module.reset(self._std(module))
        elif isinstance(module, RotaryTable):
            module.reset_buffers()
        elif isinstance(module, AnyformerAttention) and module.sinks is not None:
            init.zeros_(module.sinks)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any):
        """As the base class, but a weight that the checkpoint lacks is an error, never a random tensor.

        The exception is a class put on the checkpoint of another: a classifier's last layer and an encoder's pooler
        start at random, and the library says so.

        Raises:
            ValueError: names the absent weights; for an absent head also the flag `tie_word_embeddings`.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        model, info = loaded
        missing = sorted(info["missing_keys"])
        if cls.__name__ not in (model.config.architectures or ()):
            missing = [name for name in missing if not name.startswith(_NEW_PARTS)]
        if missing:
            shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
            hint = ""
            if "lm_head.weight" in missing:
                hint = (
                    f" config.tie_word_embeddings is {model.config.tie_word_embeddings}: set it to true if the head "
                    "shares the input embedding."
                )
            elif any(name.endswith("encoder.embed_tokens.weight") for name in missing):
                hint = " config.share_embeddings is False: set it to true if encoder and decoder share one embedding."
            raise ValueError(f"The checkpoint has no weights for {shown}.{hint}")
        model._untie_what_differs()
        keep_unpackable(model)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As the base class; says which blocks do not travel with the folder.

        Raises:
            ValueError: 4-bit weights that can no longer be written; see `quantized.require_writable`.
        """
        require_writable(self)
        home = __name__.rpartition(".")[0]
        for field, registry in CHOICES.items():
            cls = registry[getattr(self.config, field)]
            if cls.__module__.rpartition(".")[0] != home:
                logger.warning(
                    f"{field}={getattr(self.config, field)!r} is a block of your own "
                    f"({cls.__module__}.{cls.__qualname__}): it is not saved, and whoever opens the folder must "
                    "register it first"
                )
        super().save_pretrained(*args, **kwargs)

    def _untie_what_differs(self) -> None:
        """Make the config say what the loader did with a tied config over a checkpoint that holds two tables."""
        head, embedding = self.get_output_embeddings(), self.get_input_embeddings()
        encoder = getattr(self.base_model, "encoder", None)
        if head is not None and head.weight is not embedding.weight:
            self.config.tie_word_embeddings = False
        if encoder is not None and encoder.embed_tokens.weight is not embedding.weight:
            self.config.share_embeddings = False

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Repeated weight -> the one it repeats: the head where `tie_word_embeddings`, the encoder's embedding where
        `share_embeddings`. The base class knows the first flag alone."""
        if all_submodels:
            return super().get_expanded_tied_weights_keys(all_submodels=True)
        flags = {True: self.config.share_embeddings, False: self.config.tie_word_embeddings}
        possible = self._tied_weights_keys or {}
        return {target: source for target, source in possible.items() if flags["encoder." in target]}

    def get_submodule(self, target: str) -> nn.Module:
        """As the base class. PEFT asks under BERT's name for the embedding of `input_ids`, or guesses by its size."""
        if target == "embeddings.word_embeddings":
            reader: Any = self.get_encoder()
            return reader.get_input_embeddings()
        return super().get_submodule(target)

    def get_encoder(self, *args: Any, **kwargs: Any) -> nn.Module:
        """The encoder of an encoder-decoder, which `generate` runs once."""
        return getattr(self.base_model, "encoder", None) or self

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """As the base class, the encoder's table included."""
        embedding = super().resize_token_embeddings(*args, **kwargs)
        encoder = getattr(self.base_model, "encoder", None)
        if encoder is not None and encoder.embed_tokens.num_embeddings != embedding.num_embeddings:
            encoder.resize_token_embeddings(*args, **kwargs)
            self.tie_weights()
        return embedding

    def update_router_biases(self) -> None:
        """Move the routers' choosing biases towards an even load; to be called after each optimiser step."""
        for module in self.modules():
            if isinstance(module, AnyformerRouter) and module.e_score_correction_bias is not None:
                module.update_bias()
