"""FarStates finds far states on one device: what `Familiar.far` finds, in a fraction of the time.

far = FarStates(familiar, device)
far(states)                 # prepared states [N, D] fp32; [N] int64
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.familiarity import Familiar
from probemon.core.inputs import FEW, FarTerms


class FarStates:
    """Says of prepared states `[N, D]` fp32 which are far, `[N]` int64. `few`: `far_few`, where numba is installed."""

    def __init__(
        self, familiar: Familiar, device: torch.device, few: Callable[[Any, Any, Any, float], Any] | None = None
    ) -> None:
        self._familiar = Familiar(familiar.mean.to(device), familiar.basis.to(device), familiar.limit)
        mean, basis = self._familiar.mean.double(), self._familiar.basis.double()
        # The projections and the product with the mean are one matrix product.
        self._matrix = torch.cat([basis, mean[None]]).T.float().contiguous()
        self._shift = torch.cat([-basis @ mean, torch.zeros(1, dtype=torch.float64, device=device)]).float()
        self._square = float(mean @ mean)
        self._on_cpu, self._few = device.type == "cpu", few
        if self._on_cpu:
            self.terms = FarTerms(mean.numpy(), basis.float().numpy(), familiar.limit)

    def __call__(self, states: Tensor) -> Tensor:
        if not self._on_cpu:  # to look for those near the limit is to wait for the device
            return self._familiar.far(states)
        if self._few is not None and len(states) <= FEW:
            return torch.from_numpy(self._few(states.contiguous().numpy(), *self.terms))
        # numpy from here on: on few states its calls cost a third of torch's.
        x, products = states.numpy(), torch.addmm(self._shift, states, self._matrix).numpy()
        along, square = products[:, :-1], np.einsum("nd,nd->n", x, x)
        with np.errstate(invalid="ignore"):  # what is no number is not over the limit
            squared_distance = square - 2 * products[:, -1] + self._square
            over = squared_distance - np.einsum("nk,nk->n", along, along) - self._familiar.limit
        far = over > 0
        # The company that a state is computed in changes the last bits: where they could decide, fp64 does.
        near = np.abs(over) < 1e-4 * (square + self._square)
        if near.any():
            far[near] = self._familiar.far(states[torch.from_numpy(near)]).numpy() > 0
        return torch.from_numpy(far.astype(np.int64))
