"""The architecture: config, modules and models, as they travel to the Hub with the weights."""

from .configuration_anyformer import AUTO_MAP, AnyformerConfig
from .modeling_anyformer import AnyformerForCausalLM, AnyformerModel, AnyformerPreTrainedModel
from .registry import ATTENTIONS, LAYERS, MLPS, NORMS, POSITION_EMBEDDINGS

__all__ = [
    "ATTENTIONS",
    "AUTO_MAP",
    "LAYERS",
    "MLPS",
    "NORMS",
    "POSITION_EMBEDDINGS",
    "AnyformerConfig",
    "AnyformerForCausalLM",
    "AnyformerModel",
    "AnyformerPreTrainedModel",
    "register",
]


def register() -> None:
    """Make the Auto classes open `anyformer` folders without remote code, and saving write the modeling files."""
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    AutoConfig.register(AnyformerConfig.model_type, AnyformerConfig, exist_ok=True)
    AutoModel.register(AnyformerConfig, AnyformerModel, exist_ok=True)
    AutoModelForCausalLM.register(AnyformerConfig, AnyformerForCausalLM, exist_ok=True)
    # Where the Trainer looks before it shifts labels for label smoothing.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AnyformerConfig.model_type] = AnyformerForCausalLM.__name__
    AnyformerConfig.register_for_auto_class()
    AnyformerModel.register_for_auto_class("AutoModel")
    AnyformerForCausalLM.register_for_auto_class("AutoModelForCausalLM")


register()
