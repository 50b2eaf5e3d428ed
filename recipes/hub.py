"""Publish a run folder as a model repository, and find out before step 1 whether that will be possible.

A push is one commit: either the repository shows the whole new model or it is as it was. Repositories are created
private unless asked otherwise, the visibility of an existing one is never changed, and no message, log line or file
that comes from here holds a token. `huggingface_hub` is imported where it is used: importing this module is cheap.
"""

import json
import logging
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from .adapters.saved import KINDS, SOFT_PROMPTS
from .errors import UserError
from .report import REPOSITORY

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

TOKEN_PAGE = "https://huggingface.co/settings/tokens"
TOKEN_PATTERN = re.compile(rb"hf_[A-Za-z0-9]{20,}")

# What a run leaves behind to resume itself. `training_args.bin` is a pickle that may hold a hub token.
LEFTOVERS = (
    "*.tmp",
    "optimizer*.bin",
    "optimizer*.pt",
    "optimizer*.safetensors",
    "scheduler.pt",
    "scheduler*.bin",
    "scaler.pt",
    "sampler*.bin",
    "rng_state*.pth",
    "random_states_*.pkl",
    "trainer_state*.json",
    "training_args.bin",
)
LEFTOVER_FOLDERS = ("*.tmp", "checkpoint-*", "global_step*", "optimizer_*", "pytorch_model_fsdp_*", "__pycache__")

WEIGHTS = re.compile(r".+\.(safetensors|bin|gguf)")
# The names that saving gives to weights. A variant (`model.fp16.safetensors`) is somebody's own file.
SAVED_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)(-\d{5}-of-\d{5})?\.(safetensors|bin)(\.index\.json)?")


def check_push(repo: str, *, private: bool = True, revision: str | None = None) -> None:
    """Make sure that `push_run` with the same arguments will be allowed; call it before training.

    Creates the repository (empty, private unless `private=False`) and the branch `revision` where they are missing,
    since doing so is the only proof that it can be done.

    Args:
        repo: "owner/name".
        private: what the repository is to be. An existing one keeps its visibility; a public one is refused
            when `private` is true.
        revision: branch to push to; None is the default branch.

    Raises:
        UserError: no token, an invalid or read-only one, no right to write to `repo`, a public repository where a
            private one was asked for, a bad name, or a Hub that cannot be reached. The message holds the remedy.
    """
    _check_names(repo, revision)
    with _hub_errors(repo):
        api = _api()
        _check_token(api, repo)
        _check_repo(api, repo, private)
        # Looked up first: to create a branch that exists needs a round trip that fails.
        if revision and revision not in {branch.name for branch in api.list_repo_refs(repo).branches}:
            api.create_branch(repo, branch=revision, exist_ok=True)


def push_run(
    folder: Path,
    repo: str,
    *,
    private: bool = True,
    revision: str | None = None,
    commit_message: str | None = None,
) -> str:
    """Upload the model in `folder` to the Hub in one commit and return the URL of the commit.

    Left out are checkpoints, optimizer states and what else serves only to resume, hidden files and `*.tmp`.
    Weights of an earlier push that `folder` no longer has (shards, indexes, an adapter) are deleted in the same
    commit; every other file of the repository stays. What the Hub already has is not sent again.

    Args:
        folder: a saved model or adapter: its config and its weights.
        repo, private, revision: as in `check_push`, which runs first.
        commit_message: one line for the history of the repository.

    Raises:
        UserError: `folder` is not a complete model, a file in it holds a token, the push is not allowed, or the
            upload failed. Nothing in `folder` is touched, and the message has the command that tries again.
    """
    folder = Path(folder)
    _check_names(repo, revision)
    files = files_to_push(folder)
    _check_model(folder, files)
    message = commit_message or f"Upload {folder.resolve().name}"
    _check_secrets(folder, files, message)
    retry = _retry_command(folder, repo, private, revision, commit_message)
    try:
        check_push(repo, private=private, revision=revision)
        with _hub_errors(repo):
            return _commit(folder, files, repo, revision, message)
    except UserError as error:
        raise UserError(f"{error}\nThe model is kept in {folder}. To try again:\n  {retry}") from None


def files_to_push(folder: Path) -> list[str]:
    """The files of a run folder that belong into a model repository, as sorted paths relative to it."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; expected the folder of a finished run")
    paths = [path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file()]
    return [path.as_posix() for path in paths if not _is_left_out(path)]


def load_snippet(folder: Path, repo: str, revision: str | None = None) -> str:
    """One line of Python that loads the model of `folder` once it is at `repo`."""
    where = f'"{repo}"' + (f', revision="{revision}"' if revision else "")
    if (folder / "adapter_config.json").is_file():
        fields = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        if KINDS.get(fields.get("peft_type")) in SOFT_PROMPTS:  # the stock class generates without it, see the card
            base = fields.get("base_model_name_or_path")
            return f'PeftModel.from_pretrained(anyformer.from_hf("{base}"), {where})'
        known = {"CAUSAL_LM": "CausalLM", "SEQ_2_SEQ_LM": "Seq2SeqLM", "SEQ_CLS": "SequenceClassification"}
        known |= {"TOKEN_CLS": "TokenClassification", "QUESTION_ANS": "QuestionAnswering"}
        task = fields.get("task_type")
        kind = f"For{known[task]}" if task in known else ""
        return f"AutoPeftModel{kind}.from_pretrained({where})"
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architecture = (config.get("architectures") or [""])[0]
    auto_map = {auto: path for auto, path in (config.get("auto_map") or {}).items() if auto.startswith("AutoModel")}
    named = [auto for auto, path in auto_map.items() if str(path).rpartition(".")[2] == architecture]
    task = architecture.partition("For")[2].replace("ConditionalGeneration", "Seq2SeqLM")
    auto = named[0] if named else f"AutoModelFor{task}" if task else "AutoModel"
    return f"{auto}.from_pretrained({where}{', trust_remote_code=True' if auto_map else ''})"


# The folder.


def _is_left_out(path: Path) -> bool:
    if any(part.startswith(".") for part in path.parts):
        return True
    folders = path.parts[:-1]
    if any(PurePosixPath(part).match(pattern) for part in folders for pattern in LEFTOVER_FOLDERS):
        return True
    return any(PurePosixPath(path.name).match(pattern) for pattern in LEFTOVERS)


def _check_model(folder: Path, files: list[str]) -> None:
    """Refuse what would not load: no config, no weights, a shard that is missing or cut short."""
    top = {name for name in files if "/" not in name}
    if not top & {"config.json", "adapter_config.json"}:
        raise UserError(f"{folder} is not a model: it has neither config.json nor adapter_config.json")
    if not any(WEIGHTS.fullmatch(name) for name in top):
        raise UserError(f"{folder} has no weights: expected model.safetensors or adapter_model.safetensors in it")
    if "config.json" not in top:
        _check_base(folder / "adapter_config.json")
    for name in files:
        path = folder / name
        if name in ("config.json", "adapter_config.json"):
            _read_object(path)
        elif name.endswith(".index.json"):
            _check_index(path)
        elif name.endswith(".safetensors"):
            _check_safetensors(path)
        elif WEIGHTS.fullmatch(name) and path.stat().st_size == 0:
            raise UserError(f"{path} is empty; save the model again")


def _check_base(path: Path) -> None:
    """An adapter opens only where its base model does."""
    base = _read_object(path).get("base_model_name_or_path")
    if base and (Path(base).is_absolute() or Path(base).exists()):
        raise UserError(
            f"{path}: base_model_name_or_path is {base}, a folder of this machine, so nobody else could open the "
            "adapter. Push a merged model, or name a base model on the Hub"
        )


def _read_object(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # UnicodeDecodeError and JSONDecodeError both
        raise UserError(f"{path} is not JSON ({error}); save the model again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object; save the model again")
    return value


def _check_index(path: Path) -> None:
    weight_map = _read_object(path).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{path} has no weight_map; save the model again")
    missing = sorted({shard for shard in weight_map.values() if not (path.parent / shard).is_file()})
    if missing:
        raise UserError(f"{path} lists shards that are not there: {', '.join(missing)}; save the model again")


def _check_safetensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        # Reads the header only, and compares it with the length of the file.
        with safe_open(path, framework="np"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} cannot be read, it may be cut short ({error}); save the model again") from None


def _check_secrets(folder: Path, files: list[str], message: str) -> None:
    """Refuse to publish a token. The message says where it stands and never what it is."""
    patterns = [TOKEN_PATTERN]
    if token := _token():
        patterns.append(re.compile(re.escape(token.encode())))
    if any(pattern.search(message.encode()) for pattern in patterns):
        raise UserError("the commit message holds an access token of the Hub; nothing was uploaded")
    for name in files:
        if WEIGHTS.fullmatch(name):
            continue  # tensors, not text; gigabytes of them
        with (folder / name).open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if any(pattern.search(line) for pattern in patterns):
                    raise UserError(
                        f"{folder / name}:{number} holds an access token of the Hub; nothing was uploaded. "
                        f"Remove it from the file and revoke it at {TOKEN_PAGE}"
                    )


# The Hub.


def _api() -> "HfApi":
    from huggingface_hub import HfApi

    return HfApi(library_name="anyformer")


def _token() -> str | None:
    from huggingface_hub import get_token

    with _hub_errors("the Hub"):
        return get_token()


def _check_names(repo: str, revision: str | None) -> None:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            f"hub repository {repo!r}: {str(error).rstrip('.')}. Expected OWNER/NAME, such as alice/my-model"
        ) from None
    if repo.count("/") != 1:
        raise UserError(f"hub repository {repo!r} has no owner; write OWNER/{repo} with your user or organisation name")
    if revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision):
        raise UserError(f"hub revision {revision!r} is a commit; a push needs the name of a branch")


def _check_token(api: "HfApi", repo: str) -> None:
    from huggingface_hub.constants import is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    if is_offline_mode():
        raise UserError(f"cannot push to {repo}: offline mode is on. Unset HF_HUB_OFFLINE, or push later")
    if not _token():
        raise UserError(
            f"cannot push to {repo}: no access token. Create one with write permission at {TOKEN_PAGE}, then run "
            "`hf auth login` or set the environment variable HF_TOKEN"
        )
    try:
        access = api.whoami()["auth"]["accessToken"]
    except HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise
        raise UserError(
            f"cannot push to {repo}: the Hub does not accept the access token. It may be revoked or mistyped; create "
            f"one at {TOKEN_PAGE}, then run `hf auth login` or set HF_TOKEN, which takes precedence"
        ) from None
    except KeyError:
        return  # not a personal access token (OAuth, an enterprise Hub): writing itself will tell
    if access.get("role") == "read":
        raise UserError(_no_right(repo, "the access token is read-only"))


def _check_repo(api: "HfApi", repo: str, private: bool) -> None:
    """Create the repository if it is missing, then ask whether it can be written to."""
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    try:
        found = api.model_info(repo)
    except RepositoryNotFoundError:
        try:
            api.create_repo(repo, private=private, exist_ok=True)
        except HfHubHTTPError as error:
            # 401 and 404 mean a repository of others that this token cannot see.
            if error.response.status_code not in (401, 403, 404):
                raise
            owner = repo.split("/")[0]
            raise UserError(_no_right(repo, f"this token may not create repositories of {owner!r}")) from None
        found = None
    try:
        # Not `create_repo(exist_ok=True)`: for a repository that exists it succeeds with a read-only token too.
        api.auth_check(repo, write=True)
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403, 404):
            raise
        raise UserError(_no_right(repo, "this token may not write to it")) from None
    if found is None or found.private is private or found.private is None:
        return
    if private:
        raise UserError(
            f"{repo} exists and is public, but this push is to be private. Say that it may be public "
            "(`private: false` under `hub:`, or --public), choose another name, or make it private in its settings"
        )
    logger.warning("%s exists and is private; it stays private although this push asks for a public one", repo)


def _no_right(repo: str, reason: str) -> str:
    return (
        f"cannot push to {repo}: {reason}. Use a token with write permission for {repo.split('/')[0]!r} "
        f"({TOKEN_PAGE}), ask an administrator of the organisation, or choose a repository of your own"
    )


def _content(path: Path, repo: str) -> Path | bytes:
    """The file; the card with the repository's name where the run could not know it."""
    if path.name != "README.md":
        return path
    text = path.read_text(encoding="utf-8")
    return text.replace(REPOSITORY, repo).encode() if REPOSITORY in text else path


def _commit(folder: Path, files: list[str], repo: str, revision: str | None, message: str) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api = _api()
    stale = stale_weights(api.list_repo_files(repo, revision=revision), files)
    # Not `upload_folder`: with hf_xet installed it splits a large folder into several commits.
    info = api.create_commit(
        repo,
        [
            *(CommitOperationDelete(name) for name in stale),
            *(CommitOperationAdd(name, _content(folder / name, repo)) for name in files),
        ],
        commit_message=message,
        revision=revision,
    )
    return info.commit_url


def stale_weights(remote: list[str], files: list[str]) -> list[str]:
    """Weights of an earlier push: what `remote` has, `files` has not, and loading might pick up.

    Only folders into which `files` puts weights are looked at. A full model also replaces an adapter, since an
    adapter_config.json beside it would make `from_pretrained` load the adapter's base model instead. An adapter
    replaces adapters only: the full weights beside it may be its base.
    """
    new = [PurePosixPath(name) for name in files if WEIGHTS.fullmatch(name)]
    adapter_folders = {path.parent for path in new}
    model_folders = {path.parent for path in new if not path.name.startswith("adapter_")}
    stale = []
    for path in (PurePosixPath(name) for name in sorted(set(remote) - set(files))):
        of_adapter = path.name == "adapter_config.json" or path.name.startswith("adapter_model")
        known = path.name == "adapter_config.json" or SAVED_WEIGHTS.fullmatch(path.name)
        if known and path.parent in (adapter_folders if of_adapter else model_folders):
            stale.append(str(path))
    return stale


def _retry_command(folder: Path, repo: str, private: bool, revision: str | None, message: str | None) -> str:
    words = ["anyformer", "push", str(folder), repo]
    words += ["--revision", revision] if revision else []
    words += [] if private else ["--public"]
    words += ["--message", message] if message else []
    return shlex.join(words)


# Errors.


@contextmanager
def _hub_errors(repo: str) -> Iterator[None]:
    """Turn whatever the client, the network or the Hub raises into a `UserError` without credentials in it."""
    from huggingface_hub.errors import HTTPError

    try:
        yield
    except (HTTPError, OSError, ValueError, RuntimeError) as error:
        # `from None`: the client's exceptions carry requests, and those carry the token.
        raise UserError(f"{repo}: {_describe(error)}") from None


def _describe(error: BaseException) -> str:
    """The messages of an exception and its causes, outermost first, in one line and free of secrets."""
    # HTTPError is the base class of the HTTP library that the client happens to use.
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, HfHubHTTPError):
            parts.append(f"the Hub answered {cause.response.status_code}: {cause.server_message or cause}")
            break
        parts.append(str(cause) or type(cause).__name__)
        if isinstance(cause, HTTPError | ConnectionError):
            parts.append("the Hub cannot be reached; check the network, the proxy and HF_ENDPOINT")
            break
        cause = cause.__cause__
    return redact(" ".join(" - ".join(parts).split()))


def redact(text: str) -> str:
    """`text` without access tokens and without the queries of URLs, which hold signatures of storage services."""
    from huggingface_hub import get_token

    with suppress(Exception):  # fetching a token may itself be what failed
        if token := get_token():
            text = text.replace(token, "hf_***")
    text = TOKEN_PATTERN.sub(b"hf_***", text.encode(errors="replace")).decode()
    return re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)
