"""torch on a CPU: neighbouring slots are a slice, never a gather. Sums run along a contiguous axis, so their order
depends only on its length.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from probemon.core.inputs import check_pairs
from probemon.core.reference import sigmoid

_BLOCK_VALUES = 1 << 17  # fp32 values widened at once: 512 KiB, in L2 cache


def score_cpu(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M]."""
    return sigmoid(logits_cpu(hidden, weights, rows, slots))


def logits_cpu(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return logits [M] fp32; arguments as `score_cpu`."""
    check_pairs(hidden, weights, rows, slots)
    n_slots, h1, d = weights["w1"].shape
    order = torch.argsort(rows.to(torch.int64) * n_slots + slots)
    row, slot = rows[order], slots[order]
    breaks = ((row[1:] != row[:-1]) | (slot[1:] != slot[:-1] + 1)).nonzero()[:, 0] + 1
    bounds = [0, *breaks.tolist(), len(slot)]
    x = hidden.to(torch.float32)
    logits = torch.empty(len(slot), dtype=torch.float32, device="cpu")
    per_block = max(1, _BLOCK_VALUES // (h1 * d))
    row_list, slot_list = row.tolist(), slot.tolist()
    for begin, end in itertools.pairwise(bounds):
        for at in range(begin, end, per_block):
            stop = min(at + per_block, end)
            logits[at:stop] = _slice_logits(x[row_list[at]], weights, slot_list[at], slot_list[at] + stop - at)
    in_place = torch.empty_like(logits)
    in_place[order] = logits
    return in_place


def _slice_logits(x: Tensor, weights: Mapping[str, Tensor], a: int, b: int) -> Tensor:
    def layer(i: int, x: Tensor) -> Tensor:
        sums = (weights[f"w{i}"][a:b] * x).sum(dim=-1)  # bf16 or int8 * fp32 is fp32
        scale = weights.get(f"w{i}_scale")
        return (sums if scale is None else sums * scale[a:b]) + weights[f"b{i}"][a:b]

    h = layer(1, x)
    if "w2" in weights:
        h = layer(2, h.relu_()[:, None, :])
    return layer(3, h.relu_()) if "w3" in weights else h[:, 0]
