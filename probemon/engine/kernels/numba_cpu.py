"""numba on a CPU scores probes where their weights lie.

scores = score_numba(hidden, weights, rows, slots)            # [M] of M pairs
logits = logits_numba(hidden, weights, rows, slots)           # of members of softmax groups
scores = softmax_numba(logits, starts)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.inputs import check_pairs
from probemon.core.softmax_groups import Floats, Ints
from probemon.engine.kernels.numba_compiled import Array, score_pairs, softmax_segments


def views_of(weights: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """View stacked weights as compiled code reads them: int8, or bits of bf16 or fp32. The tensors must stay alive."""
    _, h1, d = weights["w1"].shape
    h2 = weights["w2"].shape[1] if "w2" in weights else 0
    no_weights, no_bias = weights["w1"][:0], weights["b1"][:0]
    layers: list[Any] = []
    for i in (1, 2, 3):
        layers.append(_bits(weights.get(f"w{i}", no_weights)))
        layers += [_flat(weights.get(name, no_bias)) for name in (f"w{i}_scale", f"b{i}")]
    return (*layers, d, h1, h2, 1 + ("w2" in weights) + ("w3" in weights))


def score_numba(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M]."""
    return _by_slot(hidden, weights, rows, slots, as_logits=False)


def logits_numba(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return logits [M] fp32 of the same."""
    return _by_slot(hidden, weights, rows, slots, as_logits=True)


def softmax_numba(logits: Floats, starts: Ints) -> Floats:
    """Return the softmax [M] fp32 of logits [M] over segments, which begin at `starts`."""
    scores = np.empty_like(logits)
    softmax_segments(logits, np.append(starts, len(logits)), scores)
    return scores


def _by_slot(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor, *, as_logits: bool) -> Tensor:
    check_pairs(hidden, weights, rows, slots)
    net, x, row, slot = views_of(weights), _flat(hidden.to(torch.float32)), rows.numpy(), slots.numpy()
    out = np.empty(len(slot), dtype=np.float32)
    if len(slot) < 2 or (slot[1:] >= slot[:-1]).all():  # nothing to sort
        score_pairs(net, x, row, slot, as_logits, out)
        return torch.from_numpy(out)
    order = np.argsort(slot, kind="stable")
    score_pairs(net, x, row[order], slot[order], as_logits, out)
    scores = np.empty_like(out)
    scores[order] = out
    return torch.from_numpy(scores)


def _bits(tensor: Tensor) -> Array:
    if tensor.dtype != torch.int8:
        tensor = tensor.contiguous().view(torch.uint16 if tensor.dtype == torch.bfloat16 else torch.uint32)
    return _flat(tensor)


def _flat(tensor: Tensor) -> Array:
    return tensor.contiguous().view(-1).numpy()
