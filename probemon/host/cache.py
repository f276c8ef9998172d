"""How many columns a cache holds.

n_cached(cache, given)             # before a forward; given: its arguments, by name
counted_columns(cache)             # 0 for a cache that does not count them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import StaticCache

from probemon.errors import NotSupportedDecoding
from probemon.host.internals import decoder_cache


def n_cached(cache: Any, given: Mapping[str, Any]) -> int:
    """Return how many columns come before this forward, as older transformers says itself by `cache_position`.

    Its static cache miscounts keys that are zero.
    """
    positions = given.get("cache_position")
    if positions is None:
        return int(cache.get_seq_length())
    start = int(positions[0])
    # Of an encoder-decoder, the decoder's own cache is inside.
    if not isinstance(decoder_cache(cache), StaticCache) and start != int(cache.get_seq_length()):
        raise NotSupportedDecoding(
            f"a cache_position of {start} after {int(cache.get_seq_length())} cached tokens is not supported: the"
            " host's masks are off, so its own answer is wrong too (transformers 5.0 does this after a prefill in"
            " chunks). Leave prefill_chunk_size out, or upgrade transformers"
        )
    return start


def counted_columns(cache: Any) -> int:
    """Columns in a cache; 0 for one that does not count them (of recurrent layers alone)."""
    try:
        return 0 if cache is None else int(cache.get_seq_length())
    except ValueError:
        return 0
