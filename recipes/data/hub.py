"""Rows of data sets on the Hub, through the library `datasets`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import UserError
from .faults import BadRow
from .parsing import arrow_rows
from .sources import Source

# Rows that are decoded at once.
_BATCH = 64


def hub_rows(source: Source, *, streaming: bool) -> Iterator[tuple[int, dict[str, Any] | BadRow]]:
    """The rows of a data set's split, counted from 1, in the types that Arrow gives: images stay bytes.

    Args:
        streaming: read over the network without a copy on this machine.

    Raises:
        UserError: no such data set, configuration, split or revision, or no way to it.
    """
    import pyarrow

    number = 0
    with _told(source):
        data = _load(source, streaming)
        # As Arrow: nothing is decoded, and nothing becomes an image or an array.
        for batch in data.with_format("arrow").iter(batch_size=_BATCH):
            table = batch if isinstance(batch, pyarrow.Table) else pyarrow.table(batch)
            for row in arrow_rows(table):
                number += 1
                yield number, row
    if not number:
        yield 0, BadRow("the split is empty: it holds no rows")


def _load(source: Source, streaming: bool) -> Any:
    from datasets import load_dataset

    return load_dataset(source.where, source.config, split=source.split, revision=source.revision, streaming=streaming)


@contextmanager
def _told(source: Source) -> Iterator[None]:
    """Faults of the library and the network as one line on the setting."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the library lets pass whatever its readers and the network raise
        raise UserError(f"{source.setting}: {source.name}: {_reason(error, source)}") from error


def _reason(error: Exception, source: Source) -> str:
    from datasets import exceptions
    from huggingface_hub import errors

    chain = list(_causes(error))
    text = " ".join(str(error).split())
    if any(isinstance(e, errors.GatedRepoError) for e in chain) or "gated dataset" in text:
        return (
            f"is gated: ask for access on https://huggingface.co/datasets/{source.where}, and log in with "
            "`hf auth login` or HF_TOKEN"
        )
    if any(isinstance(e, errors.OfflineModeIsEnabled) for e in chain) or "offlinemode" in text.lower():
        return "is not on this machine, and HF_HUB_OFFLINE forbids to fetch it"
    revision = source.revision and "revision" in text.lower()
    if revision or any(isinstance(e, errors.RevisionNotFoundError) for e in chain):
        return f"has no revision {source.revision!r}"
    if isinstance(error, exceptions.DataFilesNotFoundError):
        return f"holds no files that can be read: {text}"
    if any(isinstance(e, errors.RepositoryNotFoundError) for e in chain) or isinstance(
        error, exceptions.DatasetNotFoundError
    ):
        return "no such data set on the Hub, or one that is private: check the name, and log in with `hf auth login`"
    if known := re.search(r"(?:Unknown|Bad) split.*?(?:Should be one of|Available splits:) \[(.*?)\]", text):
        return f"has no split {source.split!r}; it has {known[1].replace(chr(39), '')}"
    if known := re.search(r"BuilderConfig .* not found\. Available: \[(.*?)\]", text):
        return f"has no configuration {source.config!r}; it has {known[1].replace(chr(39), '')}"
    if known := re.search(r"Config name is missing.*?available configs: \[(.*?)\]", text):
        return f"has several configurations: set config to one of {known[1].replace(chr(39), '')}"
    if isinstance(error, exceptions.DatasetGenerationError):
        # What Arrow says may quote a row.
        return (
            f"is not one table: its files hold several kinds of columns or values ({type(chain[-1]).__name__}). "
            "Download them and give their path: files are read row by row"
        )
    if any(isinstance(e, ConnectionError | TimeoutError) or type(e).__module__.startswith("httpx") for e in chain):
        return f"the Hub cannot be reached ({type(error).__name__}): check the network"
    return f"cannot be read: {type(error).__name__}: {text[:300]}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__
