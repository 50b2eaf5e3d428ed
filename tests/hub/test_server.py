"""The real client against the loopback Hub: what holds here is what the other Hub tests may rely on."""

import json
import os
from pathlib import Path

from .conftest import Hub, run_python


def client(hub: Hub, code: str, **env: str):
    """Run `code` with `api` at hand in a client process; what it puts into `out` comes back through JSON."""
    prelude = "import json\nfrom huggingface_hub import HfApi, hf_hub_download, snapshot_download\n"
    prelude += "from huggingface_hub.errors import *\napi, out = HfApi(), {}\n"
    done = run_python(prelude + code + "\nprint(json.dumps(out))", hub.env | env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_upload_and_download_by_revision_and_by_commit(hub: Hub, tmp_path: Path):
    folder = tmp_path / "up"
    (folder / "sub").mkdir(parents=True)
    large = os.urandom(11 * 1024 * 1024)
    (folder / "model.safetensors").write_bytes(large)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "sub" / "notes.txt").write_text("first")
    out = client(
        hub,
        f"""
api.create_repo("alice/m", private=True)
first = api.upload_folder(repo_id="alice/m", folder_path={str(folder)!r})
second = api.upload_file(path_or_fileobj=b"second", path_in_repo="sub/notes.txt", repo_id="alice/m")
out["shas"] = [first.oid, second.oid]
out["files"] = sorted(api.list_repo_files("alice/m"))
out["top"] = sorted((type(e).__name__, e.path) for e in api.list_repo_tree("alice/m"))
out["sub"] = [e.path for e in api.list_repo_tree("alice/m", "sub")]
out["now"] = open(hf_hub_download("alice/m", "sub/notes.txt")).read()
out["then"] = open(hf_hub_download("alice/m", "sub/notes.txt", revision=first.oid)).read()
out["copy"] = snapshot_download("alice/m", revision="main")
out["titles"] = [c.title for c in api.list_repo_commits("alice/m")]
out["private"] = api.model_info("alice/m").private
out["exists"] = [api.file_exists("alice/m", "config.json"), api.file_exists("alice/m", "nothing")]
out["sizes"] = [f.size for f in api.get_paths_info("alice/m", ["model.safetensors"])]
""",
    )
    assert out["files"] == [".gitattributes", "config.json", "model.safetensors", "sub/notes.txt"]
    assert ["RepoFolder", "sub"] in out["top"] and ["RepoFile", "sub/notes.txt"] not in out["top"]
    assert out["sub"] == ["sub/notes.txt"]
    assert (out["then"], out["now"]) == ("first", "second")
    assert (Path(out["copy"]) / "model.safetensors").read_bytes() == large
    assert Path(out["copy"]).name == out["shas"][1] != out["shas"][0]
    assert len(out["titles"]) == 3 and out["titles"][-1] == "initial commit"
    assert out["private"] is True and out["exists"] == [True, False] and out["sizes"] == [len(large)]
    # Large-file storage took the weights, and only them.
    assert [len(data) for data in hub.server.objects.values()] == [len(large)]
    assert [r.status for r in hub.server.requests("PUT", "/lfs/")] == [200]


def test_an_interrupted_download_goes_on_where_it_stopped(hub: Hub, tmp_path: Path):
    out = client(
        hub,
        """
from huggingface_hub.utils import build_hf_headers, get_session
api.create_repo("alice/m")
api.upload_file(path_or_fileobj=b"0123456789", path_in_repo="data.txt", repo_id="alice/m")
url = f"{api.endpoint}/alice/m/resolve/main/data.txt"
def get(wanted):
    answer = get_session().get(url, headers={"Range": wanted, **build_hf_headers()})
    return [answer.status_code, answer.text, answer.headers.get("Content-Range")]
out["ranges"] = [get("bytes=3-5"), get("bytes=8-"), get("bytes=10-")]
""",
    )
    assert out["ranges"] == [[206, "345", "bytes 3-5/10"], [206, "89", "bytes 8-9/10"], [416, "", "bytes */10"]]


def test_deletions_and_branches(hub: Hub):
    out = client(
        hub,
        """
from huggingface_hub import CommitOperationAdd, CommitOperationDelete
api.create_repo("alice/m")
add = [CommitOperationAdd(p, p.encode()) for p in ("a.txt", "b.txt", "d/1.txt", "d/2.txt")]
api.create_commit("alice/m", add, commit_message="add")
api.create_branch("alice/m", branch="v/1")
gone = [CommitOperationDelete("a.txt"), CommitOperationDelete("d/")]
api.create_commit("alice/m", gone, commit_message="delete")
out["main"] = sorted(api.list_repo_files("alice/m"))
out["branch"] = sorted(api.list_repo_files("alice/m", revision="v/1"))
out["refs"] = sorted(b.name for b in api.list_repo_refs("alice/m").branches)
def name(call):
    try: call()
    except Exception as error: return type(error).__name__
out["errors"] = [
    name(lambda: api.list_repo_files("alice/m", revision="v2")),
    name(lambda: api.upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="alice/m", revision="v2")),
    name(lambda: api.create_branch("alice/m", branch="v/1")),
    name(lambda: api.create_branch("alice/m", branch="refs/x")),
    name(lambda: api.create_commit("alice/m", [CommitOperationDelete("a.txt")], commit_message="again")),
    name(lambda: hf_hub_download("alice/m", "a.txt")),
    name(lambda: api.create_repo("alice/m")),
]
api.create_branch("alice/m", branch="v/1", exist_ok=True)
out["url"] = str(api.create_repo("alice/m", exist_ok=True))
""",
    )
    assert out["main"] == [".gitattributes", "b.txt"]
    assert out["branch"] == [".gitattributes", "a.txt", "b.txt", "d/1.txt", "d/2.txt"]
    assert out["refs"] == ["main", "v/1"]
    assert out["errors"] == [
        "RevisionNotFoundError",
        "RevisionNotFoundError",
        "HfHubHTTPError",
        "BadRequestError",
        "RemoteEntryNotFoundError",
        "RemoteEntryNotFoundError",
        "HfHubHTTPError",
    ]
    assert out["url"] == f"{hub.server.endpoint}/alice/m"


def test_upload_folder_with_delete_patterns(hub: Hub, tmp_path: Path):
    (tmp_path / "up").mkdir()
    (tmp_path / "up" / "new.txt").write_text("new")
    client(
        hub,
        f"""
api.create_repo("alice/m")
api.upload_file(path_or_fileobj=b"x", path_in_repo="old.txt", repo_id="alice/m")
api.upload_file(path_or_fileobj=b"x", path_in_repo="old.md", repo_id="alice/m")
api.upload_folder(repo_id="alice/m", folder_path={str(tmp_path / "up")!r}, delete_patterns="*.txt")
""",
    )
    assert hub.server.files("alice/m") == {"new.txt": b"new", "old.md": b"x"}


def test_tokens_and_private_repositories(hub: Hub):
    server = hub.server
    server.add_repo("alice/secret", private=True)
    server.add_repo("alice/open", private=False)
    tokens = {
        "read": server.add_token("alice", role="read"),
        "bob": server.add_token("bob"),
        "fine": server.add_token("alice", role="fineGrained", scopes=("alice/open",)),
        "none": "",
        "wrong": "hf_" + "z" * 34,
    }
    code = """
def status(call):
    try: call(); return 200
    except HfHubHTTPError as error: return f"{error.response.status_code} {type(error).__name__}"
for repo in ("alice/secret", "alice/open", "alice/missing"):
    out[repo] = [status(lambda: api.auth_check(repo)), status(lambda: api.auth_check(repo, write=True))]
out["create"] = status(lambda: api.create_repo("alice/new"))
"""
    out = {name: client(hub, code, HF_TOKEN=token) for name, token in tokens.items()}
    hidden, absent = "404 RepositoryNotFoundError", "401 RepositoryNotFoundError"
    assert out["read"] == {
        "alice/secret": [200, "403 HfHubHTTPError"],
        "alice/open": [200, "403 HfHubHTTPError"],
        "alice/missing": [hidden, hidden],
        "create": "403 HfHubHTTPError",
    }
    assert out["bob"]["alice/secret"] == [hidden, hidden]
    assert out["bob"]["alice/open"] == [200, "403 HfHubHTTPError"]
    assert out["fine"]["alice/open"] == [200, 200]
    assert out["fine"]["alice/secret"] == [hidden, hidden]
    assert out["none"]["alice/secret"] == [absent, absent] and out["none"]["alice/open"][0] == 200
    assert out["wrong"]["alice/open"] == ["401 HfHubHTTPError"] * 2
    assert set(server.repos) == {"alice/secret", "alice/open"}


def test_planted_faults_and_the_request_log(hub: Hub):
    hub.server.add_repo("alice/m")
    hub.server.fail_next("GET", match="/tree/", status=418, skip=1)
    hub.server.fail_next("GET", match="whoami", status=None)
    out = client(
        hub,
        """
def name(call):
    try: return len(call())
    except Exception as error: return f"{type(error).__name__}: {error}"
out["tree"] = [name(lambda: api.list_repo_files("alice/m")) for _ in range(3)]
out["whoami"] = [name(api.whoami), api.whoami()["name"]]
""",
    )
    assert out["tree"][0] == out["tree"][2] == 1 and "418" in out["tree"][1]
    assert out["whoami"][0].startswith("RemoteProtocolError") and out["whoami"][1] == "alice"
    assert [r.status for r in hub.server.requests("GET", "/tree/")] == [200, 418, 200]
    assert {r.user for r in hub.server.requests("GET", "/tree/")} == {"alice", None}
    assert hub.token not in repr(hub.server.log)


def test_transformers_push_and_reload_is_bit_equal(hub: Hub, tmp_path: Path):
    out = client(
        hub,
        f"""
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, initializer_range=0.3)).eval()
model.save_pretrained({str(tmp_path / "saved")!r}, max_shard_size="20KB")
api.create_repo("alice/llama")
api.upload_folder(repo_id="alice/llama", folder_path={str(tmp_path / "saved")!r})
model.push_to_hub("alice/pushed", private=True)
ids = torch.arange(7)[None]
with torch.no_grad():
    want = model(ids).logits
    out["equal"] = [
        torch.equal(AutoModelForCausalLM.from_pretrained(name).eval()(ids).logits, want)
        for name in ("alice/llama", "alice/pushed")
    ]
""",
    )
    assert out["equal"] == [True, True]
    assert sum(name.endswith(".safetensors") for name in hub.server.files("alice/llama")) > 1
    assert hub.server.repos["alice/pushed"].private
