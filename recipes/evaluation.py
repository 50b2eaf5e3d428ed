"""What a model is worth: loss on held-out rows, and answers to look at."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class HeldOut:
    """Cross-entropy over the supervised tokens of the held-out rows.

    Attributes:
        loss: mean over tokens, in nats.
        tokens: supervised tokens counted.
        rows: rows they stand in.
    """

    loss: float
    tokens: int
    rows: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    def as_dict(self) -> dict[str, float]:
        return {**asdict(self), "perplexity": self.perplexity}


@dataclass(frozen=True)
class Sample:
    """One held-out prompt, the answer in the data, and the model's."""

    prompt: str
    reference: str
    answer: str


def held_out_loss(model: Any, dataset: Any, *, pad_token_id: int, batch_size: int) -> HeldOut:
    """Loss on a data set with `input_ids` and `labels`, and with `position_ids` where rows hold several documents.

    The value does not depend on batches, because the sum runs over tokens.
    """
    rows = row_losses(model, dataset, pad_token_id=pad_token_id, batch_size=batch_size)
    total, tokens = rows.sum(0)
    return HeldOut(loss=float(total / max(tokens, 1)), tokens=int(tokens), rows=len(rows))


def row_losses(model: Any, dataset: Any, *, pad_token_id: int, batch_size: int) -> "np.ndarray":
    """Summed cross-entropy in nats and number of supervised tokens of each row, shape (rows, 2), float64.

    Args:
        dataset: as `held_out_loss` has it. Batches group rows of like length; the result is in the order of the rows.
    """
    import numpy as np
    import torch

    from .tokens.padding import pad_rows

    # Rows in token shards tell their lengths unread, and only those of a batch are held.
    held = dataset if hasattr(dataset, "length") else [dict(row) for row in dataset]
    length = getattr(dataset, "length", lambda index: len(held[index]["input_ids"]))
    order = sorted(range(len(held)), key=length)
    found = np.zeros((len(order), 2))
    with evaluating(model), torch.no_grad():
        for start in range(0, len(order), batch_size):
            rows = order[start : start + batch_size]
            padded = pad_rows([held[index] for index in rows], pad_token_id)
            batch = {name: tensor.to(model.device) for name, tensor in padded.items()}
            labels = batch.pop("labels")
            logits = model(**batch, use_cache=False).logits[:, -labels.shape[1] :]  # behind the soft prompt, if any
            logits, labels = logits[:, :-1], labels[:, 1:]  # [batch, length - 1, vocab]
            supervised = labels != -100
            losses = torch.zeros(labels.shape, dtype=torch.float64, device=labels.device)
            losses[supervised] = torch.nn.functional.cross_entropy(
                logits[supervised].float(), labels[supervised], reduction="none"
            ).double()
            found[rows] = torch.stack([losses.sum(1), supervised.sum(1).double()], 1).cpu().numpy()
    return found


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
