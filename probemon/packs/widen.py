"""Widens probes to a larger shape, with the same scores.

    both = smallest_common([a.architecture, b.architecture])
    weights = widen(a.weights, both)

Exact: relu(z) - relu(-z) = z carries a logit, relu(h) = h a non-negative value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from probemon.core.probes import Architecture
from probemon.errors import PackError


def smallest_common(architectures: Sequence[Architecture]) -> Architecture:
    """Return the smallest architecture that fits all. Raises `PackError` for different hidden sizes."""
    sizes = sorted({architecture.hidden_size for architecture in architectures})
    if len(sizes) != 1:
        raise PackError(
            f"probes that read states of {' and '.join(map(str, sizes))} values do not fit into one pack: they are for"
            " different models"
        )
    depth = max(len(architecture.hidden) for architecture in architectures)
    widths = [max(_width(architecture, i) for architecture in architectures) for i in range(depth)]
    return Architecture(sizes[0], tuple(widths))


def _width(architecture: Architecture, i: int) -> int:
    """Return the units needed in hidden layer `i`; two carry a logit."""
    return architecture.hidden[min(i, len(architecture.hidden) - 1)] if architecture.hidden else 2


class _Layer(NamedTuple):
    """matrix `[n, out, in]`, bias and int8 scale `[n, out]`"""

    matrix: Tensor
    bias: Tensor
    scale: Tensor | None


def widen(weights: Mapping[str, Tensor], to: Architecture) -> dict[str, Tensor]:
    """Return weights `[P, ...]` in the shape `to`. Raises `PackError` if it is too small."""
    architecture = Architecture.of(weights, "weights")
    if smallest_common([architecture, to]) != to:
        raise PackError(
            f"probes {architecture} over {architecture.hidden_size} values do not fit into {to} over {to.hidden_size}"
        )
    if architecture == to:
        return dict(weights)
    layers = [_Layer(weights["w1"], weights["b1"], weights.get("w1_scale"))]
    if len(architecture.hidden) == 2:
        layers.append(_Layer(weights["w2"], weights["b2"], weights.get("w2_scale")))
    if architecture.hidden:
        scale = weights.get("w3_scale")
        layers.append(_Layer(weights["w3"][:, None], weights["b3"][:, None], None if scale is None else scale[:, None]))
    elif to.hidden:
        matrix, bias, scale = layers[0]
        scales = None if scale is None else torch.cat([scale, scale], dim=1)
        layers[0] = _Layer(torch.cat([matrix, -matrix], dim=1), torch.cat([bias, -bias], dim=1), scales)
        layers.append(_without_bias(torch.tensor([[1.0, -1.0]], dtype=torch.float32, device="cpu"), matrix))
    if len(layers) == 2 and len(to.hidden) == 2:
        matrix = layers[0].matrix
        layers.insert(1, _without_bias(torch.eye(matrix.shape[1], dtype=torch.float32, device="cpu"), matrix))
    n, sizes = len(weights["w1"]), (to.hidden_size, *to.hidden, 1)
    widened: dict[str, Tensor] = {}
    for i, (matrix, bias, scale) in enumerate(layers):
        name = str(i + 1) if i + 1 < len(layers) else "3" if to.hidden else "1"
        padded = {
            f"w{name}": _padded(matrix, (n, sizes[i + 1], sizes[i])),
            f"b{name}": _padded(bias, (n, sizes[i + 1])),
        }
        if scale is not None:
            padded[f"w{name}_scale"] = _padded(scale, (n, sizes[i + 1]), 1.0)
        widened |= {key: tensor[:, 0] if name == "3" else tensor for key, tensor in padded.items()}
    return widened


def _without_bias(matrix: Tensor, like: Tensor) -> _Layer:
    """Return a layer of one matrix for the probes of `like`."""
    n = len(like)
    scale = torch.ones(n, len(matrix), dtype=torch.float32, device="cpu") if like.dtype == torch.int8 else None
    bias = torch.zeros(n, len(matrix), dtype=torch.float32, device="cpu")
    return _Layer(matrix.to(like.dtype).expand(n, -1, -1), bias, scale)


def _padded(tensor: Tensor, shape: tuple[int, ...], value: float = 0.0) -> Tensor:
    padded = tensor.new_full(shape, value)
    padded[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return padded
