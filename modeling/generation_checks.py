"""What is asked of `generate` and can be nothing: told before the library stumbles over it."""

import operator
from collections.abc import Mapping
from typing import Any

import torch

COUNTS = ("num_beams", "num_return_sequences", "prompt_lookup_num_tokens", "max_matching_ngram_size")


def check_asked(model: Any, args: tuple[Any, ...], options: Mapping[str, Any]) -> None:
    """Look at the arguments of `model.generate`.

    Raises:
        ValueError: a count below 1, a drafter that is no model, tokens that are none of the vocabulary, or none at all.
    """
    for name in COUNTS:
        value = options.get(name)
        if value is not None and not _is_count(value):
            raise ValueError(f"{name}={value!r}: a number from 1 (or leave it out)")
    drafter = options.get("assistant_model")
    if drafter is not None and (isinstance(drafter, type) or not callable(getattr(drafter, "forward", None))):
        raise ValueError(
            f"assistant_model={drafter!r}: a loaded model or drafter, as "
            "`AutoModelForCausalLM.from_pretrained` and `AnyformerDrafter.from_pretrained` give"
        )
    tokens = args[0] if args else options.get("inputs")
    tokens = options.get("input_ids") if tokens is None else tokens
    if isinstance(tokens, torch.Tensor) and options.get("inputs_embeds") is None:
        # What is read may also stand before the first token.
        begun = options.get("encoder_outputs") is not None or bool(model.virtual_tokens())
        rows = model.get_input_embeddings().weight.shape[0]
        _check_tokens(tokens, max(model.config.vocab_size, rows), may_be_empty=begun)


def _is_count(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        return False


def _check_tokens(tokens: torch.Tensor, vocabulary: int, *, may_be_empty: bool) -> None:
    if tokens.is_floating_point() or tokens.dtype == torch.bool or tokens.dim() != 2:
        raise ValueError(
            f"the prompt is a tensor of {tokens.dtype} and shape {(*tokens.shape,)}: token ids are whole numbers, "
            "[batch, length]; embeddings go into inputs_embeds"
        )
    if not tokens.numel() and may_be_empty:
        return
    if not tokens.numel():
        raise ValueError(f"the prompt has shape {(*tokens.shape,)}: at least one text of one token is needed")
    least, most = (int(x) for x in tokens.aminmax())
    if least < 0 or most >= vocabulary:
        raise ValueError(
            f"the prompt holds token {least if least < 0 else most}, and the vocabulary goes from 0 to "
            f"{vocabulary - 1}: was it made by another tokenizer?"
        )
