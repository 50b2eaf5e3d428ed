"""What a pipeline leaves for people: its stages before and after, and its models side by side on the same prompts."""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .stages import BASE, Pipeline, Stage

if TYPE_CHECKING:
    from rich.console import Console

    from .prepare import Prepared

Row = dict[str, Any]
SAMPLES = 3


@dataclass
class _Contender:
    """One of the models compared, and what it answers."""

    name: str
    open: Callable[[], Any]
    answers: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def figures_of(pipeline: Pipeline) -> dict[str, Any]:
    """All that the report says, as plain data.

    Raises:
        UserError: a model that cannot be opened.
    """
    metrics = {stage.name: _metrics(stage) for stage in pipeline.stages}
    last = _last_language_model(pipeline)
    return {
        "chat": str(last.folder) if last and _can_chat(last) else None,
        "stages": [_stage_figures(pipeline, stage, metrics[stage.name]) for stage in pipeline.stages],
        "comparison": _comparison(pipeline, last) if last else None,
    }


def _metrics(stage: Stage) -> dict[str, Any]:
    from .run_folder import RunFolder

    return RunFolder(stage.folder).metrics


def _last_language_model(pipeline: Pipeline) -> Stage | None:
    from .objectives import objective_class

    for stage in reversed(pipeline.stages):
        if objective_class(stage.recipe.objective.kind).makes() == "causal_lm":
            return stage
    return None


def _can_chat(stage: Stage) -> bool:
    from .models import load_tokenizer_from

    return bool(load_tokenizer_from(str(stage.folder)).chat_template)


def _stage_figures(pipeline: Pipeline, stage: Stage, metrics: dict[str, Any]) -> dict[str, Any]:
    from .report import comparison_rows

    model = stage.recipe.model
    history = metrics["history"]
    return {
        "name": stage.name,
        "objective": stage.recipe.objective.kind,
        "start": model.path or f"a new {model.preset}",
        "steps": metrics["plan"]["steps"],
        "rows": metrics["after"].get("rows", 0),
        "held_out": comparison_rows(metrics) if metrics["after"] else [],
        # TRL logs `kl` a token; PPO logs it a completion, and a token beside it.
        "reward": [(entry["step"], entry["reward"]) for entry in history if "reward" in entry],
        "kl": [(entry["step"], entry.get("kl_per_token", entry["kl"])) for entry in history if "kl" in entry],
    }


# The models on the same prompts


def _comparison(pipeline: Pipeline, last: Stage) -> dict[str, Any] | None:
    """Greedy answers of every model on the way to the last one, to the prompts that its stage holds out."""
    import torch

    from .log_probs import log_probs
    from .prepare import prepare

    prepared = prepare(pipeline.resolved(last))
    rows = _answerable(prepared) if prepared.objective.head == "causal_lm" else []
    if not rows:
        return None
    contenders = _contenders(pipeline, last)
    reward, score = _judge(pipeline, last, prepared)
    prompts = [_ids(row, prepared.tokenizer) for row in rows]
    final, start = contenders[-1], contenders[-2]
    size = prepared.objective.recipe.eval.batch_size
    log_ratios = torch.zeros(len(rows), dtype=torch.float64)
    for contender in reversed(contenders):
        model = contender.open()
        _answer(contender, model, prompts, rows, prepared, score)
        if contender in (final, start):
            answered = list(zip(prompts, final.answers, strict=True))
            found = log_probs(model, answered, pad_token_id=prepared.tokenizer.pad_token_id, batch_size=size).answer
            log_ratios += found if contender is final else -found
    tokens = sum(map(len, final.answers))
    return {
        "rows": len(rows),
        "split": prepared.splits.report.split,
        "reward": reward,
        "max_new_tokens": _room(prepared),
        "models": [_model_figures(contender, prepared) for contender in contenders],
        "kl": {
            "of": final.name,
            "from": start.name,
            "answer": log_ratios.mean().item(),
            "token": log_ratios.sum().item() / tokens,
        },
        "samples": list(_samples(contenders, rows)),
    }


def _contenders(pipeline: Pipeline, last: Stage) -> list[_Contender]:
    """From the model that everything starts from to the last stage's."""
    from .models import config_and_tokenizer, load_model, load_pretrained
    from .tokens.learned_tokenizer import learned_size

    chain = [last]
    while (source := chain[0].recipe.model.path or "").startswith("stage:"):
        chain.insert(0, pipeline[source.removeprefix("stage:")])
    first = pipeline.resolved(chain[0])

    def base() -> Any:
        section = first.model
        if learned_size(section.tokenizer):  # from rows that need not be read again
            section = section.model_copy(update={"tokenizer": str(chain[0].folder)})
        config, _ = config_and_tokenizer(section)
        return load_model(section, config, seed=first.train.get("seed", 42))[0].eval()

    opened = [_Contender(stage.name, functools.partial(load_pretrained, str(stage.folder))) for stage in chain]
    return [_Contender(BASE, base), *opened]


def _judge(
    pipeline: Pipeline, last: Stage, prepared: "Prepared"
) -> tuple[str, Callable[[Sequence[Row], list[str]], list[float]] | None]:
    """The name of the reward and its function: the last stage's own, else the newest reward model, else none."""
    from .objectives.policy import PolicyOptimisation
    from .rewards import load_reward

    if isinstance(prepared.objective, PolicyOptimisation):
        given = last.recipe.objective.reward  # type: ignore[attr-defined]  # every policy has rewards
        return " + ".join([given] if isinstance(given, str) else given), prepared.objective.scores
    trained = [stage for stage in pipeline.stages if stage.recipe.objective.kind == "reward"]
    if not trained:
        return "", None
    model = load_reward(str(trained[-1].folder), batch_size=prepared.objective.recipe.eval.batch_size)
    return f"stage:{trained[-1].name}", lambda rows, texts: model([_prompt(row) for row in rows], texts)


def _prompt(row: Row) -> Any:
    """What is answered in a row: text or messages; None where a row is one text."""
    return row["messages"][:-1] if "messages" in row else row.get("prompt")


def _ids(row: Row, tokenizer: Any) -> list[int]:
    from .tokens.prompts import encode_prompt

    return encode_prompt(_prompt(row), tokenizer)


def _room(prepared: "Prepared") -> int:
    """The longest answer in tokens: the policy's own limit, else that of the sample answers."""
    options = prepared.objective.recipe.eval
    return getattr(prepared.arguments, "max_completion_length", None) or options.max_new_tokens


def _answerable(prepared: "Prepared") -> list[Row]:
    """Held-out rows with a prompt that leaves room for an answer."""
    longest = prepared.config.max_position_embeddings - _room(prepared)
    rows = [row for row in prepared.splits.eval if _prompt(row)]
    return [row for row in rows if len(_ids(row, prepared.tokenizer)) <= longest]


def _answer(
    contender: _Contender,
    model: Any,
    prompts: list[list[int]],
    rows: Sequence[Row],
    prepared: "Prepared",
    score: Callable[[Sequence[Row], list[str]], list[float]] | None,
) -> None:
    from .evaluation import greedy_answers

    size = prepared.objective.recipe.eval.batch_size
    room = _room(prepared)
    contender.answers = greedy_answers(model, prepared.tokenizer, prompts, max_new_tokens=room, batch_size=size)
    contender.texts = prepared.tokenizer.batch_decode(contender.answers, skip_special_tokens=True)
    contender.rewards = score(rows, contender.texts) if score else []


def _model_figures(contender: _Contender, prepared: "Prepared") -> dict[str, Any]:
    from .tokens.supervised import stop_ids

    stops, count = set(stop_ids(prepared.tokenizer)), len(contender.answers)
    return {
        "name": contender.name,
        "reward": sum(contender.rewards) / count if contender.rewards else None,
        "length": sum(map(len, contender.answers)) / count,
        "stopped": sum(bool(ids) and ids[-1] in stops for ids in contender.answers) / count,
    }


def _samples(contenders: list[_Contender], rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    count = min(SAMPLES, len(rows))
    for index in (i * len(rows) // count for i in range(count)):
        row = rows[index]
        prompt, known = _prompt(row), row.get("completion") or row.get("chosen") or row.get("answer") or ""
        if "messages" in row:
            known = row["messages"][-1:]
        yield {
            "prompt": prompt if isinstance(prompt, str) else prompt[-1]["content"],
            "reference": known[-1]["content"] if isinstance(known, list) else str(known),
            "answers": {
                c.name: {"text": c.texts[index].strip(), "reward": c.rewards[index] if c.rewards else None}
                for c in contenders
            },
        }


# For people


def model_rows(comparison: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(model, reward, tokens, share that stopped) of each model compared."""
    return [
        (m["name"], _number(m["reward"]), f"{m['length']:.1f}", f"{m['stopped']:.0%}") for m in comparison["models"]
    ]


def stage_rows(figures: dict[str, Any]) -> list[tuple[str, ...]]:
    """(stage, objective, start, steps, figure, before, after), one row a figure."""
    rows: list[tuple[str, ...]] = []
    for stage in figures["stages"]:
        about = (stage["name"], stage["objective"], stage["start"], f"{stage['steps']:,}")
        for number, (figure, before, after) in enumerate(stage["held_out"] or [("nothing held out", "–", "–")]):
            rows.append((*(about if number == 0 else ("", "", "", "")), figure, before, after))
        for name in ("reward", "kl"):
            if logged := stage[name]:
                said = "reward in training" if name == "reward" else "KL in training, nats a token"
                rows.append(("", "", "", "", said, f"{logged[0][1]:.4f}", f"{logged[-1][1]:.4f}"))
    return rows


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def kl_sentence(comparison: dict[str, Any]) -> str:
    """The divergence of the last model from the one that it starts from, in words."""
    kl = comparison["kl"]
    return (
        f"KL of {kl['of']} from {kl['from']}, taken on the greedy answers of {kl['of']} as the mean of "
        f"Σ (log π − log π_{kl['from']}): {kl['answer']:.4f} nats an answer, {kl['token']:.4f} a token."
    )


def show_report(console: "Console", figures: dict[str, Any]) -> None:
    """The tables of the report."""
    from rich.markup import escape
    from rich.table import Table

    stages = Table("stage", "objective", "starts from", "steps", "figure", "before", "after")
    for row in stage_rows(figures):
        stages.add_row(*map(escape, row))
    console.print(stages)
    comparison = figures["comparison"]
    if comparison is None:
        return
    console.print(_about(comparison), markup=False)
    models = Table("model", "reward", "tokens", "stopped")
    for row in model_rows(comparison):
        models.add_row(*map(escape, row))
    console.print(models)
    console.print(kl_sentence(comparison), markup=False)
    for number, sample in enumerate(comparison["samples"], 1):
        sides = Table(*sample["answers"], title=f"sample {number}", show_lines=True)
        sides.add_row(*(escape(_judged(answer)) for answer in sample["answers"].values()))
        console.print(escape(sample["prompt"]), style="dim")
        console.print(sides)
        console.print(f"in the data: {escape(sample['reference'])}\n")


def _about(comparison: dict[str, Any]) -> str:
    judged = f", judged by {comparison['reward']}" if comparison["reward"] else ""
    return (
        f"Greedy answers of at most {comparison['max_new_tokens']} tokens to the same {comparison['rows']} held-out "
        f"prompts{judged}."
    )


def _judged(answer: dict[str, Any]) -> str:
    reward = "" if answer["reward"] is None else f"\n(reward {answer['reward']:.3f})"
    return f"{answer['text']}{reward}"


def write_report(pipeline: Pipeline, figures: dict[str, Any], *, report: Path, curves: Path) -> None:
    """The report as Markdown, and the curves of reward and KL where a stage logged them."""
    drawn = pipeline.stages[-1].recipe.logging.plot and _write_curves(figures, curves)
    parts = [f"# {pipeline.name}\n", "## Stages\n"]
    head = ("stage", "objective", "starts from", "steps", "figure", "before", "after")
    parts += [markdown_table(head, stage_rows(figures))]
    if comparison := figures["comparison"]:
        parts += ["## The models on the same prompts\n", f"{_about(comparison)} Held out: {comparison['split']}.\n"]
        parts += [
            markdown_table(("model", "reward", "tokens", "stopped"), model_rows(comparison)),
            f"{kl_sentence(comparison)}\n",
        ]
    if drawn:
        parts += [f"![reward and KL by step]({curves.name})\n"]
    if comparison:
        parts += ["## Samples\n", *_sample_parts(comparison)]
    report.write_text("\n".join(parts), encoding="utf-8")


def _sample_parts(comparison: dict[str, Any]) -> Iterator[str]:
    names = tuple(comparison["samples"][0]["answers"])
    rows = [
        (sample["prompt"], sample["reference"], *(_judged(sample["answers"][name]) for name in names))
        for sample in comparison["samples"]
    ]
    yield markdown_table(("prompt", "in the data", *names), rows)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, which stand in it as they are."""
    lines = [head, ["---"] * len(head), *([_cell(text) for text in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cell(text: str) -> str:
    """A text that stands in a table's cell as it is, whatever Markdown or HTML it holds."""
    plain = re.sub(r"[\\`*_\[\]<>&|~#]", lambda mark: f"&#{ord(mark[0])};", text)
    return re.sub(r"\s*\n\s*", "<br>", plain.strip())


def _write_curves(figures: dict[str, Any], path: Path) -> bool:
    """Reward and KL by step of each stage that logs them; False where none does."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = {"reward": "reward", "kl": "KL from the start (nats a token)"}
    drawn = [name for name in shown if any(stage[name] for stage in figures["stages"])]
    if not drawn:
        return False
    figure, panels = plt.subplots(1, len(drawn), figsize=(5.5 * len(drawn), 4), layout="constrained", squeeze=False)
    for name, axes in zip(drawn, panels[0], strict=True):
        for stage in figures["stages"]:
            if stage[name]:
                axes.plot(*zip(*stage[name], strict=True), label=stage["name"], linewidth=1.2)
        axes.set(xlabel="step", ylabel=shown[name])
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return True
