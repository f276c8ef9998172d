"""Probes of one shape as probes of a larger one, with the same scores.

    both = common([a.architecture, b.architecture])
    weights = embed(a.weights, both)                  # stacked tensors of the larger shape

Exact: relu(z) - relu(-z) = z carries a logit through a hidden layer, relu(h) = h what is 0 or more already, and zeros
fill the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from probemon.core.probes import Architecture
from probemon.errors import PackError


def common(architectures: Sequence[Architecture]) -> Architecture:
    """The smallest architecture that has room for probes of each. Raises `PackError` where they read states of
    different sizes.
    """
    sizes = sorted({architecture.hidden_size for architecture in architectures})
    if len(sizes) != 1:
        raise PackError(
            f"probes that read states of {' and '.join(map(str, sizes))} values do not fit into one pack: they are for"
            " different hosts"
        )
    depth = max(len(architecture.hidden) for architecture in architectures)
    # Of fewer layers: two units carry a logit, its own units what is 0 or more.
    widths = [max(_width(architecture, i) for architecture in architectures) for i in range(depth)]
    return Architecture(sizes[0], tuple(widths))


def _width(architecture: Architecture, i: int) -> int:
    return architecture.hidden[min(i, len(architecture.hidden) - 1)] if architecture.hidden else 2


def embed(weights: Mapping[str, Tensor], to: Architecture) -> dict[str, Tensor]:
    """Stacked weights `[P, ...]` as those of probes of `to`, in their dtype. Raises `PackError` where `to` is too
    small.
    """
    found = Architecture.of(weights, "weights")
    if common([found, to]) != to:
        raise PackError(f"probes {found} over {found.hidden_size} values do not fit into {to} over {to.hidden_size}")
    if found == to:
        return dict(weights)
    n, dtype = len(weights["w1"]), weights["w1"].dtype
    layers = [[weights["w1"], weights["b1"], weights.get("w1_scale")]]
    if len(found.hidden) == 2:
        layers.append([weights["w2"], weights["b2"], weights.get("w2_scale")])
    if found.hidden:
        scale = weights.get("w3_scale")
        layers.append([weights["w3"][:, None], weights["b3"][:, None], None if scale is None else scale[:, None]])
    elif to.hidden:
        matrix, bias, scale = layers[0]
        assert matrix is not None and bias is not None
        layers[0] = [
            torch.cat([matrix, -matrix], dim=1),
            torch.cat([bias, -bias], dim=1),
            None if scale is None else torch.cat([scale, scale], dim=1),
        ]
        layers.append(_unscaled(torch.tensor([[1.0, -1.0]], dtype=torch.float32, device="cpu"), n, dtype))
    if len(layers) == 2 and len(to.hidden) == 2:
        first = layers[0][0]
        assert first is not None
        layers.insert(1, _unscaled(torch.eye(first.shape[1], dtype=torch.float32, device="cpu"), n, dtype))
    sizes = (to.hidden_size, *to.hidden, 1)
    made: dict[str, Tensor] = {}
    for i, (matrix, bias, scale) in enumerate(layers):
        assert matrix is not None and bias is not None
        name = str(i + 1) if i + 1 < len(layers) else "3" if to.hidden else "1"
        padded = {
            f"w{name}": _padded(matrix, (n, sizes[i + 1], sizes[i])),
            f"b{name}": _padded(bias, (n, sizes[i + 1])),
        }
        if scale is not None:
            padded[f"w{name}_scale"] = _padded(scale, (n, sizes[i + 1]), 1.0)
        made |= {key: value[:, 0] if name == "3" else value for key, value in padded.items()}
    return made


def _unscaled(matrix: Tensor, n: int, dtype: torch.dtype) -> list[Tensor | None]:
    """The same layer without bias for n probes."""
    scale = torch.ones(n, len(matrix), dtype=torch.float32, device="cpu") if dtype == torch.int8 else None
    return [matrix.to(dtype).expand(n, -1, -1), torch.zeros(n, len(matrix), dtype=torch.float32, device="cpu"), scale]


def _padded(tensor: Tensor, shape: tuple[int, ...], value: float = 0.0) -> Tensor:
    made = tensor.new_full(shape, value)
    made[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return made
