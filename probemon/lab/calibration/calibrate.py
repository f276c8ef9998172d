"""Calibrates alert thresholds to a false-positive rate, after aggregation.

    alerts = calibrate_alerts(benign, fpr=0.01, aggregate=Ema(0.3))     # scores [T, K] of each document

A threshold is the (k + 1)-th largest of n benign values, for the largest k whose Clopper-Pearson upper bound is within
the rate (Wilks 1941, Ann. Math. Statist. 12). The K concepts share 1 - confidence (Bonferroni). Units are assumed
independent; tokens of one document are not.
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
_COLUMNS = 16  # concepts; bounds memory


@dataclass(frozen=True)
class Rates:
    """Shares of units over a threshold, `[K]` each: `count` of `n`.

    - `low`, `high`: Clopper-Pearson bounds, each violated with probability at most `risk`.
    - `least`: units that the threshold was chosen to allow.
    """

    count: Ints
    n: Ints
    risk: float
    least: int = 0

    @property
    def rate(self) -> npt.NDArray[np.float64]:
        """NaN if there are no units."""
        return np.divide(self.count, self.n, out=np.full(self.count.shape, np.nan), where=self.n > 0)

    @cached_property
    def low(self) -> npt.NDArray[np.float64]:
        return np.asarray(lower_bound(self.count, self.n, 1 - self.risk))

    @cached_property
    def high(self) -> npt.NDArray[np.float64]:
        """At least the upper bound of `least` units."""
        return np.asarray(upper_bound(np.maximum(self.count, np.minimum(self.least, self.n)), self.n, 1 - self.risk))

    @classmethod
    def of(cls, count: Any, n: Any, risk: float, least: int = 0) -> Rates:
        """Build from counts and numbers of units."""
        counts, units = np.broadcast_arrays(np.asarray(count, dtype=np.int64), np.asarray(n, dtype=np.int64))
        return cls(counts, units, risk, least)

    def entry(self, i: int) -> dict[str, Any]:
        """Return rates of concept i."""
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
    """Alert thresholds `[K]` fp32, at most 1, and their rates.

    - `tokens`, `documents`: benign tokens over the threshold, documents with any.
    - `any_*`: over any of the K thresholds (one entry).
    - `positive_*`: the same for positives, or None.

    Bounds have confidence 1 - (1 - confidence) / K; `any_*`: `confidence`.
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
        """Return settings and amount of data."""
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
        """Return threshold and rates of concept i."""
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
    """Choose thresholds that benign units exceed at a rate of at most `fpr`, with probability `confidence` for all K.

    - `benign`: scores `[T, K]` of each document. Rows of NaN are left out.
    - `unit`: "token" (running score at each token) or "document" (its maximum).
    - `family`: the rate is that of any of the K concepts.
    - `positives`: scores, and a mask `[K]` of the document's concepts (None: all).

    Raises `CalibrationError` if there are too few benign units.
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
    """Raise `ConfigError` for an invalid rate, confidence or unit."""
    for name, value in (("fpr", fpr), ("confidence", confidence)):
        check_share(name, value, f"give more than 0 and less than 1, such as {0.01 if name == 'fpr' else 0.95}")
    if unit not in UNITS:
        raise ConfigError(f"unit is {unit!r}: give {' or '.join(UNITS)}")


@lru_cache(maxsize=64)
def most_allowed(n: int, rate: float, risk: float) -> int:
    """Return the largest k of n units whose upper bound at confidence 1 - risk is within `rate`, or -1."""
    # The bound is within the rate exactly when P(k or fewer) at that rate is at most `risk`.
    low, high = -1, n
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at_most(middle, n, rate) <= risk else (low, middle)
    return low


def units_needed(rate: float, risk: float) -> int:
    """Return the fewest units that suffice if none exceeds the threshold: (1 - rate)^n <= risk."""
    needed = max(1, math.ceil(math.log(risk) / math.log1p(-rate)) - 1)
    while most_allowed(needed, rate, risk) < 0:  # the quotient may be off by a rounding
        needed += 1
    return needed


def _running(aggregator: Aggregator, scores: Floats) -> Floats:
    """Return running scores `[T, K]` of seen tokens, rounded up to fp32: exact for comparisons with thresholds."""
    if np.ndim(scores) != 2:
        raise ConfigError(f"scores have shape {np.shape(scores)}: give [T, K], tokens by concepts, for each document")
    unseen = np.isnan(scores).all(axis=1)
    seen = scores[~unseen] if unseen.any() else scores
    if ((seen < 0) | (seen > 1)).any():
        raise ConfigError("scores are not between 0 and 1: give scores of probes, not logits")
    values = over(aggregator, seen)
    rounded = values.astype(np.float32)
    return np.where(rounded < values, np.nextafter(rounded, np.float32(np.inf)), rounded)


def _kth_largest(parts: Sequence[Floats], n: int, k: int) -> Floats:
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
