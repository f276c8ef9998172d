"""Whether one key-value cache begins as another does.

A deep copy of a prompt's cache holds what the run saw being computed.

    if same_columns(cache, other, 12): ...       # their first 12 columns are the same, bit for bit

The deepest layer that keeps every column is compared: its keys and values are made of the whole sequence before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from probemon.host.internals import cache_layers, keeps_every_column, keys_and_values


def same_columns(cache: Any, other: Any, n_columns: int) -> bool:
    """Whether the first `n_columns` of two caches are the same; False where one does not show its keys and values."""
    ours, theirs = _deepest(cache), _deepest(other)
    if ours is None or theirs is None or ours[0] != theirs[0]:
        return False
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        # The newest column first: it is almost always enough to tell two caches apart.
        for begin in (n_columns - 1, 0):
            one, two = a[:, :, begin:n_columns], b[:, :, begin:n_columns]
            if (
                one.shape[2] != n_columns - begin
                or one.dtype != two.dtype
                or one.device != two.device
                or not torch.equal(one, two)
            ):
                return False
    return True


def _deepest(cache: Any) -> tuple[int, Tensor, Tensor] | None:
    """Number, keys and values `[B, H, columns, D]` of the last layer that keeps all columns."""
    for number, layer in reversed(list(enumerate(cache_layers(cache)))):
        kept = keys_and_values(layer)
        if kept is not None and keeps_every_column(layer):
            return number, *kept
    return None
