"""Fits linear probes to windows: own texts against their near negatives and against ordinary text.

    scale = Scale.of(rows, data, "std")
    probes = fit(rows, scale, Shares.of(rows, data), data, concepts=(0,), folds=(0, 1), penalty=PENALTIES[0])
    # w [F, P, D], b [F, P]

Losses have fixed total weights: positives 1, own negatives 1, ordinary text 4. Twice, within a positive text without
marks, weight moves to the windows that score highest (multi-instance learning, as mi-SVM of Andrews, Tsochantaridis &
Hofmann 2002).
Each probe is then shifted and scaled so that its logits on ordinary windows have mean 0 and spread 1, which makes
probes of different folds comparable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from probemon.lab.training.dataset import ORDINARY, OUTSIDE, TEMPLATE, Dataset
from probemon.lab.training.logistic import Dense, RowTargets, fit_logistic
from probemon.lab.training.windows import WindowRows

SCALES = ("std", "white")
PENALTIES = (0.003, 0.0003)  # of squared weights, for features of length about 1
_ORDINARY_WEIGHT = 4.0
_ROUNDS, _SHARPNESS = 2, 2.0
_MOST_STEPS, _TOLERANCE = 30, 1e-5
_COLUMNS = 40  # probes fitted at once
_MOST_ROWS = 4_000  # of own negatives of a concept


@dataclass(frozen=True)
class Scale:
    """Turns prepared states into features: `(x - mean) @ turn`, [D] and [D] or [D, D]."""

    mean: Tensor
    turn: Tensor

    @classmethod
    def of(cls, rows: WindowRows, data: Dataset, name: str) -> Scale:
        """Learn from ordinary windows, or from all if there are none: by "std", or by "white"ning, half regularised."""
        plain = torch.from_numpy(data.is_of(ORDINARY, TEMPLATE)[data.document])[rows.part]
        x = rows.x[plain] if bool(plain.any()) else rows.x
        mean, width = x.mean(0), x.shape[1]
        if name == "std":
            return cls(mean, 1 / (x.std(0).clamp(min=1e-6) * width**0.5))
        centred = (x - mean).double()
        values, vectors = torch.linalg.eigh(centred.T @ centred / max(1, len(x) - 1))
        values = values.clamp(min=0)
        return cls(mean, (vectors / ((values + values.mean().clamp(min=1e-12)) * width).sqrt()).float())

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) * self.turn if self.turn.ndim == 1 else (x - self.mean) @ self.turn

    def unscaled(self, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return probes of the prepared states for probes w `[..., D]`, b of the features."""
        plain = w * self.turn if self.turn.ndim == 1 else w @ self.turn.T
        return plain, b - (plain.double() @ self.mean.double()).float()


@dataclass(frozen=True)
class Shares:
    """Weights of rows in the loss of each concept, before folds `[R, P]`: of positives, own negatives, ordinary text.

    A text counts once for its mean and once for all its windows.
    """

    present: Tensor
    absent: Tensor
    ordinary: Tensor

    @classmethod
    def of(cls, rows: WindowRows, data: Dataset) -> Shares:
        part = rows.part.numpy()
        document = data.document[part]
        learnt = torch.from_numpy(data.learnt)[rows.part]
        plain = torch.from_numpy(data.is_of(ORDINARY, TEMPLATE)[document])[:, None]
        sides = []
        for side in (learnt == 1, (learnt == 0) & ~plain, (learnt == 0) & plain):
            weight = torch.zeros(side.shape)
            for kind in (rows.is_window, ~rows.is_window):
                use = side & kind[:, None]
                counts = torch.zeros(len(data.texts), side.shape[1]).index_add_(
                    0, torch.from_numpy(document), use.float()
                )
                weight += use / counts.clamp(min=1)[document]
            sides.append(weight)
        return cls(*sides)


def fit(
    rows: WindowRows,
    scale: Scale,
    shares: Shares,
    data: Dataset,
    concepts: Sequence[int],
    folds: Sequence[int],
    *,
    penalty: float,
) -> tuple[Tensor, Tensor]:
    """Return probes of the prepared states w `[F, P, D]`, b `[F, P]`; fold -1 learns from everything.

    A probe of fold k learns from texts of other folds.
    """
    fold_of_row = torch.from_numpy(data.fold[data.document])[rows.part]
    w = torch.zeros(len(folds), len(concepts), rows.x.shape[1])
    b = torch.zeros(len(folds), len(concepts))
    at_once = max(1, _COLUMNS // len(folds))
    for begin in range(0, len(concepts), at_once):
        block = list(concepts[begin : begin + at_once])
        part_w, part_b = _fit_block(rows, scale, shares, data, block, fold_of_row, folds, penalty)
        w[:, begin : begin + at_once], b[:, begin : begin + at_once] = part_w, part_b
    return w, b


def _fit_block(
    rows: WindowRows,
    scale: Scale,
    shares: Shares,
    data: Dataset,
    block: list[int],
    fold_of_row: Tensor,
    folds: Sequence[int],
    penalty: float,
) -> tuple[Tensor, Tensor]:
    sides = [side[:, block] for side in (shares.present, shares.absent, shares.ordinary)]
    sides[1] = _fewer(sides[1])
    use = sum(side.sum(1) for side in sides) > 0
    x, part = scale(rows.x[use]), rows.part[use].numpy()
    trains = torch.stack([(fold_of_row[use] != fold) & (fold_of_row[use] != OUTSIDE) for fold in folds], dim=1)
    # Columns: concepts of the first fold, of the second, ...
    present, absent, ordinary = ((side[use][:, None] * trains[:, :, None]).flatten(1) for side in sides)
    present, absent = _summing(present, 1.0), _summing(absent, 1.0) + _summing(ordinary, _ORDINARY_WEIGHT)
    l2 = torch.full((present.shape[1],), penalty)
    start: tuple[Tensor, Tensor] | None = None
    is_window = rows.is_window[use]
    document = torch.from_numpy(data.document[part])
    # Marks say which windows have the concept; else it may be in any.
    unmarked = torch.from_numpy(~data.marked[data.document[part]][:, block]).repeat(1, len(folds))
    moves = (present > 0) & is_window[:, None] & unmarked
    for _ in range(_ROUNDS + 1 if bool(moves.any()) else 1):
        if start is not None:
            present = _to_highest(present, x @ start[0].T + start[1], document, moves, len(data.texts))
        targets = RowTargets(present, absent)
        start = fit_logistic(Dense(x), targets, l2, start=start, tolerance=_TOLERANCE, most_steps=_MOST_STEPS)
    assert start is not None
    w, b = _unit_spread(*start, x, ordinary if bool((ordinary > 0).any()) else absent, is_window)
    w, b = scale.unscaled(w, b)
    return w.unflatten(0, (len(folds), len(block))), b.unflatten(0, (len(folds), len(block)))


def _fewer(absent: Tensor) -> Tensor:
    """Leave out own negatives of a concept over `_MOST_ROWS`, evenly."""
    n = (absent > 0).sum(0)
    for column in torch.nonzero(n > _MOST_ROWS).flatten().tolist():
        places = torch.nonzero(absent[:, column]).flatten()
        kept = places[torch.linspace(0, len(places) - 1, _MOST_ROWS).long()]
        thinned = torch.zeros_like(absent[:, column])
        thinned[kept] = absent[kept, column]
        absent = absent.clone()
        absent[:, column] = thinned
    return absent


def _summing(weight: Tensor, total: float) -> Tensor:
    return weight * (total / weight.sum(0).clamp(min=1e-30))


def _to_highest(present: Tensor, z: Tensor, document: Tensor, windows: Tensor, n_texts: int) -> Tensor:
    """Share the weight of a text's `windows [R, C]` by softmax(2 z); other weight stays."""
    total = torch.zeros(n_texts, present.shape[1]).index_add_(0, document, present * windows)
    score = torch.where(windows, _SHARPNESS * z, -torch.inf)
    highest = torch.full((n_texts, present.shape[1]), -torch.inf)
    highest.scatter_reduce_(0, document[:, None].expand_as(score), score, "amax")
    exp = torch.where(windows, (score - highest[document]).exp(), 0.0)
    sums = torch.zeros(n_texts, present.shape[1]).index_add_(0, document, exp)
    return torch.where(windows, exp / sums[document].clamp(min=1e-30) * total[document], present)


def _unit_spread(w: Tensor, b: Tensor, x: Tensor, plain: Tensor, is_window: Tensor) -> tuple[Tensor, Tensor]:
    """Shift and scale probes so that their logits on the windows in `plain [R, C]` have mean 0 and spread 1."""
    z = x @ w.T + b
    weight = (plain > 0) & is_window[:, None]
    n = weight.sum(0).clamp(min=1)
    mean = (z * weight).sum(0) / n
    spread = (((z - mean).square() * weight).sum(0) / n).sqrt()
    spread = torch.where(spread > 1e-6, spread, 1.0)
    return w / spread[:, None], (b - mean) / spread
