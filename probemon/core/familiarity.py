"""Familiar tells the hidden states that are unlike those a pack was calibrated on.

    familiar = Familiar.of(states, held_out)     # prepared states [N, D] of texts like those of the calibration
    familiar.far(more)                           # [M] int64: 1 where a state is far from them

A state is far where the first principal components of the calibration states leave more of it than of all but one in a
hundred of those that were held out: the Q statistic of Jackson and Mudholkar (Control procedures for residuals
associated with principal component analysis, Technometrics 21, 1979), with a limit that is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from probemon.core.inputs import check_states
from probemon.errors import ConfigError
from probemon.util.checks import check_count

N_COMPONENTS = 64
SHARE = 0.01  # of the held-out states that are far


@dataclass(frozen=True)
class Familiar:
    """What is known of the calibration states of one input, after its normalisation.

    - `mean [D]` fp32
    - `basis [K, D]` fp16: their first principal components
    - `limit`: the squared distance from the mean, outside of these components, over which a state is far
    """

    mean: Tensor
    basis: Tensor
    limit: float

    @classmethod
    def of(cls, states: Tensor, held_out: Tensor, n_components: int | None = None) -> Familiar:
        """Fit to prepared states `[N, D]`, with the limit from others `[M, D]` of such texts.

        `n_components`: by default 64, or half of D where that is less. Raises `ConfigError` for fewer states than
        components, or fewer held-out ones than a hundredth can be told of.
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
        # Eigenvectors have no sign of their own: the same states give the same file.
        largest = largest * largest.gather(1, largest.abs().argmax(1, keepdim=True)).sign()
        rough = cls(mean.float(), largest.half(), float("inf"))
        return cls(rough.mean, rough.basis, float(rough._residual(held_out).quantile(1 - SHARE)))

    def far(self, states: Tensor) -> Tensor:
        """Say of prepared states `[N, D]` which are far, `[N]` int64 on their device; 0 where one is no number."""
        return (self._residual(states) > self.limit).to(torch.int64)

    def _residual(self, states: Tensor) -> Tensor:
        x = states.double() - self.mean.to(states.device).double()
        return x.square().sum(-1) - (x @ self.basis.to(states.device).double().T).square().sum(-1)
