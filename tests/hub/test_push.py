"""Publishing a run: what goes up, what is refused, what a failure leaves behind. The client is the real one."""

import hashlib
import json
import os
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from .conftest import Hub, run_python

MESSAGES = """
import json, sys
from pathlib import Path
from anyformer.recipes.errors import UserError
from anyformer.recipes.hub import check_push, push_run
try:
    answer = {"value": CALL}
except UserError as error:
    answer = {"error": str(error)}
print(json.dumps(answer))
"""
CLI = """
import sys, typer
from anyformer.scripts.push import command
app = typer.Typer()
app.command("push")(command)
sys.argv = ["push", *ARGS]
app()
"""


def call(hub: Hub, expression: str, **env: str) -> dict[str, str]:
    """Evaluate a call in a client process, with all its logs on, and make sure that none shows a token."""
    done = run_python(MESSAGES.replace("CALL", expression), hub.env | {"HF_HUB_VERBOSITY": "debug"} | env)
    assert done.returncode == 0, done.stderr
    for token in (*hub.server.tokens, env.get("HF_TOKEN") or hub.token):
        assert token not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}


def push(hub: Hub, folder: Path, repo: str = "alice/m", arguments: str = "", **env: str) -> dict[str, str]:
    return call(hub, f"push_run(Path({str(folder)!r}), {repo!r}, {arguments})", **env)


def weights(folder: Path) -> set[str]:
    return {path.name for pattern in ("*.safetensors", "*.index.json") for path in folder.glob(pattern)}


def write_weights(folder: Path, shards: int, seed: int = 0) -> None:
    """`shards` files of random weights with their index, or one file without."""
    for old in weights(folder):
        (folder / old).unlink()
    rng = np.random.default_rng(seed)
    tensors = {f"layers.{i}.weight": rng.normal(size=(16, 16)).astype(np.float32) for i in range(6)}
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {key: names[i % shards] for i, key in enumerate(tensors)}
    for name in names:
        save_file({key: tensors[key] for key, where in weight_map.items() if where == name}, folder / name)
    index = {"metadata": {"total_size": 6144}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run as training leaves it: three shards, a card, metrics, and everything only it needs."""
    folder = tmp_path / "my run"
    auto_map = {"AutoConfig": "configuration_a.AConfig", "AutoModelForCausalLM": "modeling_a.AForCausalLM"}
    config = {"model_type": "a", "architectures": ["AForCausalLM"], "auto_map": auto_map}
    files = {
        "config.json": json.dumps(config),
        "README.md": "---\nlibrary_name: transformers\n---\n# A model\n",
        "modeling_a.py": "x = 1\n",
        "recipe.yaml": "hub:\n  repo: alice/m\n",
        "plots/loss.png": "\x89PNG\0\0",
        "checkpoint-note.md": "kept: a file, not a checkpoint",
        "checkpoint-5/config.json": "{}",
        "checkpoint-5/model.safetensors": "never opened",
        "global_step5/zero.pt": "state",
        "optimizer.pt": "state",
        "scheduler.pt": "state",
        "rng_state_0.pth": "state",
        "trainer_state.json": "{}",
        "training_args.bin": "pickle",
        "model.safetensors.tmp": "half",
        ".env": "X=1",
        ".cache/x": "x",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    write_weights(folder, 3)
    return folder


PUBLISHED = {"config.json", "README.md", "modeling_a.py", "recipe.yaml", "plots/loss.png", "checkpoint-note.md"}
THREE = {f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)} | {"model.safetensors.index.json"}


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


# What goes up.


def test_one_private_commit_with_the_model_and_nothing_else(hub: Hub, run: Path):
    before = snapshot(run)
    url = push(hub, run)["value"]
    repo = hub.server.repos["alice/m"]
    assert repo.private
    assert url == f"{hub.server.endpoint}/alice/m/commit/{repo.branches['main']}"
    files = hub.server.files("alice/m")
    assert set(files) == PUBLISHED | THREE
    assert files == {name: before[name] for name in files}
    assert [c.title for c in repo.commits.values()] == ["initial commit", "Upload my run"]
    assert snapshot(run) == before


def test_a_second_push_sends_nothing_again(hub: Hub, run: Path):
    first = push(hub, run)["value"]
    sent = len(hub.server.requests("PUT"))
    assert sent == 4  # three shards and the binary picture
    assert push(hub, run)["value"] == first
    assert len(hub.server.requests("PUT")) == sent


@pytest.mark.parametrize("shards", [2, 1])
def test_fewer_shards_than_before(hub: Hub, run: Path, shards: int):
    push(hub, run)
    repo = hub.server.repos["alice/m"]
    stranger = {"notes/model-00001-of-00003.safetensors", "model.fp16.safetensors", "eval.json"}
    tree = repo.commit_at("main").tree
    repo.add_commit("main", "by hand", tree | dict.fromkeys(stranger, tree["config.json"]))
    write_weights(run, shards, seed=1)
    assert "value" in push(hub, run, arguments="commit_message='Fewer'")
    assert set(hub.server.files("alice/m")) == PUBLISHED | stranger | weights(run)
    # In the same commit: no commit shows a mixture of old and new.
    assert [c.title for c in repo.commits.values()][-2:] == ["by hand", "Fewer"]


def test_full_weights_replace_an_adapter_but_an_adapter_leaves_full_weights():
    from anyformer.recipes.hub import stale_weights

    adapter = ["adapter_config.json", "adapter_model.safetensors"]
    model = ["config.json", "model.safetensors", "pytorch_model.bin"]
    assert stale_weights([*adapter, *model], ["config.json", "model.safetensors"]) == [*adapter, "pytorch_model.bin"]
    assert stale_weights([*model, "adapter_model.bin"], adapter) == ["adapter_model.bin"]


def test_an_adapter_is_a_model(hub: Hub, tmp_path: Path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"task_type": "CAUSAL_LM"}')
    save_file({"a": np.ones(3, np.float32)}, folder / "adapter_model.safetensors")
    assert "value" in push(hub, folder)
    assert set(hub.server.files("alice/m")) == {"adapter_config.json", "adapter_model.safetensors"}


def test_a_revision_is_created_and_the_default_branch_untouched(hub: Hub, run: Path):
    assert "value" in push(hub, run, arguments="revision='v2'")
    assert hub.server.files("alice/m") == {}
    assert set(hub.server.files("alice/m", "v2")) == PUBLISHED | THREE
    write_weights(run, 1)
    assert "value" in push(hub, run, arguments="revision='v2'")
    assert not THREE & set(hub.server.files("alice/m", "v2"))


def test_public_only_when_asked(hub: Hub, run: Path):
    assert "value" in push(hub, run, arguments="private=False")
    assert not hub.server.repos["alice/m"].private


# Before training.


def test_check_push_creates_the_repository_and_the_branch(hub: Hub):
    assert call(hub, "check_push('alice/m', revision='v2')")["value"] is None
    assert hub.server.repos["alice/m"].private
    assert set(hub.server.repos["alice/m"].branches) == {"main", "v2"}
    assert call(hub, "check_push('alice/m', revision='v2')")["value"] is None


def test_no_token(hub: Hub):
    error = call(hub, "check_push('alice/m')", HF_TOKEN="")["error"]
    assert "no access token" in error and "HF_TOKEN" in error and "hf auth login" in error
    assert hub.server.log == []


def test_invalid_token(hub: Hub):
    error = call(hub, "check_push('alice/m')", HF_TOKEN="hf_" + "q" * 34)["error"]
    assert "does not accept the access token" in error and "hf auth login" in error


def test_read_only_token(hub: Hub):
    hub.server.add_repo("alice/m")
    error = call(hub, "check_push('alice/m')", HF_TOKEN=hub.server.add_token("alice", role="read"))["error"]
    assert "alice/m" in error and "read-only" in error and "write permission" in error


def test_fine_grained_token_for_another_repository(hub: Hub):
    hub.server.add_repo("alice/m", private=False)
    hub.server.add_repo("alice/other")
    token = hub.server.add_token("alice", role="fineGrained", scopes=("alice/other",))
    assert "may not write to it" in call(hub, "check_push('alice/m', private=False)", HF_TOKEN=token)["error"]
    assert call(hub, "check_push('alice/other')", HF_TOKEN=token)["value"] is None


def test_organisations(hub: Hub):
    token = hub.server.add_token("alice", orgs={"lab": "write", "corp": "read"})
    assert call(hub, "check_push('lab/m')", HF_TOKEN=token)["value"] is None
    error = call(hub, "check_push('corp/m')", HF_TOKEN=token)["error"]
    assert "may not create repositories of 'corp'" in error and "administrator" in error
    # One that others keep private looks as if it were missing, and cannot be created either.
    hub.server.add_repo("bob/m", private=True)
    assert "may not create repositories of 'bob'" in call(hub, "check_push('bob/m')")["error"]


def test_visibility_of_an_existing_repository_is_never_changed(hub: Hub):
    hub.server.add_repo("alice/open", private=False)
    hub.server.add_repo("alice/closed", private=True)
    error = call(hub, "check_push('alice/open')")["error"]
    assert "is public" in error and "--public" in error and "private: false" in error
    answer = call(hub, "check_push('alice/closed', private=False)")
    assert answer["value"] is None and "stays private" in answer["stderr"]
    assert [hub.server.repos[f"alice/{name}"].private for name in ("open", "closed")] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("'my-model'", "write OWNER/my-model"),
        ("'alice/my model'", "Expected OWNER/NAME"),
        ("'a/b/c'", "Expected OWNER/NAME"),
        ("''", "Expected OWNER/NAME"),
        (f"'alice/m', revision='{'a' * 40}'", "is a commit"),
        ("'alice/m', revision='refs/heads/x'", "Invalid reference"),
    ],
)
def test_names_that_cannot_be(hub: Hub, arguments: str, said: str):
    hub.server.add_repo("alice/m")
    assert said in call(hub, f"check_push({arguments})")["error"]
    assert set(hub.server.repos) == {"alice/m"}


def test_offline_and_unreachable(hub: Hub):
    assert "HF_HUB_OFFLINE" in call(hub, "check_push('alice/m')", HF_HUB_OFFLINE="1")["error"]
    error = call(hub, "check_push('alice/m')", HF_ENDPOINT="http://127.0.0.1:9")["error"]
    assert "cannot be reached" in error and "HF_ENDPOINT" in error
    hub.server.fail_next("GET", match="whoami", status=500)
    assert "the Hub answered 500: planted fault" in call(hub, "check_push('alice/m')")["error"]


# Folders that are refused before anything is sent.


def refused(hub: Hub, run: Path) -> str:
    error = push(hub, run)["error"]
    assert hub.server.log == []
    return error


def test_a_folder_that_is_not_a_model(hub: Hub, run: Path, tmp_path: Path):
    assert "is not a folder" in refused(hub, tmp_path / "nowhere")
    for name in weights(run):
        (run / name).unlink()
    assert "has no weights" in refused(hub, run)
    (run / "config.json").write_text("{")
    write_weights(run, 1)
    assert f"{run / 'config.json'} is not JSON" in refused(hub, run)
    (run / "config.json").unlink()
    assert "neither config.json nor adapter_config.json" in refused(hub, run)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_shard(hub: Hub, run: Path, keep: int):
    shard = run / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    assert f"{shard} cannot be read" in refused(hub, run)


def test_a_missing_shard(hub: Hub, run: Path):
    (run / "model-00002-of-00003.safetensors").unlink()
    assert "shards that are not there: model-00002-of-00003.safetensors" in refused(hub, run)


@pytest.mark.parametrize("name", ["recipe.yaml", "logs/train.log"])
def test_a_token_in_a_file(hub: Hub, run: Path, name: str):
    (run / name).parent.mkdir(exist_ok=True)
    for secret in (hub.token, "hf_" + "Ab1" * 11):
        (run / name).write_text(f"a: 1\nb: 2\ntoken: {secret}\n")
        error = refused(hub, run)
        assert f"{run / name}:3 holds an access token" in error and "revoke" in error and secret not in error


def test_a_token_of_another_shape_in_use(hub: Hub, run: Path):
    token = "internal.secret+1"
    hub.server.tokens[token] = hub.server.tokens[hub.token]
    (run / "recipe.yaml").write_text(f"token: {token}\n")
    assert "recipe.yaml:1 holds an access token" in push(hub, run, HF_TOKEN=token)["error"]
    (run / "recipe.yaml").write_text("repo: alice/m\n")
    # Not even when the server repeats it.
    hub.server.fail_next("POST", match="/commit/", status=400, message=f"who is {token}?")
    assert "400: who is hf_***?" in push(hub, run, HF_TOKEN=token)["error"]


def test_a_token_in_the_commit_message(hub: Hub, run: Path):
    expression = (
        f"push_run(Path({str(run)!r}), 'alice/m', commit_message='see ' + __import__('os').environ['HF_TOKEN'])"
    )
    assert "commit message holds an access token" in call(hub, expression)["error"]
    assert hub.server.log == []


def test_a_card_that_the_hub_rejects(hub: Hub, run: Path):
    (run / "README.md").write_text("---\ntags: [a\n---\n")
    assert "Invalid metadata in README.md" in push(hub, run)["error"]
    assert hub.server.files("alice/m") == {}


# Failures in the middle.


def test_failure_on_the_second_shard_then_the_printed_command(hub: Hub, run: Path):
    before = snapshot(run)
    shard = "model-00002-of-00003.safetensors"
    digest = hashlib.sha256(before[shard]).hexdigest()
    hub.server.fail_next("PUT", match=digest, status=400, times=1)
    error = push(hub, run, arguments="revision='v2', private=False, commit_message='Take two'")["error"]
    assert shard in error and "the Hub answered 400: planted fault" in error
    assert f"The model is kept in {run}." in error and "X-Amz-Signature" not in error
    command = error.splitlines()[-1].strip()
    assert command == f"anyformer push {shlex.quote(str(run))} alice/m --revision v2 --public --message 'Take two'"
    assert hub.server.files("alice/m", "v2") == {} and snapshot(run) == before

    done = run_python(CLI.replace("ARGS", repr(shlex.split(command)[2:])), hub.env)
    assert done.returncode == 0, done.stderr
    files = hub.server.files("alice/m", "v2")
    assert set(files) == PUBLISHED | THREE and files == {name: before[name] for name in files}
    puts = [r for r in hub.server.requests("PUT") if r.status == 200]
    assert len(puts) == len({r.path for r in puts}) == 4  # nothing that had arrived was sent twice
    assert hub.token not in done.stdout + done.stderr


def test_the_signature_of_an_upload_url_is_not_shown(hub: Hub, run: Path):
    hub.server.fail_next("PUT", status=403, message="")
    error = push(hub, run)["error"]
    assert "/lfs/" in error and "Signature" not in error and "signed" not in error
    assert "the Hub answered 403" in error and "cannot be reached" not in error


def test_a_hiccup_of_the_storage_is_retried_by_the_client(hub: Hub, run: Path):
    hub.server.fail_next("PUT", status=503, times=1, skip=1)
    assert "value" in push(hub, run)
    assert set(hub.server.files("alice/m")) == PUBLISHED | THREE
    assert [r.status for r in hub.server.requests("PUT")].count(503) == 1


def test_the_network_dies_at_the_commit(hub: Hub, run: Path):
    push(hub, run)
    old = hub.server.files("alice/m")
    write_weights(run, 2, seed=1)
    before = snapshot(run)
    hub.server.fail_next("POST", match="/commit/", status=None)
    error = push(hub, run)["error"]
    assert "cannot be reached" in error and f"The model is kept in {run}." in error
    assert error.endswith(f"anyformer push {shlex.quote(str(run))} alice/m")
    # The old model is whole, and so is the local one.
    assert hub.server.files("alice/m") == old and snapshot(run) == before
    push(hub, run)
    assert {name for name in hub.server.files("alice/m") if name.endswith(".safetensors")} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_a_token_that_is_revoked_during_training(hub: Hub, run: Path):
    assert call(hub, "check_push('alice/m')")["value"] is None
    del hub.server.tokens[hub.token]
    error = push(hub, run)["error"]
    assert "does not accept the access token" in error and "The model is kept in" in error


# The command line.


def test_the_verb_prints_the_url_and_how_to_load(hub: Hub, run: Path):
    arguments = [str(run), "alice/m", "--revision", "v2", "--message", "From the shell"]
    done = run_python(CLI.replace("ARGS", repr(arguments)), hub.env)
    assert done.returncode == 0, done.stderr
    repo = hub.server.repos["alice/m"]
    assert done.stdout.splitlines() == [
        f"{hub.server.endpoint}/alice/m/commit/{repo.branches['v2']}",
        'AutoModelForCausalLM.from_pretrained("alice/m", revision="v2", trust_remote_code=True)',
    ]
    assert repo.private and repo.commit_at("v2").title == "From the shell"


@pytest.mark.parametrize(
    ("name", "config", "said"),
    [
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, 'AutoModelForCausalLM.from_pretrained("a/b")'),
        (
            "config.json",
            {"architectures": ["T5ForConditionalGeneration"]},
            'AutoModelForSeq2SeqLM.from_pretrained("a/b")',
        ),
        ("config.json", {"architectures": ["BertModel"]}, 'AutoModel.from_pretrained("a/b")'),
        (
            "adapter_config.json",
            {"task_type": "SEQ_CLS"},
            'AutoPeftModelForSequenceClassification.from_pretrained("a/b")',
        ),
        ("adapter_config.json", {"task_type": None}, 'AutoPeftModel.from_pretrained("a/b")'),
    ],
)
def test_the_snippet_names_the_right_class(tmp_path: Path, name: str, config: dict, said: str):
    import peft
    import transformers

    from anyformer.recipes.hub import load_snippet

    (tmp_path / name).write_text(json.dumps(config))
    assert load_snippet(tmp_path, "a/b") == said
    library = peft if name.startswith("adapter") else transformers
    assert hasattr(library, said.partition(".")[0])


def test_importing_costs_no_client():
    code = "import sys, anyformer.recipes.hub; print({'huggingface_hub', 'torch', 'safetensors'} & set(sys.modules))"
    assert run_python(code, dict(os.environ)).stdout.strip() == "set()"
