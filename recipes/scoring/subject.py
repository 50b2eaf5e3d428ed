"""The model that is evaluated, opened under the head that its folder names."""

import gc
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ..errors import UserError
from ..evaluation import virtual_tokens
from ..generator import Generator, open_generator, position_limit, saved_head, tokenizer_place
from ..model_paths import resolve_path
from ..models import load_pretrained, load_tokenizer_from
from ..run_folder import RECIPE

Head = Literal["decoder", "encoder-decoder", "masked", "classifier", "multi-labeller", "regressor", "tagger"]
# End of an architecture's name -> the head, and what opens it; all others write.
_READS: dict[str, tuple[Head, str]] = {
    "ForMaskedLM": ("masked", "AutoModelForMaskedLM"),
    "ForSequenceClassification": ("classifier", "AutoModelForSequenceClassification"),
    "ForTokenClassification": ("tagger", "AutoModelForTokenClassification"),
}


@dataclass
class Subject:
    """A model, its tokenizer, and where they are from.

    Attributes:
        path: as the user gave it.
        raw: of a model that writes: it was trained on sources as they stand, see `generator.Generator`.
        trusted: code from its repository may be run.
    """

    path: str
    head: Head
    model: Any
    tokenizer: Any
    raw: bool = False
    trusted: bool = False

    @cached_property
    def generator(self) -> Generator:
        """The same model, for those that have it write."""
        return Generator(self.model, self.tokenizer, self.raw)

    @cached_property
    def run(self) -> Path | None:
        """The folder of the run that made it, or None."""
        return run_of(self.path)

    def release(self) -> None:
        """Let go of the model, so that another one has the room; nothing can be measured any more."""
        self.model = None
        self.__dict__.pop("generator", None)
        gc.collect()

    @property
    def limit(self) -> int | None:
        """Tokens that a text can have; None: positions go on."""
        limit = position_limit(self.model.config)
        return None if limit is None else limit - virtual_tokens(self.model)

    @property
    def length(self) -> int | None:
        """Tokens of the longest texts that it was made for; None: the config does not say."""
        longest = getattr(self.model.config, "max_position_embeddings", None)
        return None if longest is None else longest - virtual_tokens(self.model)


def run_of(path: str) -> Path | None:
    """The folder of the run that made a model, or None."""
    folder = Path(resolve_path(path)).expanduser()
    return folder if (folder / RECIPE).is_file() else None


def open_subject(path: str, *, trust_remote_code: bool = False) -> Subject:
    """A model from a run, a model folder or a Hub id; on the GPU, where there is one.

    Raises:
        UserError: no model or tokenizer there, a head that nothing is measured of, or a tokenizer with more tokens than
            the model has rows.
    """
    import torch

    saved = saved_head(path)
    end = next((end for end in _READS if saved and saved.architecture.endswith(end)), None)
    if end is None:
        found = open_generator(path, trust_remote_code=trust_remote_code)
        head: Head = "encoder-decoder" if found.reads_apart else "decoder"
        subject = Subject(path, head, found.model, found.tokenizer, found.raw, trust_remote_code)
    else:
        head, auto_class = _READS[end]
        model = load_pretrained(path, trust_remote_code=trust_remote_code, auto_class=auto_class)
        tokenizer = load_tokenizer_from(tokenizer_place(path), trust_remote_code=trust_remote_code, ends=False)
        subject = Subject(path, _of_problem(model.config) if head == "classifier" else head, model, tokenizer)
    rows = subject.model.get_input_embeddings().weight.shape[0]
    if len(subject.tokenizer) > rows:
        raise UserError(
            f"{path}: the tokenizer has {len(subject.tokenizer)} tokens but the model's embedding {rows} rows: they do "
            "not belong together"
        )
    if torch.cuda.is_available() and subject.model.device.type == "cpu":
        subject.model.to("cuda")
    return subject


def _of_problem(config: Any) -> Head:
    """What a head on whole texts is for, by the rule of transformers where its config does not say."""
    known: dict[str, Head] = {"regression": "regressor", "multi_label_classification": "multi-labeller"}
    otherwise: Head = "regressor" if config.num_labels == 1 else "classifier"
    return known.get(config.problem_type, "classifier") if config.problem_type else otherwise
