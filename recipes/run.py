"""A run from recipe to result: plan, load, measure, train, merge, measure, save, open again, push."""

import copy
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .adapters.bases import check_base_can_be_named, check_published_base, keeps_adapter, other_base, published_base
from .adapters.saved import SOFT_PROMPTS
from .arguments import rows_a_step
from .console import make_console, show_next, show_plan, show_result
from .disk import write_fault
from .environment import environment, versions
from .errors import UserError
from .models import hub_id
from .parallel.limits import check_spread, gets_its_part_later
from .parallel.world import current, main_first, of_first_process, wait
from .prepare import Prepared, prepare
from .run_checks import check_inputs_survive, check_rows_a_step, faults_told, may_begin
from .run_folder import ADAPTER, FIGURES, RunFolder, holds_last_step
from .schema import Recipe

if TYPE_CHECKING:
    from rich.console import Console


def run_recipe(
    recipe: Recipe,
    *,
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    check: bool = False,
    next_steps: bool = True,
) -> Path:
    """Run a recipe and return the run folder.

    Args:
        resume: go on from the newest checkpoint in the run folder; without one, begin.
        overwrite: replace a run that the folder holds.
        dry_run: stop after the plan; nothing is written and no weight is loaded.
        check: make the costly checks of `flight_checks` too, before the first step.
        next_steps: end with the commands that a finished run leads to.

    Raises:
        UserError: whatever the user can mend; found before training wherever the facts allow.
        Terminated: stopped by SIGTERM, after a checkpoint.
    """
    console = make_console(recipe)
    folder, asked = RunFolder(Path(recipe.train["output_dir"]).expanduser(), writes=current().main), resume
    check_base_can_be_named(recipe)
    check_inputs_survive(recipe, folder.path)
    with ExitStack() as held, faults_told(folder.path):
        if not dry_run:
            resume = of_first_process(lambda: may_begin(recipe, folder, held, resume=asked, overwrite=overwrite))
            if asked and not resume:
                console.print(f"{folder.path} holds no checkpoint yet: the run begins at its first step.", markup=False)
        with main_first():
            prepared = prepare(recipe)
        check_spread(recipe, prepared.config, current())
        show_plan(console, prepared)
        if dry_run:
            console.print("Dry run: nothing was loaded, trained or written.")
            return folder.path
        digest = prepared.data_digest
        if resume and folder.metrics.get("data_digest", digest) != digest:
            raise UserError(
                f"the rows differ from those that {folder.path} was started with: data.source or data.eval_source has "
                "changed. Restore the files, or start another run with train.output_dir=…"
            )
        rows = rows_a_step(prepared.arguments)
        check_rows_a_step(folder, rows, resume=resume)
        # Only now is an earlier run replaced: all that can be refused beforehand has not been.
        folder.open(recipe.to_yaml(), resume=resume, keep=asked)
        folder.update_metrics(data_digest=digest, rows_a_step=rows)
        wait()
        _Run(recipe, prepared, folder, console, next_steps=next_steps, checks=check).execute(resume=resume)
    return folder.path


class _Run:
    """One run after its plan: from loading the weights to the last line printed."""

    def __init__(
        self,
        recipe: Recipe,
        prepared: Prepared,
        folder: RunFolder,
        console: "Console",
        *,
        next_steps: bool = False,
        checks: bool = False,
    ) -> None:
        self.recipe, self.prepared, self.folder, self.console = recipe, prepared, folder, console
        self.objective, self.tokenizer = prepared.objective, prepared.tokenizer
        self.started, self.next_steps, self.checks = time.monotonic(), next_steps, checks

    def execute(self, *, resume: bool) -> None:
        from .parallel.whole import is_sharded
        from .parallel.zero import hold_whole

        if other := other_base(self.recipe):
            self.warn(other)
        if current().strategy == "deepspeed":
            hold_whole()
        model = self.objective.begin(self.goes_on_from(self.load()))
        if current().main and self.recipe.eval.before and not (resume and "before" in self.folder.metrics):
            self.folder.update_metrics(**self.measure(model, "before"))
        model, adapter = self.ready(model, resume=resume)
        trainer, result = self.train(model, adapter, resume=resume)
        trained = self.detach(trainer)
        if trained is None:  # the first process has it and goes on alone
            return
        after, sharded = self.measure(trained, "after"), is_sharded(trained)
        self.save(trained)
        self.objective.save_extra(trainer, self.folder.path)
        took = {"seconds": time.monotonic() - self.started, **result.metrics, **trainer.meter.summary()}
        metrics = self.folder.update_metrics(
            **after,
            measured={"shown": self.objective.shown, "higher_is_better": self.objective.higher_is_better},
            plan=self.prepared.plan.as_dict(),
            adapter=self.prepared.adapter.as_dict(),
            data=_data_metrics(self.prepared),
            training=took,
            history=trainer.state.log_history,
            parallel=asdict(current()),
            versions=versions(),
            environment=environment(),
        )
        metrics = self.open_again(metrics, sharded)
        self.report(metrics)
        self.folder.settle()
        self.folder.update_metrics(finished=True)
        if not current().main:
            return
        show_result(self.console, self.folder, metrics, self.objective.remarks(metrics))
        self.push()
        if self.next_steps:
            steps = self.objective.next_steps(self.folder.path)
            show_next(self.console, self.folder, steps, pushed=self.recipe.hub is not None)

    def load(self, *, verify: bool = True) -> Any:
        """The weights as they are at their place, under the objective's head; an import is compared with the stock
        class."""
        from .adapters import fit_vocabulary
        from .models import empty_model, load_model, with_head

        config, seed, head = copy.deepcopy(self.prepared.config), self.prepared.arguments.seed, self.objective.head
        if gets_its_part_later(self.recipe, current(), check=self.checks):
            config.vocab_size, self.family = self.prepared.rows, config.model_type
            section = self.recipe.model
            return empty_model(config, head, section.attn_implementation, _dtype(section.dtype))
        model, self.family = load_model(self.recipe.model, config, seed=seed, head=head)
        check_published_base(self.recipe, self.family)
        if verify:
            self.verify(model, self.family)
        model = with_head(model, config, head, seed=seed)
        fit_vocabulary(model, self.prepared.rows)
        return model

    def goes_on_from(self, model: Any) -> Any:
        """The model with the adapter that the recipe goes on from, where it names one."""
        from .adapters import continue_from

        folder = self.recipe.adapter.path
        return continue_from(model, folder) if folder else model

    def ready(self, model: Any, *, resume: bool) -> tuple[Any, Any]:
        """The model to train, on quantised weights where the recipe says so, and an adapter to attach to it, if any."""
        from .adapters import attach, bare, train_in_place
        from .quantization import quantize

        quantization = self.recipe.model.quantization
        if quantization is not None:
            model = quantize(bare(model), quantization)
            model = self.goes_on_from(model)
            if self.recipe.eval.before and not (resume and "quantized_before" in self.folder.metrics):
                self.folder.update_metrics(**self.measure(model, "quantized_before"))
        train_in_place(model, self.recipe.adapter)
        adapter = self.fresh_adapter(model)
        if adapter is not None and quantization is not None:
            _seed(self.prepared.arguments.seed)
            return attach(model, adapter), None  # here, so that its values are known before the trainer rounds them
        if current().strategy == "tp":
            from .parallel.tensor import split

            model = split(model, self.folder.path)
        return model, adapter

    def fresh_adapter(self, model: Any) -> Any:
        """The PEFT config of an adapter to attach; None where none is, or where one is attached already."""
        from .adapters import peft_config
        from .model_paths import resolve_path

        section = self.recipe.model
        if self.recipe.adapter.path:
            return None
        tokenizer = resolve_path(section.tokenizer or section.path or "")
        return peft_config(self.recipe.adapter, self.objective, model, tokenizer)

    def verify(self, model: Any, family: str) -> None:
        """Compare an imported model with the stock class."""
        from ..modeling.interop import ConversionError
        from .models import compare_with_stock, require_equal

        if self.recipe.model.verify_import and family != model.config.model_type:
            try:
                comparison = compare_with_stock(model, self.tokenizer)
            except ConversionError as error:  # model.config asks for what the stock class does not have
                self.console.print(f"Imported {family}; not compared with the stock class: {error}", markup=False)
                return
            said = require_equal(comparison, "the stock class")
            self.console.print(f"Imported {family}; {said}.", markup=False)
            self.folder.update_metrics(import_check={"plain": comparison.plain, "padded": comparison.padded})

    def measure(self, model: Any, when: str) -> dict[str, Any]:
        """Held-out figures and sample answers, under `before` or `after`; nothing where no rows are held out."""
        from .report import check_finite

        held_out, rows = self.prepared.held_out, self.prepared.splits.eval
        if held_out is None:
            return {when: {}}
        figures = self.objective.measure(model, rows, held_out)
        for name in self.objective.shown:
            check_finite(figures[name], f"the held-out {name} {when} training")
        shown = ", ".join(f"{name} {figures[name]:.4f}" for name in self.objective.shown)
        quantization = self.recipe.model.quantization
        on = f", on the {quantization.bits}-bit base" if quantization and when.startswith("quantized") else ""
        counted = " and ".join(f"{figures[name]:,} {name}" for name in ("rows", "tokens") if name in figures)
        order = when.removeprefix("quantized_")
        self.console.print(f"Held out, {order} training{on}: {shown} ({counted}).")
        if on:
            return {when: figures}
        self.keep_rows(when)  # ahead of the figures: a resumed run measures again only what has none
        samples = self.objective.samples(model, rows)
        return {when: figures, f"samples_{when}": [asdict(sample) for sample in samples]}

    def keep_rows(self, when: str) -> None:
        """Store what each held-out row added to the last figures."""
        from .held_rows import keep_rows

        if self.folder.writes and self.objective.held_rows is not None:
            keep_rows(self.folder.path, when, self.objective.held_rows)

    def train(self, model: Any, adapter: Any, *, resume: bool) -> tuple[Any, Any]:
        """The trainer after training, and its result."""
        from .adapters import Watch, check_weights, use_lora_plus
        from .flight_checks import FlightChecks
        from .objectives.trainers import take_over
        from .parallel.in_force import InForce
        from .parallel.zero import check_resumes
        from .report import check_finite
        from .training.metrics import metered

        held_out = self.prepared.held_out.dataset if self.prepared.held_out else None
        watch = Watch(model, self.prepared.adapter)
        trainer = self.objective.trainer(model, self.prepared.train.dataset, held_out, adapter)
        use_lora_plus(trainer, self.recipe.adapter)
        peak = self.recipe.logging.peak_tflops
        metered(trainer, self.objective, self.prepared.plan, peak_tflops=peak, file=self.folder.path / FIGURES)
        watch.begin(trainer)
        checkpoint, broken = of_first_process(self.folder.newest_checkpoint) if resume else (None, [])
        trainer.add_callback(FlightChecks(checkpoint, self.warn, not self.objective.samples_its_data))
        same = {"recipe": self.recipe.to_yaml(), "data": self.prepared.data_digest}
        trainer.add_callback(InForce(trainer, current(), same))
        if self.checks:
            self.check(trainer)
        if checkpoint:
            parallel = current()
            check_resumes(checkpoint, by_engine=parallel.strategy == "deepspeed", processes=parallel.processes)
        for passed_over, part in broken:
            self.warn(f"{passed_over.name} is passed over: {part}")
        try:
            if checkpoint and holds_last_step(checkpoint):
                result = take_over(trainer, checkpoint)
            else:
                result = trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except KeyboardInterrupt:
            if saved := self.folder.checkpoints:
                self.console.print(f"\nStopped. The same command with --resume goes on from {saved[-1].name}.")
            raise
        check_finite(result.training_loss, "the training loss")
        watch.check(trainer, self.objective.unmoved)
        check_weights(trainer.model)
        return trainer, result

    def check(self, trainer: Any) -> None:
        """The costly checks, each in a line but for those that do not apply."""
        from .flight_checks import PASSED

        done = self.objective.thorough_checks(trainer)
        for name in (name for name, outcome in done.items() if outcome == PASSED):
            self.console.print(f"Check: {name}: {PASSED}.", markup=False)
        if idle := [f"{name} ({outcome})" for name, outcome in done.items() if outcome != PASSED]:
            self.console.print(f"Check: does not apply: {'; '.join(idle)}.", markup=False)
        self.folder.update_metrics(checks=done)

    def detach(self, trainer: Any) -> Any:
        """The trained model as it is measured and saved: merged, or with its adapter where the recipe keeps it.

        Of weights that are split among processes each gets its part, and all go on together; else the first process
        alone has the model, and the others get None.
        """
        from .adapters import merge, restore_forward
        from .parallel.whole import is_sharded, put_values, trained_values
        from .parallel.zero import engine_values, hold_whole, is_engine

        engine = trainer.model_wrapped if is_engine(trainer.model_wrapped) else None
        if current().strategy == "deepspeed":
            hold_whole()
        trained = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
        split = is_sharded(trained)  # not where the last step was taken over from a checkpoint
        if split and self.recipe.adapter.in_place:
            return merge(trained)
        gathered = split or engine is not None
        if gathered:
            values = trained_values(trained) if engine is None else engine_values(engine)
            config = trained.config
            trained = put_values(self.adapted(), values) if current().main else None
            if trained is not None:
                trained.config.use_cache = config.use_cache  # the trainer's choice, which one process saves
        if not current().main:
            return None
        if self.recipe.adapter.in_place:
            return merge(trained)
        restore_forward(trained)
        if self.recipe.model.quantization is not None and not gathered:
            self.folder.update_metrics(**self.measure(trained, "quantized_after"))
            trained = self.on_whole_weights(trained)
        if keeps_adapter(self.recipe):
            return trained
        self.save_adapter(trained, self.folder.path / ADAPTER)
        return merge(trained)

    def adapted(self) -> Any:
        """The base's whole weights with the adapter as it was before training."""
        from .adapters import attach

        model = self.goes_on_from(self.load(verify=False))
        adapter = self.fresh_adapter(model)
        return model if adapter is None else attach(model, adapter)

    def on_whole_weights(self, trained: Any) -> Any:
        """The adapter, trained on quantised weights, on the whole ones: what others open, and what merges."""
        from .adapters import put_on

        with tempfile.TemporaryDirectory() as folder:
            self.save_adapter(trained, Path(folder))
            return put_on(self.load(verify=False), folder)

    def save_adapter(self, model: Any, folder: Path) -> None:
        from .adapters import save_adapter

        section = self.recipe.model
        save_adapter(model, folder, self.published_base, section.revision, embeddings=self.has_more_rows)

    @property
    def published_base(self) -> str | None:
        """Where the base is found by others, as far as the adapter fits what they open there."""
        return published_base(self.recipe, self.family)

    @property
    def has_more_rows(self) -> bool:
        return self.prepared.rows > self.prepared.config.vocab_size

    def save(self, model: Any) -> None:
        """Weights, modeling files, tokenizer, and a generation config that stops where the training data does."""
        from safetensors import SafetensorError

        from .adapters import save_unmerged
        from .parallel.whole import is_sharded, save_whole

        self.objective.finish(model)
        folder = self.folder.path
        try:
            if is_sharded(model):
                save_whole(model, folder)
            elif keeps_adapter(self.recipe):
                save_unmerged(model, folder, self.published_base, embeddings=self.has_more_rows)
            else:
                model.save_pretrained(folder)
            if current().main:
                # Who opens it would else cut texts at the length that the model had before.
                longest = self.prepared.config.max_position_embeddings
                self.tokenizer.model_max_length = max(self.tokenizer.model_max_length, longest)
                self.tokenizer.save_pretrained(folder)
        except (OSError, RuntimeError, SafetensorError) as error:
            if not (reason := write_fault(error)):
                raise
            for path in folder.glob("*.safetensors"):  # cut short, and in the way of whoever makes room
                path.unlink(missing_ok=True)
            raise UserError(
                f"the result cannot be written into {folder}: {reason}. The checkpoints in it are kept: mend it, then "
                "go on with --resume"
            ) from error

    def report(self, metrics: dict[str, Any]) -> None:
        """Curves and model card."""
        from .report import write_card, write_curve

        if not current().main:
            return
        if self.recipe.logging.plot:
            write_curve(self.folder.path, metrics)
        model = self.recipe.model
        base = {
            "name": model.path or f"a new {model.preset}",
            "hub_id": hub_id(model),
            "adapter": self.recipe.adapter.kind,
            "soft_prompt": self.recipe.adapter.kind in SOFT_PROMPTS,
            "base": self.published_base,
            "bits": model.quantization.bits if model.quantization else None,
            "objective": self.recipe.objective.kind,
            "makes": self.objective.makes(),
            "auto_class": self.objective.auto_class,
        }
        write_card(self.folder.path, self.recipe.to_yaml(), base, metrics)

    def warn(self, text: str) -> None:
        self.console.print(f"Warning: {text}.", markup=False)

    def open_again(self, metrics: dict[str, Any], sharded: bool) -> dict[str, Any]:
        """Open the saved folder as anybody would; it must measure what the trained model measured.

        Args:
            sharded: all processes open it, each with its part.

        Returns:
            The metrics. Where FSDP2 trained in 16 bits, whose products it keeps to while it measures, the figures after
            training are those of the opened model.

        Raises:
            UserError: it does not.
        """
        from .models import load_pretrained

        model = load_pretrained(str(self.folder.path), auto_class=self.objective.auto_class, sharded=sharded)
        self.objective.check_saved(model)
        if self.prepared.held_out is None:
            return metrics
        again = self.objective.measure(model, self.prepared.splits.eval, self.prepared.held_out)
        if sharded and current().strategy == "fsdp2" and self.prepared.arguments.mixed_precision != "no":
            self.keep_rows("after")
            return self.folder.update_metrics(after=again)
        if not self.objective.reproduced(again, metrics["after"]):
            name = self.objective.shown[0]
            raise UserError(
                f"{self.folder.path} does not hold what was trained: opened again its held-out {name} is "
                f"{again[name]:.4f}, not {metrics['after'][name]:.4f}. Please report this"
            )
        if not (used := self.objective.try_out(model, self.prepared.splits.eval)):
            return metrics
        self.console.print(used["words"], markup=False)
        return self.folder.update_metrics(in_use=used)

    def push(self) -> None:
        hub = self.recipe.hub
        if hub is None:
            return
        from .hub import push_run

        url = push_run(
            self.folder.path,
            hub.repo,
            private=hub.private,
            revision=hub.revision,
            commit_message=hub.commit_message,
        )
        self.console.print(f"Pushed to {url}", markup=False)


def _dtype(name: str) -> Any:
    import torch

    return None if name == "auto" else getattr(torch, name)


def _seed(seed: int) -> None:
    from transformers import set_seed

    set_seed(seed)


def _data_metrics(prepared: Prepared) -> dict[str, Any]:
    report = prepared.splits.report
    return {
        "format": report.format,
        "sources": report.sources,
        "split": report.split,
        "rows_skipped": report.rows_skipped,
        "dropped": prepared.train.report.dropped,
        "left_out": report.left_out,
        "truncated": prepared.train.report.truncated,
        "pieces": prepared.train.report.pieces,
    }
