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
from .tokens.report import IGNORE

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
        packed: rows hold several documents.
    """
    both = config.architecture == "encoder-decoder"
    head = head or ("seq2seq_lm" if both else "causal_lm")
    if kind == "prefix-tuning" and config.attention == "mla":
        return (
            "attention='mla' caches one latent and one rotary key a token, of two widths, and a prefix is keys and "
            "values of one width; use prompt-tuning, p-tuning or lora"
        )
    if packed and both:
        return "PEFT puts a soft prompt before the first pair of a packed row alone; leave out packing"
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


def made_whole(model: "PeftModel") -> "PeftModel":
    """Give a model with a soft prompt what PEFT leaves out: it saves and loads what makes its vectors, so that training
    goes on exactly, and each document of a packed row has the prompt before it.

    To be called once the adapter is attached. Other models come back as they are.
    """
    if model.active_peft_config.is_prompt_learning and not getattr(model, "is_whole", False):
        base: Any = type(model)
        model.__class__ = _whole(base)
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
        peft_model = made_whole(tuned)
        peft_model.load_adapter(folder, "default", is_trainable=True)
    else:  # PEFT refuses `is_trainable` here, for it would have to know the weights that make them
        peft_model = made_whole(PeftModel.from_pretrained(model, folder))
        peft_model.prompt_encoder.requires_grad_(True)
        peft_model.set_adapter("default")  # a classifier's last layer learns too
    return peft_model.train()


@functools.cache
def _whole(base: Any) -> Any:
    """A class of PEFT's that keeps the prompt encoder (PEFT's own know the finished vectors alone) and packed rows."""

    class Whole(base):
        is_whole = True

        def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
            from ..modeling.masks import packed_documents

            positions = kwargs.get("position_ids")
            shaped = None if input_ids is None else input_ids[..., None]
            documents = None if shaped is None else packed_documents(positions, attention_mask, shaped)
            # A prefix in the cache is shared, and PEFT moves the positions of all documents behind it.
            shared = self.active_peft_config.peft_type == "PREFIX_TUNING"
            if documents is None or shared or self.base_model.config.is_encoder_decoder:
                return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            if attention_mask is None:
                attention_mask = input_ids.new_ones(input_ids.shape)
            return _vectors_before(self, input_ids, attention_mask, documents, **kwargs)

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

    return Whole


def _vectors_before(
    model: "PeftModel",
    input_ids: Any,
    attention_mask: Any,
    documents: Any,
    position_ids: Any,
    labels: Any = None,
    **kwargs: Any,
) -> Any:
    """A packed row [rows, length] with the virtual tokens before each document; its logits are those of the text.

    Args:
        documents: [rows, length], document numbers.
    """
    import torch

    table: Any = model.word_embeddings
    text = table(input_ids)  # [rows, length, size]
    rows, length, size = text.shape
    vectors = model.get_prompt(rows).to(text.dtype)  # [rows, virtual, size]
    virtual = vectors.shape[1]
    place = torch.arange(length, device=text.device) + (documents + 1) * virtual  # [rows, length], of each text token
    new = torch.nn.functional.pad(documents.diff(dim=-1) != 0, (1, 0), value=True)
    first = (place - virtual).masked_fill(~new, -1)  # where a document's virtual tokens begin
    width = length + (int(documents.max()) + 1) * virtual

    def laid(values: torch.Tensor, fill: int) -> torch.Tensor:
        return values.new_full((rows, width), fill).scatter(1, place, values)

    row, column = new.nonzero(as_tuple=True)
    steps = torch.arange(virtual, device=text.device)
    where = (row[:, None], first[row, column][:, None] + steps)  # [documents, virtual]
    mask, positions = laid(attention_mask, 0), laid(position_ids.expand(rows, -1) + virtual, 0)
    mask[where], positions[where] = 1, steps
    embeds = text.new_zeros(rows, width, size).scatter(1, place[..., None].expand(-1, -1, size), text)
    embeds = embeds.index_put(where, vectors[row])
    if labels is not None:
        kwargs["labels"] = laid(labels, IGNORE)
    outputs = model.base_model(inputs_embeds=embeds, attention_mask=mask, position_ids=positions, **kwargs)
    if getattr(outputs, "logits", None) is not None:
        outputs.logits = outputs.logits.gather(1, place[..., None].expand(-1, -1, outputs.logits.shape[-1]))
    return outputs
