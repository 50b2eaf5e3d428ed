"""pass@k of programs (Chen et al. 2021, arXiv:2107.03374): rows in the forms of HumanEval and MBPP."""

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ..errors import UserError
from ..generation import sampling
from ..generator import Generator
from .answers import encoded, written
from .draws import SeededDraws
from .intervals import share_interval
from .kinds import Job, Kind, Settings
from .sandbox import Limits, Outcome, require_permission, run_program
from .score import Score
from .statistics import ByRow

# Where a completion of HumanEval ends (Chen et al. 2021, sec. 3.2): at what cannot belong to the function any more.
STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@", "\nassert ")
_FENCED = re.compile(r"```(?:python|py)?[^\S\n]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class Problem:
    """A task and its tests.

    Attributes:
        name: `task_id` of the row.
        prompt: what the model is given. Of HumanEval's form the beginning of a program, which the answer goes on with.
        tests: source text that raises where a program is wrong.
        setup: source text before the program.
        entry_point: the function that a program goes on to define; None: the answer is a whole program.
        canonical: the row's own answer, where it has one.
    """

    name: str
    prompt: str
    tests: str
    setup: str = ""
    entry_point: str | None = None
    canonical: str | None = None


def problem_of(row: Mapping[str, Any], where: str = "row") -> Problem:
    """A row of HumanEval's form (`prompt`, `test`, `entry_point`; `task_id`, `canonical_solution`) or of MBPP's
    (`text` or `prompt`, `test_list`; `task_id`, `code`, `test_setup_code`, `test_imports`, `challenge_test_list`).

    Args:
        where: the row in a message.

    Raises:
        UserError: neither.
    """
    name = str(row.get("task_id", where))
    if isinstance(row.get("test_list"), list) and (text := row.get("text") or row.get("prompt")):
        tests = _texts(row, "test_list", where)
        if not tests:
            raise UserError(f"{where}: test_list is empty, so that any program would pass")
        setup = [*_texts(row, "test_imports", where), row.get("test_setup_code") or ""]
        return Problem(name, _asked(text, tests), "\n".join(tests), "\n".join(setup), canonical=row.get("code"))
    wanted = ("prompt", "test", "entry_point")
    if missing := [key for key in wanted if not isinstance(row.get(key), str)]:
        raise UserError(
            f"{where}: is no problem with tests: give prompt, test and entry_point, as HumanEval, or text and "
            f"test_list, as MBPP; of the first it lacks {', '.join(missing)}"
        )
    prompt, test, entry = (row[key] for key in wanted)
    if not entry.isidentifier():
        raise UserError(f"{where}: entry_point is {entry!r}, which is no name of a function")
    called = f"{test}\ncheck({entry})" if re.search(r"^def check\(", test, re.MULTILINE) else test
    return Problem(name, prompt, called, entry_point=entry, canonical=row.get("canonical_solution"))


def _texts(row: Mapping[str, Any], key: str, where: str) -> list[str]:
    texts = row.get(key) or []
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f"{where}: {key} must hold source texts alone")
    return list(texts)


def _asked(text: str, tests: Sequence[str]) -> str:
    """As MBPP asks (Austin et al. 2021, arXiv:2108.07732, fig. 1)."""
    return (
        f"You are an expert Python programmer, and here is your task: {text.strip()} Your code should pass these "
        f"tests:\n\n" + "\n".join(tests) + "\n"
    )


def program_of(problem: Problem, answer: str) -> str:
    """The program in an answer: a fenced block if there is one, or the answer itself.

    Of a problem with an entry point, what defines that function stands behind the prompt's lines before it, and
    anything else goes on with the prompt, up to the first of `STOPS`.
    """
    fenced = _FENCED.search(answer)
    code = fenced[1] if fenced else answer
    if problem.entry_point is None:
        return code
    defined = rf"^(?:async )?def {problem.entry_point}\("
    if re.search(defined, code, re.MULTILINE):
        head = re.search(defined, problem.prompt, re.MULTILINE)
        return problem.prompt[: head.start() if head else 0] + "\n" + code
    ends = [found for stop in STOPS if (found := code.find(stop)) >= 0]
    return problem.prompt + code[: min(ends, default=len(code))]


def passes(problem: Problem, answer: str, *, allow_code: bool, limits: Limits | None = None) -> Outcome:
    """Run an answer's program and its tests; see `sandbox.run_program`."""
    steps = [problem.setup, program_of(problem, answer), problem.tests]
    return run_program(steps, allow_code=allow_code, limits=limits)


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Unbiased estimate that one of k samples passes (eq. 1): 1 - C(samples - passed, k) / C(samples, k), as a product,
    which does not overflow.

    Raises:
        ValueError: more than there are, or none.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {passed} right among {samples} samples is not defined")
    if samples - passed < k:
        return 1.0
    wrong = 1.0
    for number in range(samples - passed + 1, samples + 1):
        wrong *= 1 - k / number
    return 1 - wrong


def code_scores(
    problems: Sequence[Problem],
    answers: Sequence[Sequence[str]],
    *,
    k: Iterable[int] = (1,),
    allow_code: bool,
    limits: Limits | None = None,
    workers: int | None = None,
) -> list[Score]:
    """pass@k, a score for each k.

    Args:
        answers: the samples of each problem.
        allow_code: somebody has agreed that programs of the model are run.
        workers: runs at the same time; default: as many as there are processors.

    Returns:
        Means over problems. Bounds are Wilson's where each has one sample, else of drawing the problems again.
        `details`: `samples`, `outcomes` (how many ended how), and `isolation_missing`, what the sandbox lacked here.

    Raises:
        UserError: not allowed; no problem; a k beyond the samples.
    """
    require_permission(allow_code)
    wanted, fewest = sorted(set(k)), min(map(len, answers), default=0)
    if not problems or len(problems) != len(answers):
        raise UserError(f"pass@k: there are {len(problems)} problems and answers to {len(answers)}")
    if not wanted or wanted[0] < 1 or wanted[-1] > fewest:
        raise UserError(
            f"pass@k: k is {wanted}, and there are {fewest} samples a problem: k must lie between 1 and their number"
        )
    pairs = [(problem, answer) for problem, given in zip(problems, answers, strict=True) for answer in given]
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        outcomes = list(pool.map(lambda pair: passes(*pair, allow_code=allow_code, limits=limits), pairs))
    found = iter(outcomes)
    counts = [(len(given), sum(next(found).passed for _ in given)) for given in answers]
    details = {
        "samples": fewest,
        "outcomes": dict(Counter(outcome.result for outcome in outcomes)),
        "isolation_missing": sorted({what for outcome in outcomes for what in outcome.missing}),
    }
    return [_score(n, counts, details) for n in wanted]


def _score(k: int, counts: Sequence[tuple[int, int]], details: dict[str, Any]) -> Score:
    rates = [pass_at_k(samples, passed, k) for samples, passed in counts]
    single = all(samples == 1 for samples, _ in counts)
    bounds = share_interval(sum(rates), len(rates)) if single else None
    return Score.of(f"pass@{k}", ByRow.of_values(rates), bounds=bounds, details=details)


def check(settings: Settings) -> None:
    """Raises:
    UserError: nobody allowed programs to be run, or the numbers make no sense.
    """
    given = settings.sampling
    require_permission(given.allow_code)
    if not given.k or min(given.k) < 1 or max(given.k) > given.samples:
        raise UserError(
            f"--k {','.join(map(str, given.k))}: with --samples {given.samples} each must be from 1 to {given.samples}"
        )
    if given.samples > 1 and not given.heat:
        raise UserError(f"--temperature 0: all {given.samples} samples would be alike; give more, or --samples 1")
    sampling(given.heat)


def measure(job: Job) -> list[Score]:
    """pass@k of seeded samples; a request goes through the chat template, where there is one.

    Raises:
        UserError: a row that is no problem, or a prompt beyond the model's positions.
    """
    generator, given = job.subject.generator, job.settings.sampling
    problems = [problem_of(row, f"row {number}") for number, row in enumerate(job.rows, 1)]
    prompts = encoded(generator, [_request(problem, generator) for problem in problems])
    asked = [(number, sample) for number in range(len(prompts)) for sample in range(given.samples)]
    draws = SeededDraws(given.heat, [(given.seed, *one) for one in asked]) if given.heat else None
    found, details = written(job, [prompts[number] for number, _ in asked], draws)
    answers = iter(found)
    texts = [
        [_text(problem, generator, ids, next(answers)) for _ in range(given.samples)]
        for problem, ids in zip(problems, prompts, strict=True)
    ]
    scores = code_scores(problems, texts, k=given.k, allow_code=given.allow_code)
    if missing := scores[0].details["isolation_missing"]:
        job.tell(f"pass@k: this machine did not give programs all of the isolation; missing: {', '.join(missing)}")
    details |= {"temperature": given.heat, "seed": given.seed}
    return [replace(score, details=score.details | details) for score in scores]


def _request(problem: Problem, generator: Generator) -> Any:
    """What the model is given: a program goes on as it stands, a request is a user's message."""
    if problem.entry_point is not None or not generator.has_template:
        return problem.prompt
    return [{"role": "user", "content": problem.prompt}]


def _text(problem: Problem, generator: Generator, prompt: list[int], answer: list[int]) -> str:
    """An answer as text. One that goes on with its prompt keeps the white space that it begins with, which some
    tokenizers leave out of a text's beginning."""
    if problem.entry_point is not None and not generator.reads_apart:
        before, whole = generator.decode(prompt), generator.decode([*prompt, *answer])
        if whole.startswith(before):
            return whole[len(before) :]
    return generator.decode(answer)


KIND = Kind({"decoder": ("prompt",), "encoder-decoder": ("prompt",)}, (), measure, check)
