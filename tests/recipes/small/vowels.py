"""A reward that tells the answers of an untrained model apart."""


def share(prompts, completions, **columns):
    return [sum(c in "aeiou" for c in text) / max(len(text), 1) for text in completions]
