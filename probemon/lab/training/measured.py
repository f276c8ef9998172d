"""Thresholds and quality of trained probes, from the calibration and test parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.aggregate import Each
from probemon.core.hierarchy import Ints, Mask
from probemon.core.intervals import clustered, design_effect
from probemon.core.score_counts import N_BINS, ScoreCounts
from probemon.core.scores import Floats
from probemon.host.text_tokens import in_ranges
from probemon.lab.training.calibration import (
    PRECISION,
    Precise,
    Threshold,
    as_floats,
    number,
    precision_thresholds,
    thresholds,
)
from probemon.lab.training.choice import LayerChoice
from probemon.lab.training.contradictions import contradictions
from probemon.lab.training.controls import Controls
from probemon.lab.training.crossvalidation import Doubles, best_penalties, cross_validated, deal, part_means
from probemon.lab.training.dataset import OUTSIDE, Dataset
from probemon.lab.training.evaluation import difference, judge
from probemon.lab.training.fitting import Fitted, TrainingRows, prepared
from probemon.lab.training.logistic import Dense, Targets, fit_logistic
from probemon.lab.training.metrics import auroc_of
from probemon.lab.training.path_loss import logits_of
from probemon.lab.training.running_scores import by_path, part_scores
from probemon.lab.training.settings import TrainingSettings
from probemon.lab.training.standard import Standard
from probemon.lab.training.state_store import StateStore
from probemon.lab.training.words import places_of

_CHUNK, _CELLS = 1 << 14, 1 << 21
_EMBEDDING_BYTES, _SCORE_BYTES = 16 << 20, 1 << 30
MASKED_CONCEPTS = 64  # for scores without giveaways
BASELINES = ("words", "embedding", "pooled", "length", "position")


@dataclass(frozen=True, kw_only=True)
class TrainingMeasurement:
    """Scores of the parts that did not train, and thresholds.

    - `rows [R]`: scored rows of the store; `part [R]`; `scores [R, P]` fp32
    - `method` of the written probes; `kinds`: areas of the candidates
    - `n_read [S]`: stored tokens of each part
    - `highest`, `baselines`: scores of parts `[S, P]` by method or name; NaN for training parts
    - `drawn`: training tokens used and available
    - `of_tokens`, `of_texts`: thresholds of tokens, and of running scores
    """

    data: Dataset
    settings: TrainingSettings
    choice: LayerChoice
    method: str
    kinds: Mapping[str, float]
    rows: Ints
    part: Ints
    position: Ints
    n_read: Ints
    scores: Floats
    highest: Mapping[str, Doubles]
    each: Doubles
    mean: Doubles
    masked: Doubles | None
    baselines: Mapping[str, Doubles]
    giveaways: list[list[str]]
    shuffled: Doubles
    random: Doubles
    drawn: Mapping[str, tuple[int, int]]
    of_tokens: list[Threshold]
    of_texts: list[Threshold]
    precise: list[Precise] | None

    @classmethod
    def of(
        cls,
        data: Dataset,
        store: StateStore,
        part: Tensor,
        fitted: Fitted,
        choice: LayerChoice,
        settings: TrainingSettings,
        host: Any,
    ) -> TrainingMeasurement:
        """Score, calibrate and compare."""
        parts = part.numpy()
        rows = np.flatnonzero(data.of("calibrate", "test", OUTSIDE)[parts])
        n_parts, row_parts = len(data.known), part[torch.from_numpy(rows)]
        highest = {}
        for method, method_scores in _scores(data, store, fitted, rows):
            highest[method] = part_scores(data, settings.aggregator, torch.from_numpy(method_scores), row_parts)
            if method == fitted.method:
                scores = method_scores
        controls = Controls(data, _pooled(data, store, part, fitted), seed=settings.seed)
        giveaways = controls.vocabulary.giveaways(
            [data.text_of(int(i)) for i in np.flatnonzero(controls.train)], data.compared[controls.train]
        )
        embedding, embeddings_seen = _embedding(data, store, part, rows, settings, host)
        baselines = {
            "words": controls.words(),
            "pooled": controls.pooled(),
            "length": controls.length(),
            "position": controls.position(),
            "embedding": embedding,
        }
        benign = (data.known == 0) & data.of("calibrate")[:, None]
        position = store.position[rows]
        return cls(
            data=data,
            settings=settings,
            choice=choice,
            method=fitted.method,
            kinds=fitted.areas,
            rows=rows,
            part=parts[rows],
            position=position,
            n_read=np.bincount(parts, minlength=n_parts),
            scores=scores,
            highest=highest,
            each=part_scores(data, Each(), torch.from_numpy(scores), row_parts),
            mean=part_means(torch.from_numpy(scores), row_parts, n_parts).numpy(),
            masked=_masked(data, settings, scores, parts[rows], position, giveaways),
            baselines=baselines,
            giveaways=giveaways,
            shuffled=controls.shuffled(),
            random=controls.random(),
            drawn={"probes": fitted.learnt_from, "layers": choice.seen, "embeddings": embeddings_seen},
            of_tokens=thresholds(scores, parts[rows], benign, data.group, fpr=settings.fpr),
            # Spans have no running score.
            of_texts=thresholds(
                highest[fitted.method],
                np.arange(n_parts),
                benign & ~data.of_span[:, None],
                data.group,
                fpr=settings.fpr,
            ),
            precise=None
            if settings.precision is None
            else precision_thresholds(
                scores, parts[rows], data.known, data.of("calibrate"), data.group, precision=settings.precision
            ),
        )

    @property
    def alert_sets(self) -> dict[str, Floats]:
        """Alert thresholds of tokens `[P]` by set, the recommended first."""
        rate = {f"rate_{self.settings.fpr:g}": as_floats(self.of_tokens)}
        if self.precise is None:
            return rate
        precise = {f"{PRECISION}{self.settings.precision:g}": as_floats(self.precise)}
        return {**precise, **rate} if all(entry.reached for entry in self.precise) else {**rate, **precise}

    @property
    def score_counts(self) -> dict[str, Tensor]:
        """Score counts at calibration tokens without the concepts."""
        benign = (self.data.known == 0) & self.data.of("calibrate")[:, None]
        counts = counts_where(benign, self.scores, self.part)
        return {str(Each()): torch.from_numpy(counts.counts.copy())} if counts.n.any() else {}

    @property
    def alert_threshold(self) -> Floats:
        """The recommended set `[P]`."""
        return next(iter(self.alert_sets.values()))

    @property
    def text_threshold(self) -> Floats:
        """Of running scores `[P]`; NaN with too few texts for the rate."""
        values = as_floats(self.of_texts)
        return np.where([threshold.holds for threshold in self.of_texts], values, np.nan).astype(np.float32)

    def test_of(self, concept: int) -> Mask:
        """Test parts of a concept `[S]`, without easy background."""
        return self.data.of("test") & (self.data.compared[:, concept] >= 0)

    def counts(self) -> dict[str, Any]:
        """Return texts and tokens read, and left out by the budget, of each split."""
        by_split = {}
        for name in ("train", "calibrate", "test", OUTSIDE):
            kinds = {" background": self.data.background, " generated": self.data.generated}
            for kind, mask in {"": ~self.data.background & ~self.data.generated, **kinds}.items():
                chosen = self.data.of(name) & mask
                if chosen.any():
                    texts = len(np.unique(self.data.document[chosen]))
                    tokens = int(sum(len(self.data.positions[i]) for i in np.flatnonzero(chosen)))
                    read_counts = {
                        "texts": len(np.unique(self.data.document[chosen & (self.n_read > 0)])),
                        "tokens": int(self.n_read[chosen].sum()),
                    }
                    left_out = {"texts": texts - read_counts["texts"], "tokens": tokens - read_counts["tokens"]}
                    by_split[name + kind] = {**read_counts, "left_out": left_out} if left_out["tokens"] else read_counts
        return by_split

    def quality(self) -> dict[str, Any]:
        """Return everything as JSON, for the manifest."""
        choice = self.choice
        return {
            "sites": [
                {"site": site, "auroc": auroc, "standard_error": error}
                for site, (auroc, error) in zip(choice.sites, choice.curve, strict=True)
            ],
            "watch": str(self.settings.aggregator),
            "method": self.method,
            "kinds": dict(self.kinds),
            "fpr": self.settings.fpr,
            "alert_sets": list(self.alert_sets),
            "examples": self.counts(),
            "drawn": {use: {"tokens": n, "of": n_of} for use, (n, n_of) in self.drawn.items()},
            "contradictions": self._contradictions(),
            "background_fires": self._fires_on_background(),
            "concepts": {concept.id: self._of_concept(p) for p, concept in enumerate(self.data.concepts)},
        }

    def _contradictions(self) -> dict[str, Any]:
        by_concept: dict[str, Any] = {}
        for contradiction in contradictions(self.data):
            entry = by_concept.setdefault(
                contradiction.concept, {"texts": 0, "there": contradiction.there, "absent": contradiction.absent}
            )
            entry["texts"] += 1
        return by_concept

    def _of_concept(self, p: int) -> dict[str, Any]:
        seed, tested = self.settings.seed, self.test_of(p)
        known, group = self.data.known[tested, p : p + 1], self.data.group[tested]

        def area(values: Doubles) -> float | None:
            use = ~np.isnan(values[tested, p]) & ~np.isnan(main[tested, p])
            return number(auroc_of(values[tested, p][use], known[use, 0] == 1))

        main = self.highest[self.method]
        entry: dict[str, Any] = {
            "site": self.choice.site_of[p],
            "l2": float(self.choice.l2[p]),
            "beside_background": bool(self.data.beside_background[p]),
            **judge(main[tested, p : p + 1], known, group, seed=seed)[0].as_dict(),
            "each": area(self.each),
            "mean": area(self.mean),
            "methods": {method: area(values) for method, values in self.highest.items()},
            "baselines": {name: area(self.baselines[name]) for name in BASELINES},
            "shuffled": number(self.shuffled[p]),
            "random_direction": number(self.random[p]),
            "without_giveaways": None if self.masked is None else area(self.masked),
            "giveaways": self.giveaways[p],
            "n_generated": int(np.unique(self.data.document[self.data.generated & (self.data.known[:, p] == 1)]).size),
            "alert": {**self.of_tokens[p].as_dict(), "test": self._found_by(p, tested)},
            "alert_of_texts": self.of_texts[p].as_dict(),
        }
        if self.precise is not None:
            test_labels = np.where(self.data.of("test"), self.data.known[:, p], -1)[self.part]
            fires = (self.scores[:, p] > np.float32(self.precise[p].value)) & (test_labels >= 0)
            entry["precision"] = {**self.precise[p].as_dict(), "test": self._share(test_labels[fires] == 1, fires)}
        for name in ("words", "embedding"):
            value, low, high = difference(
                main[tested, p], self.baselines[name][tested, p], known[:, 0], group, seed=seed
            )
            entry[f"over_{name}"] = {"difference": number(value), "low": low, "high": high}
        outside = self.data.of(OUTSIDE)
        if outside.any():
            entry["outside"] = judge(
                main[outside, p : p + 1], self.data.known[outside, p : p + 1], self.data.group[outside], seed=seed
            )[0].as_dict()
        return entry

    def _found_by(self, p: int, tested: Mask) -> dict[str, Any]:
        """Shares of test tokens over the alert threshold."""
        shares = {}
        fires = self.scores[:, p] > np.float32(self.of_tokens[p].value)
        for name, side in (("with", 1), ("without", 0)):
            use = (tested & (self.data.known[:, p] == side))[self.part]
            shares[name] = self._share(fires[use], use)
            texts = np.unique(self.part[use])
            shares[f"texts_{name}"] = _share(len(np.unique(self.part[use & fires])), len(texts), 1.0)
        return shares

    def _share(self, hits: Mask, use: Mask) -> dict[str, Any]:
        """Share of `hits` among tokens `use [R]`, with an interval by groups."""
        group = np.unique(self.data.group[self.part[use]], return_inverse=True)[1]
        effect = design_effect(np.bincount(group, hits), np.bincount(group)) if len(group) else 1.0
        return _share(int(hits.sum()), len(hits), effect)

    def _fires_on_background(self) -> dict[str, Any] | None:
        use = (self.data.of("test") & self.data.background)[self.part]
        if not use.any():
            return None
        fires = self.scores[use] > self.alert_threshold
        return {
            "tokens": int(use.sum()),
            "per_token": float(fires.sum(axis=1).mean()),
            "share_of_tokens": float(fires.any(axis=1).mean()),
        }


def counts_where(use: Mask, scores: Floats, part: Ints) -> ScoreCounts:
    """Count the scores `[R, P]` with a true cell in `use [S, P]`, in blocks to save memory."""
    rows = np.flatnonzero(np.asarray(use.any(axis=1))[part])
    counts = ScoreCounts(np.zeros((scores.shape[1], N_BINS), dtype=np.int64))
    size = max(1, _CELLS // scores.shape[1])
    for begin in range(0, len(rows), size):
        block = rows[begin : begin + size]
        counts += ScoreCounts.of(np.where(use[part[block]], scores[block], np.float32(np.nan)))
    return counts


def _share(count: int, n: int, effect: float) -> dict[str, Any]:
    if not n:
        return {"count": count, "n": n, "rate": None}
    low, high = clustered(count, n, effect)
    return {"count": count, "n": n, "rate": count / n, "low": float(low), "high": float(high)}


def _scores(data: Dataset, store: StateStore, fitted: Fitted, rows: Ints) -> Iterator[tuple[str, Floats]]:
    """Yield scores `[R, P]` by method, in one pass over the states if memory allows."""
    size = max(1, 4 * len(rows) * len(data.concepts))
    for methods in _batches(list(fitted.by_method), max(1, _SCORE_BYTES // size)):
        scores = {method: np.empty((len(rows), len(data.concepts)), dtype=np.float32) for method in methods}
        for i, spec in enumerate(fitted.inputs):
            concepts = np.flatnonzero(fitted.input_of == i)
            states = store.states(spec.site)
            by_input = {
                method: {name: value[concepts].float() for name, value in fitted.by_method[method].items()}
                for method in methods
            }
            for begin in range(0, len(rows), _CHUNK):
                numbers = torch.from_numpy(rows[begin : begin + _CHUNK])
                x = prepared(states, numbers, spec, fitted.weights["w1"].dtype)
                for method in methods:
                    scores[method][begin : begin + _CHUNK, concepts] = torch.sigmoid(
                        logits_of(x, by_input[method])
                    ).numpy()
        for method in methods:
            by_path(scores[method], data.parents)
            yield method, scores.pop(method)


def _batches(names: list[str], n: int) -> list[list[str]]:
    return [names[i : i + n] for i in range(0, len(names), n)]


def _pooled(data: Dataset, store: StateStore, part: Tensor, fitted: Fitted) -> Tensor:
    """Mean prepared state of each part `[S, D]` at the most used site, or NaN."""
    most_used = Counter(fitted.input_of.tolist()).most_common(1)[0][0]
    spec, n_parts = fitted.inputs[most_used], len(data.known)
    states = store.states(spec.site)
    sums = torch.zeros(n_parts, states.shape[1], dtype=torch.float64)
    for begin in range(0, len(part), _CHUNK):
        rows = torch.arange(begin, min(begin + _CHUNK, len(part)))
        sums.index_add_(0, part[rows], prepared(states, rows, spec, fitted.weights["w1"].dtype).double())
    return sums / torch.bincount(part, minlength=n_parts)[:, None]


def _embedding(
    data: Dataset, store: StateStore, part: Tensor, rows: Ints, settings: TrainingSettings, decoder: Any
) -> tuple[Doubles, tuple[int, int]]:
    """Scores of probes on input embeddings; tokens used and available."""
    table = decoder.get_input_embeddings().weight.detach()
    ids = torch.from_numpy(
        np.concatenate([tokens.ids for tokens in data.tokens])[
            np.cumsum([0, *map(len, data.tokens)])[store.document] + store.position
        ]
    )
    train = data.of("train") & (data.compared >= 0).any(axis=1)
    used = torch.from_numpy(np.flatnonzero(train[part.numpy()]))
    n_of, most = len(used), max(1, _EMBEDDING_BYTES // (4 * table.shape[1]))
    if n_of > most:
        used = used[torch.linspace(0, len(used) - 1, most).long()]
    x = table[ids[used].to(table.device)].float().cpu()
    standard = Standard.of(x)
    training = TrainingRows(standard(x), part[used], used, standard, n_of)
    targets = Targets(training.part, torch.from_numpy(data.compared))
    folds = np.full(len(data.known), -1, dtype=np.int64)
    group = np.unique(data.group[train], return_inverse=True)[1].astype(np.int64)
    folds[train] = deal(group, data.compared[train], seed=settings.seed, n_folds=3)
    l2 = best_penalties(cross_validated(Dense(training.x), targets, folds))
    w, b = fit_logistic(Dense(training.x), targets, l2)
    scores = torch.empty(len(rows), len(b))
    for begin in range(0, len(rows), _CHUNK):
        chunk_ids = ids[torch.from_numpy(rows[begin : begin + _CHUNK])].to(table.device)
        scores[begin : begin + _CHUNK] = torch.sigmoid(standard(table[chunk_ids].float().cpu()) @ w.T + b)
    return part_scores(data, settings.aggregator, scores, part[torch.from_numpy(rows)]), (len(used), n_of)


def _masked(
    data: Dataset, settings: TrainingSettings, scores: Floats, part: Ints, position: Ints, giveaways: list[list[str]]
) -> Doubles | None:
    """Scores of test parts without tokens of giveaway words, or None."""
    n_concepts, n_parts = scores.shape[1], len(data.known)
    if n_concepts > MASKED_CONCEPTS or any(len(tokens) and tokens.start.min() < 0 for tokens in data.tokens):
        return None
    result = np.full((n_parts, n_concepts), np.nan)
    is_test = data.of("test")[part]
    documents = np.unique(data.document[data.of("test")])
    width = max(map(len, data.tokens)) + 1
    place = data.document[part] * width + position
    for p in range(n_concepts):
        hidden = [np.zeros(0, dtype=np.int64)]
        for document in documents:
            ranges = places_of(giveaways[p], data.texts[document].text)
            hidden.append(
                document * width
                + np.flatnonzero(in_ranges(data.tokens[document].start, data.tokens[document].end, ranges))
            )
        rows = np.flatnonzero(is_test & ~np.isin(place, np.concatenate(hidden)))
        column = torch.from_numpy(scores[rows, p : p + 1])
        result[:, p] = part_scores(data, settings.aggregator, column, torch.from_numpy(part[rows]))[:, 0]
    return result
