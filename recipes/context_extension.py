"""`model.context_extension`: a checkpoint's rotary embedding, scaled so that it can learn from longer texts."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from ..modeling import AnyformerConfig

# YaRN's bounds (arXiv:2309.00071, sec. 3.2): pairs that turn more often within the trained length are left alone, those
# that do not turn once are interpolated.
BETA_FAST, BETA_SLOW = 32, 1
TRAINED = "original_max_position_embeddings"


def extend_context(config: "AnyformerConfig", method: str, length: int) -> None:
    """Scale the rotary embedding of a config to texts of `length` tokens.

    With s = length / trained length and d rotated values of a head:

    - "linear": positions divided by s (Chen et al. 2023, arXiv:2306.15595, eq. 4);
    - "ntk": the base times s^(d / (d - 2)), which interpolates the slowest pair alone by s ("NTK-aware",
      arXiv:2309.00071, sec. 3.1);
    - "yarn": pairs interpolated by how often they turn within the trained length, and scores sharpened (sec. 3.4);
    - "longrope": a factor for each pair, of texts beyond the trained length alone (Ding et al. 2024,
      arXiv:2402.13753). The paper searches them by perplexity; here they are YaRN's ramp, and 1 for short texts.

    Windowed layers of a config that tells layer types apart keep theirs: they see no longer distances than before.

    Raises:
        UserError: no rotary embedding, one that is scaled in a way that hides the trained length, or a length that is
            no extension.
    """
    where = "model.context_extension"
    if config.position_embedding != "rope":
        raise UserError(
            f"{where}: scales a rotary embedding, and this model has position_embedding={config.position_embedding!r}"
        )
    if config.rope_thetas is not None and method == "ntk":
        raise UserError(f"{where}.method: ntk changes the base, and this model has one for each layer: choose another")
    whole: dict[str, Any] = config.rope_parameters or {}
    nested = "full_attention" in whole
    rope = whole["full_attention"] if nested else whole
    trained = _trained_length(config, rope, where)
    if length <= trained:
        raise UserError(f"{where}.length: is {length}, and the model was trained for {trained}: give a longer one")
    kept = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if rope.get(name) is not None}
    scaled = kept | _scaled(config, method, kept, length / trained, trained)
    config.rope_parameters = whole | {"full_attention": scaled} if nested else scaled
    config.max_position_embeddings = length


def _trained_length(config: "AnyformerConfig", rope: Mapping[str, Any], where: str) -> int:
    kind = rope.get("rope_type", "default")
    if kind in ("yarn", "longrope"):  # scaled once already: the new factor is counted from the first length
        return rope[TRAINED]
    if kind != "default":
        raise UserError(
            f"{where}: the rotary embedding is scaled already (rope_type {kind!r}): write model.config.rope_parameters "
            "yourself"
        )
    return config.max_position_embeddings


def _scaled(
    config: "AnyformerConfig", method: str, rope: Mapping[str, Any], factor: float, trained: int
) -> dict[str, Any]:
    from ..modeling.validation import rotary_dim

    size = rotary_dim(config, dict(rope))
    if method == "linear":
        return {"rope_type": "linear", "factor": factor}
    if method == "ntk":
        return {"rope_type": "default", "rope_theta": rope["rope_theta"] * factor ** (size / (size - 2))}
    if method == "yarn":
        return {"rope_type": "yarn", "factor": factor, TRAINED: trained}
    return {
        "rope_type": "longrope",
        "factor": factor,
        TRAINED: trained,
        "short_factor": [1.0] * (size // 2),
        "long_factor": ramp_factors(size, rope["rope_theta"], factor, trained),
    }


def ramp_factors(size: int, theta: float, factor: float, trained: int) -> list[float]:
    """By how much each of the size / 2 pairs is slowed down: from 1 for those that turn often within the trained length
    to `factor` for those that do not turn once. It never falls from one pair to the next, as LongRoPE wants it."""

    def pair_that_turns(times: int) -> float:
        return size * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(pair_that_turns(BETA_FAST)), 0), min(math.ceil(pair_that_turns(BETA_SLOW)), size - 1)
    shares = [min(max((pair - low) / max(high - low, 0.001), 0.0), 1.0) for pair in range(size // 2)]
    return [1 / (share / factor + 1 - share) for share in shares]


def complete_rope(config: "AnyformerConfig", given: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` of a recipe, with what they leave out as the checkpoint has it: the base, the rotated share,
    and the length that a scaling starts from."""
    before = config.rope_parameters or {}

    def completed(part: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
        kept = {name: old[name] for name in ("rope_theta", "partial_rotary_factor") if old.get(name) is not None}
        if part.get("rope_type") in ("yarn", "longrope", "llama3"):
            kept[TRAINED] = old.get(TRAINED) or config.max_position_embeddings
        return kept | dict(part)

    if not any(isinstance(value, Mapping) for value in given.values()):
        return completed(given, before.get("full_attention", before))
    return {name: completed(part, before.get(name, before)) for name, part in given.items()}
