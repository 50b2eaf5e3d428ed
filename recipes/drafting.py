"""What drafts for a model in `generate` and `chat`: a trained drafter, a smaller model, or the text so far."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .evaluation import virtual_tokens
from .generator import Generator, open_generator
from .model_paths import check_there, resolve_path
from .models import load_pretrained
from .objectives.preference import plain_model

if TYPE_CHECKING:
    from ..modeling.speculation import SpeculationStatistics

LOOKUP = "lookup"
# Tokens that are copied at most from behind an earlier place of the same text.
LOOKUP_TOKENS = 10


@dataclass
class Draft:
    """What drafts, and what came of it.

    Attributes:
        options: arguments of `generate`.
        positions: places that a draft model has; None: as many as the model.
    """

    options: dict[str, Any]
    positions: int | None = None
    total: "SpeculationStatistics" = field(init=False)

    def __post_init__(self) -> None:
        from ..modeling.speculation import SpeculationStatistics

        self.total = SpeculationStatistics()

    @contextmanager
    def checked(self, model: Any) -> Iterator[None]:
        """While a model writes a text with these drafts; what came of them is taken in behind it.

        Raises:
            UserError: with drafts this model would write something else, or nothing can be drafted for it.
        """
        try:
            yield
        except ValueError as error:
            raise UserError(f"--draft: {error}") from error
        found = getattr(plain_model(model), "speculation", None)
        if found is not None:  # as of a class that counts nothing
            self.total += found

    def describe(self) -> str:
        """What came of all drafts, in a line."""
        return f"Drafts: {self.total}." if self.total.rounds else "Drafts: this model does not count them."


def with_draft(generator: Generator, place: str, *, trust_remote_code: bool = False) -> Generator:
    """The model with what drafts for it.

    Args:
        place: a trained drafter, a smaller model with the same tokens, or "lookup": what stands behind an earlier place
            of the text where its last tokens stand too.

    Raises:
        UserError: nothing there that can draft for this model.
    """
    if generator.reads_apart:
        raise UserError(f"--draft {place}: drafts are for decoders, and the model is an encoder-decoder: leave it out")
    if virtual_tokens(generator.model):
        raise UserError(f"--draft {place}: the model is a soft prompt, behind which no draft is checked: leave it out")
    if place != LOOKUP:
        check_there(place)
    generator = replace(generator, model=_ours(generator.model))
    if place == LOOKUP:
        draft = Draft({"prompt_lookup_num_tokens": LOOKUP_TOKENS})
    elif is_drafter(place):
        draft = Draft({"assistant_model": _drafter(place, generator.model, trust_remote_code)})
    else:
        draft = _draft_model(place, generator, trust_remote_code)
    return replace(generator, draft=draft)


def _ours(model: Any) -> Any:
    """A model as our class, which gives drafters its states and counts what comes of drafts; another's where we have
    none for its family."""
    from ..modeling.interop import ConversionError, from_hf

    if hasattr(plain_model(model), "speculation"):
        return model
    try:
        return from_hf(model)
    except ConversionError:
        return model


def _draft_model(place: str, generator: Generator, trust_remote_code: bool) -> Draft:
    small = open_generator(place, trust_remote_code=trust_remote_code)
    if small.reads_apart:
        raise UserError(f"--draft {place}: is an encoder-decoder, which goes on with no text: name a decoder")
    tokenizers = generator.tokenizer, small.tokenizer
    rows = [model.get_input_embeddings().weight.shape[0] for model in (generator.model, small.model)]
    if tokenizers[0].get_vocab() != tokenizers[1].get_vocab() or rows[0] != rows[1]:
        raise UserError(
            f"--draft {place}: has other tokens than the model ({len(tokenizers[1])} of them and {rows[1]} rows beside "
            f"{len(tokenizers[0])} and {rows[0]}): a draft model needs the same tokenizer. Name such a one, a drafter "
            f"that was trained for the model, or {LOOKUP}"
        )
    return Draft({"assistant_model": small.model}, small.longest_prompt + 1)


def is_drafter(place: str) -> bool:
    """Whether a folder or a repository holds a trained drafter."""
    from transformers import PreTrainedConfig

    from ..modeling.speculation import DRAFTER_TYPE

    try:
        return PreTrainedConfig.get_config_dict(resolve_path(place))[0].get("model_type") == DRAFTER_TYPE
    except UserError:
        raise
    except Exception:  # whatever a broken folder, an absent repository or a network can raise; the loader explains it
        return False


def _drafter(place: str, model: Any, trust_remote_code: bool) -> Any:
    drafter = load_pretrained(place, trust_remote_code=trust_remote_code, auto_class="AutoModel")
    try:
        drafter.check_base(plain_model(model))
    except ValueError as error:
        raise UserError(f"--draft {place}: {error}") from error
    return drafter.to(model.device)


def race(base: Any, drafter: Any, tokenizer: Any, prompts: list[list[int]], *, max_new_tokens: int) -> dict[str, Any]:
    """Greedy answers to prompts with a drafter and without, in turns: what came of the drafts, and how much sooner the
    answers were there, as figures and under "words" for people."""
    alone, options = Generator(base, tokenizer, raw=False), {"assistant_model": drafter}
    for generator in (alone, replace(alone, draft=Draft(options))):  # the first pass of each is slower
        generator.answer(prompts[:1], min(max_new_tokens, 8), do_sample=False)
    draft, factors, same = Draft(options), [], 0
    seconds, written = {"alone": 0.0, "drafted": 0.0}, 0
    for ids in prompts:
        took, answers = {}, {}
        for name, generator in (("alone", alone), ("drafted", replace(alone, draft=draft))):
            started = time.perf_counter()
            (answers[name],) = generator.answer([ids], max_new_tokens, do_sample=False)
            took[name] = time.perf_counter() - started
        same += answers["alone"] == answers["drafted"]
        written += len(answers["drafted"])
        factors.append(took["alone"] / took["drafted"])
        seconds = {name: seconds[name] + took[name] for name in seconds}
    total, speeds = draft.total, {name: written / value for name, value in seconds.items()}
    figures: dict[str, Any] = {
        "prompts": len(prompts),
        "tokens": written,
        "same_answers": same,
        "passes": total.rounds,
        "tokens_a_pass": total.tokens_per_pass,
        "acceptance_rate": total.acceptance_rate,
        "acceptance_rates": total.acceptance_rates,
        "tokens_per_second": speeds,
        "speedup": statistics.median(factors),
    }
    other = "" if same == len(prompts) else f", {len(prompts) - same} of them otherwise than alone, within rounding"
    figures["words"] = (
        f"In use: {len(prompts)} held-out prompts, {written:,} tokens{other}: {total.tokens_per_pass:.2f} tokens a "
        f"pass, {total.acceptance_rate:.0%} of the drafted ones accepted; {figures['speedup']:.2f} times as fast as "
        f"alone ({speeds['alone']:.1f} -> {speeds['drafted']:.1f} tokens/s)."
    )
    return figures
