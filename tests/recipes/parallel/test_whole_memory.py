"""How the memory of processes grows while a sharded model is put together, by the kernel's own count."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

pytestmark = pytest.mark.slow
WORKER = str(Path(__file__).with_name("memory_worker.py"))
LAYERS, WIDTH = 6, 1024


@pytest.mark.parametrize("file_bytes", [10**9, 50 * 10**6], ids=["one file", "several"])
def test_no_process_holds_more_than_its_part_and_one_group(zygote, tmp_path, file_bytes):
    """A model of 260 MB in two processes; FSDP2 gathers a layer of 42 MB at a time, consolidation less.

    A tensor is held twice for a moment: as the processes' parts of it and put together. Beyond that the margin is for
    8 MB: config files, the buffers in which gloo sends, and the kernel's count, which is 64 pages a core behind.
    """
    if shutil.disk_usage(tmp_path).free < 10**9:
        pytest.skip("needs 1 GB of disk")
    arguments = [str(tmp_path), str(LAYERS), str(WIDTH), str(file_bytes)]
    done = zygote.run(arguments, script=WORKER, processes=2)
    assert done == [0, 0], zygote.log.read_text()[-4000:]
    layer = (4 * WIDTH * WIDTH + 3 * WIDTH * 2 * WIDTH + 2 * WIDTH) * 4
    whole = LAYERS * layer + (2 * 1024 * WIDTH + WIDTH) * 4
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["part"] == whole // 2 and found["before"] > found["part"]
        grown = found["peak"] - found["before"]
        assert grown <= 2 * found["tensor"] + 8 * 2**20 < layer, f"{grown:,} bytes"
    files = sorted(tmp_path.glob("model*.safetensors"))
    assert (len(files) == 1) == (file_bytes > whole) and sum(f.stat().st_size for f in files) > whole
    # Each parameter with its number, in the order of the file's own model.
    values = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                tensor = opened.get_tensor(name)
                assert (tensor == tensor.flatten()[0]).all(), name
                values[name] = float(tensor.flatten()[0])
    assert sorted(values.values()) == list(range(len(values))) and len(values) == LAYERS * 9 + 3
    for file in files:
        file.unlink()
