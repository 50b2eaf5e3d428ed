"""The heads by name: each is a body and one or two layers."""

from .classifier_heads import (
    AnyformerForQuestionAnswering,
    AnyformerForSequenceClassification,
    AnyformerForTokenClassification,
)
from .generation_heads import AnyformerForCausalLM, AnyformerForConditionalGeneration
from .language_heads import AnyformerForMaskedLM, AnyformerForPreTraining
from .modeling_anyformer import AnyformerModel
from .pretrained import AnyformerPreTrainedModel

HEADS: dict[str, type[AnyformerPreTrainedModel]] = {
    "base": AnyformerModel,
    "causal_lm": AnyformerForCausalLM,
    "seq2seq_lm": AnyformerForConditionalGeneration,
    "masked_lm": AnyformerForMaskedLM,
    "pretraining": AnyformerForPreTraining,
    "sequence_classification": AnyformerForSequenceClassification,
    "token_classification": AnyformerForTokenClassification,
    "question_answering": AnyformerForQuestionAnswering,
}
