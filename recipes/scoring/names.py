"""What `--metrics` can name."""

# File in this folder -> the metrics that it measures.
KINDS: dict[str, tuple[str, ...]] = {
    "perplexity": ("perplexity",),
    "answers": ("exact-match", "f1", "bleu", "chrf"),
    "labels": ("accuracy", "macro-f1", "span-f1"),
    "code": ("pass@k",),
    "win_rate": ("win-rate",),  # the last: it lets go of the model
}
METRICS = tuple(name for names in KINDS.values() for name in names)
