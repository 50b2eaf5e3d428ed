"""Folders of runs with figures made up, for comparisons of them."""

import json

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


def write_run(folder, *, shift=0.0, rate="1e-3", rows=12, name_of_rows="row", finished=True, prompt="count"):
    """A run folder as `anyformer train` leaves it, with figures made up."""
    folder.mkdir(parents=True)
    recipe = {
        "model": {"path": f"org/a-model-with-a-long-name-{HOSTILE if shift else ''}"},
        "objective": {"kind": "sft"},
        "train": {"learning_rate": float(rate) + shift, "output_dir": str(folder)},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    parts = {
        when: [[2.0 + at % 5 + by, 4 + at % 3] for at in range(rows)] for when, by in (("before", 3), ("after", shift))
    }
    held = {
        when: {"rows": [f"{name_of_rows}{at}" for at in range(rows)], "parts": {"loss": p}} for when, p in parts.items()
    }
    (folder / "held_out.json").write_text(json.dumps(held))
    figures = {
        when: {"loss": sum(a for a, _ in part) / sum(b for _, b in part), "rows": rows, "tokens": 60, "perplexity": 3.0}
        for when, part in parts.items()
    }
    sample = {"prompt": f"{prompt} {HOSTILE}", "reference": "two\nthree " + "x" * 200}
    metrics = figures | {
        "samples_before": [sample | {"answer": "nothing"}],
        "samples_after": [sample | {"answer": f"def f():\n    return {shift} {HOSTILE}"}],
        "measured": {"shown": ["loss", "perplexity"], "higher_is_better": False},
        "versions": {"torch": f"2.6{HOSTILE if shift else ''}"},
        "plan": {"steps": 10, "trainable": 12345},
        "training": {"tokens": 1000, "tokens_per_second": 10.5},
        "history": [{"step": s, "loss": 3 - s / 10 + shift} for s in range(1, 11)] + [{"step": 5, "eval_loss": 2.0}],
        "finished": finished,
    }
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder
