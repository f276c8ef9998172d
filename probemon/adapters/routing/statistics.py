"""RoutingStatistics: behaviour of a set of routers over a stream of tokens, in exact sums.

Numbers are rounded and summed as integers of two words, so splitting or merging a stream changes no bit. Rounding
residues of codes are summed too, to keep the rank of small codes.

Entropies are in units of log E. Codes are not distributions; their covariance has an effective rank (Roy and Vetterli,
2007).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from probemon.adapters.routing.decisions import Changes, Decisions, Numbers, entropy, norms
from probemon.adapters.routing.sketch import LogSketch
from probemon.core.hierarchy import Ints, Mask

_SHARE = 1 << 30  # shares are rounded at 1e-9
_CODE = 1 << 24  # codes are rounded at 6e-8, residues at 4e-15
QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_FLAT = 1e-6  # relative variance that rounding alone causes
_PER_STREAM = (
    "n", "n_bad", "n_steering", "n_reused", "n_pairs", "n_flips", "n_invalidated", "n_fallback", "n_confident",
    "_entropy", "_confidence", "_norm", "_norm_left",
)  # fmt: skip
_PER_EXPERT = ("load", "_weights", "_codes", "_codes_left")
# Products of large codes pass 64 bits after 8 million tokens.
_TWO_WORDS = ("_entropy", "_confidence", "_norm", "_weights", "_codes", "_products")
_WORD_BITS = 40  # of the lower, non-negative word


class RoutingStatistics:
    """Statistics of S routers over E experts, or over codes of E dimensions (`codes`).

    `n_chosen`: how many of `top_idx` count as load. Non-finite decisions only count in `n_bad [S]`. Variation and reuse
    of codes count only tokens that they steer, `n_steering [S]`.
    """

    def __init__(self, n_streams: int, n_experts: int, n_chosen: int = 1, *, codes: bool = False) -> None:
        self.n_streams, self.n_experts, self.n_chosen, self.codes = n_streams, n_experts, n_chosen, codes
        self._log_e = math.log(max(2, n_experts))
        pairs = (n_streams, n_experts, n_experts) if codes else (0,)
        shapes: dict[str, tuple[int, ...]] = {
            **dict.fromkeys(_PER_STREAM, (n_streams,)),
            **dict.fromkeys(_PER_EXPERT, (n_streams, n_experts)),
            **dict.fromkeys(("_products", "_products_left"), pairs),
        }
        shapes |= {f"{name}_high": shapes[name] for name in _TWO_WORDS}
        self._sums: dict[str, Ints] = {name: np.zeros(shape, dtype=np.int64) for name, shape in shapes.items()}
        self.norm_max: Numbers = np.zeros(n_streams)
        self.latency = LogSketch()

    def __getattr__(self, name: str) -> Ints:
        sums = self.__dict__.get("_sums", {})
        if name not in sums:
            raise AttributeError(name)
        total: Ints = sums[name]
        return total

    def add(self, decisions: Decisions, changes: Changes) -> None:
        """Add decisions about any number of tokens."""
        good = decisions.finite
        n_good, sums = good.sum(axis=1), self._sums
        sums["n"] += n_good
        sums["n_bad"] += good.shape[1] - n_good
        steering = good if decisions.steering is None else good & decisions.steering
        sums["n_steering"] += steering.sum(axis=1)
        sums["n_reused"] += (steering & ~decisions.decided).sum(axis=1)
        sums["n_pairs"] += (good & (changes.flips >= 0)).sum(axis=1)
        sums["n_flips"] += (good & (changes.flips == 1)).sum(axis=1)
        sums["n_invalidated"] += (good & changes.invalidated).sum(axis=1)
        sums["n_fallback"] += (good & decisions.fallback).sum(axis=1)
        confident = good & np.isfinite(decisions.confidence)
        sums["n_confident"] += confident.sum(axis=1)
        self._add_whole("_confidence", _whole(np.where(confident, decisions.confidence, 0.0), _SHARE))
        stream = np.arange(self.n_streams)[:, None, None] * self.n_experts
        chosen = (stream + decisions.top_idx[:, :, : self.n_chosen])[good]
        sums["load"] += np.bincount(chosen.ravel(), minlength=self.n_streams * self.n_experts).reshape(
            self.n_streams, self.n_experts
        )
        if decisions.weights is not None:
            weights = decisions.weights if good.all() else np.where(good[:, :, None], decisions.weights, 0.0)
            self._add_whole("_entropy", _whole(entropy(weights) / self._log_e, _SHARE))
            self._add_whole("_weights", _whole(weights, _SHARE))
        if self.codes:
            codes = np.where(steering[:, :, None], decisions.raw, 0.0).astype(np.float64)
            norm = norms(np.where(good[:, :, None], decisions.raw, 0.0))
            self._add_exactly("_codes", codes)
            for begin in range(0, codes.shape[1], 128):  # bounds memory in a prompt
                part = codes[:, begin : begin + 128]
                self._add_exactly("_products", part[:, :, :, None] * part[:, :, None, :])
            self._add_exactly("_norm", norm)
            self.norm_max = np.maximum(self.norm_max, norm.max(axis=1, initial=0.0))

    def empty(self) -> RoutingStatistics:
        """Return empty statistics of the same routers."""
        return RoutingStatistics(self.n_streams, self.n_experts, self.n_chosen, codes=self.codes)

    @property
    def n_tokens(self) -> int:
        """Tokens added."""
        return int(self.n[0] + self.n_bad[0])

    def merge(self, other: RoutingStatistics) -> None:
        """Add another stream of the same routers."""
        for name, values in other._sums.items():
            self._sums[name] += values
        for name in _TWO_WORDS:
            self._carry(name)
        self.norm_max = np.maximum(self.norm_max, other.norm_max)
        self.latency.merge(other.latency)

    def counted(self, over: str) -> Ints:
        """Return the number of tokens `[S]` that `over(metric)` names."""
        return self.n + self.n_bad if over == _ALL else self._sums[over]

    def forget(self, streams: Mask) -> None:
        """Clear streams `[S]`; latencies only with all of them."""
        for values in self._sums.values():
            if len(values):  # codes only
                values[streams] = 0
        self.norm_max[streams] = 0
        if streams.all():
            self.latency = LogSketch()

    def metric(self, name: str) -> Numbers:
        """Return one of `METRICS` `[S]`, NaN if unknown."""
        return np.broadcast_to(np.asarray(getattr(self, name)(), dtype=np.float64), (self.n_streams,))

    def not_finite_rate(self) -> Numbers:
        """Share of decisions that are not finite."""
        return _ratio(self.n_bad, self.n + self.n_bad)

    def decision_entropy(self) -> Numbers:
        """Mean entropy of a decision."""
        return self._distribution(_ratio(self._sum("_entropy"), self.n * float(_SHARE)))

    def marginal(self) -> Numbers:
        """Mean distribution over tokens, `[S, E]`."""
        weights = self._sum("_weights")
        return _ratio(weights, weights.sum(axis=1)[:, None])

    def marginal_entropy(self) -> Numbers:
        """Entropy of the mean distribution."""
        return self._distribution(np.where(self.n > 0, entropy(self.marginal()) / self._log_e, np.nan))

    def mutual_information(self) -> Numbers:
        """Marginal minus decision entropy."""
        information: Numbers = np.maximum(self.marginal_entropy() - self.decision_entropy(), 0.0)
        return information

    def effective_experts(self) -> Numbers:
        """exp of the load's entropy, 1 to E."""
        return np.where(self.n > 0, np.exp(entropy(self.load_shares())), np.nan)

    def spread(self) -> Numbers:
        """Marginal entropy, scaled: 0 if `n_chosen` experts have all, 1 if even."""
        return self._over_chosen(self.marginal_entropy())

    def load_spread(self) -> Numbers:
        """The same for the load."""
        return self._over_chosen(np.where(self.n > 0, entropy(self.load_shares()) / self._log_e, np.nan))

    def load_shares(self) -> Numbers:
        """Each expert's share of the load, `[S, E]`."""
        return _ratio(self.load, self.load.sum(axis=1)[:, None])

    def max_vio(self) -> Numbers:
        """Largest load over the mean load, minus 1."""
        return self.load_shares().max(axis=1) * self.n_experts - 1

    def least_load(self) -> Numbers:
        """Smallest load over the mean load."""
        return self.load_shares().min(axis=1) * self.n_experts

    def least_weight(self) -> Numbers:
        """Smallest share of the mean distribution, times E."""
        return self._distribution(self.marginal().min(axis=1) * self.n_experts)

    def gini(self) -> Numbers:
        """Gini coefficient of the load: 0 if even."""
        load, e = np.sort(self.load_shares(), axis=1), self.n_experts
        coefficients: Numbers = (load * (2 * np.arange(1, e + 1) - e - 1)).sum(axis=1) / e
        return coefficients

    def flip_rate(self) -> Numbers:
        """Share of neighbouring tokens whose top experts differ."""
        return _ratio(self.n_flips, self.n_pairs)

    def code_reuse_rate(self) -> Numbers:
        """Share of tokens that reuse an earlier decision."""
        return self._code(_ratio(self.n_reused, self.n_steering))

    def kv_invalidations(self) -> Numbers:
        """Tokens whose code changed without a decision."""
        return self._code(self.n_invalidated.astype(np.float64))

    def fallback_rate(self) -> Numbers:
        """Share of tokens with a fallback in force."""
        return self._code(_ratio(self.n_fallback, self.n))

    def confidence(self) -> Numbers:
        """Mean confidence, over tokens that have one."""
        return _ratio(self._sum("_confidence"), self.n_confident * float(_SHARE))

    def code_norm(self) -> Numbers:
        """Mean norm of the codes."""
        return self._code(_ratio(self._total("_norm"), self.n))

    def code_norm_max(self) -> Numbers:
        """Largest norm of a code."""
        return self._code(np.where(self.n > 0, self.norm_max, np.nan))

    def covariance(self) -> Numbers:
        """Covariance of the codes over tokens, `[S, E, E]`."""
        n = np.maximum(self.n_steering, 1)[:, None]
        mean = self._total("_codes") / n
        return self._total("_products") / n[:, :, None] - mean[:, :, None] * mean[:, None, :]

    def variances(self) -> Numbers:
        """Variance of each code dimension, `[S, E]`."""
        variances: Numbers = np.maximum(np.diagonal(self.covariance(), axis1=1, axis2=2), 0.0)
        return variances

    def variation(self) -> Numbers:
        """Variance of the codes over their mean square, 0 to 1."""
        if not self.codes:
            return self._code(np.full(self.n_streams, np.nan))
        square = np.trace(self._total("_products"), axis1=1, axis2=2) / np.maximum(self.n_steering, 1)
        return np.where(self.n_steering > 0, _or_zero(self.variances().sum(axis=1), square), np.nan)

    def effective_rank(self) -> Numbers:
        """exp of the entropy of the covariance's eigenvalues; 0 if codes do not vary."""
        if not self.codes or self.n_experts == 1:
            return np.full(self.n_streams, np.nan)
        eigenvalues = np.maximum(np.linalg.eigvalsh(self.covariance()), 0.0)
        shares = _or_zero(eigenvalues, eigenvalues.sum(axis=1)[:, None])
        varies = np.where(np.isnan(self.variation()), np.nan, self.variation() > _FLAT)
        return np.where(np.isnan(varies), np.nan, np.exp(entropy(shares)) * varies)

    def rank_entropy(self) -> Numbers:
        """log of the effective rank, at least 0, in units of log E."""
        return np.log(np.maximum(self.effective_rank(), 1.0)) / self._log_e

    def latency_p95_us(self) -> float:
        """95th percentile of capture times, in microseconds."""
        return self.latency.quantile(0.95)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return each stream's known metrics, for JSON."""
        values = {name: self.metric(name).tolist() for name in METRICS if name != "latency_p95_us"}
        variances = self.variances().tolist() if self.codes else []
        return [
            {
                "n_tokens": int(self.n[i]),
                "n_not_finite": int(self.n_bad[i]),
                **({"n_steering": int(self.n_steering[i])} if self.codes else {}),
                **{name: numbers[i] for name, numbers in values.items() if not math.isnan(numbers[i])},
                **({"variances": variances[i]} if self.codes else {}),
                "load": self.load[i].tolist(),
            }
            for i in range(self.n_streams)
        ]

    def _add_exactly(self, name: str, values: Numbers) -> None:
        """Sum code numbers, and their rounding residues separately."""
        scaled = values * _CODE
        whole = np.rint(scaled)
        self._add_whole(name, whole.astype(np.int64))
        scaled -= whole
        self._sums[f"{name}_left"] += _whole(scaled, _CODE).sum(axis=1)

    def _add_whole(self, name: str, values: Ints) -> None:
        self._sums[name] += values.sum(axis=1)
        self._carry(name)

    def _carry(self, name: str) -> None:
        low = self._sums[name]
        self._sums[f"{name}_high"] += low >> _WORD_BITS
        low &= (1 << _WORD_BITS) - 1

    def _sum(self, name: str) -> Numbers:
        high = self._sums[f"{name}_high"].astype(np.float64)
        total: Numbers = high * (1 << _WORD_BITS) + self._sums[name]
        return total

    def _total(self, name: str) -> Numbers:
        total: Numbers = (self._sum(name) + self._sums[f"{name}_left"] / _CODE) / _CODE
        return total

    def _distribution(self, values: Numbers) -> Numbers:
        return np.full(self.n_streams, np.nan) if self.codes else values

    def _code(self, values: Numbers) -> Numbers:
        return values if self.codes else np.full(self.n_streams, np.nan)

    def _over_chosen(self, values: Numbers) -> Numbers:
        least = math.log(self.n_chosen) / self._log_e  # entropy of `n_chosen` experts
        return (values - least) / (1 - least) if least < 1 else np.full(self.n_streams, np.nan)


METRICS = (
    "decision_entropy", "marginal_entropy", "mutual_information", "effective_experts", "spread", "load_spread",
    "max_vio", "least_load", "least_weight", "gini", "flip_rate",
    "code_reuse_rate", "kv_invalidations", "fallback_rate", "confidence", "code_norm", "code_norm_max", "variation",
    "effective_rank", "rank_entropy",
    "latency_p95_us", "not_finite_rate",
)  # fmt: skip
_ALL = "all"
_OVER = {
    **dict.fromkeys(("code_reuse_rate", "variation", "effective_rank", "rank_entropy"), "n_steering"),
    "flip_rate": "n_pairs", "confidence": "n_confident",
    **dict.fromkeys(("latency_p95_us", "not_finite_rate"), _ALL),
}  # fmt: skip


def over(metric: str) -> str:
    """Return the tokens that count for a metric: "n" (finite decisions), a narrower count, or "all"."""
    return _OVER.get(metric, "n") if metric in METRICS else _ALL


def _whole(values: Numbers, scale: int) -> Ints:
    return np.asarray(np.rint(values * scale), dtype=np.int64)


def _ratio(part: Any, whole: Any) -> Numbers:
    """NaN if the whole is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(np.asarray(whole) > 0, part / np.asarray(whole, dtype=np.float64), np.nan)


def _or_zero(part: Numbers, whole: Numbers) -> Numbers:
    """0 if the whole is 0."""
    return np.divide(part, whole, out=np.zeros(np.broadcast_shapes(part.shape, whole.shape)), where=whole > 0)
