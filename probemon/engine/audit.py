"""An audit evaluates every probe on a sample of tokens, and counts what the descent missed.

    manager = DynamicProbeManager(pack, audit_rate=0.01)
    audit = run.result(out).audit  # or Audit.of(coverage)
    audit.firing_recall  # Estimate(value=0.998, low=0.991, high=1.0); None if nothing fired

A hash of their place, not their content, chooses tokens: a random sample, with unbiased means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.core.intervals import mean_interval
from probemon.util.checks import check_number

if TYPE_CHECKING:
    from probemon.core.scores import Coverage

TOP = 10


@dataclass(frozen=True)
class Estimate:
    """Mean over audited tokens, and its 95 % interval for all tokens (Hoeffding 1963, `mean_interval`)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Audit:
    """Sums over audited tokens.

    `top_found`: active shares of each token's 10 best probes.
    `n_firing_tokens`: tokens with a firing probe.
    `firing_found`: the same of firing probes.
    `n_firing`, `n_firing_missed`: firing probes, and those not active.
    `n_evaluated`, `n_active`: by the descent.
    """

    n_probes: int
    n_tokens: int = 0
    top_found: float = 0.0
    n_firing_tokens: int = 0
    firing_found: float = 0.0
    n_firing: int = 0
    n_firing_missed: int = 0
    n_evaluated: int = 0
    n_active: int = 0

    @classmethod
    def of(cls, coverage: Coverage) -> Audit:
        """Sum over a coverage's audited tokens."""
        at = coverage.audited > 0
        firing, missed = coverage.firing[at], coverage.firing_missed[at]
        fires = firing > 0
        k = np.clip(coverage.n_probes - coverage.excluded[at] - coverage.shed[at], 1, TOP)
        return cls(
            coverage.n_probes,
            int(at.sum()),
            float((1 - coverage.top_missed[at] / k).sum()),
            int(fires.sum()),
            float((1 - missed[fires] / firing[fires]).sum()),
            int(firing.sum()),
            int(missed.sum()),
            int(coverage.evaluated[at].sum()),
            int(coverage.active[at].sum()),
        )

    @classmethod
    def of_totals(cls, totals: Mapping[str, Any]) -> Audit:
        """Inverse of `as_dict`."""
        return cls(**totals)

    def as_dict(self) -> dict[str, Any]:
        """The sums."""
        return asdict(self)

    def __add__(self, other: Audit) -> Audit:
        one, two = self.as_dict(), other.as_dict()
        return Audit(self.n_probes, **{name: one[name] + two[name] for name in one if name != "n_probes"})

    @property
    def top_recall(self) -> Estimate | None:
        """Mean active share of a token's 10 best probes."""
        return _mean(self.top_found, self.n_tokens)

    @property
    def firing_recall(self) -> Estimate | None:
        """Mean active share of a token's firing probes."""
        return _mean(self.firing_found, self.n_firing_tokens)

    @property
    def share_evaluated(self) -> float | None:
        """Share of the probes that the descent evaluated."""
        return self.n_evaluated / (self.n_tokens * self.n_probes) if self.n_tokens else None

    @property
    def share_active(self) -> float | None:
        """Share of the probes that were active."""
        return self.n_active / (self.n_tokens * self.n_probes) if self.n_tokens else None

    def __str__(self) -> str:
        if not self.n_tokens:
            return "no token was audited"
        parts = [f"{self.n_tokens} tokens audited"]
        for name, interval in (("firing probes", self.firing_recall), ("the true top 10", self.top_recall)):
            share = "none"
            if interval is not None:
                share = f"{interval.value:.4f} found (95 % interval {interval.low:.4f} to {interval.high:.4f})"
            parts.append(f"{name} {share}")
        return f"{', '.join(parts)}, {self.share_active:.1%} of the probes active"


def check_rate(rate: object) -> float:
    """Return `rate`, a share. Raises `ConfigError`."""
    return check_number("audit_rate", rate, low=0, high=1, remedy="give the share of tokens to audit, 0 to 1")


def sample(rate: float, *place: Ints | int) -> Mask | None:
    """Return which tokens are audited, by numbers of their place; None for none."""
    if rate <= 0:
        return None
    with np.errstate(over="ignore"):
        mixed = np.uint64(0)
        for numbers in place:
            mixed = _mixed(np.asarray(numbers, dtype=np.int64).astype(np.uint64) + mixed)
    chosen = np.asarray((mixed >> np.uint64(11)) * 2.0**-53 < rate)
    return chosen if chosen.any() else None


def compare(everything: Any, alert: Any, active: Mask) -> dict[str, Ints]:
    """Return top_missed, firing and firing_missed `[n]` from scores and active sets `[n, P]`."""
    k = min(TOP, everything.shape[1])
    best = np.argsort(-everything, axis=1, kind="stable")[:, :k]  # stable: ties to the lower number
    fires = everything > alert
    return {
        "top_missed": k - np.take_along_axis(active, best, axis=1).sum(axis=1),
        "firing": fires.sum(axis=1),
        "firing_missed": (fires & ~active).sum(axis=1),
    }


def _mixed(x: Any) -> Any:
    """SplitMix64's increment and finaliser (Steele, Lea & Flood 2014, "Fast splittable pseudorandom number
    generators").
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mean(total: float, n: int) -> Estimate | None:
    if not n:
        return None
    value = min(1.0, max(0.0, total / n))  # rounding may exceed 1
    low, high = mean_interval(value, n)
    return Estimate(value, float(low), float(high))
