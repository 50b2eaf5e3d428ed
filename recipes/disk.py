"""Where the suite keeps what outlives a run, and faults of writing, told apart from other errors."""

import errno
import os
from pathlib import Path

# What the user can mend: room, quota, size limits, rights.
_FULL = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up"}
_REASONS = _FULL | {
    errno.EFBIG: "a file would be larger than the file system or `ulimit -f` allows",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "this user may not write there",
    errno.EPERM: "this user may not write there",
}
# What torch and safetensors make of them: exceptions of their own, without an errno.
_TEXTS = {
    "No space left": _REASONS[errno.ENOSPC],
    "Disk quota exceeded": _REASONS[errno.EDQUOT],
    "File too large": _REASONS[errno.EFBIG],
    "Read-only file system": _REASONS[errno.EROFS],
    "Permission denied": _REASONS[errno.EACCES],
    "PytorchStreamWriter": "a file was cut short, as on a full disk",
    "inline_container": "a file was cut short, as on a full disk",
    "file write failed": "a file was cut short, as on a full disk",
}


def cache_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anyformer"


def write_fault(error: BaseException) -> str:
    """Why a write failed, in words; empty where the error is none that the user can mend."""
    if isinstance(error, OSError) and error.errno in _REASONS:
        return _REASONS[error.errno]
    if isinstance(error, OSError | RuntimeError) or type(error).__name__ in ("SafetensorError", "CheckpointException"):
        return next((reason for mark, reason in _TEXTS.items() if mark in str(error)), "")
    return ""
