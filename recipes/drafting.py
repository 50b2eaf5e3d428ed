"""What drafts for a model in `generate` and `chat`: a trained drafter, a smaller model, or the text so far."""

import statistics
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .evaluation import virtual_tokens
from .generator import Generator, open_generator
from .models import load_pretrained, resolve_path
from .objectives.preference import plain_model
from .tokens.supervised import stop_ids

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

    def count(self, model: Any) -> None:
        """Take in what came of the last text that the model wrote."""
        found = getattr(plain_model(model), "speculation", None)
        if found is None:  # of a class that counts nothing
            return
        self.total.rounds += found.rounds
        self.total.tokens += found.tokens
        for mine, theirs in ((self.total.drafted_at, found.drafted_at), (self.total.accepted_at, found.accepted_at)):
            mine.extend([0] * (len(theirs) - len(mine)))
            for place, number in enumerate(theirs):
                mine[place] += number

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
    import torch

    draft, factors, same = Draft({"assistant_model": drafter}), [], 0
    seconds, written = {"with": 0.0, "without": 0.0}, 0
    for number, ids in enumerate([prompts[0], *prompts]):
        inputs = torch.tensor([ids], device=base.device)
        took, answers = {}, {}
        for name, options in (("without", {}), ("with", draft.options)):
            started = time.perf_counter()
            output = base.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=stop_ids(tokenizer),
                pad_token_id=tokenizer.pad_token_id,
                **options,
            )
            took[name], answers[name] = time.perf_counter() - started, output[0, len(ids) :].tolist()
        if not number:
            continue  # the first one warms up
        draft.count(base)
        same += answers["with"] == answers["without"]
        written += len(answers["with"])
        factors.append(took["without"] / took["with"])
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
        "tokens_per_second": speeds["with"],
        "tokens_per_second_without": speeds["without"],
        "speedup": statistics.median(factors),
    }
    other = "" if same == len(prompts) else f", {len(prompts) - same} of them otherwise than alone, within rounding"
    figures["words"] = (
        f"In use: {len(prompts)} held-out prompts, {written:,} tokens{other}: {total.tokens_per_pass:.2f} tokens a "
        f"pass, {total.acceptance_rate:.0%} of the drafted ones accepted; {figures['speedup']:.2f} times as fast as "
        f"without ({speeds['without']:.1f} -> {speeds['with']:.1f} tokens/s)."
    )
    return figures
