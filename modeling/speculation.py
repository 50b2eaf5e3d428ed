"""Drafts of an `AnyformerDrafter` for speculative decoding, and what came of drafts.

A draft changes no distribution (Leviathan et al. 2023, arXiv:2211.17192; Chen et al. 2023, arXiv:2302.01318) as long as
its tokens are drawn from the distributions that the check is told of.
"""

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import torch
from transformers.generation import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

DRAFTER_TYPE = "anyformer_drafter"  # the model_type: a class may come from a folder of its own


@dataclass
class SpeculationStatistics:
    """What came of the drafts of one `generate`.

    Attributes:
        rounds: forward passes of the model, that over the prompt included.
        tokens: generated.
        drafted, accepted: how many tokens were proposed, and how many of them stand in the text as drafted.
        drafted_at, accepted_at: the same, by place in the draft.
    """

    rounds: int = 0
    tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    _last: int = field(default=0, repr=False)  # accepted in the last round

    def add(self, drafted: int, accepted: int) -> None:
        """One round, which ends with a token of the model's own."""
        self.rounds += 1
        self.tokens += accepted + 1
        self._last = accepted
        for counts, count in ((self.drafted_at, drafted), (self.accepted_at, accepted)):
            counts.extend([0] * (drafted - len(counts)))
            for place in range(count):
                counts[place] += 1

    def __add__(self, other: "SpeculationStatistics") -> "SpeculationStatistics":
        """Those of two texts."""
        total = SpeculationStatistics(self.rounds + other.rounds, self.tokens + other.tokens)
        for name in ("drafted_at", "accepted_at"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(total, name, [mine + theirs for mine, theirs in pairs])
        return total

    def take_back(self, count: int) -> None:
        """The last tokens of the last round stand behind the end of the text."""
        self.tokens -= count
        for place in range(self._last - count, self._last):
            self.accepted_at[place] -= 1

    @property
    def drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def acceptance_rate(self) -> float:
        """Share of the drafted tokens that were accepted; 0 where none was drafted."""
        return self.accepted / max(self.drafted, 1)

    @property
    def acceptance_rates(self) -> list[float]:
        """The same by place in the draft; a place counts as drafted also where one before it was refused."""
        return [a / max(d, 1) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)]

    @property
    def tokens_per_pass(self) -> float:
        """Tokens a forward pass of the model: 1 without drafts."""
        return self.tokens / max(self.rounds, 1)

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens in {self.rounds} passes: {self.tokens_per_pass:.2f} a pass; "
            f"{self.accepted} of {self.drafted} drafted tokens accepted ({self.acceptance_rate:.0%})"
        )


@dataclass
class Progress:
    """What the base has read since the drafter was last asked, and the token after it.

    Attributes:
        features: [1, new, hidden_size].
        tokens: [1, new], of each feature the token after it.
        position_ids: [1, new + 1], of the features' tokens, and the last of `tokens`.
        attention_mask: [1, context], true for real tokens, from the first feature ever given to the last of `tokens`;
            None: all are.
    """

    features: torch.Tensor
    tokens: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor | None


class Drafting:
    """One text while it is drafted for."""

    def advance(self, progress: Progress) -> None:
        """Take in what the base has read; what was drafted before is forgotten."""
        raise NotImplementedError

    def states(self, drafted: list[torch.Tensor]) -> torch.Tensor:
        """The states [1, n, hidden_size] from which the head predicts the next n tokens, at least one.

        Args:
            drafted: the tokens drafted since `advance`, [1, 1] each; n more at each call.
        """
        raise NotImplementedError


class DrafterCandidateGenerator(CandidateGenerator):
    """Drafts with an `AnyformerDrafter`, from the hidden states of the model's last pass.

    Args:
        model: the `AnyformerForCausalLM` that generates.
        drafter: made for it.
        generation_config: what `generate` runs with.
        logits_processor: what the model's own logits go through.
    """

    requires_model_outputs = True

    def __init__(
        self, model: Any, drafter: Any, generation_config: Any, logits_processor: LogitsProcessorList | None = None
    ) -> None:
        self.model, self.count = model, drafter.config.num_draft_tokens
        self.device, self.dtype = drafter.device, drafter.dtype
        self.drafting = drafter.drafting(model)
        self.do_sample, self.max_length = generation_config.do_sample, generation_config.max_length
        self.processors = logits_processor if logits_processor is not None else LogitsProcessorList()
        self.seen = -1  # tokens whose features the drafter has been given
        # Not output_hidden_states: the hooks that collect those are seen by every step.
        self.model_kwargs_overrides = {"output_last_hidden_state": True}

    @torch.no_grad()
    def get_candidates(self, input_ids: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The text [1, length] with a draft behind it, and the logits [1, drafted, vocab_size] it was drawn from.

        Args:
            kwargs: model_kwargs of `generate`; model_outputs, of the last pass; is_first_iteration: there was none.
        """
        count = min(self.count, self.max_length - input_ids.shape[1] - 1)  # the model adds one
        if kwargs["is_first_iteration"] or count < 1:
            return input_ids, None
        self.drafting.advance(self._progress(input_ids, kwargs["model_kwargs"], kwargs["model_outputs"]))
        drafted: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        ahead: list[torch.Tensor] = []
        text: Any = input_ids
        for _ in range(count):
            if not ahead:
                states = self.drafting.states(drafted).to(device=self.model.device, dtype=self.model.dtype)
                ahead = list(self.model.logits_of(states).to(device=input_ids.device, dtype=torch.float32).unbind(1))
            logits.append(self.processors(text, ahead.pop(0)))
            token = self._choose(logits[-1])
            text = torch.cat((text, token), dim=-1)
            drafted.append(token.to(self.device))
        return text, torch.stack(logits, dim=1)

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        if not self.do_sample:
            return scores.argmax(-1, keepdim=True)
        return torch.multinomial(scores.softmax(-1), num_samples=1)

    def _progress(self, input_ids: torch.Tensor, model_kwargs: dict[str, Any], model_outputs: Any) -> Progress:
        features = model_outputs.last_hidden_state
        known = input_ids.shape[1] - 1  # tokens read and accepted
        if self.seen < 0:
            self.seen = self.start = known - features.shape[1]
        new = known - self.seen
        self.seen = known
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(known + 1)[None]
        return Progress(
            features=features[:, :new].to(device=self.device, dtype=self.dtype),
            tokens=input_ids[:, -new:].to(self.device),
            position_ids=positions[:, -new - 1 :].to(self.device),
            attention_mask=None if mask is None else mask[:, self.start :].to(self.device),
        )
