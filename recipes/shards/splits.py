"""A recipe's `data` section that names folders of token shards."""

from collections.abc import Sequence
from typing import Any

from ..data.splits import DataReport, DataSection, Splits
from ..errors import UserError
from .format import is_token_folder
from .reader import TokenShards
from .selection import TokenDocuments, everything, hold_out, sample

FORMAT = "tokens"


def names_shards(section: DataSection) -> bool:
    """Whether a source of training or held-out rows is a folder of token shards, or ought to be one."""
    named = [name for source in (section.source, section.eval_source) for name in _names(source)]
    return section.format == FORMAT or any(is_token_folder(name) for name in named)


def load_token_splits(section: DataSection, accepts: Sequence[str] | None = None) -> Splits:
    """Documents to train on and documents held out, of folders of token shards; nothing of them is read.

    `max_rows` takes the first documents that are to be trained on, `max_eval_rows` a sample of those held out.

    Raises:
        UserError: a folder or setting that cannot be used, or nothing left on one side.
    """
    if accepts is not None and FORMAT not in accepts:
        raise UserError(
            f"data.source: {section.source} holds token shards, which the objective pretrain alone reads: set "
            "objective.kind: pretrain, or name the texts themselves"
        )
    if section.format not in ("auto", FORMAT):
        raise UserError(f"data.format: {section.source} is {FORMAT}, not {section.format}: remove the key")
    if section.streaming:
        raise UserError("data.streaming: token shards are read from disk in any case: remove the key")
    if section.columns:
        raise UserError("data.columns: token shards have no columns to rename: remove the key")
    shards = _opened(section.source, "data.source")
    report = DataReport(format=FORMAT, recognised="token shards", sources=[str(shards.folder)])
    report.rows_read = shards.documents
    if section.eval_source:
        other = _opened(section.eval_source, "data.eval_source")
        _check_apart(shards, other)
        train, held = everything(shards), everything(other)
        if section.max_rows and section.max_rows < len(train):
            train = hold_out(shards, 0.0, section.seed, section.max_rows)[0]
        report.eval_sources = [str(other.folder)]
        report.split = f"held-out documents from {other.folder}"
    else:
        train, held = hold_out(shards, section.eval_fraction, section.seed, section.max_rows)
        report.split = "nothing held out (data.eval_fraction is 0)"
        if section.eval_fraction:
            report.split = (
                f"whole documents, about {section.eval_fraction:.3g} of them, chosen by a hash of number and seed "
                f"{section.seed}"
            )
            _check_sides(section, train, held)
    if section.max_eval_rows and len(held) > section.max_eval_rows:
        held = sample(held, section.max_eval_rows, section.seed)
    report.rows_train, report.rows_eval = len(train), len(held)
    return Splits(train, held, report)  # type: ignore[arg-type]  # sequences of rows, not lists


def _names(source: Any) -> list[Any]:
    """The sources; of one with nothing but a path, the path."""
    sources = source if isinstance(source, list) else [source]
    return [item.get("path") if isinstance(item, dict) else item for item in sources]


def _opened(source: Any, setting: str) -> TokenShards:
    names = _names(source)
    settings = sorted({key for item in source if isinstance(source, list) and isinstance(item, dict) for key in item})
    settings = sorted(source) if isinstance(source, dict) else settings
    if extra := [key for key in settings if key != "path"]:
        raise UserError(
            f"{setting}: a folder of token shards has no {', '.join(extra)}: remove what stands beside path"
        )
    if len(names) > 1:
        raise UserError(
            f"{setting}: a folder of token shards cannot stand in a list with others: tokenise all sources into one "
            "folder (anyformer tokenize SOURCE... OUT)"
        )
    if not is_token_folder(names[0]):
        raise UserError(
            f"{setting}: {names[0]} is no folder of token shards: `anyformer tokenize` writes one, and training and "
            "held-out data must both be token shards or both be texts"
        )
    return TokenShards(names[0])


def _check_apart(shards: TokenShards, other: TokenShards) -> None:
    if other.folder.resolve() == shards.folder.resolve():
        raise UserError(f"data.eval_source: {other.folder} is named in data.source too; it would be trained on.")
    if other.index.tokenizer != shards.index.tokenizer:
        raise UserError(
            f"data.eval_source: {other.folder} was made with another tokenizer (fingerprint "
            f"{other.index.tokenizer[:12]}) than {shards.folder} ({shards.index.tokenizer[:12]}): tokenise one of them "
            "again"
        )


def _check_sides(section: DataSection, train: TokenDocuments, held: TokenDocuments) -> None:
    if not (len(train) and len(held)):
        raise UserError(
            f"data.eval_fraction = {section.eval_fraction} with data.seed = {section.seed} leaves {len(train)} "
            f"documents to train on and {len(held)} held out: choose another fraction or seed, name a folder in "
            "data.eval_source, or set data.eval_fraction to 0"
        )
