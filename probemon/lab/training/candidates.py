"""Kinds of probes of one site, and the selection among them.

- "logistic": separate regressions, a child's within its parent
- "watched": refined on the watched running score
- "joint": refined on path scores, all probes together, siblings ranked
- "mlp": two small hidden layers, from the linear solution, on path scores

A later kind must be better by more than one standard error on a fifth of the training groups.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from probemon.core.aggregate import Aggregator
from probemon.core.hierarchy import Mask
from probemon.lab.training.crossvalidation import deal
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.fitting import TrainingRows, balanced, fit_linear
from probemon.lab.training.labels import Known
from probemon.lab.training.logistic import Targets
from probemon.lab.training.metrics import auroc_of
from probemon.lab.training.path_loss import HIDDEN, Recipe, fit, initial, logits_of
from probemon.lab.training.running_scores import by_path, part_scores
from probemon.lab.training.standard import Weights
from probemon.lab.training.watched_loss import fit_watched, is_known

CANDIDATES = ("logistic", "watched", "joint", "mlp")
_SHAPE = (32, 16)
_RANKING = 0.5
_LEAST_STEPS = 200
_RESAMPLED = 50
_COMPARED_BYTES = 96 << 20
_LEAST_GAIN = 0.001  # in AUROC, for a less simple kind


@dataclass(frozen=True)
class Problem:
    """Rows of one site, and labels `learnt [S, P]` and penalties `l2 [P]` of concepts `own`."""

    data: Dataset
    rows: TrainingRows
    own: Sequence[int]
    learnt: Known
    l2: Tensor
    aggregator: Aggregator
    seed: int

    @property
    def targets(self) -> Targets:
        """Labels of each row."""
        known = self.learnt[:, list(self.own)]
        return Targets(
            self.rows.part,
            torch.from_numpy(known),
            balanced(self.data.known[:, list(self.own)], self.data.background),
        )

    def only(self, use: Mask) -> Problem:
        """Restrict the rows to parts `[S]`."""
        return replace(self, rows=self.rows.only(use))


def possible(data: Dataset, aggregator: Aggregator, *, n_sites: int) -> tuple[str, ...]:
    """Return the applicable kinds, simplest first."""
    names = ["logistic"]
    if is_known(aggregator) and not data.of_span.any() and not data.is_tree:
        names.append("watched")
    if n_sites == 1 and all(len(parents) <= 1 for parents in data.parents):
        names += ["joint"] * data.is_tree + ["mlp"]
    return tuple(names)


def fit_candidate(name: str, problem: Problem, linear: Weights) -> Weights:
    """Return probes of a kind, for standardised states; `linear` are the logistic ones."""
    if name == "logistic":
        return linear
    if name == "watched":
        return fit_watched(problem.aggregator, problem.rows.x, problem.targets, problem.l2, linear)
    parents = torch.tensor([parents[0] if parents else -1 for parents in problem.data.parents])
    rows, n_rows = problem.rows, len(problem.rows.part)
    size = torch.bincount(rows.part, minlength=len(problem.data.known)).clamp(min=1)
    share = balanced(problem.data.known, problem.data.background)
    weight = (share / size)[rows.part].float()
    weight = weight / weight.mean()
    labels = torch.from_numpy(problem.data.known)[rows.part]
    seeds = [_seed(problem.seed, concept.id) for concept in problem.data.concepts]
    recipe = HIDDEN if name == "mlp" else Recipe(epochs=1, rate=3e-4, decay=0.05)
    epochs = max(recipe.epochs, -(-_LEAST_STEPS * recipe.batch // max(1, n_rows)))
    start = initial(_SHAPE, seeds, rows.x.shape[1], linear) if name == "mlp" else linear
    return fit(
        rows.x,
        labels,
        parents,
        seeds,
        replace(recipe, epochs=min(epochs, 20)),
        weight=weight,
        shape=_SHAPE if name == "mlp" else (),
        seed=problem.seed,
        start=start,
        ranking=_RANKING if problem.data.is_tree else 0.0,
        progress=False,
    )


def best_candidate(names: Sequence[str], problem: Problem) -> tuple[str, dict[str, float]]:
    """Return the chosen kind, and the mean AUROC of each."""
    data = problem.data
    use = data.of("train") & (data.compared >= 0).any(axis=1)
    if len(names) == 1:
        return names[0], {}
    folds = np.full(len(data.known), -1, dtype=np.int64)
    group = np.unique(data.group[use], return_inverse=True)[1].astype(np.int64)
    folds[use] = deal(group, data.compared[use], seed=problem.seed)
    held = folds == 0
    # Every n-th group suffices.
    every = max(1, problem.rows.x.nbytes // _COMPARED_BYTES)
    fitted = problem.only(data.of("train") & ~held & (data.group % every == 0))
    tested = problem.rows.only(held)
    linear = fit_linear(fitted.rows, fitted.targets, problem.l2, to_compare=True)
    scores = {}
    for name in names:
        probabilities = torch.sigmoid(logits_of(tested.x, fit_candidate(name, fitted, linear))).numpy()
        if len(problem.own) == len(data.concepts):
            by_path(probabilities, data.parents)
        scores[name] = part_scores(data, problem.aggregator, torch.from_numpy(probabilities), tested.part)[held]
    labels, groups = data.compared[held][:, list(problem.own)], data.group[held]
    areas = {name: _mean_area(values, labels, np.arange(held.sum())) for name, values in scores.items()}
    chosen = names[0]
    for name in names[1:]:
        gain = areas[name] - areas[chosen]
        if gain > _LEAST_GAIN and gain > _error(scores[name], scores[chosen], labels, groups, problem.seed):
            chosen = name
    return chosen, areas


def _mean_area(scores: np.ndarray, known: Known, rows: np.ndarray) -> float:
    by_concept = []
    for p in range(scores.shape[1]):
        use = rows[(known[rows, p] >= 0) & ~np.isnan(scores[rows, p])]
        by_concept.append(auroc_of(scores[use, p], known[use, p] == 1))
    areas = np.asarray(by_concept)
    return float(areas[~np.isnan(areas)].mean()) if (~np.isnan(areas)).any() else 0.5


def _error(a: np.ndarray, b: np.ndarray, known: Known, group: np.ndarray, seed: int) -> float:
    _, number = np.unique(group, return_inverse=True)
    generator, differences = np.random.default_rng(seed), []
    for _ in range(_RESAMPLED):
        times = np.bincount(generator.integers(0, number.max() + 1, number.max() + 1), minlength=number.max() + 1)
        rows = np.repeat(np.arange(len(number)), times[number])
        differences.append(_mean_area(a, known, rows) - _mean_area(b, known, rows))
    return float(np.std(differences, ddof=1))


def _seed(seed: int, id: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{id}".encode()).digest()[:6], "big")
