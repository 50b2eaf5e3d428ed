"""Memory and speed of `anyformer tokenize` on a corpus of any size.

    python benchmarks/tokenize_memory.py --megabytes 1024

The corpus is cut out of Python's own library, other pieces each time, into a temporary JSONL file; the tokenizer is a
byte-level BPE of 16,384 tokens that is trained on the library first. Each side tokenises the whole corpus in a process
of its own: in one thread, with the threads of the library `tokenizers`, and in worker processes, which is the default.
Memory is how far the run lifts the process's resident memory over where it was after its imports, and beside it the
largest worker's. The shards of all sides must be the same.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

# What is imported here the workers import too: they run this file's top. So the heavier imports stand in the functions.
SIDES = {"one thread": "1", "threads": "1", "processes": ""}
VOCABULARY = 16384
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def write_corpus(path: Path, size: int) -> int:
    """Documents of 1 to 16 thousand characters, `size` bytes of text in all; returns their number."""
    from anyformer.recipes.data.documents import Corpus

    texts = [document.text for document in Corpus(["stdlib-text"])]
    rng, written, count = random.Random(0), 0, 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            text = texts[rng.randrange(len(texts))]
            start = rng.randrange(max(len(text) - 1000, 1))
            piece = text[start : start + rng.randrange(1000, 16000)]
            if piece.strip():
                file.write(json.dumps({"text": piece}) + "\n")
                written, count = written + len(piece.encode("utf-8")), count + 1
    return count


def resident(name: str, process: str = "self") -> float:
    """MB of a process's resident memory: now ("VmRSS") or at most so far ("VmHWM")."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name}:")), 0) * 1024 / 1e6


def watch_children(found: list[float]) -> None:
    """Note the most that each child has had; what the system reports at its end counts its parent's memory, too."""
    while True:
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                found += [resident("VmHWM", child) for child in (task / "children").read_text().split()]
        time.sleep(0.5)


def measure(folder: Path, side: str) -> None:
    """One side in this process, which does nothing else; prints a line of JSON."""
    from anyformer.recipes.models import read_tokenizer
    from anyformer.recipes.shards.build import write_shards

    tokenizer = read_tokenizer(str(folder / "tokenizer"))
    tokenizer.backend_tokenizer.to_str()
    before, watched = resident("VmRSS"), list[float]()
    threading.Thread(target=watch_children, args=(watched,), daemon=True).start()
    started = time.monotonic()
    workers = int(SIDES[side] or CORES)
    done = write_shards([str(folder / "corpus.jsonl")], folder / "out", tokenizer, workers=workers, overwrite=True)
    seconds = time.monotonic() - started
    busy = sum(resource.getrusage(who).ru_utime for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    found = {
        "before": before,
        "peak": resident("VmHWM") - before,
        "worker": max(watched, default=0.0),
        "workers": workers,
    }
    found |= {"seconds": seconds, "busy": busy, "bytes": done.text_bytes, "tokens": done.index.tokens}
    print(json.dumps(found | {"digest": done.index.digest}))


def described(side: str, found: dict[str, float]) -> str:
    seconds = found["seconds"]
    speed = f"{found['bytes'] / seconds / 1e6:.2f} MB and {found['tokens'] / seconds:,.0f} tokens a second"
    beside = f" and {found['workers']} workers of {found['worker']:.0f} MB" if found["workers"] > 1 else ""
    memory = f"{found['peak']:.0f} MB over {found['before']:.0f}{beside}"
    return f"{side:10} {seconds:.0f} s, {found['busy']:.0f} s of the processors; {speed}; {memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=1024)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(Path(options.measure[0]), options.measure[1])
        return
    from anyformer.recipes.tokens.trained_tokenizer import write_tokenizer

    digests = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for line in write_tokenizer(["stdlib-text"], folder / "tokenizer", "bpe", VOCABULARY):
            print(line)
        count = write_corpus(folder / "corpus.jsonl", options.megabytes * 1_000_000)
        print(
            f"{options.megabytes} MB in {count:,} documents; {CORES} cores, load {os.getloadavg()[0]:.1f}",
            flush=True,
        )
        for side in options.sides:
            command = [sys.executable, __file__, "--measure", name, side]
            environment = os.environ | {"TOKENIZERS_PARALLELISM": str(side == "threads").lower()}
            done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
            found = json.loads(done.stdout.splitlines()[-1])
            digests.add(found["digest"])
            print(described(side, found), flush=True)
    assert len(digests) == 1, "the sides wrote different shards"


if __name__ == "__main__":
    main()
