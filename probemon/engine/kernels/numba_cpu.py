"""numba on a CPU: scores probes in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from probemon.core.inputs import check_lists, check_range
from probemon.core.softmax_groups import Floats, Ints
from probemon.engine.kernels.numba_compiled import Array, Net, ranges, score_pairs, softmax_segments
from probemon.engine.kernels.numba_products import products_of

# By first layer: the other tensors, addresses, views.
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _kept_views(weights: Mapping[str, Tensor]) -> tuple[Any, ...]:
    """`views_of` the weights as a plain tuple, cached by tensors and addresses."""
    first = weights["w1"]
    others = [tensor for tensor in weights.values() if tensor is not first]
    places = [(name, tensor.data_ptr(), tensor.shape, tensor.stride()) for name, tensor in weights.items()]
    entry = _kept.get(first)
    if entry is not None and places == entry[1] and all(a is b for a, b in zip(others, entry[0], strict=True)):
        return entry[2]  # type: ignore[no-any-return]
    views = tuple(views_of(weights))
    if all(tensor.is_contiguous() for tensor in weights.values()):  # else views of a copy, which misses changes
        _kept[first] = others, places, views
    return views


def views_of(weights: Mapping[str, Tensor]) -> Net:
    """View stacked weights, which must stay alive, for compiled code."""
    _, h1, d = weights["w1"].shape
    h2 = weights["w2"].shape[1] if "w2" in weights else 0
    nothing, no_bias = np.empty(0, np.uint8), np.empty(0, np.float32)
    layers: dict[str, Any] = {}
    for i in (1, 2, 3):
        layers[f"w{i}"] = _bytes(weights[f"w{i}"]) if f"w{i}" in weights else nothing
        for field, name in ((f"s{i}", f"w{i}_scale"), (f"b{i}", f"b{i}")):
            layers[field] = _bits(weights[name]) if name in weights else no_bias
    kind = _bits(weights["w1"][:0]).dtype.type
    products = products_of(kind, _read_with(kind)), products_of(kind, np.float32) if "w3" in weights else 0
    n_layers = 1 + ("w2" in weights) + ("w3" in weights)
    return Net(**layers, products=products, width=kind().itemsize, d=d, h1=h1, h2=h2, n_layers=n_layers)


def _read_with(kind: Any) -> Any:
    return np.uint16 if kind is np.uint16 else np.float32


def score_numba(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M]."""
    return _by_slot(hidden, weights, rows, slots, as_logits=False)


def logits_numba(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return logits [M] fp32; arguments as `score_numba`."""
    return _by_slot(hidden, weights, rows, slots, as_logits=True)


def softmax_numba(logits: Floats, starts: Ints) -> Floats:
    """Return the softmax [M] fp32 of logits [M] over segments from `starts`."""
    scores = np.empty_like(logits)
    softmax_segments(logits, np.append(starts, len(logits)), scores)
    return scores


def _by_slot(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor, *, as_logits: bool) -> Tensor:
    check_lists(hidden, weights, rows, slots)
    row, slot, net = rows.numpy(), slots.numpy(), _kept_views(weights)
    least_row, most_row, least_slot, most_slot, rises = ranges(row, slot)
    if len(slot):
        check_range("rows", least_row, most_row, len(hidden))
        check_range("slots", least_slot, most_slot, len(weights["w1"]))
    x = _bytes(hidden.to(torch.bfloat16 if weights["w1"].dtype == torch.bfloat16 else torch.float32))
    out = np.empty(len(slot), dtype=np.float32)
    if rises:
        score_pairs(net, x, row, slot, as_logits, out)
        return torch.from_numpy(out)
    order = np.argsort(slot, kind="stable")
    score_pairs(net, x, row[order], slot[order], as_logits, out)
    scores = np.empty_like(out)
    scores[order] = out
    return torch.from_numpy(scores)


def _bits(tensor: Tensor) -> Array:
    """View a tensor as flat numbers; bf16 as its bits."""
    if tensor.dtype != torch.bfloat16:
        return np.ascontiguousarray(tensor.detach().numpy()).reshape(-1)
    return np.ascontiguousarray(tensor.detach().contiguous().view(torch.int16).numpy()).reshape(-1).view(np.uint16)


def _bytes(tensor: Tensor) -> Array:
    return _bits(tensor).view(np.uint8)
