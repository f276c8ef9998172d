"""What trained probes find, and how often they alarm: everything from probes that did not see the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.aggregate import Aggregator, Each, Ema, Max, RollingLogit
from probemon.core.hierarchy import Ints, Mask
from probemon.core.score_counts import N_BINS, ScoreCounts
from probemon.core.scores import Floats
from probemon.host.text_tokens import in_ranges
from probemon.lab.training.baselines import BASELINES, baselines, mean_embeddings, mean_states, shuffled
from probemon.lab.training.calibration import PRECISION, Precise, as_floats, number, precision_thresholds
from probemon.lab.training.contradictions import contradictions
from probemon.lab.training.crossfit import (
    WIDTHS,
    Doubles,
    Found,
    TokenLogits,
    cross_fitted,
    token_logits,
)
from probemon.lab.training.dataset import CARRIED, ELSEWHERE, NEVER, ORDINARY, OUTSIDE, OWN, TEMPLATE, Dataset
from probemon.lab.training.evaluation import difference, judge, share
from probemon.lab.training.metrics import auroc_between, auroc_labelled
from probemon.lab.training.rates import Rate, at_rate, thresholds_at_rate
from probemon.lab.training.running_scores import by_path, highest_running
from probemon.lab.training.settings import TrainingSettings
from probemon.lab.training.states import States
from probemon.lab.training.windows import WindowRows
from probemon.lab.training.words import Vocabulary, places_of

MASKED_CONCEPTS = 64  # for scores without giveaways
OTHER_RATES = (0.02, 0.05)  # of ordinary texts, to show what another threshold finds
OWN_TEXTS = "texts without it"  # the kind, if there is no ordinary text
_CELLS = 1 << 21
WATCHED: tuple[Aggregator, ...] = (*(RollingLogit(width) for width in WIDTHS), Ema(0.3), Max())


@dataclass(frozen=True)
class Final:
    """Probes that learnt from everything: of the prepared states, w `[P, D]`, b `[P]`, with their `mean [P, D]`."""

    w: Tensor
    b: Tensor
    mean: Tensor
    site_of: Sequence[str]


@dataclass(frozen=True)
class Scored:
    """Scores of tokens, texts one after the other: `document`, `position` `[R]`, `scores [R, P]`."""

    document: Ints
    position: Ints
    scores: Floats

    def highest(self, aggregator: Aggregator, n_texts: int) -> Doubles:
        """Return the highest running score of each text `[N, P]`; NaN for one without rows."""
        return highest_running(aggregator, torch.from_numpy(self.scores), torch.from_numpy(self.document), n_texts)


def fitted(states: States, data: Dataset, found: Found) -> tuple[Final, Scored]:
    """Fit on everything; score all tokens of texts in folds by probes that did not see them.

    Both on logits that are scaled so that 0.5 is even odds: of texts with and without, out of fold, weighing the same
    (Platt 1999).
    """
    n_concepts = len(data.concepts)
    w, b, mean = list[Any]([None] * n_concepts), torch.zeros(n_concepts), list[Any]([None] * n_concepts)
    logits: TokenLogits | None = None
    z: np.ndarray | None = None
    for i in sorted(set(found.of)):
        variant, concepts = found.tried[i].variant, [p for p in range(n_concepts) if found.of[p] == i]
        logits = token_logits(states, data, variant, found.tried[i].probes, concepts)
        z = np.empty((len(logits.z), n_concepts), dtype=np.float32) if z is None else z
        highest = logits.highest(variant.width, len(data.texts))
        rows = WindowRows.of(states, data, variant.site, variant.width)
        everything = cross_fitted(rows, data, variant, (NEVER,), concepts)
        for column, p in enumerate(concepts):
            slope, shift = platt(highest[:, column], data.judged[:, p])
            w[p], b[p] = slope * everything.w[0, column], slope * everything.b[0, column] + shift
            mean[p] = rows.x.mean(0)
            z[:, p] = slope * logits.z[:, column] + shift
    assert logits is not None and z is not None
    final = Final(torch.stack(w), b, torch.stack(mean), [found.variant(p).site for p in range(n_concepts)])
    return final, Scored(logits.document, logits.position, _scores(torch.from_numpy(z), data))


def _scores(z: Tensor, data: Dataset) -> Floats:
    """Return the scores of logits `[R, P]`, by the pack's rule."""
    scores: Floats = torch.sigmoid(z).numpy()
    by_path(scores, data.parents)
    return scores


def platt(values: Doubles, known: np.ndarray) -> tuple[float, float]:
    """Return slope and shift of values `[N]`, so that sigmoid(slope * value + shift) tells the labels, balanced.

    With smoothed targets, so that separable texts have a finite slope.
    """
    use = (known >= 0) & np.isfinite(values)
    x, y = values[use], known[use] == 1
    if not y.any() or y.all() or not x.std() > 0:
        return 1.0, 0.0
    n_present, n_absent = int(y.sum()), int((~y).sum())
    target = np.where(y, (n_present + 1) / (n_present + 2), 1 / (n_absent + 2))
    weight = np.where(y, 0.5 / n_present, 0.5 / n_absent)
    middle, spread = x.mean(), x.std()
    z = np.stack([(x - middle) / spread, np.ones_like(x)], axis=1)
    theta = np.zeros(2)
    for _ in range(50):  # Newton steps, damped by a small penalty
        s = 1 / (1 + np.exp(-z @ theta))
        gradient = z.T @ (weight * (s - target)) + 1e-4 * theta
        curvature = (z * (weight * s * (1 - s))[:, None]).T @ z + 1e-4 * np.eye(2)
        step = np.linalg.solve(curvature, gradient)
        theta -= np.clip(step, -2, 2)
        if np.abs(step).max() < 1e-9:
            break
    if theta[0] <= 0.05:  # no probe may be turned round by few texts
        return 1.0, float(-middle)
    return float(theta[0] / spread), float(theta[1] - theta[0] * middle / spread)


def by_final(states: States, data: Dataset, final: Final, use: Mask) -> Scored | None:
    """Score all tokens of texts `use [N]` by the final probes."""
    documents, positions, z = list[Ints](), list[Ints](), list[Tensor]()
    for site in dict.fromkeys(final.site_of):
        concepts = [p for p, own in enumerate(final.site_of) if own == site]
        own_documents, own_positions, values = list[Ints](), list[Ints](), list[Tensor]()
        for block in states.blocks(site, use):
            own_documents.append(block.document)
            own_positions.append(block.position)
            part = torch.zeros(len(block.x), len(final.site_of))
            part[:, concepts] = block.x @ final.w[concepts].T + final.b[concepts]
            values.append(part)
        if not values:
            return None
        documents, positions, z = own_documents, own_positions, [*z, torch.cat(values)]
    return Scored(np.concatenate(documents), np.concatenate(positions), _scores(torch.stack(z).sum(0), data))


@dataclass(frozen=True, kw_only=True)
class TrainingMeasurement:
    """Scores, thresholds and comparisons.

    - `scored`: tokens of own and ordinary texts, out of fold; `elsewhere`: of texts that never trained
    - `highest`: by aggregator the highest running score of each text `[N, P]`
    - `reads`: of each concept the aggregator that it is judged by
    - `of_tokens`, `of_texts`: thresholds and rates of tokens, and of texts by the score that judges them
    - `of_running`: thresholds of texts by aggregator
    """

    data: Dataset
    settings: TrainingSettings
    found: Found
    states: States
    scored: Scored
    elsewhere: Scored | None
    highest: Mapping[str, Doubles]
    reads: Sequence[str]
    baselines: Mapping[str, Doubles]
    shuffled: Doubles
    giveaways: Sequence[Sequence[str]]
    masked: Doubles | None
    of_tokens: Sequence[Rate]
    of_texts: Sequence[Rate]
    of_running: Mapping[str, Doubles]
    of_other_rates: Mapping[float, Doubles]
    precise: Sequence[Precise] | None

    @classmethod
    def of(
        cls,
        data: Dataset,
        states: States,
        found: Found,
        final: Final,
        scored: Scored,
        settings: TrainingSettings,
        embeddings: Tensor,
    ) -> TrainingMeasurement:
        """Score, calibrate and compare."""
        n_texts, n_concepts = len(data.texts), len(data.concepts)
        elsewhere = by_final(states, data, final, data.fold == OUTSIDE)
        own_watch = settings.aggregator
        watched = {str(aggregator): aggregator for aggregator in (*WATCHED, *([own_watch] if own_watch else []))}
        highest, too_short = {}, dict[str, Mask]()
        lengths = np.bincount(scored.document, minlength=n_texts)
        for name, aggregator in watched.items():
            highest[name] = scored.highest(aggregator, n_texts)
            if isinstance(aggregator, RollingLogit):
                too_short[name] = lengths < aggregator.least
            if elsewhere is not None:
                highest[name] = np.where(
                    (data.fold == OUTSIDE)[:, None], elsewhere.highest(aggregator, n_texts), highest[name]
                )
        if own_watch:
            reads = [str(own_watch)] * n_concepts
        else:
            reads = [str(RollingLogit(found.variant(p).width)) for p in range(n_concepts)]
        site = max(final.site_of, key=list(final.site_of).count)
        pooled = mean_states(states, data, site)
        own = np.flatnonzero(data.is_of(OWN) & (data.fold != OUTSIDE))
        vocabulary = Vocabulary.of([data.text_of(int(i)) for i in own])
        giveaways = vocabulary.giveaways([data.text_of(int(i)) for i in own], data.text_known[own])
        kind, kinds = _benign_kinds(data)
        benign = kind >= 0
        tokens = benign[scored.document]
        token_values = np.where(_is_benign(data)[scored.document[tokens]], scored.scores[tokens], np.nan)
        documents = scored.document[tokens]
        text_places = np.flatnonzero(benign & states.kept)

        nowhere = np.zeros(n_texts, dtype=bool)

        def benign_texts(name: str) -> Doubles:
            # A text that is too short for a score sets no threshold.
            use = _is_benign(data)[text_places] & ~too_short.get(name, nowhere)[text_places, None]
            return np.where(use, highest[name][text_places], np.nan)

        of_units = kind[text_places], data.group[text_places], kinds
        judged = np.stack([benign_texts(name)[:, p] for p, name in enumerate(reads)], axis=1)

        return cls(
            data=data,
            settings=settings,
            found=found,
            states=states,
            scored=scored,
            elsewhere=elsewhere,
            highest=highest,
            reads=reads,
            baselines=baselines(data, pooled, mean_embeddings(data, embeddings)),
            shuffled=shuffled(data, pooled, seed=settings.seed),
            giveaways=giveaways,
            masked=_masked(data, scored, reads, giveaways, watched),
            of_tokens=at_rate(token_values, kind[documents], data.group[documents], kinds, fpr=settings.fpr),
            of_texts=at_rate(judged, *of_units, fpr=settings.fpr),
            of_running={name: thresholds_at_rate(benign_texts(name), *of_units, fpr=settings.fpr) for name in highest},
            of_other_rates={rate: thresholds_at_rate(judged, *of_units, fpr=rate) for rate in OTHER_RATES},
            precise=_precise(data, scored, settings),
        )

    def score(self, p: int) -> Doubles:
        """Return the scores of texts by which a concept is judged `[N]`."""
        return self.highest[self.reads[p]][:, p]

    def text_rate(self, p: int) -> Rate:
        """Return the threshold and rate of texts by which a concept is judged."""
        return self.of_texts[p]

    @property
    def alert_sets(self) -> dict[str, Floats]:
        """Alert thresholds of tokens `[P]` by set, the recommended first."""
        rate = {f"rate_{self.settings.fpr:g}": _values(self.of_tokens)}
        if self.precise is None:
            return rate
        precise = {f"{PRECISION}{self.settings.precision:g}": as_floats(self.precise)}
        return {**precise, **rate} if all(entry.reached for entry in self.precise) else {**rate, **precise}

    @property
    def aggregated(self) -> dict[str, Tensor]:
        """Thresholds of running scores `[P]` by aggregator."""
        return {
            name: torch.from_numpy(thresholds.astype(np.float32))
            for name, thresholds in self.of_running.items()
            if name != str(Each()) and not np.isnan(thresholds).all()
        }

    @property
    def score_counts(self) -> dict[str, Tensor]:
        """Score counts at tokens of ordinary text."""
        kind, _ = _benign_kinds(self.data)
        rows = np.flatnonzero(kind[self.scored.document] >= 0)
        counts = ScoreCounts(np.zeros((self.scored.scores.shape[1], N_BINS), dtype=np.int64))
        size = max(1, _CELLS // self.scored.scores.shape[1])
        for begin in range(0, len(rows), size):
            block = rows[begin : begin + size]
            use = _is_benign(self.data)[self.scored.document[block]]
            counts += ScoreCounts.of(np.where(use, self.scored.scores[block], np.float32(np.nan)))
        return {str(Each()): torch.from_numpy(counts.counts.copy())} if counts.n.any() else {}

    def counts(self) -> dict[str, Any]:
        """Return texts and tokens read, and left out by the budget, of each origin."""
        data, found = self.data, {}
        lengths = np.asarray([len(positions) for positions in data.wanted])
        names = {OWN: "examples", CARRIED: "examples in ordinary text", ORDINARY: "ordinary text", TEMPLATE: "template"}
        groups = {name: data.is_of(origin) & (data.fold != OUTSIDE) & ~data.generated for origin, name in names.items()}
        groups |= {"generated": data.generated, "elsewhere": data.is_of(OWN, ELSEWHERE) & (data.fold == OUTSIDE)}
        for name, use in groups.items():
            use = use & (lengths > 0)
            if use.any():
                read = use & self.states.kept
                found[name] = {"texts": int(read.sum()), "tokens": int(lengths[read].sum())}
                if left := int((use & ~read).sum()):
                    tokens = int(lengths[use & ~read].sum())
                    found[name]["left_out"] = {"texts": left, "tokens": tokens}  # type: ignore[assignment]
        return found

    def quality(self) -> dict[str, Any]:
        """Return everything as JSON, for the manifest."""
        data = self.data
        by_concept: dict[str, Any] = {}
        for one in contradictions(data):
            entry = by_concept.setdefault(one.concept, {"texts": 0, "there": one.there, "absent": one.absent})
            entry["texts"] += 1
        ordinary = data.is_of(ORDINARY) & self.states.kept
        lengths = np.asarray([len(positions) for positions in data.wanted])
        return {
            "method": self.settings.method,
            "fpr": self.settings.fpr,
            "alert_sets": list(self.alert_sets),
            "examples": self.counts(),
            "twins": data.n_twins,
            "contradictions": by_concept,
            "ordinary": {
                "texts": int(ordinary.sum()),
                "mean_tokens": round(float(lengths[ordinary].mean()), 1) if ordinary.any() else None,
                "kinds": {name: int((ordinary & (data.kind == k)).sum()) for k, name in enumerate(data.kinds)},
            },
            "tried": [
                {
                    "site": one.variant.site,
                    "scale": one.variant.scale,
                    "width": one.variant.width,
                    "penalty": one.variant.penalty,
                    "merit": one.mean,
                    "standard_error": one.error,
                    "concepts": sum(i == place for i in self.found.of),
                }
                for place, one in enumerate(self.found.tried)
            ],
            "concepts": {concept.id: self._of_concept(p) for p, concept in enumerate(data.concepts)},
        }

    def _of_concept(self, p: int) -> dict[str, Any]:
        data, variant, scores = self.data, self.found.variant(p), self.score(p)
        threshold = np.float32(self.text_rate(p).threshold)
        known = data.judged[:, p]
        own = data.is_of(OWN) & (data.fold >= 0)
        labels = np.where(own, known, -1)
        beside = not (labels == 0).any()
        if beside:  # compared with ordinary text
            labels = np.where(own | data.is_of(ORDINARY), known, -1)
        area = judge(scores, labels, data.group)
        entry: dict[str, Any] = {
            "site": variant.site,
            "scale": variant.scale,
            "width": variant.width,
            "penalty": variant.penalty,
            "reads": self.reads[p],
            "beside_ordinary": beside,
            "n_groups": len(np.unique(data.group[labels >= 0])),
            **area.as_dict(),
            "under_chance": area.under_chance,
            "words_under_chance": judge(self.baselines["words"][:, p], labels, data.group).under_chance,
            "found": self._share_over(scores, threshold, own & (known == 1)),
            "near_over": self._share_over(scores, threshold, own & (known == 0)),
            "at_rates": [self._at_other(p, rate, own & (known >= 0), known) for rate in OTHER_RATES],
            "found_in_text": self._share_over(scores, threshold, data.is_of(CARRIED) & (known == 1)),
            "near": self._near(p, own & (known >= 0)),
            "carried": judge(scores, np.where(data.is_of(CARRIED), known, -1), data.group).as_dict(),
            "against_ordinary": self._against_ordinary(p, own),
            "carried_against_ordinary": self._against_ordinary(p, data.is_of(CARRIED)),
            "pairs_in_order": self._in_order(scores, labels),
            "baselines": {name: number(auroc_labelled(self.baselines[name][:, p], labels)) for name in BASELINES},
            "shuffled": number(float(self.shuffled[p])),
            "without_giveaways": None if self.masked is None else number(auroc_labelled(self.masked[:, p], labels)),
            "giveaways": list(self.giveaways[p]),
            "tokens": self._of_tokens(p),
            "n_generated": int((data.generated & (data.text_known[:, p] == 1)).sum()),
            "alert": {**self.of_tokens[p].as_dict(), "found": self._tokens_over(p, own & (known == 1))},
            "alert_of_texts": self.text_rate(p).as_dict(),
        }
        if self.precise is not None:
            entry["precision"] = self.precise[p].as_dict()
        for name in ("words", "mean state"):
            value, low, high = difference(
                scores, self.baselines[name][:, p], labels, data.group, seed=self.settings.seed
            )
            entry[f"over_{name}"] = {"difference": number(value), "low": low, "high": high}
        outside = (data.fold == OUTSIDE) & data.is_of(OWN, ELSEWHERE)
        if outside.any():
            there = np.where(outside, known, -1)
            value, low, high = difference(
                scores, self.baselines["words"][:, p], there, data.group, seed=self.settings.seed
            )
            entry["outside"] = {
                **judge(scores, there, data.group).as_dict(),
                "found": self._share_over(scores, threshold, there == 1),
                "near_over": self._share_over(scores, threshold, there == 0),
                "baselines": {
                    name: judge(self.baselines[name][:, p], there, data.group).as_dict() for name in BASELINES
                },
                "over_words": {"difference": number(value), "low": low, "high": high},
            }
        return entry

    def _share_over(self, scores: Doubles, threshold: np.floating[Any], use: Mask) -> dict[str, Any]:
        use = use & ~np.isnan(scores)
        return share(scores[use] > threshold, self.data.group[use])

    def _at_other(self, p: int, rate: float, own: Mask, known: np.ndarray) -> dict[str, Any]:
        """Return what is found, and which near misses are over it, at the threshold of another rate."""
        limit, scores = np.float32(self.of_other_rates[rate][p]), self.score(p)
        shares = [self._share_over(scores, limit, own & (known == side)) for side in (1, 0)]
        return {"rate": rate, "found": shares[0], "near_over": shares[1]}

    def _near(self, p: int, own: Mask) -> dict[str, Any]:
        """AUROC of own texts with the concept against those without it in the same groups: its near cases alone."""
        known, group = self.data.judged[:, p], self.data.group
        near = own & np.isin(group, group[own & (known == 1)])
        labels = np.where(near, known, -1).astype(np.int8)
        value, low, high = difference(
            self.score(p), self.baselines["words"][:, p], labels, group, seed=self.settings.seed
        )
        return {
            **judge(self.score(p), labels, group).as_dict(),
            "baselines": {name: number(auroc_labelled(self.baselines[name][:, p], labels)) for name in BASELINES},
            "over_words": {"difference": number(value), "low": low, "high": high},
        }

    def _against_ordinary(self, p: int, texts: Mask) -> dict[str, Any]:
        """AUROC of these texts with the concept against ordinary text that is known to be without it."""
        known = self.data.text_known[:, p]
        plain = self.data.is_of(ORDINARY) & (known == 0)
        labels = np.where(texts & (self.data.judged[:, p] == 1), 1, np.where(plain, 0, -1))
        return judge(self.score(p), labels.astype(np.int8), self.data.group).as_dict()

    def _in_order(self, scores: Doubles, labels: np.ndarray) -> dict[str, Any]:
        """Share of groups with one text of each side in which the text with the concept scores higher."""
        right = []
        groups = self.data.group
        for group in np.unique(groups[labels == 1]):
            with_it, without = (scores[(groups == group) & (labels == side)] for side in (1, 0))
            if len(with_it) == 1 and len(without) == 1 and not np.isnan([*with_it, *without]).any():
                right.append(bool(with_it[0] > without[0]))
        return share(np.asarray(right, dtype=bool), np.arange(len(right)))

    def _of_tokens(self, p: int) -> dict[str, Any] | None:
        """For a concept with spans: AUROC of tokens in its spans against others of the texts, and those of twins."""
        if not self.data.has_spans[p]:
            return None
        scores, document = self.scored.scores[:, p], self.scored.document
        known = self.data.known[self.data.part_of(document, self.scored.position), p]
        own = self.data.is_of(OWN)[document]
        has = np.isin(document, np.unique(document[own & (known == 1)]))
        groups = np.unique(self.data.group[document[own & (known == 1)]])
        twin = own & ~has & np.isin(self.data.group[document], groups) & (known == 0)
        inside, beside = own & (known == 1), own & has & (known == 0)

        def area(others: Mask) -> float | None:
            return number(auroc_between(scores[inside], scores[others]))

        return {"inside": int(inside.sum()), "against_rest": area(beside), "against_twins": area(twin)}

    def _tokens_over(self, p: int, texts: Mask) -> dict[str, Any]:
        """Share of texts with a token over the alert threshold."""
        over = np.zeros(len(texts), dtype=bool)
        over[self.scored.document[self.scored.scores[:, p] > np.float32(self.of_tokens[p].threshold)]] = True
        use = texts & self.states.kept
        return share(over[use], self.data.group[use])


def _values(rates: Sequence[Rate]) -> Floats:
    return np.asarray([rate.threshold for rate in rates], dtype=np.float32)


def _benign_kinds(data: Dataset) -> tuple[Ints, tuple[str, ...]]:
    """Return the kind of each text that thresholds come from `[N]`, else -1: ordinary text, or own ones without it."""
    if data.is_of(ORDINARY).any():
        return data.kind, data.kinds
    return np.where(data.is_of(OWN) & (data.fold >= 0), 0, -1), (OWN_TEXTS,)


def _is_benign(data: Dataset) -> Mask:
    """Return which texts are known to be without each concept `[N, P]`."""
    benign: Mask = data.text_known == 0
    return benign


def _precise(data: Dataset, scored: Scored, settings: TrainingSettings) -> list[Precise] | None:
    if settings.precision is None:
        return None
    use = data.is_of(OWN, ORDINARY) & (data.fold >= 0)
    return precision_thresholds(
        scored.scores, scored.document, data.text_known, use, data.group, precision=settings.precision
    )


def _masked(
    data: Dataset,
    scored: Scored,
    reads: Sequence[str],
    giveaways: Sequence[Sequence[str]],
    watched: Mapping[str, Aggregator],
) -> Doubles | None:
    """Scores of own texts without tokens of giveaway words `[N, P]`, or None."""
    n_concepts, n_texts = len(data.concepts), len(data.texts)
    if n_concepts > MASKED_CONCEPTS or any(len(tokens) and tokens.start.min() < 0 for tokens in data.tokens):
        return None
    masked = np.full((n_texts, n_concepts), np.nan)
    own = (data.is_of(OWN) & (data.fold >= 0))[scored.document]
    documents = np.unique(scored.document[own])
    width = max(map(len, data.tokens)) + 1
    place = scored.document * width + scored.position
    for p in range(n_concepts):
        hidden = [np.zeros(0, dtype=np.int64)]
        for document in documents:
            ranges = places_of(giveaways[p], data.texts[document].text)
            tokens = data.tokens[document]
            hidden.append(document * width + np.flatnonzero(in_ranges(tokens.start, tokens.end, ranges)))
        rows = own & ~np.isin(place, np.concatenate(hidden))
        one = Scored(scored.document[rows], scored.position[rows], scored.scores[rows, p : p + 1])
        masked[:, p] = one.highest(watched[reads[p]], n_texts)[:, 0]
    return masked
