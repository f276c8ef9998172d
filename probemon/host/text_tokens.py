"""Tokens of texts: special tokens, and tokens of given characters.

before, after = special_tokens(tokenizer, "Whales sing.")
ids = ids_of(tokenizer, prompt)                 # a text's own BOS is not doubled
counted(tokenizer, text, ids, [(12, 30)])       # [T] bool
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.errors import ConfigError
from probemon.util.harmless_text import is_unicode


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """Return a text's tokens; special tokens are not doubled. Raises `ConfigError` for invalid Unicode."""
    if not is_unicode(text):
        raise ConfigError("the text is not valid Unicode (a lone surrogate), which no tokenizer reads: give UTF-8")
    ids = [int(i) for i in tokenizer(text)["input_ids"]]
    try:
        before, _ = special_tokens(tokenizer, text)
    except ConfigError:  # unknown, so nothing is left out
        return ids
    n = len(before)
    return ids[n:] if n and begins_with(ids[n:], before) else ids


def begins_with(ids: Sequence[int] | Ints, before: Sequence[int]) -> bool:
    """True if a text's tokens begin with the special tokens `before`."""
    return [int(i) for i in ids[: len(before)]] == list(before)


def special_tokens(tokenizer: Any, text: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the special tokens before and after a text. Raises `ConfigError`."""
    # Several samples, since tokenizers may drop unknown letters.
    for sample in ("a", "A", "0", ".", text):
        bare, whole = (
            [
                int(i)
                for i in tokenizer(sample, add_special_tokens=add, return_attention_mask=False, verbose=False)[
                    "input_ids"
                ]
            ]
            for add in (False, True)
        )
        at = [i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare]
        if bare and len(at) == 1:
            return tuple(whole[: at[0]]), tuple(whole[at[0] + len(bare) :])
        if not whole:
            return (), ()
    raise ConfigError("which special tokens its tokenizer adds is unknown: use special_tokens='none'")


def counted(tokenizer: Any, text: str, ids: Sequence[int], ranges: Sequence[tuple[int, int]]) -> Mask:
    """Return which tokens `[T]` of a text without special tokens have a character in a range.

    Raises `ConfigError` if a slow tokenizer has a token across an edge.
    """
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        start, end = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
        return in_ranges(start, end, ranges)
    mask, ids = np.zeros(len(ids), dtype=bool), list(ids)
    for begin, stop in ranges:
        edges = []
        for border in (begin, stop):
            head = list(tokenizer(text[:border], add_special_tokens=False)["input_ids"]) if border else []
            if ids[: len(head)] != head:
                raise ConfigError(
                    f"{type(tokenizer).__name__} does not say where its tokens are in a text, and has one across"
                    f" character {border}: take a fast tokenizer (use_fast=True)"
                )
            edges.append(len(head))
        mask[edges[0] : edges[1]] = True
    return mask


def in_ranges(start: Ints, end: Ints, ranges: Sequence[tuple[int, int]]) -> Mask:
    """Return which tokens have a character in a range."""
    # spaces often have an end only
    before = np.concatenate([[0], np.maximum.accumulate(end)])[:-1]
    start = np.where(start < end, start, np.minimum(start, before))
    mask = np.zeros(len(start), dtype=bool)
    for first, last in ranges:
        mask |= (start < last) & (end > first)
    return mask
