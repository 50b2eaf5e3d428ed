"""What a run says while it works."""

import logging
import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from .data import DataReport
    from .prepare import Prepared
    from .run_folder import RunFolder
    from .schema import Recipe
    from .tokens.report import TokenizationReport


def quiet_imports() -> None:
    """Keep bitsandbytes, which PEFT imports wherever it is installed, from saying that a kernel of 4-bit inference is
    missing. Nothing here uses that kernel, on a quantised base neither, see `quantization.quantize`.

    To be called before transformers or PEFT is imported.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def make_console(recipe: "Recipe") -> "Console":
    """The console, and how loud the libraries are; of several processes the first one speaks."""
    from rich.console import Console

    from .parallel.world import current

    quiet_imports()
    logging.getLogger("anyformer").setLevel(recipe.logging.level.upper())
    if recipe.logging.level != "debug":
        quiet_libraries()
        quiet_datasets()
    return Console(highlight=False, soft_wrap=True, quiet=not current().main)


def quiet_libraries() -> None:
    """Errors only from transformers, and no bars but that of training: what matters is said by this suite."""
    quiet_imports()
    from transformers.utils import logging as library_logging

    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|trl)\.")
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # that it casts, at each product
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()


def quiet_datasets() -> None:
    """No bars of datasets, which verbs that read no rows need not import."""
    import datasets

    datasets.disable_progress_bars()


def harmless(text: str) -> str:
    """A text whose characters that would steer a terminal are written out; line breaks and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else f"‹U+{ord(c):04X}›" for c in text)


def show_plan(console: "Console", prepared: "Prepared") -> None:
    """Parameters, memory, data and steps, what was left out, and three rows with what is trained on marked."""
    from rich.markup import escape

    from .parallel.world import current
    from .planning import describe

    report, tokens = prepared.splits.report, prepared.train.report
    lines = [*describe(prepared.plan), *prepared.adapter.describe(), *prepared.quantized]
    for name, value in [*lines, *prepared.objective.plan_lines()]:
        console.print(f"[bold]{name:>11}[/bold]  {escape(harmless(value))}")
    if current().processes > 1:
        console.print(f"[bold]{'processes':>11}[/bold]  {escape(current().describe())}")
    held = prepared.held_out.report.rows_kept if prepared.held_out else 0
    console.print(f"[bold]{'format':>11}[/bold]  {escape(report.recognised)}")
    for name, value in source_lines(report):
        console.print(f"[bold]{name:>11}[/bold]  {escape(value)}")
    console.print(f"[bold]{'held out':>11}[/bold]  {held:,} rows: {escape(report.split)}")
    dropped = _counted({**tokens.dropped, **report.left_out, "unusable": report.rows_skipped}) or "none"
    console.print(f"[bold]{'left out':>11}[/bold]  {dropped}; truncated: {tokens.truncated:,}{split_rows(tokens)}")
    if prepared.held_out and (lost := _counted(prepared.held_out.report.dropped)):
        console.print(f"[bold]{'':>11}[/bold]  of the held-out rows {lost}")
    if tokens.made:
        console.print(f"[bold]{'tokens':>11}[/bold]  {escape(tokens.made)}")
    for warning in [*unstopped(tokens), *report.warnings, *tokens.warnings]:
        console.print(f"[bold]Warning:[/bold] {escape(warning)}")
    console.print("Three rows, what is trained on between ⟦ and ⟧:")
    for row in prepared.objective.preview(prepared.train, 3):
        console.print(escape(harmless(row)), style="dim")


# Sources that are listed one by one.
_SOURCES = 20


def source_lines(report: "DataReport") -> list[tuple[str, str]]:
    """A line for each source: what it holds, and what became of its rows."""
    parts = [*report.by_source, *report.by_eval_source]
    lines = [("source" if part in report.by_source else "eval source", part.describe()) for part in parts[:_SOURCES]]
    return [*lines, ("", f"and {len(parts) - _SOURCES} more sources")] if len(parts) > _SOURCES else lines


def _counted(causes: dict[str, int]) -> str:
    return ", ".join(f"{count:,} {cause}" for cause, count in causes.items() if count)


def split_rows(tokens: "TokenizationReport") -> str:
    """How many rows came of longer ones that were split, if any."""
    if not tokens.pieces:
        return ""
    empty = f", {tokens.empty_pieces:,} others had nothing to learn" if tokens.empty_pieces else ""
    return f"; pieces of longer rows: {tokens.pieces:,}{empty}"


def unstopped(tokens: "TokenizationReport") -> list[str]:
    """Warnings of rows whose learned part does not end in a stop token, and why."""
    count = tokens.rows_kept - tokens.stopped - tokens.continued
    cut = min(count, tokens.truncated - tokens.beginnings_cut)
    causes = {
        "rows are cut at the longest length": cut,
        "rows do not end in a learned stop token, as where the chat template does not end the turns of a learned "
        "role": count - cut,
    }
    return [
        f"{number:,} of {tokens.rows_kept:,} {cause}: from them the model does not learn to stop."
        for cause, number in causes.items()
        if number
    ]


def show_result(console: "Console", folder: "RunFolder", metrics: dict[str, Any], remarks: "Sequence[str]") -> None:
    """Measures before and after, the sample answers side by side, and warnings: the objective's `remarks` too."""
    from rich.markup import escape
    from rich.table import Table

    from .report import comparison_rows, not_better, paired_samples

    table = Table("", "before", "after")
    for row in comparison_rows(metrics):
        table.add_row(*row)
    console.print(table)
    for number, (before, after) in enumerate(paired_samples(metrics), 1):
        sides = Table("before", "after", title=f"sample {number}", show_lines=True)
        sides.add_row(escape(before.answer) if before else "–", escape(after.answer))
        console.print(escape(after.prompt), style="dim")
        console.print(sides)
        console.print(f"in the data: {escape(after.reference)}\n")
    for warning in filter(None, [not_better(metrics), *remarks]):
        console.print(f"[bold]Warning:[/bold] {escape(warning)}.")
    if used := figures_of(metrics["training"]):
        console.print(f"Training: {used}.", markup=False)
    seconds = metrics["training"]["seconds"]
    console.print(f"Saved to {folder.path} and opened again; {seconds:.0f} s from loading to saving.")


def figures_of(training: dict[str, Any]) -> str:
    """What a run took, in one line; empty where nothing was counted."""
    if not training.get("tokens_per_second"):
        return ""
    parts = [f"{training['tokens']:,} tokens at {training['tokens_per_second']:,.0f} a second"]
    if "mfu" in training:
        peak = f"{training['peak_tflops']:.3g} TFLOP/s ({training['peak_source']})"
        parts.append(f"MFU {training['mfu']:.1%} of {peak}")
    parts += [f"{training['data_wait']:.1%} of the time waiting for data", f"{training['memory_gb']:.2f} GB of memory"]
    return ", ".join(parts)


def show_next(console: "Console", folder: "RunFolder", steps: "Sequence[str]", *, pushed: bool) -> None:
    """The commands that a finished run leads to: the objective's, and a push where there was none."""
    console.print("\nNext:")
    push = [] if pushed else [f"anyformer push {folder.path} YOUR_NAME/{folder.path.name}"]
    for step in (*steps, *push):
        console.print(f"  {step}", markup=False)
