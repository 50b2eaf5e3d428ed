"""What the objectives share: their section's base, and what a recipe may not set of the trainers' configs."""

from typing import Annotated, Literal

from pydantic import Field

from ..fields import Section


class ObjectiveSection(Section):
    """`objective`: what is learned."""

    kind: str = "sft"


Role = Literal["system", "user", "assistant"]
LossOn = Literal["completion", "assistant", "all"] | Annotated[list[Role], Field(min_length=1)]

_HUB = "is decided by the hub: section (repo, private, revision, commit_message)"
TOKENIZER = "belongs to the tokenizer: set it there and name that folder in model.tokenizer"
NO_EFFECT = "has no effect in a recipe; remove it"
_MEASURES = "is set by the suite, which measures by itself; remove it"
# Fields of the trainers' configs that the suite decides itself or that other sections decide.
TRAINER_REFUSED = {
    "push_to_hub": _HUB,
    "hub_token": "must not stand in a recipe: log in with `hf auth login` or set HF_TOKEN",
    **dict.fromkeys(("hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"), _HUB),
    "resume_from_checkpoint": "is the command line's: anyformer train RECIPE --resume",
    "do_train": NO_EFFECT,
    "do_predict": NO_EFFECT,
    "do_eval": "follows from eval_strategy; remove it",
    "local_rank": "is set by the launcher; remove it",
    "log_level": "is logging.level",
    "parallelism_config": "cannot be written in a recipe: use an accelerate launch configuration",
}
TRAINING_ARGUMENTS = ("transformers.training_args", "TrainingArguments")
LIBRARY_REFUSED = TRAINER_REFUSED | {
    **dict.fromkeys(("remove_unused_columns", "label_names", "length_column_name"), "is set by the suite; remove it"),
    **dict.fromkeys(("include_for_metrics", "batch_eval_metrics", "eval_do_concat_batches"), _MEASURES),
    "use_liger_kernel": "has no kernels for this model; remove it",
}
UNSMOOTHED = {"label_smoothing_factor": "is not part of this objective's loss; remove it"}
PLAIN_REFUSED = LIBRARY_REFUSED | UNSMOOTHED
# TRL's coefficient is that of a softmax router's loss alone.
ROUTED = {"router_aux_loss_coef": "is model.config.router_aux_loss_coef"}
