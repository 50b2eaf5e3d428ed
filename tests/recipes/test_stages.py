"""Pipelines as they are read: the order, the references, overrides, and every fault at once."""

from pathlib import Path

import pytest
from recipe_files import write

from anyformer.recipes.loading import RecipeError, find_pipeline, load_recipe, shipped, shipped_pipelines
from anyformer.recipes.stages import load_pipeline

SFT = "model: {path: some/model}\ndata: {source: a.jsonl}\n"
POLICY = """\
model: {path: stage:sft}
data: {source: a.jsonl}
objective: {kind: grpo, reward: pep257}
train: {max_completion_length: 8}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stages("p", sft=SFT, policy=POLICY)


def stages(folder: str, **texts: str) -> str:
    for number, (name, text) in enumerate(texts.items(), 1):
        write(text, f"{folder}/{number}-{name}.yaml")
    return folder


def faults(folder: str = "p", *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load_pipeline(folder, overrides)
    return str(caught.value).splitlines()


def fault(folder: str = "p", *overrides: str) -> str:
    lines = faults(folder, *overrides)
    assert len(lines) == 1, lines
    return lines[0]


# The order and the folders


def test_stages_follow_their_numbers_and_write_below_the_pipeline():
    for number in (2, 10):
        write(SFT, f"many/{number}-s{number}.yaml")
    write(SFT, "many/1-first.yml")
    write("nonsense: 1\n", "many/common.yaml")  # not numbered, so no stage
    pipeline = load_pipeline("many")
    assert [stage.name for stage in pipeline.stages] == ["first", "s2", "s10"]
    assert [str(stage.folder) for stage in pipeline.stages] == [f"runs/many/{n}" for n in ("first", "s2", "s10")]
    assert (pipeline.name, pipeline.folder) == ("many", Path("runs/many"))


@pytest.mark.parametrize("name", ["3_dpo.yaml", "3 dpo.yaml", "3.dpo.yaml", "3-DPO.YAML", "3.yml"])
def test_a_file_that_only_looks_like_a_stage_is_told(name):
    write(SFT, f"p/{name}")
    assert f"{name}: begins with a number but is no stage: call it NUMBER-NAME.yaml, as 2-reward.yaml" in fault()


def test_no_stage_has_the_name_of_the_reports_base():
    write(SFT, "p/3-base.yaml")
    assert "'base' is what the report calls the model that the first stage starts from" in fault()


def test_a_folder_is_found_as_it_is_typed():
    for name in ("p", "p/", "./p", str(Path("p").resolve())):
        pipeline = load_pipeline(name)
        assert (pipeline.name, len(pipeline.stages)) == ("p", 2)
    assert find_pipeline("p/1-sft.yaml") is None and find_pipeline("nowhere") is None and find_pipeline("") is None


def test_references_become_folders():
    pipeline = load_pipeline("p")
    sft, policy = pipeline.stages
    assert (sft.inputs, policy.inputs) == ((), ("sft",))
    assert pipeline.resolved(policy).model.path == "runs/p/sft"
    assert pipeline.resolved(sft) == sft.recipe
    assert policy.recipe.model.path == "stage:sft"  # as it is written


def test_references_in_lists_and_tokenizers():
    # A reference that is no reward model is judged elsewhere; here a function stands beside a stage.
    text = POLICY.replace("path: stage:sft", "path: stage:sft, tokenizer: stage:sft")
    pipeline = load_pipeline(stages("q", sft=SFT, policy=text))
    assert pipeline.resolved(pipeline["policy"]).model.tokenizer == "runs/q/sft"


def test_what_is_planned_before_an_input_exists():
    first = (
        "model: {path: some/model, config: {use_cache: false}, tokenizer: some/tokenizer}\ndata: {source: a.jsonl}\n"
    )
    second = "model: {path: stage:one, dtype: bfloat16, config: {attention_dropout: 0.1}}\ndata: {source: a.jsonl}\n"
    third = "model: {path: stage:two}\ndata: {source: a.jsonl}\n"
    pipeline = load_pipeline(stages("q", one=first, two=second, three=third))
    model = pipeline.planned(pipeline["three"], done=()).model
    assert (model.path, model.tokenizer) == ("some/model", "some/tokenizer")
    assert model.config == {"use_cache": False, "attention_dropout": 0.1}
    assert model.dtype == "float32"  # its own
    assert pipeline.planned(pipeline["two"], done=()).model.dtype == "bfloat16"
    assert pipeline.planned(pipeline["three"], done=("one", "two")).model.path == "runs/q/two"


def test_what_is_planned_of_a_teacher():
    student = "model: {path: some/small}\ndata: {source: a.jsonl}\nobjective: {kind: distill, teacher: stage:sft}\n"
    pipeline = load_pipeline(stages("q", sft=SFT, student=student))
    assert pipeline["student"].inputs == ("sft",)
    assert pipeline.planned(pipeline["student"], done=()).objective.teacher == "some/model"
    assert pipeline.planned(pipeline["student"], done=("sft",)).objective.teacher == "runs/q/sft"
    assert pipeline.resolved(pipeline["student"]).objective.teacher == "runs/q/sft"
    new = "model: {preset: mini-gpt, tokenizer: some/tokenizer}\ndata: {source: a.jsonl}\n"
    pipeline = load_pipeline(stages("r", sft=new, student=student))
    assert pipeline.planned(pipeline["student"], done=()) is None


# Overrides


def test_overrides_address_one_stage_or_all():
    pipeline = load_pipeline("p", ["train.seed=3", "sft.train.max_steps=5", "policy.train.learning_rate=1e-3"])
    sft, policy = (stage.recipe.train for stage in pipeline.stages)
    assert (sft["seed"], sft["max_steps"]) == (3, 5) and "learning_rate" not in sft
    assert (policy["seed"], policy["learning_rate"]) == (3, 1e-3) and "max_steps" not in policy


def test_removals_address_one_stage():
    pipeline = load_pipeline("p", ["~policy.train.max_completion_length"])
    assert "max_completion_length" not in pipeline["policy"].recipe.train
    assert "~data.max_rows" in faults("p", "~data.max_rows")[0]


def test_the_pipelines_folder():
    pipeline = load_pipeline("p", ["train.output_dir=elsewhere", "sft.train.output_dir=mine"])
    assert pipeline.folder == Path("elsewhere")
    assert [str(stage.folder) for stage in pipeline.stages] == ["mine", "elsewhere/policy"]
    assert "must be the folder of the whole pipeline" in fault("p", "train.output_dir=3")


def test_an_override_that_suits_one_stage_only_says_whose_fault_it_is():
    line = fault("p", "train.max_completion_length=4")
    assert "override 'train.max_completion_length=4': sft.train.max_completion_length: unknown key" in line


def test_an_override_of_no_stage_and_no_section():
    line = fault("p", "polcy.train.seed=1")
    assert "did you mean 'policy'?" in line and "stages: sft, policy; sections: model, " in line
    assert "has no '='" in faults("p", "nonsense")[0]


# Faults


def test_every_fault_of_every_file_at_once():
    stages("q", sft=SFT + "train: {sed: 1}\n", policy=POLICY.replace("stage:sft", "stage:stf") + "eval: {sample: 1}\n")
    lines = faults("q")
    assert [line.split(": ")[0] for line in lines] == ["q/1-sft.yaml:3", "q/2-policy.yaml:1", "q/2-policy.yaml:5"]
    assert "train.sed: unknown key; did you mean 'seed'?" in lines[0]
    assert "model.path: stage:stf names no stage; did you mean 'sft'? stages before policy: sft" in lines[1]
    assert "eval.sample: unknown key; did you mean 'samples'?" in lines[2]


@pytest.mark.parametrize(
    ("where", "text", "said"),
    [
        ("sft", "stage:policy", "q/1-sft.yaml:1: model.path: stage:policy comes later; sft is the first stage"),
        ("policy", "stage:policy", "stage:policy is this stage itself; stages before policy: sft"),
        ("policy", "stage:", "stage: names no stage; stages before policy: sft"),
    ],
)
def test_a_stage_that_is_not_there_yet(where, text, said):
    texts = {"sft": SFT, "policy": POLICY} | {where: SFT.replace("some/model", text)}
    assert said in fault(stages("q", **texts))


def test_where_no_stage_can_be_named():
    stages("q", sft=SFT, more="model: {path: stage:sft}\ndata: {source: stage:sft}\n")
    assert "q/2-more.yaml:2: data.source: stage:sft cannot name a stage; these can: model.path, " in fault("q")


def test_a_stage_outside_a_pipeline():
    write(POLICY, "alone.yaml")
    for name in ("alone.yaml", "p/2-policy.yaml"):
        with pytest.raises(RecipeError, match=rf"{name}:1: model.path: names a stage \(stage:sft\), but .* by itself"):
            load_recipe(name)
    assert load_recipe("p/1-sft.yaml").model.path == "some/model"


def test_what_a_stage_makes_must_suit():
    apart = SFT + "adapter: {kind: lora, merge: false}\n"
    assert "keeps its adapter apart" in fault(stages("q", sft=apart, policy=POLICY))
    reward = POLICY.replace("pep257", "stage:sft")
    said = "objective.reward: stage:sft trains with the objective sft, which makes no reward model"
    assert said in fault(stages("r", sft=SFT, policy=reward))
    several = POLICY.replace("pep257", "[pep257, stage:sft]")
    assert "objective.reward.1: stage:sft trains" in fault(stages("s", sft=SFT, policy=several))


LORA = SFT + "adapter: {kind: lora, r: 4}\n"


@pytest.mark.parametrize(
    ("first", "adapter", "said"),
    [
        (SFT, "{path: stage:sft}", "adapter.path: stage:sft trains its weights in place (adapter.kind: none)"),
        (LORA, "{path: stage:sft, kind: ia3}", "makes an adapter of kind lora, and this one is ia3: write kind: lora"),
        (LORA, "{path: stage:sft, r: 8}", "makes an adapter that decides r itself: leave that out"),
        (LORA.replace("some/model", "another"), "{path: stage:sft}", "an adapter for another: model.path must be that"),
    ],
)
def test_an_adapter_that_cannot_be_gone_on_from(first, adapter, said):
    assert said in fault(stages("q", sft=first, more=f"{SFT}adapter: {adapter}\n"))


@pytest.mark.parametrize(("merge", "folder"), [("true", "runs/q/sft/adapter"), ("false", "runs/q/sft")])
def test_an_adapter_is_gone_on_from_where_it_is_kept(merge, folder):
    first = SFT + f"adapter: {{kind: lora, r: 4, merge: {merge}}}\n"
    pipeline = load_pipeline(stages("q", sft=first, more=f"{SFT}adapter: {{path: stage:sft}}\n"))
    assert pipeline.resolved(pipeline["more"]).adapter.path == folder
    assert pipeline.planned(pipeline["more"], done=()) is None
    assert pipeline.planned(pipeline["more"], done=("sft",)).adapter.path == folder


def test_names_and_numbers_of_stages():
    write(SFT, "q/1-a.yaml")
    write(SFT, "q/1-b.yaml")
    assert "q/1-b.yaml: has the number of 1-a.yaml" in fault("q")
    write(SFT, "r/1-a.yaml")
    write(SFT, "r/2-a.yml")
    assert "r/2-a.yml: is called as 1-a.yaml" in fault("r")
    write(SFT, "s/1-train.yaml")
    assert "'train' is the name of a section" in fault("s")
    write(SFT, "t/1-my stage.yaml")
    assert "'my stage' is no name" in fault("t")


def test_folders_that_would_overwrite_each_other():
    assert "stages sft and policy would write into one folder" in fault(
        "p", "sft.train.output_dir=x", "policy.train.output_dir=x/y"
    )
    assert any("holds the whole pipeline" in line for line in faults("p", "sft.train.output_dir=runs"))
    assert "would push to one repository, me/x" in fault("p", "hub={repo: me/x}")


def test_a_path_to_what_an_earlier_stage_writes():
    stages("q", sft=SFT, policy=POLICY.replace("stage:sft", "runs/q/sft"))
    assert "model.path: runs/q/sft is what stage sft writes: name it stage:sft" in fault("q")


def test_broken_files_are_told_for_each_stage():
    write("a: [\n", "q/1-sft.yaml")
    write("", "q/2-policy.yaml")
    lines = faults("q")
    assert lines[0].startswith("q/1-sft.yaml:") and "broken YAML" in lines[0]
    assert "q/2-policy.yaml:1: the file is empty" in lines[1]


def test_a_folder_without_stages_is_no_pipeline():
    write(SFT, "q/sft.yaml")
    with pytest.raises(RecipeError, match=r"q: is a folder: .*q/sft.yaml \(a pipeline's files are numbered"):
        load_recipe("q")
    with pytest.raises(RecipeError, match="no such pipeline"):
        load_pipeline("q")


# What is shipped


@pytest.mark.parametrize("name", shipped_pipelines())
def test_every_shipped_pipeline_loads(name):
    pipeline = load_pipeline(name)
    assert load_pipeline(f"configs/recipes/{name}/").stages == pipeline.stages
    assert not any(recipe.startswith(f"{name}/") for recipe in shipped("recipes"))
    for stage in pipeline.stages:
        assert stage.file.read_text(encoding="utf-8").startswith("# ")
