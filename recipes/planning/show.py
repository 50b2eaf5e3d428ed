"""The verb `plan`: from a name to a table or JSON."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from ..console import quiet_libraries
from ..errors import UserError
from ..run_folder import METRICS
from .costs import Asked, costs_of
from .step_setting import Device
from .subject import read_subject
from .table import as_text
from .units import read_bytes, read_count


def show_plan_of(
    name: str,
    overrides: Sequence[str] = (),
    *,
    stage: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    batch: int | None = None,
    length: int | None = None,
    context: int | None = None,
    tokens: str | None = None,
    throughput: str | None = None,
    flops: str | None = None,
    as_json: bool = False,
) -> None:
    """Print the plan of a recipe, a preset, a run or a model; arguments as the command line gives them.

    Raises:
        UserError: a name, an override or a size that cannot be read, or a model that cannot be planned.
    """
    memory = None if gpu is None else read_bytes(gpu, "--gpu")
    asked = Asked(
        batch=batch,
        length=length,
        context=context,
        tokens=None if tokens is None else read_count(tokens, "--tokens"),
        throughput=None if throughput is None else _throughput(throughput),
        peak=None if flops is None else _peak(flops),
    )
    quiet_libraries()
    subject = read_subject(name, overrides, stage=stage)
    costs = costs_of(subject, Device(memory, gpus or 1, _kind(gpu, gpus)), asked)
    if as_json:
        json.dump(costs.as_dict(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
    else:
        sys.stdout.write(as_text(costs) + "\n")


def _kind(gpu: str | None, gpus: int | None) -> str:
    import torch

    return "gpu" if gpu or gpus or torch.cuda.is_available() else "cpu"


def _throughput(text: str) -> float:
    """Tokens a second: stated, or those of a run's folder.

    Raises:
        UserError: neither.
    """
    file = Path(text).expanduser() / METRICS
    if file.is_file():
        measured = json.loads(file.read_text(encoding="utf-8")).get("training", {}).get("tokens_per_second")
        if measured:
            return float(measured)
        raise UserError(f"--throughput {text}: the run has not finished, or counted no tokens")
    try:
        return read_count(text, "--throughput")
    except UserError as error:
        raise UserError(f"{error}, or a run's folder (there is no {file})") from None


def _peak(text: str) -> float:
    """FLOP/s of one device: stated, or of a GPU by its name.

    Raises:
        UserError: neither.
    """
    import torch

    from ..training.peaks import KNOWN, known_peak

    if (known := known_peak(text, torch.bfloat16)) is not None:
        return known * 1e12
    try:
        return read_count(text, "--flops")
    except UserError:
        names = ", ".join(name for name, *_ in KNOWN)
        raise UserError(f"--flops: {text!r} is no number such as 989T, and no GPU that is known: {names}") from None
