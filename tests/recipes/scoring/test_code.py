import itertools
from typing import Any

import pytest

from anyformer.recipes.errors import UserError
from anyformer.recipes.scoring.code import code_scores, pass_at_k, passes, problem_of, program_of
from anyformer.recipes.scoring.intervals import share_interval

HUMAN_EVAL: dict[str, Any] = {
    "task_id": "HumanEval/x",
    "prompt": 'from typing import List\n\n\ndef total(values: List[int]) -> int:\n    """Sum."""\n',
    "canonical_solution": "    return sum(values)\n",
    "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate([1, 2]) == 3\n",
    "entry_point": "total",
}
MBPP: dict[str, Any] = {
    "task_id": 7,
    "text": "Write a function to double a number.",
    "code": "def double(x):\r\n  return 2 * x",
    "test_list": ["assert double(2) == 4", "assert double(0) == zero"],
    "test_setup_code": "zero = 0",
}


@pytest.mark.parametrize(("samples", "passed", "k"), list(itertools.product((6,), range(7), range(1, 7))))
def test_the_estimate_is_the_share_of_subsets_with_one_right(samples: int, passed: int, k: int) -> None:
    right = [number < passed for number in range(samples)]
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)


def test_the_estimate_does_not_overflow() -> None:
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, abs=1e-9)
    for given in ((3, 4, 1), (3, 1, 4), (3, 1, 0)):
        with pytest.raises(ValueError, match="not defined"):
            pass_at_k(*given)


@pytest.mark.parametrize("row", [HUMAN_EVAL, MBPP, {**MBPP, "prompt": MBPP["text"], "text": None}])
def test_the_rows_own_answer_passes(row: dict[str, Any]) -> None:
    problem = problem_of(row)
    assert problem.canonical
    assert passes(problem, problem.canonical, allow_code=True).passed
    assert not passes(problem, "    return 5\n", allow_code=True).passed
    assert not passes(problem, "", allow_code=True).passed


@pytest.mark.parametrize(
    "answer",
    [
        "    return sum(values)\n\n\ndef other():\n    return total([",
        "    return sum(values)\n\nprint(total([]))",
        "Here it is:\n```python\ndef total(values: List[int]) -> int:\n    return sum(values)\n```\nIt adds.",
        "```\n    return sum(values)\n```",
        "def help(x):\n    return sum(x)\n\ndef total(values):\n    return help(values)",
    ],
)
def test_a_program_is_found_in_an_answer(answer: str) -> None:
    problem = problem_of(HUMAN_EVAL)
    assert passes(problem, answer, allow_code=True).passed, program_of(problem, answer)


def test_scores_count_problems() -> None:
    right, wrong = "def double(x): return 2 * x", "def double(x): return x"
    answers = [[right, wrong, wrong], [right, right, right], [wrong, "exit(0)", "while True"]]
    one, two = code_scores([problem_of(MBPP)] * 3, answers, k=(2, 1), allow_code=True)
    assert (one.name, two.name, one.count) == ("pass@1", "pass@2", 3)
    assert one.value == pytest.approx((1 / 3 + 1 + 0) / 3)
    assert two.value == pytest.approx((2 / 3 + 1 + 0) / 3)
    assert one.low <= one.value <= one.high
    assert one.details["outcomes"] == {"passed": 4, "failed": 5}
    (single,) = code_scores([problem_of(MBPP)] * 2, [[right], [wrong]], allow_code=True)
    assert (single.low, single.high) == share_interval(1, 2)


def test_mistakes_are_told() -> None:
    problem = problem_of(MBPP)
    with pytest.raises(UserError, match="--allow-code"):
        code_scores([problem], [["x"]], allow_code=False)
    with pytest.raises(UserError, match="k must lie between 1"):
        code_scores([problem], [["x"]], k=(10,), allow_code=True)
    with pytest.raises(UserError, match="1 problems and answers to 2"):
        code_scores([problem], [["x"], ["y"]], allow_code=True)
    for row, told in (
        ({"prompt": "x"}, r"row 3: is no problem with tests.*lacks test, entry_point"),
        ({"text": "x", "test_list": []}, "test_list is empty"),
        ({"text": "x", "test_list": [1]}, "source texts alone"),
        ({**HUMAN_EVAL, "entry_point": "a b"}, "no name of a function"),
    ):
        with pytest.raises(UserError, match=told):
            problem_of(row, "row 3")
