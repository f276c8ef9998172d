"""How many columns a cache holds.

n_cached(cache, given)             # before a forward; given: its arguments, by name
counted_columns(cache)             # 0 for a cache that does not count them
check_layers(cache, model)         # AlignmentError if a forward on it was broken off
given_cache(given)                 # the cache among a forward's arguments, by name
filled_cache(output, given)        # the one that the forward filled
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Cache, StaticCache
from transformers.cache_utils import DynamicLayer

from probemon.errors import AlignmentError, NotSupportedDecoding
from probemon.host.internals import cache_layers, decoder_cache
from probemon.host.model import text_config


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


def given_cache(given: Mapping[str, Any]) -> Any:
    """Return the cache that a forward is given, under the names of attention and of recurrent layers; None without."""
    cache = given.get("past_key_values")
    return given.get("cache_params") if cache is None else cache


def filled_cache(output: Any, given: Any) -> Any:
    """Return the cache in what a decoder returned, by its name in a mapping or among a tuple; else the one that it was
    given, which some models fill and do not return.
    """
    found = given_cache(output) if isinstance(output, Mapping) else None
    parts = output if isinstance(output, tuple) else ()
    return next((part for part in parts if isinstance(part, Cache)), given) if found is None else found


def check_layers(cache: Any, model: Any) -> None:
    """Raise `AlignmentError` for a cache whose first layers have more columns than the others: an error or an interrupt
    ended a forward between them.

    Layers of other lengths in another order are a model's own, and so are those of cross attention.
    """
    of_pictures = getattr(text_config(model), "cross_attention_layers", None) or ()
    layers = [layer for i, layer in enumerate(cache_layers(decoder_cache(cache))) if i not in of_pictures]
    lengths = [length for layer in layers if (length := _columns_of(layer)) is not None]
    n_written = next((i for i, length in enumerate(lengths) if length < lengths[0]), 0)
    if n_written and len(set(lengths[n_written:])) == 1 and set(lengths[:n_written]) == {lengths[0]}:
        raise AlignmentError(
            f"{n_written} of the cache's {len(lengths)} layers have {lengths[0]} columns and the others {lengths[-1]},"
            " since a forward was broken off by an error or an interrupt: start with a fresh cache"
        )


def _columns_of(layer: Any) -> int | None:
    """Return how many columns a layer of a cache holds; None for one that does not count them by itself."""
    if not isinstance(layer, DynamicLayer) and not hasattr(layer, "cumulative_length"):
        return None  # static ones of older transformers count keys that are not zero
    return int(layer.get_seq_length())
