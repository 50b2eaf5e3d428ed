"""The architecture: config, modules and models, as they travel to the Hub with the weights."""

from .configuration_anyformer import AUTO_MAP, AnyformerConfig
from .configuration_drafter import AnyformerDrafterConfig
from .drafters import AnyformerDrafter
from .heads import (
    HEADS,
    AnyformerForCausalLM,
    AnyformerForConditionalGeneration,
    AnyformerForMaskedLM,
    AnyformerForPreTraining,
    AnyformerForQuestionAnswering,
    AnyformerForSequenceClassification,
    AnyformerForTokenClassification,
)
from .modeling_anyformer import AnyformerModel
from .pretrained import AnyformerPreTrainedModel
from .registry import ATTENTIONS, DRAFTERS, LAYERS, MLPS, NORMS, POSITION_EMBEDDINGS, ROUTERS

__all__ = [
    "ATTENTIONS",
    "AUTO_MAP",
    "DRAFTERS",
    "HEADS",
    "LAYERS",
    "MLPS",
    "NORMS",
    "POSITION_EMBEDDINGS",
    "ROUTERS",
    "AnyformerConfig",
    "AnyformerDrafter",
    "AnyformerDrafterConfig",
    "AnyformerForCausalLM",
    "AnyformerForConditionalGeneration",
    "AnyformerForMaskedLM",
    "AnyformerForPreTraining",
    "AnyformerForQuestionAnswering",
    "AnyformerForSequenceClassification",
    "AnyformerForTokenClassification",
    "AnyformerModel",
    "AnyformerPreTrainedModel",
    "register",
]


def register() -> None:
    """Make the Auto classes open `anyformer` folders without remote code, and saving write the modeling files."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.AutoConfig.register(AnyformerConfig.model_type, AnyformerConfig, exist_ok=True)
    AnyformerConfig.register_for_auto_class()
    classes = {cls.__name__: cls for cls in HEADS.values()}
    for auto_name, reference in AUTO_MAP.items():
        if auto_name != "AutoConfig":
            cls = classes[reference.rpartition(".")[2]]
            getattr(transformers, auto_name).register(AnyformerConfig, cls, exist_ok=True)
            cls.register_for_auto_class(auto_name)
    transformers.AutoModelForDecision.register(AnyformerConfig, AnyformerForCausalLM, exist_ok=True)
    transformers.AutoConfig.register(AnyformerDrafterConfig.model_type, AnyformerDrafterConfig, exist_ok=True)
    transformers.AutoModel.register(AnyformerDrafterConfig, AnyformerDrafter, exist_ok=True)
    AnyformerDrafterConfig.register_for_auto_class()
    AnyformerDrafter.register_for_auto_class("AutoModel")
    # Where the Trainer looks before it shifts labels for label smoothing.
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[AnyformerConfig.model_type] = AnyformerForCausalLM.__name__


register()
