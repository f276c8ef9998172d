"""numba prepares inputs bitwise as `prepare_input`, and finds far states: for one state, torch's calls are slow.

x, largest, far = prepare_few(hidden, spec, torch.bfloat16, terms)     # x [N, D] fp32 holding bf16 values
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probemon.core.inputs import TINY, FarTerms, check_norm, check_states
from probemon.core.probes import InputSpec
from probemon.engine.kernels.numba_cached import compiled
from probemon.errors import ConfigError

Array = npt.NDArray[Any]
_NO_TERMS = FarTerms(np.empty(0), np.empty((0, 0), np.float32), 0.0)
_NO_MEAN = np.empty(0, np.float32)


def prepare_numba(hidden: Tensor, spec: InputSpec, dtype: torch.dtype) -> Tensor:
    """Prepare hidden [N, D] on a CPU; returns values of `dtype` as fp32."""
    x, mean = _squared(hidden, spec)
    if len(mean):
        x = torch.from_numpy(_normalised(x.numpy(), mean, np.float32(spec.eps), spec.eps < TINY))
    return rounded_numba(x, dtype)


def prepare_few(
    hidden: Tensor, spec: InputSpec, dtype: torch.dtype, terms: FarTerms | None
) -> tuple[Tensor, Array | None, Array | None]:
    """Prepare in bf16 or fp32; also return largest values `[N]` (None if one is not finite), and with `terms` which
    states are far, `[N]` int64.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"inputs are prepared in bfloat16 or float32, not {dtype}")
    x, mean = _squared(hidden, spec)
    rounds, is_tiny = dtype == torch.bfloat16, spec.eps < TINY
    values, largest, far, finite = _prepared(
        x.contiguous().numpy(), mean, np.float32(spec.eps), is_tiny, rounds, *(terms or _NO_TERMS)
    )
    return torch.from_numpy(values), largest if finite else None, None if terms is None else far


def _squared(hidden: Tensor, spec: InputSpec) -> tuple[Tensor, Array]:
    """Return fp32 states (centred for layernorm) and mean squares `[N]`."""
    check_states(hidden)
    check_norm(spec.norm, ("none", "layernorm", "rmsnorm"), "kernels/numba_inputs.py")
    x = hidden.detach().to(torch.float32)
    if spec.norm == "none":
        return x, _NO_MEAN
    x = x.contiguous()
    if spec.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    # torch's sum, as in `prepare_input`, for equal bits.
    return x, x.square().mean(dim=-1).numpy()


def rounded_numba(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 [N, D] to `dtype`, still in fp32."""
    if dtype == torch.float32:
        return x
    if dtype != torch.bfloat16:
        return x.to(dtype).to(torch.float32)
    return torch.from_numpy(_rounded_to_bf16(x.contiguous().numpy().view(np.uint32)).view(np.float32))


@compiled()
def _normalised(x: Array, mean: Array, eps: np.float32, is_tiny: bool) -> Array:
    out = np.empty_like(x)
    for row in range(x.shape[0]):
        square = mean[row] + (mean[row] - mean[row]) + eps
        if is_tiny and square < np.float32(TINY):
            square = np.float32(np.nan)
        factor = np.float32(1) / np.sqrt(square)
        for i in range(x.shape[1]):
            out[row, i] = x[row, i] * factor
    return out


@compiled()
def _rounded_to_bf16(bits: Array) -> Array:
    """Round fp32 bits to bf16, ties to even; NaN stays NaN."""
    out = np.empty_like(bits)
    for row in range(bits.shape[0]):
        for i in range(bits.shape[1]):
            b = bits[row, i]
            if b & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
                out[row, i] = np.uint32(0x7FC00000)
            else:
                out[row, i] = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return out


# In fp64, sums may be reordered and so vectorised.
@compiled(fastmath={"reassoc", "contract"})
def far_few(states: Array, mean: Array, basis: Array, limit: float) -> Array:
    """Return 1 for states farther than `limit` from the components, 0 for NaN. mean [D] fp64, basis [K, D] fp32."""
    n, d = states.shape
    far, offset = np.zeros(n, np.int64), np.empty(d, np.float64)
    for row in range(n):
        residual = 0.0
        for i in range(d):
            offset[i] = states[row, i] - mean[i]
            residual += offset[i] * offset[i]
        for k in range(len(basis)):
            along = 0.0
            for i in range(d):
                along += offset[i] * basis[k, i]
            residual -= along * along
        far[row] = residual > limit
    return far


@compiled()
def _prepared(
    x: Array, mean: Array, eps: np.float32, is_tiny: bool, rounds: bool, far_mean: Array, basis: Array, limit: float
) -> Any:
    values = _normalised(x, mean, eps, is_tiny) if len(mean) else x
    far = far_few(values, far_mean, basis, limit) if len(far_mean) else np.empty(0, np.int64)
    if rounds:
        values = _rounded_to_bf16(values.view(np.uint32)).view(np.float32)
    largest, finite = np.empty(len(values), np.float32), True
    for row in range(len(values)):
        most = np.float32(0)
        for i in range(values.shape[1]):
            size = abs(values[row, i])
            finite = finite and size < np.inf
            most = max(most, size)
        largest[row] = most
    return values, largest, far, finite
