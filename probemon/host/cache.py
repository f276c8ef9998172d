"""Columns of a key-value cache.

n_cached(cache, given)             # before a forward with these arguments
counted_columns(cache)
check_layers(cache, model)
filled_cache(output, given)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import Cache, StaticCache
from transformers.cache_utils import DynamicLayer

from probemon.errors import AlignmentError, UnsupportedDecoding
from probemon.host.internals import cache_among, cache_layers, counts_columns, decoder_cache
from probemon.host.model import text_config


def n_cached(cache: Any, given: Mapping[str, Any]) -> int:
    """Return the number of columns before this forward. Older transformers passes it as `cache_position`."""
    positions = given.get("cache_position")
    if positions is None:
        return int(cache.get_seq_length())
    start = int(positions[0])
    # An encoder-decoder's cache contains the decoder's.
    if not isinstance(decoder_cache(cache), StaticCache) and start != int(cache.get_seq_length()):
        raise UnsupportedDecoding(
            f"a cache_position of {start} after {int(cache.get_seq_length())} cached tokens is not supported: the"
            " model's masks are off, so its own answer is wrong too (transformers 5.0 does this after a prefill in"
            " chunks). Leave prefill_chunk_size out, or upgrade transformers"
        )
    return start


def counted_columns(cache: Any) -> int:
    """Columns in a cache; 0 if it does not count them (recurrent layers only)."""
    return int(cache.get_seq_length()) if counts_columns(cache) else 0


def filled_cache(output: Any, given: Any) -> Any:
    """Return the cache in a decoder's output, else `given`: some models do not return it."""
    returned = cache_among(output) if isinstance(output, Mapping) else None
    parts = output if isinstance(output, tuple) else ()
    return next((part for part in parts if isinstance(part, Cache)), given) if returned is None else returned


def check_layers(cache: Any, model: Any) -> None:
    """Raise `AlignmentError` if the first layers have more columns: a forward was interrupted between layers.

    Other orders of lengths are normal, and cross-attention layers do not count.
    """
    cross_layers = getattr(text_config(model), "cross_attention_layers", None) or ()
    layers = [layer for i, layer in enumerate(cache_layers(decoder_cache(cache))) if i not in cross_layers]
    lengths = [length for layer in layers if (length := _columns_of(layer)) is not None]
    n_written = next((i for i, length in enumerate(lengths) if length < lengths[0]), 0)
    if n_written and len(set(lengths[n_written:])) == 1 and set(lengths[:n_written]) == {lengths[0]}:
        raise AlignmentError(
            f"{n_written} of the cache's {len(lengths)} layers have {lengths[0]} columns and the others {lengths[-1]},"
            " since a forward was broken off by an error or an interrupt: start with a fresh cache"
        )


def _columns_of(layer: Any) -> int | None:
    """Return a cache layer's columns; None if it does not count them."""
    if not isinstance(layer, DynamicLayer) and not hasattr(layer, "cumulative_length"):
        return None  # static layers of older transformers count nonzero keys
    return int(layer.get_seq_length())
