"""What a whole checkpoint holds: the size and SHA-256 of each of its files, written with it.

Also how checkpoints without such a list are judged. Nothing here imports torch: a run's folder is looked at before it.
"""

import hashlib
import json
import re
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
# Threads that hash: hashlib lets others run meanwhile.
_THREADS = 4
# Folders of shards, under Accelerate's names, and the files of processes in them, which `.metadata`, a pickle, holds as
# plain text.
SHARDED_MODEL, SHARDED_OPTIMIZER = _SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
_SHARD = re.compile(rb"__(\d+)_\d+\.distcp")
# Bytes of the record that ends an archive without a comment.
_ARCHIVE_END = 22


def write_manifest(folder: Path) -> None:
    """List the files of a folder, but for the list itself, in its `manifest.json`."""
    paths = _files(folder)
    entries = {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _digests(paths), strict=True)
    }
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")


def missing_part(checkpoint: Path, *, checksums: bool = False) -> str:
    """What a checkpoint lacks to be resumed from exactly; empty where it is complete.

    Args:
        checksums: read every file and compare it with the list, where there is one.
    """
    for part, found in _parts(checkpoint).items():
        if not found:
            return f"{part} is missing or damaged" if "." in part else f"{part} are missing"
    if (checkpoint / MANIFEST).is_file():
        return _differing(checkpoint, checksums=checksums)
    return _damaged(checkpoint)


def _parts(checkpoint: Path) -> dict[str, bool]:
    """What every checkpoint needs, by the name it has in the commonest layout, and whether it is there."""

    def there(*patterns: str) -> bool:
        return any(next(checkpoint.glob(pattern), None) is not None for pattern in patterns)

    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        state = True
    except (OSError, ValueError):
        state = False
    engine = there("global_step*/*")  # DeepSpeed's, which holds weights, optimizer and schedule
    sharded = ("pytorch_model_fsdp*/.metadata", "pytorch_model_fsdp*.bin")
    return {
        STATE: state,
        "optimizer.pt": engine or there("optimizer.pt", "optimizer.bin", "optimizer_*/.metadata", "optimizer_*.bin"),
        "scheduler.pt": engine or there("scheduler.pt"),
        "rng_state.pth": there("rng_state*.pth"),
        "the weights": engine or there("model*.safetensors", "adapter_model*.safetensors", *sharded),
    }


def _differing(checkpoint: Path, *, checksums: bool) -> str:
    """The first file that is not as the list says."""
    try:
        entries: dict[str, Any] = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        sizes = {name: int(entry["size"]) for name, entry in entries.items()}
        expected = [str(entry["sha256"]) for entry in entries.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    for name, size in sizes.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            return f"{name} is missing or damaged"
    if checksums:
        found = _digests(checkpoint / name for name in sizes)
        for name, digest, wanted in zip(sizes, found, expected, strict=True):
            if digest != wanted:
                return f"{name} is damaged: its checksum is not the one it was written with"
    return ""


def _damaged(checkpoint: Path) -> str:
    """The first file of a checkpoint without a list that cannot be what it should be."""
    from safetensors import SafetensorError, safe_open

    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
        paths = checkpoint.glob(name.replace(".p", "*.p"))
        if not all(zipfile.is_zipfile(path) for path in paths):
            return f"{name} is missing or damaged"
    for folder in _SHARDED:
        if (checkpoint / folder).is_dir() and not _shards_whole(checkpoint / folder):
            return f"{folder} is missing or damaged"
    for number in _processes(checkpoint):
        if not (checkpoint / f"rng_state_{number}.pth").is_file():
            return f"rng_state_{number}.pth is missing or damaged"
    for path in checkpoint.glob("*.safetensors"):
        try:
            with safe_open(path, framework="np"):
                pass
        except (OSError, SafetensorError):
            return f"{path.name} is damaged"
    return ""


def _shards_whole(folder: Path) -> bool:
    """Whether each file that `.metadata` names is there to its end, where a tensor ends, as torch saves one."""
    shards = [folder / match[0].decode() for match in _SHARD.finditer((folder / ".metadata").read_bytes())]
    return bool(shards) and all(path.is_file() and _ends_as_archive(path) for path in set(shards))


def _ends_as_archive(path: Path) -> bool:
    """Of a file with many archives one after another: whether the last is there to its end. zipfile takes any."""
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - _ARCHIVE_END, 0))
        return file.read().startswith(b"PK\5\6")


def _processes(checkpoint: Path) -> range:
    """Numbers of the processes that wrote a checkpoint, as far as its files tell; none of one that one wrote."""
    if (checkpoint / "rng_state.pth").is_file():
        return range(0)
    told = [1]  # two at least
    for name in _SHARDED:
        if (metadata := checkpoint / name / ".metadata").is_file():
            told += [int(match[1]) for match in _SHARD.finditer(metadata.read_bytes())]
    numbers = [path.stem.removeprefix("rng_state_") for path in checkpoint.glob("rng_state_*.pth")]
    return range(max(told + [int(number) for number in numbers if number.isdigit()]) + 1)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def _digests(paths: Iterable[Path]) -> list[str]:
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(_digest, paths))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
