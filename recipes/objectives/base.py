"""What every objective answers: which rows it reads, which head it trains, with which trainer, and how it measures."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import UserError

if TYPE_CHECKING:
    from ...modeling import AnyformerConfig
    from ..adapters import AdapterPlan
    from ..data import Mixture, Splits
    from ..evaluation import Sample
    from ..held_rows import HeldRows
    from ..schema import Recipe
    from ..tokens.packing import TrainingRows
    from ..tokens.report import TokenizedData, Tokenizing
    from ..tokens.views import RowView

Row = dict[str, Any]

# What becomes of rows that are too long under `data.truncation`.
LONG_ROWS = {
    "drop": "longer rows are left out",
    "keep_start": "longer rows are cut at their end",
    "keep_end": "longer rows are cut at their beginning",
    "split": "longer rows are split into several",
}


class Objective:
    """One run's objective.

    A subclass says what it needs as class attributes and overrides the methods below in the order in which a run
    calls them: `configure` and `prepare` before a weight is loaded, `begin`, `trainer`, `measure`, `samples` and
    `finish` with the model.

    Attributes:
        head: key of `modeling.HEADS`: what is trained and saved, unless `makes` says otherwise.
        formats: forms of rows it reads, see `data.load_splits`.
        task_type: PEFT's name for the head.
        shown: names of the held-out figures, in the order of the tables; the first is the one training must move.
        higher_is_better: of that first figure.
        passes: forward passes of a step beyond the one that is learned from, as of a reference model.
        flops_a_token: of a step, about, for what is trained beside the model.
        reads_batches_alone: a step passes the rows of its batch through models of the trained one's architecture and
            computes nothing else, so that its FLOPs can be counted.
        samples_its_data: it trains on answers that the model gives, so a step may hold nothing to learn.
        unmoved: why a run may have trained nothing, as the end of a message.
        preview_tokens: tokens of a row that a run's preview shows; None: all.
    """

    head: ClassVar[str] = "causal_lm"
    task_type: ClassVar[str] = "CAUSAL_LM"
    # These three may depend on the recipe.
    formats: tuple[str, ...] = ()
    shown: tuple[str, ...] = ("loss", "perplexity")
    higher_is_better: bool = False
    samples_its_data: ClassVar[bool] = False
    reads_batches_alone: ClassVar[bool] = True
    unmoved: ClassVar[str] = "No gradient reached them"
    preview_tokens: ClassVar[int | None] = None
    passes: int = 0
    flops_a_token: int = 0
    mixture: "Mixture | None" = None  # of the rows that are left, where sources have weights
    held_rows: "HeldRows | None" = None  # of the last `measure`, where its figures are kept row by row

    def __init__(self, recipe: "Recipe", arguments: Any, config: "AnyformerConfig", tokenizer: Any) -> None:
        self.recipe, self.arguments, self.config, self.tokenizer = recipe, arguments, config, tokenizer

    @property
    def options(self) -> Any:
        """The recipe's `objective` section."""
        return self.recipe.objective

    @property
    def max_length(self) -> int:
        """The longest row in tokens: the trainer's or the section's own setting, else the model's longest.

        A soft prompt takes its positions from the model's. A default of the trainer's that nobody asked for does not
        exceed what the model has.

        Raises:
            UserError: the recipe's setting is beyond the model's positions.
        """
        virtual = self.recipe.adapter.virtual_tokens
        if not hasattr(self.arguments, "max_length"):
            given = getattr(self.options, "max_length", None)
            return checked_length(given, "objective.max_length", self.config, virtual)
        longest = checked_length(self.recipe.train.get("max_length"), "train.max_length", self.config, virtual)
        return min(longest, self.arguments.max_length or longest)

    @property
    def behind_soft_prompt(self) -> int:
        """The longest text that a soft prompt stands before, in tokens.

        Raises:
            UserError: with the soft prompt it is beyond the model's positions.
        """
        return self.max_length

    @classmethod
    def makes(cls) -> str:
        """What a run leaves: its `head`, or the name of what is no model by itself."""
        return cls.head

    @property
    def auto_class(self) -> str:
        """The Auto class that opens what is saved."""
        from ...modeling import HEADS
        from ..models import auto_class_of

        return auto_class_of(HEADS[self.head].__name__) or "AutoModel"

    def plan_of(self, config: "AnyformerConfig") -> "AdapterPlan":
        """What is trained of a model with such a config, or beside it.

        Raises:
            UserError: an adapter that the model cannot have.
        """
        from ..adapters import plan_adapter

        return plan_adapter(config, self.recipe.adapter, self)

    def configure(self, splits: "Splits") -> None:
        """Write into the config what only the data tell, such as the number of labels."""

    def set_start_token(self) -> None:
        """Give the decoder of an encoder-decoder a token to start from: a checkpoint's own; of a new model the one that
        the recipe's `model.config` names, the tokenizer's bos, or, as T5 does it, the padding token."""
        if self.config.architecture != "encoder-decoder":
            return
        model = self.recipe.model
        if self.config.decoder_start_token_id is None or (
            model.preset and "decoder_start_token_id" not in model.config
        ):
            bos = self.tokenizer.bos_token_id
            self.config.decoder_start_token_id = self.tokenizer.pad_token_id if bos is None else bos

    def prepare(self, rows: Sequence[Row]) -> "TokenizedData":
        """Rows to a data set that the trainer takes, and what became of them.

        Raises:
            UserError: rows that cannot be used, or none left.
        """
        from ..tokens.cache import tokens_of

        data = self.recipe.data
        return tokens_of(self.tokenizing(), rows, self.tokenizer, num_proc=data.num_proc, cache=data.cache)

    def tokenizing(self) -> "Tokenizing":
        """The function that makes tokens of rows, and all that its outcome depends on beside rows and tokenizer."""
        raise NotImplementedError

    def beside(self) -> dict[str, int]:
        """Parameters that are held beside the trained model, untrained, by what they are, such as a reference."""
        return {}

    def prepare_training(self, splits: "Splits") -> "TokenizedData":
        """`prepare` of the training rows; those of sources with weights by themselves, so that it is known how many
        rows each has left.

        Raises:
            UserError: as `prepare`.
        """
        rows: Any = splits.train  # a stream only where the objective reads rows once, see `cross_checks`
        if splits.mixture is None:
            return self.prepare(rows)
        from ..tokens.report import mixed

        parts = []
        for source, rows in zip(splits.report.by_source, splits.train_by_source, strict=True):
            try:
                parts.append(self.prepare(rows))
            except UserError as error:
                raise UserError(f"data.source {source.name}: {error}") from error
        self.mixture = splits.mixture.resized([len(part.dataset) for part in parts])
        return mixed(parts, self.mixture.sizes, self.mixture.rows_per_epoch)

    def training_rows(self, data: Any) -> "TrainingRows | None":
        """The data set of `prepare_training` as the trainer gets it where epochs differ or rows are packed; None: as
        it is."""
        from ..tokens.packing import TrainingRows

        return TrainingRows(data, **self.drawn) if self.mixture else None

    @property
    def drawn(self) -> dict[str, Any]:
        """Arguments of `TrainingRows`: which rows an epoch holds, and how many epochs there will be."""
        if self.mixture is None:
            return {}

        def epochs(rows: int) -> int:
            from ..arguments import rows_a_step

            arguments = self.arguments
            batch = rows_a_step(arguments)
            steps = rows // batch or 1 if arguments.dataloader_drop_last else math.ceil(rows / batch)
            limit = arguments.max_steps / steps if arguments.max_steps > 0 else arguments.num_train_epochs
            return math.ceil(limit)

        return {"drawn": self.mixture.epoch, "epochs": epochs}

    def sequences(self, prepared: "TokenizedData") -> int:
        """What a batch is counted in, of one epoch: rows, unless they are packed."""
        packed = self.training_rows(prepared.dataset)
        return prepared.report.rows_kept if packed is None else len(packed)

    @property
    def long_rows(self) -> str:
        """What becomes of rows that are too long, in words."""
        return LONG_ROWS[self.recipe.data.truncation]

    def plan_lines(self) -> list[tuple[str, str]]:
        """What the plan says of model and data beyond their sizes, as (name, value)."""
        extension = self.recipe.model.context_extension
        if extension is None:
            return []
        return [("context", f"{extension.length:,} tokens by {extension.method}: {self.config.rope_parameters}")]

    def view(self, row: Row) -> "RowView":
        """How a row of the tokenised data set is shown and counted."""
        from ..tokens.views import Length, RowView, causal

        sequence = causal(row)
        return RowView((sequence,), lengths={"row": Length(len(sequence.ids), self.max_length)})

    def preview(self, prepared: "TokenizedData", count: int) -> list[str]:
        """Some rows as text, what is trained on between ⟦ and ⟧."""
        from ..tokens.views import row_text

        rows = (prepared.dataset[index] for index in range(min(count, len(prepared.dataset))))
        return [row_text(self.view(row), self.tokenizer, limit=self.preview_tokens) for row in rows]

    def begin(self, model: Any) -> Any:
        """What is trained, from the model as it was loaded: that itself, or what is to be put beside it."""
        return model

    def trainer(self, model: Any, train: Any, held_out: Any, adapter: Any) -> Any:
        """The trainer; `adapter` is a PEFT config to attach, or None."""
        raise NotImplementedError

    def thorough_checks(self, trainer: Any) -> dict[str, str]:
        """The costly checks before the first step: name -> "passed", or why it does not apply.

        Raises:
            UserError: one fails.
        """
        from ..flight_checks import thorough_checks

        return thorough_checks(trainer)

    def measure(self, model: Any, rows: Sequence[Row], prepared: "TokenizedData") -> dict[str, float]:
        """Figures on held-out rows, `shown` among them, and "rows"; the same model gives the same figures."""
        raise NotImplementedError

    def samples(self, model: Any, rows: Sequence[Row]) -> "list[Sample]":
        """Answers to look at; by default the greedy ones to held-out prompts."""
        from ..evaluation import sample_answers

        options = self.recipe.eval
        return sample_answers(model, self.tokenizer, rows, count=options.samples, max_new_tokens=options.max_new_tokens)

    def remarks(self, metrics: dict[str, Any]) -> list[str]:
        """Warnings on the result, beyond that its first figure did not move; `metrics` are those of the run."""
        return []

    def finish(self, model: Any) -> None:
        """Last changes before the model is saved: a model that generates stops where its training data do."""
        from ..tokens.supervised import stop_ids

        if self.head in ("causal_lm", "seq2seq_lm"):
            stops = stop_ids(self.tokenizer)
            model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]
            model.generation_config.pad_token_id = self.tokenizer.pad_token_id

    def check_saved(self, model: Any) -> None:
        """Look at the saved model as it was opened again.

        Raises:
            UserError: it is not what was meant to be saved.
        """
        from ..flight_checks import check_stops
        from ..tokens.supervised import stop_ids

        if self.head in ("causal_lm", "seq2seq_lm"):
            check_stops(model, stop_ids(self.tokenizer))

    def save_extra(self, trainer: Any, folder: Any) -> None:
        """Write beside the model what belongs to the result and is no part of the model, such as a value head."""

    def try_out(self, model: Any, rows: Sequence[Row]) -> dict[str, Any]:
        """Use the saved model, as it was opened again, for what it was made: figures, and under "words" the same for
        people; nothing where the held-out measure says all."""
        return {}

    def next_steps(self, folder: Any) -> list[str]:
        """Commands that a finished run leads to."""
        return [f"anyformer chat {folder}"] if self.head == "causal_lm" and self.tokenizer.chat_template else []

    def reproduced(self, again: dict[str, float], after: dict[str, float]) -> bool:
        """Whether the saved model, opened again, measures what the trained one did."""
        name = self.shown[0]
        return abs(again[name] - after[name]) <= 1e-4


def checked_length(limit: int | None, where: str, config: "AnyformerConfig", virtual_tokens: int = 0) -> int:
    """`limit`, or the model's longest where it is None.

    Args:
        virtual_tokens: places that a soft prompt takes.

    Raises:
        UserError: the limit is beyond the model's positions.
    """
    longest = config.max_position_embeddings - virtual_tokens
    if limit is not None and limit > longest:
        less = f" and the soft prompt takes {virtual_tokens} of them" if virtual_tokens else ""
        scale = config.position_embedding == "rope"
        raise UserError(
            f"{where} is {limit}, but the model has positions for {config.max_position_embeddings} tokens{less}: lower "
            f"it{', or scale the rotary embedding in model.config.rope_parameters' if scale else ''}"
        )
    if longest < 2:
        raise UserError(
            f"adapter.num_virtual_tokens: {virtual_tokens} leave no place for text in {longest + virtual_tokens}"
        )
    return limit or longest
