"""Familiar: detects hidden states unlike those a pack was calibrated on.

A far state has a residual outside the first principal components above the 99th percentile of held-out states: Jackson
and Mudholkar's Q statistic (Control procedures for residuals associated with principal component analysis,
Technometrics 21, 1979), with a measured limit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probemon.core.inputs import check_states
from probemon.errors import ConfigError
from probemon.util.checks import check_count

N_COMPONENTS = 64
SHARE = 0.01  # of held-out states are far


@dataclass(frozen=True)
class Familiar:
    """Principal components of one input's calibration states, after normalisation.

    - `mean [D]` fp32
    - `basis [K, D]` fp16: components
    - `limit`: squared residual above which a state is far
    """

    mean: Tensor
    basis: Tensor
    limit: float

    @classmethod
    def of(cls, states: Tensor, held_out: Tensor, n_components: int | None = None) -> Familiar:
        """Fit to prepared states `[N, D]`, with the limit from `held_out [M, D]`.

        `n_components`: by default min(64, D / 2). Raises `ConfigError` for too few states.
        """
        check_states(states)
        check_states(held_out, states.shape[1], "held_out")
        remedy = f"give 1 or more, and fewer than the {states.shape[1]} values of a state"
        if n_components is None:
            n_components = min(N_COMPONENTS, states.shape[1] // 2)
        check_count("n_components", n_components, least=1, most=states.shape[1] - 1, remedy=remedy)
        if len(states) <= n_components or len(held_out) < 1 / SHARE:
            raise ConfigError(
                f"{len(states)} states and {len(held_out)} held-out ones: give more than {n_components} to fit, and"
                f" {1 / SHARE:.0f} or more to take the limit from"
            )
        x = states.double()
        mean = x.mean(0)
        _, vectors = torch.linalg.eigh((x - mean).T @ (x - mean) / len(x))
        largest = vectors[:, -n_components:].flip(1).T
        # Eigenvector signs are arbitrary; fix them.
        largest = largest * largest.gather(1, largest.abs().argmax(1, keepdim=True)).sign()
        rough = cls(mean.float(), largest.half(), float("inf"))
        return cls(rough.mean, rough.basis, float(rough._residual(held_out).quantile(1 - SHARE)))

    def far(self, states: Tensor) -> Tensor:
        """Return `[N]` int64, 1 for each far state of prepared `[N, D]`; 0 for NaN."""
        return (self._residual(states) > self.limit).to(torch.int64)

    def _residual(self, states: Tensor) -> Tensor:
        x = states.double() - self.mean.to(states.device).double()
        return x.square().sum(-1) - (x @ self.basis.to(states.device).double().T).square().sum(-1)
