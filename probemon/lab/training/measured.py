"""What can be claimed of trained probes: thresholds from the parts that calibrate, figures from those that test.

    found = Measured.of(data, store, part, fitted, choice, settings, host)
    found.quality()["concepts"]["spam"]["auroc"], found.alert_threshold

Every figure is of the probes as they are written, on parts that chose nothing. Baselines see the same parts.
"""

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
MASKED_CONCEPTS = 64  # of so many, at most, the score without give-away words is taken
BASELINES = ("words", "embedding", "pooled", "length", "position")


@dataclass(frozen=True, kw_only=True)
class TrainingMeasurement:
    """Scores of the parts that did not train, and thresholds.

    - `rows [R]`: rows of the store that were scored; `part [R]` of each; `scores [R, P]` fp32
    - `method` of the probes that are written, and the areas `kinds` by which it was chosen
    - `n_read [S]`: tokens of each part whose states were kept
    - `highest`: by method, the score of each part `[S, P]`: see `part_scores`; NaN of those that train
    - `baselines`: by name, scores of each part `[S, P]`
    - `drawn`: by what learnt from tokens that train, how many of them there was room for, and of how many
    - `of_tokens`, `of_texts`: alert thresholds of single tokens, and of running scores by text
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
        n_parts, of_rows = len(data.known), part[torch.from_numpy(rows)]
        highest = {}
        for method, own in _scores(data, store, fitted, rows):
            highest[method] = part_scores(data, settings.aggregator, torch.from_numpy(own), of_rows)
            if method == fitted.method:
                scores = own
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
            each=part_scores(data, Each(), torch.from_numpy(scores), of_rows),
            mean=part_means(torch.from_numpy(scores), of_rows, n_parts).numpy(),
            masked=_masked(data, settings, scores, parts[rows], position, giveaways),
            baselines=baselines,
            giveaways=giveaways,
            shuffled=controls.shuffled(),
            random=controls.random(),
            drawn={"probes": fitted.learnt_from, "layers": choice.seen, "embeddings": embeddings_seen},
            of_tokens=thresholds(scores, parts[rows], benign, data.group, fpr=settings.fpr),
            # Stretches have no running score, and a rule is not asked of them.
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
        """Alert thresholds of single tokens `[P]` by the name of their set, the recommended one first: that of a
        precision where every concept reaches it.
        """
        rate = {f"rate_{self.settings.fpr:g}": as_floats(self.of_tokens)}
        if self.precise is None:
            return rate
        precise = {f"{PRECISION}{self.settings.precision:g}": as_floats(self.precise)}
        return {**precise, **rate} if all(own.reached for own in self.precise) else {**rate, **precise}

    @property
    def score_counts(self) -> dict[str, Tensor]:
        """How the concepts score at the tokens of texts that calibrate and are without them, as a pack holds it."""
        benign = (self.data.known == 0) & self.data.of("calibrate")[:, None]
        counts = counts_where(benign, self.scores, self.part)
        return {str(Each()): torch.from_numpy(counts.counts.copy())} if counts.n.any() else {}

    @property
    def alert_threshold(self) -> Floats:
        """Those of the recommended set `[P]`."""
        return next(iter(self.alert_sets.values()))

    @property
    def text_threshold(self) -> Floats:
        """Of running scores `[P]`, NaN where the texts are too few for the rate that was asked for."""
        values = as_floats(self.of_texts)
        return np.where([threshold.holds for threshold in self.of_texts], values, np.nan).astype(np.float32)

    def test_of(self, concept: int) -> Mask:
        """The parts that test a concept `[S]`, without the background where it would make it too easy."""
        return self.data.of("test") & (self.data.compared[:, concept] >= 0)

    def counts(self) -> dict[str, Any]:
        """How many texts and tokens of each split were read, as JSON, and for how many the budget had no room."""
        found = {}
        for name in ("train", "calibrate", "test", OUTSIDE):
            kinds = {" background": self.data.background, " generated": self.data.generated}
            for kind, mask in {"": ~self.data.background & ~self.data.generated, **kinds}.items():
                of = self.data.of(name) & mask
                if of.any():
                    texts = len(np.unique(self.data.document[of]))
                    tokens = int(sum(len(self.data.positions[i]) for i in np.flatnonzero(of)))
                    read = {
                        "texts": len(np.unique(self.data.document[of & (self.n_read > 0)])),
                        "tokens": int(self.n_read[of].sum()),
                    }
                    left_out = {"texts": texts - read["texts"], "tokens": tokens - read["tokens"]}
                    found[name + kind] = {**read, "left_out": left_out} if left_out["tokens"] else read
        return found

    def quality(self) -> dict[str, Any]:
        """All of it as JSON, as the pack's manifest has it."""
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
            "drawn": {what: {"tokens": n, "of": n_of} for what, (n, n_of) in self.drawn.items()},
            "contradictions": self._contradictions(),
            "background_fires": self._fires_on_background(),
            "concepts": {concept.id: self._of_concept(p) for p, concept in enumerate(self.data.concepts)},
        }

    def _contradictions(self) -> dict[str, Any]:
        """By concept: how many texts are given with it and without it, and where the first of them is."""
        found: dict[str, Any] = {}
        for one in contradictions(self.data):
            of = found.setdefault(one.concept, {"texts": 0, "there": one.there, "absent": one.absent})
            of["texts"] += 1
        return found

    def _of_concept(self, p: int) -> dict[str, Any]:
        seed, own = self.settings.seed, self.test_of(p)
        known, group = self.data.known[own, p : p + 1], self.data.group[own]

        def area(values: Doubles) -> float | None:
            use = ~np.isnan(values[own, p]) & ~np.isnan(main[own, p])
            return number(auroc_of(values[own, p][use], known[use, 0] == 1))

        main = self.highest[self.method]
        found: dict[str, Any] = {
            "site": self.choice.site_of[p],
            "l2": float(self.choice.l2[p]),
            "beside_background": bool(self.data.beside_background[p]),
            **judge(main[own, p : p + 1], known, group, seed=seed)[0].as_dict(),
            "each": area(self.each),
            "mean": area(self.mean),
            "methods": {method: area(values) for method, values in self.highest.items()},
            "baselines": {name: area(self.baselines[name]) for name in BASELINES},
            "shuffled": number(self.shuffled[p]),
            "random_direction": number(self.random[p]),
            "without_giveaways": None if self.masked is None else area(self.masked),
            "giveaways": self.giveaways[p],
            "n_generated": int(np.unique(self.data.document[self.data.generated & (self.data.known[:, p] == 1)]).size),
            "alert": {**self.of_tokens[p].as_dict(), "test": self._found_by(p, own)},
            "alert_of_texts": self.of_texts[p].as_dict(),
        }
        if self.precise is not None:
            of_test = np.where(self.data.of("test"), self.data.known[:, p], -1)[self.part]
            fires = (self.scores[:, p] > np.float32(self.precise[p].value)) & (of_test >= 0)
            found["precision"] = {**self.precise[p].as_dict(), "test": self._share(of_test[fires] == 1, fires)}
        for name in ("words", "embedding"):
            value, low, high = difference(main[own, p], self.baselines[name][own, p], known[:, 0], group, seed=seed)
            found[f"over_{name}"] = {"difference": number(value), "low": low, "high": high}
        outside = self.data.of(OUTSIDE)
        if outside.any():
            found["outside"] = judge(
                main[outside, p : p + 1], self.data.known[outside, p : p + 1], self.data.group[outside], seed=seed
            )[0].as_dict()
        return found

    def _found_by(self, p: int, own: Mask) -> dict[str, Any]:
        """Shares of the tokens that test which exceed the alert threshold, of parts with and without the concept."""
        found = {}
        fires = self.scores[:, p] > np.float32(self.of_tokens[p].value)
        for name, side in (("with", 1), ("without", 0)):
            use = (own & (self.data.known[:, p] == side))[self.part]
            found[name] = self._share(fires[use], use)
            texts = np.unique(self.part[use])
            found[f"texts_{name}"] = _share(len(np.unique(self.part[use & fires])), len(texts), 1.0)
        return found

    def _share(self, found: Mask, use: Mask) -> dict[str, Any]:
        """The share of tokens `use [R]` that are `found`; its interval knows that those of a group are alike."""
        group = np.unique(self.data.group[self.part[use]], return_inverse=True)[1]
        effect = design_effect(np.bincount(group, found), np.bincount(group)) if len(group) else 1.0
        return _share(int(found.sum()), len(found), effect)

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
    """Return the counts of those scores `[R, P]` whose part's cell in `use [S, P]` is true. They are taken a block of
    rows at a time: what is made of them on the way takes ten times as much memory as they do.
    """
    rows = np.flatnonzero(np.asarray(use.any(axis=1))[part])
    counts = ScoreCounts(np.zeros((scores.shape[1], N_BINS), dtype=np.int64))
    size = max(1, _CELLS // scores.shape[1])
    for begin in range(0, len(rows), size):
        some = rows[begin : begin + size]
        counts += ScoreCounts.of(np.where(use[part[some]], scores[some], np.float32(np.nan)))
    return counts


def _share(count: int, n: int, effect: float) -> dict[str, Any]:
    if not n:
        return {"count": count, "n": n, "rate": None}
    low, high = clustered(count, n, effect)
    return {"count": count, "n": n, "rate": count / n, "low": float(low), "high": float(high)}


def _scores(data: Dataset, store: StateStore, fitted: Fitted, rows: Ints) -> Iterator[tuple[str, Floats]]:
    """Yield the scores `[R, P]` of rows of a store by the probes of each method and the pack's rule: of several methods
    in one pass over the states, where there is room for their scores.
    """
    size = max(1, 4 * len(rows) * len(data.concepts))
    for together in _batches(list(fitted.by_method), max(1, _SCORE_BYTES // size)):
        scores = {method: np.empty((len(rows), len(data.concepts)), dtype=np.float32) for method in together}
        for i, spec in enumerate(fitted.inputs):
            own = np.flatnonzero(fitted.input_of == i)
            states = store.states(spec.site)
            some = {
                method: {name: value[own].float() for name, value in fitted.by_method[method].items()}
                for method in together
            }
            for begin in range(0, len(rows), _CHUNK):
                numbers = torch.from_numpy(rows[begin : begin + _CHUNK])
                x = prepared(states, numbers, spec, fitted.weights["w1"].dtype)
                for method in together:
                    scores[method][begin : begin + _CHUNK, own] = torch.sigmoid(logits_of(x, some[method])).numpy()
        for method in together:
            by_path(scores[method], data.parents)
            yield method, scores.pop(method)


def _batches(names: list[str], n: int) -> list[list[str]]:
    return [names[i : i + n] for i in range(0, len(names), n)]


def _pooled(data: Dataset, store: StateStore, part: Tensor, fitted: Fitted) -> Tensor:
    """The mean prepared state of each part `[S, D]`, at the site that most concepts read; NaN where there is none."""
    most = Counter(fitted.input_of.tolist()).most_common(1)[0][0]
    spec, n_parts = fitted.inputs[most], len(data.known)
    states = store.states(spec.site)
    sums = torch.zeros(n_parts, states.shape[1], dtype=torch.float64)
    for begin in range(0, len(part), _CHUNK):
        rows = torch.arange(begin, min(begin + _CHUNK, len(part)))
        sums.index_add_(0, part[rows], prepared(states, rows, spec, fitted.weights["w1"].dtype).double())
    return sums / torch.bincount(part, minlength=n_parts)[:, None]


def _embedding(
    data: Dataset, store: StateStore, part: Tensor, rows: Ints, settings: TrainingSettings, host: Any
) -> tuple[Doubles, tuple[int, int]]:
    """Scores of parts by probes that read the input embedding of each token alone, learnt and watched as the probes.

    Also from how many tokens those learnt, and of how many.
    """
    table = host.get_input_embeddings().weight.detach()
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
    own = TrainingRows(standard(x), part[used], used, standard, n_of)
    targets = Targets(own.part, torch.from_numpy(data.compared))
    folds = np.full(len(data.known), -1, dtype=np.int64)
    group = np.unique(data.group[train], return_inverse=True)[1].astype(np.int64)
    folds[train] = deal(group, data.compared[train], seed=settings.seed, n_folds=3)
    l2 = best_penalties(cross_validated(Dense(own.x), targets, folds))
    w, b = fit_logistic(Dense(own.x), targets, l2)
    scores = torch.empty(len(rows), len(b))
    for begin in range(0, len(rows), _CHUNK):
        some = ids[torch.from_numpy(rows[begin : begin + _CHUNK])].to(table.device)
        scores[begin : begin + _CHUNK] = torch.sigmoid(standard(table[some].float().cpu()) @ w.T + b)
    return part_scores(data, settings.aggregator, scores, part[torch.from_numpy(rows)]), (len(used), n_of)


def _masked(
    data: Dataset, settings: TrainingSettings, scores: Floats, part: Ints, position: Ints, giveaways: list[list[str]]
) -> Doubles | None:
    """Scores of the parts that test, without the tokens of words that give a concept away; None where that is too much,
    or the tokenizer does not say where tokens stand.
    """
    n_concepts, n_parts = scores.shape[1], len(data.known)
    if n_concepts > MASKED_CONCEPTS or any(len(tokens) and tokens.start.min() < 0 for tokens in data.tokens):
        return None
    found = np.full((n_parts, n_concepts), np.nan)
    of_test = data.of("test")[part]
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
        rows = np.flatnonzero(of_test & ~np.isin(place, np.concatenate(hidden)))
        column = torch.from_numpy(scores[rows, p : p + 1])
        found[:, p] = part_scores(data, settings.aggregator, column, torch.from_numpy(part[rows]))[:, 0]
    return found
