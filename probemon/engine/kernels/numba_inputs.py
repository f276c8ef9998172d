"""numba prepares inputs in a few calls, as `prepare_input` does to the last bit, and finds far states among a few.

x = prepare_numba(hidden, spec, torch.bfloat16)     # [N, D] fp32, of which each is a bf16 number
far = far_few(x, mean, basis, limit)                # prepared states [N, D] fp32; [N] int64
x, largest, far = prepare_few(hidden, spec, torch.bfloat16, terms)      # both, and the largest value of each state

A step has one state, for which each call of torch takes longer than what it does.
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

Array = npt.NDArray[Any]
_NO_TERMS = FarTerms(np.empty(0), np.empty((0, 0), np.float32), 0.0)
_NO_MEAN = np.empty(0, np.float32)


def prepare_numba(hidden: Tensor, spec: InputSpec, dtype: torch.dtype) -> Tensor:
    """Return hidden [N, D] on a CPU as `prepare_input` does, the values of `dtype` in fp32, where they are exact."""
    x, mean = _squared(hidden, spec)
    if len(mean):
        x = torch.from_numpy(_normalised(x.numpy(), mean, np.float32(spec.eps), spec.eps < TINY))
    return rounded_numba(x, dtype)


def prepare_few(
    hidden: Tensor, spec: InputSpec, dtype: torch.dtype, terms: FarTerms | None
) -> tuple[Tensor, Array | None, Array | None]:
    """Do the same for bf16 or fp32; return the largest value of each state `[N]` too, None where one is not finite, and
    where `terms` are given which states are far, `[N]` int64.
    """
    x, mean = _squared(hidden, spec)
    rounds, is_tiny = dtype == torch.bfloat16, spec.eps < TINY
    values, largest, far, finite = _prepared(
        x.contiguous().numpy(), mean, np.float32(spec.eps), is_tiny, rounds, *(terms or _NO_TERMS)
    )
    return torch.from_numpy(values), largest if finite else None, None if terms is None else far


def _squared(hidden: Tensor, spec: InputSpec) -> tuple[Tensor, Array]:
    """Return states in fp32, without their mean where it is not wanted, and the means of their squares `[N]`, where
    they are.
    """
    check_states(hidden)
    check_norm(spec.norm, ("none", "layernorm", "rmsnorm"), "kernels/numba_inputs.py")
    x = hidden.detach().to(torch.float32)
    if spec.norm == "none":
        return x, _NO_MEAN
    x = x.contiguous()
    if spec.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    # torch adds up, as it does for `prepare_input`: the last bit depends on the order.
    return x, x.square().mean(dim=-1).numpy()


def rounded_numba(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return fp32 [N, D] rounded to what `dtype` can hold, still in fp32."""
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
    """Round the bits of fp32 to the nearest bf16, to even where two are as near; a NaN stays one."""
    out = np.empty_like(bits)
    for row in range(bits.shape[0]):
        for i in range(bits.shape[1]):
            b = bits[row, i]
            if b & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000):
                out[row, i] = np.uint32(0x7FC00000)
            else:
                out[row, i] = (b + np.uint32(0x7FFF) + ((b >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return out


# Sums may be added up in any order, which fp64 has digits for: so they are vectorised.
@compiled(fastmath={"reassoc", "contract"})
def far_few(states: Array, mean: Array, basis: Array, limit: float) -> Array:
    """Say which states are further than the limit outside of the components; 0 where one is no number.

    The mean `[D]` is in fp64, the basis `[K, D]` in fp32.
    """
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
    """Normalise, say what is far, round, and find the largest values."""
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
