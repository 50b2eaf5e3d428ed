"""Llama in and out, against the stock class with random weights large enough to show any fault."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import anyformer
from anyformer.modeling.interop import ConversionError, compare_logits, import_model

ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "rope_theta": 5e4, "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.1, 1.3, 1.7],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}
SHAPES = {
    **{f"rope {name}": {"rope_parameters": rope} for name, rope in ROPES.items()},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "head_dim apart": {"head_dim": 16},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "gelu": {"hidden_act": "gelu_pytorch_tanh"},
}
shapes = pytest.mark.parametrize("fields", SHAPES.values(), ids=SHAPES.keys())


def stock_llama(seed=0, **fields):
    torch.manual_seed(seed)
    values = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    values |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    values |= {"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    model = LlamaForCausalLM(LlamaConfig(**(values | fields))).eval()
    for (
        name,
        parameter,
    ) in model.named_parameters():  # biases start at zero and norms at one: hide no fault there
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return model


@shapes
def test_logits_and_cached_generation_equal_the_stock_class(fields):
    stock = stock_llama(**fields)
    model = anyformer.from_hf(stock)
    tokens = torch.randint(3, 101, (40,), generator=torch.Generator().manual_seed(1))
    comparison = compare_logits(model, stock, tokens)
    assert max(comparison.plain, comparison.padded) <= 1e-5
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :4] = 0
    batch = tokens[:20].view(2, 10) * mask
    options = {"attention_mask": mask, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    ours = model.generate(batch, **options)
    if "short_factor" not in (fields.get("rope_parameters") or {}):
        assert torch.equal(ours, stock.generate(batch, **options))
        return
    # Longrope turns to other frequencies in mid-generation: this stock class keeps what it cached before, and turns
    # for all rows by the longest.
    del options["attention_mask"]
    for row, tokens, real in zip(ours, batch, mask.bool(), strict=True):
        assert row[-12:].tolist() == stock.generate(tokens[real][None], **options, use_cache=False)[0, -12:].tolist()


@shapes
def test_round_trip_is_bit_equal_and_keeps_the_config(tmp_path, fields):
    stock = stock_llama(**fields)
    stock.save_pretrained(tmp_path / "llama")
    model, report = import_model(tmp_path / "llama")
    assert report.used == len(load_file(tmp_path / "llama" / "model.safetensors"))
    assert report.unused_config_fields == [] and report.ignored == []
    model.save_pretrained(tmp_path / "ours")
    anyformer.to_hf(AutoModelForCausalLM.from_pretrained(tmp_path / "ours")).save_pretrained(tmp_path / "back")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(back) is LlamaForCausalLM
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("llama", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    first, last = (json.loads((tmp_path / d / "config.json").read_text()) for d in ("llama", "back"))
    assert first == last
    assert model.generation_config.to_dict() == back.generation_config.to_dict()


def test_import_copies_and_export_copies_unless_told():
    stock = stock_llama()
    model = anyformer.from_hf(stock)
    exported, shared = anyformer.to_hf(model), anyformer.to_hf(model, copy=False)
    with torch.no_grad():
        model.model.norm.weight.fill_(7.0)
    assert not (stock.model.norm.weight == 7).any()
    assert not (exported.model.norm.weight == 7).any()
    assert (shared.model.norm.weight == 7).all()


def test_half_precision_equals_the_stock_class_exactly():
    # `.to(bfloat16)` would round the stock class's rotary frequencies; loading in bfloat16 keeps them.
    model = anyformer.from_hf(stock_llama(), dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    comparison = compare_logits(model, anyformer.to_hf(model), torch.randint(3, 101, (40,)))
    assert comparison.equal and comparison.plain == 0.0


def test_sharded_folder_and_dtype(tmp_path):
    stock = stock_llama()
    stock.save_pretrained(tmp_path, max_shard_size="8KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = anyformer.from_hf(tmp_path, dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert torch.equal(model.lm_head.weight, stock.lm_head.weight.to(torch.bfloat16))


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def saved(folder, **fields):
    stock_llama(**fields).save_pretrained(folder)
    return folder


FAULTS = [
    ({}, lambda t: t.pop("lm_head.weight"), r"lm_head\.weight.*tie_word_embeddings is False"),
    ({}, lambda t: t.pop("model.layers.0.self_attn.k_proj.weight"), r"no weights for .*k_proj\.weight"),
    (
        {},
        lambda t: t.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
        r"does not use: .*q_norm",
    ),
    (
        {},
        lambda t: t.update({"model.layers.0.mlp.up_proj.bias": torch.ones(48)}),
        r"does not use: .*up_proj\.bias",
    ),
    (
        {},
        lambda t: t.update({"model.layers.9.mlp.up_proj.weight": torch.ones(2)}),
        r"does not use: .*layers\.9",
    ),
    (
        {"tie_word_embeddings": True},
        lambda t: t.update({"lm_head.weight": torch.ones(101, 32)}),
        r"tie_word_embeddings",
    ),
]


@pytest.mark.parametrize(("fields", "edit", "message"), FAULTS)
def test_weights_that_contradict_the_config_are_refused(tmp_path, fields, edit, message):
    change(saved(tmp_path, **fields), edit)
    with pytest.raises(ConversionError, match=message):
        anyformer.from_hf(tmp_path)


def test_a_tied_head_stored_twice_is_fine_and_old_rotary_buffers_are_reported(tmp_path):
    saved(tmp_path, tie_word_embeddings=True)
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    change(
        tmp_path,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone(), name: torch.ones(4)}),
    )
    model, report = import_model(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert report.ignored == [name]


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


CONFIGS = [
    ({"pretraining_tp": 2}, "pretraining_tp=2"),
    ({"model_type": "mamba"}, "'mamba' has no family file.*known: llama"),
    ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "dequantise"),
    ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "spiral"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary"),
    ({"num_attention_heads": "x"}, "num_attention_heads"),
]


@pytest.mark.parametrize(("values", "message"), CONFIGS)
def test_configs_that_ours_cannot_express_are_refused(tmp_path, values, message):
    edit_config(saved(tmp_path), **values)
    with pytest.raises(ConversionError, match=message):
        anyformer.from_hf(tmp_path)


def test_unread_config_fields_are_reported(tmp_path):
    edit_config(saved(tmp_path), is_llama_config=True)
    assert import_model(tmp_path)[1].unused_config_fields == ["is_llama_config"]


def test_sources_that_are_no_model(tmp_path):
    with pytest.raises(ConversionError, match=r"no config\.json"):
        anyformer.from_hf(tmp_path)
    with pytest.raises(ConversionError, match="no such file"):
        anyformer.from_hf(tmp_path / "x.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"not a gguf file")
    with pytest.raises(ConversionError, match="not a GGUF file"):
        anyformer.from_hf(tmp_path / "bad.gguf")
    folder = saved(tmp_path / "cut")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ConversionError, match="damaged or cut short"):
        anyformer.from_hf(folder)
    weights.unlink()
    with pytest.raises(ConversionError, match="missing"):
        anyformer.from_hf(folder)


EXPORTS = [
    ({"norm": "layernorm"}, "norm='layernorm'"),
    ({"mlp": "dense"}, "mlp='dense'"),
    ({"position_embedding": "none"}, "position_embedding='none'"),
    ({"attention_bias": True, "attention_out_bias": False}, "attention_bias"),
    ({"hidden_dropout": 0.1, "lm_head_bias": True}, "lm_head_bias=True.*hidden_dropout=0.1|hidden_dropout"),
]


@pytest.mark.parametrize(("fields", "message"), EXPORTS)
def test_what_llama_cannot_express_is_not_exported(tiny, fields, message):
    with pytest.raises(ConversionError, match=f"llama cannot express.*{message}"):
        anyformer.to_hf(tiny(**fields), model_type="llama")


def test_export_to_an_unknown_family(tiny):
    with pytest.raises(ConversionError, match="'gpt9' has no family file"):
        anyformer.to_hf(tiny(), model_type="gpt9")


def test_a_saved_anyformer_opens_as_it_is(tiny, tmp_path):
    model = tiny(mlp="dense")
    model.save_pretrained(tmp_path)
    assert torch.equal(anyformer.from_hf(tmp_path).lm_head.weight, model.lm_head.weight)


def test_every_field_of_the_stock_config_is_accounted_for():
    from dataclasses import fields

    from transformers.configuration_utils import PreTrainedConfig

    from anyformer.modeling.interop import FAMILIES
    from anyformer.modeling.interop.family import COMMON_FIELDS

    family = FAMILIES["llama"]
    own = {f.name for f in fields(LlamaConfig)} - {f.name for f in fields(PreTrainedConfig)}
    assert own <= set(family.config_fields.values()) | set(family.foreign_fixed) | set(COMMON_FIELDS)


def test_nothing_is_shared_between_source_and_result():
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    stock = stock_llama(rope_parameters=rope)
    model = anyformer.from_hf(stock)
    exported = anyformer.to_hf(model)
    model.generation_config.max_length, model.config.rope_parameters["factor"] = 999, 8.0
    for other in (stock, exported):
        assert other.generation_config.max_length != 999
        assert other.config.rope_parameters["factor"] == 2.0


def test_a_stale_index_beside_a_newer_single_file_is_not_read(tmp_path):
    stock_llama().save_pretrained(tmp_path, max_shard_size="10KB")
    newer = stock_llama(seed=1)
    newer.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert torch.equal(anyformer.from_hf(tmp_path).lm_head.weight, newer.lm_head.weight)


def test_a_padding_token_of_minus_one_means_none(tmp_path):
    stock_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pad_token_id": -1}))
    assert anyformer.from_hf(tmp_path).config.pad_token_id is None


def test_damaged_or_foreign_sources_say_so(tmp_path):
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\x00\x00")
    with pytest.raises(ConversionError, match=r"cut\.gguf"):
        anyformer.from_hf(tmp_path / "cut.gguf")
    stock = stock_llama()
    stock.save_pretrained(tmp_path / "shards", max_shard_size="10KB")
    (tmp_path / "shards" / "model.safetensors.index.json").write_text("{bad")
    with pytest.raises(ConversionError, match="no index of shards"):
        anyformer.from_hf(tmp_path / "shards")
    stock.save_pretrained(tmp_path / "sizes")
    config = json.loads((tmp_path / "sizes" / "config.json").read_text())
    (tmp_path / "sizes" / "config.json").write_text(json.dumps(config | {"vocab_size": 50}))
    with pytest.raises(ConversionError, match=r"embed_tokens\.weight is \[101, 32\], the config says \[50, 32\]"):
        anyformer.from_hf(tmp_path / "sizes")
    adapted = get_peft_model(stock, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    with pytest.raises(ConversionError, match="merge_and_unload"):
        anyformer.from_hf(adapted)


def test_export_does_not_drop_a_head_that_the_config_calls_tied():
    model = anyformer.from_hf(stock_llama(tie_word_embeddings=True))
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    with pytest.raises(ConversionError, match="tie_word_embeddings"):
        anyformer.to_hf(model)
