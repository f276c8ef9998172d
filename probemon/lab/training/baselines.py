"""Simple monitors that a probe has to beat, cross-fitted on the same texts and folds; and a control.

    found = baselines(data, pooled, embedded)            # {"words": Baseline, ...}
    found["words"].scores                                # [N, P]: of own texts out of fold, of texts elsewhere
    shuffled(data, pooled, seed=0)                       # [P]: AUROC of probes with shuffled labels, about 0.5

Each is a logistic regression on one row for a text: TF-IDF of words, mean state, mean input embedding, length. Its
penalty is the best in hindsight, so a probe that beats it is better by at least that much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.lab.training.crossfit import Doubles
from probemon.lab.training.dataset import ELSEWHERE, N_FOLDS, OUTSIDE, OWN, Dataset
from probemon.lab.training.labels import Known
from probemon.lab.training.logistic import Dense, Features, Targets, fit_logistic, logits
from probemon.lab.training.metrics import auroc_labelled
from probemon.lab.training.states import States
from probemon.lab.training.words import Vocabulary

BASELINES = ("words", "embedding", "mean state", "length")
_PENALTIES = (0.1, 0.01, 1e-3, 1e-4)
_AT_ONCE = 64
_SHUFFLES, _LEAST_SHUFFLES = 20, 4
_FIT = {"tolerance": 1e-4, "most_steps": 60}


def mean_states(states: States, data: Dataset, site: str) -> Tensor:
    """Return the mean prepared state of what counts of each own text and each elsewhere `[N, D]`; NaN for others."""
    use = data.is_of(OWN, ELSEWHERE)
    sums: Tensor | None = None
    for block in states.blocks(site, use):
        if sums is None:
            sums = torch.zeros(len(data.texts), block.x.shape[1], dtype=torch.float64)
        sums.index_add_(0, torch.from_numpy(block.document), block.x.double())
    assert sums is not None
    return (sums / _counts(data, use & states.kept)[:, None]).float()


def mean_embeddings(data: Dataset, table: Tensor) -> Tensor:
    """Return the mean input embedding of what counts of the same texts `[N, D]`."""
    use = data.is_of(OWN, ELSEWHERE)
    means = torch.full((len(data.texts), table.shape[1]), torch.nan)
    for i in np.flatnonzero(use & (_counts(data, use).numpy() > 0)).tolist():
        ids = torch.from_numpy(data.tokens[i].ids[data.wanted[i]])
        means[i] = table[ids.to(table.device)].float().mean(0).cpu()
    return means


def _counts(data: Dataset, use: Mask) -> Tensor:
    counts = [len(positions) if use[i] else 0 for i, positions in enumerate(data.wanted)]
    return torch.tensor(counts, dtype=torch.float64)


def baselines(data: Dataset, pooled: Tensor, embedded: Tensor) -> Mapping[str, Doubles]:
    """Return the scores of each baseline `[N, P]`; NaN for texts that it does not judge."""
    use = data.is_of(OWN, ELSEWHERE) & ~pooled[:, 0].isnan().numpy()
    places = np.flatnonzero(use)
    texts = [data.text_of(i) for i in places.tolist()]
    trains = data.fold[places] != OUTSIDE
    vocabulary = Vocabulary.of([text for text, own in zip(texts, trains, strict=True) if own])
    n_tokens = [len(data.wanted[i]) for i in places]
    lengths = np.log1p(np.stack([n_tokens, [len(text) for text in texts]], axis=1)).astype(np.float32)
    features: dict[str, Features] = {
        "words": vocabulary.features(texts),
        "embedding": _standardised(embedded[places], trains),
        "mean state": _standardised(pooled[places], trains),
        "length": _standardised(torch.from_numpy(lengths), trains),
    }
    found = {}
    for name in BASELINES:
        scores = np.full((len(data.texts), len(data.concepts)), np.nan)
        scores[places] = _cross_fitted(features[name], data, places)
        found[name] = scores
    return found


def shuffled(data: Dataset, pooled: Tensor, *, seed: int) -> Doubles:
    """Return the mean AUROC `[P]`, out of fold, of regressions on mean states with labels shuffled among groups.

    Within each fold: over several, a fold with more of a side, of which the others have less, is under one half.
    """
    places = np.flatnonzero(data.is_of(OWN) & (data.fold >= 0) & ~pooled[:, 0].isnan().numpy())
    features = _standardised(pooled[places], np.ones(len(places), dtype=bool))
    generator = np.random.default_rng([seed, 1])
    labels, areas = data.judged[places], list[Doubles]()
    fold = data.fold[places]
    for _ in range(max(_LEAST_SHUFFLES, math.ceil(_SHUFFLES / labels.shape[1]))):
        known = _shuffled(labels, data.group[places], generator)
        scores = _out_of_fold(features, known, fold, 0.01)
        for k in range(N_FOLDS):
            of_fold = [auroc_labelled(scores[fold == k, p], known[fold == k, p]) for p in range(known.shape[1])]
            areas.append(np.asarray(of_fold))
    table = np.stack(areas)
    known_areas = ~np.isnan(table)
    return np.where(known_areas.any(0), np.where(known_areas, table, 0).sum(0) / known_areas.sum(0).clip(1), np.nan)


def _cross_fitted(features: Features, data: Dataset, places: Ints) -> Doubles:
    """Return scores out of fold, and of texts elsewhere by what learnt from all others `[n, P]`."""
    labels, fold = data.judged[places], data.fold[places]
    best, area = np.full(labels.shape, np.nan), np.full(labels.shape[1], -1.0)
    for penalty in _PENALTIES:
        scores = _out_of_fold(features, labels, fold, penalty)
        for p in range(labels.shape[1]):
            found = auroc_labelled(scores[:, p], np.where(fold >= 0, labels[:, p], -1))
            if np.isnan(found) or found > area[p]:
                best[:, p], area[p] = scores[:, p], max(area[p], np.nan_to_num(found, nan=-1.0))
    return best


def _out_of_fold(features: Features, labels: Known, fold: Ints, penalty: float) -> Doubles:
    n_concepts, scores = labels.shape[1], np.full(labels.shape, np.nan)
    outside = fold == OUTSIDE
    for begin in range(0, n_concepts, _AT_ONCE):
        block = labels[:, begin : begin + _AT_ONCE]
        for k in [*range(N_FOLDS), *([OUTSIDE] if outside.any() else [])]:
            trains = (fold != k) & ~outside
            rows = features.rows(torch.from_numpy(trains))
            targets = Targets(torch.arange(int(trains.sum())), torch.from_numpy(block[trains]))
            l2 = torch.full((block.shape[1],), penalty)
            w, b = fit_logistic(rows, targets, l2, **_FIT)  # type: ignore[arg-type]
            judged = fold == k
            if judged.any():
                values = logits(features.rows(torch.from_numpy(judged)), w, b).double().numpy()
                scores[judged, begin : begin + _AT_ONCE] = values
    return scores


def _standardised(x: Tensor, trains: Mask) -> Dense:
    own = x[torch.from_numpy(trains)]
    return Dense(((x - own.mean(0)) / own.std(0).clamp(min=1e-6)).nan_to_num())


def _shuffled(known: Known, group: Ints, generator: np.random.Generator) -> Known:
    """Each group gets the labels of one labelled text."""
    texts = np.flatnonzero((known >= 0).any(axis=1))
    groups = np.unique(group[texts])
    source = dict(zip(groups.tolist(), generator.permutation(texts)[: len(groups)].tolist(), strict=True))
    dealt = known.copy()
    for i in texts:
        dealt[i] = known[source[int(group[i])]]
    return dealt
