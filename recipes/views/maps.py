"""Attention maps: where the heads of a model look while it reads a prompt."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import UserError
from ..evaluation import virtual_tokens
from ..generator import position_limit, require_text
from ..inspection.pieces import special_ids, token_text, visible
from ..planning.fake_model import plain
from ..planning.subject import Subject
from .chosen import Chosen, choose
from .weights import open_weights

# Tokens of a text whose labels can still be read, and those that a decoder writes where nobody says what it reads.
MOST_TOKENS, WRITTEN = 64, 16


@dataclass(frozen=True)
class Maps:
    """The attention weights of one kind.

    Attributes:
        title: which attention.
        weights: by layer, [heads, queries, keys] in fp32; each row sums to 1, less what a sink takes.
        queries, keys: the tokens, as a person reads them.
    """

    title: str
    weights: tuple[torch.Tensor, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]


def attention_weights(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, ...]]:
    """The weights of every layer, [batch, heads, queries, keys] in fp32.

    Args:
        model: with eager attention; a body, a head or an adapter over one.
        batch: what its forward takes.

    Returns:
        By kind: "attentions", or "encoder_attentions", "decoder_attentions" and "cross_attentions".

    Raises:
        UserError: an attention that gives none, as a block of a researcher's own may.
    """
    body = plain(model).base_model
    with torch.no_grad():  # a soft prompt is put before the text by what is around the model
        outputs = (model if virtual_tokens(model) else body)(**batch, output_attentions=True, use_cache=False)
    both = body.config.is_encoder_decoder
    kinds = ("encoder_attentions", "decoder_attentions", "cross_attentions") if both else ("attentions",)
    found = {kind: tuple(getattr(outputs, kind) or ()) for kind in kinds}
    if any(not layers or any(weights is None for weights in layers) for layers in found.values()):
        name = getattr(body.config, "attention", type(body).__name__)
        raise UserError(f"attention={name!r} gives no weights: its `forward` must return (output, weights)")
    return {kind: tuple(weights.float() for weights in layers) for kind, layers in found.items()}


def maps_of(model: Any, tokenizer: Any, prompt: str, answer: str | None = None) -> list[Maps]:
    """The maps of one text.

    Args:
        answer: of an encoder-decoder, what its decoder reads; None: what it writes, at most `WRITTEN` tokens.

    Raises:
        UserError: a text that is empty or too long for a picture, or an answer to a model that reads none.
    """
    config, soft = plain(model).config, virtual_tokens(model)
    require_text(prompt, "--prompt")
    ids = _checked(tokenizer(prompt)["input_ids"], "--prompt", config, soft)
    batch = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    words = _words(ids, tokenizer)
    if not config.is_encoder_decoder:
        if answer is not None:
            raise UserError("--answer: only an encoder-decoder reads one apart; write it behind the prompt")
        layers = _first(attention_weights(model, batch)["attentions"])
        keys = (*(f"‹{place}›" for place in range(1, soft + 1)), *words)
        # Embeddings look at each other, too; keys and values before each layer are looked at alone.
        return [Maps("Attention", layers, keys[-layers[0].shape[1] :], keys)]
    if soft:
        raise UserError("a soft prompt of a model with encoder and decoder is not drawn: name its base")
    written = _answer_ids(model, tokenizer, batch, answer)
    found = attention_weights(model, batch | {"decoder_input_ids": torch.tensor([written])})
    said = _words(written, tokenizer)
    return [
        Maps("Encoder", _first(found["encoder_attentions"]), words, words),
        Maps("Decoder", _first(found["decoder_attentions"]), said, said),
        Maps("Cross-attention", _first(found["cross_attentions"]), said, words),
    ]


def draw_attention(
    subject: Subject, prompt: str, answer: str | None, file: Path, layers: str | None, heads: str | None
) -> dict[str, Any]:
    """Write the picture of a prompt's maps; arguments as the command line gives them.

    Returns:
        What was drawn: `file`, `layers`, `heads`, `maps` with their tokens, and `said`, a sentence for people.

    Raises:
        UserError: see `open_weights`, `maps_of` and `choose`.
    """
    from .picture import draw

    config = subject.config
    chosen = choose(config, layers, heads)
    model, tokenizer = open_weights(subject)
    maps = maps_of(model, tokenizer, prompt, answer)
    draw(maps, chosen, subject.name, file)
    return {
        "file": str(file),
        "layers": list(chosen.layers),
        "heads": list(chosen.heads),
        "maps": [{"title": each.title, "queries": list(each.queries), "keys": list(each.keys)} for each in maps],
        "said": _said(file, chosen),
    }


def _said(file: Path, chosen: Chosen) -> str:
    said = f"Attention of {len(chosen.layers)} layers and {len(chosen.heads)} heads written to {file}"
    return f"{said}; --layers and --heads choose others of {chosen.of}" if chosen.partial else said


def _first(layers: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(weights[0] for weights in layers)


def _checked(ids: list[int], where: str, config: Any, soft: int = 0) -> list[int]:
    if not ids:
        raise UserError(f"{where}: the text is empty, and so are its maps")
    longest = min(MOST_TOKENS, position_limit(config) or MOST_TOKENS) - soft
    if len(ids) > longest:
        behind = f" behind the {soft} of the soft prompt" if soft else ""
        raise UserError(f"{where}: {len(ids)} tokens are too many for a picture: at most {max(longest, 0)}{behind}")
    if max(ids) >= config.vocab_size:
        raise UserError(f"{where}: token {max(ids)} is none of the model's {config.vocab_size}: another's tokenizer?")
    return ids


def _answer_ids(model: Any, tokenizer: Any, batch: dict[str, torch.Tensor], answer: str | None) -> list[int]:
    """What the decoder reads: its start token, and the answer without the token that ends it."""
    config = plain(model).config
    start = config.decoder_start_token_id
    if start is None:
        raise UserError("the config has no decoder_start_token_id, so the decoder has nothing to start from")
    if answer is not None:
        require_text(answer, "--answer")
        ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
        return _checked([start, *ids], "--answer", config)
    if not plain(model).can_generate():
        raise UserError("this model writes nothing, so its decoder needs a text to read: give --answer TEXT")
    output = model.generate(**batch, max_new_tokens=WRITTEN, do_sample=False, num_beams=1)[0].tolist()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return output[:-1] if len(output) > 1 and output[-1] in ends else output


def _words(ids: list[int], tokenizer: Any) -> tuple[str, ...]:
    special = special_ids(tokenizer)
    return tuple(
        str(tokenizer.convert_ids_to_tokens(token)) if token in special else visible(token_text(ids, place, tokenizer))
        for place, token in enumerate(ids)
    )
