"""Audit: on a sample of tokens every probe is evaluated too, and it is counted what the descent did not find.

    manager = DynamicProbeManager(pack, audit_rate=0.01)
    audit = run.result(out).audit  # or Audit.of(coverage), Audit.of_totals(analysis.manifest["totals"]["audit"])
    audit.firing_recall  # Estimate(value=0.998, low=0.991, high=1.0), None without a token that says
    audit.top_recall, audit.share_evaluated, audit.n_tokens

Which tokens are audited is drawn by their place alone (a hash), never by what they hold, so the sample is a random one
of the tokens seen: its means are unbiased for all of them, and its intervals hold for every size of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.core.checks import check_number
from probemon.core.hierarchy import Ints, Mask
from probemon.core.intervals import mean_interval

if TYPE_CHECKING:
    from probemon.core.scores import Coverage

TOP = 10  # the best so many probes of a token are the ones to find


@dataclass(frozen=True)
class Estimate:
    """A mean over audited tokens with the interval in which that over all tokens lies with a probability of 95 %:
    Hoeffding 1963 (`mean_interval`).
    """

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Audit:
    """What was found, summed over audited tokens.

    `n_tokens` were audited; `top_found` sums, over them, the share of the best 10 of all probes that were active;
    `n_firing_tokens` had a probe that fires, `firing_found` sums the share of these probes that were active; `n_firing`
    and `n_firing_missed` count the probes; `n_evaluated` and `n_active`, the probes that the descent evaluated and had
    active there, of `n_probes` each.
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
        """Of the audited tokens of a coverage."""
        at = coverage.audited > 0
        firing, missed = coverage.firing[at], coverage.firing_missed[at]
        fires = firing > 0
        k = max(1, min(TOP, coverage.n_probes))
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
        """From `as_dict`."""
        return cls(**totals)

    def as_dict(self) -> dict[str, Any]:
        """The sums, for a file."""
        return asdict(self)

    def __add__(self, other: Audit) -> Audit:
        one, two = self.as_dict(), other.as_dict()
        return Audit(self.n_probes, **{name: one[name] + two[name] for name in one if name != "n_probes"})

    @property
    def top_recall(self) -> Estimate | None:
        """Mean share of a token's best 10 of all probes that were active."""
        return _mean(self.top_found, self.n_tokens)

    @property
    def firing_recall(self) -> Estimate | None:
        """Mean share of a token's firing probes that were active, over tokens that have one."""
        return _mean(self.firing_found, self.n_firing_tokens)

    @property
    def share_evaluated(self) -> float | None:
        """Share of the probes that were evaluated for the answer; the audit itself is not counted."""
        return self.n_evaluated / (self.n_tokens * self.n_probes) if self.n_tokens else None

    @property
    def share_active(self) -> float | None:
        """Share of the probes that were active: what a descent evaluates, where evaluating all was cheaper too."""
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
    """`rate` as a share of tokens. Raises `ConfigError`."""
    return check_number("audit_rate", rate, low=0, high=1, remedy="give the share of tokens to audit, 0 to 1")


def sample(rate: float, *place: Ints | int) -> Mask | None:
    """Which tokens are audited, by numbers that say where they stand (a document and a position, say); None for none of
    them.
    """
    if rate <= 0:
        return None
    with np.errstate(over="ignore"):
        mixed = np.uint64(0)
        for numbers in place:
            mixed = _mixed(np.asarray(numbers, dtype=np.int64).astype(np.uint64) + mixed)
    chosen = np.asarray((mixed >> np.uint64(11)) * 2.0**-53 < rate)
    return chosen if chosen.any() else None


def compare(everything: Any, alert: Any, active: Mask) -> dict[str, Ints]:
    """Of n tokens what all their scores `[n, P]` say about the active set `[n, P]`: top_missed, firing and
    firing_missed `[n]`.
    """
    k = min(TOP, everything.shape[1])
    # A stable sort of the negated scores: ties to the lower number.
    best = np.argsort(-everything, axis=1, kind="stable")[:, :k]
    fires = everything > alert
    return {
        "top_missed": k - np.take_along_axis(active, best, axis=1).sum(axis=1),
        "firing": fires.sum(axis=1),
        "firing_missed": (fires & ~active).sum(axis=1),
    }


def _mixed(x: Any) -> Any:
    """Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators": the finaliser of SplitMix64, after
    its increment.
    """
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _mean(total: float, n: int) -> Estimate | None:
    if not n:
        return None
    value = min(1.0, max(0.0, total / n))  # a sum of shares may end a rounding beyond their number
    low, high = mean_interval(value, n)
    return Estimate(value, float(low), float(high))
