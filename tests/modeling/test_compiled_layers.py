"""Regional compilation, as accelerate does it: one compiled layer for all that are alike, and the loss in chunks."""

import pytest
import torch
from accelerate.utils import compile_regions

from anyformer import AnyformerConfig, AnyformerForCausalLM
from anyformer.modeling import language_heads
from anyformer.modeling.plain import is_plain

KINDS = {
    "gqa": {"num_key_value_heads": 2},
    "mla": {"attention": "mla", "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8},
    "dense, learned": {"position_embedding": "learned", "mlp": "dense", "norm": "layernorm"},
    "alibi": {"position_embedding": "alibi"},
}
kinds = pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)


def tiny(layers, **fields):
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    config = AnyformerConfig(
        **sizes, num_hidden_layers=layers, num_attention_heads=4, initializer_range=0.3, use_cache=False, **fields
    )
    return AnyformerForCausalLM(config).train()


def tokens():
    return torch.randint(3, 101, (2, 9), generator=torch.Generator().manual_seed(1))


def graphs_of(layers, fields):
    """How many graphs a training step compiles, the loss of the compiled model, and that of the model itself."""
    torch.compiler.reset()
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    model = tiny(layers, **fields)
    expected = model(tokens(), labels=tokens()).loss
    loss = compile_regions(model, backend=backend)(tokens(), labels=tokens()).loss
    loss.backward()
    return len(compiled), loss, expected


@kinds
def test_layers_that_are_alike_are_compiled_once(fields):
    few, *_ = graphs_of(2, fields)
    many, loss, expected = graphs_of(12, fields)  # more than torch's limit of 8 compilations of one function
    assert many == few
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_the_loss_behind_a_compiled_head_is_computed_in_chunks_and_nothing_twice(monkeypatch):
    def never(*arguments):
        raise AssertionError("the logits are computed again in the backward pass")

    model = tiny(1, loss_chunk_size=4)
    expected = model(tokens(), labels=tokens()).loss
    expected.backward()
    gradient = model.lm_head.weight.grad.clone()
    model.zero_grad()
    monkeypatch.setattr(language_heads, "recomputed_cross_entropy", never)
    compiled = compile_regions(model, backend="eager")
    assert compiled.lm_head is not model.lm_head
    output = compiled(tokens(), labels=tokens())
    output.loss.backward()
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected, rtol=0, atol=0)
    torch.testing.assert_close(model.lm_head.weight.grad, gradient, rtol=0, atol=0)


@pytest.mark.parametrize("outside", [True, False])
def test_a_compiled_head_with_a_hook_is_not_plain(outside):
    head = torch.nn.Linear(3, 5)
    compiled = torch.compile(head, backend="eager")
    assert is_plain(compiled)
    (compiled if outside else head).register_forward_hook(lambda module, inputs, output: output * 2)
    assert not is_plain(compiled)
