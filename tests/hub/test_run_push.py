"""Runs that end on the Hub, or begin there: `anyformer train` in a process of its own, against the loopback Hub."""

import hashlib
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from anyformer.recipes.hub import files_to_push

from .conftest import Hub, run_python

COMMAND = [sys.executable, "-P", "-c", "from anyformer.scripts.cli import main; main()"]
TOKENS = [[5, 6, 7, 8, 9, 10, 11, 12]]

# A process on another machine: without the project, with nothing downloaded yet.
ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "anyformer":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

model = LOAD
assert not any(name.startswith("anyformer.") for name in sys.modules)
torch.save(model(torch.tensor(TOKENS)).logits.detach(), LOGITS)
tokenizer = AutoTokenizer.from_pretrained(REPO, trust_remote_code=True, **OPTIONS)
print(type(model).__name__, len(tokenizer), model.generation_config.eos_token_id)
"""


@pytest.fixture
def recipe(tmp_path, tiny_checkpoint):
    """A function: write the recipe of a tiny run into the working folder `work`."""
    work = tmp_path / "work"
    work.mkdir()
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    rows = [{"prompt": f"from {words[i % 5]}", "completion": " ".join(words[i % 5 : i % 5 + 3])} for i in range(24)]
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def write(hub: str = "{repo: alice/tuned}", model: str = f"path: {tiny_checkpoint}", **adapter: object) -> None:
        settings = {"kind": "lora", "r": 4, "lora_alpha": 16, "target_modules": "all-linear"} | adapter
        (work / "recipe.yaml").write_text(
            f"""
model: {{{model}}}
adapter: {json.dumps(settings)}
data: {{source: rows.jsonl, eval_fraction: 0.2}}
train:
  output_dir: runs/tuned
  max_steps: 3
  save_steps: 2
  per_device_train_batch_size: 4
  learning_rate: 2e-2
  max_length: 64
  gradient_checkpointing: false
eval: {{samples: 1, max_new_tokens: 4}}
hub: {hub}
""",
            encoding="utf-8",
        )

    return write


@pytest.fixture
def anyformer(hub: Hub, tmp_path):
    """A function: one command in the working folder. No output and no file may ever hold a token."""

    def run(*words: str, typed: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *words],
            env=hub.env | {"COLUMNS": "200"} | env,
            cwd=tmp_path / "work",
            input=typed,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        secrets = [token.encode() for token in {*hub.server.tokens, env.get("HF_TOKEN") or hub.token}]
        texts = [done.stdout.encode(), done.stderr.encode()]
        texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
        for repo in hub.server.repos.values():
            texts += [hub.server.read(entry) for commit in repo.commits.values() for entry in commit.tree.values()]
        assert not any(secret in text for secret in secrets for text in texts)
        return done

    return run


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "work" / "runs" / "tuned"


def succeed(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


def open_elsewhere(hub: Hub, scratch: Path, repo: str, load: str = "", **options: str) -> tuple[str, torch.Tensor]:
    """The line that a machine without the project prints about `repo`, and the logits of TOKENS there."""
    load = load or "AutoModelForCausalLM.from_pretrained(REPO, trust_remote_code=True, **OPTIONS)"
    names = {"REPO": repo, "OPTIONS": options, "TOKENS": TOKENS, "LOGITS": str(scratch / "logits.pt")}
    code = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + ELSEWHERE.replace("LOAD", load)
    fresh = scratch / "elsewhere"
    done = run_python(code, hub.env | {"HF_HOME": str(fresh)})
    assert done.returncode == 0, done.stderr[-3000:]
    shutil.rmtree(fresh)
    return done.stdout.splitlines()[-1], torch.load(scratch / "logits.pt")


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(path).eval()(torch.tensor(TOKENS)).logits


def upload(hub: Hub, folder: Path, repo: str, revision: str | None = None) -> None:
    """Publish a folder as another tool would."""
    done = run_python(
        "from huggingface_hub import HfApi\napi = HfApi()\n"
        f"api.create_repo({repo!r}, private=True, exist_ok=True)\n"
        + (f"api.create_branch({repo!r}, branch={revision!r})\n" if revision else "")
        + f"api.upload_folder(repo_id={repo!r}, folder_path={str(folder)!r}, revision={revision!r})",
        hub.env,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# A run that ends on the Hub.


def test_a_run_is_pushed_and_opens_elsewhere(hub: Hub, recipe, anyformer, folder, tmp_path):
    recipe()
    said = succeed(anyformer("train", "recipe.yaml"))
    repo = hub.server.repos["alice/tuned"]
    assert repo.private
    assert f"Pushed to {hub.server.endpoint}/alice/tuned/commit/{repo.branches['main']}" in said
    assert "anyformer push" not in said  # it has been done

    pushed = hub.server.files("alice/tuned")
    assert set(pushed) == set(files_to_push(folder))
    assert {"config.json", "model.safetensors", "modeling_anyformer.py", "tokenizer.json"} <= set(pushed)
    assert {"README.md", "recipe.yaml", "metrics.json", "loss_curve.png"} <= set(pushed)
    assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= set(pushed)
    # The checkpoint is there to resume from, and stays there.
    assert (folder / "checkpoint-2" / "trainer_state.json").is_file()
    assert not any("checkpoint" in name or name.endswith((".pt", ".pth", ".bin")) for name in pushed)
    for name, data in pushed.items():
        assert name == "README.md" or data == (folder / name).read_bytes()
    assert pushed["loss_curve.png"].startswith(b"\x89PNG")

    found, there = open_elsewhere(hub, tmp_path, "alice/tuned")
    assert found == f"AnyformerForCausalLM {len(AutoTokenizer.from_pretrained(folder))} 2"
    assert torch.equal(there, logits(folder))


@pytest.mark.slow
def test_the_card_has_figures_recipe_and_command(hub: Hub, recipe, anyformer, folder, tmp_path):
    recipe()
    succeed(anyformer("train", "recipe.yaml"))
    card = hub.server.files("alice/tuned")["README.md"].decode()
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    for when in ("before", "after"):
        for name in ("loss", "perplexity"):
            assert f"{metrics[when][name]:.4f}" in card
    assert metrics["samples_after"][0]["prompt"] in card
    assert (folder / "recipe.yaml").read_text(encoding="utf-8").rstrip() in card
    assert "anyformer train recipe.yaml" in card and "loss_curve.png" in card
    assert 'from_pretrained("alice/tuned", trust_remote_code=True)' in card and "THIS_REPOSITORY" not in card
    assert str(tmp_path) not in card.split("```yaml")[0], "a folder of this machine, outside the recipe"
    from huggingface_hub import ModelCard

    data = ModelCard(card).data
    assert data.library_name == "transformers" and data.pipeline_tag == "text-generation"
    assert "anyformer" in data.tags and data.base_model is None  # a local base has no page


@pytest.mark.slow
def test_public_and_a_revision(hub: Hub, recipe, anyformer, folder, tmp_path):
    recipe(hub="{repo: alice/tuned, private: false, revision: v2, commit_message: Second try}")
    succeed(anyformer("train", "recipe.yaml"))
    repo = hub.server.repos["alice/tuned"]
    assert not repo.private
    assert hub.server.files("alice/tuned") == {}
    assert set(hub.server.files("alice/tuned", "v2")) == set(files_to_push(folder))
    assert repo.commit_at("v2").title == "Second try"
    _, there = open_elsewhere(hub, tmp_path, "alice/tuned", revision="v2")
    assert torch.equal(there, logits(folder))


# A push that cannot be is found before step 1.


def nothing_trained(done: subprocess.CompletedProcess[str], folder: Path) -> str:
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Held-out loss" not in done.stdout and "step" not in done.stdout
    left = {path.name for path in folder.rglob("*") if path.is_file()} if folder.exists() else set()
    assert left <= {"recipe.yaml"}
    return done.stderr


def test_no_right_to_write_stops_before_step_1(hub: Hub, recipe, anyformer, folder):
    recipe()
    error = nothing_trained(anyformer("train", "recipe.yaml", HF_TOKEN=""), folder)
    assert "no access token" in error and "HF_TOKEN" in error
    token = hub.server.add_token("alice", role="read")
    error = nothing_trained(anyformer("train", "recipe.yaml", "--overwrite", HF_TOKEN=token), folder)
    assert "read-only" in error and "alice/tuned" in error
    assert "alice/tuned" not in hub.server.repos
    assert hub.server.requests("PUT") == []


@pytest.mark.slow
def test_the_same_command_works_once_the_token_is_right(recipe, anyformer, folder):
    """A refused push must not leave a folder behind that then stands in the way."""
    recipe()
    nothing_trained(anyformer("train", "recipe.yaml", HF_TOKEN=""), folder)
    succeed(anyformer("train", "recipe.yaml"))


@pytest.mark.slow
def test_a_refused_push_does_not_cost_the_earlier_run(recipe, anyformer, folder):
    """--overwrite replaces a run by a new one, not by nothing."""
    recipe()
    succeed(anyformer("train", "recipe.yaml", "~hub"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert folder / "model.safetensors" in before
    assert anyformer("train", "recipe.yaml", "--overwrite", HF_TOKEN="").returncode == 2
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    # Nor does any other mistake that is found before training.
    done = anyformer("train", "recipe.yaml", "--overwrite", "~hub", "data.source=nowhere.jsonl")
    assert done.returncode == 2 and "nowhere.jsonl" in done.stderr
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_an_adapter_whose_base_nobody_has_is_refused(hub: Hub, recipe, anyformer, folder, options):
    recipe(merge=False)
    error = nothing_trained(anyformer("train", "recipe.yaml", *options), folder)
    assert "adapter.merge: true" in error and "only the adapter is pushed" in error
    assert hub.server.log == []
    assert not folder.exists()


def test_a_dry_run_asks_nothing_of_the_hub(hub: Hub, recipe, anyformer, folder):
    recipe()
    succeed(anyformer("train", "recipe.yaml", "--dry-run", HF_TOKEN=""))
    assert hub.server.log == [] and not folder.exists()


# A push that fails at the end.


@pytest.mark.slow
def test_a_failed_push_keeps_the_model_and_names_the_command(hub: Hub, recipe, anyformer, folder, tmp_path):
    recipe(hub="{repo: alice/tuned, revision: v2, commit_message: Take two}")
    hub.server.fail_next("POST", match="/commit/", status=None)
    done = anyformer("train", "recipe.yaml")
    assert done.returncode == 2
    assert "cannot be reached" in done.stderr and "The model is kept in runs/tuned." in done.stderr
    command = done.stderr.splitlines()[-1].strip()
    assert command == "anyformer push runs/tuned alice/tuned --revision v2 --message 'Take two'"
    assert hub.server.files("alice/tuned", "v2") == {}
    assert json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["after"]["loss"] > 0
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    local = logits(folder)

    said = succeed(anyformer(*shlex.split(command)[1:]))
    repo = hub.server.repos["alice/tuned"]
    assert f"{hub.server.endpoint}/alice/tuned/commit/{repo.branches['v2']}" in said
    assert repo.private and repo.commit_at("v2").title == "Take two"
    assert set(hub.server.files("alice/tuned", "v2")) == set(files_to_push(folder))
    assert kept == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    _, there = open_elsewhere(hub, tmp_path, "alice/tuned", revision="v2")
    assert torch.equal(there, local)
    # The weights had arrived the first time.
    digest = hashlib.sha256(kept[folder / "model.safetensors"]).hexdigest()
    assert [r.status for r in hub.server.requests("PUT", match=digest)] == [200]


DDP = ("--launch", "ddp", "--processes", "2")


@pytest.mark.slow
def test_two_processes_that_may_not_push_train_nothing(hub: Hub, recipe, anyformer, folder):
    recipe()
    token = hub.server.add_token("alice", role="read")
    error = nothing_trained(anyformer("train", "recipe.yaml", *DDP, HF_TOKEN=token), folder)
    assert "read-only" in error and 1 <= error.count("alice/tuned") <= 2
    assert hub.server.requests("PUT") == []


@pytest.mark.slow
def test_a_push_of_two_processes_that_fails_keeps_the_model(hub: Hub, recipe, anyformer, folder):
    """The first process alone pushes; what it says is said once, and the command's status is 2."""
    recipe()
    hub.server.fail_next("POST", match="/commit/", status=None)
    done = anyformer("train", "recipe.yaml", *DDP)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("The model is kept in runs/tuned.") == 1
    assert json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["finished"]
    said = succeed(anyformer("push", "runs/tuned", "alice/tuned"))
    assert f"{hub.server.endpoint}/alice/tuned/commit/" in said
    assert set(hub.server.files("alice/tuned")) == set(files_to_push(folder))
    assert len(hub.server.requests("POST", match="/commit/")) == 2


# A run that begins on the Hub.


@pytest.fixture
def base(hub: Hub, tiny_checkpoint) -> str:
    upload(hub, tiny_checkpoint, "alice/base")
    return "alice/base"


@pytest.mark.slow
def test_a_model_from_the_hub_merged(hub: Hub, recipe, anyformer, folder, base, tmp_path):
    recipe(model=f"path: {base}")
    said = succeed(anyformer("train", "recipe.yaml"))
    assert "Imported llama; logits against the stock class" in said
    _, there = open_elsewhere(hub, tmp_path, "alice/tuned")
    assert torch.equal(there, logits(folder))
    from huggingface_hub import ModelCard

    assert ModelCard(hub.server.files("alice/tuned")["README.md"].decode()).data.base_model == base


@pytest.mark.slow
def test_only_the_adapter_over_a_model_from_the_hub(
    hub: Hub, recipe, anyformer, folder, base, tmp_path, tiny_checkpoint
):
    recipe(model=f"path: {base}", merge=False)
    succeed(anyformer("train", "recipe.yaml"))
    pushed = hub.server.files("alice/tuned")
    assert json.loads(pushed["adapter_config.json"])["base_model_name_or_path"] == base
    assert {"adapter_model.safetensors", "tokenizer.json", "README.md", "recipe.yaml"} <= set(pushed)
    assert not {"config.json", "model.safetensors"} & set(pushed)

    from peft import PeftModel

    stock = LlamaForCausalLM.from_pretrained(tiny_checkpoint).eval()
    plain = stock(torch.tensor(TOKENS)).logits
    expected = PeftModel.from_pretrained(stock, folder).eval()(torch.tensor(TOKENS)).logits
    assert (expected - plain).abs().max() > 0.1  # it has learned something
    for load in ("AutoPeftModelForCausalLM.from_pretrained(REPO)", ""):
        _, there = open_elsewhere(hub, tmp_path, "alice/tuned", load)
        torch.testing.assert_close(there, expected, rtol=0, atol=1e-5)
    assert 'AutoModelForCausalLM.from_pretrained("alice/tuned"' in pushed["README.md"].decode()
    # The run folder answers here as well.
    succeed(anyformer("chat", "runs/tuned", "--max-new-tokens", "4", typed="one two\n/exit\n"))


@pytest.fixture
def base_v1(hub: Hub, base, tmp_path, tiny_checkpoint) -> str:
    """Another model on the branch `v1` of the base."""
    model = LlamaForCausalLM.from_pretrained(tiny_checkpoint)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    model.save_pretrained(tmp_path / "other")
    AutoTokenizer.from_pretrained(tiny_checkpoint).save_pretrained(tmp_path / "other")
    upload(hub, tmp_path / "other", base, revision="v1")
    return base


@pytest.mark.slow
def test_an_adapter_names_the_revision_of_its_base(hub: Hub, recipe, anyformer, folder, base_v1, tmp_path):
    recipe(model=f"path: {base_v1}, revision: v1")
    succeed(anyformer("train", "recipe.yaml"))
    config = json.loads(hub.server.files("alice/tuned")["adapter/adapter_config.json"])
    assert (config["base_model_name_or_path"], config["revision"]) == (base_v1, "v1")
    load = (
        "AutoPeftModelForCausalLM.from_pretrained(__import__('huggingface_hub').snapshot_download(REPO) + '/adapter')"
    )
    _, there = open_elsewhere(hub, tmp_path, "alice/tuned", load)
    torch.testing.assert_close(there, logits(folder), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("hub_section", ["null", "{repo: alice/tuned}"])
def test_an_adapter_by_itself_over_a_revision_is_refused(recipe, anyformer, folder, base_v1, hub_section):
    """AutoModelForCausalLM reads the base's name from an adapter, not its revision: it would open another model."""
    recipe(hub=hub_section, model=f"path: {base_v1}, revision: v1", merge=False)
    error = nothing_trained(anyformer("train", "recipe.yaml"), folder)
    assert "model.revision" in error and "adapter.merge" in error


def test_a_private_base_without_a_token_is_one_clear_error(hub: Hub, recipe, anyformer, folder, base):
    recipe(model=f"path: {base}", hub="null")
    done = anyformer("train", "recipe.yaml", HF_TOKEN="")
    assert done.returncode == 2
    assert base in done.stderr and done.stderr.count("\n") <= 3
    assert not (folder / "model.safetensors").exists()


@pytest.mark.slow
def test_import_and_chat_from_the_hub(anyformer, base, tmp_path, tiny_checkpoint):
    (tmp_path / "work").mkdir(exist_ok=True)
    assert "alice/base: llama" in succeed(anyformer("import", base, "ours"))
    weights = [load_file(path / "model.safetensors") for path in (tiny_checkpoint, tmp_path / "work" / "ours")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    done = anyformer("import", "alice/absent", "x")
    assert done.returncode == 2 and "alice/absent" in done.stderr
    assert "neither a local folder nor a Hub repository" in done.stderr
    said = succeed(anyformer("chat", base, "--max-new-tokens", "4", typed="one two\n/exit\n"))
    assert said.count("you> ") == 2 and len(said.splitlines()[0]) > len("you> ")
