"""Z-scores and ranks: how unusual a score is against calibration text, the row's last tokens, or all traffic.

    unusual = parse("z:last:256")                     # or ZScore(last=256)
    unusual = with_counts(parse("z:pack"), pack, [17, 20])

"z": standard deviations of the log odds above the median, estimated from median distances. "rank": share of the
baseline that is lower, of n + 1.

Traffic is all rows compared by one object, so other users can affect values. Fewer than half of the tokens cannot move
the median beyond the others.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from probemon.core.aggregate import Aggregator, Doubles, Each, State, parse
from probemon.core.score_counts import LEAST_SPREAD, MOST_LOG_ODDS, TO_DEVIATIONS, ScoreCounts, log_odds
from probemon.errors import ConfigError
from probemon.util.checks import check_bool, check_count

LEAST_TOKENS = 16  # smallest useful baseline
BASELINES = (
    "z:pack, rank:pack, z:last:N, rank:last:N, z:traffic:N or rank:traffic:N, with N tokens, and :ema:0.3, say, of a"
    " running score"
)
_NAME = re.compile(r"(?P<measure>z|rank):(?:pack|(?P<whose>last|traffic):(?P<last>[^:()]+))(?::(?P<of>.+))?")


class HasScoreCounts(Protocol):
    """A pack with score counts."""

    concepts: Any

    def score_counts(self, aggregator: object = None) -> Any:
        """Return counts `[P, 128]` of running scores on calibration text. Raises `ConfigError` without any."""


class _Traffic:
    """Newest log odds `[n, K]` of all threads and rows."""

    def __init__(self) -> None:
        self._lock, self._window = threading.Lock(), np.empty((0, 0))

    def __reduce__(self) -> tuple[Any, ...]:  # copies start empty
        return _Traffic, ()

    def before(self, odds: Doubles, most: int) -> Doubles:
        """Add a token; return those before it."""
        with self._lock:
            window = self._window if len(self._window) else np.empty((0, len(odds)))
            self._window = np.concatenate([window[1:] if len(window) == most else window, odds[None]])
        return window


@dataclass(frozen=True)
class _Baseline:
    """A value against a baseline.

    - `last`: tokens of the row, or with `traffic` of all rows; None for the pack's `counts`.
    - `of`: aggregator of the compared score.
    """

    last: int | None = None
    of: Aggregator = field(default_factory=Each)
    traffic: bool = False
    counts: ScoreCounts | None = field(default=None, compare=False, repr=False)
    shared: _Traffic = field(default_factory=_Traffic, compare=False, repr=False)

    def __post_init__(self) -> None:
        if check_bool("traffic", self.traffic) and self.last is None:
            raise ConfigError("traffic is of the last tokens: give last, of how many")
        if self.last is not None:
            remedy = f"it counts tokens, so give {LEAST_TOKENS} or more"
            object.__setattr__(self, "last", check_count("last", self.last, least=LEAST_TOKENS, remedy=remedy))
        if isinstance(self.of, (_Baseline, type)) or not isinstance(self.of, Aggregator):
            raise ConfigError(f"of is {self.of!r}: give an aggregator of scores, such as Ema(0.3)")

    def begin(self) -> State:
        return ()

    def add(self, state: State, scores: npt.NDArray[np.floating[Any]]) -> tuple[State, Doubles]:
        inner, running = self.of.add(state[0] if state else self.of.begin(), scores)
        odds = log_odds(running)
        if self.last is None:
            new: State = (inner,)
            values = self._by_counts(odds, self._counts_of(len(odds)))
        elif self.traffic:
            new, values = (inner,), self._by_window(odds, np.sort(self.shared.before(odds, self.last), axis=0))
        else:
            window = state[1] if state else np.empty((0, len(odds)))
            values = self._by_window(odds, np.sort(window, axis=0))
            new = (inner, np.concatenate([window[1:] if len(window) == self.last else window, odds[None]]))
            new[1].flags.writeable = False
        values.flags.writeable = False
        return new, values

    def __str__(self) -> str:
        baseline = "pack" if self.last is None else f"{'traffic' if self.traffic else 'last'}:{self.last}"
        return f"{self._measure}:{baseline}" + ("" if self.of == Each() else f":{self.of}")

    @property
    def _measure(self) -> str:
        raise NotImplementedError

    def _by_counts(self, odds: Doubles, counts: ScoreCounts) -> Doubles:
        raise NotImplementedError

    def _by_window(self, odds: Doubles, ordered: Doubles) -> Doubles:
        """Values `[K]`, given earlier log odds `ordered [n, K]`, ascending."""
        raise NotImplementedError

    def _counts_of(self, n_concepts: int) -> ScoreCounts:
        if self.counts is None:
            raise ConfigError(f"{self} compares with what a pack knows of a concept: with_counts({self}, pack, probes)")
        if len(self.counts.counts) != n_concepts:
            raise ConfigError(
                f"{n_concepts} scores, and {self} knows of {len(self.counts.counts)} concepts: give those"
            )
        return self.counts


@dataclass(frozen=True)
class ZScore(_Baseline):
    """Deviations of the log odds above the median of calibration text, or of the `last` tokens.

    NaN, over no threshold, before `LEAST_TOKENS` tokens. State: that of `of`; the last log odds [n, K].
    """

    _measure = "z"

    @property
    def ceiling(self) -> float:
        """Upper bound of the value."""
        if self.counts is None:
            return 2 * MOST_LOG_ODDS / LEAST_SPREAD
        return float(((MOST_LOG_ODDS - self.counts.median) / self.counts.spread).max())

    def _by_counts(self, odds: Doubles, counts: ScoreCounts) -> Doubles:
        return (odds - counts.median) / counts.spread

    def _by_window(self, odds: Doubles, ordered: Doubles) -> Doubles:
        if len(ordered) < LEAST_TOKENS:
            return np.full(len(odds), np.nan)
        median = _middle(ordered)
        spread = TO_DEVIATIONS * _middle(np.sort(np.abs(ordered - median), axis=0))
        values: Doubles = (odds - median) / np.maximum(spread, LEAST_SPREAD)
        return values


@dataclass(frozen=True)
class Rank(_Baseline):
    """Share, of n + 1, of lower scores in calibration text, or in the `last` tokens.

    1 minus a p-value of conformal prediction (Vovk, Gammerman & Shafer 2005, "Algorithmic learning in a random world");
    ties are not lower. State as `ZScore`.
    """

    _measure = "rank"

    @property
    def ceiling(self) -> float:
        """Upper bound of the value."""
        if self.counts is None:
            return 1.0 if self.last is None else self.last / (self.last + 1)
        highest = np.full(len(self.counts.counts), MOST_LOG_ODDS)
        return float(self._by_counts(highest, self.counts).max())

    def _by_counts(self, odds: Doubles, counts: ScoreCounts) -> Doubles:
        return counts.below(odds) / (counts.n + 1)

    def _by_window(self, odds: Doubles, ordered: Doubles) -> Doubles:
        values: Doubles = (ordered < odds).sum(axis=0) / (len(ordered) + 1)
        return values


_MEASURES: dict[str, type[ZScore] | type[Rank]] = {"z": ZScore, "rank": Rank}


def parse_baseline(text: str) -> ZScore | Rank:
    """Return the baseline of a text such as "z:pack" or "z:last:64:ema:0.3". Raises `ConfigError`."""
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"aggregate is {text!r}: give {BASELINES}")
    last = match["last"]
    if last is not None and not last.isdecimal():
        raise ConfigError(f"aggregate is {text!r}: {last!r} is not a whole number")
    if last is not None and len(last) > 12:
        raise ConfigError(f"aggregate is {text!r:.60}: {last[:12]}... tokens are too many")
    of = Each() if match["of"] is None else parse(match["of"])
    return _MEASURES[match["measure"]](None if last is None else int(last), of, match["whose"] == "traffic")


def with_counts(aggregator: Aggregator, pack: HasScoreCounts, probes: Sequence[int]) -> Aggregator:
    """Bind an aggregator to concepts: with the pack's counts, or separate traffic.

    Raises `ConfigError` if the pack has too few counts.
    """
    if not isinstance(aggregator, _Baseline):
        return aggregator
    if aggregator.last is not None:
        return replace(aggregator, shared=_Traffic())
    counts = ScoreCounts(pack.score_counts(aggregator.of)[list(probes)].numpy())
    for probe, n in zip(probes, counts.n.tolist(), strict=True):
        if n < LEAST_TOKENS:
            raise ConfigError(
                f"{aggregator} needs {LEAST_TOKENS} scores of calibration text, and of {pack.concepts[probe]['id']} the"
                f" pack counted {n}: probemon calibrate --statistics counts more"
            )
    return replace(aggregator, counts=counts)


def ceiling(aggregator: Aggregator) -> float:
    """Return the upper bound of an aggregator; 1 except for z-scores and ranks."""
    return float(getattr(aggregator, "ceiling", 1.0))


def is_z_score(text: str | None) -> bool:
    """True if a text names a z-score, whose thresholds may be 1 or more."""
    return text is not None and text.strip().startswith("z:")


def refuse_baseline(aggregator: Aggregator, what: str) -> None:
    """Raise `ConfigError` for a z-score or rank: nothing is calibrated for these."""
    if isinstance(aggregator, _Baseline):
        raise ConfigError(
            f"{what} {aggregator}: nothing is calibrated for a z-score or a rank, which says by itself how unusual a"
            " score is. Give above= in the rule"
        )


def is_of_traffic(aggregator: Aggregator) -> bool:
    """True if values depend on other rows."""
    return isinstance(aggregator, _Baseline) and aggregator.traffic


def needs_every_token(aggregator: Aggregator) -> bool:
    """True if a token without evaluation spoils later values."""
    return isinstance(aggregator, _Baseline) and aggregator.last is not None


def _middle(ordered: Doubles) -> Doubles:
    n = len(ordered)
    middle: Doubles = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return middle
