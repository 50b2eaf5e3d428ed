"""A model that writes, opened under the head that its folder names, and its tokenizer: what `chat` and `generate` ask.

A decoder goes on with its prompt; an encoder-decoder reads it and writes apart. Both get the ids of training.
"""

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .adapters.saved import KINDS
from .errors import UserError
from .evaluation import virtual_tokens
from .model_paths import check_there, resolve_path
from .models import (
    adapter_folder,
    auto_class_of,
    holds_tokenizer,
    load_pretrained,
    load_tokenizer_from,
)
from .run_folder import RECIPE
from .soft_prompts import positions_taken
from .tokens.padding import pad_rows
from .tokens.supervised import stop_ids

if TYPE_CHECKING:
    from .drafting import Draft

DECODER, ENCODER_DECODER = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"
# End of an architecture's name -> what such a model is, and what runs it.
_WRITES_NOTHING = {
    "ForSequenceClassification": ("a classifier of texts", "pipeline('text-classification', {path!r})"),
    "ForTokenClassification": ("a classifier of tokens", "pipeline('token-classification', {path!r})"),
    "ForQuestionAnswering": (
        "a model that marks the answer in a text it is given",
        "AutoModelForQuestionAnswering.from_pretrained({path!r})",
    ),
    "ForMaskedLM": ("a masked language model, which fills gaps in texts", "pipeline('fill-mask', {path!r})"),
    "ForPreTraining": (
        "an encoder under the heads of its pretraining",
        "AutoModelForPreTraining.from_pretrained({path!r})",
    ),
    "Model": ("a model without a head, which gives hidden states", "AutoModel.from_pretrained({path!r})"),
}
# Positions that know distances alone, and were made for texts longer than those of training.
_GO_ON = ("alibi", "relative")
_REWARD = "a reward model or a regression, which gives a text one number"


@dataclass(frozen=True)
class Generator:
    """A model that writes.

    Attributes:
        raw: it was trained on sources as they stand, so no chat template is put around them.
        draft: what drafts for it, and counts what comes of it; see `drafting.with_draft`.
    """

    model: Any
    tokenizer: Any
    raw: bool
    draft: "Draft | None" = None

    @property
    def reads_apart(self) -> bool:
        """It is an encoder-decoder."""
        return bool(self.model.config.is_encoder_decoder)

    @property
    def has_template(self) -> bool:
        """Prompts are messages, unless the user says otherwise."""
        return self.tokenizer.chat_template is not None and not self.raw

    def encode(self, turns: Sequence[dict[str, str]]) -> list[int]:
        """A conversation that the model is to answer, through the chat template."""
        text = self.tokenizer.apply_chat_template(list(turns), add_generation_prompt=True, tokenize=False)
        # The template has written the special tokens already, as in training.
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @cached_property
    def longest_prompt(self) -> int:
        """In tokens, with room for one token of an answer."""
        return self._places[0] if self.reads_apart else self._places[1] - 1

    def room(self, prompt: int) -> int:
        """Tokens that an answer to a prompt of so many may have."""
        return self._places[1] - (0 if self.reads_apart else prompt)

    @cached_property
    def _places(self) -> tuple[int, int]:
        """Of the text that is read apart, and of the text that is written."""
        longest = position_limit(self.model.config) or sys.maxsize
        if self.draft is not None and self.draft.positions is not None:
            longest = min(longest, self.draft.positions)
        virtual = virtual_tokens(self.model)
        kind = KINDS.get(self.model.active_peft_config.peft_type, "") if virtual else ""
        source, target = positions_taken(kind, virtual, reads_apart=self.reads_apart)
        return longest - source, longest - target

    def ends_early(self, prompt: int, answer: Sequence[int], max_new_tokens: int) -> bool:
        """Whether an answer to a prompt of so many tokens ends only because positions do."""
        cut = len(self.written(answer)) >= self.room(prompt) < max_new_tokens
        return cut and answer[-1] not in self.stops

    def is_beyond(self, prompt: int, answer: Sequence[int]) -> bool:
        """Whether a text is longer than those that the model was trained for, where that may do harm."""
        trained, written = self.trained_length, len(self.written(answer))
        longest = max(prompt, written) if self.reads_apart else prompt + written
        return trained is not None and longest > trained

    @cached_property
    def trained_length(self) -> int | None:
        """In tokens; None: positions end there, or are of a kind that is made to go on."""
        config: Any = self.model.config
        if position_limit(config) is not None or getattr(config, "position_embedding", None) in _GO_ON:
            return None
        dynamic = "dynamic" in str(getattr(config, "rope_parameters", None))  # stretches by itself
        return None if dynamic else getattr(config, "max_position_embeddings", None)

    def written(self, answer: Sequence[int]) -> Sequence[int]:
        """An answer up to its end, without the padding behind it."""
        return answer[: next((i + 1 for i, token in enumerate(answer) if token in self.stops), len(answer))]

    @cached_property
    def stops(self) -> list[int]:
        """The tokens that end an answer."""
        return stop_ids(self.tokenizer)

    def answer(self, prompts: Sequence[list[int]], max_new_tokens: int, **options: Any) -> list[list[int]]:
        """Answers to prompts as token ids, padded behind their ends; `options` are those of `generate`.

        With drafts the prompts are answered one by one: the library checks the drafts of one text at a time.
        """
        import torch

        if self.draft is not None:
            if len(prompts) > 1:
                return [self.answer([ids], max_new_tokens, **options)[0] for ids in prompts]
            options |= self.draft.options
        if self.reads_apart:
            batch: Any = pad_rows([{"input_ids": ids} for ids in prompts], self.tokenizer.pad_token_id)
        else:
            padded = self.tokenizer.pad({"input_ids": list(prompts)}, padding_side="left")
            batch = {name: torch.tensor(padded[name]) for name in ("input_ids", "attention_mask")}
        width = batch["input_ids"].shape[1]
        drafted = nullcontext() if self.draft is None else self.draft.checked(self.model)
        with torch.no_grad(), drafted:
            output = self.model.generate(
                **{name: tensor.to(self.model.device) for name, tensor in batch.items()},
                **options,
                max_new_tokens=min(max_new_tokens, self.room(width)),
                eos_token_id=self.stops,
                pad_token_id=self.tokenizer.pad_token_id,
            )
        return output[:, 1 if self.reads_apart else width :].tolist()  # behind the start token, or the prompt

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def position_limit(config: Any) -> int | None:
    """Tokens that a text can have; None: positions go on, as far as is known of this model."""
    from ..modeling import AnyformerConfig

    if isinstance(config, AnyformerConfig):
        return config.position_limit
    # T5 has no longest text: it counts distances. Of other classes nobody says whether theirs end or go on.
    return getattr(config, "max_position_embeddings", None)


def open_generator(path: str, *, trust_remote_code: bool = False) -> Generator:
    """A model that writes, from a run, a model folder or a Hub id.

    Raises:
        UserError: no model or tokenizer there, or one that writes nothing; says what it is for.
    """
    check_there(path)
    auto_class = _auto_class_of(path)
    model = load_pretrained(path, trust_remote_code=trust_remote_code, auto_class=auto_class)
    tokenizer = load_tokenizer_from(tokenizer_place(path), trust_remote_code=trust_remote_code)
    return Generator(model, tokenizer, auto_class == ENCODER_DECODER and trained_on_sources(resolve_path(path)))


def tokenizer_place(path: str) -> str:
    """Where the tokenizer of a model is: an adapter without one has its base's."""
    from .adapters import base_of

    where = resolve_path(path)
    if where.endswith(".gguf"):
        return where
    folder = adapter_folder(where)
    return where if folder is None or holds_tokenizer(str(folder)) else base_of(folder)


def require_text(text: str, where: str) -> None:
    """Raises:
    UserError: a text that is no Unicode, such as bytes that were not UTF-8; says where.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: holds {text[error.start]!a}, half a character, at position {error.start + 1}: it was no "
            "valid UTF-8, or an escape of JSON was cut. Write the text as UTF-8"
        ) from error


class SavedHead(NamedTuple):
    """What a folder says of its model, read without a weight.

    Attributes:
        architecture: the name of the class, or "".
        config: of the whole model; an adapter's is its base's.
    """

    architecture: str
    config: dict[str, Any]
    is_adapter: bool


def saved_head(path: str) -> SavedHead | None:
    """The head that a folder or a Hub id names; None where nothing can be read, as of a `.gguf` file."""
    from transformers import PreTrainedConfig

    from ..modeling import HEADS
    from .adapters import base_of, head_of_saved

    where, folder, head = resolve_path(path), None, None
    try:
        folder = adapter_folder(where)
        if folder is not None:
            head, where = head_of_saved(folder), base_of(folder)
        config = PreTrainedConfig.get_config_dict(where)[0]
    except Exception:  # whatever a broken folder, an absent repository or a network can raise
        return None
    named = HEADS[head].__name__ if head else (config.get("architectures") or [""])[0]
    return SavedHead(named, config, folder is not None)


def _auto_class_of(path: str) -> str | None:
    """The Auto class of a head that writes; None where nothing can be read, which the loader explains.

    Raises:
        UserError: the head writes nothing.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

    saved = saved_head(path)
    if saved is None:
        return None
    named, config = saved.architecture, saved.config
    ours = auto_class_of(named)
    if named in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values() or ours == ENCODER_DECODER:
        return ENCODER_DECODER
    if named == "AnyformerDrafter":
        raise UserError(
            f"{path}: is a drafter, which writes nothing by itself: name the model that it was trained for, and "
            f"--draft {path}"
        )
    end = next((end for end in _WRITES_NOTHING if named.endswith(end)), None)
    if end is None or named.endswith("LMHeadModel"):
        return DECODER
    if saved.is_adapter:
        raise UserError(
            f"{path}: is an adapter of {_WRITES_NOTHING[end][0]}: it writes no text. `anyformer merge` makes one model "
            "of it and its base, and says what opens that"
        )
    raise UserError(f"{path}: {_use_of(path, end, len(config.get('id2label') or 'ab'), ours is not None)}")


def _use_of(path: str, end: str, labels: int, ours: bool) -> str:
    """What a model that writes no text is for."""
    if end == "ForSequenceClassification" and labels == 1:
        return (
            f"is {_REWARD}: it writes no text. Name it as objective.reward in a recipe for grpo, rloo or ppo, or open "
            f"it with transformers.AutoModelForSequenceClassification.from_pretrained({path!r})"
        )
    what, call = _WRITES_NOTHING[end]
    call = call.format(path=path)
    return f"is {what}: it writes no text. Use transformers.{call[:-1] + ', trust_remote_code=True)' if ours else call}"


def trained_on_sources(path: str) -> bool:
    """Whether the run in a folder taught sources and targets, which have no chat template around them."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        recipe = YAML(typ="safe").load(Path(path) / RECIPE)
        return recipe["objective"]["kind"] == "seq2seq"
    except (OSError, YAMLError, KeyError, TypeError):  # no run
        return False
