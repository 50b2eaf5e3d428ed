"""Which rows are held out: a share of each source, whole groups or equal prompts on one side."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import UserError
from .builtin import BUILT_IN, in_held_out_part
from .report import SourceReport
from .sources import Source

Row = dict[str, Any]


@dataclass
class Part:
    """The rows of one source.

    Attributes:
        source, report: where they come from, and what is told of them.
        rows: all usable ones.
        groups: of a built-in data set, the group of each row; else empty.
        train, held: the two sides.
    """

    source: Source
    report: SourceReport
    rows: list[Row]
    groups: list[str] = field(default_factory=list)
    train: list[Row] = field(default_factory=list)
    held: list[Row] = field(default_factory=list)

    def put(self, row: Row, held: bool) -> None:
        (self.held if held else self.train).append(row)


def hold_out(parts: Sequence[Part], fraction: float, seed: int) -> str:
    """Divide each part in two, equal prompts on one side in all of them.

    Parts from which less than a row would be held out share one draw.

    Returns:
        How, in words.

    Raises:
        UserError: one side would be empty.
    """
    decided: dict[str, bool] = {}
    said: list[str] = []
    share = f"{fraction:.3g}"
    for part in (part for part in parts if part.groups):
        _by_group(part, fraction, seed, decided, alone=len(parts) == 1)
        unit = BUILT_IN[part.source.where].unit
        said.append(f"whole {unit}, about {share} of them, chosen by a hash of name and seed {seed}")
    others = [part for part in parts if not part.groups]
    if len(others) == 1 == len(parts):
        part = others[0]
        part.train, part.held = split_by_prompt(part.rows, fraction, seed)
    else:
        large = [part for part in others if fraction * len(part.rows) >= 1]
        small = [part for part in others if part not in large]
        for draw in (*([part] for part in large), small):
            _by_prompt(draw, fraction, seed, decided)
    if others:
        each = " of each source" if len(parts) > 1 else ""
        said.append(f"a random {share} of the rows{each} with seed {seed}, equal prompts on one side")
    held, train = (sum(len(side) for side in sides) for sides in zip(*((p.held, p.train) for p in parts), strict=True))
    if not (held and train):
        raise UserError(
            f"data.eval_fraction = {fraction} leaves {train} rows to train on and {held} held out of {len(parts)} "
            "sources. Add rows, name a file in data.eval_source, or set data.eval_fraction to 0."
        )
    return "; ".join(dict.fromkeys(said))


def _by_group(part: Part, fraction: float, seed: int, decided: dict[str, bool], *, alone: bool) -> None:
    found: dict[str, bool] = {}
    for row, group in zip(part.rows, part.groups, strict=True):
        own = in_held_out_part(group, eval_fraction=fraction, seed=seed)
        # A prompt that another data set holds too goes where that one put it.
        key = "" if alone else prompt_key(row)
        held = decided.get(key, own)
        found.setdefault(key, held)
        part.put(row, held)
    if alone and not (part.train and part.held):
        raise UserError(
            f"data.eval_fraction = {fraction} with data.seed = {seed} leaves {len(part.train)} rows to train on and "
            f"{len(part.held)} held out: {BUILT_IN[part.source.where].unit} stay whole. Choose a fraction nearer 0.1."
        )
    decided |= found


def _by_prompt(parts: Sequence[Part], fraction: float, seed: int, decided: dict[str, bool]) -> None:
    rows = [row for part in parts for row in part.rows]
    held = _held_places(rows, fraction, seed, decided) if rows else set()
    places = iter(range(len(rows)))
    for part in parts:
        for row in part.rows:
            part.put(row, next(places) in held)


def split_by_prompt(rows: list[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Hold out about `fraction` of the rows, both sides in the rows' order, equal prompts on one side.

    Raises:
        UserError: all rows have the same prompt, so that one side would be empty.
    """
    held = _held_places(rows, fraction, seed, {})
    if not held:
        raise UserError(
            f"data.eval_fraction: cannot hold rows out: all {len(rows)} usable rows have one prompt. "
            "Add rows, name a file in data.eval_source, or set data.eval_fraction to 0."
        )
    sides: tuple[list[Row], list[Row]] = ([], [])
    for index, row in enumerate(rows):
        sides[index in held].append(row)
    return sides


def _held_places(rows: list[Row], fraction: float, seed: int, decided: dict[str, bool]) -> set[int]:
    """The places of the rows to hold out, none where all have one prompt; a prompt that is decided stays so."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        groups.setdefault(prompt_key(row), []).append(index)
    held = {index for key, places in groups.items() if decided.get(key) for index in places}
    free = {key: places for key, places in groups.items() if key not in decided}
    # By a hash of the prompt, not by position: most rows keep their side when the file grows.
    order = sorted(free, key=lambda key: hashlib.blake2b(f"{seed}:{key}".encode()).digest())
    target = min(max(1, round(fraction * len(rows))), len(rows) - 1)
    chosen: set[str] = set()
    for key in order:
        if len(held) + len(free[key]) <= target:
            chosen.add(key)
            held.update(free[key])
    if not held and len(free) > 1:
        key = min(order, key=lambda key: len(free[key]))
        chosen.add(key)
        held.update(free[key])
    decided.update({key: key in chosen for key in free})
    return held


def prompt_key(row: Mapping[str, Any]) -> str:
    """What two rows share when one would give the other's answer away."""
    if "prompt" not in row and "messages" in row:
        # The opening, so that a conversation and its continuations stay together.
        roles = [message["role"] for message in row["messages"]]
        turns = row["messages"][: roles.index("assistant")] or row["messages"]
        return _joined(turns)
    asked = next(row[name] for name in ("prompt", "text", "source", "tokens") if name in row)
    if isinstance(asked, str):
        return " ".join(asked.split())
    return _joined(asked) if isinstance(asked[0], dict) else " ".join(asked)


def _joined(messages: Iterable[Mapping[str, Any]]) -> str:
    return "\n".join(f"{message['role']}: {' '.join(message['content'].split())}" for message in messages)
