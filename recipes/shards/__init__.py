"""Token shards: text that was tokenised once, read from disk in pretraining.

`format` is the layout of a folder, `writer` and `reader` its two sides, `encode` and `build` make it out of texts on
all cores. `selection` chooses documents to train on and to hold out, `packing` and `rows` make rows of them, and
`splits` is what a recipe's `data.source` opens.
"""

from .build import Summary, write_shards
from .format import Index, Shard, fingerprint, is_token_folder
from .reader import TokenShards

__all__ = ["Index", "Shard", "Summary", "TokenShards", "fingerprint", "is_token_folder", "write_shards"]
