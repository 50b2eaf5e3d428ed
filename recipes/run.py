"""A run from recipe to result: plan, load, measure, train, merge, measure, save, open again, push."""

import logging
import time
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError
from .run_folder import ADAPTER, RunFolder
from .schema import Recipe

if TYPE_CHECKING:
    from rich.console import Console

    from .data import Splits
    from .evaluation import HeldOut
    from .plan import Plan
    from .tokenize_sft import TokenizedData

# Packages whose versions decide what a run computes.
VERSIONED = ("anyformer", "torch", "transformers", "peft", "trl", "accelerate", "datasets")


@dataclass
class Prepared:
    """All that is known before a weight is loaded."""

    tokenizer: Any
    splits: "Splits"
    train: "TokenizedData"
    held_out: "TokenizedData | None"
    arguments: Any
    config: Any
    plan: "Plan"


def run_recipe(recipe: Recipe, *, resume: bool = False, overwrite: bool = False, dry_run: bool = False) -> Path:
    """Run a recipe and return the run folder.

    Args:
        resume: go on from the newest checkpoint in the run folder.
        overwrite: replace a run that the folder holds.
        dry_run: stop after the plan; nothing is written and no weight is loaded.

    Raises:
        UserError: whatever the user can mend; found before training wherever the facts allow.
    """
    import torch

    from ..modeling.interop import ConversionError

    console = _console(recipe)
    folder = RunFolder(Path(recipe.train["output_dir"]))
    if recipe.hub is not None and keeps_adapter(recipe) and hub_id(recipe) is None:
        raise UserError(
            f"hub.repo: with adapter.merge: false only the adapter is pushed, and nobody else has its base, "
            f"{recipe.model.path or recipe.model.preset}. Set adapter.merge: true, or model.path to a Hub id"
        )
    if not dry_run:
        folder.prepare(recipe.to_yaml(), resume=resume, overwrite=overwrite)
        if recipe.hub is not None:
            from .hub import check_push

            check_push(recipe.hub.repo, private=recipe.hub.private, revision=recipe.hub.revision)
    try:
        prepared = prepare(recipe)
        _show_plan(console, prepared)
        if dry_run:
            console.print("Dry run: nothing was loaded, trained or written.")
            return folder.path
        _train_and_report(recipe, prepared, folder, console, resume=resume)
    except ConversionError as error:
        raise UserError(str(error)) from error
    except torch.OutOfMemoryError as error:
        raise UserError(
            "the memory of the device is full. Lower train.per_device_train_batch_size or train.max_length, or set "
            "train.gradient_checkpointing: true"
        ) from error
    return folder.path


def prepare(recipe: Recipe) -> Prepared:
    """Read the data, tokenise it, and plan the run.

    Raises:
        UserError: data, tokenizer, config or adapter that cannot be used, or nothing that would be learned.
    """
    from .adapters import trainable_parameters
    from .data import load_splits
    from .models import config_and_tokenizer
    from .plan import make_plan
    from .sft import training_arguments
    from .tokenize_sft import tokenize_rows

    arguments = training_arguments(recipe.train)
    config, tokenizer = config_and_tokenizer(recipe.model)
    limit = arguments.max_length
    if limit is not None and limit > config.max_position_embeddings:
        raise UserError(
            f"train.max_length is {limit}, but the model has positions for {config.max_position_embeddings} tokens: "
            "lower it, or scale the rotary embedding in model.config.rope_parameters"
        )
    splits = load_splits(recipe.data)
    options: dict[str, Any] = {
        "max_length": limit or config.max_position_embeddings,
        "loss_on": recipe.objective.loss_on,
        "truncation": recipe.data.truncation,
    }
    train = tokenize_rows(splits.train, tokenizer, **options)
    held_out = tokenize_rows(splits.eval, tokenizer, **options) if splits.eval else None
    trainable = trainable_parameters(config, recipe.adapter)
    if trainable == 0:
        raise UserError("adapter: no parameter would be trained")
    plan = make_plan(config, recipe.model.dtype, trainable, arguments, train.report)
    return Prepared(tokenizer, splits, train, held_out, arguments, config, plan)


def _train_and_report(
    recipe: Recipe, prepared: Prepared, folder: RunFolder, console: "Console", *, resume: bool
) -> None:
    from .adapters import check_trained, merge, peft_config, restore_forward, save_adapter
    from .models import compare_with_stock, load_model
    from .report import check_finite
    from .sft import build_trainer

    started = time.monotonic()
    model, family = load_model(recipe.model, prepared.config, seed=prepared.arguments.seed)
    if recipe.model.verify_import and family != model.config.model_type:
        comparison = compare_with_stock(model, prepared.tokenizer)
        if not comparison.equal:
            raise UserError(
                f"the import does not reproduce the stock class: logits differ by {comparison.plain:.2e}, on a padded "
                f"batch by {comparison.padded:.2e}, where {comparison.tolerance:.0e} is allowed. Please report the model"
            )
        console.print(
            f"Imported {family}: logits differ from the stock class by at most {comparison.plain:.1e} on "
            f"{comparison.tokens} tokens, left-padded by {comparison.padded:.1e}."
        )
        folder.update_metrics(import_check={"plain": comparison.plain, "padded": comparison.padded})
    if recipe.eval.before and not (resume and "before" in folder.metrics):
        _measure(recipe, prepared, model, folder, console, "before")

    trainer = build_trainer(
        model,
        prepared.tokenizer,
        prepared.arguments,
        prepared.train.dataset,
        prepared.held_out.dataset if prepared.held_out else None,
        peft_config(recipe.adapter),
    )
    checkpoint = str(folder.checkpoints[-1]) if resume else None
    result = trainer.train(resume_from_checkpoint=checkpoint)
    check_finite(result.training_loss, "the training loss")
    check_trained(trainer.model)
    if not trainer.is_world_process_zero():
        return
    trained = trainer.accelerator.unwrap_model(trainer.model)
    if keeps_adapter(recipe):
        restore_forward(trained)
    else:
        if recipe.adapter.kind != "none":
            save_adapter(trained, folder.path / ADAPTER, _published_base(recipe))
        trained = merge(trained)
    after = _measure(recipe, prepared, trained, folder, console, "after", write=False)
    _save(recipe, prepared, trained, folder)
    metrics = folder.update_metrics(
        **after,
        plan=prepared.plan.as_dict(),
        data=_data_metrics(prepared),
        training={"seconds": time.monotonic() - started, **result.metrics},
        history=trainer.state.log_history,
        versions=_versions(),
    )
    _finish(recipe, prepared, folder, metrics, console)


def _measure(
    recipe: Recipe,
    prepared: Prepared,
    model: Any,
    folder: RunFolder,
    console: "Console",
    when: str,
    write: bool = True,
) -> dict[str, Any]:
    """Held-out loss and sample answers, kept in metrics.json under `before` or `after`."""
    from .evaluation import held_out_loss, sample_answers
    from .report import check_finite

    values: dict[str, Any] = {}
    if prepared.held_out is not None:
        held_out: HeldOut = held_out_loss(
            model,
            prepared.held_out.dataset,
            pad_token_id=prepared.tokenizer.pad_token_id,
            batch_size=recipe.eval.batch_size,
        )
        check_finite(held_out.loss, f"the held-out loss {when} training")
        console.print(
            f"Held-out loss {when} training: {held_out.loss:.4f} (perplexity {held_out.perplexity:.2f}) over "
            f"{held_out.tokens:,} tokens in {held_out.rows:,} rows."
        )
        values[when] = held_out.as_dict()
        samples = sample_answers(
            model,
            prepared.tokenizer,
            prepared.splits.eval,
            count=recipe.eval.samples,
            max_new_tokens=recipe.eval.max_new_tokens,
        )
        values[f"samples_{when}"] = [asdict(sample) for sample in samples]
    else:
        values[when] = {}
    if write:
        folder.update_metrics(**values)
    return values


def _save(recipe: Recipe, prepared: Prepared, model: Any, folder: RunFolder) -> None:
    """Weights, modeling files, tokenizer, and a generation config that stops where the training data does."""
    from .adapters import save_unmerged
    from .tokenize_sft import stop_ids

    stops = stop_ids(prepared.tokenizer)
    model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]
    model.generation_config.pad_token_id = prepared.tokenizer.pad_token_id
    try:
        if keeps_adapter(recipe):
            save_unmerged(model, folder.path, _published_base(recipe))
        else:
            model.save_pretrained(folder.path)
        prepared.tokenizer.save_pretrained(folder.path)
    except OSError as error:
        kept = f" The adapter is in {folder.path / ADAPTER}." if recipe.adapter.kind != "none" else ""
        raise UserError(f"{folder.path} cannot be written: {error}.{kept} Checkpoints are kept") from error


def _finish(
    recipe: Recipe, prepared: Prepared, folder: RunFolder, metrics: dict[str, Any], console: "Console"
) -> None:
    from .report import require_better, write_card, write_curve

    if recipe.logging.plot and metrics["after"]:
        before = metrics.get("before", {}).get("loss")
        write_curve(folder.path, metrics["history"], before, metrics["after"]["loss"])
    base = {
        "name": recipe.model.path or f"a new {recipe.model.preset}",
        "hub_id": hub_id(recipe),
        "adapter": recipe.adapter.kind,
        "objective": recipe.objective.kind,
    }
    write_card(folder.path, recipe.to_yaml(), base, metrics)
    _open_again(recipe, prepared, folder, metrics)
    _show_result(console, folder, metrics)
    if warning := require_better(metrics):
        console.print(f"[bold]Warning:[/bold] {warning}.", highlight=False)
    if recipe.hub is not None:
        from .hub import push_run

        url = push_run(
            folder.path,
            recipe.hub.repo,
            private=recipe.hub.private,
            revision=recipe.hub.revision,
            commit_message=recipe.hub.commit_message,
        )
        console.print(f"Pushed to {url}")
    _show_next(console, folder, pushed=recipe.hub is not None)


def _open_again(recipe: Recipe, prepared: Prepared, folder: RunFolder, metrics: dict[str, Any]) -> None:
    """Open the saved folder as anybody would; it must measure what the trained model measured.

    Raises:
        UserError: it does not.
    """
    from transformers import AutoModelForCausalLM

    from .evaluation import held_out_loss

    model = AutoModelForCausalLM.from_pretrained(folder.path, dtype="auto")
    if prepared.held_out is None:
        return
    rows = prepared.held_out.dataset
    again = held_out_loss(
        model, rows, pad_token_id=prepared.tokenizer.pad_token_id, batch_size=recipe.eval.batch_size
    )
    if abs(again.loss - metrics["after"]["loss"]) > 1e-4:
        raise UserError(
            f"{folder.path} does not hold what was trained: opened again its held-out loss is {again.loss:.4f}, not "
            f"{metrics['after']['loss']:.4f}. Please report this"
        )


def keeps_adapter(recipe: Recipe) -> bool:
    """Whether the result is an adapter beside its base rather than one merged model."""
    return recipe.adapter.kind != "none" and not recipe.adapter.merge


def hub_id(recipe: Recipe) -> str | None:
    """The base model's Hub id, where that is what `model.path` names."""
    path = recipe.model.path
    local = not path or path.startswith("package:") or path.endswith(".gguf") or Path(path).exists()
    return None if local else path


def _published_base(recipe: Recipe) -> str | None:
    """Where others, or this machine, find the base model as it was before training."""
    path = recipe.model.path
    return hub_id(recipe) or (str(Path(path).resolve()) if path and Path(path).is_dir() else None)


def _data_metrics(prepared: Prepared) -> dict[str, Any]:
    report = prepared.splits.report
    return {
        "format": report.format,
        "sources": report.sources,
        "split": report.split,
        "rows_skipped": report.rows_skipped,
        "dropped": prepared.train.report.dropped,
        "truncated": prepared.train.report.truncated,
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in VERSIONED}


# What is shown


def _console(recipe: Recipe) -> "Console":
    """The console, and how loud the libraries are."""
    from rich.console import Console

    level = getattr(logging, recipe.logging.level.upper())
    logging.getLogger("anyformer").setLevel(level)
    if recipe.logging.level != "debug":
        import datasets
        from transformers.utils import logging as library_logging

        warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|peft|trl)\.")
        library_logging.set_verbosity_error()
        library_logging.disable_progress_bar()
        datasets.disable_progress_bars()
    return Console(highlight=False, soft_wrap=True)


def _show_plan(console: "Console", prepared: Prepared) -> None:
    from rich.markup import escape

    from .plan import describe
    from .tokenize_sft import decode_preview

    report, tokens = prepared.splits.report, prepared.train.report
    for name, value in describe(prepared.plan):
        console.print(f"[bold]{name:>11}[/bold]  {escape(value)}")
    held = prepared.held_out.report.rows_kept if prepared.held_out else 0
    console.print(f"[bold]{'format':>11}[/bold]  {escape(report.recognised)}")
    console.print(f"[bold]{'held out':>11}[/bold]  {held:,} rows: {escape(report.split)}")
    left_out = {**tokens.dropped, "unreadable": report.rows_skipped}
    dropped = ", ".join(f"{count:,} {cause}" for cause, count in left_out.items() if count) or "none"
    console.print(f"[bold]{'left out':>11}[/bold]  {dropped}; truncated: {tokens.truncated:,}")
    for warning in [*report.warnings, *tokens.warnings]:
        console.print(f"[bold]Warning:[/bold] {escape(warning)}")
    console.print("Three rows, what is trained on between ⟦ and ⟧:")
    for row in decode_preview(prepared.train, prepared.tokenizer, n=3):
        console.print(escape(row), style="dim")


def _show_result(console: "Console", folder: RunFolder, metrics: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from .report import comparison_rows, paired_samples

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
    seconds = metrics["training"]["seconds"]
    console.print(f"Saved to {folder.path} and opened again; {seconds:.0f} s from loading to saving.")


def _show_next(console: "Console", folder: RunFolder, *, pushed: bool) -> None:
    console.print("\nNext:")
    console.print(f"  anyformer chat {folder.path}")
    if not pushed:
        console.print(f"  anyformer push {folder.path} YOUR_NAME/{folder.path.name}")
