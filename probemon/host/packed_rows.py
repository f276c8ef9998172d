"""Finds sequences packed in one row, separated by `position_ids`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from probemon.host.internals import attention_kind, cache_among, is_stateful


def sequence_starts(host: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return where sequences begin, `[B, T]` bool; None if each row is one sequence."""
    positions = inputs.get("position_ids")
    # First the checks that read no tensor.
    if goes_on_in_cache(host, inputs) or is_stateful(host) or not tells_rows_apart(host, inputs):
        return None
    tokens: Tensor = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    if is_flash(host) and len(tokens) != 1:  # it reads one row's positions
        return None
    assert isinstance(positions, Tensor)
    return starts_by_position(positions).expand(tokens.shape[:2])


def tells_rows_apart(host: Any, inputs: Mapping[str, Any]) -> bool:
    """True if the model may separate sequences of a row by position."""
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return False
    unmasked = mask is None or (is_flash(host) and isinstance(mask, Tensor) and bool((mask != 0).all()))
    return unmasked and bool((positions.diff(dim=1) != 1).any())


def starts_by_position(positions: Tensor) -> Tensor:
    """Return where positions `[B, T]` do not increase by one."""
    starts = positions.new_ones(positions.shape, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    return starts


def goes_on_in_cache(host: Any, inputs: Mapping[str, Any]) -> bool:
    """True with a cache: attention then crosses sequences."""
    use_cache = inputs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(host.config, "use_cache", False)
    return cache_among(inputs) is not None or bool(use_cache)


def is_flash(host: Any) -> bool:
    """True for flash attention."""
    return attention_kind(host.config).startswith("flash")
