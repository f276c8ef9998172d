"""How unusual a score is: its z-score or its rank, against a pack's calibration text, the row's own last tokens, or the
last tokens of all traffic.

    unusual = parse("z:last:256")                     # or ZScore(last=256), ZScore(), Rank(last=64, of=Ema(0.3))
    unusual = parse("z:traffic:4096")                 # or ZScore(last=4096, traffic=True)
    state, values = unusual.add(unusual.begin(), scores)        # as every aggregator
    for_them = with_counts(parse("z:pack"), pack, [17, 20])     # against a pack: of these concepts
    ceiling(for_them)                                           # what no value of it exceeds

"z" is how many standard deviations the log odds lie over the median, where the deviation is taken from the median
distance to the median. "rank" is the share of the baseline that is lower, of n + 1: 1 - rank is a p-value, so a token
that is like those of the baseline exceeds a rank of 0.99 one time in a hundred, at most.

The last n tokens are those of one row that were seen before this one: nobody else's text changes a value. Of traffic
they are those of all rows that are compared by this very object, in the order in which they came. What was
written to them bears on the values, too: fewer than half of them, however high, cannot move the median and the median
distance beyond what the others span. A rank over r is out of reach once a share of 1 - r of them is higher.
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

LEAST_TOKENS = 16  # of a baseline: the median distance of fewer tells little
BASELINES = (
    "z:pack, rank:pack, z:last:N, rank:last:N, z:traffic:N or rank:traffic:N, with N tokens, and :ema:0.3, say, of a"
    " running score"
)
_NAME = re.compile(r"(?P<measure>z|rank):(?:pack|(?P<whose>last|traffic):(?P<last>[^:()]+))(?::(?P<of>.+))?")


class HasScoreCounts(Protocol):
    """What is asked of a pack."""

    concepts: Any

    def score_counts(self, aggregator: object = None) -> Any:
        """Return counts `[P, 128]` of the running scores of calibration text. Raises `ConfigError` without any."""


class _Traffic:
    """The newest log odds `[n, K]` of what all threads and rows compare, at most `most` of them."""

    def __init__(self) -> None:
        self._lock, self._window = threading.Lock(), np.empty((0, 0))

    def __reduce__(self) -> tuple[Any, ...]:  # a copy begins with nothing
        return _Traffic, ()

    def before(self, odds: Doubles, most: int) -> Doubles:
        """Add a token and return those before it."""
        with self._lock:
            window = self._window if len(self._window) else np.empty((0, len(odds)))
            self._window = np.concatenate([window[1:] if len(window) == most else window, odds[None]])
        return window


@dataclass(frozen=True)
class _Baseline:
    """A value by a baseline. `last`: so many tokens of the row are it, or with `traffic` of all rows, or the pack's
    counts where it is None; `of`: the aggregator whose running score is compared; `counts`: of the concepts, where the
    pack's are meant.
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
        """Return values `[K]`; `ordered [n, K]`: the log odds of the tokens before, in ascending order."""
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
    """How many deviations the log odds lie over the median: of scores on calibration text, or of the `last` tokens.

    NaN, which is over no threshold, until there are `LEAST_TOKENS` tokens to compare with. State: that of `of`; the log
    odds [n, K] of its last values.
    """

    _measure = "z"

    @property
    def ceiling(self) -> float:
        """What no value exceeds."""
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
    """The share, of n + 1, of scores on calibration text, or of the `last` tokens, that are lower.

    It is a p-value of conformal prediction from 1 (Vovk, Gammerman & Shafer 2005, "Algorithmic learning in a random
    world"): what ties, and what the counts of a pack have in one bin, is not lower. State as that of `ZScore`.
    """

    _measure = "rank"

    @property
    def ceiling(self) -> float:
        """What no value exceeds."""
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
    """Return what a text such as "z:pack", "rank:last:256" or "z:last:64:ema:0.3" names. Raises `ConfigError`."""
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"aggregate is {text!r}: give {BASELINES}")
    last = match["last"]
    if last is not None and not last.isdecimal():
        raise ConfigError(f"aggregate is {text!r}: {last!r} is not a whole number")
    of = Each() if match["of"] is None else parse(match["of"])
    return _MEASURES[match["measure"]](None if last is None else int(last), of, match["whose"] == "traffic")


def with_counts(aggregator: Aggregator, pack: HasScoreCounts, probes: Sequence[int]) -> Aggregator:
    """Return an aggregator of some concepts of a pack: with what the pack knows of these, where it compares with that;
    with traffic of their own, where it compares with traffic.

    Raises `ConfigError` where the pack knows nothing of one.
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
    """Return what no value of an aggregator exceeds: 1, but for z-scores and ranks."""
    return float(getattr(aggregator, "ceiling", 1.0))


def is_z_score(text: str | None) -> bool:
    """Whether a text names a z-score, whose thresholds may be 1 and more."""
    return text is not None and text.strip().startswith("z:")


def refuse_baseline(aggregator: Aggregator, what: str) -> None:
    """Raise `ConfigError` for a z-score or a rank: nothing is calibrated for these."""
    if isinstance(aggregator, _Baseline):
        raise ConfigError(
            f"{what} {aggregator}: nothing is calibrated for a z-score or a rank, which says by itself how unusual a"
            " score is. Give above= in the rule"
        )


def is_of_traffic(aggregator: Aggregator) -> bool:
    """Whether values depend on other rows, and on the order in which their tokens came."""
    return isinstance(aggregator, _Baseline) and aggregator.traffic


def needs_every_token(aggregator: Aggregator) -> bool:
    """Whether a token at which the concept was not evaluated would spoil the values of those after it."""
    return isinstance(aggregator, _Baseline) and aggregator.last is not None


def _middle(ordered: Doubles) -> Doubles:
    """Return the medians [K] of values [n, K] in ascending order."""
    n = len(ordered)
    middle: Doubles = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return middle
