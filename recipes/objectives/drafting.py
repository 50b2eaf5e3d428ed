"""Objectives `medusa`, `eagle` and `mtp`: what drafts tokens for a model that stays as it is."""

import hashlib
from collections.abc import Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UserError
from ..parallel.world import current, main_first
from .base import Objective, Row
from .trainers import built

if TYPE_CHECKING:
    from ...modeling import AnyformerConfig
    from ..adapters import AdapterPlan
    from ..evaluation import Sample
    from ..tokens.report import TokenizedData, Tokenizing
    from ..tokens.views import RowView


class DraftHeads(Objective):
    """A drafter for speculative decoding on a frozen base.

    Medusa (Cai et al. 2024, arXiv:2401.10774), EAGLE (Li et al. 2024, arXiv:2401.15077), multi-token prediction
    (DeepSeek-V3, arXiv:2412.19437, sec. 2.2). The drafter is what is trained and saved; the base is beside it.

    A draft is accepted where it is what the base itself would write, so that is what is learned by default (Medusa,
    sec. 2.3.2, self-distillation): the base answers the prompts of the rows before the first step.
    """

    formats: tuple[str, ...] = ("prompt-completion", "messages", "prompt", "text")
    passes = -1  # the base is read once and gets no gradient
    reads_batches_alone = False  # the base is another model than the trained one

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.asks = self.options.answers == "base"
        self.formats = ("prompt", "text") if self.asks else ("prompt-completion", "messages", "text")
        drafted = range(1, self.options.num_draft_tokens + 1)
        self.shown = ("loss", *(f"accuracy_{place}" for place in drafted), "tokens_a_pass")
        self.learned: dict[int, Any] = {}  # by the id of the rows that they were made of
        longest = self.max_length + (self.options.max_new_tokens if self.asks else 0)
        if longest > (places := self.config.max_position_embeddings):
            raise UserError(
                f"objective.max_new_tokens: prompts of up to {self.max_length} tokens and "
                f"{self.options.max_new_tokens} new ones do not fit into the model's {places} positions: lower "
                "objective.max_length or objective.max_new_tokens"
            )

    @classmethod
    def makes(cls) -> str:
        return "drafter"

    @property
    def auto_class(self) -> str:
        return "AutoModel"

    def plan_of(self, config: "AnyformerConfig") -> "AdapterPlan":
        import torch
        from transformers.initialization import no_init_weights

        from ...modeling import AnyformerDrafter, AnyformerDrafterConfig
        from ..adapters import AdapterPlan

        with torch.device("meta"), no_init_weights():
            drafter = AnyformerDrafter(AnyformerDrafterConfig.of_base(config, **self._sizes))
        sizes = {name: parameter.numel() for name, parameter in drafter.named_parameters()}
        total, count = sum(sizes.values()), self.options.num_draft_tokens
        # Forward and back through what is trained, an EAGLE layer once for each token drafted; the head, which is
        # frozen, twice forward, as its logits are not kept, and once back.
        head = 2 * config.vocab_size * config.hidden_size
        self.flops_a_token = 6 * total * (count if self.options.kind == "eagle" else 1) + 3 * head * count
        return AdapterPlan("none", total, frozenset(sizes), {}, {}, {}, virtual_tokens=0, in_place=False)

    @property
    def _sizes(self) -> dict[str, Any]:
        return {"kind": self.options.kind, "num_draft_tokens": self.options.num_draft_tokens}

    # Rows

    def tokenizing(self) -> "Tokenizing":
        from ..tokens.prompts import tokenize_prompts
        from ..tokens.report import Tokenizing
        from ..tokens.supervised import tokenize_rows

        options = self.options
        if self.asks:
            asked = {"max_new_tokens": options.max_new_tokens, "prompts_per_text": options.prompts_per_text}
            return Tokenizing(tokenize_prompts, {"max_length": self.max_length} | asked)
        settings = {"max_length": self.max_length, "truncation": self.recipe.data.truncation}
        return Tokenizing(tokenize_rows, settings | {"loss_on": "all"})

    @property
    def long_rows(self) -> str:
        return "longer prompts are left out, of longer texts pieces are taken" if self.asks else super().long_rows

    def plan_lines(self) -> list[tuple[str, str]]:
        options = self.options
        said = f"{options.kind}, {options.num_draft_tokens} tokens a pass, on the model as it is"
        if self.asks:
            said += f"; learned is what the model itself writes, up to {options.max_new_tokens} tokens to a prompt"
        return [("drafter", said)]

    def view(self, row: Row) -> "RowView":
        from ..tokens.views import Length, RowView, read_only

        if not self.asks:
            return super().view(row)
        prompt = read_only(row["input_ids"], "prompt")
        lengths = {"prompt": Length(len(prompt.ids), self.max_length)}
        return RowView((prompt,), lengths=lengths, label="the model goes on")

    def rows_of(self, dataset: Any) -> Any:
        """What is learned from: the rows of a data set, or the base's own answers to their prompts, which are kept for
        later runs as tokens are."""
        if not self.asks:
            return dataset
        if id(dataset) not in self.learned:
            if current().main:
                print(f"The model goes on from {len(dataset):,} prompts by itself …", flush=True)
            data = self._written(dataset)
            if current().main:
                print(f"… {data.report.supervised_tokens:,} tokens, {data.report.made}.", flush=True)
            self.learned[id(dataset)] = data.dataset
        return self.learned[id(dataset)]

    def _written(self, dataset: Any) -> "TokenizedData":
        from ..tokens.cache import tokens_of
        from ..tokens.prompts import answers_of
        from ..tokens.report import Tokenizing

        settings = {"max_new_tokens": self.options.max_new_tokens, "model": self.base_digest}
        prompts = [{"input_ids": list(row["input_ids"])} for row in dataset]
        writing = Tokenizing(answers_of(self.base), settings)
        return tokens_of(writing, prompts, self.tokenizer, cache=self.recipe.data.cache)

    @cached_property
    def base_digest(self) -> str:
        """Of the base's weights: another base writes other answers."""
        import torch

        digest = hashlib.blake2b(digest_size=16)
        for name, weight in sorted(self.base.state_dict().items()):
            digest.update(name.encode())
            digest.update(weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    # The run

    def begin(self, model: Any) -> Any:
        """A new drafter for the model, which is kept as the base."""
        from transformers import set_seed

        from ...modeling import AnyformerDrafter

        self.base = model.eval().requires_grad_(False)
        set_seed(self.arguments.seed)
        return AnyformerDrafter.from_base(self.base, **self._sizes)

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from transformers import Trainer

        from ..tokens.padding import pad_rows

        base = self.base.to(self.arguments.device)

        class DraftTrainer(Trainer):
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                outputs = model(base=base, **inputs, num_items_in_batch=num_items_in_batch)
                loss = outputs.loss
                if num_items_in_batch is not None and self.args.average_tokens_across_devices:
                    loss = loss * self.accelerator.num_processes  # the items are those of all, gradients a mean
                return (loss, outputs) if return_outputs else loss

        with main_first():
            train, held_out = (None if rows is None else self.rows_of(rows) for rows in (train, held_out))
        trainer = built(
            DraftTrainer,
            model,
            self.arguments,
            train_dataset=train,
            eval_dataset=held_out,
            data_collator=partial(pad_rows, pad_token_id=self.tokenizer.pad_token_id),
        )
        trainer.model_accepts_loss_kwargs = True
        trainer.not_additive = "the loss of each drafted token is a mean over those of a batch that a draft reaches"
        return trainer

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        """`loss`: the trained one; `accuracy_N`: how often the Nth drafted token is the row's, all before it given;
        `tokens_a_pass`: 1 + a_1 + a_1 a_2 + ... of these, as if drafts failed independently of one another."""
        import torch

        from ..evaluation import evaluating
        from ..held_rows import HeldRows, digest_of
        from ..scoring.statistics import ByRow, values_of
        from ..tokens.padding import pad_rows
        from ..tokens.report import IGNORE

        data, base = [dict(row) for row in self.rows_of(prepared.dataset)], self.base.to(model.device)
        # Of each row [places, 3]: weighted loss, tokens that are right, tokens that a draft reaches.
        table = np.zeros((len(data), self.options.num_draft_tokens, 3))
        with evaluating(model), torch.no_grad():
            for number, row in enumerate(data):
                if all(label == IGNORE for label in row["labels"][2:]):
                    continue  # no draft reaches a label
                batch = {name: of.to(model.device) for name, of in pad_rows([row], 0).items()}
                outputs = model(base=base, **batch)
                losses = (outputs.losses * model.loss_weights(model.device)).tolist()
                for place, (loss, share) in enumerate(zip(losses, outputs.accuracies.tolist(), strict=True)):
                    # A token is reached at a place if so many stand before it.
                    reached = int((batch["labels"][:, place + 2 :] != IGNORE).sum())
                    if reached:
                        table[number, place] = loss * reached, share * reached, reached
        hits = table[..., 1:]
        by_row = {"loss": ByRow(table[..., [0, 2]].reshape(len(data), -1), "sum_of_ratios")}
        by_row |= {f"accuracy_{place + 1}": ByRow(hits[:, place], "share") for place in range(hits.shape[1])}
        by_row["tokens_a_pass"] = ByRow(hits.reshape(len(data), -1), "expected_run")
        self.held_rows = HeldRows(tuple(map(digest_of, data)), {}).adding(**by_row)
        tokens = sum(label != IGNORE for row in data for label in row["labels"][1:])
        return values_of(by_row) | {"rows": len(data), "tokens": tokens}

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        return []  # with a drafter the base writes what it writes without, see `try_out`

    def finish(self, model: Any) -> None:
        """A drafter has no generation config: the base's holds."""

    def check_saved(self, model: Any) -> None:
        """Raises:
        UserError: it does not draft for the base.
        """
        try:
            model.check_base(self.base)
        except ValueError as error:
            raise UserError(f"the saved drafter: {error}. Please report this") from error

    def try_out(self, model: Any, rows: Sequence[Row]) -> dict[str, Any]:
        from ..drafting import race

        limit = min(self.recipe.eval.max_new_tokens, self.config.max_position_embeddings - self.max_length)
        prompts = self._prompts(rows)
        if not prompts or limit < 1:
            return {}
        return race(self.base, model.to(self.base.device), self.tokenizer, prompts, max_new_tokens=limit)

    def _prompts(self, rows: Sequence[Row]) -> list[list[int]]:
        """Some held-out prompts; of rows that are learned as they stand, their prompts or first halves."""
        from ..evaluation import prompt_of_row, spread

        chosen = spread(rows, self.recipe.eval.samples)
        if chosen and self.asks:
            return self.tokenizing().run(chosen, self.tokenizer).dataset["input_ids"][: self.recipe.eval.samples]
        found = [prompt_of_row(row, self.tokenizer)[2][: self.max_length] for row in chosen]
        return [ids for ids in found if ids]

    def remarks(self, metrics: dict[str, Any]) -> list[str]:
        factor = metrics.get("in_use", {}).get("speedup", 1.0)
        if factor >= 1:
            return []
        return [
            f"with the drafter the model writes at {factor:.2f} times its speed, slower than alone: too few drafts are "
            "right for what they cost. More rows, or rows like what will be asked, make them better"
        ]

    def next_steps(self, folder: Any) -> list[str]:
        return [f'anyformer generate {self.recipe.model.path} "…" --draft {folder}']
