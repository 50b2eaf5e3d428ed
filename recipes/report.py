"""What a run leaves for people: the loss curve, the model card, the table of before and after."""

from pathlib import Path
from typing import Any

from .errors import UserError
from .evaluation import Sample
from .model_paths import PACKAGE

CURVE = "loss_curve.png"
# What the Hub calls the use of a class.
PIPELINES = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSeq2SeqLM": "text2text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
}
# Stands in the card until a push knows the repository.
REPOSITORY = "THIS_REPOSITORY"


def write_curve(folder: Path, metrics: dict[str, Any]) -> None:
    """Training loss by step, held-out loss by step where it was measured, and held-out loss before and after."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    history, before, after = metrics["history"], metrics.get("before") or {}, metrics["after"]
    train = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    held_out = [(entry["step"], entry["eval_loss"]) for entry in history if "eval_loss" in entry]
    last = max((entry["step"] for entry in history if "step" in entry), default=1)
    if train:
        axes.plot(*zip(*train, strict=True), label="training", color="#4878a8", linewidth=1.2)
    first, final = [(0, before["loss"])] if "loss" in before else [], [(last, after["loss"])] if "loss" in after else []
    if ends := first + held_out + final:
        axes.plot(*zip(*ends, strict=True), label="held out", color="#c4582f", marker="o", linewidth=1.2)
    if not train and not ends:
        plt.close(figure)
        return
    axes.set(xlabel="step", ylabel="loss", title=folder.name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(folder / CURVE, dpi=140)
    plt.close(figure)


def comparison_rows(metrics: dict[str, Any]) -> list[tuple[str, str, str]]:
    """(name, before, after) of the held-out figures; a dash where nothing was measured before."""
    before, after = metrics.get("before") or {}, metrics["after"]

    def shown(values: dict[str, Any], name: str) -> str:
        return f"{values[name]:.4f}" if name in values else "–"

    names = metrics["measured"]["shown"]
    return [(f"held-out {name.replace('_', ' ')}", shown(before, name), shown(after, name)) for name in names]


def write_card(folder: Path, recipe_yaml: str, model: dict[str, Any], metrics: dict[str, Any]) -> None:
    """README.md of the model repository: figures, samples, curve, the recipe and the command that reproduces it.

    Args:
        model: what is said of the base: `name`, `hub_id` (or None), `adapter`, `objective`, `makes`, `auto_class`,
            `soft_prompt` (whether the result is one), `base` (where it opens), `bits` (of the weights it was trained
            on, or None).
    """
    from huggingface_hub import ModelCardData

    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=PIPELINES.get(model["auto_class"]),
        base_model=model["hub_id"],
        tags=["anyformer", model["objective"], model["adapter"]],
    )
    table = "Nothing was held out, so nothing was measured.\n"
    if after := metrics["after"]:
        tokens = f" ({after['tokens']:,} supervised tokens)" if "tokens" in after else ""
        rows = "\n".join(f"| {name} | {before} | {value} |" for name, before, value in comparison_rows(metrics))
        table = f"""| | before | after |
|---|---|---|
{rows}

Measured on {after["rows"]:,} rows{tokens} that were held out before training:
{metrics["data"]["split"]}.
"""
    versions = ", ".join(f"{name} {value}" for name, value in metrics["versions"].items())
    curve = f"![loss curve]({CURVE})\n\n" if (folder / CURVE).is_file() else ""
    text = f"""---
{data.to_yaml()}
---

# {folder.name}

{_made(model)},
{metrics["plan"]["steps"]:,} steps over {metrics["plan"]["tokens_seen"]:,} tokens.

{table}
{_quantized(model["bits"], metrics)}{_in_use(metrics)}{curve}## Use

{_use(model)}
{_samples(metrics)}## Reproduce

Save the recipe below (`recipe.yaml` in this repository) and run

```bash
anyformer train recipe.yaml
```

with {versions}.

```yaml
{recipe_yaml.rstrip()}
```
"""
    (folder / "README.md").write_text(text, encoding="utf-8")


def _made(model: dict[str, Any]) -> str:
    if model["makes"] == "drafter":
        return (
            f"A drafter for speculative decoding with {model['name']},\ntrained with `anyformer`: objective "
            f"`{model['objective']}`"
        )
    return f"{model['name']}, tuned with `anyformer`: objective `{model['objective']}`,\nadapter `{model['adapter']}`"


def _use_of_drafter(model: dict[str, Any]) -> str:
    base = model["hub_id"] or model["name"]
    inside = base.startswith(PACKAGE)
    where = f'resolve_path("{base}")' if inside else f'"{base}"'
    more = "from anyformer.recipes.model_paths import resolve_path\n" if inside else ""
    return f"""It drafts for {base} alone, which checks each draft: the text is what that model
writes by itself, only sooner.

```bash
anyformer generate {base} "..." --draft {REPOSITORY}
```

```python
import anyformer
{more}from transformers import AutoModel

base = anyformer.from_hf({where})
drafter = AutoModel.from_pretrained("{REPOSITORY}", trust_remote_code=True)
output = base.generate(**inputs, assistant_model=drafter)  # one text at a time
print(base.speculation)  # tokens a pass, and how many drafts were accepted
```

`trust_remote_code` runs the modeling files in this repository; with anyformer installed it is not needed.
"""


def _use(model: dict[str, Any]) -> str:
    if model["makes"] == "drafter":
        return _use_of_drafter(model)
    if model["soft_prompt"]:
        base = model["base"] or f"{REPOSITORY}/base"
        return f"""```python
import anyformer
from peft import PeftModel
from transformers import AutoTokenizer

model = PeftModel.from_pretrained(anyformer.from_hf("{base}"), "{REPOSITORY}").eval()
tokenizer = AutoTokenizer.from_pretrained("{REPOSITORY}")
```

This repository holds a soft prompt and no whole model, so `{model["auto_class"]}` does not open it. On the stock class
of its base it would load, but there PEFT 0.21 loses it while it generates; anyformer's classes keep it.
"""
    return f"""```python
from transformers import {model["auto_class"]}, AutoTokenizer

model = {model["auto_class"]}.from_pretrained("{REPOSITORY}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{REPOSITORY}", trust_remote_code=True)
```

`trust_remote_code` runs the modeling files in this repository; with anyformer installed it is not needed.
"""


def _quantized(bits: int | None, metrics: dict[str, Any]) -> str:
    """What the figures are of, where training saw other weights than the result has."""
    if bits is None:
        return ""
    name = metrics["measured"]["shown"][0]
    seen = [metrics.get(f"quantized_{when}", {}).get(name) for when in ("before", "after")]
    figures = " -> ".join(f"{value:.4f}" for value in seen if value is not None)
    there = f" There the held-out {name.replace('_', ' ')} was {figures}." if figures else ""
    return (
        f"The adapter was trained on the base in {bits} bits.{there} The table is of what stands here: the adapter on "
        "the base's whole weights.\n\n"
    )


def _in_use(metrics: dict[str, Any]) -> str:
    words = metrics.get("in_use", {}).get("words")
    return f"{words}\n\n" if words else ""


def _samples(metrics: dict[str, Any]) -> str:
    pairs = paired_samples(metrics)
    if not pairs:
        return ""
    parts = ["## Samples\n"]
    for before, after in pairs:
        parts.append(_quoted("Prompt", after.prompt))
        if before is not None:
            parts.append(_quoted("Before", before.answer))
        parts.append(_quoted("After", after.answer))
        parts.append(_quoted("In the data", after.reference))
        parts.append("---\n")
    return "\n".join(parts) + "\n"


def paired_samples(metrics: dict[str, Any]) -> list[tuple[Sample | None, Sample]]:
    """Sample answers before and after, prompt by prompt."""
    after = [Sample(**sample) for sample in metrics.get("samples_after", [])]
    before: list[Sample | None] = [Sample(**sample) for sample in metrics.get("samples_before", [])]
    if [s.prompt for s in before if s] != [s.prompt for s in after]:  # asked for otherwise since a resume
        before = [None] * len(after)
    return list(zip(before, after, strict=True))


def _quoted(name: str, text: str) -> str:
    # A longer fence than any inside, so that an answer with code does not end the block.
    fence = "````"
    while fence in text:
        fence += "`"
    return f"{name}:\n\n{fence}text\n{text}\n{fence}\n"


def not_better(metrics: dict[str, Any]) -> str | None:
    """A warning where the first held-out figure did not move the right way, else None."""
    before, after = metrics.get("before"), metrics["after"]
    name, up = metrics["measured"]["shown"][0], metrics["measured"]["higher_is_better"]
    if before and after and (after[name] <= before[name] if up else after[name] >= before[name]):
        return (
            f"the held-out {name} did not {'rise' if up else 'fall'} ({before[name]:.4f} -> {after[name]:.4f}): the "
            "tuned model is no better on this data. A lower learning rate, more rows or fewer epochs may help"
        )
    return None


def check_finite(loss: float, what: str) -> None:
    """Raises:
    UserError: the loss is not a number.
    """
    if loss != loss or loss in (float("inf"), float("-inf")):
        raise UserError(f"{what} is {loss}: training has diverged. Try a lower train.learning_rate")
