"""The fixture `hub`: a fresh loopback Hub, and an environment in which a client process talks to it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .server import HubServer


@dataclass(frozen=True)
class Hub:
    """A running server, a write token of the user `alice` on it, and the environment of a client process."""

    server: HubServer
    token: str
    env: dict[str, str]


def run_python(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run `code` in a process of its own: the client reads HF_ENDPOINT once, when it is imported."""
    return subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    foreign = ("HF_", "HUGGING_FACE_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    env = {key: value for key, value in os.environ.items() if not key.upper().startswith(foreign)}
    with HubServer() as server:
        token = server.add_token("alice", role="write")
        env |= {
            "HF_ENDPOINT": server.endpoint,
            "HF_TOKEN": token,
            "HF_HOME": str(tmp_path / "hf_home"),
            "HF_HUB_DISABLE_XET": "1",  # plain large-file storage, which is what the server speaks
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        yield Hub(server, token, env)
