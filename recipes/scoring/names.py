"""What `--metrics` can name."""

# File in this folder -> the metrics that it measures.
KINDS: dict[str, tuple[str, ...]] = {
    "perplexity": ("perplexity",),
    "answers": ("exact-match", "f1", "bleu", "chrf"),
    "labels": ("accuracy", "macro-f1", "span-f1"),
    "label_sets": ("accuracy", "micro-f1", "macro-f1"),
    "values": ("mae", "mse", "pearson"),
    "code": ("pass@k",),
    "win_rate": ("win-rate",),  # the last: it lets go of the model
}
METRICS = tuple(dict.fromkeys(name for names in KINDS.values() for name in names))
