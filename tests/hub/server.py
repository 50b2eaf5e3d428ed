"""A model Hub on 127.0.0.1 that speaks the HTTP protocol of the Hugging Face Hub.

It stands in for the server only: the real `huggingface_hub` talks to it, with nothing of the client replaced.
Repositories live in memory, one immutable tree of files a commit. Whatever a test wants to see afterwards is
plain data: `hub.repos`, `hub.objects` and the request log.

    with HubServer() as hub:
        token = hub.add_token("alice", role="write")
        ...  # a client with HF_ENDPOINT=hub.endpoint and HF_TOKEN=token
        assert hub.files("alice/model") == {...}
"""

import base64
import hashlib
import json
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

REGULAR_LIMIT = 10 * 1024 * 1024
GITATTRIBUTES = "".join(
    f"*.{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in ("bin", "gguf", "pt", "safetensors")
).encode()
BAD_TOKEN = "Invalid credentials in Authorization header"


class HubError(Exception):
    """An HTTP error answer: status, text, and the code that the client reads from `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str | None = None, **body: Any) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.body = status, message, code, body


@dataclass(frozen=True)
class Entry:
    """One file of a commit. `sha256` is set for a file in large-file storage; `data` holds any other's bytes."""

    size: int
    oid: str
    data: bytes | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Commit:
    sha: str
    parent: str | None
    title: str
    tree: dict[str, Entry]
    created: float


@dataclass
class Repo:
    """A repository; that of a data set has an id with `datasets/` before its name. Of a gated one the files are kept
    from whoever cannot write to it."""

    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit_at(self, revision: str) -> Commit:
        sha = self.branches.get(revision, revision)
        if sha not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[sha]

    def add_commit(self, branch: str, title: str, tree: dict[str, Entry]) -> Commit:
        parent = self.branches.get(branch)
        seed = repr((parent, title, sorted((path, entry.oid) for path, entry in tree.items()), len(self.commits)))
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[sha] = Commit(sha, parent, title, tree, time.time())
        self.branches[branch] = sha
        return self.commits[sha]


@dataclass(frozen=True)
class Token:
    """`orgs` maps an organisation to the user's role in it; `scopes` (fine-grained only) names the owners and
    repositories that the token may write."""

    user: str
    role: str
    orgs: dict[str, str]
    scopes: tuple[str, ...] = ()

    def may_read(self, repo_id: str) -> bool:
        owner = repo_id.removeprefix("datasets/").split("/")[0]
        if self.role == "fineGrained":
            return repo_id in self.scopes or owner in self.scopes
        return owner == self.user or owner in self.orgs

    def may_write(self, repo_id: str) -> bool:
        owner = repo_id.removeprefix("datasets/").split("/")[0]
        if self.role == "fineGrained":
            return repo_id in self.scopes or owner in self.scopes
        return self.role == "write" and (owner == self.user or self.orgs.get(owner) in ("write", "admin"))


@dataclass
class Fault:
    method: str
    match: str
    status: int | None
    times: int
    skip: int
    message: str


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    query: str
    user: str | None
    status: int


def git_blob_oid(data: bytes) -> str:
    """SHA-1 of a git blob, which is how the client recognises a regular file that has not changed."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class HubServer:
    """The server and its state. A context manager; `endpoint` is the value for HF_ENDPOINT."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.tokens: dict[str, Token] = {}
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> "HubServer":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    # What tests use.

    def add_token(
        self, user: str, role: str = "write", orgs: dict[str, str] | None = None, scopes: tuple[str, ...] = ()
    ) -> str:
        """A new token of `user`; `role` is "read", "write" or "fineGrained"."""
        text = "hf_" + secrets.token_hex(17)
        self.tokens[text] = Token(user, role, orgs or {}, scopes)
        return text

    def add_repo(self, repo_id: str, private: bool = True) -> Repo:
        """A repository with the first commit that the Hub makes itself."""
        repo = self.repos[repo_id] = Repo(repo_id, private)
        entry = Entry(len(GITATTRIBUTES), git_blob_oid(GITATTRIBUTES), GITATTRIBUTES)
        repo.add_commit("main", "initial commit", {".gitattributes": entry})
        return repo

    def add_files(self, repo_id: str, files: dict[str, bytes], branch: str = "main") -> None:
        """Commit files by hand; the repository is made, public, where there is none."""
        repo = self.repos.get(repo_id) or self.add_repo(repo_id, private=False)
        repo.branches.setdefault(branch, repo.branches["main"])
        tree = {path: Entry(len(data), git_blob_oid(data), data) for path, data in files.items()}
        repo.add_commit(branch, "files", repo.commit_at(branch).tree | tree)

    def fail_next(
        self,
        method: str,
        match: str = "",
        status: int | None = 500,
        times: int = 1,
        skip: int = 0,
        message: str = "planted fault",
    ) -> None:
        """Answer `status` to the next `times` requests whose path and query hold `match`, after letting `skip` pass.

        `status=None` closes the connection without an answer, as a dying network does.
        """
        self.faults.append(Fault(method, match, status, times, skip, message))

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Path -> content of a revision, without `.gitattributes`."""
        tree = self.repos[repo_id].commit_at(revision).tree
        return {path: self.read(entry) for path, entry in tree.items() if path != ".gitattributes"}

    def requests(self, method: str = "", match: str = "") -> list[Request]:
        """The log, restricted to a method and to paths that hold `match`."""
        return [r for r in self.log if method in ("", r.method) and match in r.path]

    # What the handler uses.

    def read(self, entry: Entry) -> bytes:
        return self.objects[entry.sha256] if entry.sha256 else entry.data or b""

    def take_fault(self, method: str, target: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method != method or fault.match not in target or fault.times == 0:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def repo_for(self, repo_id: str, token: Token | None) -> Repo:
        """The repository if the caller may see it. One that is hidden looks the same as one that is missing."""
        repo = self.repos.get(repo_id)
        if repo is None or (repo.private and not (token and token.may_read(repo_id))):
            if token is None:
                raise HubError(401, "Invalid username or password.", "RepoNotFound")
            raise HubError(404, "Repository not found", "RepoNotFound")
        return repo

    def writable(self, repo_id: str, token: Token | None) -> Repo:
        repo = self.repo_for(repo_id, token)
        if token is None:
            raise HubError(401, "Invalid username or password.")
        if not token.may_write(repo_id):
            raise HubError(403, "Forbidden: you need write access to this repository", "Forbidden")
        return repo


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    # One method a verb: the base class looks them up by name.
    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, *_: object) -> None:
        pass

    def _handle(self) -> None:
        url = urlsplit(self.path)
        body = self._body()
        self.query = {key: values[-1] for key, values in parse_qs(url.query).items()}
        self.token: Token | None = None
        status = 500
        try:
            fault = self.hub.take_fault(self.command, self.path)
            if fault is not None and fault.status is None:
                status = 0
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
                return
            if fault is not None:
                raise HubError(fault.status or 500, fault.message)
            self._authenticate()
            with self.hub.lock:
                status = self._route(url.path, body)
        except HubError as error:
            status = error.status
            headers = {"X-Error-Message": error.message}
            if error.code:
                headers["X-Error-Code"] = error.code
            if error.code == "EntryNotFound" and "commit" in error.body:
                headers["X-Repo-Commit"] = error.body.pop("commit")
            self._json({"error": error.message, **error.body}, status, headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            user = self.token.user if self.token else None
            self.hub.log.append(Request(self.command, unquote(url.path), url.query, user, status))

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _authenticate(self) -> None:
        header = self.headers.get("Authorization")
        if header is None or self.path.startswith("/lfs/"):
            return  # storage urls carry a signature instead
        self.token = self.hub.tokens.get(header.removeprefix("Bearer "))
        if self.token is None:
            raise HubError(401, BAD_TOKEN)

    def _route(self, path: str, body: bytes) -> int:
        for method, pattern, name in _ROUTES:
            match = re.fullmatch(pattern, path)
            if match and self.command in method.split("|"):
                return getattr(self, name)(body, **{key: unquote(v or "") for key, v in match.groupdict().items()})
        raise HubError(404, f"no such endpoint: {self.command} {path}")

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> int:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
        return status

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> int:
        return self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    # Accounts and repositories.

    def whoami(self, body: bytes) -> int:
        token = self.token
        if token is None:
            raise HubError(401, "Invalid username or password.")
        access: dict[str, Any] = {"displayName": "test", "role": token.role}
        if token.role == "fineGrained":
            scoped = [{"entity": {"name": name}, "permissions": ["repo.write"]} for name in token.scopes]
            access["fineGrained"] = {"global": [], "scoped": scoped}
        orgs = [{"type": "org", "name": name, "roleInOrg": role} for name, role in token.orgs.items()]
        return self._json(
            {
                "type": "user",
                "name": token.user,
                "orgs": orgs,
                "auth": {"type": "access_token", "accessToken": access},
            }
        )

    def create_repo(self, body: bytes) -> int:
        payload = json.loads(body)
        if self.token is None:
            raise HubError(401, "Invalid username or password.")
        owner = payload.get("organization") or self.token.user
        repo_id = f"{owner}/{payload['name']}"
        if not self.token.may_write(repo_id):
            raise HubError(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        url = f"{self.hub.endpoint}/{repo_id}"
        if repo_id in self.hub.repos:
            raise HubError(409, "You already created this model repo", url=url)
        self.hub.add_repo(repo_id, private=payload.get("visibility") == "private")
        return self._json({"url": url, "name": repo_id})

    def auth_check(self, body: bytes, repo: str, write: str) -> int:
        (self.hub.writable if write else self.hub.repo_for)(repo, self.token)
        return self._json({})

    def validate_yaml(self, body: bytes) -> int:
        content = json.loads(body)["content"]
        match = re.match(r"\s*---\r?\n(.*?)\n---", content, re.DOTALL)
        if match is None:
            return self._json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata"}]})
        try:
            yaml.safe_load(match[1])
        except yaml.YAMLError as error:
            return self._json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return self._json({"errors": [], "warnings": []})

    def info(self, body: bytes, repo: str, revision: str) -> int:
        found = self.hub.repo_for(repo, self.token)
        commit = found.commit_at(revision or "main")
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(commit.tree)]
        if "blobs" in self.query:
            siblings = [_file_info(path, entry, key="rfilename") for path, entry in sorted(commit.tree.items())]
        counts = {"downloads": 0, "likes": 0, "tags": [], "gated": bool(found.gated), "disabled": False}
        name = repo.removeprefix("datasets/")
        return self._json(
            {"id": name, "modelId": name, "private": found.private, "sha": commit.sha, "siblings": siblings, **counts}
        )

    def refs(self, body: bytes, repo: str) -> int:
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in self.hub.repo_for(repo, self.token).branches.items()
        ]
        return self._json({"branches": branches, "tags": [], "converts": []})

    def create_branch(self, body: bytes, repo: str, branch: str) -> int:
        found = self.hub.writable(repo, self.token)
        if branch in found.branches:
            raise HubError(409, f"Reference already exists: {branch}")
        if branch.startswith("refs/") or ".." in branch or " " in branch:
            raise HubError(400, f"Invalid reference for a branch: {branch}")
        start = (json.loads(body) if body else {}).get("startingPoint") or "main"
        found.branches[branch] = found.commit_at(start).sha
        return self._json({})

    # Writing.

    def preupload(self, body: bytes, repo: str, revision: str) -> int:
        tree = self.hub.writable(repo, self.token).commit_at(revision).tree
        answers = []
        for file in json.loads(body)["files"]:
            binary = b"\0" in base64.b64decode(file["sample"])
            large = binary or file["size"] > REGULAR_LIMIT or file["path"].endswith((".safetensors", ".bin"))
            answer = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            if file["path"] in tree:
                answer["oid"] = tree[file["path"]].sha256 or tree[file["path"]].oid
            answers.append(answer)
        return self._json({"files": answers})

    def lfs_batch(self, body: bytes, repo: str) -> int:
        self.hub.writable(repo, self.token)
        objects = []
        for item in json.loads(body)["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                signed = f"{self.hub.endpoint}/lfs/{item['oid']}?X-Amz-Signature=signed-for-one-hour"
                verify = f"{self.hub.endpoint}/api/models/{repo}/lfs-verify"
                answer["actions"] = {"upload": {"href": signed}, "verify": {"href": verify}}
            objects.append(answer)
        return self._json({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> int:
        if hashlib.sha256(body).hexdigest() != oid:
            raise HubError(400, "The provided sha256 does not match the body")
        self.hub.objects[oid] = body
        return self._send(b"", 200, {"ETag": f'"{oid}"'})

    def lfs_verify(self, body: bytes, repo: str) -> int:
        item = json.loads(body)
        if len(self.hub.objects.get(item["oid"], b"")) != item["size"]:
            raise HubError(404, "object missing or of another size")
        return self._json({})

    def commit(self, body: bytes, repo: str, revision: str) -> int:
        found = self.hub.writable(repo, self.token)
        if revision not in found.branches:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        operations = [json.loads(line) for line in body.split(b"\n") if line]
        header = operations.pop(0)["value"]
        if header.get("parentCommit") not in (None, found.branches[revision]):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        tree = dict(found.commit_at(revision).tree)
        for operation in operations:
            self._apply(tree, operation["key"], operation["value"])
        made = found.add_commit(revision, header["summary"], tree)
        return self._json(
            {"success": True, "commitOid": made.sha, "commitUrl": f"{self.hub.endpoint}/{repo}/commit/{made.sha}"}
        )

    def _apply(self, tree: dict[str, Entry], key: str, value: dict[str, Any]) -> None:
        path = value["path"].rstrip("/")
        if key == "file":
            data = base64.b64decode(value["content"])
            if len(data) > REGULAR_LIMIT:
                raise HubError(400, f"{path}: files larger than 10 MiB belong into large-file storage")
            tree[path] = Entry(len(data), git_blob_oid(data), data)
        elif key == "lfsFile":
            if value["oid"] not in self.hub.objects:
                raise HubError(400, f"LFS pointer pointed to a file that does not exist: {path}")
            size = len(self.hub.objects[value["oid"]])
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{value['oid']}\nsize {size}\n"
            tree[path] = Entry(size, git_blob_oid(pointer.encode()), sha256=value["oid"])
        elif key == "deletedFile":
            if tree.pop(path, None) is None:
                raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        elif key == "deletedFolder":
            inside = [name for name in tree if name.startswith(path + "/")]
            if not inside:
                raise HubError(404, f"A folder with this name doesn't exist: {path}", "EntryNotFound")
            for name in inside:
                del tree[name]
        else:
            raise HubError(400, f"unknown operation {key}")

    # Reading.

    def tree(self, body: bytes, repo: str, revision: str, path: str) -> int:
        commit = self.hub.repo_for(repo, self.token).commit_at(revision)
        prefix = path.rstrip("/") + "/" if path else ""
        found = {name: entry for name, entry in commit.tree.items() if name.startswith(prefix)}
        if path and not found:
            raise HubError(404, f"{path} does not exist on {revision}", "EntryNotFound", commit=commit.sha)
        recursive = self.query.get("recursive", "false").lower() == "true"
        return self._json(list(_listing(found, prefix, recursive)))

    def paths_info(self, body: bytes, repo: str, revision: str) -> int:
        tree = self.hub.repo_for(repo, self.token).commit_at(revision).tree
        wanted = parse_qs(body.decode()).get("paths", [])
        return self._json([_file_info(path, tree[path]) for path in wanted if path in tree])

    def commits(self, body: bytes, repo: str, revision: str) -> int:
        found = self.hub.repo_for(repo, self.token)
        commit: Commit | None = found.commit_at(revision)
        history = []
        while commit is not None:
            date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(commit.created))
            history.append({"id": commit.sha, "title": commit.title, "message": "", "date": date, "authors": []})
            commit = found.commits[commit.parent] if commit.parent else None
        return self._json(history)

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> int:
        found = self.hub.repo_for(repo, self.token)
        if found.gated and not (self.token and self.token.may_write(repo)):
            raise HubError(403 if self.token else 401, f"Access to {repo} is restricted", "GatedRepo")
        commit = found.commit_at(revision)
        entry = commit.tree.get(path)
        if entry is None:
            raise HubError(404, f"Entry not found: {path}", "EntryNotFound", commit=commit.sha)
        data = self.hub.read(entry)
        headers = {
            "X-Repo-Commit": commit.sha,
            "ETag": f'"{entry.sha256 or entry.oid}"',
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._send(data, 200, headers)
        start, stop = int(asked[1]), min(int(asked[2] or entry.size - 1), entry.size - 1) + 1
        if start >= entry.size:
            return self._send(b"", 416, headers | {"Content-Range": f"bytes */{entry.size}"})
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{entry.size}"
        return self._send(data[start:stop], 206, headers)


def _file_info(path: str, entry: Entry, key: str = "path") -> dict[str, Any]:
    info: dict[str, Any] = {"type": "file", key: path, "size": entry.size, "oid": entry.oid, "blobId": entry.oid}
    if entry.sha256:
        large = {"oid": entry.sha256, "sha256": entry.sha256, "size": entry.size, "pointerSize": 134}
        info["lfs"] = large
    return info


def _listing(files: dict[str, Entry], prefix: str, recursive: bool) -> Iterator[dict[str, Any]]:
    """Files and folders below `prefix`; without `recursive`, its direct children only."""
    folders = set()
    for path, entry in sorted(files.items()):
        parts = path[len(prefix) :].split("/")
        for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
            folder = prefix + "/".join(parts[:depth])
            if folder not in folders:
                folders.add(folder)
                yield {"type": "directory", "path": folder, "size": 0, "oid": git_blob_oid(folder.encode())}
        if recursive or len(parts) == 1:
            yield _file_info(path, entry)


# A data set's id begins with "datasets/", as in its addresses.
_REPO = r"(?P<repo>(?:datasets/)?[^/]+/[^/]+)"
_REVISION = r"(?P<revision>[^/]+)"
_MODEL = r"/api/(?:models/)?(?P<repo>(?:(?<=models/)|datasets/)[^/]+/[^/]+)"
_ROUTES = [
    ("GET", "/api/whoami-v2", "whoami"),
    ("POST", "/api/repos/create", "create_repo"),
    ("POST", "/api/validate-yaml", "validate_yaml"),
    ("GET", f"{_MODEL}/auth-check(?P<write>/write)?", "auth_check"),
    ("GET", f"{_MODEL}/refs", "refs"),
    ("POST", f"{_MODEL}/branch/(?P<branch>[^/]+)", "create_branch"),
    ("POST", f"{_MODEL}/preupload/{_REVISION}", "preupload"),
    ("POST", f"/{_REPO}\\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", "lfs_put"),
    ("POST", f"{_MODEL}/lfs-verify", "lfs_verify"),
    ("POST", f"{_MODEL}/commit/{_REVISION}", "commit"),
    ("GET", f"{_MODEL}/tree/{_REVISION}(?:/(?P<path>.+))?", "tree"),
    ("POST", f"{_MODEL}/paths-info/{_REVISION}", "paths_info"),
    ("GET", f"{_MODEL}/commits/{_REVISION}", "commits"),
    ("GET", f"{_MODEL}(?:/revision/{_REVISION})?", "info"),
    ("GET|HEAD", f"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
]
