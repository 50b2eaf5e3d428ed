"""PEFT's soft prompts: `generate` computes what training computed, behind padding and under every cache.

Oracles: the same rows without padding; the plain model on real tokens, whose embeddings or keys and values the soft
prompt is given; stock classes under the same soft prompt.
"""

import copy
import itertools

import pytest
import torch
from peft import PeftModel, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertForSequenceClassification,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from anyformer import from_hf

VIRTUAL, STEPS, LENGTHS = 5, 5, (8, 5, 2)
LENGTH = max(LENGTHS)
SIZES = {"num_virtual_tokens": VIRTUAL}
KINDS = {
    "prompt": lambda task: PromptTuningConfig(task_type=task, **SIZES),
    "mlp": lambda task: PromptEncoderConfig(task_type=task, encoder_hidden_size=16, **SIZES),
    "lstm": lambda task: PromptEncoderConfig(
        task_type=task, encoder_hidden_size=16, encoder_reparameterization_type="LSTM", **SIZES
    ),
    "prefix": lambda task: PrefixTuningConfig(task_type=task, num_transformer_submodules=1, **SIZES),
    "projected": lambda task: PrefixTuningConfig(
        task_type=task, prefix_projection=True, encoder_hidden_size=16, num_transformer_submodules=1, **SIZES
    ),
}
TWO_SIDED = ("rope", "learned", "relative")  # what each acts on: queries and keys, embeddings, scores
POSITIONS = ("rope", "learned", "sinusoidal", "alibi", "relative", "none")
WINDOWS = {
    "full": {},
    "sliding": {"sliding_window": 4},
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "global": {"layer_types": ["global_sliding_attention"], "sliding_window": 3, "num_global_tokens": 2},
}
# All positions for one kind that adds embeddings and one that adds keys; the others make these otherwise.
GRID = [*itertools.product(("prompt", "prefix"), POSITIONS, ("mixed", "global"))]
GRID += itertools.product(("prompt", "prefix"), ("rope", "alibi"), ("full", "sliding"))
GRID += itertools.product(("mlp", "lstm", "projected"), ("rope", "alibi"), ("full", "mixed"))
grid = pytest.mark.parametrize("kind, positions, window", GRID, ids=["-".join(names) for names in GRID])
kinds = pytest.mark.parametrize("kind", KINDS)
CACHES = {
    "dynamic": {"cache_implementation": "dynamic"},
    "static": {"cache_implementation": "static"},
    "none": {"use_cache": False},
}
GREEDY = {
    "max_new_tokens": STEPS,
    "min_new_tokens": STEPS,
    "do_sample": False,
    "output_logits": True,
    "return_dict_in_generate": True,
}
WIDE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}  # hidden / heads is 8
BOTH = {"head": "seq2seq_lm", "architecture": "encoder-decoder", "decoder_start_token_id": 1, "num_encoder_layers": 2}


def ids(*shape, low=3, high=101, seed=1):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


ROWS = [ids(1, n, seed=n)[0] for n in LENGTHS]


def close(got, expected, atol=1e-5):
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


def padded(rows, side):
    """Token ids and mask, each [rows, longest]."""
    width = max(len(row) for row in rows)
    tokens, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(width - len(row), None) if side == "left" else slice(0, len(row))
        tokens[i, at], mask[i, at] = row, 1
    return tokens, mask


def soften(model, kind, task="CAUSAL_LM", **fields):
    """The model under a fresh soft prompt of large values, so that faults show."""
    config = KINDS[kind](task)
    for name, value in fields.items():
        setattr(config, name, value)
    tuned = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in tuned.prompt_encoder.named_parameters():
            spread = 1 if "embedding" in name or weight.dim() == 1 else weight.shape[-1] ** -0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
    return tuned.eval()


@pytest.fixture
def soft(tiny):
    """Builds a tiny model under a soft prompt; overrides are config fields."""

    def build(kind, task="CAUSAL_LM", **fields):
        return soften(tiny(**({"initializer_range": 0.2} | fields)), kind, task)

    return build


@torch.no_grad()
def forward(model, row, **arguments):
    """Logits of one row by itself, those of virtual tokens left out."""
    return model(input_ids=row[None], **arguments).logits[0, -len(row) :]


@torch.no_grad()
def check_generation(model, alone, **options):
    """Step logits of a left-padded batch and of single rows against those of `alone(row, tokens that follow)`."""
    tokens, mask = padded(ROWS, "left")
    outputs = [model.generate(input_ids=tokens, attention_mask=mask, **GREEDY, **options)]
    outputs += [model.generate(input_ids=row[None], **GREEDY, **options) for row in ROWS]
    for i, row in enumerate(ROWS):
        for output, place in ((outputs[0], i), (outputs[1 + i], 0)):
            chosen = output.sequences[place, -STEPS:]
            got = torch.stack([logits[place] for logits in output.logits])
            assert torch.equal(chosen, got.index_fill(-1, torch.tensor(2), -torch.inf).argmax(-1))  # 2 ends a text
            close(got, alone(row, chosen[:-1])[-STEPS:])


# A decoder alone


@grid
def test_the_forward_is_the_same_on_either_padding_side(soft, kind, positions, window):
    model = soft(kind, position_embedding=positions, **WINDOWS[window])
    alone = [forward(model, row) for row in ROWS]
    for side in ("left", "right"):
        tokens, mask = padded(ROWS, side)
        with torch.no_grad():
            got = model(input_ids=tokens, attention_mask=mask).logits[:, -LENGTH:]
        for row, expected, real in zip(got, alone, mask.bool(), strict=True):
            close(row[real], expected)


@grid
def test_generation_equals_the_forward_under_every_cache(soft, kind, positions, window):
    model = soft(kind, position_embedding=positions, **WINDOWS[window])
    for options in CACHES.values():
        check_generation(model, lambda row, more: forward(model, torch.cat((row, more))), **options)


@pytest.mark.parametrize("fields", [WIDE, {"num_key_value_heads": 1}, {"attn_implementation": "eager"}])
@kinds
def test_generation_equals_the_forward_whatever_the_heads(soft, kind, fields):
    model = soft(kind, **fields)
    for options in CACHES.values():
        check_generation(model, lambda row, more: forward(model, torch.cat((row, more))), **options)


@pytest.mark.parametrize("kind", ["prompt", "mlp", "lstm"])
def test_latent_attention_takes_prompts_and_refuses_prefixes(soft, kind):
    latent = {"attention": "mla", "kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    latent["num_key_value_heads"] = 4
    model = soft(kind, **latent)
    for options in CACHES.values():
        check_generation(model, lambda row, more: forward(model, torch.cat((row, more))), **options)
    with pytest.raises(ValueError, match="prefix tuning has no place in it"):
        forward(soft("prefix", **latent), ROWS[0])


def give_tokens(tuned, tokens):
    """Make the soft prompt the embeddings, or the keys and values, of real tokens [VIRTUAL]."""
    base, weight = tuned.base_model, tuned.prompt_encoder["default"].embedding.weight
    with torch.no_grad():
        if tuned.active_peft_config.peft_type == "PROMPT_TUNING":
            weight.copy_(base.get_input_embeddings()(tokens))
            return
        layers = base(tokens[None], past_key_values=DynamicCache()).past_key_values.layers
        pairs = torch.stack([kept for layer in layers for kept in (layer.keys[0], layer.values[0])])
        weight.copy_(pairs.permute(2, 0, 1, 3).flatten(1))  # [2 layers, heads, VIRTUAL, width] -> [VIRTUAL, ...]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_a_soft_prompt_of_real_tokens_is_those_tokens(soft, kind, positions, window):
    fields = {"embedding_multiplier": 2.0, **WIDE, **WINDOWS[window]}
    model = soft(kind, position_embedding=positions, **fields)
    first, base = ids(VIRTUAL, seed=9), copy.deepcopy(model.base_model)
    give_tokens(model, first)
    for row in ROWS:
        close(forward(model, row), forward(base, torch.cat((first, row)))[VIRTUAL:])
    check_generation(model, lambda row, more: forward(base, torch.cat((first, row, more))))


@pytest.mark.parametrize("window", ["full", "mixed"])
@kinds
def test_beams_are_the_same_with_and_without_a_cache(soft, kind, window):
    model = soft(kind, **WINDOWS[window])
    tokens, mask = padded(ROWS, "left")
    options = {"num_beams": 3, "max_new_tokens": STEPS, "min_new_tokens": STEPS, "num_return_sequences": 2}
    beams = [model.generate(input_ids=tokens, attention_mask=mask, **options, **c) for c in CACHES.values()]
    assert all(torch.equal(beams[0], other) for other in beams[1:])
    alone = model.generate(input_ids=ROWS[1][None], **options)
    assert torch.equal(beams[0][2:4, -STEPS:], alone[:, -STEPS:])


@kinds
def test_saved_and_loaded_it_is_the_same(soft, tiny, kind, tmp_path):
    model = soft(kind)
    expected = forward(model, ROWS[0])
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(tiny(initializer_range=0.2), tmp_path)
    close(forward(again, ROWS[0]), expected)
    for options in CACHES.values():
        check_generation(again, lambda row, more: forward(again, torch.cat((row, more))), **options)
    with again.disable_adapter():
        tokens = again.generate(input_ids=ROWS[0][None], max_new_tokens=STEPS, do_sample=False)
    assert torch.equal(tokens, tiny(initializer_range=0.2).generate(ROWS[0][None], max_new_tokens=STEPS))


def gradients(model, **arguments):
    model.zero_grad()
    model(**arguments).loss.backward()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


CHECKPOINTING = {
    "not reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
}


@pytest.mark.parametrize("how", CHECKPOINTING)
@pytest.mark.parametrize("window", ["full", "mixed"])
@kinds
def test_gradients_reach_the_soft_prompt_alone_also_under_checkpointing(soft, kind, window, how):
    model = soft(kind, **WINDOWS[window]).train()
    tokens, mask = padded(ROWS, "right")
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}
    expected = gradients(model, **batch)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert set(expected) == trainable and all(name.startswith("prompt_encoder.") for name in trainable)
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    model.gradient_checkpointing_enable(**CHECKPOINTING[how])
    got = gradients(model, **batch)
    assert set(got) == set(expected)
    for name, gradient in got.items():
        close(gradient, expected[name])
    # Generation in training mode keeps its cache.
    check_generation(model, lambda row, more: forward(model, torch.cat((row, more))))


def test_some_layers_checkpointed_are_the_same_as_none(soft):
    model = soft("prefix").train()
    batch = {"input_ids": ROWS[0][None], "labels": ROWS[0][None]}
    expected = gradients(model, **batch)
    for layer in (0, 1):
        model.gradient_checkpointing_enable()
        model.base_model.model.layers[layer].gradient_checkpointing = False
        for name, gradient in gradients(model, **batch).items():
            close(gradient, expected[name])


def test_checkpointing_reads_no_static_cache(tiny):
    from transformers import StaticCache

    model = tiny()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad():
        model(ROWS[0][None], cache=cache)
    model.train().gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="reads dynamic caches alone, and this one has layers of StaticLayer"):
        model(ROWS[1][None], cache=cache)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_longrope_turns_by_the_length_with_the_virtual_tokens(soft, kind):
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": VIRTUAL + LENGTH + 2}  # the longest row turns at its third step
    model = soft(kind, rope_parameters=rope | {"rope_theta": 10000.0})
    output = model.generate(input_ids=ROWS[0][None], **GREEDY)
    for step, logits in enumerate(output.logits):
        close(logits[0], forward(model, output.sequences[0, : LENGTH + step])[-1])


@kinds
@pytest.mark.parametrize("option", [{"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 3}])
def test_several_tokens_behind_a_filled_cache_are_refused(soft, kind, option):
    model = soft(kind)
    with pytest.raises(ValueError, match="one token at a time from an empty cache"):
        model.generate(input_ids=ROWS[0][None], max_new_tokens=6, do_sample=False, **option)


@kinds
def test_a_cache_of_an_earlier_call_is_refused(soft, kind):
    model = soft(kind)
    output = model.generate(input_ids=ROWS[0][None], **GREEDY)
    with pytest.raises(ValueError, match="from an empty cache: leave out"):
        model.generate(input_ids=output.sequences, max_new_tokens=2, cache=output.cache)


@kinds
def test_continuous_batching_is_refused(soft, kind):
    with pytest.raises(ValueError, match="it would run without its soft prompt"):
        soft(kind).generate(input_ids=ROWS[0][None], max_new_tokens=2, cache_implementation="paged")


# Under stock classes


SMALL = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "max_position_embeddings": 64, "initializer_range": 0.2, "pad_token_id": 0}
SMALL_T5 = {"vocab_size": 101, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_heads": 4}
SMALL_BART = {"vocab_size": 101, "d_model": 32, "max_position_embeddings": 64, "init_std": 0.2, "pad_token_id": 0}
for part in ("encoder", "decoder"):
    SMALL_BART |= {f"{part}_layers": 2, f"{part}_attention_heads": 4, f"{part}_ffn_dim": 48}
STOCK = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=16), "CAUSAL_LM"),
    "bert": (BertForSequenceClassification, BertConfig(**SMALL, num_labels=3), "SEQ_CLS"),
    "t5": (T5ForConditionalGeneration, T5Config(**SMALL_T5, decoder_start_token_id=0), "SEQ_2_SEQ_LM"),
    "bart": (BartForConditionalGeneration, BartConfig(**SMALL_BART, decoder_start_token_id=2), "SEQ_2_SEQ_LM"),
}


@pytest.mark.parametrize("name", STOCK)
@kinds
def test_the_forward_is_that_of_the_stock_class_under_the_same_soft_prompt(kind, name):
    cls, config, task = STOCK[name]
    torch.manual_seed(0)
    stock = cls(copy.deepcopy(config)).eval()
    ours = from_hf(copy.deepcopy(stock))
    if name == "bert" and kind in ("prefix", "projected"):  # stock encoders know no prefix
        with pytest.raises(ValueError, match="does not support past key values"):
            soften(stock, kind, task)(input_ids=ROWS[0][None])
        return
    # PEFT's own count for an encoder-decoder, with which stock decoders take a prefix.
    fields = {"num_transformer_submodules": 2} if task == "SEQ_2_SEQ_LM" else {}
    tokens, mask = padded(ROWS, "right")
    batch = {"input_ids": tokens, "attention_mask": mask}
    if task == "SEQ_2_SEQ_LM":
        batch |= {"decoder_input_ids": ids(3, 6)}
    with torch.no_grad():
        got, expected = (soften(model, kind, task, **fields)(**batch).logits for model in (ours, stock))
    if name == "llama":
        real = torch.nn.functional.pad(mask, (got.shape[1] - LENGTH, 0), value=1).bool()
        got, expected = got[real], expected[real]
    close(got, expected)


# An encoder-decoder


@torch.no_grad()
def check_seq2seq(model, source, decode, **options):
    """As `check_generation`, for decoders that start with tokens of their own, padded on the left too.

    Args:
        source: the rows that the encoder reads; decode: logits of (row of the encoder, row of the decoder).
    """
    starts = [torch.tensor(start) for start in ([1, 7, 8], [1, 9], [1])]
    tokens, mask = padded(source, "left")
    first, first_mask = padded(starts, "left")
    given = {"decoder_input_ids": first, "decoder_attention_mask": first_mask}
    both = model.generate(input_ids=tokens, attention_mask=mask, **given, **GREEDY, **options)
    plain = model.generate(input_ids=tokens, attention_mask=mask, **GREEDY, **options)
    for i, row in enumerate(source):
        one = model.generate(input_ids=row[None], **GREEDY, **options)
        for output, place, start in ((both, i, starts[i]), (plain, i, starts[2]), (one, 0, starts[2])):
            chosen = output.sequences[place, -STEPS:]
            got = torch.stack([logits[place] for logits in output.logits])
            assert torch.equal(chosen, got.index_fill(-1, torch.tensor(2), -torch.inf).argmax(-1))
            close(got, decode(row, torch.cat((start, chosen[:-1])))[-STEPS:])


def decoder_of(model):
    def decode(row, decoder_row):
        return model(input_ids=row[None], decoder_input_ids=decoder_row[None]).logits[0]

    return decode


@pytest.mark.parametrize("window", ["full", "mixed"])
@pytest.mark.parametrize("kind, positions", [*itertools.product(("prompt", "prefix"), TWO_SIDED), ("mlp", "rope")])
def test_an_encoder_decoder_generates_what_its_forward_computes(soft, kind, positions, window):
    fields = BOTH | {"position_embedding": positions, "share_embeddings": False} | WINDOWS[window]
    model = soft(kind, "SEQ_2_SEQ_LM", **fields)
    for options in CACHES.values():
        check_seq2seq(model, ROWS, decoder_of(model), **options)
    tokens, mask = padded(ROWS, "left")
    beams = {"num_beams": 3, "max_new_tokens": STEPS, "min_new_tokens": STEPS}
    chosen = [model.generate(input_ids=tokens, attention_mask=mask, **beams, **c) for c in CACHES.values()]
    assert all(torch.equal(chosen[0], other) for other in chosen[1:])


@pytest.mark.parametrize("positions", TWO_SIDED)
def test_a_prompt_of_real_tokens_before_the_source_is_those_tokens(soft, positions):
    """The encoder has an embedding of its own, of which PEFT must take rows and inputs."""
    model = soft("prompt", "SEQ_2_SEQ_LM", **BOTH, position_embedding=positions, share_embeddings=False)
    first, base = ids(VIRTUAL, seed=9), model.base_model
    with torch.no_grad():
        values = base.get_encoder().embed_tokens(first)
        model.prompt_encoder["default"].embedding.weight[:VIRTUAL] = values  # PEFT's count has twice as many rows

    def decode(row, decoder_row):
        return base(input_ids=torch.cat((first, row))[None], decoder_input_ids=decoder_row[None]).logits[0]

    for row in ROWS:
        with torch.no_grad():
            close(decoder_of(model)(row, ROWS[1]), decode(row, ROWS[1]))
    check_seq2seq(model, ROWS, decode)


@pytest.mark.parametrize("window", ["full", "mixed"])
@pytest.mark.parametrize("positions", TWO_SIDED)
def test_a_prefix_of_real_tokens_before_the_target_is_those_tokens(soft, positions, window):
    """One layer: in deeper ones keys of the target depend on the source."""
    one = {"num_hidden_layers": 1, "layer_types": WINDOWS[window].get("layer_types", ["full_attention"])[:1]}
    model = soft("prefix", "SEQ_2_SEQ_LM", **BOTH | WINDOWS[window] | one, position_embedding=positions)
    first, base = ids(VIRTUAL, seed=9), model.base_model
    with torch.no_grad():
        own = DynamicCache()
        base(input_ids=ROWS[0][None], decoder_input_ids=first[None], past_key_values=own)
        weight = model.prompt_encoder["default"].embedding.weight
        weight.copy_(torch.stack((own.layers[0].keys[0], own.layers[0].values[0])).permute(2, 0, 1, 3).flatten(1))

    def decode(row, decoder_row):
        return base(input_ids=row[None], decoder_input_ids=torch.cat((first, decoder_row))[None]).logits[0]

    check_seq2seq(model, ROWS, decode)


def test_behind_a_prefix_the_keys_of_the_source_are_computed_once(soft):
    model = soft("prefix", "SEQ_2_SEQ_LM", **BOTH)
    output = model.generate(input_ids=ROWS[0][None], **GREEDY)
    cross, own = output.cache.cross_attention_cache, output.cache.self_attention_cache
    assert [layer.get_seq_length() for layer in cross.layers] == [LENGTH] * 2
    assert [layer.get_seq_length() for layer in own.layers] == [VIRTUAL + STEPS] * 2


@pytest.mark.parametrize("kind", ["prompt", "prefix", "projected"])
def test_an_encoder_decoder_of_experts_trains_the_whole_soft_prompt(soft, kind):
    experts = {"num_experts": 4, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.01}
    model = soft(kind, "SEQ_2_SEQ_LM", **BOTH, **experts).train()
    source, mask = padded(ROWS, "right")
    labels = padded([ids(1, n, seed=20 + n)[0] for n in (4, 6, 3)], "right")[0]
    batch = {"input_ids": source, "attention_mask": mask, "labels": labels.masked_fill(labels == 0, -100)}
    expected = gradients(model, **batch)
    assert set(expected) == {n for n, p in model.named_parameters() if p.requires_grad}
    if kind == "prefix":
        assert (expected["prompt_encoder.default.embedding.weight"] != 0).all()
    model.gradient_checkpointing_enable()
    for name, gradient in gradients(model, **batch).items():
        close(gradient, expected[name])


def test_with_peft_s_own_count_half_of_a_prefix_is_never_used(tiny):
    """Why `recipes.soft_prompts.prompt_learning_fields` sets `num_transformer_submodules`: layer 1 repeats layer 0."""
    model = soften(tiny(**BOTH), "prefix", "SEQ_2_SEQ_LM", num_transformer_submodules=2)
    (gradient,) = gradients(model, input_ids=ROWS[0][None], labels=ROWS[1][None]).values()
    halves = gradient.view(VIRTUAL, 2, -1)
    assert (halves[:, 0] != 0).any() and not halves[:, 1].any()


# Encoders and classifiers

ENCODER = {"architecture": "encoder"}
HEADS = {  # head of the model and the task that PEFT has for it
    "sequence_classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
    "masked_lm": "FEATURE_EXTRACTION",
}


def first_of(output):
    return output.logits if "logits" in output else output.start_logits


@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
@pytest.mark.parametrize("window", ["full", "mixed", "global"])
@pytest.mark.parametrize("positions", TWO_SIDED)
@pytest.mark.parametrize("kind", ["prompt", "prefix"])
def test_a_classifier_is_the_same_on_either_padding_side(soft, kind, positions, window, architecture):
    fields = {"architecture": architecture, "head": "sequence_classification", "position_embedding": positions}
    model = soft(kind, "SEQ_CLS", **fields, **WINDOWS[window], num_labels=3)
    with torch.no_grad():
        alone = torch.cat([model(input_ids=row[None]).logits for row in ROWS])
        for side in ("left", "right"):
            tokens, mask = padded(ROWS, side)
            close(model(input_ids=tokens, attention_mask=mask).logits, alone)
    assert (alone[0] - alone[1]).abs().max() > 0.1


ON_ENCODERS = [
    ("sequence_classification", *rest) for rest in itertools.product(POSITIONS, ("full", "sliding", "global"))
]
ON_ENCODERS += [(head, "rope", "sliding") for head in list(HEADS)[1:]]


@pytest.mark.parametrize("head, positions, window", ON_ENCODERS)
def test_a_prefix_of_real_tokens_before_an_encoder_s_text_is_those_tokens(soft, head, positions, window):
    """One layer: in deeper ones the keys of the first tokens depend on those that follow."""
    fields = {"head": head, "num_hidden_layers": 1, "position_embedding": positions, "classifier_pooling": "last"}
    model = soft("prefix", HEADS[head], **ENCODER, **fields, **WIDE, **WINDOWS[window])
    first, base = ids(VIRTUAL, seed=9), model.base_model
    kept = DynamicCache()
    with torch.no_grad():
        base(input_ids=first[None], past_key_values=kept)
        pair = torch.stack((kept.layers[0].keys[0], kept.layers[0].values[0]))
        model.prompt_encoder["default"].embedding.weight.copy_(pair.permute(2, 0, 1, 3).flatten(1))
        for row in ROWS:
            expected = first_of(base(input_ids=torch.cat((first, row))[None]))[0]
            expected = expected if head == "sequence_classification" else expected[VIRTUAL:]
            close(first_of(model(input_ids=row[None]))[0], expected)
        for side in ("left", "right"):
            tokens, mask = padded(ROWS, side)
            got = first_of(model(input_ids=tokens, attention_mask=mask))
            for i, row in enumerate(ROWS):
                one = first_of(model(input_ids=row[None]))[0]
                close(got[i] if head == "sequence_classification" else got[i][mask[i].bool()], one)


@pytest.mark.parametrize("head", ["token_classification", "masked_lm"])
def test_a_prefix_trains_the_heads_that_label_tokens(soft, head):
    model = soft("prefix", HEADS[head], **ENCODER, head=head).train()
    tokens, mask = padded(ROWS, "right")
    labels = (tokens % 2 if head == "token_classification" else tokens).masked_fill(mask == 0, -100)
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    expected = gradients(model, **batch)
    assert (expected["prompt_encoder.default.embedding.weight"] != 0).any()
    model.gradient_checkpointing_enable()
    for name, gradient in gradients(model, **batch).items():
        close(gradient, expected[name])
