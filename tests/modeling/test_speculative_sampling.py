"""Sampling with drafts leaves the distribution of the model: chi-square tests against the enumerated distribution."""

import itertools

import pytest
import torch
from drafts import KINDS, drafts_of

from anyformer.modeling.speculation import DrafterCandidateGenerator

VOCABULARY, NEW, SAMPLES = 5, 4, 600
UNLIKELY = 1e-4  # of a sound test by chance; seeds are fixed
PROMPT = torch.tensor([[1, 2, 3, 1, 2, 4, 1]])  # in which something can be looked up
ALL = torch.tensor(list(itertools.product(range(VOCABULARY), repeat=NEW)))  # [continuations, NEW]


@pytest.fixture
def base(tiny):
    """Of no special tokens and mild weights, so that every continuation has its share."""
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    return tiny(vocab_size=VOCABULARY, num_hidden_layers=1, initializer_range=0.2, **special)


@torch.no_grad()
def exact(base, temperature=1.0, top_k=0):
    """The probability of each continuation, from plain forward passes and the definition of the two rules."""
    rows = torch.cat((PROMPT.expand(len(ALL), -1), ALL), dim=1)[:, :-1]
    logits = base(rows, use_cache=False).logits[:, -NEW:].double() / temperature
    if top_k:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
    return logits.softmax(-1).gather(-1, ALL[..., None]).prod(1).squeeze(-1)


def sampled(base, seed=0, **arguments):
    """How often each continuation came, and how many tokens were drafted and accepted."""
    torch.manual_seed(seed)
    counts, drafted, accepted = torch.zeros(len(ALL)), 0, 0
    place = VOCABULARY ** torch.arange(NEW).flip(0)
    for _ in range(SAMPLES):
        text = base.generate(PROMPT, max_new_tokens=NEW, do_sample=True, **arguments)
        counts[(text[0, -NEW:] * place).sum()] += 1
        drafted, accepted = drafted + base.speculation.drafted, accepted + base.speculation.accepted
    return counts, drafted, accepted


def chance(counts, probabilities):
    """The probability of counts at least as far from those expected (Pearson's test); the rarest share a cell."""
    expected = probabilities * counts.sum()
    assert not counts[expected == 0].any()
    often = expected >= 5
    seen, wanted = (torch.cat((x[often], x[~often].sum()[None])).double() for x in (counts, expected))
    filled = wanted > 0  # the last may be empty
    statistic = ((seen - wanted)[filled] ** 2 / wanted[filled]).sum()
    degrees = (filled.sum() - 1).double()
    return torch.special.gammaincc(degrees / 2, statistic / 2).item()


RULES = {"plain": {"top_k": 0}, "warped": {"temperature": 0.7, "top_k": 3}}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("kind", KINDS)
def test_sampled_continuations_have_the_distribution_of_the_model(base, kind, rules):
    counts, drafted, accepted = sampled(base, **RULES[rules], **drafts_of(kind, base))
    assert SAMPLES / 10 < accepted < drafted - SAMPLES / 10  # both ways have been gone, often
    assert chance(counts, exact(base, **RULES[rules])) > UNLIKELY


def test_a_draft_that_is_not_drawn_from_what_it_reports_is_caught(base, monkeypatch):
    """The control: the drafter's first choice, said to be drawn from its distribution."""
    monkeypatch.setattr(DrafterCandidateGenerator, "_choose", lambda self, scores: scores.argmax(-1, keepdim=True))
    counts, *_ = sampled(base, top_k=0, **drafts_of("mtp", base))
    assert chance(counts, exact(base)) < UNLIKELY


def test_the_yardstick_fits_sampling_without_drafts(base):
    torch.manual_seed(0)
    place = VOCABULARY ** torch.arange(NEW).flip(0)
    for rules in RULES.values():
        rows = base.generate(PROMPT.expand(20_000, -1), max_new_tokens=NEW, do_sample=True, **rules)
        counts = torch.bincount((rows[:, -NEW:] * place).sum(-1), minlength=len(ALL)).float()
        assert chance(counts, exact(base, **rules)) > UNLIKELY
        # And does not fit a model that is a little off.
        assert chance(counts, exact(base, **rules | {"temperature": rules.get("temperature", 1.0) * 1.2})) < UNLIKELY
