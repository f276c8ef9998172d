"""numba finds far states among a few, each exactly as `Familiar.far` says it.

far = far_few(states, mean, basis, limit)      # [N] int64 of prepared states [N, D] fp32

The mean `[D]` is in fp64, the basis `[K, D]` in fp32.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Array = npt.NDArray[Any]


# Sums may be added up in any order, which fp64 has digits for: so they are vectorised.
@njit(cache=True, nogil=True, fastmath={"reassoc", "contract"})  # type: ignore[untyped-decorator,unused-ignore]
def far_few(states: Array, mean: Array, basis: Array, limit: float) -> Array:
    """Say which states are further than the limit outside of the components; 0 where one is no number."""
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
