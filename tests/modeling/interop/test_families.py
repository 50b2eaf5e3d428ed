"""Every family against its stock class: outputs, generation, round trip."""

import json

import pytest
import torch
import transformers

import anyformer
from anyformer.modeling.interop.families import FAMILIES
from anyformer.modeling.interop.parity import measure, random_stock

# In fp32 what differs is the order of additions: with weights of this size logits reach about 20.
TOLERANCE = 1e-5
EXAMPLES = [(name, i) for name, family in FAMILIES.items() for i in range(len(family.examples))]
HEADS = [(name, head) for name, family in FAMILIES.items() for head in family.heads]


def test_the_families_that_must_be_there():
    wanted = """gpt2 gpt_neox gptj opt bloom mpt falcon llama mistral ministral qwen2 qwen3 gemma gemma2 gemma3_text phi
    phi3 stablelm starcoder2 cohere cohere2 olmo olmo2 granite smollm3 glm4 nemotron mixtral qwen2_moe qwen3_moe olmoe
    deepseek_v2 deepseek_v3 gpt_oss bert roberta distilbert modernbert t5 bart marian pegasus"""
    assert set(wanted.split()) <= set(FAMILIES)
    assert all(name == family.model_type for name, family in FAMILIES.items())


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_outputs_generation_and_round_trip_equal_the_stock_class(name, example):
    family = FAMILIES[name]
    parity = measure(family, family.examples[example])
    assert parity.difference <= TOLERANCE, parity
    assert parity.generated is not False
    assert parity.round_trip


@pytest.mark.parametrize(("name", "head"), HEADS)
def test_every_head_equals_its_stock_class(name, head):
    parity = measure(FAMILIES[name], head=head)
    assert parity.difference <= TOLERANCE, parity
    assert parity.round_trip


@pytest.mark.parametrize("name", FAMILIES)
def test_a_saved_stock_folder_imports_and_comes_back(name, tmp_path):
    family = FAMILIES[name]
    stock = random_stock(family, family.examples[0])
    stock.save_pretrained(tmp_path / "stock")
    model = anyformer.from_hf(tmp_path / "stock")
    model.save_pretrained(tmp_path / "ours")
    reopened = type(model).from_pretrained(tmp_path / "ours")
    anyformer.to_hf(reopened, model_type=name).save_pretrained(tmp_path / "back")
    back = type(stock).from_pretrained(tmp_path / "back")
    for key, tensor in stock.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    before, after = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("stock", "back"))
    assert before == after


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_the_stock_config_is_read_or_named_free(name):
    """A field that nobody reads would be dropped in silence."""
    family = FAMILIES[name]
    config = random_stock(family, family.examples[0]).config
    unused = set(family.free_fields) - set(family.own_fields(type(config)))
    assert not unused, f"free_fields that {name} does not have: {unused}"
    assert set(family.own_fields(type(config))) <= family.fields_read(config) | set(family.free_fields)


@pytest.mark.parametrize("name", FAMILIES)
def test_stock_classes_exist(name):
    assert all(hasattr(transformers, cls) for cls in FAMILIES[name].heads.values())
