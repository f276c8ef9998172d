"""FarStates finds far states on one device, as `Familiar.far` but faster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.familiarity import Familiar
from probemon.core.inputs import FEW, FarTerms


class FarStates:
    """Marks far states of prepared ones `[N, D]` fp32: `[N]` int64. `few`: `far_few`, if numba is installed."""

    def __init__(
        self, familiar: Familiar, device: torch.device, few: Callable[[Any, Any, Any, float], Any] | None = None
    ) -> None:
        self._familiar = Familiar(familiar.mean.to(device), familiar.basis.to(device), familiar.limit)
        mean, basis = self._familiar.mean.double(), self._familiar.basis.double()
        self._matrix = torch.cat([basis, mean[None]]).T.float().contiguous()
        self._shift = torch.cat([-basis @ mean, torch.zeros(1, dtype=torch.float64, device=device)]).float()
        self._square = float(mean @ mean)
        self._on_cpu, self._few = device.type == "cpu", few
        if self._on_cpu:
            self.terms = FarTerms(mean.numpy(), basis.float().numpy(), familiar.limit)

    def __call__(self, states: Tensor) -> Tensor:
        if not self._on_cpu:  # a check for states near the limit would synchronise
            return self._familiar.far(states)
        if self._few is not None and len(states) <= FEW:
            return torch.from_numpy(self._few(states.contiguous().numpy(), *self.terms))
        # For few states, numpy's calls cost a third of torch's.
        x, products = states.numpy(), torch.addmm(self._shift, states, self._matrix).numpy()
        along, square = products[:, :-1], np.einsum("nd,nd->n", x, x)
        with np.errstate(invalid="ignore"):  # NaN is not over the limit
            squared_distance = square - 2 * products[:, -1] + self._square
            over = squared_distance - np.einsum("nk,nk->n", along, along) - self._familiar.limit
        far = over > 0
        # A state's last bits depend on its batch; near the limit fp64 decides.
        near = np.abs(over) < 1e-4 * (square + self._square)
        if near.any():
            far[near] = self._familiar.far(states[torch.from_numpy(near)]).numpy() > 0
        return torch.from_numpy(far.astype(np.int64))
