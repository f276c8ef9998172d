"""Alerts on routing: raised where a metric is past one threshold, cleared where it is back over another, neither for a
moment's sake.

    alerts = Alerts(DEFAULT_RULES, streams, n_experts=8, n_chosen=2, window=256)
    for alert in alerts.add(statistics_of_256_tokens, memory_share=0.4): ...  # Alert(raised=True, kind="collapse", ...)
    alerts.raised                                                               # what holds now

A rule looks at windows of each stream, one after the other; what it sees must hold for several in a row, but for a rule
of one token, `at_once`. Between its two thresholds it leaves things as they are, so that a metric near one does not
flap. A window is full when it holds enough tokens of those that its metric is over: decisions that are not finite fill
none, codes that steer nothing fill none of how codes vary. A rule whose windows do not fill is silent since it sees
nothing, and is `unjudged`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace

import numpy as np

from probemon.bem.config import LEVELS
from probemon.core.checks import is_int, is_number, shown
from probemon.core.hierarchy import Ints, Mask
from probemon.errors import ConfigError
from probemon.telemetry.decisions import BEM, MOE, XLORA, Numbers, Stream
from probemon.telemetry.statistics import METRICS, RoutingStatistics, over

MEMORY = "memory_share"  # not of the routers: told beside them
# Windows whose median a drift is measured from: odd, so that it is the value of one, and two bad ones are outvoted.
_BASELINE = 5
_PER_EXPERT = 100  # choices a window must hold for each expert, before one of them is said to have none
_DISTRIBUTIONS, _ALL = (MOE, XLORA), (MOE, XLORA, BEM)
Baseline = Mapping[tuple[Stream, str, int], float]  # by stream, metric and tokens of a window


@dataclass(frozen=True)
class Rule:
    """Raise `kind` where `metric` is beyond `raise_at`, clear it where it is back beyond `clear_at`: above if raise_at
    > clear_at, else below.

    Over windows of at least `window` tokens that the metric is over, `in_a_row` of them each time. `drift`: what is
    compared is the distance of the metric from its median over the first five windows in which no alert of the stream
    held, or from a baseline that is given. `each_expert`: windows hold a hundred choices for each expert at least.
    `at_once`: it is raised by what there is of a window too, with the tokens of the batch that passed the threshold; it
    is cleared by full ones alone. For streams of `sources`, and of `levels` where any are named. Raises `ConfigError`.
    """

    kind: str
    metric: str
    raise_at: float
    clear_at: float
    window: int = 512
    in_a_row: int = 2
    drift: bool = False
    each_expert: bool = False
    at_once: bool = False
    sources: tuple[str, ...] = _DISTRIBUTIONS
    levels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not self.kind:
            raise ConfigError(f"a rule's kind is {self.kind!r}: give the name that its alerts go by")
        if self.metric not in (*METRICS, MEMORY):
            raise ConfigError(
                f"rule {self.kind!r}: {self.metric!r} is no metric of routing: there are"
                f" {', '.join((*METRICS, MEMORY))}"
            )
        if not is_number(self.raise_at) or not is_number(self.clear_at) or self.raise_at == self.clear_at:
            raise ConfigError(
                f"rule {self.kind!r}: raise_at is {shown(self.raise_at)}, clear_at {shown(self.clear_at)}: give two"
                " numbers that differ, else it flaps"
            )
        if not is_int(self.window) or not is_int(self.in_a_row) or self.window < 1 or self.in_a_row < 1:
            raise ConfigError(
                f"rule {self.kind!r}: window is {shown(self.window)}, in_a_row {shown(self.in_a_row)}: give 1 or more"
            )
        if self.at_once and (self.in_a_row > 1 or self.drift or self.each_expert or self.of_all):
            raise ConfigError(
                f"rule {self.kind!r}: at_once needs no full window, so give in_a_row=1, no drift, no each_expert, and a"
                " metric of each router"
            )
        for name, given, choices in (("sources", self.sources, _ALL), ("levels", self.levels, LEVELS)):
            if not isinstance(given, (tuple, list)) or not all(one in choices for one in given):
                raise ConfigError(
                    f"rule {self.kind!r}: {name} is {given!r}: give a tuple of some of {', '.join(choices)}"
                )
        if not self.sources:
            raise ConfigError(f"rule {self.kind!r}: it is for no sources: give some of {', '.join(_ALL)}")

    @property
    def of_all(self) -> bool:
        """Whether the metric is of all streams together."""
        return self.metric in (MEMORY, "latency_p95_us")

    @property
    def n_windows(self) -> int:
        """How many it takes to be judged: those in a row, after those that a drift is measured from."""
        return self.in_a_row + (_BASELINE if self.drift else 0)

    def applies(self, stream: Stream) -> bool:
        """Whether it is for this one."""
        return stream.source in self.sources and (not self.levels or stream.level in self.levels)

    def size(self, n_experts: int, n_chosen: int, window: int) -> int:
        """Tokens of each of its windows, which are made of ones of `window` tokens."""
        least = max(self.window, -(-_PER_EXPERT * n_experts // n_chosen) if self.each_expert else 0)
        return -(-least // window) * window

    def needs(self, n_experts: int, n_chosen: int, window: int) -> int:
        """Tokens that it takes to be judged."""
        return 1 if self.at_once else self.size(n_experts, n_chosen, window) * self.n_windows


DEFAULT_RULES = (
    Rule("not finite", "not_finite_rate", 1e-9, 1e-10, in_a_row=1, at_once=True, sources=_ALL),
     # one is enough; a window without any clears it
    Rule("collapse", "spread", 0.2, 0.35),
    Rule("collapse", "load_spread", 0.2, 0.35, sources=(MOE,)),
    Rule("collapse", "variation", 0.005, 0.01, window=1024, sources=(BEM,), levels=("chunk", "token")),
    Rule("collapse", "effective_rank", 1.2, 1.4, window=1024, sources=(BEM,), levels=("chunk", "token")),
    Rule("indifference", "decision_entropy", 0.98, 0.96),
    Rule("indifference", "code_norm", 0.02, 0.04, sources=(BEM,)),
    Rule("dead expert", "least_load", 0.01, 0.05, each_expert=True, sources=(MOE,)),
    Rule("dead expert", "least_weight", 0.01, 0.05, each_expert=True, sources=(XLORA,)),
    Rule("entropy drift", "decision_entropy", 0.15, 0.1, drift=True),
    Rule("entropy drift", "marginal_entropy", 0.25, 0.15, window=1024, drift=True),
    Rule("entropy drift", "rank_entropy", 0.4, 0.25, window=2048, drift=True, sources=(BEM,), levels=("chunk",
    "token")),
    Rule("latency", "latency_p95_us", 2000.0, 1000.0, sources=_ALL),
    Rule("memory", MEMORY, 0.9, 0.85, sources=_ALL),
    Rule("code reuse", "code_reuse_rate", 0.9, 0.92, sources=(BEM,), levels=("chunk",)),
)  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """`kind` was raised, or cleared, at token `at` of its streams: `value` of `metric` passed `threshold`. `stream`:
    None where it is of all; `drift`: value is a distance.
    """

    raised: bool
    kind: str
    metric: str
    stream: Stream | None
    value: float
    threshold: float
    at: int
    drift: bool = False

    def __str__(self) -> str:
        what = f"{self.metric}{' moved by' if self.drift else ''} {self.value:.3g}"
        return (
            f"{self.kind}{'' if self.raised else ' is over'}: {f'{self.stream}, ' if self.stream else ''}{what}"
            f" (threshold {self.threshold:g}) at token {self.at}"
        )


@dataclass
class _Watch:
    """A rule on its streams `which` (n of them, or 1 for all together): for how many windows a threshold was passed, of
    how many something is known, and what it was at first.
    """

    number: int
    rule: Rule
    which: Ints
    n: InitVar[int]
    size: int  # tokens of a window
    first: Numbers = field(init=False)  # [n, 5], of the windows of a baseline

    def __post_init__(self, n: int) -> None:
        self.streak, self.raised = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool)
        self.n_judged, self.given = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool)
        self.forget()

    def forget(self) -> None:
        """The baseline, and what was said by it."""
        n = len(self.streak)
        self.first, self.n_first = np.full((n, _BASELINE), np.nan), np.zeros(n, dtype=np.int64)
        self.streak[:], self.raised[:], self.n_judged[:], self.given[:] = 0, False, 0, False

    def take(self, i: int, baseline: float) -> None:
        """A baseline from elsewhere."""
        self.first[i], self.n_first[i], self.n_judged[i], self.given[i] = baseline, _BASELINE, _BASELINE, True

    @property
    def baseline(self) -> Numbers:
        """`[n]`, NaN where it is not known yet."""
        found: Numbers = np.median(self.first, axis=1)  # NaN with any NaN
        return found

    def moved(self, values: Numbers, healthy: Mask) -> Numbers:
        """How far values are from the baseline; NaN while windows are still taken into it, which those that are not
        `healthy` are not.
        """
        known = ~np.isnan(values)
        begins = self.n_first < _BASELINE
        taken = begins & known & healthy
        self.first[taken, self.n_first[taken]] = values[taken]
        self.n_first += taken
        self.n_judged += taken | (known & ~begins)
        return np.where(begins, np.nan, np.abs(values - self.baseline))


class Alerts:
    """Rules over S streams that are told about the same tokens, so many (`window`) with each `add`. `baseline`: of
    drifts, where it is known from elsewhere.
    """

    def __init__(
        self,
        rules: Sequence[Rule],
        streams: Sequence[Stream],
        n_experts: int,
        n_chosen: int,
        window: int,
        baseline: Baseline | None = None,
    ) -> None:
        self._streams, self._sizes = list(streams), (n_experts, n_chosen, window)
        self._n_tokens = 0
        self._now: dict[tuple[int, int], Alert] = {}
        self._at_once: list[_Watch] = []
        self._watches: dict[tuple[int, str], list[_Watch]] = {}  # by how many tokens their windows have, and which
        self._windows: dict[tuple[int, str], RoutingStatistics] = {}
        self._memory: dict[tuple[int, str], float] = {}
        self._alerted: dict[tuple[int, str], Mask] = {}  # of which streams an alert held at some time in the window
        for number, rule in enumerate(rules):
            which = [i for i, stream in enumerate(streams) if rule.applies(stream)]
            if which:
                size = rule.size(n_experts, n_chosen, window)
                watch = _Watch(number, rule, np.array(which), 1 if rule.of_all else len(which), size)
                self._at_once += [watch] if rule.at_once else []
                self._watches.setdefault((size, over(rule.metric)), []).append(watch)
                for i, stream in enumerate(which if rule.drift else []):
                    given = (baseline or {}).get((streams[stream], rule.metric, size))
                    if given is not None:
                        watch.take(i, given)

    @property
    def raised(self) -> list[Alert]:
        """What holds now, as it was raised, oldest first."""
        return sorted(self._now.values(), key=lambda alert: alert.at)

    @property
    def unjudged(self) -> list[tuple[Rule, int]]:
        """Rules that have not seen enough of each of their streams to be raised, with how many tokens they need: their
        silence says nothing.
        """
        return [
            (watch.rule, watch.rule.needs(*self._sizes) - (watch.size * _BASELINE if watch.given.all() else 0))
            for watches in self._watches.values()
            for watch in watches
            if (watch.n_judged < watch.rule.n_windows).any()
        ]

    def baseline(self) -> dict[tuple[Stream, str, int], float]:
        """What drifts are measured from, where it is known by now."""
        drifts = [
            watch
            for watches in self._watches.values()
            for watch in watches
            if watch.rule.drift and not watch.rule.of_all
        ]
        return {
            (self._streams[int(stream)], watch.rule.metric, watch.size): float(value)
            for watch in drifts
            for stream, value in zip(watch.which, watch.baseline, strict=True)
            if not math.isnan(value)
        }

    def reset_baseline(self) -> list[Alert]:
        """Measure drifts anew, from the windows that begin now. Alerts of drift are over with it, and are given back
        so.
        """
        over_now: list[Alert] = []
        for (size, counts), watches in self._watches.items():
            for watch in watches:
                if watch.rule.drift:
                    for i in np.flatnonzero(watch.raised).tolist():
                        was = self._now.pop((watch.number, i))
                        over_now.append(
                            replace(was, raised=False, value=0.0, threshold=watch.rule.clear_at, at=self._n_tokens)
                        )
                    watch.forget()
            if (size, counts) in self._windows:
                self._alerted[size, counts] |= (
                    self._windows[size, counts].counted(counts) > 0
                )  # what its window has so far is of before
        return over_now

    def begun(self, statistics: RoutingStatistics) -> list[Alert]:
        """What is raised by a window that is not full yet."""
        found: list[Alert] = []
        for watch in self._at_once:
            open_ = ~watch.raised
            values = np.where(open_, statistics.metric(watch.rule.metric)[watch.which], np.nan)
            found += self._judge(watch, values, open_, self._n_tokens + statistics.n_tokens)
        return found

    def add(self, statistics: RoutingStatistics, memory_share: float = math.nan) -> list[Alert]:
        """One more window of tokens, and what share of the memory is in use; what was raised or cleared by it."""
        self._n_tokens += statistics.n_tokens
        due: list[tuple[tuple[int, str], RoutingStatistics, Mask]] = []
        for key in self._watches:
            size, counts = key
            held = self._windows.setdefault(key, statistics.empty())
            held.merge(statistics)
            self._memory[key] = float(np.fmax(self._memory.get(key, math.nan), memory_share))
            self._alerted[key] = self._alerted.get(key, False) | self._alerted_now()
            full = held.counted(counts) >= size
            if full.any():
                due.append((key, held, full))
        found: list[Alert] = []
        for drift in (False, True):  # what is raised by these very windows keeps them out of baselines
            for key, held, full in due:
                self._alerted[key] |= self._alerted_now()
                for watch in self._watches[key]:
                    if watch.rule.drift == drift:
                        found += self._look(watch, held, full, self._memory[key], ~self._alerted[key])
        for key, held, full in due:
            held.forget(full)
            self._alerted[key] &= ~full
            del self._memory[key]
        return found

    def _alerted_now(self) -> Mask:
        """Of which streams an alert holds."""
        alerted = {alert.stream for alert in self._now.values()}
        return np.array([stream in alerted for stream in self._streams], dtype=bool)

    def _look(
        self, watch: _Watch, window: RoutingStatistics, full: Mask, memory_share: float, healthy: Mask
    ) -> Iterator[Alert]:
        """At a window of those streams that have a `full` one; that of the others goes on. `healthy`: no alert of the
        stream held in it.
        """
        rule = watch.rule
        which = watch.which[:1] if rule.of_all else watch.which
        full = full[which]
        values = np.where(full, memory_share if rule.metric == MEMORY else window.metric(rule.metric)[which], np.nan)
        return self._judge(
            watch, values, full, self._n_tokens, np.ones(1, dtype=bool) if rule.of_all else healthy[which]
        )

    def _judge(
        self, watch: _Watch, values: Numbers, full: Mask, at: int, healthy: Mask | None = None
    ) -> Iterator[Alert]:
        """At the metric's `values`, NaN where it is not known; `full`: where a window is counted."""
        rule = watch.rule
        if rule.drift:
            assert healthy is not None  # a rule at once has no drift
            values = watch.moved(values, healthy)
        else:
            watch.n_judged += ~np.isnan(values)
        threshold = np.where(watch.raised, rule.clear_at, rule.raise_at)
        above = (rule.raise_at > rule.clear_at) != watch.raised  # to be cleared, it must go the other way
        past = np.where(above, values > threshold, values < threshold)  # NaN passes nothing
        watch.streak = np.where(past, watch.streak + 1, np.where(full, 0, watch.streak))
        for i in np.flatnonzero(watch.streak >= rule.in_a_row).tolist():
            watch.raised[i], watch.streak[i] = not watch.raised[i], 0
            stream = None if rule.of_all else self._streams[int(watch.which[i])]
            alert = Alert(
                bool(watch.raised[i]),
                rule.kind,
                rule.metric,
                stream,
                float(values[i]),
                float(threshold[i]),
                at,
                rule.drift,
            )
            if alert.raised:
                self._now[watch.number, i] = alert
            else:
                del self._now[watch.number, i]
            yield alert
