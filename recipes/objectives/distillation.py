"""Objective `distill`: learn a teacher's next-token distribution, with TRL's GKDTrainer."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..routers import have_losses, move_router_biases, router_logits_of
from .base import Row
from .preference import plain_model
from .sft import SupervisedTuning
from .trainers import built

if TYPE_CHECKING:
    import torch

    from ..tokens.report import TokenizedData


class Distillation(SupervisedTuning):
    """Generalised knowledge distillation (Agarwal et al. 2024, arXiv:2306.13649).

    On the answers of the data, and in a share of `train.lmbda` of the batches on answers that the student samples.
    """

    shown = ("divergence", "loss", "perplexity")
    passes = 1
    reads_batches_alone = False  # the teacher is another architecture, and answers may be sampled

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        from ..models import config_and_tokenizer
        from ..schema import ModelSection

        model, path = self.recipe.model, self.options.teacher
        self.section = ModelSection(
            path=path,
            dtype=model.dtype,
            attn_implementation=model.attn_implementation,
            trust_remote_code=model.trust_remote_code,
        )
        self.teacher_config, tokenizer = config_and_tokenizer(self.section)
        if (
            self.teacher_config.vocab_size != self.config.vocab_size
            or tokenizer.get_vocab() != self.tokenizer.get_vocab()
        ):
            raise UserError(
                f"objective.teacher: {path} has another vocabulary than the model: {len(tokenizer)} tokens and "
                f"{self.teacher_config.vocab_size} rows beside {len(self.tokenizer)} and {self.config.vocab_size}. "
                "Distributions over tokens can only be compared where both have the same"
            )
        longest = self.max_length + (self.arguments.max_new_tokens if self.arguments.lmbda else 0)
        if longest > self.config.max_position_embeddings:
            raise UserError(
                f"train.max_new_tokens: prompts of up to {self.max_length} tokens and {self.arguments.max_new_tokens} "
                f"new ones do not fit into the model's {self.config.max_position_embeddings} positions: lower "
                "train.max_length or train.max_new_tokens"
            )

    @cached_property
    def teacher(self) -> Any:
        """The teacher, loaded when first asked for."""
        from ..models import load_model

        loaded, _ = load_model(self.section, self.teacher_config, seed=0)
        return loaded.eval().requires_grad_(False)

    def beside(self) -> dict[str, int]:
        return {"teacher": self.teacher_config.counts(head=self.head).total_parameters}

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is experimental is said in the documentation
            from trl.experimental.gkd import GKDTrainer

        student, routed = plain_model(model), have_losses(model.config)

        class Trainer(GKDTrainer):
            def compute_loss(
                self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
            ) -> Any:
                with router_logits_of(student) if routed else nullcontext() as seen:
                    loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
                if seen:
                    loss = loss + student.router_losses(seen[-1], [inputs["attention_mask"]])[0]
                return (loss, outputs) if return_outputs else loss

            def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
                # Counted before answers are sampled, it would be the number of tokens of other answers.
                return super().training_step(model, inputs, None)

        self.finish(model)  # sampled answers end where those of the data do
        trainer = built(
            Trainer,
            model,
            self.arguments,
            train_dataset=train,
            eval_dataset=held_out,
            processing_class=self.tokenizer,
            peft_config=adapter,
            data_collator=_Collator(self.tokenizer.pad_token_id),
            teacher_model=self.teacher,
        )
        move_router_biases(trainer, student)
        trainer.not_additive = "the divergence is a mean over a batch's tokens"
        return trainer

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        """`divergence`: mean over the answers' tokens of the divergence that is trained, in nats; `loss`: the
        cross-entropy with the data."""
        import torch

        from ..evaluation import HeldOut, evaluating, row_losses, sums_by_row
        from ..held_rows import HeldRows, digest_of
        from ..tokens.padding import pad_rows

        size, beta = self.recipe.eval.batch_size, self.arguments.beta
        data = sorted((dict(row) for row in prepared.dataset), key=lambda row: len(row["input_ids"]))
        teacher = self.teacher.to(model.device)
        losses: list[tuple[float, float]] = []
        apart: list[tuple[float, float]] = []
        with evaluating(model), torch.no_grad():
            for first in range(0, len(data), size):
                padded = pad_rows(data[first : first + size], self.tokenizer.pad_token_id)
                batch = {name: tensor.to(model.device) for name, tensor in padded.items()}
                targets = batch.pop("labels")[:, 1:]
                on = targets != -100
                student, target = (m(**batch, use_cache=False).logits[:, :-1] for m in (model, teacher))
                losses += row_losses(student, targets, on)
                apart += sums_by_row(divergence(student[on].float(), target[on].float(), beta), on)
        by_row = HeldRows(tuple(map(digest_of, data)), {"divergence": apart, "loss": losses})
        self.held_rows, count = by_row, max(int(sum(tokens for _, tokens in losses)), 1)
        divergent, loss = (sum(value for value, _ in part) / count for part in (apart, losses))
        return {"divergence": divergent, **HeldOut(loss, count, len(data)).as_dict()}


def divergence(student: "torch.Tensor", teacher: "torch.Tensor", beta: float) -> "torch.Tensor":
    """Generalised Jensen-Shannon divergence of next-token distributions (Agarwal et al. 2024, eq. 1).

    beta KL(teacher, mixture) + (1 - beta) KL(student, mixture) with the mixture of beta parts teacher; its limits 0
    and 1 stand for KL(teacher, student) and KL(student, teacher).

    Args:
        student, teacher: logits [tokens, vocab].

    Returns:
        [tokens], in nats.
    """
    import torch

    s, t = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0:
        return (t.exp() * (t - s)).sum(-1)
    if beta == 1:
        return (s.exp() * (s - t)).sum(-1)
    share = torch.tensor(beta, dtype=s.dtype, device=s.device)
    mixture = torch.logaddexp(s + torch.log1p(-share), t + share.log())
    return beta * (t.exp() * (t - mixture)).sum(-1) + (1 - beta) * (s.exp() * (s - mixture)).sum(-1)


class _Collator:
    """Rows with labels, and by itself the prompt of each row's last answer, padded on the left for sampling."""

    def __init__(self, pad_token_id: int) -> None:
        self.pad_token_id = pad_token_id

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        import torch

        from ..tokens.padding import pad_rows

        prompts = [row["input_ids"][: _last_answer(row["labels"])] for row in rows]
        width = max(map(len, prompts))
        ids = torch.full((len(rows), width), self.pad_token_id)
        mask = torch.zeros_like(ids)
        for index, prompt in enumerate(prompts):
            ids[index, width - len(prompt) :], mask[index, width - len(prompt) :] = torch.tensor(prompt), 1
        return {**pad_rows(rows, self.pad_token_id), "prompts": ids, "prompt_attention_mask": mask}


def _last_answer(labels: list[int]) -> int:
    """Where the last run of supervised tokens begins, behind the first token."""
    end = max(index for index, label in enumerate(labels) if label != -100)
    begins = next((index + 1 for index in range(end, -1, -1) if labels[index] == -100), 0)
    return max(begins, 1)
