"""FLOPs of a plan against torch's counter over real steps, of real depth."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from anyformer import AnyformerConfig
from anyformer.modeling import HEADS
from anyformer.recipes.loading import load_preset, shipped
from anyformer.recipes.planning.flops import flops_of
from anyformer.recipes.planning.memory import step_of
from anyformer.recipes.planning.setting import Setting

aten = torch.ops.aten
# torch's own formulas, for the kernels of CPUs that its counter does not know.
KERNELS = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *given, **more: sdpa_flop_count(q, k, v),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda g, q, k, v, *given, **more: sdpa_backward_flop_count(g, q, k, v)
    ),
    # Each token is multiplied with the matrix of its expert, whichever that is.
    aten._grouped_mm: lambda left, right, *given, **more: 2 * left[-2] * left[-1] * right[-1],
}
HEAD = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "seq2seq_lm"}
ROWS, LENGTH = 2, 40


def small(name):
    """A preset with its own blocks and pattern of layers, but narrow."""
    fields = load_preset(name) | {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 96}
    fields |= {"num_attention_heads": 4, "max_position_embeddings": 64, "num_hidden_layers": 5}
    if fields.get("num_key_value_heads"):
        fields["num_key_value_heads"] = 2
    if fields.get("num_encoder_layers"):
        fields["num_encoder_layers"] = 3
    for names, size in (
        (("head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 16),
        (("sliding_window",), 8),
    ):
        fields |= {field: size for field in names if fields.get(field)}
    for field, size in {"q_lora_rank": 24, "kv_lora_rank": 16, "moe_intermediate_size": 32}.items():
        if fields.get(field):
            fields[field] = size
    if fields.get("num_experts"):
        fields |= {"num_experts": 8, "num_experts_per_tok": 2} | (
            {"n_group": 2, "topk_group": 1} if "n_group" in fields else {}
        )
    if fields.get("shared_expert_intermediate_size"):
        fields["shared_expert_intermediate_size"] = 32
    if "yarn" in str(fields.get("rope_parameters")):
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0}
    for field in ("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"):
        if fields.get(field) is not None:
            fields[field] = fields[field] if isinstance(fields[field], int) and fields[field] < 256 else 1
    if fields.get("architecture") == "encoder-decoder":
        fields |= {"decoder_start_token_id": 1, "pad_token_id": 0}
    if fields.get("layer_types"):
        fields["layer_types"] = fields["layer_types"][:5]
    return fields


def counted(config, head, checkpointing, attention):
    """Forward and total FLOPs of a real step."""
    config._attn_implementation = attention
    model = HEADS[head](config).train()
    if checkpointing == "layers":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 250, (ROWS, LENGTH))
    options = {} if head == "masked_lm" else {"use_cache": False}
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        loss = model(input_ids=ids, labels=ids, **options).loss
        forward = counter.get_total_flops()
        loss.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("checkpointing", ["none", "layers"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", shipped("models"))
def test_flops_are_those_of_torchs_counter(name, attention, checkpointing):
    config = AnyformerConfig(**small(name))
    if attention == "sdpa" and config.attn_logit_softcapping is not None:
        pytest.skip("sdpa has no soft cap")
    head = HEAD[config.architecture]
    forward, total = counted(config, head, checkpointing, attention)
    source = LENGTH if config.architecture == "encoder-decoder" else 0
    setting = Setting(config, head=head, batch=ROWS, length=LENGTH, source=source, attention=attention)
    found = flops_of(step_of(setting.but(checkpointing=checkpointing)))
    assert found.total == pytest.approx(total, rel=0.01)
    assert found.forward == pytest.approx(forward, rel=0.01)
    assert found.forward == pytest.approx(
        ROWS * config.counts(sequence_length=LENGTH, head=head).forward_flops, rel=0.01
    )
    assert (found.recomputed > 0) == (checkpointing == "layers")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_attentions_part_is_what_grows_with_the_square(attention):
    config = AnyformerConfig(**small("mini-llama"))
    setting = Setting(config, batch=1, attention=attention)
    short, long = (flops_of(step_of(setting.but(length=length))) for length in (32, 64))
    assert long.attention == 4 * short.attention > 0
    assert long.total - long.attention == pytest.approx(2 * (short.total - short.attention), rel=0.01)


def test_a_frozen_base_spares_the_gradients_of_its_weights():
    from peft import LoraConfig, get_peft_model

    from anyformer.recipes.schema.recipe import adapter_model

    config = AnyformerConfig(**small("mini-llama"), attn_implementation="sdpa")
    model = get_peft_model(HEADS["causal_lm"](config), LoraConfig(r=4, target_modules="all-linear")).train()
    ids = torch.randint(3, 250, (ROWS, LENGTH))
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    adapter = adapter_model("lora").model_validate({"kind": "lora", "r": 4})
    found = flops_of(step_of(Setting(config, batch=ROWS, length=LENGTH, adapter=adapter)))
    assert found.total == pytest.approx(counter.get_total_flops(), rel=0.01)
