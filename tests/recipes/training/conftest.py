"""The process that starts others."""

import sys

import pytest
from killing import Zygote


@pytest.fixture(scope="module")
def zygote(tmp_path_factory):
    if sys.platform != "linux":
        pytest.skip("forks a process with torch in it, and reads /proc")
    with Zygote(tmp_path_factory.mktemp("zygote") / "log") as started:
        yield started
