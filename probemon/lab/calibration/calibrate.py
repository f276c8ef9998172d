"""Calibrates alert thresholds to a false-positive rate, after aggregation.

    # scores [T, K] of K watched concepts
    alerts = calibrate_alerts(benign, fpr=0.01, aggregate=Ema(0.3), positives=[(scores, None), ...])
    alerts.threshold, alerts.documents.high, alerts.positive_documents.rate

Of n benign units at most k may exceed a threshold: k is the largest number whose upper bound (Clopper-Pearson) is
within the rate asked for, and the threshold is the (k + 1)-th largest value. For independent units the rate is then
within what was asked, whatever the distribution of the scores, but for a chance of 1 - confidence (a tolerance limit:
Wilks 1941, "Determination of sample sizes for setting tolerance limits", Ann. Math. Statist. 12). The K concepts share
that chance, so that all thresholds hold together (Bonferroni).

A unit is a token or a document. Documents drawn alike are independent; tokens of one document are not. So the bound of
`unit="token"`, that of as many independent tokens, is too narrow where few documents make many tokens: both rates are
counted, to show this. A running score begins at a document's first token, that of a rule at the first token generated:
calibrate on texts such as the model will generate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.core.aggregate import Aggregator, named, over
from probemon.core.baselines import refuse_baseline
from probemon.core.hierarchy import Ints, Mask
from probemon.core.intervals import at_most, lower_bound, upper_bound
from probemon.core.scores import Floats
from probemon.errors import CalibrationError, ConfigError
from probemon.util.checks import check_share

UNITS = ("token", "document")
_COLUMNS = 16  # concepts sorted at once: bounds the second copy of their values


@dataclass(frozen=True)
class Rates:
    """Shares of units that exceed a threshold, `[K]` each: `count` of `n`.

    - `low`, `high`: bounds (Clopper-Pearson), each passed with probability `risk` at most.
    - `least`: how many units the threshold was chosen to allow, where ties or rounding left fewer.
    """

    count: Ints
    n: Ints
    risk: float
    least: int = 0

    @property
    def rate(self) -> npt.NDArray[np.float64]:
        """`count / n`, NaN where there are no units."""
        return np.divide(self.count, self.n, out=np.full(self.count.shape, np.nan), where=self.n > 0)

    @cached_property
    def low(self) -> npt.NDArray[np.float64]:
        return np.asarray(lower_bound(self.count, self.n, 1 - self.risk))

    @cached_property
    def high(self) -> npt.NDArray[np.float64]:
        """Upper bounds, none below that of `least` units."""
        return np.asarray(upper_bound(np.maximum(self.count, np.minimum(self.least, self.n)), self.n, 1 - self.risk))

    @classmethod
    def of(cls, count: Any, n: Any, risk: float, least: int = 0) -> Rates:
        """Make them of counts and a number of units, the same or one for each."""
        counts, units = np.broadcast_arrays(np.asarray(count, dtype=np.int64), np.asarray(n, dtype=np.int64))
        return cls(counts, units, risk, least)

    def entry(self, i: int) -> dict[str, Any]:
        """Return those of concept i, as JSON."""
        rate = float(self.rate[i])
        return {
            "count": int(self.count[i]),
            "n": int(self.n[i]),
            "rate": None if math.isnan(rate) else rate,
            "low": float(self.low[i]),
            "high": float(self.high[i]),
        }


@dataclass(frozen=True)
class CalibratedAlerts:
    """Alert thresholds `[K]` fp32 and what they were made from. A score exceeds one strictly; none exceeds 1.

    - `tokens`, `documents`: benign tokens over the threshold, and documents with any such token.
    - `any_token`, `any_document`: those over the threshold of any of the K (one entry).
    - `positive_tokens`, `positive_documents`: the same of the positive ones; None without positives.

    Each bound holds with probability 1 - (1 - confidence) / K, those of `any_*` with `confidence`. Bounds of the unit
    that was not calibrated are of thresholds chosen on the same documents.
    """

    aggregator: Aggregator
    unit: str
    fpr: float
    confidence: float
    family: bool
    allowed: int
    n_tokens: int
    n_documents: int
    threshold: Floats
    tokens: Rates
    documents: Rates
    any_token: Rates
    any_document: Rates
    positive_tokens: Rates | None
    positive_documents: Rates | None

    def stated(self) -> dict[str, Any]:
        """Return what was asked for and from how much, as JSON."""
        return {
            "aggregator": str(self.aggregator),
            "unit": self.unit,
            "fpr": self.fpr,
            "confidence": self.confidence,
            "n_watched": len(self.threshold),
            "correction": (
                f"Bonferroni over {len(self.threshold)} concepts"
                + (", of the rate too (family)" if self.family else "")
            ),
            "family": self.family,
            "allowed": self.allowed,
            "n_tokens": self.n_tokens,
            "n_documents": self.n_documents,
        }

    def entry(self, i: int) -> dict[str, Any]:
        """Return threshold and rates of concept i, as JSON."""
        rates = {name: getattr(self, name) for name in ("tokens", "documents", "positive_tokens", "positive_documents")}
        return {
            "threshold": float(self.threshold[i]),
            **{name: shares.entry(i) for name, shares in rates.items() if shares is not None},
        }


def calibrate_alerts(
    benign: Iterable[Floats],
    *,
    fpr: float,
    aggregate: Aggregator | str | None = None,
    unit: str = "token",
    confidence: float = 0.95,
    family: bool = False,
    positives: Iterable[tuple[Floats, Mask | None]] = (),
) -> CalibratedAlerts:
    """Choose thresholds that benign units exceed at a rate of `fpr` at most, with probability `confidence` for all K
    concepts together.

    - `benign`: scores `[T, K]` of the tokens of each document, in order, 0 where a probe was inactive; rows of NaN are
      tokens that were not seen and are left out.
    - `unit`: "token", the running score at every token, or "document", its maximum over the document.
    - `family`: the rate is that of any of the K concepts, shared evenly among them.
    - `positives`: scores and which of the K concepts `[K]` the document is of (None: all); each of its tokens counts in
      the rate by tokens.

    This keeps 4 bytes for each token and concept. Raises `CalibrationError` where the benign units are too few, saying
    how many are needed.
    """
    check_targets(fpr, confidence, unit)
    aggregator = named(aggregate)
    refuse_baseline(aggregator, "alert thresholds of")
    running = [values for scores in benign if len(values := _running(aggregator, scores))]
    if not running:
        raise CalibrationError(
            "there are no benign tokens: thresholds are set from documents in which the concepts are absent"
        )
    k = running[0].shape[1]
    if not k or any(values.shape[1] != k for values in running):
        raise ConfigError(
            f"scores are of {sorted({values.shape[1] for values in running})} concepts: give the same one or more for"
            " every document"
        )
    risk, rate = (1 - confidence) / k, fpr / k if family else fpr
    highest = np.stack([values.max(axis=0) for values in running])
    n_tokens, n_documents = sum(map(len, running)), len(running)
    n = n_tokens if unit == "token" else n_documents
    allowed = most_allowed(n, rate, risk)
    if allowed < 0:
        needed = units_needed(rate, risk)
        share = f" ({rate:.2g} for each, since family shares it)" if family and k > 1 else ""
        raise CalibrationError(
            f"{n} benign {unit}s are too few for a false-positive rate of {fpr:g}{share} at confidence {confidence:g}"
            f" over {k} concepts: {needed} {unit}s are needed. Give more, watch fewer concepts, or allow a higher rate"
        )
    threshold = _kth_largest(running if unit == "token" else [highest], n, allowed)
    over_it = [values > threshold for values in running]
    least = {name: allowed if name == unit else 0 for name in UNITS}
    rates = _positive(aggregator, positives, threshold, risk)
    return CalibratedAlerts(
        aggregator,
        unit,
        fpr,
        confidence,
        family,
        allowed,
        n_tokens,
        n_documents,
        threshold,
        tokens=Rates.of(sum(part.sum(axis=0) for part in over_it), n_tokens, risk, least["token"]),
        documents=Rates.of((highest > threshold).sum(axis=0), n_documents, risk, least["document"]),
        any_token=Rates.of([sum(int(part.any(axis=1).sum()) for part in over_it)], n_tokens, 1 - confidence),
        any_document=Rates.of([(highest > threshold).any(axis=1).sum()], n_documents, 1 - confidence),
        positive_tokens=rates and rates[0],
        positive_documents=rates and rates[1],
    )


def check_targets(fpr: float, confidence: float, unit: str) -> None:
    """Raise `ConfigError` for a wrong rate, confidence or unit."""
    for name, value in (("fpr", fpr), ("confidence", confidence)):
        check_share(name, value, f"give more than 0 and less than 1, such as {0.01 if name == 'fpr' else 0.95}")
    if unit not in UNITS:
        raise ConfigError(f"unit is {unit!r}: give {' or '.join(UNITS)}")


@lru_cache(maxsize=64)
def most_allowed(n: int, rate: float, risk: float) -> int:
    """Return how many of n units may exceed a threshold: the largest k whose upper bound at confidence 1 - risk is
    within `rate`, or -1.
    """
    # That bound is within the rate exactly where a rate of `rate` gives k or fewer with probability `risk` at most.
    low, high = -1, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at_most(middle, n, rate) <= risk else (low, middle)
    return low


def units_needed(rate: float, risk: float) -> int:
    """Return the fewest units that suffice, if none may exceed the threshold: (1 - rate)^n <= risk."""
    needed = max(1, math.ceil(math.log(risk) / math.log1p(-rate)) - 1)
    while most_allowed(needed, rate, risk) < 0:  # the quotient may be a rounding off
        needed += 1
    return needed


def _running(aggregator: Aggregator, scores: Floats) -> Floats:
    """Return the running scores `[T, K]` of the tokens that were seen.

    They are rounded up to fp32, so that one exceeds an fp32 threshold exactly where it did before.
    """
    if np.ndim(scores) != 2:
        raise ConfigError(f"scores have shape {np.shape(scores)}: give [T, K], tokens by concepts, for each document")
    unseen = np.isnan(scores).all(axis=1)
    seen = scores[~unseen] if unseen.any() else scores
    if ((seen < 0) | (seen > 1)).any():
        raise ConfigError("scores are not between 0 and 1: give what probes score, no logits")
    values = over(aggregator, seen)
    rounded = values.astype(np.float32)
    return np.where(rounded < values, np.nextafter(rounded, np.float32(np.inf)), rounded)


def _kth_largest(parts: Sequence[Floats], n: int, k: int) -> Floats:
    """Return the (k + 1)-th largest of n values of each concept `[K]`: at most k exceed it."""
    thresholds = []
    for at in range(0, parts[0].shape[1], _COLUMNS):
        columns = np.concatenate([part[:, at : at + _COLUMNS] for part in parts])
        thresholds.append(np.partition(columns, n - 1 - k, axis=0)[n - 1 - k])
    return np.concatenate(thresholds)


def _positive(
    aggregator: Aggregator, positives: Iterable[tuple[Floats, Mask | None]], threshold: Floats, risk: float
) -> tuple[Rates, Rates] | None:
    tokens_over, tokens, documents_over, documents = np.zeros((4, len(threshold)), dtype=np.int64)
    has_positives = False
    for scores, is_of in positives:
        has_positives = True
        values = _running(aggregator, scores)
        if values.shape[1] != len(threshold) or (
            is_of is not None and (np.shape(is_of) != threshold.shape or np.asarray(is_of).dtype != bool)
        ):
            raise ConfigError(
                f"positive scores {values.shape}, of {is_of!r}: give scores [T, {len(threshold)}] and which of the"
                f" {len(threshold)} concepts, as booleans, or None"
            )
        exceeding = (values > threshold).sum(axis=0)
        places = slice(None) if is_of is None else np.flatnonzero(is_of)
        tokens_over[places] += exceeding[places]
        tokens[places] += len(values)
        documents_over[places] += exceeding[places] > 0
        documents[places] += len(values) > 0
    return (Rates.of(tokens_over, tokens, risk), Rates.of(documents_over, documents, risk)) if has_positives else None
