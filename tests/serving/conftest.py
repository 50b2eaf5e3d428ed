"""A model that has learned a few conversations by heart, and servers of it in processes of their own."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

MANY = "one two three four five " * 6
CONVERSATIONS = [
    ["one", "two three four five"],
    ["one", "two three four five", "the cat", "sat on the mat"],
    ["the dog", "sat on the log"],
    ["the dog", "sat on the log", "one", "three"],  # another answer than without the first turn
    ["count", MANY.strip()],
    ["log", "the dog, the mat, the cat"],
]


def messages(*turns: str) -> list[dict[str, str]]:
    """The user's turn first, then by turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


@pytest.fixture(scope="session")
def learned(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`folder`, a saved Anyformer folder; `tokenizer`; `answer(turns, n, **options)`, that of `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from anyformer import AnyformerConfig, AnyformerForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    torch.manual_seed(0)
    config = AnyformerConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = AnyformerForCausalLM(config).train()
    rows = [tokenizer.apply_chat_template(messages(*turns), return_dict=True)["input_ids"] for turns in CONVERSATIONS]
    batch = tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt")
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(250):
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    folder = tmp_path_factory.mktemp("learned") / "model"
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    opened: Any = AutoModelForCausalLM.from_pretrained(folder)

    def answer(turns: list[dict[str, str]], max_new_tokens: int = 64, **options: Any) -> str:
        options = {"do_sample": False, "tokenizer": tokenizer} | options
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        output = opened.generate(**ids, max_new_tokens=max_new_tokens, **options)
        return tokenizer.decode(output[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)

    return SimpleNamespace(folder=folder, tokenizer=tokenizer, answer=answer)


def post(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and text of a raw request; a body that is no bytes is sent as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | (headers or {})
    request = urllib.request.Request(url, data, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


TRANSFORMERS = [str(Path(sys.executable).with_name("transformers"))]
ANYFORMER = [sys.executable, "-c", "from anyformer.scripts.cli import main; main()"]
SERVERS = {
    "transformers": (TRANSFORMERS, ["--trust-remote-code"]),
    "transformers, batching": (TRANSFORMERS, ["--trust-remote-code", "--continuous-batching"]),
    "anyformer": (ANYFORMER, []),
    "anyformer, batching": (ANYFORMER, ["--continuous-batching"]),
}


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        url: its root; model: the name that it answers to.
        checks: it refuses bad requests itself.
        batching: it runs continuous batching.
    """

    url: str
    model: str
    checks: bool
    batching: bool
    process: subprocess.Popen


def environment(home: Path, command: list[str]) -> dict[str, str]:
    """Of a process without a hub; the library's own finds the project nowhere but where it is installed."""
    found = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return found | {"PYTHONPATH": ""} if command == TRANSFORMERS else found


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def servers(learned: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """All of `SERVERS`, started side by side."""
    home, running, logs = tmp_path_factory.mktemp("home"), {}, {}
    for name, (command, options) in SERVERS.items():
        port, logs[name] = free_port(), home / f"{name}.log"
        arguments = ["serve", str(learned.folder), "--host", "127.0.0.1", "--port", str(port), *options]
        with logs[name].open("w") as log:
            process = subprocess.Popen(
                [*command, *arguments], stdout=log, stderr=log, env=environment(home, command), cwd=home
            )
        kind = {"checks": command == ANYFORMER, "batching": "--continuous-batching" in options}
        running[name] = Server(f"http://127.0.0.1:{port}", str(learned.folder), process=process, **kind)
    try:
        for name, server in running.items():
            _wait_for(server, logs[name])
        yield running
    finally:
        for server in running.values():
            server.process.terminate()
        for server in running.values():
            server.process.wait(30)


def _wait_for(server: Server, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.process.poll() is None, log.read_text()[-3000:]
        try:
            with urllib.request.urlopen(f"{server.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"no answer in 300 seconds: {log.read_text()[-3000:]}")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, servers: dict[str, Server]) -> Server:
    return servers[request.param]
