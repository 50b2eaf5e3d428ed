"""The verb `show`: from a name to a diagram, a table and pictures."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..console import harmless, quiet_libraries
from ..errors import UserError
from ..planning.step_setting import DRAFTERS
from ..planning.subject import Subject, read_subject
from .build import diagram_of
from .parameters import parameters_of, table, table_lines
from .structure import Diagram
from .svg import as_svg
from .text import as_text

PICTURES = (".svg", ".png")


def show_model(
    name: str,
    *,
    stage: str | None = None,
    svg: Path | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    attention: Path | None = None,
    layers: str | None = None,
    heads: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the diagram and the parameters of a model; write pictures. Arguments as the command line gives them.

    Raises:
        UserError: a name, a file, a prompt or a choice that makes no sense, or maps of a model without weights.
    """
    _check_arguments(svg, prompt, answer, attention, layers, heads)
    quiet_libraries()
    subject = read_subject(name, stage=stage)
    head = head_of(subject)
    diagram, parameters = diagram_of(harmless(name), subject.config, head), parameters_of(subject.config, head)
    written: dict[str, Any] = {}
    if attention is not None and prompt is not None:
        from .maps import draw_attention

        written["attention"] = draw_attention(subject, prompt, answer, attention, layers, heads)
    if svg is not None:
        write(svg, as_svg(diagram, list(table(parameters))).encode("utf-8"), "--svg")
        written["svg"] = str(svg)
    if as_json:
        found = as_dict(diagram, head) | {"parameters": parameters, **written}
        json.dump(found, sys.stdout, indent=2, allow_nan=False, ensure_ascii=False)
        sys.stdout.write("\n")
        return
    width = shutil.get_terminal_size((160, 24)).columns
    sys.stdout.write(as_text(diagram, table_lines(parameters), width) + "\n")
    if attention is not None:
        sys.stdout.write(f"\n{written['attention']['said']}\n")
    if svg is not None:
        sys.stdout.write(f"\nDiagram written to {svg}\n")


def as_dict(diagram: Diagram, head: str) -> dict[str, Any]:
    """The diagram for scripts."""
    facts = dict(diagram.facts)
    return {"name": diagram.name, "head": head, "facts": facts, "columns": [asdict(c) for c in diagram.columns]}


def head_of(subject: Subject) -> str:
    """The head that stands on the model: what its folder holds, or what its objective trains."""
    from ...modeling import HEADS
    from ..objectives import objective_class

    config, kind = subject.config, subject.recipe.objective.kind
    held = next((n for n, cls in HEADS.items() if cls.__name__ in (config.architectures or ())), None)
    if held is not None and (subject.bare or kind in DRAFTERS):
        return held
    if kind in DRAFTERS:
        return "causal_lm"
    return objective_class(kind, config.architecture).head


def write(file: Path, content: bytes, option: str) -> None:
    """Write a file whole.

    Raises:
        UserError: it cannot be written.
    """
    try:
        file.expanduser().write_bytes(content)
    except OSError as error:
        raise UserError(f"{option}: {file} cannot be written: {error.strerror or error}") from error


def _check_arguments(
    svg: Path | None,
    prompt: str | None,
    answer: str | None,
    attention: Path | None,
    layers: str | None,
    heads: str | None,
) -> None:
    """Raises:
    UserError: options that do not go together, or files that cannot be written, before anything slow.
    """
    if (prompt is None) != (attention is None):
        raise UserError("attention maps need both: --prompt TEXT and --attention FILE")
    given = {"--answer": answer, "--layers": layers, "--heads": heads}
    if attention is None and (unused := [option for option, value in given.items() if value is not None]):
        raise UserError(f"{', '.join(unused)}: only for attention maps: give --prompt TEXT and --attention FILE too")
    for option, file, ends in (("--svg", svg, (".svg",)), ("--attention", attention, PICTURES)):
        if file is None:
            continue
        if file.suffix.lower() not in ends:
            raise UserError(f"{option}: {file} must end in {' or '.join(ends)}")
        file = file.expanduser()
        if file.is_dir() or not file.parent.is_dir():
            what = "is a folder" if file.is_dir() else f"cannot be written: there is no folder {file.parent}"
            raise UserError(f"{option}: {file} {what}")
    if svg is not None and attention is not None and svg.expanduser().resolve() == attention.expanduser().resolve():
        raise UserError(f"--svg and --attention name the same file, {svg}: choose two")
