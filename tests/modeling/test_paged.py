"""Continuous batching: the same tokens as `generate`, request by request, or a refusal."""

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.utils import WorkloadHints

from anyformer.modeling import attention, cpu_kernels, inference, paged_attention
from anyformer.modeling.paged import paged_positions
from anyformer.modeling.paged_attention import RequestBatch

WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
LATENT = {"attention": "mla", "num_key_value_heads": 4, "kv_lora_rank": 6, "qk_nope_head_dim": 4}
LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 6}
SERVED = {
    "grouped queries": {},
    "eager": {"attn_implementation": "eager"},
    "window": WINDOW,
    "learned positions": {"position_embedding": "learned"},
    "alibi": {"position_embedding": "alibi"},
    "alibi in eager": {"position_embedding": "alibi", "attn_implementation": "eager"},
    "alibi in a window": {"position_embedding": "alibi"} | WINDOW,
    "relative": {"position_embedding": "relative"},
    "soft cap": {"attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    "sinks": {"attention_sinks": True, "attn_implementation": "eager"},
    "experts": {"num_experts": 4, "num_experts_per_tok": 2},
    "latent": LATENT,
    "latent in eager": LATENT | {"attn_implementation": "eager"},
    "latent, wide": LATENT | {"kv_lora_rank": 12, "q_lora_rank": 10},
    "latent in a window": LATENT | WINDOW,
}


@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_paged_generation_gives_the_same_tokens(tiny, fields):
    model = tiny(**fields)
    if model.config.attention_sinks:  # they start at 0
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 101, (n,), generator=generator).tolist() for n in (5, 12, 3)]
    options = {"max_new_tokens": 9, "eos_token_id": -1, "do_sample": False}
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    sizes, backend = (model.config.head_dim, model.config.num_key_value_heads), model.config._attn_implementation
    config = GenerationConfig(**options, pad_token_id=0)
    # Stated, because the default is a share of the machine's memory.
    pages = ContinuousBatchingConfig(num_blocks=16, page_size=8, max_batch_tokens=64)
    outputs = model.generate_batch(inputs=prompts, generation_config=config, continuous_batching_config=pages)
    assert [outputs[name].generated_tokens for name in sorted(outputs)] == expected  # they come as they finish
    assert (model.config.head_dim, model.config.num_key_value_heads) == sizes
    assert model.config._attn_implementation == backend
    model.train()(torch.tensor([prompts[0]]), labels=torch.tensor([prompts[0]])).loss.backward()


@pytest.mark.parametrize("fields", SERVED.values(), ids=SERVED)
def test_the_librarys_own_path_gives_the_same_tokens(tiny, fields, monkeypatch, layouts):
    """As on GPUs, where requests stay in one row."""
    model = tiny(**fields)
    prompts, new = random_prompts(30, 1, 17), [3, 8, 6]
    expected = greedy(model, prompts, new)
    monkeypatch.setattr(paged_attention, "SEPARATING", ())
    monkeypatch.setattr(attention, "by_request", None)
    pages = ContinuousBatchingConfig(num_blocks=12, page_size=8, max_batch_tokens=16)
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=pages) as manager:
        names = [manager.add_request(p, max_new_tokens=n) for p, n in zip(prompts, new, strict=True)]
        assert answers(manager, names) == expected
    assert True not in layouts


def test_requests_are_told_apart_on_cpus_alone():
    ends = torch.tensor([0, 1, 2])
    paging = {"read_index": [ends], "cu_seq_lens_q": ends, "max_length_q": 1}
    assert RequestBatch.fits(torch.tensor([[3, 4]]), paging)
    assert not RequestBatch.fits(torch.tensor([[3, 4]], device="meta"), paging)
    assert not paged_attention.separates_requests(torch.empty(2, device="meta"))


REFUSED = {
    "global tokens": (
        WINDOW | {"layer_types": ["global_sliding_attention"], "num_global_tokens": 1},
        "leaves a window",
    ),
    "dynamic": ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type='dynamic'"),
}


@pytest.mark.parametrize(("fields", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_exact_is_refused(tiny, fields, reason):
    with pytest.raises(ValueError, match=f"continuous batching cannot serve.*{reason}"):
        tiny(**fields).generate_batch(inputs=[[5, 6, 7]])


def test_key_positions_of_two_requests():
    # The first decodes one token after three, the second starts with two.
    queries, keys = paged_positions(torch.tensor([[3, 0, 1]]), torch.tensor([0, 1, 3]), torch.tensor([0, 4, 6]), 6)
    assert queries.tolist() == [[3, 0, 1]]
    assert keys.tolist() == [[0, 1, 2, 3, 0, 1]]


def greedy(model, prompts, new, **options):
    """The answers of `generate`, request by request."""
    options = {"eos_token_id": -1, "do_sample": False} | options
    return [
        model.generate(torch.tensor([p]), max_new_tokens=n, **options)[0, len(p) :].tolist()
        for p, n in zip(prompts, new, strict=True)
    ]


def random_prompts(*lengths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 101, (n,), generator=generator).tolist() for n in lengths]


def answers(manager, names):
    """The tokens of requests by name; those that are done in any order."""
    done = {}
    while len(done) < len(names):
        output = manager.get_result(timeout=30)
        assert output is not None, "no answer within 30 seconds"
        assert output.error is None, output.error
        if output.is_finished():
            done[output.request_id] = output.generated_tokens
    return [done[name] for name in names]


@pytest.fixture
def layouts(monkeypatch):
    """Whether each pass had one row a request, as they come."""
    seen, fits = [], RequestBatch.fits
    monkeypatch.setattr(RequestBatch, "fits", staticmethod(lambda *args: seen.append(fits(*args)) or seen[-1]))
    return seen


UNEVEN = {name: SERVED[name] for name in ("grouped queries", "window", "latent", "latent in a window", "soft cap")}
UNEVEN |= {name: SERVED[name] for name in ("alibi in a window", "relative", "experts")}
GREEDY = GenerationConfig(eos_token_id=-1, pad_token_id=0, do_sample=False, max_new_tokens=20)


@pytest.mark.parametrize("short", [0, 1024], ids=["each", "together"])
@pytest.mark.parametrize("fields", UNEVEN.values(), ids=UNEVEN)
def test_uneven_requests_that_come_one_after_another(tiny, fields, layouts, monkeypatch, short):
    """Prompts of several pages and passes, answers of all lengths, more of them than the cache holds at once."""
    monkeypatch.setattr(paged_attention, "SHORT", short)
    model = tiny(**fields)
    prompts, new = random_prompts(30, 1, 17, 9, 2, 40), [3, 20, 11, 1, 14, 7]
    expected = greedy(model, prompts, new)
    pages = ContinuousBatchingConfig(num_blocks=12, page_size=8, max_batch_tokens=16)
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=pages) as manager:
        first = manager.add_request(prompts[1], max_new_tokens=new[1], streaming=True)
        assert manager.get_result(timeout=30).request_id == first  # the others meet one that is under way
        rest = [manager.add_request(prompts[i], max_new_tokens=new[i]) for i in (0, 2, 3, 4, 5)]
        tokens = answers(manager, [first, *rest])
    assert [tokens[i] for i in (1, 0, 2, 3, 4, 5)] == expected
    assert True in layouts and False in layouts


def test_answers_end_at_the_stop_tokens_that_generate_knows(tiny):
    model = tiny()
    prompts = random_prompts(6, 11, 4)
    free = greedy(model, prompts, [20] * 3)
    model.generation_config.eos_token_id = stops = [free[0][5], free[1][2]]
    expected = greedy(model, prompts, [20] * 3, eos_token_id=stops)
    assert max(len(tokens) for tokens in expected[:2]) < 20
    # As a client of the library's server sends it: no stop token in it.
    outputs = model.generate_batch(prompts, GenerationConfig(max_new_tokens=20, do_sample=False))
    assert [outputs[name].generated_tokens for name in sorted(outputs)] == expected


def test_streamed_tokens_are_those_of_the_answer(tiny):
    model, (prompt,) = tiny(**WINDOW), random_prompts(13)
    (expected,) = greedy(model, [prompt], [9])
    with model.continuous_batching_context_manager(GREEDY) as manager:
        manager.add_request(prompt, max_new_tokens=9, streaming=True)
        pieces = [manager.get_result(timeout=30).generated_tokens for _ in range(9)]
    assert pieces == [expected[: i + 1] for i in range(9)]


def test_sampling_is_that_of_generate(tiny):
    """One request draws as `generate` does, from the likeliest 50 tokens, which nobody has asked for."""
    model, (prompt,) = tiny(), random_prompts(7)
    sampling = GenerationConfig(do_sample=True, temperature=1.3, eos_token_id=-1, pad_token_id=0, max_new_tokens=40)
    torch.manual_seed(5)
    expected = model.generate(torch.tensor([prompt]), generation_config=sampling)[0, 7:].tolist()
    pages = ContinuousBatchingConfig(seed=5)
    (output,) = model.generate_batch([prompt], sampling, continuous_batching_config=pages).values()
    assert output.generated_tokens == expected


UNSUPPORTED = {
    "stop strings": ({"stop_strings": ["x"]}, "stop_strings"),
    "beams": ({"num_beams": 3}, "num_beams"),
    "penalty": ({"repetition_penalty": 1.2}, "RepetitionPenalty"),
}


@pytest.mark.filterwarnings("ignore:Passing `repetition_penalty`")
@pytest.mark.parametrize(("settings", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED)
def test_what_the_library_would_leave_out_is_refused(tiny, settings, reason):
    with pytest.raises(ValueError, match=f"continuous batching cannot serve.*{reason}"):
        tiny().generate_batch([[5, 6, 7]], GenerationConfig(max_new_tokens=4, **settings))


def test_a_request_that_never_fits_is_refused_and_the_others_go_on(tiny):
    model, (prompt,) = tiny(), random_prompts(8)
    pages = ContinuousBatchingConfig(num_blocks=8, page_size=8, max_batch_tokens=16)
    with model.continuous_batching_context_manager(GREEDY, continuous_batching_config=pages) as manager:
        for impossible, new, reason in ((prompt, 10**9, "room for 64"), ([], 4, "without a token")):
            with pytest.raises(ValueError, match=reason):
                manager.add_request(impossible, max_new_tokens=new)
        assert answers(manager, [manager.add_request(prompt, max_new_tokens=5)]) == greedy(model, [prompt], [5])
    with pytest.raises(ValueError, match="room for 64"):
        model.generate_batch([prompt], GREEDY, continuous_batching_config=pages, max_new_tokens=60)
    learned = tiny(position_embedding="learned")
    with pytest.raises(ValueError, match="room for 128"):
        learned.generate_batch([prompt], GREEDY, max_new_tokens=121)


def test_the_cache_on_a_cpu_holds_what_the_requests_need(tiny):
    model = tiny()

    def held(config=None):
        hints = WorkloadHints(max_prompt_length=50, max_generated_length=20, num_requests=17)
        manager = model.init_continuous_batching(GREEDY, config, hints)
        cache, resolved = manager.batch_processor.cache, manager.continuous_batching_config
        return resolved.page_size, cache.num_blocks, resolved.max_batch_tokens, cache.cache_tensor.nbytes

    page, blocks, tokens, size = held()
    # A request fits into one page; 17 of 21 blocks leave the scheduler its 15 %.
    assert (page, blocks, tokens) == (128, 21, 512)
    assert size == (21 + 2) * 128 * model.config.counts().cache_bytes_per_token(4)  # two blocks are never used
    given = ContinuousBatchingConfig(page_size=32, num_blocks=5, max_batch_tokens=64)
    assert held(given)[:3] == (32, 5, 64)


def test_weights_that_change_in_a_pause_are_those_that_are_multiplied_after(tiny, monkeypatch):
    """Sorted copies of 16-bit weights, made at once here, do not outlive the pause."""
    monkeypatch.setattr(inference, "sorting_is_faster", lambda _: cpu_kernels.HAS_ONEDNN)
    monkeypatch.setattr(inference, "SMALLEST", 1)
    monkeypatch.setattr(inference, "STEPS_BEFORE_COPIES", 0)
    model, (prompt,) = tiny().to(torch.bfloat16), random_prompts(8)
    with model.continuous_batching_context_manager(GREEDY) as manager:
        (before,) = answers(manager, [manager.add_request(prompt, max_new_tokens=8)])
        with manager.pause():
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.mlp.down_proj.weight, std=0.5)
        (after,) = answers(manager, [manager.add_request(prompt, max_new_tokens=8)])
    assert [after] == greedy(model, [prompt], [8])
    assert after != before
