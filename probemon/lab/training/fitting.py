"""Fits the probes of one site on rows of states.

rows = TrainingRows.of(states, part_of_row, use, spec, dtype, most_bytes=..., seed=0)
linear = fit_linear(rows, targets, l2)                  # {"w1" [P, 1, D], "b1" [P, 1]}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probemon.core.familiarity import Familiar
from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import prepare_input
from probemon.core.probes import InputSpec
from probemon.engine.audit import sample
from probemon.errors import TrainingError
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.directions import discriminant, mean_difference, scaled
from probemon.lab.training.labels import Known
from probemon.lab.training.logistic import TO_COMPARE, Dense, Targets, fit_logistic
from probemon.lab.training.standard import Standard, Weights
from probemon.lab.training.state_store import SiteStates, StateStore

METHODS = ("auto", "logistic", "watched", "joint", "mlp", "mass_mean", "lda")
BESIDE = ("logistic", "mass_mean", "lda")  # always fitted
_CHUNK = 1 << 15


@dataclass(frozen=True)
class TrainingRows:
    """Standardised states `x [N, D]` fp32; `part [N]`, and `row [N]` in the store; drawn from `n_of` rows."""

    x: Tensor
    part: Tensor
    row: Tensor
    standard: Standard
    n_of: int

    @classmethod
    def of(
        cls,
        states: SiteStates,
        part_of_row: Tensor,
        use: Mask,
        spec: InputSpec,
        dtype: torch.dtype,
        *,
        most_bytes: int,
        seed: int,
    ) -> TrainingRows:
        """Take rows of the parts in `use [S]`, evenly drawn to fit `most_bytes`."""
        row = torch.from_numpy(np.flatnonzero(use[part_of_row.numpy()]))
        n_of, most = len(row), max(1, most_bytes // (4 * states.shape[1]))
        if n_of > most:
            drawn = sample(most / n_of, seed, row.numpy())
            row = row[torch.from_numpy(drawn)] if drawn is not None else row[:most]
        x = prepared(states, row, spec, dtype)
        standard = Standard.of(x)
        return cls(x.sub_(standard.mean).div_(standard.scale), part_of_row[row], row, standard, n_of)

    def only(self, use: Mask) -> TrainingRows:
        """Return the rows of parts in `use [S]`, standardised as before."""
        chosen = torch.from_numpy(use)[self.part]
        return TrainingRows(self.x[chosen], self.part[chosen], self.row[chosen], self.standard, self.n_of)


@dataclass(frozen=True)
class Fitted:
    """The probes to write, and those of other methods; `areas` of the candidates.

    `learnt_from`: tokens used, and available.
    """

    method: str
    areas: Mapping[str, float]
    weights: Weights
    by_method: Mapping[str, Weights]
    inputs: tuple[InputSpec, ...]
    input_of: Ints
    familiar: list[Familiar | None]
    golden: Tensor
    learnt_from: tuple[int, int]


def prepared(states: SiteStates, row: Tensor, spec: InputSpec, dtype: torch.dtype) -> Tensor:
    """Return rows `[n, D]` as probes read them, fp32. Raises `TrainingError`."""
    x = torch.empty(len(row), states.shape[1])
    for begin in range(0, len(row), _CHUNK):
        x[begin : begin + _CHUNK] = prepare_input(states[row[begin : begin + _CHUNK]], spec, dtype).float()
    if not bool(x.isfinite().all()):
        raise TrainingError(
            f"{int((~x.isfinite()).any(1).sum())} of {len(x)} states at {spec.site} are not finite in"
            f" {str(dtype).removeprefix('torch.')}: choose other layers, or load the model in another precision"
        )
    return x


def row_parts(data: Dataset, store: StateStore) -> Tensor:
    """Return the part of each row of a store `[R]`."""
    return torch.from_numpy(data.part_of(store.document, store.position))


def balanced(known: Known, background: Mask) -> Tensor:
    """Return weights of parts `[S]`: background counts like the other negatives."""
    n_own = float(np.median((known[~background] == 0).sum(axis=0))) if (~background).any() else 0.0
    n_background = int(background.sum())
    share = min(1.0, max(1.0, n_own) / n_background) if n_background else 1.0
    return torch.from_numpy(np.where(background, share, 1.0))


def fit_linear(
    rows: TrainingRows, targets: Targets, l2: Tensor, method: str = "logistic", *, to_compare: bool = False
) -> Weights:
    """Return linear probes for standardised states; `to_compare`: a faster, less exact fit."""
    if method == "logistic":
        w, b = fit_logistic(Dense(rows.x), targets, l2, **(TO_COMPARE if to_compare else {}))
    else:
        direction = {"mass_mean": mean_difference, "lda": discriminant}[method](rows.x, targets)
        w, b = scaled(rows.x, targets, direction)
    return {"w1": w[:, None], "b1": b[:, None]}
