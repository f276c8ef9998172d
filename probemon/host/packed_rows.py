"""Where sequences begin that are packed in one row, and told apart by the host because of their `position_ids`.

starts = sequence_starts(decoder, given)     # [B, T] bool; None where each row is one sequence. given: its arguments
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from probemon.host.internals import attention_kind, is_stateful


def sequence_starts(host: Any, inputs: Mapping[str, Any]) -> Tensor | None:
    """Return at which columns of a forward `[B, T]` a sequence begins; None where the host reads each row as one."""
    positions = inputs.get("position_ids")
    # First what needs no look at a tensor: every forward asks.
    if goes_on_in_cache(host, inputs) or is_stateful(host) or not tells_rows_apart(host, inputs):
        return None
    tokens: Tensor = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    if is_flash(host) and len(tokens) != 1:  # it looks at the positions of one row alone
        return None
    assert isinstance(positions, Tensor)
    return starts_by_position(positions).expand(tokens.shape[:2])


def tells_rows_apart(host: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether the host may tell sequences of one row apart by their positions: without a mask, or where flash attention
    drops one that hides nothing.
    """
    positions, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return False
    unmasked = mask is None or (is_flash(host) and isinstance(mask, Tensor) and bool((mask != 0).all()))
    return unmasked and bool((positions.diff(dim=1) != 1).any())


def starts_by_position(positions: Tensor) -> Tensor:
    """Return where positions `[B, T]` do not go on by one, bool; the first column is a start."""
    starts = positions.new_ones(positions.shape, dtype=torch.bool)
    starts[:, 1:] = positions.diff(dim=1) != 1
    return starts


def goes_on_in_cache(host: Any, inputs: Mapping[str, Any]) -> bool:
    """Whether a forward has a cache, with which the host's attention goes from one sequence to the next."""
    use_cache = inputs.get("use_cache")
    if use_cache is None:
        use_cache = getattr(host.config, "use_cache", False)
    return inputs.get("past_key_values") is not None or bool(use_cache)


def is_flash(host: Any) -> bool:
    """Whether the host's attention is flash attention."""
    return attention_kind(host.config).startswith("flash")
