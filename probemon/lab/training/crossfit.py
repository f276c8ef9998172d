"""Scores texts by probes that did not see them, and chooses how to read by these scores.

    found = search(states, data, sites, say=...)
    found.variant(p)          # of a concept: its site, scale, width and penalty
    found.tried               # what was tried

A variant is simpler if its layer is earlier, its scale "std" rather than "white", its penalty larger, its width that of
a stretch (16 tokens) rather than that of a text (64). One for all concepts is chosen: the simplest within one standard
error of the best, over folds (Breiman, Friedman, Olshen & Stone 1984). In a flat pack a concept may take another if it
gains clearly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probemon.lab.training.dataset import CARRIED, N_FOLDS, ORDINARY, OWN, Dataset
from probemon.lab.training.metrics import auroc_between
from probemon.lab.training.recipe import PENALTIES, SCALES, Scale, Shares, fit
from probemon.lab.training.states import States
from probemon.lab.training.windows import WindowRows

STRETCH, TEXT = 16, 64  # tokens of a running mean
WIDTHS = (STRETCH, TEXT)
_CLEARLY = 0.01
_RATE = 0.01  # of ordinary texts, for comparisons
Doubles = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Variant:
    """How probes read: the site, the scale of `Scale`, tokens of the running mean, and the penalty of the fit."""

    site: str
    scale: str = "std"
    width: int = STRETCH
    penalty: float = PENALTIES[0]

    def __str__(self) -> str:
        return f"{self.site}, {self.scale}, {self.width} tokens, penalty {self.penalty:g}"


@dataclass(frozen=True)
class Probes:
    """Probes of the prepared states of a variant: by fold w `[F, P, D]`, b `[F, P]`."""

    w: Tensor
    b: Tensor


@dataclass(frozen=True)
class Tried:
    """A variant's merit by fold and concept `[K, P]` (NaN where a fold lacks a side) and its probes."""

    variant: Variant
    merit: Doubles
    probes: Probes

    @property
    def mean(self) -> float:
        return float(np.nanmean(self.merit)) if (~np.isnan(self.merit)).any() else 0.5

    @property
    def error(self) -> float:
        """Standard error over folds."""
        return _mean_and_error(self.merit)[1]


@dataclass(frozen=True)
class Found:
    """`tried`, in order; `of [P]`: the place in it of each concept's variant."""

    tried: Sequence[Tried]
    of: Sequence[int]

    def variant(self, p: int) -> Variant:
        return self.tried[self.of[p]].variant


def search(
    states: States, data: Dataset, sites: Sequence[str], *, method: str = "auto", say: Callable[[str], None]
) -> Found:
    """Cross-fit and judge variants: first layers, then at the best layer scales and penalties, then widths."""
    tried: list[Tried] = []
    rows: dict[tuple[str, int], WindowRows] = {}

    def judge(variant: Variant) -> None:
        key = (variant.site, variant.width)
        if key not in rows:
            rows.clear()  # memory
            rows[key] = WindowRows.of(states, data, *key)
        probes = cross_fitted(rows[key], data, variant)
        scores = text_scores(states, data, variant, probes)
        tried.append(Tried(variant, merits(data, scores), probes))
        say(f"{variant}: merit {tried[-1].mean:.3f}")

    for site in sites:
        judge(Variant(site))
    best = simplest(tried)
    site = tried[best].variant.site

    def best_at_site() -> int:
        at_site = [i for i, one in enumerate(tried) if one.variant.site == site]
        return at_site[simplest([tried[i] for i in at_site])]

    if method == "auto":
        for scale in SCALES:
            for penalty in PENALTIES:
                if (variant := Variant(site, scale, penalty=penalty)) not in [one.variant for one in tried]:
                    judge(variant)
        best = best_at_site()
        judge(replace(tried[best].variant, width=TEXT))
        best = best_at_site()
    of = [best] * len(data.concepts)
    if not data.is_tree:
        for p in range(len(of)):
            of[p] = _own_choice(tried, best, p)
    say(f"chosen: {tried[best].variant}")
    return Found(tried, of)


def cross_fitted(
    rows: WindowRows,
    data: Dataset,
    variant: Variant,
    folds: Sequence[int] = range(N_FOLDS),
    concepts: Sequence[int] | None = None,
) -> Probes:
    """Return the probes of each fold, of these concepts or of all; of fold -1 those that saw everything."""
    scale = Scale.of(rows, data, variant.scale)
    concepts = range(len(data.concepts)) if concepts is None else concepts
    return Probes(*fit(rows, scale, Shares.of(rows, data), data, concepts, folds, penalty=variant.penalty))


def token_logits(
    states: States, data: Dataset, variant: Variant, probes: Probes, concepts: Sequence[int]
) -> TokenLogits:
    """Score all kept tokens of texts that have a fold."""
    documents, positions, z = list[np.ndarray](), list[np.ndarray](), list[Tensor]()
    w, b = probes.w[:, list(concepts)], probes.b[:, list(concepts)]
    for block in states.blocks(variant.site, (data.fold >= 0) & states.kept):
        fold = data.fold[block.document]
        values = torch.empty(len(block.x), len(concepts))
        for k in np.unique(fold).tolist():
            chosen = torch.from_numpy(fold == k)
            values[chosen] = block.x[chosen] @ w[k].T + b[k]
        documents.append(block.document)
        positions.append(block.position)
        z.append(values)
    return TokenLogits(np.concatenate(documents), np.concatenate(positions), torch.cat(z).numpy())


@dataclass(frozen=True)
class TokenLogits:
    """Logits `z [R, P]` of tokens, texts one after the other; `document`, `position` `[R]`."""

    document: np.ndarray
    position: np.ndarray
    z: np.ndarray

    def highest(self, width: int, n_texts: int) -> Doubles:
        """Return the highest running mean of `width` logits by text `[N, P]`: -inf for one under half as long, NaN for
        texts without rows.
        """
        found = np.full((n_texts, self.z.shape[1]), np.nan)
        first = np.flatnonzero(np.diff(self.document, prepend=-1))
        for begin, end in zip(first, [*first[1:], len(self.document)], strict=True):
            found[self.document[begin]] = highest_mean(self.z[begin:end], width)
        return found


def highest_mean(z: np.ndarray, width: int) -> Doubles:
    """Return the highest mean of the last `width` rows of z `[n, P]`, from half of that on; as `RollingLogit`."""
    total = np.cumsum(z, axis=0, dtype=np.float64)
    ends = np.arange(1, len(z) + 1)
    counts = np.minimum(ends, width)
    means = total / counts[:, None]
    means[width:] -= total[:-width] / width
    means = means[2 * counts >= width]
    return means.max(axis=0) if len(means) else np.full(z.shape[1], -np.inf)


def text_scores(states: States, data: Dataset, variant: Variant, probes: Probes) -> Doubles:
    """Return the score of each text out of fold `[N, P]`."""
    logits = token_logits(states, data, variant, probes, range(len(data.concepts)))
    return logits.highest(variant.width, len(data.texts))


def merits(data: Dataset, scores: Doubles) -> Doubles:
    """Return by fold and concept `[K, P]` the mean of AUROC against own negatives, and of the balanced accuracy at the
    threshold of one alarm in 100 ordinary texts; both for texts alone and in carriers. NaN where nothing can be judged.
    """
    known, table = data.text_known, np.full((N_FOLDS, len(data.concepts)), np.nan)
    ordinary = data.is_of(ORDINARY)
    origins = [data.is_of(OWN), data.is_of(CARRIED)]
    for p in range(len(data.concepts)):
        own = data.judged[:, p]
        plain = scores[ordinary & (own == 0), p]
        plain = plain[~np.isnan(plain)]
        limit = np.quantile(plain, 1 - _RATE, method="higher") if len(plain) else None
        for k in range(N_FOLDS):
            values = []
            for origin in origins:
                use = origin & (data.fold == k) & ~np.isnan(scores[:, p]) & (known[:, p] >= 0)
                positive = own[use] == 1
                s = scores[use, p]
                if positive.any():
                    own_negatives = s[own[use] == 0]
                    against = own_negatives if len(own_negatives) else plain
                    if len(against):
                        values.append(auroc_between(s[positive], against))
                    if limit is not None:
                        values.append(float(1 + (s[positive] > limit).mean() - (against > limit).mean()) / 2)
            if values:
                table[k, p] = np.mean(values)
    return table


def simplest(tried: Sequence[Tried]) -> int:
    """Return the first within one standard error, over folds, of the best."""
    best = max(range(len(tried)), key=lambda i: tried[i].mean)
    for i, one in enumerate(tried):
        gain = tried[best].merit - one.merit
        mean, error = _mean_and_error(gain)
        if mean <= error or i == best:
            return i
    return best


def _own_choice(tried: Sequence[Tried], chosen: int, p: int) -> int:
    """Return a concept's variant: another than `chosen` if it gains two standard errors and `_CLEARLY`."""
    best, most = chosen, 0.0
    for i, one in enumerate(tried):
        mean, error = _mean_and_error((one.merit - tried[chosen].merit)[:, p : p + 1])
        if mean > 2 * error + _CLEARLY and mean > most:
            best, most = i, mean
    return best


def _mean_and_error(values: Doubles) -> tuple[float, float]:
    if np.isnan(values).all():
        return 0.0, 0.0
    folds = np.asarray([row[~np.isnan(row)].mean() for row in values if (~np.isnan(row)).any()])
    return float(folds.mean()), float(folds.std(ddof=1) / np.sqrt(len(folds))) if len(folds) > 1 else 0.0
