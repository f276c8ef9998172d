"""Baselines that a probe has to beat, and controls that must show nothing, on the same test parts.

controls = Controls(data, pooled, seed=0)          # pooled: mean state of each part [S, D]
controls.words()                                   # [S, P]
controls.shuffled()                                # [P]
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
_AT_ONCE = 64  # concepts of a product
_REPEATS = 40  # at least; 20 of each concept if few


class Controls:
    """Baselines and controls of a dataset; `pooled [S, D]` is NaN for parts without states."""

    def __init__(self, data: Dataset, pooled: Tensor, *, seed: int) -> None:
        self._data, self._seed = data, seed
        self._known = data.compared
        labelled = (self._known >= 0).any(axis=1)
        self._test: Mask = data.of("test") & labelled
        self.train: Mask = data.of("train") & labelled & ~pooled[:, 0].isnan().numpy()
        x = pooled.float()
        mean, scale = x[self.train].mean(0), x[self.train].std(0).clamp(min=1e-6)
        self._pooled = ((x - mean) / scale).nan_to_num()

    def pooled(self) -> Doubles:
        """Regression on the mean state of a part."""
        return self._learnt(Dense(self._pooled))

    def words(self) -> Doubles:
        """Regression on the words of a part."""
        texts = self.texts
        vocabulary = self.vocabulary
        return self._learnt(vocabulary.features(texts))

    @property
    def texts(self) -> list[str]:
        """Text of each part."""
        return [self._data.text_of(part) for part in range(len(self._data.known))]

    @property
    def vocabulary(self) -> Vocabulary:
        """Words of the training parts."""
        return Vocabulary.of([self._data.text_of(int(part)) for part in np.flatnonzero(self.train)])

    def length(self) -> Doubles:
        """Regression on numbers of tokens and characters."""
        n_tokens = [len(positions) for positions in self._data.positions]
        n_chars = [len(text) for text in self.texts]
        return self._learnt(_standardised(np.log1p(np.stack([n_tokens, n_chars], axis=1)), self.train))

    def position(self) -> Doubles:
        """Regression on token positions."""
        places = [
            (positions.mean(), positions.mean() / len(self._data.tokens[document]))
            for document, positions in zip(self._data.document, self._data.positions, strict=True)
        ]
        return self._learnt(_standardised(np.asarray(places), self.train))

    def shuffled(self) -> Doubles:
        """Mean AUROC `[P]` of probes with labels shuffled among groups."""
        n_concepts = self._known.shape[1]
        n_repeats = max(1, math.ceil(_REPEATS / n_concepts))
        generator = np.random.default_rng([self._seed, 1])
        known = np.concatenate([_shuffled(self._known, self._data.group, generator) for _ in range(n_repeats)], axis=1)
        weak = torch.full((known.shape[1],), 0.01)
        areas = []
        for begin in range(0, known.shape[1], _AT_ONCE):
            labels = known[:, begin : begin + _AT_ONCE]
            w, b = fit_logistic(Dense(self._pooled[self.train]), self._targets(labels), weak[begin : begin + _AT_ONCE])
            scores = logits(Dense(self._pooled[self._test]), w, b)
            areas.append(auroc(scores, torch.from_numpy(labels[self._test])).numpy())
        return _mean_of_known(np.concatenate(areas).reshape(n_repeats, n_concepts))

    def random(self) -> Doubles:
        """Mean AUROC `[P]` of random directions, each with the better sign."""
        n_repeats = max(20, _REPEATS // self._known.shape[1])
        generator = torch.Generator().manual_seed(self._seed + 1)
        directions = torch.randn(n_repeats, self._pooled.shape[1], generator=generator)
        scores, known = self._pooled[self._test] @ directions.T, torch.from_numpy(self._known[self._test])
        areas = np.stack([auroc(scores[:, i : i + 1].expand(known.shape), known).numpy() for i in range(n_repeats)])
        return _mean_of_known(np.maximum(areas, 1 - areas))

    def _targets(self, known: Known) -> Targets:
        train_labels = known[self.train]
        return Targets(torch.arange(len(train_labels)), torch.from_numpy(train_labels))

    def _learnt(self, features: Features) -> Doubles:
        trains, group = torch.from_numpy(self.train), self._data.group[self.train]
        trained = features.rows(trains)
        scores = []
        for begin in range(0, self._known.shape[1], _AT_ONCE):
            labels = self._known[:, begin : begin + _AT_ONCE]
            targets = self._targets(labels)
            folds = deal(_numbered(group), labels[self.train], seed=self._seed, n_folds=_N_FOLDS)
            l2 = best_penalties(cross_validated(trained, targets, folds, _PENALTIES), _PENALTIES)
            scores.append(logits(features, *fit_logistic(trained, targets, l2)).double().numpy())
        return np.concatenate(scores, axis=1)


def _mean_of_known(areas: Doubles) -> Doubles:
    known = ~np.isnan(areas)
    return np.where(known.any(0), np.where(known, areas, 0).sum(0) / known.sum(0).clip(1), np.nan)


def _numbered(group: Ints) -> Ints:
    return np.unique(group, return_inverse=True)[1].astype(np.int64)


def _standardised(values: np.ndarray, train: Mask) -> Dense:
    mean, scale = values[train].mean(axis=0), values[train].std(axis=0).clip(1e-6)
    return Dense(torch.from_numpy(((values - mean) / scale).astype(np.float32)))


def _shuffled(known: Known, group: Ints, generator: np.random.Generator) -> Known:
    """Each group gets the labels of one labelled part."""
    parts = np.flatnonzero((known >= 0).any(axis=1))
    groups = np.unique(group[parts])
    source_of = dict(zip(groups.tolist(), generator.permutation(parts)[: len(groups)].tolist(), strict=True))
    dealt = known.copy()
    for part in parts:
        dealt[part] = known[source_of[int(group[part])]]
    return dealt
