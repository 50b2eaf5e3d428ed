"""What the documents and the shipped YAML files promise: commands run, names exist, links lead somewhere."""

import ast
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hub.conftest import Hub, hub  # noqa: F401  the fixture, which lives in another folder

from anyformer import AnyformerConfig
from anyformer.recipes.loading import load_preset, load_recipe, shipped, shipped_pipelines
from anyformer.recipes.stages import load_pipeline
from anyformer.scripts.cli import VERBS

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
COMMAND = [sys.executable, "-P", "-c", "from anyformer.scripts.cli import main; main()"]

# Makes every documented training short; what it trains stays as documented.
FAST = shlex.split(
    "train.max_steps=2 data.max_rows=16 data.max_eval_rows=4 eval.samples=1 eval.max_new_tokens=4 train.save_steps=1"
)
# What a documented `make` target must end in.
MAKE_ENDS_IN = {
    "quickstart": "anyformer train configs/recipes/quickstart.yaml",
    "test": "-m pytest",
    "test-fast": "-m pytest",
    "format": "ruff format",
    "families": "mv build/families.md docs/families.md",
}
# Commands of README.md that cannot be run here, with the reason.
SKIPPED: dict[str, str] = {}


def git_files(*patterns: str) -> list[Path]:
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("needs a git checkout, to know which files belong to the project")
    done = subprocess.run([git, "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def outside_make() -> dict[str, str]:
    """The environment without what a surrounding `make test` leaves in it: an inner make would take over its flags."""
    return {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}


def documents() -> list[Path]:
    return git_files("*.md")


class Block(NamedTuple):
    language: str
    text: str


FENCE = re.compile(r"^(?P<fence>`{3,}) *(?P<language>\w*)[^\n]*\n(?P<text>.*?)^(?P=fence) *$", re.MULTILINE | re.DOTALL)


def blocks(document: Path, language: str) -> list[str]:
    found = [Block(m["language"], m["text"]) for m in FENCE.finditer(document.read_text(encoding="utf-8"))]
    return [block.text for block in found if block.language == language]


def commands(document: Path) -> Iterator[list[str]]:
    """The commands of the bash blocks, in order, without their comments."""
    for text in blocks(document, "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


def inline_code(document: Path) -> list[str]:
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", document.read_text(encoding="utf-8")))


# The shipped files.


@pytest.mark.parametrize("name", shipped("recipes"))
def test_a_shipped_recipe_loads(name):
    recipe = load_recipe(name)
    assert recipe.model.path or recipe.model.preset


@pytest.mark.parametrize("name", shipped_pipelines())
def test_a_shipped_pipeline_loads(name):
    assert len(load_pipeline(name).stages) >= 2


@pytest.mark.parametrize("file", sorted((ROOT / "configs/recipes").rglob("*.yaml")), ids=lambda f: f.stem)
def test_a_shipped_recipe_says_what_it_is(file):
    # The first comment is what `anyformer list` shows.
    assert file.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("file", sorted((ROOT / "configs/models").rglob("*.yaml")), ids=lambda f: f.stem)
def test_a_shipped_preset_is_a_config(file):
    config = AnyformerConfig(**load_preset(file))
    assert config.counts().total_parameters > 1_000_000
    assert file.read_text(encoding="utf-8").startswith("# ")


def test_there_is_something_shipped():
    assert {p.stem for p in (ROOT / "configs/recipes").rglob("*.yaml")} >= {"quickstart", "sft-full", "sft-lora"}
    assert list((ROOT / "configs/models").rglob("*.yaml"))


# README.md: the commands.


class Shell:
    """Runs the commands of README.md, one after the other in one folder."""

    def __init__(self, hub: Hub, folder: Path) -> None:  # noqa: F811
        self.hub, self.folder = hub, folder

    def run(self, words: list[str]) -> str:
        name, *rest = words
        if name == "make":
            return self.make(rest)
        assert name == "anyformer", f"neither make nor anyformer: {shlex.join(words)}"
        verb, typed = rest[0], ""
        if verb == "train" and not {"--print-config", "--dry-run"} & set(rest):
            rest = [*rest, *FAST]
            if "--resume" in rest:
                self.halt([word for word in rest if word != "--resume"])
        elif verb == "push":
            rest = [re.sub(r"^your-name/", "alice/", word) for word in rest]
        elif verb == "chat":
            typed = "Say hello.\n/exit\n"
        return self.call(COMMAND, rest, typed)

    def call(self, command: list[str], words: list[str], typed: str = "", status: int = 0) -> str:
        done = subprocess.run(
            [*command, *words],
            env=self.hub.env | {"COLUMNS": "200"},
            cwd=self.folder,
            input=typed,
            capture_output=True,
            text=True,
            timeout=900,
        )
        shown = f"{shlex.join(words)}: status {done.returncode}\n{done.stdout[-1500:]}\n{done.stderr[-1500:]}"
        assert done.returncode == status, shown
        return done.stdout

    def halt(self, words: list[str]) -> None:
        """Begin the run that `--resume` goes on with: interrupted, as by Ctrl-C, after its first checkpoint."""
        code = """
from anyformer.recipes.progress import TrainingProgress

def halt(*args, **kwargs):
    raise KeyboardInterrupt

TrainingProgress.on_save = halt
from anyformer.scripts.cli import main
main()
"""
        self.call([sys.executable, "-P", "-c", code], words, status=130)

    def make(self, words: list[str]) -> str:
        """What make would run; the tests run inside of it already."""
        make = shutil.which("make")
        if make is None:
            return ""
        done = subprocess.run([make, "-n", *words], cwd=ROOT, env=outside_make(), capture_output=True, text=True)
        assert done.returncode == 0, f"make {shlex.join(words)}: {done.stderr}"
        target = next(word for word in words if "=" not in word)
        assert MAKE_ENDS_IN.get(target, "") in done.stdout.strip().splitlines()[-1]
        return done.stdout


@pytest.fixture
def folder() -> Iterator[Path]:
    """Removed at once: the runs of the real model take gigabytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_commands_of_the_readme_run(hub: Hub, folder: Path, smollm2_gguf):  # noqa: F811
    documented = list(commands(README))
    assert {words[1] for words in documented if words[0] == "anyformer"} >= {"train", "chat", "export", "push"}
    shown = [shlex.join(words) for words in documented]
    assert set(SKIPPED) <= set(shown), "SKIPPED names commands that README.md no longer has"
    shell = Shell(hub, folder)
    said = {text: shell.run(words) for text, words in zip(shown, documented, strict=True) if text not in SKIPPED}

    # That they ended well is not all: what the text around them says is there.
    run = folder / "runs/quickstart"
    promised = ["recipe.yaml", "metrics.json", "loss_curve.png", "README.md", "model.safetensors", "tokenizer.json"]
    assert not [name for name in promised if not (run / name).is_file()]
    assert (run / "adapter" / "adapter_model.safetensors").is_file() and list(run.glob("checkpoint-*"))
    assert len(json.loads((run / "metrics.json").read_text(encoding="utf-8"))["history"]) > 0
    assert (folder / "runs/again/model.safetensors").is_file()
    exported = json.loads((folder / "runs/quickstart-llama/config.json").read_text(encoding="utf-8"))
    assert exported["architectures"] == ["LlamaForCausalLM"]
    assert "model.safetensors" in hub.server.files("alice/docstrings") and hub.server.repos["alice/docstrings"].private
    printed = next(text for command, text in said.items() if "--print-config" in command)
    (folder / "printed.yaml").write_text(printed, encoding="utf-8")
    assert load_recipe(folder / "printed.yaml").train["output_dir"] == "runs/quickstart"


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_every_make_target_of_the_documents_exists():
    named = {
        text.split()[1]
        for document in documents()
        for text in [*inline_code(document), *(shlex.join(words) for words in commands(document))]
        if re.match(r"make [a-z]", text)
    }
    assert {"quickstart", "test", "test-fast"} <= named
    for target in named:
        done = subprocess.run(["make", "-n", target], cwd=ROOT, env=outside_make(), capture_output=True, text=True)
        assert done.returncode == 0, f"make {target}: {done.stderr}"
        assert MAKE_ENDS_IN.get(target, "") in done.stdout.strip().splitlines()[-1]


# README.md: the code and the recipe.


def test_the_python_of_the_documents_compiles_and_imports_what_exists():
    seen = 0
    for document in documents():
        for text in blocks(document, "python"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "anyformer":
                    module = importlib.import_module(node.module)
                    seen += len(node.names)
                    assert not [a.name for a in node.names if not hasattr(module, a.name)], f"{document.name}: {text}"
    assert seen >= 4


def test_the_python_of_the_readme_defines_what_it_uses(tmp_path):
    file = tmp_path / "readme.py"
    file.write_text("\n\n".join(blocks(README, "python")), encoding="utf-8")
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--quiet", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configs_of_the_readme_construct():
    built = 0
    for text in blocks(README, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "AnyformerConfig":
                values = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
                if f'register("{values.get("mlp")}")' not in text:
                    assert AnyformerConfig(**values).counts().total_parameters > 0
                    built += 1
    assert built > 0


def test_the_recipe_of_the_readme_loads_and_is_the_one_it_names(tmp_path):
    explained = [text for text in blocks(README, "yaml") if re.search(r"^model:", text, re.MULTILINE)]
    assert explained
    shipped = load_recipe("quickstart").model_dump()
    for text in explained:
        file = tmp_path / "recipe.yaml"
        file.write_text(text, encoding="utf-8")
        recipe = load_recipe(file)
        assert recipe.hub is not None and recipe.hub.private
        from ruamel.yaml import YAML

        for section, keys in YAML(typ="safe").load(text).items():
            given = recipe.model_dump()[section]
            for key in keys if section != "hub" else ():
                assert given[key] == shipped[section][key], f"{section}.{key} differs from quickstart.yaml"


# Every document, and every file.


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def test_relative_links_lead_somewhere():
    wrong, seen = [], 0
    for document in documents():
        text = FENCE.sub("", document.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(\s*<?([^)\s>]+)", text):
            if re.match(r"[a-z][a-z0-9+.-]*:", target):
                continue
            seen += 1
            path, _, anchor = target.partition("#")
            file = (document.parent / path).resolve() if path else document
            if not file.exists() or not file.is_relative_to(ROOT):
                wrong.append(f"{document.relative_to(ROOT)}: {target}")
            elif anchor and file.suffix == ".md":
                headings = re.findall(r"^#+ (.+)$", FENCE.sub("", file.read_text(encoding="utf-8")), re.MULTILINE)
                if anchor not in map(slug, headings):
                    wrong.append(f"{document.relative_to(ROOT)}: {target}")
    assert seen > 0 and not wrong, wrong


def test_the_files_that_documents_name_exist():
    """Paths in inline code, as `configs/recipes/quickstart.yaml`, that begin with a folder of the project."""
    folders = {p.name for p in ROOT.iterdir() if p.is_dir() and not p.name.startswith(".")} - {"runs"}
    wrong = []
    for document in documents():
        for text in inline_code(document):
            named = re.fullmatch(r"([\w-]+)/[\w./*-]*", text)
            if named and named[1] in folders and not list(ROOT.glob(text)):
                wrong.append(f"{document.relative_to(ROOT)}: {text}")
    assert not wrong, wrong


def test_every_verb_that_documents_name_is_one():
    named = set()
    for document in documents():
        fenced = "\n".join(m["text"] for m in FENCE.finditer(document.read_text(encoding="utf-8")))
        lines = [*inline_code(document), *fenced.splitlines()]
        for line in lines:
            if match := re.match(r"\s*(?:\$ )?(?:\.venv/bin/)?anyformer +([a-z][\w-]*)", line):
                named.add(match[1])
    assert named >= {"train", "chat", "push", "export"}
    assert named <= set(VERBS), named - set(VERBS)


def test_no_placeholder_is_left():
    for document in documents():
        lines = FENCE.sub("", document.read_text(encoding="utf-8")).splitlines()
        left = [line for line in lines if re.fullmatch(r"\s*[A-Z]+_[A-Z_]+\s*|.*\b(?:TODO|TBD|FIXME|XXX)\b.*", line)]
        assert not left, f"{document.name}: {left}"


# A path of somebody's machine, and the host of a package registry. Written so that this file holds neither.
FOREIGN = re.compile(
    r"(?<![\w.~/-])/(?:work|root|home|tmp|Users)(?![\w-])"
    r"|pypi\.(?:org|python)|pythonhosted\.|npmjs\.|debian\.(?:org|net)|anaconda\.|crates\.io|proxy\.golang",
)


def test_no_file_names_a_path_of_a_machine_or_a_registry():
    wrong, seen = [], 0
    for file in git_files():
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        seen += 1
        for number, line in enumerate(text.split("\n"), 1):
            if match := FOREIGN.search(line):
                wrong.append(f"{file.relative_to(ROOT)}:{number}: {match[0]}")
    assert seen > 20 and not wrong, wrong


def test_what_that_test_looks_for_is_found():
    slash = "/"
    for text in (f"cd {slash}tmp", f"'{slash}root/x'", f"={slash}home/a", "https://pypi" + ".org/simple"):
        assert FOREIGN.search(text), text
    for text in ("tests/tmp", "~/work", "runs/home/x", "https://example.com/work", f"{slash}nowhere{slash}tmp"):
        assert not FOREIGN.search(text), text
