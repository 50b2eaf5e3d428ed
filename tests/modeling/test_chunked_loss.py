"""The loss in chunks: the same value and gradients as from all logits at once, and never more than a chunk of them."""

import copy
import subprocess
import sys

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

from anyformer import AnyformerConfig, AnyformerForCausalLM, to_hf
from anyformer.modeling.losses import token_loss

VOCABULARY = 101
BOTH = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1}
MASKED = {"head": "masked_lm", "architecture": "encoder", "head_transform": True}
PAIR = MASKED | {"head": "pretraining", "pooler": True}
HEADS = {
    "causal": {},
    "causal, tied": {"tie_word_embeddings": True},
    "causal, bias": {"lm_head_bias": True},
    "causal, scaled": {"logit_scale": 0.3},
    "causal, capped": {"final_logit_softcapping": 4.0},
    "causal, all": {
        "tie_word_embeddings": True,
        "lm_head_bias": True,
        "logit_scale": 0.3,
        "final_logit_softcapping": 4.0,
    },
    "seq2seq": BOTH,
    "seq2seq, tied": BOTH | {"tie_word_embeddings": True, "lm_head_bias": True, "logit_scale": 0.3},
    "masked": MASKED,
    "masked, tied": MASKED | {"tie_word_embeddings": True, "lm_head_bias": True, "final_logit_softcapping": 4.0},
    "pretraining": PAIR | {"tie_word_embeddings": True, "lm_head_bias": True},
}
heads = pytest.mark.parametrize("fields", HEADS.values(), ids=HEADS)
chunks = pytest.mark.parametrize("chunk", [1, 3])


def ids(*shape, seed=1, high=VOCABULARY):
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(seed))


def some_labels(pattern="prompts"):
    """[3, 7] labels; of the first row only the end is learned, of the second nothing, or what the pattern says."""
    labels = ids(3, 7, seed=2)
    if pattern == "prompts":
        labels[0, :4], labels[1] = -100, -100
    if pattern == "one":
        labels[:], labels[2, 3] = -100, 17
    if pattern == "first":  # which a shift drops
        labels[:], labels[:, 0] = -100, 17
    if pattern == "none":
        labels[:] = -100
    return labels


def loss_of_all_logits(model, tokens, labels, items=None, **inputs):
    """The loss by its formula, from the logits that the model gives without labels."""
    config = model.config
    if config.architecture == "encoder-decoder":
        shifted = torch.cat([torch.full_like(labels[:, :1], config.decoder_start_token_id), labels[:, :-1]], 1)
        inputs["decoder_input_ids"] = shifted.masked_fill(shifted == -100, config.pad_token_id)
    output = model(tokens, **inputs)
    logits = output.prediction_logits if output.logits is None else output.logits
    if config.architecture == "decoder":
        logits, labels = logits[:, :-1], labels[:, 1:]
    total = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (max((labels != -100).sum(), 1) if items is None else items)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def in_chunks(model, chunk, tokens, labels, **inputs):
    """The output with labels, computed in chunks: it has no logits of the vocabulary."""
    model.config.loss_chunk_size = chunk
    output = model(tokens, labels=labels, **inputs)
    assert output.logits is None and output.prediction_logits is None
    return output


def check_gradients(got, expected, tolerance=1e-5):
    """Differences in parts of the largest value of each gradient.

    Where that is far below the others, as in attention to a single token, the gradient is 0 but for rounding.
    """
    assert set(got) == set(expected)
    least = 0.05 * max(g.abs().max() for g in expected.values() if g is not None)
    for name, right in expected.items():
        if right is None:
            assert got[name] is None, name
            continue
        assert got[name].dtype == right.dtype
        gap, scale = (got[name].float() - right.float()).abs().max(), right.float().abs().max()
        assert gap <= tolerance * max(scale, least), f"{name}: {gap:.1e} where gradients reach {scale:.1e}"


def check(model, tokens, labels, chunk, **inputs):
    expected = loss_of_all_logits(model, tokens, labels, **inputs)
    right = gradients(model, expected)
    loss = in_chunks(model, chunk, tokens, labels, **inputs).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    check_gradients(gradients(model, loss), right)
    return right


@heads
@chunks
def test_loss_and_every_gradient_are_those_of_all_logits(tiny, fields, chunk):
    right = check(tiny(**fields).train(), ids(3, 7), some_labels(), chunk)
    assert all(g is None or g.abs().max() > 0 for n, g in right.items() if "k_proj.bias" not in n)


@pytest.mark.parametrize("pattern", ["all", "prompts", "one", "first", "none"])
@pytest.mark.parametrize(
    "fields", [HEADS["causal, all"], HEADS["masked, tied"], BOTH], ids=["causal", "masked", "both"]
)
def test_every_pattern_of_labels(tiny, fields, pattern):
    check(tiny(**fields).train(), ids(3, 7), some_labels(pattern), 2)


@pytest.mark.parametrize("adapter", [False, True])
@pytest.mark.parametrize("fields", [HEADS["causal, all"], MASKED], ids=["causal", "masked"])
def test_without_any_label_the_loss_is_a_connected_zero_and_a_warning(tiny, caplog, fields, adapter):
    model = tiny(**(fields | {"tie_word_embeddings": not adapter})).train()
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False))
    loss = in_chunks(model, 2, ids(3, 7), torch.full((3, 7), -100)).loss
    assert "None of the 3 rows" in caplog.text
    assert loss.item() == 0
    for name, gradient in gradients(model, loss).items():
        assert gradient is not None and (gradient == 0).all(), name


@pytest.mark.parametrize(("items", "warned"), [(None, True), (0, True), (7, False), (torch.tensor(7), False)])
def test_rows_without_a_label_beside_others_of_their_step_are_no_fault(caplog, items, warned):
    """As those that fill the last step of several processes."""
    loss = token_loss(torch.zeros(2, 3, 5), torch.full((2, 3), -100), items)
    assert ("None of the 2 rows" in caplog.text) == warned
    assert loss.isfinite() or not items


@chunks
def test_the_stock_class_agrees(tiny, chunk):
    model = tiny().train()
    stock, tokens, labels = to_hf(copy.deepcopy(model)).train(), ids(3, 7), some_labels()
    expected = stock(input_ids=tokens, labels=labels).loss
    loss = in_chunks(model, chunk, tokens, labels).loss
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-5)
    check_gradients(gradients(model, loss), gradients(stock, expected))


def test_experts_add_their_losses(tiny):
    fields = {"num_experts": 4, "router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    model, tokens, labels = tiny(**fields, loss_chunk_size=0).train(), ids(3, 7), some_labels()
    whole = model(tokens, labels=labels, num_items_in_batch=20)
    right = gradients(model, whole.loss)
    output = in_chunks(model, 3, tokens, labels, num_items_in_batch=20)
    torch.testing.assert_close(output.loss, whole.loss)
    torch.testing.assert_close(output.aux_loss, whole.aux_loss)
    check_gradients(gradients(model, output.loss), right)


@heads
def test_the_items_of_an_accumulated_batch_divide(tiny, fields):
    model, tokens, labels = tiny(**fields).train(), ids(3, 7), some_labels()
    for items in (50, torch.tensor(50)):
        expected = loss_of_all_logits(model, tokens, labels, items)
        loss = in_chunks(model, 3, tokens, labels, num_items_in_batch=items).loss
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    parts = [in_chunks(model, 3, tokens[i : i + 1], labels[i : i + 1], num_items_in_batch=50).loss for i in range(3)]
    torch.testing.assert_close(sum(parts), expected, rtol=1e-6, atol=1e-6)


def test_pretraining_adds_the_pair(tiny):
    model, tokens, labels = tiny(**PAIR).train(), ids(3, 7), some_labels()
    follows = torch.tensor([0, 1, 1])
    relation = model(tokens).seq_relationship_logits
    expected = loss_of_all_logits(model, tokens, labels) + nn.functional.cross_entropy(relation, follows)
    output = in_chunks(model, 3, tokens, labels, next_sentence_label=follows)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(output.seq_relationship_logits, relation)


def test_shifted_labels_and_kept_positions(tiny):
    model, tokens = tiny(loss_chunk_size=3).train(), ids(3, 7)
    shifted = torch.cat([tokens[:, 1:], torch.full((3, 1), -100)], 1)
    expected = loss_of_all_logits(model, tokens, tokens)
    torch.testing.assert_close(model(tokens, shift_labels=shifted).loss, expected)
    logits = model(tokens, logits_to_keep=4).logits
    assert logits.shape == (3, 4, VOCABULARY)
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), shifted[:, -4:].flatten())
    output = model(tokens, shift_labels=shifted[:, -4:], logits_to_keep=4)
    torch.testing.assert_close(output.loss, expected)
    assert output.logits is None
    with pytest.raises(ValueError, match="9 hidden states need as many labels, not 18"):
        model(tokens, labels=tokens, logits_to_keep=4)
    other = torch.where(shifted == -100, 5, shifted)
    expected = nn.functional.cross_entropy(model(tokens).logits.flatten(0, 1), other.flatten(), ignore_index=5)
    torch.testing.assert_close(model(tokens, shift_labels=other, ignore_index=5).loss, expected)


def test_a_target_outside_the_vocabulary_is_an_error(tiny):
    with pytest.raises(IndexError, match="101 is out of bounds"):
        tiny(loss_chunk_size=3).train()(ids(3, 7), labels=torch.full((3, 7), VOCABULARY))


LORA = {
    "head": LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False),
    "head and body": LoraConfig(r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False),
    "body": LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False),
    "saved head": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False),
}


@pytest.mark.parametrize("adapter", LORA)
@pytest.mark.parametrize("fields", [{"lm_head_bias": True}, HEADS["causal, all"]], ids=["plain", "all"])
@chunks
def test_adapters(tiny, adapter, fields, chunk):
    untied = fields | {"tie_word_embeddings": adapter == "body" and "tie_word_embeddings" in fields}
    model = get_peft_model(tiny(**untied), copy.deepcopy(LORA[adapter])).train()
    right = check(model, ids(3, 7), some_labels(), chunk)
    assert right and all(("lora" in name or "modules_to_save" in name) for name in right)
    if adapter == "body":
        assert model.base_model.model.lm_head.weight.grad is None


@pytest.mark.parametrize("trained", ["head", "body", "bias"])
def test_frozen_parts(tiny, trained):
    model = tiny(lm_head_bias=True).train()
    for name, parameter in model.named_parameters():
        where = "bias" if name == "lm_head.bias" else name.split(".")[0].replace("lm_", "").replace("model", "body")
        parameter.requires_grad_(where == trained)
    assert len(check(model, ids(3, 7), some_labels(), 3)) > 0


def test_a_quantised_head(tiny):
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny(vocab_size=128, hidden_size=64).train()
    head = bitsandbytes.nn.Linear4bit(64, 128, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    head.weight = bitsandbytes.nn.Params4bit(model.lm_head.weight.data, requires_grad=False, quant_type="nf4")
    model.lm_head = head.to("cpu")
    check(model, ids(3, 7), some_labels(), 3)


def test_what_hangs_on_the_head_still_acts(tiny):
    tokens, labels, seen = ids(3, 7), some_labels(), []
    model = tiny().train()
    handle = model.lm_head.register_forward_hook(lambda module, given, output: seen.append(len(output)) or output * 2)
    check(model, tokens, labels, 2)
    assert max(seen[1:]) == 2  # the first call was that of all logits
    handle.remove()
    own = model.lm_head.forward
    model.lm_head.forward = lambda states: own(states) + torch.arange(float(VOCABULARY))
    check(model, tokens, labels, 2)
    del model.lm_head.forward
    check(model, tokens, labels, 2)


def test_own_logits_and_an_own_loss_function_are_used(tiny):
    class Sharper(AnyformerForCausalLM):
        def logits_of(self, hidden_states):
            return 3 * super().logits_of(hidden_states)

    model = Sharper(tiny().config).train()
    check(model, ids(3, 7), some_labels(), 2)
    model = tiny(loss_chunk_size=2).train()
    model.loss_function = lambda logits, labels, **kwargs: logits.mean() * 0 + 42
    output = model(ids(3, 7), labels=some_labels())
    assert output.loss == 42 and output.logits.shape == (3, 7, VOCABULARY)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(tiny, reentrant):
    model, tokens, labels = tiny(tie_word_embeddings=True).train(), ids(3, 7), some_labels()
    expected = gradients(model, loss_of_all_logits(model, tokens, labels))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    check_gradients(gradients(model, in_chunks(model, 3, tokens, labels).loss), expected)


def test_backward_twice_adds_up(tiny):
    model = tiny(**HEADS["causal, all"]).train()
    loss = in_chunks(model, 3, ids(3, 7), some_labels()).loss
    loss.backward(retain_graph=True)
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


# bf16 has 8 significant bits, so that each rounding is worth up to 2^-9. On its way a gradient is rounded behind each
# operation, which the two sides do in another order: the tolerance is what the side with all logits is itself off.
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("fields", [{}, HEADS["causal, all"]], ids=["plain", "all"])
def test_bf16_is_as_near_to_fp32_as_all_logits_at_once_are(tiny, fields, autocast):
    tokens, labels = ids(4, 32), ids(4, 32, seed=2)
    exact = tiny(**fields).train()
    exact.to(torch.bfloat16).float()  # the weights that both sides have
    truth = loss_of_all_logits(exact, tokens, labels)
    right = gradients(exact, truth)
    model = copy.deepcopy(exact) if autocast else copy.deepcopy(exact).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        whole = loss_of_all_logits(model, tokens, labels)
        loss = in_chunks(model, 5, tokens, labels).loss
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, whole, rtol=2**-9, atol=0)
    all_at_once, got = gradients(model, whole), gradients(model, loss)
    for name, exactly in right.items():
        assert got[name].dtype == all_at_once[name].dtype
        off, usual = ((g[name].float() - exactly).norm() / exactly.norm() for g in (got, all_at_once))
        assert off <= 1.25 * usual + 2**-9, f"{name}: {off:.1e}, all at once {usual:.1e}"


def test_bf16_gradients_do_not_stall_while_chunks_add_up():
    """800 times the same small step: a sum in bf16 stops growing after 256 of them."""
    from anyformer.modeling.losses import linear_cross_entropy

    head = nn.Linear(4, 2, bias=True)
    nn.init.zeros_(head.weight), nn.init.zeros_(head.bias)
    head.to(torch.bfloat16)
    states, targets = torch.ones(800, 4, dtype=torch.bfloat16), torch.zeros(800, dtype=torch.long)
    loss = linear_cross_entropy(states, targets, head, lambda logits: logits, 1)
    (loss / 800).backward()
    torch.testing.assert_close(loss.item(), 800 * torch.tensor(2.0).log().item(), rtol=1e-5, atol=0)
    assert torch.equal(head.weight.grad, torch.tensor([[-0.5] * 4, [0.5] * 4], dtype=torch.bfloat16))
    assert torch.equal(head.bias.grad, torch.tensor([-0.5, 0.5], dtype=torch.bfloat16))


@heads
def test_when_there_are_logits(tiny, fields):
    model, tokens, labels = tiny(**fields), ids(3, 7), some_labels()

    def logits(chunk):
        model.config.loss_chunk_size = chunk
        output = model(tokens, labels=labels)
        return output.logits if model.config.architecture != "encoder" or "pooler" not in fields else output[1]

    assert logits(3).shape == (3, 7, VOCABULARY)  # evaluation
    evaluated = model(tokens, labels=labels).loss
    model.train()
    in_chunks(model, 20, tokens, labels)
    for chunk in (0, 21, 1000):
        assert logits(chunk).shape == (3, 7, VOCABULARY)
    model.config.loss_chunk_size = 3
    without = model(tokens, **({"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}))
    assert (without.logits is None) == ("pooler" in fields)
    with torch.no_grad():
        torch.testing.assert_close(in_chunks(model, 3, tokens, labels).loss, evaluated)


class Largest(TorchDispatchMode):
    """The largest number of values in any tensor that an operation gives, in another storage than `but`."""

    def __init__(self, but=None):
        super().__init__()
        self.values, self.but = 0, but

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.but:
                self.values = max(self.values, tensor.numel())
        return result


def largest_tensor(model, tokens, labels, but=None):
    with Largest(but) as seen:
        model(tokens, labels=labels).loss.backward()
    return seen.values


@pytest.mark.parametrize("adapter", [None, "head", "saved head"])
@pytest.mark.parametrize("fields", [{}, HEADS["causal, all"], MASKED, BOTH], ids=["causal", "all", "masked", "both"])
def test_no_tensor_is_larger_than_the_logits_of_a_chunk(tiny, fields, adapter):
    sizes = {"vocab_size": 1009, "hidden_size": 16, "tie_word_embeddings": False}
    model, tokens = tiny(**(fields | sizes)).train(), ids(4, 60, high=1009)
    if adapter:
        model = get_peft_model(model, copy.deepcopy(LORA[adapter]))
    model.config.loss_chunk_size = 40
    assert largest_tensor(model, tokens, tokens) == 40 * 1009
    model.config.loss_chunk_size = 0
    assert largest_tensor(model, tokens, tokens) >= 4 * 59 * 1009


@pytest.mark.parametrize("adapter", [None, "head"])
def test_tokens_without_a_label_have_no_logits(tiny, adapter):
    model = tiny(vocab_size=1009, hidden_size=16, loss_chunk_size=100).train()
    if adapter:
        model = get_peft_model(model, copy.deepcopy(LORA[adapter]))
    tokens = ids(4, 60, high=1009)
    labels = tokens.clone()
    labels[:, :-5] = -100
    assert largest_tensor(model, tokens, labels) == 20 * 1009


def test_a_frozen_head_costs_no_gradient_of_its_weight(tiny):
    model = tiny(vocab_size=1009, hidden_size=64, loss_chunk_size=4).train()
    model.lm_head.requires_grad_(False), model.model.embed_tokens.requires_grad_(False)

    own = model.lm_head.weight.untyped_storage().data_ptr()
    assert 4 * 1009 <= largest_tensor(model, ids(4, 10), ids(4, 10), but=own) < 64 * 1009
    model.lm_head.requires_grad_(True)
    assert largest_tensor(model, ids(4, 10), ids(4, 10), but=own) == 64 * 1009


def test_a_compiled_model_falls_back_to_all_logits(tiny):
    model, tokens = tiny(loss_chunk_size=3).train(), ids(3, 7)
    expected = gradients(model, model(tokens, labels=tokens).loss)
    output = torch.compile(model, backend="aot_eager")(tokens, labels=tokens)
    assert output.logits.shape == (3, 7, VOCABULARY)
    check_gradients(gradients(model, output.loss), expected)


WORKER = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import anyformer
from transformers import AutoModelForCausalLM
from anyformer.recipes.parallel.world import leave

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (2,))
folder = sys.argv[1]
tokens, labels = (torch.load(f"{folder}/{name}.pt")[dist.get_rank()::2] for name in ("tokens", "labels"))
for kind in ("replicated", "sharded", "head sharded by itself"):
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    if kind == "head sharded by itself":
        fully_shard(model.lm_head, mesh=mesh)
    wrapped = DistributedDataParallel(model) if kind == "replicated" else fully_shard(model, mesh=mesh)
    loss = wrapped(input_ids=tokens, labels=labels, num_items_in_batch=20).loss
    (loss * 2).backward()  # the processes' gradients are averaged
    whole = {n: p.grad if kind == "replicated" else p.grad.full_tensor() for n, p in model.named_parameters()}
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/{kind}.pt")
leave()
"""


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs torch with gloo")
def test_two_processes_with_different_numbers_of_chunks(tiny, tmp_path):
    """The second has no label at all. A head that is sharded by itself is gathered in each call, by both or by none."""
    model, tokens, labels = tiny(loss_chunk_size=3).train(), ids(4, 7), ids(4, 7, seed=2)
    labels[1::2] = -100
    expected = gradients(model, loss_of_all_logits(model, tokens, labels, items=20))
    model.save_pretrained(tmp_path)
    torch.save(tokens, tmp_path / "tokens.pt")
    torch.save(labels, tmp_path / "labels.pt")
    script = tmp_path / "worker.py"
    script.write_text(WORKER, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    result = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=180)
    assert result.returncode == 0, result.stderr[-3000:]
    for kind in ("replicated", "sharded", "head sharded by itself"):
        check_gradients(torch.load(tmp_path / f"{kind}.pt"), expected)


def test_training_with_the_library_ends_with_the_same_weights(tiny, tmp_path):
    rows = [{"input_ids": row, "labels": row} for row in ids(16, 12).tolist()]
    for row in rows[::3]:
        row["labels"] = [-100] * 6 + row["labels"][6:]
    seen = []

    def trained(chunk):
        model = tiny(tie_word_embeddings=True, initializer_range=0.1, loss_chunk_size=chunk)
        options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "seed": 1}
        # Adam would divide by the size of a gradient, and so enlarge the rounding of those near 0.
        options |= {"optim": "sgd", "learning_rate": 0.1}
        options |= {"use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
        arguments = TrainingArguments(str(tmp_path), **options)

        def metrics(prediction):
            seen.append(prediction.predictions[0].shape)
            return {}

        trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], compute_metrics=metrics)
        losses = [trainer.train().training_loss, trainer.evaluate()["eval_loss"]]
        return model.state_dict(), losses

    (chunked, losses), (whole, expected) = trained(5), trained(0)
    assert losses == pytest.approx(expected, abs=1e-5)
    for name, weight in whole.items():
        torch.testing.assert_close(chunked[name], weight, rtol=0, atol=1e-5, msg=name)
    assert seen[0][-1] == VOCABULARY


def test_the_field(tiny, tmp_path):
    with pytest.raises(StrictDataclassError, match="loss_chunk_size=-1 must be a whole number of at least 0"):
        AnyformerConfig(loss_chunk_size=-1)
    with pytest.raises(StrictDataclassError, match="loss_chunk_size"):
        AnyformerConfig(loss_chunk_size="many")
    model = tiny(loss_chunk_size=77)
    model.save_pretrained(tmp_path)
    assert type(model).from_pretrained(tmp_path).config.loss_chunk_size == 77
    tokens = ids(2, 7)
    torch.testing.assert_close(to_hf(model)(tokens).logits, model(tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("classes", [2, 101, 4099, 50003])
@pytest.mark.parametrize("rows", [1, 9])
def test_torch_writes_a_softmax_where_it_reads(classes, rows):
    """The loss relies on it, on CPUs."""
    values = torch.randn(rows, classes, generator=torch.Generator().manual_seed(0)) * 5
    expected = torch.log_softmax(values, -1)
    assert torch.log_softmax(values, -1, out=values).data_ptr() == values.data_ptr()
    assert torch.equal(values, expected)
