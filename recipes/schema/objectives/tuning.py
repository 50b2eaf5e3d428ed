"""Objectives on what a model should answer: sft, seq2seq, distill."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from ..fields import Kind, Length, PathText, wrong
from .base import (
    LIBRARY_REFUSED,
    NO_EFFECT,
    ROUTED,
    TOKENIZER,
    TRAINER_REFUSED,
    UNSMOOTHED,
    LossOn,
    ObjectiveSection,
)


class SftObjective(ObjectiveSection):
    """`objective: {kind: sft}`: supervised fine-tuning."""

    kind: Literal["sft"] = "sft"
    loss_on: LossOn = "completion"


class Seq2SeqObjective(ObjectiveSection):
    """`objective: {kind: seq2seq}`: an encoder reads the source, a decoder writes the target.

    Attributes:
        max_source_length, max_target_length: longest in tokens, what the tokenizer adds and the end token included;
            default the model's. `data.truncation` says what becomes of longer rows.
        packing: "documents": rows hold several pairs, which do not see each other, within the same two limits.
    """

    kind: Literal["seq2seq"] = "seq2seq"
    max_source_length: Length | None = None
    max_target_length: Length | None = None
    packing: Literal["documents", "none"] = "none"


class DistillObjective(ObjectiveSection):
    """`objective: {kind: distill}`: learn a teacher's distribution over tokens."""

    kind: Literal["distill"] = "distill"
    teacher: PathText
    loss_on: LossOn = "completion"


# Why `data.truncation: split` is nothing for an encoder-decoder.
WHOLE_SOURCE = "what an encoder-decoder reads and what it writes belong together whole"
SFT_REFUSED = (
    TRAINER_REFUSED
    | ROUTED
    | {
        "dataset_text_field": "is data.columns: {text: NAME}",
        "dataset_kwargs": "is not used: the suite tokenises the rows itself, see the data: section",
        "assistant_only_loss": "is objective.loss_on: completion",
        "completion_only_loss": "is objective.loss_on: completion",
        "truncation_mode": "is data.truncation",
        "eval_packing": "is not used: held-out rows stand by themselves, and their loss is a mean over tokens",
        "padding_free": "is train.packing: true",
        "trust_remote_code": "is model.trust_remote_code",
        "model_init_kwargs": "is not used: see the model: section (dtype, attn_implementation, revision, config)",
        "chat_template_path": TOKENIZER,
        "eos_token": TOKENIZER,
        "pad_token": TOKENIZER,
    }
)


def _packing_strategy(value: Any) -> Any:
    if value == "wrapped":
        raise wrong(
            "wrapped cuts rows anywhere and lets those in a block see each other: use bfd, which keeps them apart, or "
            "for plain text objective: {kind: pretrain, packing: blocks}"
        )
    if value == "bfd_split":
        raise wrong("bfd_split is bfd with data.truncation: split")
    return value


_SFT_TYPES = {
    "packing_strategy": Annotated[Literal["bfd"], BeforeValidator(_packing_strategy)],
}
_DISTILL_REFUSED = (
    SFT_REFUSED
    | UNSMOOTHED
    | {
        "teacher_model_name_or_path": "is objective.teacher",
        "teacher_model_init_kwargs": "is not used: the teacher has the dtype and the attention of model:",
        **dict.fromkeys(
            ("packing", "packing_strategy"),
            "is not possible here: the teacher and sampled answers need rows by themselves",
        ),
        **dict.fromkeys(
            ("loss_type", "dataset_num_proc", "remove_unused_columns", "pad_to_multiple_of", "shuffle_dataset"),
            NO_EFFECT,
        ),
    }
)
_DISTILL_TYPES = {
    "temperature": Annotated[float, Field(gt=0)],
    "max_new_tokens": Annotated[int, Field(ge=1)],
    **dict.fromkeys(("lmbda", "beta"), Annotated[float, Field(ge=0, le=1)]),
}
KINDS = {
    "sft": Kind(
        SftObjective,
        ("trl.trainer.sft_config", "SFTConfig"),
        code="sft:SupervisedTuning",
        code_by_shape={"encoder-decoder": "seq2seq:SupervisedSequences"},
        shapes=("decoder", "encoder-decoder"),
        refused=SFT_REFUSED,
        types=_SFT_TYPES,
    ),
    "seq2seq": Kind(
        Seq2SeqObjective,
        ("transformers.training_args_seq2seq", "Seq2SeqTrainingArguments"),
        code="seq2seq:SequenceToSequence",
        shapes=("encoder-decoder",),
        unsplit=WHOLE_SOURCE,
        refused=LIBRARY_REFUSED
        | {
            "sortish_sampler": "has no effect; rows of like length come together with train_sampling_strategy: "
            "group_by_length",
            "generation_config": "cannot be written in a recipe: generation_max_length and generation_num_beams can",
        },
    ),
    "distill": Kind(
        DistillObjective,
        ("trl.experimental.gkd.gkd_config", "GKDConfig"),
        code="distillation:Distillation",
        unsplit="answers are sampled to the prompts, which later pieces of a row lack",
        refused=_DISTILL_REFUSED,
        types=_DISTILL_TYPES,
    ),
}
