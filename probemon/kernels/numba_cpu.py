"""numba on a CPU: each weight row is read where it lies, widened once, and used for every state that needs it.

One routine computes every dot product, so a pair's summation order is fixed by the length alone.
Compiled code is cached on disk; the first call on a machine takes a few seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

Array = npt.NDArray[Any]


@njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz"})
def _dot(a: Array, b: Array) -> np.float32:
    total = np.float32(0.0)
    for i in range(a.shape[0]):
        total += a[i] * b[i]
    return total


@njit(cache=True, nogil=True)
def _widen(bits: Array, shift: np.uint32, out: Array) -> None:
    # bf16 is the upper half of an fp32: shift 16. fp32 comes as its own bits: shift 0.
    for i in range(bits.shape[0]):
        out[i] = np.uint32(bits[i]) << shift


@njit(cache=True, nogil=True)
def _sigmoid(logit: np.float32) -> np.float32:
    # One element at a time, through fp64: no vector body whose tail would differ.
    return np.float32(1.0 / (1.0 + math.exp(-np.float64(logit))))


@njit(cache=True, nogil=True)
def _scores(
    x: Array, w1: Array, b1: Array, w2: Array, b2: Array, w3: Array, b3: Array, shift: np.uint32, n_layers: int,
    rows: Array, group_ptr: Array, group_slot: Array, out: Array,
) -> None:  # fmt: skip
    h1, d = w1.shape[1], w1.shape[2]
    h2 = w2.shape[1]
    widest = 0
    for g in range(group_slot.shape[0]):
        widest = max(widest, group_ptr[g + 1] - group_ptr[g])
    bits = np.empty(max(d, max(h1, h2)), dtype=np.uint32)
    wide = bits.view(np.float32)
    first = np.empty((widest, h1), dtype=np.float32)
    second = np.empty((widest, h2), dtype=np.float32)
    for g in range(group_slot.shape[0]):
        slot, begin = group_slot[g], group_ptr[g]
        n = group_ptr[g + 1] - begin
        for j in range(h1):
            _widen(w1[slot, j], shift, bits[:d])
            for i in range(n):
                first[i, j] = _dot(wide[:d], x[rows[begin + i]]) + b1[slot, j]
        if n_layers == 1:
            for i in range(n):
                out[begin + i] = _sigmoid(first[i, 0])
            continue
        for i in range(n):
            for j in range(h1):
                first[i, j] = max(first[i, j], np.float32(0.0)) if first[i, j] == first[i, j] else first[i, j]
        if n_layers == 3:
            for j in range(h2):
                _widen(w2[slot, j], shift, bits[:h1])
                for i in range(n):
                    z = _dot(wide[:h1], first[i]) + b2[slot, j]
                    second[i, j] = z if z > 0 or z != z else np.float32(0.0)
            _widen(w3[slot], shift, bits[:h2])
            for i in range(n):
                out[begin + i] = _sigmoid(_dot(wide[:h2], second[i]) + b3[slot])
        else:
            _widen(w3[slot], shift, bits[:h1])
            for i in range(n):
                out[begin + i] = _sigmoid(_dot(wide[:h1], first[i]) + b3[slot])


def score_numba(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M]."""
    n_layers = 1 + ("w2" in weights) + ("w3" in weights)
    bf16 = weights["w1"].dtype == torch.bfloat16
    bits = {name: _bits(weights[name]) for name in ("w1", "w2", "w3") if name in weights}
    empty = bits["w1"]
    slot, row = slots.numpy(), rows.numpy()
    order = None
    if len(slot) and not (slot[1:] > slot[:-1]).all():  # one state's probes come in order: nothing to sort or to group
        order = np.argsort(slot, kind="stable")
        slot, row = slot[order], row[order]
        starts = np.flatnonzero(np.concatenate([[True], slot[1:] != slot[:-1]]))
        group_ptr, group_slot = np.append(starts, len(slot)), slot[starts]
    else:
        group_ptr, group_slot = np.arange(len(slot) + 1), slot
    out = np.empty(len(slot), dtype=np.float32)
    _scores(
        hidden.to(torch.float32).contiguous().numpy(),
        bits["w1"], weights["b1"].numpy(),
        bits.get("w2", empty[:0]), weights["b2"].numpy() if "b2" in weights else _NO_BIAS2,
        bits.get("w3", empty[:0, 0]), weights["b3"].numpy() if "b3" in weights else _NO_BIAS3,
        np.uint32(16 if bf16 else 0), n_layers,
        row, group_ptr, group_slot, out,
    )  # fmt: skip
    if order is None:
        return torch.from_numpy(out)
    scores = np.empty_like(out)
    scores[order] = out
    return torch.from_numpy(scores)


def _bits(tensor: Tensor) -> Array:
    return tensor.view(torch.uint16 if tensor.dtype == torch.bfloat16 else torch.uint32).numpy()


_NO_BIAS2 = np.zeros((0, 0), dtype=np.float32)
_NO_BIAS3 = np.zeros(0, dtype=np.float32)
