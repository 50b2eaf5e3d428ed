"""What a model is worth: loss on held-out rows, and answers to look at."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .held_rows import HeldRows


@dataclass(frozen=True)
class HeldOut:
    """Cross-entropy over the supervised tokens of the held-out rows.

    Attributes:
        loss: mean over tokens, in nats.
        tokens: supervised tokens counted.
        rows: rows they stand in.
        by_row: what each row adds to it.
    """

    loss: float
    tokens: int
    rows: int
    by_row: "HeldRows | None" = None

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def as_dict(self) -> dict[str, float]:
        return {"loss": self.loss, "tokens": self.tokens, "rows": self.rows, "perplexity": self.perplexity}


@dataclass(frozen=True)
class Sample:
    """One held-out prompt, the answer in the data, and the model's."""

    prompt: str
    reference: str
    answer: str


def held_out_loss(model: Any, dataset: Any, *, pad_token_id: int, batch_size: int) -> HeldOut:
    """Loss on a data set with `input_ids` and `labels`, and with `position_ids` where rows hold several documents.

    Batches group rows of like length; the value does not depend on them, because the sum runs over tokens.
    """
    import torch

    from .held_rows import HeldRows, digest_of
    from .tokens.padding import pad_rows

    # Rows in token shards tell their lengths unread, and only those of a batch are held.
    held = dataset if hasattr(dataset, "length") else [dict(row) for row in dataset]
    length = getattr(dataset, "length", lambda index: len(held[index]["input_ids"]))
    rows = sorted(range(len(held)), key=length)
    digests: list[str] = []
    parts: list[tuple[float, float]] = []
    with evaluating(model), torch.no_grad():
        for start in range(0, len(rows), batch_size):
            chosen = [held[index] for index in rows[start : start + batch_size]]
            digests += map(digest_of, chosen)
            padded = pad_rows(chosen, pad_token_id)
            batch = {name: tensor.to(model.device) for name, tensor in padded.items()}
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits[:, -labels.shape[1] :]  # behind the soft prompt, if any
            logits = logits[:, :-1]  # [batch, length - 1, vocab]
            supervised = labels[:, 1:] != -100
            parts += row_losses(logits, labels[:, 1:], supervised)
    total, count = sum(loss for loss, _ in parts), int(sum(tokens for _, tokens in parts))
    return HeldOut(total / max(count, 1), count, len(rows), HeldRows(tuple(digests), {"loss": parts}))


def row_losses(logits: Any, targets: Any, supervised: Any) -> list[tuple[float, float]]:
    """The summed cross-entropy and the number of supervised tokens of each row.

    Args:
        logits: [batch, length, vocab].
        targets, supervised: [batch, length].
    """
    import torch

    losses = torch.nn.functional.cross_entropy(logits[supervised].float(), targets[supervised], reduction="none")
    return sums_by_row(losses, supervised)


def sums_by_row(values: Any, supervised: Any) -> list[tuple[float, float]]:
    """The sum of `values`, one for each supervised token of a batch, and the number of these, of each row."""
    import torch

    sums = torch.zeros(len(supervised), dtype=torch.float64)
    sums.index_add_(0, supervised.nonzero()[:, 0].cpu(), values.double().cpu())
    return list(zip(sums.tolist(), supervised.sum(1).tolist(), strict=True))


def greedy_answers(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], *, max_new_tokens: int, batch_size: int
) -> list[list[int]]:
    """Greedy answers to prompts, all as token ids; each answer ends with its stop token, if it has one."""
    import torch

    from .tokens.supervised import stop_ids

    stops = set(stop_ids(tokenizer))
    found: list[list[int]] = []
    with evaluating(model), torch.no_grad():
        for start in range(0, len(prompts), batch_size):
            batch = tokenizer.pad({"input_ids": prompts[start : start + batch_size]}, padding_side="left")
            inputs = {n: torch.tensor(batch[n], device=model.device) for n in ("input_ids", "attention_mask")}
            output = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=sorted(stops),
                pad_token_id=tokenizer.pad_token_id,
            )
            for ids in output[:, inputs["input_ids"].shape[1] :].tolist():
                end = next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids))
                found.append(ids[:end])
    return found


def sample_answers(
    model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], *, count: int, max_new_tokens: int
) -> list[Sample]:
    """Greedy answers to `count` prompts spread evenly over the held-out rows."""
    import torch

    from .tokens.supervised import stop_ids

    samples, longest = [], model.config.max_position_embeddings - virtual_tokens(model)
    with evaluating(model), torch.no_grad():
        for row in spread(rows, count):
            prompt, reference, ids = prompt_of_row(row, tokenizer)
            room = longest - len(ids)
            if room < 1:
                answer = f"[not asked: the prompt has {len(ids)} tokens, and the model was made for {longest}]"
                samples.append(Sample(prompt, reference, answer))
                continue
            inputs = torch.tensor([ids], device=model.device)
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                max_new_tokens=min(max_new_tokens, room),
                do_sample=False,
                eos_token_id=stop_ids(tokenizer),
                pad_token_id=tokenizer.pad_token_id,
            )
            answer = tokenizer.decode(output[0, len(ids) :], skip_special_tokens=True).strip()
            samples.append(Sample(prompt, reference, answer))
    return samples


def virtual_tokens(model: Any) -> int:
    """Places that a soft prompt takes before the text; 0 for any other model."""
    configs = getattr(model, "peft_config", None) or {}
    return max((getattr(config, "num_virtual_tokens", None) or 0 for config in configs.values()), default=0)


def spread(rows: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """At most `count` rows, spread evenly over all."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def prompt_of_row(row: dict[str, Any], tokenizer: Any) -> tuple[str, str, list[int]]:
    """The prompt as text and as ids, and the answer in the data."""
    if "text" in row:
        ids = tokenizer(row["text"])["input_ids"]
        half = max(len(ids) // 2, 1)
        return tokenizer.decode(ids[:half]), tokenizer.decode(ids[half:]), ids[:half]
    from .tokens.chat_template import answer_text, prompt_text

    if "messages" in row:
        turns, answer = row["messages"][:-1], answer_text(row["messages"][-1])
    elif isinstance(row["prompt"], str):
        return row["prompt"], row["completion"], tokenizer(row["prompt"])["input_ids"]
    else:
        turns, answer = row["prompt"], answer_text(row["completion"][-1])
    text = prompt_text(tokenizer, turns, row.get("tools"))
    # The template has written the special tokens already: a second BOS would be one too many.
    return answer_text(turns[-1]), answer, tokenizer(text, add_special_tokens=False)["input_ids"]


class evaluating:
    """Evaluation mode, and back to what it was."""

    def __init__(self, model: Any) -> None:
        self.model, self.was_training = model, model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *error: object) -> None:
        self.model.train(self.was_training)
