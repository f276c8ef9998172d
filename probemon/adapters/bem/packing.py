"""Packing: several sequences in one row, each with its own codes.

    packing = packing_of(model, inputs)               # None if each row is one sequence
    packing.split(z)                                  # [B, T, w] -> [S, L, w]
    packing.join(codes)                               # [S, L, r] -> [B, T, r]

A sequence begins where `position_ids` restart at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probemon.errors import UnsupportedDecoding
from probemon.host.internals import is_stateful
from probemon.host.packed_rows import goes_on_in_cache, is_flash, starts_by_position, tells_rows_apart

_REMEDY = "give each sequence its own row, with a 2D attention mask"


@dataclass(frozen=True, eq=False)
class Packing:
    """S sequences in the columns of B rows, the longest of L tokens.

    `starts [B, T]` bool: columns that begin a sequence.
    `real [S, L]` bool: places that are tokens.
    `taken [S, L]` int64: column (of B * T) at each place; any beyond a sequence's end.
    `places [B * T]` int64: place (of S * L) of each column.
    """

    starts: Tensor
    real: Tensor
    taken: Tensor
    places: Tensor

    @classmethod
    def of(cls, starts: Tensor) -> Packing:
        """Make it from `starts [B, T]`, True in column 0."""
        flat = starts.flatten()
        begins = flat.nonzero()[:, 0]
        lengths = torch.diff(begins, append=begins.new_tensor([len(flat)]))
        offsets = torch.arange(int(lengths.max()), device=flat.device)
        taken = (begins[:, None] + offsets).clamp(max=len(flat) - 1)
        number = flat.cumsum(0) - 1
        places = number * len(offsets) + torch.arange(len(flat), device=flat.device) - begins[number]
        return cls(starts, offsets < lengths[:, None], taken, places)

    def to(self, device: torch.device) -> Packing:
        """Return it on a device."""
        return Packing(*(x.to(device) for x in (self.starts, self.real, self.taken, self.places)))

    def split(self, x: Tensor) -> Tensor:
        """Return `[S, L, ..]` of `[B, T, ..]`, padded with any values."""
        return x.flatten(0, 1)[self.taken]

    def join(self, x: Tensor) -> Tensor:
        """Return `[B, T, ..]` of `[S, L, ..]`."""
        return x.flatten(0, 1)[self.places].unflatten(0, self.starts.shape)


def packing_of(host: Any, inputs: Mapping[str, Any]) -> Packing | None:
    """Return how inputs are packed; None if each row is one sequence. Raises `UnsupportedDecoding` if the model would
    mix sequences, or starts are unknown.
    """
    positions, ends = inputs.get("position_ids"), inputs.get("cu_seq_lens_q")
    tokens: Tensor = inputs["inputs_embeds"] if inputs.get("input_ids") is None else inputs["input_ids"]
    if not tells_rows_apart(host, inputs):
        if ends is None:
            return None
        raise UnsupportedDecoding(
            "several sequences packed in one row (cu_seq_lens_q) are separated by position_ids that begin again at 0"
            f" with each: give these too, without an attention mask, or {_REMEDY}"
        )
    assert isinstance(positions, Tensor)
    starts = _checked_starts(positions).expand(tokens.shape[:2])
    if ends is not None and torch.as_tensor(ends).flatten().tolist() != _ends_of(starts):
        raise UnsupportedDecoding(
            "several sequences packed in one row begin elsewhere by position_ids than by cu_seq_lens_q: give the same"
            " of both"
        )
    _check_host(host, inputs, tokens)
    return Packing.of(starts)


def _checked_starts(positions: Tensor) -> Tensor:
    starts = starts_by_position(positions)
    if bool((positions[starts] != 0).any()):
        raise UnsupportedDecoding(
            "position_ids that do not rise by one, without an attention mask, are several sequences packed in one row,"
            f" and here one of them does not begin at 0, so that where it begins is a guess: {_REMEDY}"
        )
    return starts


def _ends_of(starts: Tensor) -> list[int]:
    return [*starts.flatten().nonzero()[:, 0].tolist(), starts.numel()]


def _check_host(model: Any, inputs: Mapping[str, Any], tokens: Tensor) -> None:
    packed = "position_ids that do not rise by one, without an attention mask, are several sequences packed in one row"
    if goes_on_in_cache(model, inputs):
        raise UnsupportedDecoding(
            f"{packed}, and with a cache the model's attention goes from one to the next: give use_cache=False and no "
            f"cache, or {_REMEDY}"
        )
    if is_stateful(model):
        raise UnsupportedDecoding(f"{packed}, and the state of a recurrent model goes from one to the next: {_REMEDY}")
    if is_flash(model) and len(tokens) != 1:
        raise UnsupportedDecoding(f"{packed}, and flash attention separates only those of one row: {_REMEDY}")
