"""What single steps of plain `generate` do, by torch's profiler, which the fast ways of inference take no notice of."""

import math
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import StoppingCriteria

BYTES = {"bool": 1, "unsigned char": 1, "c10::BFloat16": 2, "c10::Half": 2, "int": 4, "float": 4}


@dataclass(frozen=True)
class Operator:
    """One call of an operator of torch.

    Attributes:
        shapes: of its arguments, [] for what is no tensor.
        parents: operators that it was called by, outermost first.
        written: bytes of each tensor that it allocates or writes into.
    """

    name: str
    shapes: list[list[int]]
    parents: tuple[str, ...]
    written: tuple[int, ...]


class Steps(StoppingCriteria):
    """Looks at steps of a `generate`: as its `stopping_criteria`, it is asked at the end of each.

    Args:
        first, count: which steps; 0, which reads the prompt, cannot be looked at so.

    Attributes:
        operators: all calls, in order.
        python_calls: functions of Python that were called, where `look_at` asks for "calls of Python" instead.
    """

    def __init__(self, first: int, count: int = 1, look_at: str = "operators") -> None:
        self.first, self.end, self.done = first, first + count, 0
        self.look_at, self.profile, self.python_calls = look_at, None, 0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.done += 1
        if self.done == self.end:
            self.stop()
        if self.done == self.first:
            self.start()
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def start(self) -> None:
        if self.look_at == "operators":
            self.profile = profiler()
            self.profile.start()
        else:
            sys.setprofile(self._count)

    def stop(self) -> None:
        if self.profile is not None:
            self.profile.stop()
        else:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:
        self.python_calls += event == "call"

    @property
    def operators(self) -> list[Operator]:
        return operators_of(self.profile)


def profiler() -> Any:
    return profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True)


def operators_of(profiled: Any) -> list[Operator]:
    """All operators of a profile, in order; memory that Python takes for a tensor by itself is one without a name."""
    calls: list[tuple[Any, tuple[str, ...], list[int]]] = []
    around: list[tuple[Any, tuple[str, ...], list[int]]] = []
    bare: list[Operator] = []
    # Of one thread, by time; a call encloses those that it makes.
    for event in sorted(profiled.profiler.kineto_results.events(), key=lambda e: (e.start_ns(), -e.end_ns())):
        while around and around[-1][0].end_ns() < event.start_ns():
            around.pop()
        name, shapes = event.name(), event.shapes()
        if name == "[memory]" and event.nbytes() > 0:
            if around:
                around[-1][2].append(event.nbytes())
            else:
                bare.append(Operator("", [], (), (event.nbytes(),)))
        elif "::" in name:
            written = []
            if name.endswith("_") and shapes and shapes[0]:
                written.append(math.prod(shapes[0]) * BYTES.get(event.dtypes()[0], 8))
            parents = (*around[-1][1], around[-1][0].name()) if around else ()
            calls.append((event, parents, written))
            around.append(calls[-1])
    return [Operator(e.name(), e.shapes(), parents, tuple(written)) for e, parents, written in calls] + bare
