"""Soft prompts: prompt tuning, p-tuning and prefix tuning, whose virtual tokens are all that is trained.

PEFT (0.21) attaches and runs them, and the models answer for `generate`. What is here PEFT leaves to its caller: the
sizes of a prefix, what a recipe must not ask for, and going on with training. PEFT saves the finished vectors alone:
loaded back, those of p-tuning would become the input of its encoder, and those of a projected prefix do not fit.
"""

import copy
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from ..modeling import AnyformerConfig

KINDS = ("prompt-tuning", "p-tuning", "prefix-tuning")
# Beside `adapter_model.safetensors`: the weights that make the vectors of p-tuning or of a projected prefix.
ENCODER_FILE = "prompt_encoder.safetensors"


def prompt_learning_fields(config: "AnyformerConfig", kind: str) -> dict[str, int]:
    """The sizes that `peft.PromptLearningConfig` wants, for a kind of `KINDS`.

    `num_transformer_submodules` is 1 for an encoder-decoder too. With PEFT's 2, prompts hold twice the vectors and use
    half, and of a decoder with an even number of layers the second half would repeat the prefixes of the first.

    Raises:
        UserError: there is no such kind for this architecture.
    """
    problem = soft_prompt_problem(config, kind)
    if problem:
        raise UserError(f"adapter.kind: {kind}: {problem}")
    heads, width = config.num_attention_heads, config.hidden_size
    if kind == "prefix-tuning":
        heads, head_dim = config.num_key_value_heads or heads, config.head_dim or 0  # derived: never None
        width = heads * head_dim
    return {
        "num_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "token_dim": width,
        "num_transformer_submodules": 1,
    }


def positions_taken(kind: str, virtual_tokens: int, *, reads_apart: bool) -> tuple[int, int]:
    """Positions that a soft prompt takes from the text that is read apart, and from the text that is written.

    Args:
        reads_apart: the model is an encoder-decoder, whose encoder gets the embeddings and whose decoder the prefixes.
    """
    before_source = reads_apart and kind != "prefix-tuning"
    return (virtual_tokens, 0) if before_source else (0, virtual_tokens)


def soft_prompt_problem(
    config: "AnyformerConfig",
    kind: str,
    *,
    head: str = "",
    virtual_tokens: int = 0,
    max_length: int | None = None,
    packed: bool = False,
) -> str | None:
    """Why this soft prompt would be wrong or impossible, as a sentence; None where it is exact.

    Gradient checkpointing is no reason, but PEFT refuses to put a prefix on a model where it is on already: attach
    first, as the trainer does.

    Args:
        head: a key of `modeling.HEADS`; default: "causal_lm", of an encoder-decoder "seq2seq_lm".
        virtual_tokens: length of the soft prompt; max_length: of the longest text, in tokens.
        packed: rows hold several documents (`packing`, `padding_free`).
    """
    both = config.architecture == "encoder-decoder"
    head = head or ("seq2seq_lm" if both else "causal_lm")
    if kind == "prefix-tuning" and config.attention == "mla":
        return (
            "attention='mla' caches one latent and one rotary key a token, of two widths, and a prefix is keys and "
            "values of one width; use prompt-tuning, p-tuning or lora"
        )
    if packed:
        return (
            "a soft prompt stands before the first document of a packed row alone, and PEFT drops the positions that "
            "tell the documents apart; set packing and padding_free to false"
        )
    if both and head != "seq2seq_lm":
        return (
            f"head {head!r} on an encoder-decoder reads its text twice, and PEFT puts the soft prompt before one of "
            "the readings alone; use lora"
        )
    if kind != "prefix-tuning" and head in ("token_classification", "question_answering", "masked_lm", "pretraining"):
        return (
            f"its vectors are tokens before the text, and PEFT does not move the labels of head {head!r} behind them; "
            "use prefix-tuning or lora"
        )
    longest = config.max_position_embeddings
    if config.position_embedding == "learned" and max_length is not None and virtual_tokens + max_length > longest:
        return (
            f"{virtual_tokens} virtual tokens and max_length={max_length} need {virtual_tokens + max_length} "
            f"positions, and learned ones end at max_position_embeddings={longest}; lower one of the two"
        )
    return None


def resumable(model: "PeftModel") -> "PeftModel":
    """Make a model with a soft prompt save and load what makes its vectors, so that training goes on exactly.

    To be called once the adapter is attached. Other models come back as they are.
    """
    if model.active_peft_config.is_prompt_learning and not getattr(model, "keeps_encoder", False):
        base: Any = type(model)
        model.__class__ = _with_encoder(base)
    return model


def continue_training(model: "PreTrainedModel", folder: Path) -> "PeftModel":
    """The model under a saved adapter of any kind, which is trainable again and starts where it was saved.

    Where the folder of a soft prompt lacks the weights that make its vectors, the vectors themselves are trained.
    """
    from peft import PeftConfig, PeftModel, get_peft_model

    config = PeftConfig.from_pretrained(str(folder))
    peft_model: Any
    if not config.is_prompt_learning:
        peft_model = PeftModel.from_pretrained(model, folder, is_trainable=True)
    elif (folder / ENCODER_FILE).is_file():
        config.inference_mode = False
        tuned: Any = get_peft_model(model, config)
        peft_model = resumable(tuned)
        peft_model.load_adapter(folder, "default", is_trainable=True)
    else:  # PEFT refuses `is_trainable` here, for it would have to know the weights that make them
        peft_model = resumable(PeftModel.from_pretrained(model, folder))
        peft_model.prompt_encoder.requires_grad_(True)
        peft_model.set_adapter("default")  # a classifier's last layer learns too
    return peft_model.train()


@functools.cache
def _with_encoder(base: Any) -> Any:
    """A class of PEFT's whose methods keep the prompt encoder whole: PEFT's own know the finished vectors alone."""

    class WithEncoder(base):
        keeps_encoder = True

        def save_pretrained(self, save_directory: Any, *args: Any, **kwargs: Any) -> None:
            from safetensors.torch import save_file

            super().save_pretrained(save_directory, *args, **kwargs)
            if not kwargs.get("is_main_process", True):
                return
            file = Path(save_directory) / ENCODER_FILE
            file.unlink(missing_ok=True)  # of an earlier adapter
            if self._makes_vectors("default"):
                state = self.prompt_encoder["default"].state_dict()
                save_file({name: weight.detach().cpu().contiguous() for name, weight in state.items()}, file)

        def load_adapter(self, model_id: Any, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
            if adapter_name not in self.peft_config or not self._makes_vectors(adapter_name):
                return super().load_adapter(model_id, adapter_name, *args, **kwargs)
            from safetensors.torch import load_file

            file = Path(model_id) / ENCODER_FILE
            if not file.is_file():
                raise UserError(
                    f"{model_id} holds the finished vectors of the soft prompt and not the weights that make them "
                    f"({ENCODER_FILE}): training cannot be resumed from it"
                )
            encoder = self.prompt_encoder[adapter_name]
            finished = copy.copy(self.peft_config[adapter_name])
            finished.inference_mode = True
            self.prompt_encoder[adapter_name] = type(encoder)(finished)  # has a place for what PEFT loads
            try:
                result = super().load_adapter(model_id, adapter_name, *args, **kwargs)
            finally:
                self.prompt_encoder[adapter_name] = encoder
            encoder.load_state_dict(load_file(file))
            return result

        def _makes_vectors(self, adapter_name: str) -> bool:
            """Whether the vectors come out of weights that PEFT does not save."""
            config = self.peft_config[adapter_name]
            return not config.inference_mode and len(self.prompt_encoder[adapter_name].state_dict()) > 1

        def generate_batch(self, *args: Any, **kwargs: Any) -> Any:
            raise UserError("continuous batching would run the model without its soft prompt: use generate")

    return WithEncoder
