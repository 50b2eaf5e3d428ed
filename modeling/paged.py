"""Continuous batching: what the library's paged cache asks of a model, and what cannot be exact under it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from .configuration_anyformer import AnyformerConfig
from .inference import GENERATION, Prepared
from .soft_prompts import soft_prompt_of

# On CPUs, where nothing else is stated. A pass of more tokens makes all requests wait for one long prompt, and the
# library fills masks of [tokens of a pass, tokens of the cache].
PASS_TOKENS = 512
SERVED_TOKENS = 16_384
SERVED_PAGE, LONGEST_PAGE = 512, 1024


def is_paged(cache: Any) -> bool:
    """Whether this is the cache of continuous batching: one row of the tokens of many requests."""
    return cache is not None and not isinstance(cache, Cache)


def paged_positions(
    position_ids: torch.Tensor, query_ends: torch.Tensor, key_ends: torch.Tensor, keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions [1, queries] and [1, keys] in a row of many requests, whose last key is each one's last query.

    Args:
        position_ids: [1, queries]; query_ends, key_ends: [requests + 1], cumulative lengths from 0.
    """
    last = position_ids[0, (query_ends[1:].long() - 1).clamp(min=0)]  # [requests]
    ends = key_ends[1:].long().contiguous()
    index = torch.arange(keys, device=position_ids.device)
    request = torch.searchsorted(ends, index, right=True).clamp(max=len(ends) - 1)
    return position_ids, (last[request] - (ends[request] - 1 - index))[None]


class PagedGeneration:
    """`generate_batch` and continuous batching, exact or refused; stands before `GenerationMixin` among the bases."""

    config: AnyformerConfig

    def init_continuous_batching(
        self, generation_config: Any = None, continuous_batching_config: Any = None, workload_hints: Any = None
    ) -> Any:
        """As the base class; what `generation_config` leaves open is filled as for `generate`, and on CPUs the cache
        gets the size that the requests need, where the base class takes a share of the machine's memory.

        Raises:
            ValueError: this model, these settings or requests as long as `workload_hints` says cannot be served
                exactly. `add_request` of the manager raises it for a request that never fits; in the base class such
                a one ends all others with it.
        """
        batching = continuous_batching_config or ContinuousBatchingConfig()
        settings, _ = self._prepare_generation_config(generation_config)  # type: ignore[attr-defined]
        soft = ["it would run without its soft prompt"] if soft_prompt_of(self) is not None else []
        unknown = _unknown_settings(settings, self._get_logits_processor(settings), batching)  # type: ignore[attr-defined]
        for problem in [*soft, *_problems(self.config), *unknown]:
            raise ValueError(f"continuous batching cannot serve this model: {problem}; use `generate`")
        if self.device.type != "cpu":  # type: ignore[attr-defined]
            return self._manager(settings, batching, workload_hints)
        sized = _sized_for_cpu(continuous_batching_config, self.config, workload_hints)
        try:
            return self._manager(settings, sized, workload_hints)
        except MemoryError:  # then as many blocks as there is room for
            return self._manager(settings, dataclasses.replace(sized, num_blocks=batching.num_blocks), workload_hints)

    def _manager(self, settings: Any, batching: ContinuousBatchingConfig, hints: Any) -> Any:
        from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

        with _cache_sizes(self.config):
            manager = super().init_continuous_batching(settings, batching, hints)  # type: ignore[misc]
            if manager.batch_processor is not None:  # one that was kept
                return manager
            manager.warmup()  # the cache is made here, from the sizes that the config shows now
        processor: Any = manager.batch_processor
        longest = infer_max_single_request_tokens(processor.cache)
        if self.config.position_embedding == "learned":
            longest = min(longest, self.config.max_position_embeddings)
        if hints is not None:
            _refuse_too_long(hints.max_prompt_length, hints.max_generated_length, longest)
        manager.add_request = _checked(manager, longest)
        _prepare_while_running(manager)
        return manager


def _prepare_while_running(manager: Any) -> None:
    """Let the passes of the manager's thread use what is prepared while text is generated, but not beyond a pause, in
    which weights may change."""
    run, pause = manager._run_generation_loop, manager.pause
    prepared: list[Prepared] = []

    def run_prepared(*args: Any, **kwargs: Any) -> None:
        with GENERATION.begun() as made:
            prepared[:] = [made]
            run(*args, **kwargs)

    @contextmanager
    def forgetting_pause() -> Iterator[None]:
        with pause():
            try:
                yield
            finally:
                for made in prepared:
                    made.forget()

    manager._run_generation_loop, manager.pause = run_prepared, forgetting_pause


def _refuse_too_long(prompt: int, new: int, longest: int) -> None:
    if prompt + new > longest:
        raise ValueError(
            f"continuous batching cannot serve a prompt of {prompt} tokens with {new} new ones: the cache and the "
            f"model have room for {longest} in one request; see `num_blocks` of ContinuousBatchingConfig"
        )


def _checked(manager: Any, longest: int) -> Callable:
    """The manager's `add_request`, which raises a ValueError for what would stop the thread that serves all."""
    add = manager.add_request

    @functools.wraps(add)
    def add_request(
        input_ids: Sequence[int], request_id: str | None = None, max_new_tokens: int | None = None, **kwargs: Any
    ) -> Any:
        if not len(input_ids):
            raise ValueError("continuous batching cannot serve a prompt without a token")
        if max_new_tokens is None:
            max_new_tokens = manager.generation_config.max_new_tokens
        if max_new_tokens is None:
            max_new_tokens = longest - len(input_ids)
        _refuse_too_long(len(input_ids), max(max_new_tokens, 1), longest)
        return add(input_ids, request_id, max_new_tokens, **kwargs)

    return add_request


def _unknown_settings(settings: Any, processors: Iterable[Any], batching: ContinuousBatchingConfig) -> Iterator[str]:
    """What `generate` would do and the library's continuous batching leaves out."""
    if settings.stop_strings:
        yield "it stops at tokens alone (stop_strings)"
    if (settings.num_beams or 1) > 1:
        yield "it has no beams (num_beams)"
    for processor in processors:
        if processor.supports_continuous_batching is False and batching.drop_unsupported_processors:
            yield f"it has no {type(processor).__name__}"


def _sized_for_cpu(
    given: ContinuousBatchingConfig | None, config: AnyformerConfig, hints: Any
) -> ContinuousBatchingConfig:
    """With what is not stated: short passes, blocks for all requests at once or for `SERVED_TOKENS`, and pages that
    hold a whole request, whose keys are then read where they lie."""
    longest = hints.max_prompt_length + hints.max_generated_length if hints and hints.max_generated_length else None
    batching = given or ContinuousBatchingConfig(page_size=min(_rounded(longest or SERVED_PAGE, 64), LONGEST_PAGE))
    tokens = min(max(SERVED_TOKENS, config.max_position_embeddings), 4 * SERVED_TOKENS)
    blocks = math.ceil(tokens / batching.page_size)
    if longest:
        # The scheduler lets nothing in while fewer than 15 % are free.
        blocks = math.ceil(math.ceil(longest / batching.page_size) * hints.num_requests / 0.85) + 1
    return dataclasses.replace(
        batching,
        num_blocks=batching.num_blocks or blocks,
        max_batch_tokens=batching.max_batch_tokens or PASS_TOKENS,
    )


def _rounded(tokens: int, step: int) -> int:
    return math.ceil(tokens / step) * step


def _problems(config: AnyformerConfig) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it has no place for an encoder"
    if "global_sliding_attention" in config.layer_types:
        yield "it drops what leaves a window, global tokens too (layer_types holds 'global_sliding_attention')"
    for kind in ("dynamic", "longrope"):
        if f"'{kind}'" in str(config.rope_parameters):
            yield f"rope_type={kind!r} turns by the length of a text, and requests of all lengths share a pass"


@contextmanager
def _cache_sizes(config: AnyformerConfig) -> Iterator[None]:
    """Show the sizes of what is cached where the paged cache looks for those of keys and values."""
    if config.attention != "mla":
        yield
        return
    sizes = config.num_key_value_heads, config.head_dim
    config.num_key_value_heads, config.head_dim = 1, max(config.kv_lora_rank, config.qk_rope_head_dim)
    try:
        yield
    finally:
        config.num_key_value_heads, config.head_dim = sizes
