"""The pieces of a unigram tokenizer, the same in every run.

The library's own trainer starts from the order of a hash table with random keys, so that each process gets other scores
and sometimes other pieces. Here every tie is broken by the piece itself.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

# Share of the pieces that stay when some are dropped, and rounds of counting before each time (Kudo 2018, section 3.2).
_STAY = 0.75
_ROUNDS = 2
LONGEST = 16  # characters of a piece


def unigram_pieces(
    words: Counter[str], seeds: Iterable[str], alphabet: Sequence[str], size: int
) -> list[tuple[str, float]]:
    """A unigram language model of words (Kudo 2018, arXiv:1804.10959, section 3.2) with at most `size` pieces.

    From many pieces to few: words are split the likeliest way, scores are the logarithms of the pieces' shares, and
    those pieces go whose loss would lower the likelihood of the words least. Counts are those of the best split
    (Viterbi training), which are whole numbers and the same on every machine.

    Args:
        words: word -> how often, in the characters of the alphabet.
        seeds: pieces to begin with; the paper names merges of BPE as one source.
        alphabet: characters that always stay.

    Returns:
        (piece, score), the likeliest first; characters that never occur stand below all others.
    """
    texts = sorted(words)
    weights = [words[text] for text in texts]
    kept = set(alphabet)
    pieces = sorted(kept | {seed for seed in seeds if 0 < len(seed) <= LONGEST})
    counts = _occurrences(texts, weights, set(pieces))
    while True:
        for _ in range(_ROUNDS):
            scores = _scores(pieces, counts)
            counts = _viterbi(scores, texts, weights)
            pieces = [piece for piece in pieces if counts[piece] or piece in kept]
        scores = _scores(pieces, counts)
        if len(pieces) <= size:
            return sorted(scores.items(), key=lambda item: (-item[1], item[0]))
        target = max(size, int(len(pieces) * _STAY))
        losses = {piece: _loss(piece, scores, counts[piece]) for piece in pieces if piece not in kept}
        best = sorted(losses, key=lambda piece: (-losses[piece], piece))[: target - len(kept)]
        pieces = sorted(kept.union(best))


def _occurrences(texts: list[str], weights: list[int], pieces: set[str]) -> Counter[str]:
    """How often each piece stands somewhere in the words."""
    counts: Counter[str] = Counter()
    for text, weight in zip(texts, weights, strict=True):
        for start in range(len(text)):
            for end in range(start + 1, min(start + LONGEST, len(text)) + 1):
                if (piece := text[start:end]) in pieces:
                    counts[piece] += weight
    return counts


def _scores(pieces: list[str], counts: Counter[str]) -> dict[str, float]:
    total = math.log(sum(counts[piece] for piece in pieces) or 1)
    # What never occurs is rarer than anything that does.
    return {piece: math.log(counts[piece] or 0.5) - total for piece in pieces}


def _viterbi(scores: dict[str, float], texts: list[str], weights: list[int]) -> Counter[str]:
    """How often each piece stands in the likeliest splits of the words."""
    from tokenizers import Tokenizer, models

    vocabulary = list(scores.items())
    splitter: Any = Tokenizer(models.Unigram(vocabulary))
    counts = [0] * len(vocabulary)
    for start in range(0, len(texts), 1 << 14):
        batch = splitter.encode_batch_fast(texts[start : start + (1 << 14)])
        for encoding, weight in zip(batch, weights[start:], strict=False):
            for token in encoding.ids:
                counts[token] += weight
    return Counter({piece: count for (piece, _), count in zip(vocabulary, counts, strict=True) if count})


def _loss(piece: str, scores: dict[str, float], count: int) -> float:
    """How much likelihood the words lose without a piece: it is written with others."""
    best = [0.0] + [-math.inf] * len(piece)
    for end in range(1, len(piece) + 1):
        for start in range(end):
            if end - start < len(piece) and (score := scores.get(piece[start:end])) is not None:
                best[end] = max(best[end], best[start] + score)
    return count * (scores[piece] - best[-1])
