"""Greedy answers against those of the rows: exact match, token F1, BLEU and chrF."""

import re
import string
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np

from ..errors import UserError
from ..evaluation import prompt_of_row
from ..generation import BEYOND, batches_of
from ..generator import Generator
from ..tokens.sequences import encode_sources, target_text
from .draws import SeededDraws
from .intervals import share_interval
from .kinds import Job, Kind
from .meter import Meter
from .score import Score
from .statistics import ByRow

_BOTH = ("prompt-completion", "messages")
_BY_SACREBLEU = {"bleu": ("BLEU", "BLEU"), "chrf": ("chrF", "CHRF")}  # metric -> name of the score, class


def measure(job: Job) -> list[Score]:
    """Figures of the likeliest answers, token by token, each up to its stop token.

    Raises:
        UserError: sacrebleu is wanted and not installed, or a prompt is longer than the model's positions.
    """
    if not find_spec("sacrebleu") and (wanted := [name for name in job.wanted if name in _BY_SACREBLEU]):
        raise UserError(
            f"--metrics: {' and '.join(wanted)} need sacrebleu: pip install 'anyformer[evaluation]', or pip install "
            "sacrebleu"
        )
    prompts, references = _asked(job)
    answers, details = answers_of(job, prompts)
    pairs = list(zip(answers, references, strict=True))
    found, count = [], len(pairs)
    if "exact-match" in job.wanted:
        hits = [normalised(answer) == normalised(reference) for answer, reference in pairs]
        by, bounds = details | {"normalised": "as SQuAD's"}, share_interval(sum(hits), count)
        found.append(Score.of("exact match", ByRow.of_values(hits), bounds=bounds, details=by))
    if "f1" in job.wanted:
        values = [token_f1(answer, reference) for answer, reference in pairs]
        by = details | {"normalised": "as SQuAD's"}
        found.append(Score.of("token F1", ByRow.of_values(values), details=by))
    return found + [corpus_score(name, answers, references, details) for name in job.wanted if name in _BY_SACREBLEU]


def _asked(job: Job) -> tuple[list[list[int]], list[str]]:
    """The prompts as tokens, as in training, and the answers of the rows.

    Raises:
        UserError: rows that are conversations and a tokenizer without a template, or a prompt beyond the positions.
    """
    generator = job.subject.generator
    tokenizer = generator.tokenizer
    if generator.reads_apart:
        prompts, references = encode_sources(job.rows, tokenizer), [target_text(row) for row in job.rows]
    else:
        chats = any("messages" in row or not isinstance(row["prompt"], str) for row in job.rows)
        if chats and not tokenizer.chat_template:
            raise UserError("the rows are conversations, and the tokenizer has no chat template: give plain text")
        triples = [prompt_of_row(row, tokenizer) for row in job.rows]
        prompts, references = [ids for _, _, ids in triples], [reference for _, reference, _ in triples]
    check_prompts(generator, prompts)
    return prompts, [reference.strip() for reference in references]


def encoded(generator: Generator, prompts: Sequence[Any]) -> list[list[int]]:
    """Prompts without answers, texts or messages, as training has them.

    Raises:
        UserError: messages and a tokenizer without a template, or a prompt beyond the positions.
    """
    if generator.reads_apart:
        nothing = [{"role": "assistant", "content": ""}]
        rows = [{"prompt": prompt, "completion": "" if isinstance(prompt, str) else nothing} for prompt in prompts]
        found = encode_sources(rows, generator.tokenizer)
    else:
        if not generator.tokenizer.chat_template and not all(isinstance(prompt, str) for prompt in prompts):
            raise UserError("the prompts are conversations, and the tokenizer has no chat template: give plain text")
        found = [
            generator.tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else generator.encode(prompt)
            for prompt in prompts
        ]
    check_prompts(generator, found)
    return found


def check_prompts(generator: Generator, prompts: Sequence[list[int]]) -> None:
    """Raises:
    UserError: a prompt is longer than the model's positions, or has no token.
    """
    for number, ids in enumerate(prompts, 1):
        if len(ids) > generator.longest_prompt:
            raise UserError(
                f"row {number}: the prompt has {len(ids)} tokens, and the model has positions for "
                f"{generator.longest_prompt}{'' if generator.reads_apart else ' and an answer'}: shorten it, or leave "
                "it out"
            )
        if not ids:
            raise UserError(f"row {number}: the prompt has no token: there is nothing to answer")


def answers_of(job: Job, prompts: Sequence[list[int]]) -> tuple[list[str], dict[str, Any]]:
    """Greedy answers in the order of the prompts, and the details of their scores."""
    found, details = written(job, prompts)
    return [job.subject.generator.decode(ids).strip() for ids in found], details


def written(
    job: Job, prompts: Sequence[list[int]], draws: SeededDraws | None = None
) -> tuple[list[list[int]], dict[str, Any]]:
    """Answers as ids up to their ends, in the order of the prompts, and the details of their scores.

    Args:
        draws: how tokens are drawn; None: the likeliest token each time.
    """
    generator: Generator = job.subject.generator
    most = job.settings.max_new_tokens
    roomy = generator.longest_prompt if generator.reads_apart else generator.room(most)
    order = sorted(range(len(prompts)), key=lambda place: len(prompts[place]))
    places, cut, beyond = iter(order), 0, False
    found: list[list[int]] = [[] for _ in prompts]
    with Meter("answers", len(prompts), "prompt", job.tell) as meter:
        for batch in batches_of([prompts[place] for place in order], job.settings.batch_size, roomy):
            tokens, chosen = 0, list(islice(places, len(batch)))
            options = {"do_sample": False} if draws is None else draws.options(chosen)
            answers = generator.answer(batch, most, num_beams=1, **options)
            for place, ids, answer in zip(chosen, batch, answers, strict=True):
                ended = list(generator.written(answer))
                found[place] = ended
                tokens += len(ended)
                cut += ended[-1:] != [] and ended[-1] not in generator.stops
                beyond = beyond or generator.is_beyond(len(ids), answer)
            meter.add(len(batch), tokens)
    if beyond:
        job.tell(BEYOND.format(generator.trained_length))
    if cut:
        job.tell(f"{cut} of {len(found)} answers were cut off before their stop token (--max-new-tokens)")
    return found, {"max_new_tokens": most, "answers_cut": cut}


# SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250), by its evaluation script


def normalised(text: str) -> str:
    """A text without case, punctuation, articles and runs of white space."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def token_f1(answer: str, reference: str) -> float:
    """2 shared / (given + wanted) words after `normalised`; of no words on a side, whether both have none."""
    given, wanted = normalised(answer).split(), normalised(reference).split()
    if not given or not wanted:
        return float(given == wanted)
    return 2 * (Counter(given) & Counter(wanted)).total() / (len(given) + len(wanted))


# sacrebleu (Post 2018, arXiv:1804.08771)


def corpus_score(metric: str, answers: Sequence[str], references: Sequence[str], details: dict[str, Any]) -> Score:
    """BLEU or chrF of a whole corpus, from 0 to 100, with sacrebleu's signature; the interval draws rows again."""
    from sacrebleu import metrics

    name, class_name = _BY_SACREBLEU[metric]
    scorer = getattr(metrics, class_name)()
    # What sacrebleu's own bootstrap draws from: counts of each row, whose sums make the figure of a corpus.
    counts = np.array(scorer._extract_corpus_statistics(list(answers), [list(references)]), dtype=np.float64)
    return Score.of(name, ByRow(counts, metric), details=details | {"signature": str(scorer.get_signature())})


KIND = Kind(
    {"decoder": _BOTH, "encoder-decoder": ("source-target", *_BOTH)},
    ("exact-match", "f1"),
    measure,
)
