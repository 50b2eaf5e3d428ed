"""`generate` with drafts: equal to `generate` without, or refused."""

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from transformers.cache_utils import BaseQuantizedLayer, EncoderDecoderCache
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.candidate_generator import AssistedCandidateGenerator, PromptLookupCandidateGenerator

from .configuration_anyformer import AnyformerConfig
from .speculation import DRAFTER_TYPE, DrafterCandidateGenerator, SpeculationStatistics


class _Stops(StoppingCriteria):
    """Criteria that look at the end of a text, asked after each token of a draft and not once after all of it.

    The library ends a text inside a draft at its maximum length and at the end token alone.

    Args:
        criteria: all; those that it knows are left to it.
        prompt: [1, length].
        streamer: gets tokens up to the end only.

    Attributes:
        end: length of the text that meets them, once one does.
    """

    def __init__(self, criteria: StoppingCriteriaList, prompt: torch.Tensor, streamer: BaseStreamer | None) -> None:
        known = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)
        self.own = StoppingCriteriaList(c for c in criteria if not isinstance(c, known))
        self.rest = StoppingCriteriaList(c for c in criteria if isinstance(c, known))
        self.prompt = self.looked_at = prompt.shape[1]
        self.end: int | None = None
        self.streamer = None if streamer is None else _Stream(streamer, prompt, self)

    @property
    def criteria(self) -> StoppingCriteriaList:
        return StoppingCriteriaList([*self.rest, self])

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.look(input_ids, scores)
        return torch.full((len(input_ids),), self.end is not None, device=input_ids.device)

    def look(self, text: Any, scores: Any) -> None:
        """Ask about each token [1, length] that is new."""
        while self.end is None and self.looked_at < text.shape[1]:
            self.looked_at += 1
            until = scores and scores[: self.looked_at - self.prompt]
            if self.own(text[:, : self.looked_at], until).all():
                self.end = self.looked_at

    def cut(self, result: Any, cache: Any) -> Any:
        """What `generate` returns, without what is behind the end; in the cache too."""
        text = result if isinstance(result, torch.Tensor) else result.sequences
        behind = 0 if self.end is None else text.shape[1] - self.end
        if not behind:
            return result
        _take_back(cache, behind)
        if isinstance(result, torch.Tensor):
            return result[:, : self.end]
        result.sequences = text[:, : self.end]
        for name in ("scores", "logits", "attentions", "hidden_states"):
            if isinstance(result.get(name), tuple):  # a part a token
                result[name] = result[name][:-behind]
        return result


class _Stream(BaseStreamer):
    """Hands on tokens up to the end of a text.

    Args:
        prompt: [1, length], handed on before.
    """

    def __init__(self, streamer: BaseStreamer, prompt: torch.Tensor, stops: _Stops) -> None:
        self.streamer, self.text, self.stops = streamer, prompt, stops

    def put(self, value: torch.Tensor) -> None:
        before = self.text.shape[1]
        self.text = torch.cat((self.text, value.view(1, -1).to(self.text.device)), dim=-1)
        self.stops.look(self.text, None)
        kept = value.shape[-1] if self.stops.end is None else self.stops.end - before
        if kept > 0:
            self.streamer.put(value[..., :kept])

    def end(self) -> None:
        self.streamer.end()


def _take_back(cache: Any, count: int) -> None:
    """Drop the last entries of a cache; all, where a window has dropped what would be visible again."""
    own: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if any(layer.is_sliding and layer.get_seq_length() >= layer.get_max_length() for layer in own.layers):
        cache.reset()
    else:
        cache.crop(-count)


class SpeculativeGeneration:
    """`generate` with drafts equals `generate` without, or is refused; stands before `GenerationMixin` among the bases.

    Attributes:
        speculation: what came of the drafts of the last `generate` that had any, of whatever kind; None before it.
    """

    config: AnyformerConfig
    speculation: SpeculationStatistics | None = None

    def prepare_inputs_for_generation(
        self, input_ids: Any, next_sequence_length: int | None = None, cache: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        """As the base class, which checks the first draft against all of the text, that in the cache included."""
        held = 0 if cache is None else int(cache.get_seq_length())
        if held and next_sequence_length is None and _GENERATING.get() is self:
            next_sequence_length = input_ids.shape[1] - held
        return super().prepare_inputs_for_generation(  # type: ignore[misc]
            input_ids, next_sequence_length=next_sequence_length, cache=cache, **kwargs
        )

    def _validate_generation_mode(self, generation_mode: Any, generation_config: Any, mode_kwargs: Any) -> Any:
        drafter = mode_kwargs.get("assistant_model")
        if is_drafter(drafter):  # before the base class asks for a tokenizer of its own
            drafter.check_base(self)
        return super()._validate_generation_mode(generation_mode, generation_config, mode_kwargs)  # type: ignore[misc]

    # `generate` looks for inputs_tensor in the signature.
    def _assisted_decoding(self, input_ids: Any, *args: Any, inputs_tensor: Any = None, **kwargs: Any) -> Any:
        generation_config, cache = kwargs["generation_config"], kwargs.get("cache")
        for problem in _problems(self.config, input_ids, generation_config, kwargs):
            raise ValueError(f"drafts (assistant_model, prompt_lookup_num_tokens) cannot be used here: {problem}")
        stops = _Stops(kwargs["stopping_criteria"], input_ids, kwargs.get("streamer"))
        if stops.own:
            kwargs |= {"stopping_criteria": stops.criteria, "streamer": stops.streamer}
        token = _GENERATING.set(self)
        try:
            result = super()._assisted_decoding(  # type: ignore[misc]
                input_ids, *args, inputs_tensor=inputs_tensor, **kwargs
            )
        finally:
            _GENERATING.reset(token)
        before = result if isinstance(result, torch.Tensor) else result.sequences
        after = stops.cut(result, cache)
        if self.speculation is not None:
            kept = after if isinstance(after, torch.Tensor) else after.sequences
            self.speculation.take_back(before.shape[1] - kept.shape[1])
        return after

    def _get_candidate_generator(self, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = kwargs.get("assistant_model")
        generator: Any
        if is_drafter(drafter):
            generator = DrafterCandidateGenerator(self, drafter, generation_config, kwargs.get("logits_processor"))
        else:
            generator = super()._get_candidate_generator(generation_config, *args, **kwargs)  # type: ignore[misc]
        self.speculation = SpeculationStatistics()
        _record(generator, self.speculation)
        if isinstance(generator, PromptLookupCandidateGenerator):
            _keep_short(generator, generation_config.max_length)
        if isinstance(generator, AssistedCandidateGenerator) and not self.config.is_encoder_decoder:
            _state_mask(generator, kwargs["input_ids"])
        return generator


# The model whose drafts are being checked: a draft model runs `generate` of its own inside.
_GENERATING: ContextVar[Any] = ContextVar("generating", default=None)


def is_drafter(model: Any) -> bool:
    """Whether this drafts from the hidden states of another."""
    return getattr(getattr(model, "config", None), "model_type", None) == DRAFTER_TYPE


def _record(generator: Any, statistics: SpeculationStatistics) -> None:
    update = generator.update_candidate_strategy

    def counted(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> Any:
        statistics.add(scores.shape[1] - 1, int(num_matches))
        return update(input_ids, scores, num_matches)

    generator.update_candidate_strategy = counted


def _keep_short(generator: Any, max_length: int) -> None:
    """Cut what is looked up where the text will end: beyond it may be no position, and no room in a static cache."""
    look_up = generator.get_candidates

    def bounded(input_ids: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, Any]:
        text, logits = look_up(input_ids, **kwargs)
        return text[:, : max(max_length - 1, input_ids.shape[1])], logits

    generator.get_candidates = bounded


def _state_mask(generator: Any, text: torch.Tensor) -> None:
    """Tell a draft model that all of a text [1, length] is real, where `generate` has dropped the mask that says so: it
    would take what is `pad_token_id` for padding, and find some in what was generated."""
    if generator.assistant_kwargs.get("attention_mask") is None:
        generator.assistant_kwargs["attention_mask"] = torch.ones_like(text)


# Names of attention functions begin so that return no weights, among which the library looks for those of a draft.
_WITHOUT_WEIGHTS = ("sdpa", "flex", "flash")


def _problems(config: AnyformerConfig, text: torch.Tensor, generation_config: Any, kwargs: Any) -> Iterator[str]:
    """Where a text with drafts would differ from one without, or nothing could be drafted.

    Args:
        text: [batch, length], the prompt.
        kwargs: of `_assisted_decoding`.
    """
    cache, mask = kwargs.get("cache"), kwargs.get("attention_mask")
    if len(text) != 1:
        yield f"they are checked for one text at a time, not for a batch of {len(text)}"
    if cache is None:
        yield "use_cache=False leaves nothing to take refused tokens back from; leave it out"
        return
    if generation_config.assistant_ensemble_weight is not None:
        yield "assistant_ensemble_weight changes the distribution"
    if generation_config.assistant_early_exit is not None:
        yield "assistant_early_exit asks for a model that was trained to end early; use a draft model"
    wanted = generation_config.return_dict_in_generate and generation_config.output_attentions
    if wanted and not config.is_encoder_decoder and str(config._attn_implementation).startswith(_WITHOUT_WEIGHTS):
        yield (
            f"attn_implementation={config._attn_implementation!r} gives no attention weights, which "
            "output_attentions=True asks for: use attn_implementation='eager', or leave it out"
        )
    assistant = kwargs.get("assistant_model")
    if assistant is not None and kwargs.get("inputs_embeds") is not None:
        yield "what drafts reads tokens, not inputs_embeds: pass input_ids"
    if is_drafter(assistant) and cache.is_compileable:
        yield "a drafter drafts beside a dynamic cache: leave out cache_implementation"
    own: Any = cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
    if any(isinstance(layer, BaseQuantizedLayer) for layer in own.layers):
        yield "a quantized cache rounds each token once it is read, and those of a draft are read at once; leave it out"
    held, width = int(cache.get_seq_length()), text.shape[1]
    wide = getattr(generation_config, "_mask_length", width) if mask is None else mask.shape[1]
    if held and not config.is_encoder_decoder and (wide != width or held >= width):
        yield f"the cache holds {held} tokens and input_ids {width}: pass the whole text, those tokens included"
