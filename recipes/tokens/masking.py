"""Hidden tokens for encoders: which they are depends on a row's tokens, a seed and the epoch, and on nothing else.

transformers' `DataCollatorForLanguageModeling` chooses and hides them. It draws from one stream of random numbers for
all rows, which is neither kept in a checkpoint nor the same for another batch size. Here each row has its own stream,
so that a resumed run hides what an undisturbed one does, and held-out rows are always masked alike.
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .padding import pad_rows
from .report import IGNORE

if TYPE_CHECKING:
    import torch

    from ..evaluation import Sample
    from ..held_rows import HeldRows

# What a row keeps beside its tokens once it is masked.
_KEPT = ("token_type_ids", "next_sentence_label")


class Masking:
    """Hides tokens of rows of `plain_text.tokenize_pieces` or `tokenize_pairs`; a collator for the Trainer.

    Rows that have labels are masked already and are only padded.

    Args:
        options: the recipe's `objective` section.
        seed: with another seed other tokens are hidden.
    """

    def __init__(self, tokenizer: Any, options: Any, seed: int) -> None:
        import torch
        from transformers import DataCollatorForLanguageModeling

        self.collator = DataCollatorForLanguageModeling(
            tokenizer,
            whole_word_mask=options.whole_word,
            mlm_probability=options.mlm_probability,
            mask_replace_prob=options.mask_replace_prob,
            random_replace_prob=options.random_replace_prob,
        )
        self.pad_token_id, self.seed = tokenizer.pad_token_id, seed
        # In shared memory: workers that load data live longer than an epoch.
        self.epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def __call__(self, rows: Sequence[dict[str, Any]]) -> "dict[str, torch.Tensor]":
        epoch = int(self.epoch)
        return pad_rows([row if "labels" in row else self.mask(row, epoch) for row in rows], self.pad_token_id)

    def mask(self, row: dict[str, Any], epoch: int = 0) -> dict[str, Any]:
        """The row with hidden tokens, and `labels` that are -100 except there. At least one token is hidden."""
        import numpy as np
        import torch

        key = hashlib.blake2b(np.asarray(row["input_ids"], dtype=np.int64).tobytes(), digest_size=7)
        key.update(f"{self.seed}:{epoch}".encode())
        given = {name: row[name] for name in ("input_ids", "special_tokens_mask")}
        if "words" in row:
            given["offset_mapping"] = word_offsets(row["words"])
        self.collator.generator = torch.Generator().manual_seed(int.from_bytes(key.digest(), "big"))
        try:
            batch = self.collator([given])
            while not (batch["labels"] != IGNORE).any():  # a row with nothing to learn would be read in vain
                batch = self.collator([given])
        finally:
            self.collator.generator = None  # it cannot be sent to a worker process
        kept = {name: row[name] for name in _KEPT if name in row}
        return {"input_ids": batch["input_ids"][0], "labels": batch["labels"][0], **kept}

    def fixed(self, dataset: Any) -> Any:
        """The data set with tokens hidden once and for all."""
        from datasets import Dataset

        masked = [self.mask(row) for row in dataset]
        lists = [{k: v.tolist() if hasattr(v, "tolist") else v for k, v in row.items()} for row in masked]
        return Dataset.from_list(lists)


def word_offsets(words: Sequence[int]) -> list[tuple[int, int]]:
    """Made-up offsets of tokens that touch within a word and leave a gap between words, as the collator reads words.

    The text's own offsets would make one word of all that stands between two spaces, `self.items())` among it.

    Args:
        words: the number of each token's word.
    """
    offsets, gap = [], 0
    for index, word in enumerate(words):
        gap += index > 0 and word != words[index - 1]
        offsets.append((index + gap, index + gap + 1))
    return offsets


def masked_figures(rows: "HeldRows") -> dict[str, float]:
    """Cross-entropy in nats and accuracy over the hidden tokens, from what each row adds to them.

    Of rows with `next_sentence_label` also `next_sentence_loss`, in nats a row, and `next_sentence_accuracy`.
    """
    sums = {name: [sum(side) for side in zip(*parts, strict=True)] for name, parts in rows.parts.items()}
    figures = {name: total / max(count, 1) for name, (total, count) in sums.items()}
    return figures | {"tokens": int(sums["masked_loss"][1]), "rows": len(rows.digests)}


def masked_rows(model: Any, dataset: Any, *, pad_token_id: int, batch_size: int) -> "HeldRows":
    """What each of rows that are masked already adds to `masked_figures`.

    Batches group rows of like length; the values do not depend on them.
    """
    import torch
    from torch.nn.functional import cross_entropy

    from ..evaluation import evaluating, row_losses, sums_by_row
    from ..held_rows import HeldRows, digest_of

    rows = sorted((dict(row) for row in dataset), key=lambda row: len(row["input_ids"]))
    parts: dict[str, list[tuple[float, float]]] = {"masked_loss": [], "masked_accuracy": []}
    with evaluating(model), torch.no_grad():
        for start in range(0, len(rows), batch_size):
            padded = pad_rows(rows[start : start + batch_size], pad_token_id)
            batch = {name: tensor.to(model.device) for name, tensor in padded.items()}
            labels, follows = batch.pop("labels"), batch.pop("next_sentence_label", None)
            output = model(**batch)
            hidden = labels != IGNORE
            logits = output.logits if follows is None else output.prediction_logits
            parts["masked_loss"] += row_losses(logits, labels, hidden)
            parts["masked_accuracy"] += sums_by_row(logits[hidden].argmax(-1) == labels[hidden], hidden)
            if follows is not None:
                relation = output.seq_relationship_logits.float()  # [rows, 2]
                losses = cross_entropy(relation, follows, reduction="none").tolist()
                right = (relation.argmax(-1) == follows).tolist()
                for name, values in (("next_sentence_loss", losses), ("next_sentence_accuracy", right)):
                    parts.setdefault(name, []).extend((float(value), 1.0) for value in values)
    return HeldRows(tuple(map(digest_of, rows)), parts)


def filled_masks(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], *, length: int) -> "list[Sample]":
    """What the model puts in the place of the hidden tokens among the first `length` of each masked row."""
    import torch

    from ..evaluation import Sample, evaluating

    samples = []
    with evaluating(model), torch.no_grad():
        for row in rows:
            batch = {name: tensor.to(model.device) for name, tensor in pad_rows([row], tokenizer.pad_token_id).items()}
            labels = batch.pop("labels")[0, :length]
            batch.pop("next_sentence_label", None)
            hidden = labels != IGNORE
            output = model(**batch)
            logits = output.logits if output.logits is not None else output.prediction_logits
            guesses = logits[0, :length].argmax(-1)[hidden].tolist()
            prompt = tokenizer.decode(batch["input_ids"][0, :length])
            words = [", ".join(tokenizer.convert_ids_to_tokens(ids)) for ids in (labels[hidden].tolist(), guesses)]
            samples.append(Sample(prompt, *words))
    return samples
