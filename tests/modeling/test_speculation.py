"""`generate` with drafts of every kind against `generate` without."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from drafts import ATTENTIONS, KINDS, TRAINED, drafts_of
from transformers import DynamicCache, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from anyformer import AnyformerDrafter, from_hf
from anyformer.modeling.draft_heads import Progress
from anyformer.modeling.speculation import DrafterCandidateGenerator, SpeculationStatistics

VOCABULARY, NEW = 19, 32  # so few that a draft is right by chance too


@pytest.fixture
def case(tiny):
    """A base, a prompt, and what the base makes of it; an end token only where a test sets one."""

    def build(**fields):
        base = tiny(vocab_size=VOCABULARY, **fields)
        base.generation_config.eos_token_id = None
        prompt = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(1))
        return SimpleNamespace(base=base, prompt=prompt, text=greedy(base, prompt))

    return build


def greedy(base, prompt, new=NEW, **arguments):
    return base.generate(prompt, max_new_tokens=new, do_sample=False, **arguments)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_greedy_tokens_are_those_without_drafts(case, attention, kind):
    given = case(**ATTENTIONS[attention])
    drafts = drafts_of(kind, given.base, given.text)
    assert torch.equal(greedy(given.base, given.prompt, **drafts), given.text)
    made = given.base.speculation
    assert 0 < made.accepted < made.drafted  # both ways have been gone
    assert made.tokens == NEW and made.rounds == NEW - made.accepted
    # Behind padding, of which the model is told, everything stands elsewhere.
    padded = torch.nn.functional.pad(given.prompt, (4, 0))
    mask = torch.nn.functional.pad(torch.ones_like(given.prompt), (4, 0))
    assert torch.equal(greedy(given.base, padded, attention_mask=mask, **drafts)[:, 4:], given.text)
    assert kind == "lookup" or given.base.speculation == made  # which looks padding up too


OTHERS = {
    "global": {
        "sliding_window": 6,
        "num_global_tokens": 2,
        "layer_types": ["global_sliding_attention", "full_attention"],
    },
    "relative": {"position_embedding": "relative"},
    "experts": {"num_experts": 4, "router": "sigmoid"},
    "gemma": {
        "attn_logit_softcapping": 20.0,
        "final_logit_softcapping": 10.0,
        "embedding_multiplier": 4.0,
        "attn_implementation": None,
    },
    "bert-like": {"norm": "layernorm", "norm_position": "post", "mlp": "dense", "position_embedding": "sinusoidal"},
}


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.parametrize("family", OTHERS)
def test_layers_are_built_like_those_of_any_base(case, family, kind):
    given = case(**OTHERS[family])
    assert torch.equal(greedy(given.base, given.prompt, **drafts_of(kind, given.base, given.text)), given.text)
    assert given.base.speculation.accepted


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("attention", ["gqa", "mla", "alibi", "learned"])
def test_each_draft_is_the_one_of_a_drafter_that_reads_all_anew(case, monkeypatch, attention, kind):
    """What refused tokens have left in a drafter's caches does not show."""
    given, rounds = case(**ATTENTIONS[attention]), []
    given.base.double()  # so that what differs is no rounding
    original = DrafterCandidateGenerator.get_candidates

    def recorded(self, input_ids, **kwargs):
        text, logits = original(self, input_ids, **kwargs)
        rounds.append((input_ids, text, logits))
        return text, logits

    monkeypatch.setattr(DrafterCandidateGenerator, "get_candidates", recorded)
    drafts = drafts_of(kind, given.base, given.text)
    greedy(given.base, given.prompt, **drafts)
    drafted = [(before, text, logits) for before, text, logits in rounds if logits is not None]
    assert len(drafted) > 5
    for before, text, logits in drafted:
        fresh = drafts["assistant_model"].drafting(given.base)
        with torch.no_grad():
            features = given.base.model(before[:, :-1], use_cache=False).last_hidden_state
            fresh.advance(Progress(features, before[:, 1:], torch.arange(before.shape[1])[None], None))
            new = text[:, before.shape[1] :].split(1, dim=1)
            states = [fresh.states(list(new[:place]))[:, :1] for place in range(len(new))]
            wanted = given.base.logits_of(torch.cat(states, dim=1))
        torch.testing.assert_close(logits, wanted.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_ends_at_its_end_token_inside_a_draft(case, kind):
    given = case()
    drafts = drafts_of(kind, given.base, given.text)
    made = given.text[0, 9:].tolist()
    lengths = {made.index(token) + 1 for token in made}  # at which the text would end at that token
    for length in sorted(lengths)[:7]:
        out = greedy(given.base, given.prompt, **drafts, eos_token_id=made[length - 1], pad_token_id=0)
        assert torch.equal(out, given.text[:, : 9 + length])
        assert given.base.speculation.tokens == length


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_ends_at_its_longest_length_inside_a_draft(case, kind):
    given = case(position_embedding="learned", max_position_embeddings=9 + NEW)  # beyond which there is no position
    drafts = drafts_of(kind, given.base, given.text)
    for new in (1, 2, 3, 4, 5, NEW):
        assert torch.equal(greedy(given.base, given.prompt, new, **drafts), given.text[:, : 9 + new])


class EndsWith(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token


class Heard(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


@pytest.fixture
def perfect():
    """A draft model that is always right: all that ends a text ends it inside a draft."""

    def build(base, count=5):
        base.generation_config.assistant_confidence_threshold = 0.0
        base.generation_config.num_assistant_tokens = count
        return {"assistant_model": base}

    return build


@pytest.mark.parametrize("place", [1, 3, 4, 8, 11])
@pytest.mark.parametrize("attention", ["gqa", "sliding"])
def test_criteria_of_ones_own_end_a_text_inside_a_draft(case, perfect, attention, place):
    given = case(**ATTENTIONS[attention])
    base = given.base
    token = given.text[0, 9 + place].item()
    stop = {"stopping_criteria": [EndsWith(token)], "return_dict_in_generate": True, "output_scores": True}
    wanted = greedy(base, given.prompt, **stop)
    heard = Heard()
    out = greedy(base, given.prompt, streamer=heard, **stop, **perfect(base))
    assert torch.equal(out.sequences, wanted.sequences)
    assert heard.tokens == wanted.sequences[0].tolist() and heard.ended
    torch.testing.assert_close(out.scores, wanted.scores, atol=1e-5, rtol=1e-5)
    assert base.speculation.tokens == len(wanted.scores) == sum(base.speculation.accepted_at) + base.speculation.rounds
    # The cache goes on where the text ends, or is empty.
    longer = torch.cat((out.sequences, torch.tensor([[7, 8]])), dim=1)
    assert torch.equal(greedy(base, longer, cache=out.cache), greedy(base, longer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["gqa", "sliding", "mla"])
def test_a_second_turn_goes_on_from_the_cache_of_the_first(case, attention, kind):
    given = case(**ATTENTIONS[attention])
    drafts, cache = drafts_of(kind, given.base, given.text), DynamicCache(config=given.base.config)
    first = greedy(given.base, given.prompt, new=8, cache=cache, **drafts)
    assert cache.get_seq_length() == first.shape[1] - 1
    longer = torch.cat((first, torch.tensor([[5, 6, 7]])), dim=1)
    out = greedy(given.base, longer, cache=cache, **drafts)
    assert torch.equal(out, greedy(given.base, longer))
    assert cache.get_seq_length() == out.shape[1] - 1


@pytest.mark.parametrize("kind", KINDS)
def test_other_outputs_are_those_without_drafts(case, kind):
    given = case(attn_implementation="eager")
    every = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
    drafts = drafts_of(kind, given.base, given.text)
    wanted = greedy(given.base, given.prompt, new=8, return_dict_in_generate=True, **every)
    out = greedy(given.base, given.prompt, new=8, return_dict_in_generate=True, **every, **drafts)
    for name in ("scores", "logits"):
        torch.testing.assert_close(out[name], wanted[name], atol=1e-5, rtol=1e-5)
    for name in ("hidden_states", "attentions"):
        for ours, theirs in zip(out[name], wanted[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_drafts_are_checked_beside_a_static_cache_too(case, kind):
    given = case()
    drafts = drafts_of(kind, given.base)
    assert torch.equal(greedy(given.base, given.prompt, cache_implementation="static", **drafts), given.text)


@pytest.mark.parametrize("kind", ["lookup", "model"])
def test_an_encoder_decoder_takes_the_kinds_of_the_library(tiny, kind):
    shape = {"architecture": "encoder-decoder", "decoder_start_token_id": 1, "vocab_size": VOCABULARY}
    base = tiny(head="seq2seq_lm", **shape)
    base.generation_config.eos_token_id = None
    draft = {"prompt_lookup_num_tokens": 3}
    if kind == "model":
        other = tiny(seed=1, head="seq2seq_lm", **shape)
        other.generation_config.assistant_confidence_threshold = 0.0
        draft = {"assistant_model": other}
    source = torch.randint(3, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(1))
    assert torch.equal(greedy(base, source, **draft), greedy(base, source))
    assert base.speculation.drafted
    assert torch.equal(greedy(base, source, cache_implementation="static", **draft), greedy(base, source))


def test_processors_see_the_text_with_the_draft(case):
    given = case()
    rules = {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "min_new_tokens": 12, "eos_token_id": 9}
    wanted = greedy(given.base, given.prompt, **rules)
    for kind in KINDS:
        assert torch.equal(greedy(given.base, given.prompt, **rules, **drafts_of(kind, given.base)), wanted)


# In a process in which the project is not installed.
ELSEWHERE = """
import sys

class Absent:
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "anyformer":
            raise ModuleNotFoundError(f"No module named {name!r}")

sys.meta_path.insert(0, Absent())
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

folder, limits = sys.argv[1], {"max_new_tokens": int(sys.argv[2]), "eos_token_id": None}
base = AutoModelForCausalLM.from_pretrained(folder + "/base", trust_remote_code=True)
for kind in ("medusa", "eagle", "mtp"):
    drafter = AutoModel.from_pretrained(folder + "/" + kind, trust_remote_code=True)
    assert AutoConfig.from_pretrained(folder + "/" + kind, trust_remote_code=True).kind == kind
    out = base.generate(torch.load(folder + "/prompt.pt"), do_sample=False, assistant_model=drafter, **limits)
    torch.save((out, str(base.speculation)), folder + "/" + kind + ".pt")
assert not any(name.startswith("anyformer.") for name in sys.modules)
"""


def test_saved_drafters_open_without_the_project_and_with_it(case, tmp_path):
    given = case()
    given.base.save_pretrained(tmp_path / "base")
    torch.save(given.prompt, tmp_path / "prompt.pt")
    came = {}
    for kind in TRAINED:
        drafts = drafts_of(kind, given.base, given.text)
        drafts["assistant_model"].save_pretrained(tmp_path / kind)
        assert torch.equal(greedy(given.base, given.prompt, **drafts), given.text)
        came[kind] = str(given.base.speculation)
        again = AnyformerDrafter.from_pretrained(tmp_path / kind)
        assert torch.equal(greedy(given.base, given.prompt, assistant_model=again), given.text)
        assert str(given.base.speculation) == came[kind]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": "",
    }
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path), str(NEW)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-2000:]
    for kind, statistics in came.items():
        tokens, elsewhere = torch.load(tmp_path / f"{kind}.pt")
        assert torch.equal(tokens, given.text) and elsewhere == statistics


def test_statistics_are_counted_by_place():
    made = SpeculationStatistics()
    for drafted, accepted in ((0, 0), (3, 3), (3, 1), (2, 0), (3, 2)):
        made.add(drafted, accepted)
    assert (made.rounds, made.tokens, made.drafted, made.accepted) == (5, 11, 11, 6)
    assert made.drafted_at == [4, 4, 3] and made.accepted_at == [3, 2, 1]
    assert made.acceptance_rates == [3 / 4, 2 / 4, 1 / 3]
    assert made.tokens_per_pass == 11 / 5
    assert str(made) == "11 tokens in 5 passes: 2.20 a pass; 6 of 11 drafted tokens accepted (55%)"
    both = made + SpeculationStatistics(1, 5, [1, 1, 1, 1], [1, 1, 1, 1])
    assert (both.rounds, both.tokens, both.drafted_at, both.accepted_at) == (6, 16, [5, 5, 4, 1], [4, 3, 2, 1])
    made.take_back(1)
    assert (made.tokens, made.accepted_at) == (10, [3, 1, 1])


def test_statistics_of_a_draft_model_that_is_always_right(case, perfect):
    given = case()
    greedy(given.base, given.prompt, **perfect(given.base))
    made = given.base.speculation
    assert made.rounds == 6 and made.acceptance_rate == 1 and made.drafted_at == [6, 5, 5, 5, 5]  # 5 x 6 and 2 tokens


def refused(base, prompt, message, **arguments):
    with pytest.raises(ValueError, match=message):
        base.generate(prompt, max_new_tokens=4, **arguments)


def test_wrong_pairs_are_refused(case, tiny):
    given = case()
    for kind in TRAINED:
        for fields, message in (
            ({"vocab_size": 23}, r"another base: vocab_size 19 \(drafter: 23\)"),
            ({"vocab_size": 19, "hidden_size": 48}, "another base: hidden_size 32"),
            ({"vocab_size": 19, "num_hidden_layers": 3}, "another base: num_hidden_layers 2"),
        ):
            other = AnyformerDrafter.from_base(tiny(**fields), kind=kind, num_draft_tokens=2)
            refused(given.base, given.prompt, message, assistant_model=other)
            with pytest.raises(ValueError, match=message):
                other(base=given.base, input_ids=given.prompt)
    both = tiny(head="seq2seq_lm", architecture="encoder-decoder", vocab_size=19, decoder_start_token_id=1)
    drafter = drafts_of("eagle", given.base)["assistant_model"]
    refused(both, given.prompt, "drafts for architecture='decoder'", assistant_model=drafter)
    with pytest.raises(ValueError, match="not for AnyformerForConditionalGeneration"):
        AnyformerDrafter.from_base(both)


def test_what_drafts_cannot_be_used_with_is_refused(case, tiny):
    given = case()
    base, prompt = given.base, given.prompt
    drafter = drafts_of("mtp", base)
    for drafts in (drafter, {"prompt_lookup_num_tokens": 2}):
        refused(base, prompt.expand(2, -1), "not for a batch of 2", **drafts)
        refused(base, prompt, "a quantized cache rounds", cache_implementation="quantized", **drafts)
        refused(base, prompt, "use_cache=False leaves nothing", use_cache=False, **drafts)
        cache = DynamicCache(config=base.config)
        base(prompt, cache=cache)
        refused(base, prompt[:, :4], "cache holds 9 tokens and input_ids 4: pass the whole", cache=cache, **drafts)
    refused(base, prompt, "beside a dynamic cache", cache_implementation="static", **drafter)
    embedded = base.get_input_embeddings()(prompt)
    refused(base, None, "reads tokens, not inputs_embeds", inputs_embeds=embedded, **drafter)
    refused(base, prompt, "asks for a model that was trained to end early", assistant_early_exit=1)


def test_a_draft_never_crosses_a_length_at_which_frequencies_turn(tiny):
    prompt = torch.arange(3, 12)[None]
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    longrope = tiny(rope_parameters={"rope_type": "longrope", "rope_theta": 100.0} | factors)
    dynamic = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}
    dynamic = tiny(rope_parameters=dynamic, max_position_embeddings=16)
    lookup = {"prompt_lookup_num_tokens": 3, "do_sample": False}
    for base in (longrope, dynamic):
        with pytest.raises(ValueError, match="frequencies turn beyond 16 tokens"):
            base.generate(prompt, max_length=17, **lookup)
        within = base.generate(prompt, max_length=16, **lookup)
        assert torch.equal(within, base.generate(prompt, max_length=16, do_sample=False))
    longer = torch.arange(3, 23)[None]  # behind it already
    out = longrope.generate(longer, max_length=30, **lookup)
    assert torch.equal(out, longrope.generate(longer, max_length=30, do_sample=False))


def test_a_stock_model_drafts_for_an_imported_one(case):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    stock = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, initializer_range=0.3)).eval()
    base, prompt = from_hf(stock), torch.arange(3, 12)[None]
    stock.generation_config.assistant_confidence_threshold = 0.0
    wanted = greedy(base, prompt, eos_token_id=None)
    assert torch.equal(greedy(base, prompt, assistant_model=stock, eos_token_id=None), wanted)
    assert base.speculation.acceptance_rate == 1


def test_attention_weights_of_functions_that_give_none_are_refused(case):
    wanted = {"output_attentions": True, "return_dict_in_generate": True}
    message = "attn_implementation='{}' gives no attention weights.*use attn_implementation='eager'"
    given = case()
    for kind in KINDS:
        drafts = drafts_of(kind, given.base)
        refused(given.base, given.prompt, message.format("sdpa"), **wanted, **drafts)
        # Without the dictionary nobody would see them.
        assert torch.equal(greedy(given.base, given.prompt, output_attentions=True, **drafts), given.text)
    given.base.set_attn_implementation("flex_attention")
    refused(given.base, given.prompt, message.format("flex_attention"), prompt_lookup_num_tokens=2, **wanted)


def test_an_encoder_decoder_gives_the_attentions_that_it_gives_without_drafts(tiny):
    base = tiny(head="seq2seq_lm", architecture="encoder-decoder", decoder_start_token_id=1, vocab_size=VOCABULARY)
    base.generation_config.eos_token_id = None
    wanted = {"output_attentions": True, "return_dict_in_generate": True}
    source = torch.randint(3, VOCABULARY, (1, 7), generator=torch.Generator().manual_seed(1))
    plain = greedy(base, source, **wanted)
    drafted = greedy(base, source, prompt_lookup_num_tokens=3, **wanted)
    assert torch.equal(drafted.sequences, plain.sequences)
    for name in ("decoder_attentions", "cross_attentions"):
        assert drafted[name] == plain[name] == ((),) * NEW  # sdpa gives none
