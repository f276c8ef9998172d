"""What else tells the concepts of the same test parts: what a probe has to beat, and what must tell nothing.

    controls = Controls(data, pooled, seed=0)          # pooled: mean prepared state of each part [S, D]
    controls.words()                                   # [S, P] scores of a logistic regression on TF-IDF
    controls.shuffled()                                # [P] mean AUROC where labels are shuffled

All learn on the parts that train, on the background where nothing else is without a concept (`Dataset.compared`), and
take their penalties by the same cross-validation.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.lab.training.crossvalidation import Doubles, best_penalties, cross_validated, deal
from probemon.lab.training.dataset import Dataset
from probemon.lab.training.labels import Known
from probemon.lab.training.logistic import Dense, Features, Targets, fit_logistic, logits
from probemon.lab.training.metrics import auroc
from probemon.lab.training.words import Vocabulary

_PENALTIES = (0.1, 0.01, 1e-3, 1e-4, 1e-5)
_N_FOLDS = 3
_AT_ONCE = 64  # concepts, of sparse products
_REPEATS = 40  # shuffled probes, or random directions, at least; 20 of each concept where there are few


class Controls:
    """Baselines and controls on the parts of a dataset; `pooled [S, D]` has NaN where a part has no states."""

    def __init__(self, data: Dataset, pooled: Tensor, *, seed: int) -> None:
        self._data, self._seed = data, seed
        self._known = data.compared
        asked = (self._known >= 0).any(axis=1)
        self._test: Mask = data.of("test") & asked
        self.train: Mask = data.of("train") & asked & ~pooled[:, 0].isnan().numpy()
        x = pooled.float()
        mean, scale = x[self.train].mean(0), x[self.train].std(0).clamp(min=1e-6)
        self._pooled = ((x - mean) / scale).nan_to_num()

    def pooled(self) -> Doubles:
        """Logistic regression on the mean state of a part."""
        return self._learnt(Dense(self._pooled))

    def words(self) -> Doubles:
        """Logistic regression on the words of a part."""
        texts = self.texts
        vocabulary = self.vocabulary
        return self._learnt(vocabulary.features(texts))

    @property
    def texts(self) -> list[str]:
        """What each part says."""
        return [self._data.text_of(part) for part in range(len(self._data.known))]

    @property
    def vocabulary(self) -> Vocabulary:
        """The words of the parts that train."""
        return Vocabulary.of([self._data.text_of(int(part)) for part in np.flatnonzero(self.train)])

    def length(self) -> Doubles:
        """Logistic regression on how many tokens and characters a part has."""
        n_tokens = [len(positions) for positions in self._data.positions]
        n_chars = [len(text) for text in self.texts]
        return self._learnt(_standardised(np.log1p(np.stack([n_tokens, n_chars], axis=1)), self.train))

    def position(self) -> Doubles:
        """Logistic regression on where the tokens of a part stand in their text."""
        places = [
            (positions.mean(), positions.mean() / len(self._data.tokens[document]))
            for document, positions in zip(self._data.document, self._data.positions, strict=True)
        ]
        return self._learnt(_standardised(np.asarray(places), self.train))

    def shuffled(self) -> Doubles:
        """Mean AUROC `[P]` of probes whose labels were shuffled among groups, in training and in the test."""
        n_concepts = self._known.shape[1]
        n_repeats = max(1, math.ceil(_REPEATS / n_concepts))
        generator = np.random.default_rng([self._seed, 1])
        known = np.concatenate([_shuffled(self._known, self._data.group, generator) for _ in range(n_repeats)], axis=1)
        weak = torch.full((known.shape[1],), 0.01)
        found = []
        for begin in range(0, known.shape[1], _AT_ONCE):
            own = known[:, begin : begin + _AT_ONCE]
            w, b = fit_logistic(Dense(self._pooled[self.train]), self._targets(own), weak[begin : begin + _AT_ONCE])
            scores = logits(Dense(self._pooled[self._test]), w, b)
            found.append(auroc(scores, torch.from_numpy(own[self._test])).numpy())
        return _mean_of_known(np.concatenate(found).reshape(n_repeats, n_concepts))

    def random(self) -> Doubles:
        """Mean AUROC `[P]` of random directions, each taken the way round in which it tells more."""
        n_repeats = max(20, _REPEATS // self._known.shape[1])
        generator = torch.Generator().manual_seed(self._seed + 1)
        directions = torch.randn(n_repeats, self._pooled.shape[1], generator=generator)
        scores, known = self._pooled[self._test] @ directions.T, torch.from_numpy(self._known[self._test])
        areas = np.stack([auroc(scores[:, i : i + 1].expand(known.shape), known).numpy() for i in range(n_repeats)])
        return _mean_of_known(np.maximum(areas, 1 - areas))

    def _targets(self, known: Known) -> Targets:
        of_train = known[self.train]
        return Targets(torch.arange(len(of_train)), torch.from_numpy(of_train))

    def _learnt(self, features: Features) -> Doubles:
        trains, group = torch.from_numpy(self.train), self._data.group[self.train]
        own = features.rows(trains)
        found = []
        for begin in range(0, self._known.shape[1], _AT_ONCE):
            of_block = self._known[:, begin : begin + _AT_ONCE]
            targets = self._targets(of_block)
            folds = deal(_numbered(group), of_block[self.train], seed=self._seed, n_folds=_N_FOLDS)
            l2 = best_penalties(cross_validated(own, targets, folds, _PENALTIES), _PENALTIES)
            found.append(logits(features, *fit_logistic(own, targets, l2)).double().numpy())
        return np.concatenate(found, axis=1)


def _mean_of_known(areas: Doubles) -> Doubles:
    """The mean of each column, without NaN; NaN where there is nothing else."""
    known = ~np.isnan(areas)
    return np.where(known.any(0), np.where(known, areas, 0).sum(0) / known.sum(0).clip(1), np.nan)


def _numbered(group: Ints) -> Ints:
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def _standardised(values: np.ndarray, train: Mask) -> Dense:
    mean, scale = values[train].mean(axis=0), values[train].std(axis=0).clip(1e-6)
    return Dense(torch.from_numpy(((values - mean) / scale).astype(np.float32)))


def _shuffled(known: Known, group: Ints, generator: np.random.Generator) -> Known:
    """Return labels `[S, P]` dealt out anew: all parts of a group have those of one part, any of all that have some."""
    parts = np.flatnonzero((known >= 0).any(axis=1))
    groups = np.unique(group[parts])
    given = dict(zip(groups.tolist(), generator.permutation(parts)[: len(groups)].tolist(), strict=True))
    dealt = known.copy()
    for part in parts:
        dealt[part] = known[given[int(group[part])]]
    return dealt
