"""Objectives `grpo`, `rloo` and `ppo`: a policy that answers prompts and learns from the rewards of its own answers."""

import json
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..tokens.prompts import encode_prompt
from .base import Objective, Row
from .preference import plain_model
from .trainers import built, train_routers

if TYPE_CHECKING:
    from ..data import Splits
    from ..evaluation import Sample
    from ..rewards import Reward, RewardOfRows
    from ..tokens.report import TokenizedData
    from ..tokens.views import RowView


class PolicyOptimisation(Objective):
    """What all of them share: prompts, rewards, and the reward of greedy answers to held-out prompts."""

    formats = ("prompt",)  # those of richer rows too, whose other columns the rewards can read
    shown = ("reward", "length", "stopped")
    higher_is_better = True
    samples_its_data = True
    reads_batches_alone = False
    unmoved = (
        "No gradient reached them, as when every answer to a prompt gets the same reward: see the rewards in the log; "
        "raise train.temperature, or give a reward that tells answers apart"
    )

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.columns: list[str] = []
        self.rows: list[Row] = []  # all that were prepared, as a data set numbers them

    @property
    def reward_names(self) -> list[str]:
        names = self.options.reward
        return [names] if isinstance(names, str) else names

    def configure(self, splits: "Splits") -> None:
        from ..rewards import reward_model_config

        self.judges = [config for name in self.reward_names if (config := reward_model_config(name)) is not None]
        self.add_columns([*splits.train, *splits.eval])

    def add_columns(self, rows: Sequence[Row]) -> None:
        """Take note of the columns that the rewards get, beside the prompt."""
        self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row if name != "prompt")]))

    def beside(self) -> dict[str, int]:
        held = {"reference": self.reference_size(), "reward models": sum(map(_classifier_size, self.judges))}
        return {name: size for name, size in held.items() if size}

    def reference_size(self) -> int:
        """Parameters of the reference policy that are held beside the policy's own."""
        raise NotImplementedError

    def rewards(self) -> "list[Reward]":
        """The rewards of the recipe, loaded once."""
        from ..rewards import load_reward

        if not hasattr(self, "_rewards"):
            self._rewards = [load_reward(name) for name in self.reward_names]
        return self._rewards

    def rewards_of_rows(self) -> "list[RewardOfRows]":
        """The same for a trainer, which has the numbers of rows."""
        from ..rewards import RewardOfRows

        return [RewardOfRows(reward, self.rows, self.columns) for reward in self.rewards()]

    def weights(self) -> list[float]:
        """The factor of each reward."""
        return getattr(self.arguments, "reward_weights", None) or [1.0] * len(self.rewards())

    @property
    def room(self) -> int:
        """The longest prompt in tokens that leaves room for an answer."""
        longest = self.config.max_position_embeddings
        room = longest - self.arguments.max_completion_length
        if room < 1:
            raise UserError(
                f"train.max_completion_length is {self.arguments.max_completion_length}, but the model has positions "
                f"for {longest} tokens, prompt included: lower it"
            )
        return room

    def prepare(self, rows: Sequence[Row]) -> "TokenizedData":
        """A data set with the prompts as they are and the numbers of their rows, which the rewards get.

        It is not cached: the trainer tokenises the prompts, and here their lengths alone are looked at.
        """
        from datasets import Dataset

        from ..rewards import ROW, column_problem
        from ..tokens.chat_template import ChatTemplate
        from ..tokens.report import TokenizationReport, TokenizedData

        self.add_columns(rows)
        for name in self.reward_names:
            if problem := column_problem(name, self.columns):
                raise UserError(f"objective.reward {name}: {problem}")
        if any(isinstance(row["prompt"], list) for row in rows):
            ChatTemplate(self.tokenizer)  # says what is wrong with it
        report = TokenizationReport(rows=len(rows))
        kept = []
        for number, row in enumerate(rows, 1):
            ids = self._prompt_ids(row["prompt"], number)
            report.longest = max(report.longest, len(ids))
            if len(ids) > self.room:
                report.dropped["prompts without room for an answer"] = (
                    report.dropped.get("prompts without room for an answer", 0) + 1
                )
                continue
            kept.append({"prompt": row["prompt"], ROW: len(self.rows)})
            self.rows.append(row)
            report.tokens += len(ids)
        if not kept:
            raise UserError(
                f"None of the {len(rows)} prompts leaves room for an answer of train.max_completion_length="
                f"{self.arguments.max_completion_length} tokens: the shortest way is to lower that"
            )
        report.rows_kept = report.stopped = len(kept)
        return TokenizedData(Dataset.from_list(kept), report)

    def _prompt_ids(self, prompt: Any, number: int) -> list[int]:
        import jinja2

        try:
            return encode_prompt(prompt, self.tokenizer)
        except jinja2.TemplateError as error:
            raise UserError(f"Row {number}: the chat template refuses the prompt: {error}") from error

    @property
    def long_rows(self) -> str:
        return "prompts without room for an answer are left out"

    def view(self, row: Row) -> "RowView":
        from ..tokens.views import Length, RowView, read_only

        prompt = read_only(encode_prompt(row["prompt"], self.tokenizer), "prompt")
        lengths = {"prompt": Length(len(prompt.ids), self.room)}
        return RowView((prompt,), lengths=lengths, label="answers are sampled")

    def sequences(self, prepared: "TokenizedData") -> int:
        return prepared.report.rows_kept * self.arguments.num_generations

    def answers(self, model: Any, rows: Sequence[Row]) -> list[list[int]]:
        """Greedy answers as token ids, each up to its stop token."""
        from ..evaluation import greedy_answers

        return greedy_answers(
            model,
            self.tokenizer,
            [encode_prompt(row["prompt"], self.tokenizer) for row in rows],
            max_new_tokens=self.arguments.max_completion_length,
            batch_size=self.recipe.eval.batch_size,
        )

    def scores(self, rows: Sequence[Row], texts: list[str]) -> list[float]:
        """The weighted sum of the rewards for each answer."""
        prompts = [row["prompt"] for row in rows]
        columns = {name: [row.get(name) for row in rows] for name in self.columns}
        each = [reward.of(prompts, texts, columns) for reward in self.rewards()]
        return [sum(w * s for w, s in zip(self.weights(), values, strict=True)) for values in zip(*each, strict=True)]

    def thorough_checks(self, trainer: Any) -> dict[str, str]:
        from ..flight_checks import ACCUMULATION, ADAPTERS_MOVE, PACKING
        from ..policy_start import require_start, without_trace

        start = "there is no reference: train.beta is 0"
        if self.reference_is_used:
            with without_trace(trainer):
                start = require_start(self.divergence(trainer))
        return {
            "the policy starts at its reference": start,
            PACKING: "no rows are packed",
            ACCUMULATION: "each step samples answers of its own",
            ADAPTERS_MOVE: "where all rewards are equal a step has nothing to learn; looked at after the last one",
        }

    @property
    def reference_is_used(self) -> bool:
        return bool(self.arguments.beta)

    def divergence(self, trainer: Any) -> float:
        """From the reference over the first batch's answers."""
        raise NotImplementedError

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        """Reward, tokens, and share that stops by itself, of greedy answers to the held-out prompts."""
        from ..held_rows import mean_rows
        from ..rewards import ROW
        from ..tokens.supervised import stop_ids

        kept = [self.rows[number] for number in prepared.dataset[ROW]]
        ids = self.answers(model, kept)
        scores = self.scores(kept, self.tokenizer.batch_decode(ids, skip_special_tokens=True))
        stops = set(stop_ids(self.tokenizer))
        by_prompt: dict[str, list[float]] = {
            "reward": scores,
            "length": [len(answer) for answer in ids],
            "stopped": [bool(answer) and answer[-1] in stops for answer in ids],
        }
        self.held_rows = mean_rows(({"prompt": row["prompt"]} for row in kept), **by_prompt)
        return {**{name: sum(values) / len(ids) for name, values in by_prompt.items()}, "rows": len(ids)}

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        from ..evaluation import Sample

        count = self.recipe.eval.samples
        chosen = [rows[i * len(rows) // count] for i in range(min(count, len(rows)))]
        chosen = [row for row in chosen if len(encode_prompt(row["prompt"], self.tokenizer)) <= self.room]
        if not chosen:
            return []
        texts = self.tokenizer.batch_decode(self.answers(model, chosen), skip_special_tokens=True)
        # A judge of many answers may see more than one at a time; here each is scored as in training.
        return [
            Sample(_shown(row["prompt"]), _reference(row), f"{text.strip()}\n(reward {score:.3f})")
            for row, text, score in zip(chosen, texts, self.scores(chosen, texts), strict=True)
        ]


class GroupedPolicy(PolicyOptimisation):
    """TRL's trainers that compare the answers to one prompt: GRPO and RLOO.

    Shao et al. 2024, arXiv:2402.03300; Ahmadian et al. 2024, arXiv:2402.14740.
    """

    def divergence(self, trainer: Any) -> float:
        from ..policy_start import sampled_divergence

        return sampled_divergence(trainer)

    def reference_size(self) -> int:
        adapter = self.recipe.adapter
        if not self.reference_is_used:
            return 0
        if adapter.in_place:
            return self.config.counts(head=self.head).total_parameters
        # Of a fresh adapter the model without it is the reference, of one that is gone on with a copy of it.
        return _trainable(self) if adapter.path else 0

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        import trl

        self.finish(model)
        options: dict[str, Any] = {"train_dataset": train, "eval_dataset": held_out, "peft_config": adapter}
        kind = {"grpo": trl.GRPOTrainer, "rloo": trl.RLOOTrainer}[self.options.kind]
        if self.recipe.adapter.in_place and self.arguments.beta:
            # The trainer opens its reference where the model says that it comes from.
            self.start = tempfile.TemporaryDirectory(prefix="anyformer-reference-")
            model.save_pretrained(self.start.name)
            model.config._name_or_path = self.start.name
        trainer = built(
            kind, model, self.arguments, reward_funcs=self.rewards_of_rows(), processing_class=self.tokenizer, **options
        )
        if model.config.num_experts:
            train_routers(trainer, plain_model(model))
        return trainer


class ProximalPolicy(PolicyOptimisation):
    """Proximal policy optimisation with a value head and a penalty on the divergence from the start: `recipes/ppo`."""

    @property
    def reference_is_used(self) -> bool:
        return True  # without a penalty the divergence is measured all the same

    def divergence(self, trainer: Any) -> float:
        from ..policy_start import rollout_divergence

        return rollout_divergence(trainer)

    def reference_size(self) -> int:
        return _trainable(self)

    def prepare(self, rows: Sequence[Row]) -> "TokenizedData":
        prepared = super().prepare(rows)
        ids = [encode_prompt(prompt, self.tokenizer) for prompt in prepared.dataset["prompt"]]
        return prepared._replace(dataset=prepared.dataset.add_column("prompt_ids", ids))

    def sequences(self, prepared: "TokenizedData") -> int:
        return prepared.report.rows_kept

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        from transformers import set_seed

        from ..adapters import attach
        from ..ppo import PPOTrainer

        self.finish(model)
        set_seed(self.arguments.seed)
        policy = model if adapter is None else attach(model, adapter)
        return built(
            PPOTrainer,
            policy,
            self.arguments,
            train_dataset=train,
            processing_class=self.tokenizer,
            reward=self.rewards_of_rows(),
        )

    def save_extra(self, trainer: Any, folder: Any) -> None:
        """The value head, from which another run of PPO could go on; the policy does not need it."""
        from safetensors.torch import save_file

        from ..ppo.trainer import VALUE_HEAD

        weights = {name: tensor.contiguous().cpu() for name, tensor in trainer.value_head.state_dict().items()}
        save_file(weights, folder / VALUE_HEAD)


def _trainable(objective: Objective) -> int:
    """Parameters that the recipe trains."""
    from ..adapters import plan_adapter

    return plan_adapter(objective.config, objective.recipe.adapter, objective).trainable


def _classifier_size(config: Any) -> int:
    """Parameters of a sequence classifier, whatever its family."""
    import torch
    from transformers import AutoModelForSequenceClassification

    with torch.device("meta"):
        return AutoModelForSequenceClassification.from_config(config).num_parameters()


def _shown(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _reference(row: Row) -> str:
    """What the row holds as an answer, if anything, to be shown beside the model's."""
    known: Any = next((row[name] for name in ("completion", "chosen", "answer") if row.get(name) is not None), "")
    if isinstance(known, list) and known and isinstance(known[-1], dict) and isinstance(known[-1].get("content"), str):
        known = known[-1]["content"]
    text = known if isinstance(known, str) else json.dumps(known, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode()  # half of a surrogate pair cannot be written
