"""Alerts on routing: one is raised where a metric passes a threshold, and cleared where it is back past another.

    alerts = Alerts(DEFAULT_RULES, streams, n_experts=8, n_chosen=2, window=256)
    for alert in alerts.add(statistics_of_256_tokens, memory_share=0.4): ...  # Alert(raised=True, kind="collapse", ...)
    alerts.raised                                                               # what holds now

A rule looks at windows of each stream, one after the other. A metric must stay past the threshold for several windows
in a row, except for a rule that is `at_once`. Between the two thresholds nothing changes, so that a metric near one
does not flap. A window is full when it holds enough tokens that count for its metric: decisions that are not finite
count for none, codes that steer nothing do not count for how codes vary. A rule whose windows do not fill sees nothing;
it is listed as `unjudged`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace

import numpy as np

from probemon.adapters.bem.config import LEVELS
from probemon.adapters.routing.decisions import BEM, MOE, SLOTS, XLORA, Numbers, Stream
from probemon.adapters.routing.statistics import METRICS, RoutingStatistics, over
from probemon.core.hierarchy import Ints, Mask
from probemon.errors import ConfigError
from probemon.util.checks import is_int, is_number, shown

MEMORY = "memory_share"  # a metric of the machine, not of routers
# Windows whose median a drift is measured from: odd, so that it is the value of one, and two bad ones are outvoted.
_BASELINE = 5
_PER_EXPERT = 100  # choices a window must hold for each expert, before one of them is said to have none
_DISTRIBUTIONS, _ALL = (MOE, XLORA), (MOE, XLORA, BEM, SLOTS)
_VARYING = ("chunk", "token")  # levels whose codes change within a sequence
Baseline = Mapping[tuple[Stream, str, int], float]  # by stream, metric and tokens of a window


@dataclass(frozen=True)
class AlertRule:
    """Raise `kind` where `metric` is beyond `raise_at`, and clear it where the metric is back beyond `clear_at`.

    Where raise_at > clear_at, high values are bad, else low ones. Raises `ConfigError`.

    - `window`: the least tokens of a window, of those that count for the metric.
    - `in_a_row`: how many windows must pass the threshold, one after the other.
    - `drift`: compare the distance of the metric from its baseline, which is given, or its median over the first five
      windows in which no alert of the stream held.
    - `each_expert`: windows hold at least a hundred choices for each expert.
    - `at_once`: a window that is not full yet raises the alert too; only a full one clears it.
    - `sources`: the kinds of router that the rule is for.
    - `levels`: the levels of BEM codes that it is for; empty for all.
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
        for name, values, choices in (("sources", self.sources, _ALL), ("levels", self.levels, LEVELS)):
            if not isinstance(values, (tuple, list)) or not all(value in choices for value in values):
                raise ConfigError(
                    f"rule {self.kind!r}: {name} is {values!r}: give a tuple of some of {', '.join(choices)}"
                )
        if not self.sources:
            raise ConfigError(f"rule {self.kind!r}: it is for no sources: give some of {', '.join(_ALL)}")

    @property
    def of_all(self) -> bool:
        """Whether the metric is of all streams together."""
        return self.metric in (MEMORY, "latency_p95_us")

    @property
    def n_windows(self) -> int:
        """How many windows the rule needs to judge: those in a row, after those of the baseline of a drift."""
        return self.in_a_row + (_BASELINE if self.drift else 0)

    def applies(self, stream: Stream) -> bool:
        """Whether the rule is for this stream."""
        return stream.source in self.sources and (not self.levels or stream.level in self.levels)

    def size(self, n_experts: int, n_chosen: int, window: int) -> int:
        """Return the tokens of each of its windows, a multiple of `window`."""
        least = max(self.window, -(-_PER_EXPERT * n_experts // n_chosen) if self.each_expert else 0)
        return -(-least // window) * window

    def needs(self, n_experts: int, n_chosen: int, window: int) -> int:
        """Return how many tokens the rule needs to judge."""
        return 1 if self.at_once else self.size(n_experts, n_chosen, window) * self.n_windows


DEFAULT_RULES = (
    # One decision is enough; a window without any clears the alert.
    AlertRule("not finite", "not_finite_rate", 1e-9, 1e-10, in_a_row=1, at_once=True, sources=_ALL),
    AlertRule("collapse", "spread", 0.2, 0.35),
    AlertRule("collapse", "load_spread", 0.2, 0.35, sources=(MOE,)),
    AlertRule("collapse", "variation", 0.005, 0.01, window=1024, sources=(BEM,), levels=_VARYING),
    AlertRule("collapse", "effective_rank", 1.2, 1.4, window=1024, sources=(BEM,), levels=_VARYING),
    AlertRule("indifference", "decision_entropy", 0.98, 0.96),
    AlertRule("indifference", "code_norm", 0.02, 0.04, sources=(BEM,)),
    AlertRule("dead expert", "least_load", 0.01, 0.05, each_expert=True, sources=(MOE,)),
    AlertRule("dead expert", "least_weight", 0.01, 0.05, each_expert=True, sources=(XLORA,)),
    AlertRule("entropy drift", "decision_entropy", 0.15, 0.1, drift=True),
    AlertRule("entropy drift", "marginal_entropy", 0.25, 0.15, window=1024, drift=True),
    AlertRule("entropy drift", "rank_entropy", 0.4, 0.25, window=2048, drift=True, sources=(BEM,), levels=_VARYING),
    AlertRule("latency", "latency_p95_us", 2000.0, 1000.0, sources=_ALL),
    AlertRule("memory", MEMORY, 0.9, 0.85, sources=_ALL),
    AlertRule("code reuse", "code_reuse_rate", 0.9, 0.92, sources=(BEM,), levels=("chunk",)),
)  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """`kind` was raised, or cleared, at token `at` of its streams: `value` of `metric` passed `threshold`.

    `stream` is None where the metric is of all streams; with `drift`, `value` is a distance from the baseline.
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
    """A rule on its streams `which` (n of them, or 1 for all together), and what is known by it of each so far."""

    number: int
    rule: AlertRule
    which: Ints
    n: InitVar[int]
    size: int  # tokens of a window

    def __post_init__(self, n: int) -> None:
        self.reset(n)

    def reset(self, n: int) -> None:
        """Forget the baseline, and what was judged by it."""
        self.first = np.full((n, _BASELINE), np.nan)  # the metric in each window of the baseline
        self.n_first = np.zeros(n, dtype=np.int64)  # windows in the baseline
        self.streak = np.zeros(n, dtype=np.int64)  # windows in a row that passed the threshold
        self.n_judged = np.zeros(n, dtype=np.int64)  # windows in which the metric was known
        self.raised, self.has_given_baseline = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)

    def set_baseline(self, i: int, baseline: float) -> None:
        """Take the baseline of stream `i` from elsewhere."""
        self.first[i], self.n_first[i], self.n_judged[i] = baseline, _BASELINE, _BASELINE
        self.has_given_baseline[i] = True

    @property
    def baseline(self) -> Numbers:
        """`[n]`, NaN where it is not known yet."""
        medians: Numbers = np.median(self.first, axis=1)  # NaN with any NaN
        return medians

    def distances(self, values: Numbers) -> Numbers:
        """Return how far values are from the baseline, and NaN while it is still made."""
        begins = self.n_first < _BASELINE
        self.n_judged += ~np.isnan(values) & ~begins
        return np.where(begins, np.nan, np.abs(values - self.baseline))

    def add_to_baseline(self, values: Numbers, healthy: Mask) -> None:
        """Take those of `healthy` windows into a baseline that is still made."""
        taken = (self.n_first < _BASELINE) & ~np.isnan(values) & healthy
        self.first[taken, self.n_first[taken]] = values[taken]
        self.n_first += taken
        self.n_judged += taken


class Alerts:
    """Rules over S streams that decide about the same tokens, `window` of them with each `add`.

    `baseline` is that of drifts, where it is known from elsewhere.
    """

    def __init__(
        self,
        rules: Sequence[AlertRule],
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
                if rule.at_once:
                    self._at_once.append(watch)
                self._watches.setdefault((size, over(rule.metric)), []).append(watch)
                for i, stream in enumerate(which if rule.drift else []):
                    value = (baseline or {}).get((streams[stream], rule.metric, size))
                    if value is not None:
                        watch.set_baseline(i, value)

    @property
    def raised(self) -> list[Alert]:
        """The alerts that hold now, as they were raised, oldest first."""
        return sorted(self._now.values(), key=lambda alert: alert.at)

    def _all_watches(self) -> Iterator[_Watch]:
        return itertools.chain.from_iterable(self._watches.values())

    @property
    def unjudged(self) -> list[tuple[AlertRule, int]]:
        """The rules that have not seen enough of each stream to judge, with how many tokens they need.

        That such a rule raises nothing says nothing.
        """
        return [
            (
                watch.rule,
                watch.rule.needs(*self._sizes) - (watch.size * _BASELINE if watch.has_given_baseline.all() else 0),
            )
            for watch in self._all_watches()
            if (watch.n_judged < watch.rule.n_windows).any()
        ]

    def baseline(self) -> dict[tuple[Stream, str, int], float]:
        """Return what drifts are measured from, where it is known by now."""
        return {
            (self._streams[int(stream)], watch.rule.metric, watch.size): float(value)
            for watch in self._all_watches()
            if watch.rule.drift and not watch.rule.of_all
            for stream, value in zip(watch.which, watch.baseline, strict=True)
            if not math.isnan(value)
        }

    def reset_baseline(self) -> list[Alert]:
        """Measure drifts anew, from the windows that begin now. Clear the alerts of drift and return them."""
        cleared: list[Alert] = []
        for key, watches in self._watches.items():
            for watch in watches:
                if watch.rule.drift:
                    for i in np.flatnonzero(watch.raised).tolist():
                        alert = self._now.pop((watch.number, i))
                        cleared.append(
                            replace(alert, raised=False, value=0.0, threshold=watch.rule.clear_at, at=self._n_tokens)
                        )
                    watch.reset(len(watch.raised))
            if key in self._windows:  # what such a window holds so far was decided before
                self._alerted[key] |= self._windows[key].counted(key[1]) > 0
        return cleared

    def add_partial(self, statistics: RoutingStatistics) -> list[Alert]:
        """Return the alerts that a window raises which is not full yet, by the rules that are `at_once`."""
        alerts: list[Alert] = []
        for watch in self._at_once:
            not_raised = ~watch.raised
            values = np.where(not_raised, statistics.metric(watch.rule.metric)[watch.which], np.nan)
            watch.n_judged += ~np.isnan(values)
            alerts += self._judge(watch, values, not_raised, self._n_tokens + statistics.n_tokens)
        return alerts

    def add(self, statistics: RoutingStatistics, memory_share: float = math.nan) -> list[Alert]:
        """Add a window of tokens and the share of the memory in use; return the alerts that it raises or clears."""
        self._n_tokens += statistics.n_tokens
        due: list[tuple[tuple[int, str], RoutingStatistics, Mask]] = []
        for key in self._watches:
            size, counts = key
            window = self._windows.setdefault(key, statistics.empty())
            window.merge(statistics)
            self._memory[key] = float(np.fmax(self._memory.get(key, math.nan), memory_share))
            self._alerted[key] = self._alerted.get(key, False) | self._alerted_now()
            full = window.counted(counts) >= size
            if full.any():
                due.append((key, window, full))
        alerts: list[Alert] = []
        makes_baseline: list[tuple[_Watch, Numbers, tuple[int, str]]] = []
        for key, window, full in due:
            for watch in self._watches[key]:
                values = self._values(watch, window, full, self._memory[key])
                if watch.rule.drift:
                    makes_baseline.append((watch, values, key))
                    values = watch.distances(values)
                else:
                    watch.n_judged += ~np.isnan(values)
                alerts += self._judge(watch, values, full[self._which(watch)], self._n_tokens)
        for watch, values, key in makes_baseline:  # last: what these very windows raise keeps them out of baselines
            self._alerted[key] |= self._alerted_now()
            watch.add_to_baseline(values, watch.rule.of_all | ~self._alerted[key][self._which(watch)])
        for key, window, full in due:
            window.forget(full)
            self._alerted[key] &= ~full
            del self._memory[key]
        return alerts

    def _alerted_now(self) -> Mask:
        """Of which streams an alert holds."""
        alerted = {alert.stream for alert in self._now.values()}
        return np.array([stream in alerted for stream in self._streams], dtype=bool)

    @staticmethod
    def _which(watch: _Watch) -> Ints:
        return watch.which[:1] if watch.rule.of_all else watch.which

    def _values(self, watch: _Watch, window: RoutingStatistics, full: Mask, memory_share: float) -> Numbers:
        """The metric of each stream of a watch, NaN where its window is not `full`."""
        metric, which = watch.rule.metric, self._which(watch)
        values: Numbers = np.where(
            full[which], memory_share if metric == MEMORY else window.metric(metric)[which], np.nan
        )
        return values

    def _judge(self, watch: _Watch, values: Numbers, full: Mask, at: int) -> Iterator[Alert]:
        """Judge the metric's `values`, NaN where it is not known; `full`: where a window is counted."""
        rule = watch.rule
        threshold = np.where(watch.raised, rule.clear_at, rule.raise_at)
        above = (rule.raise_at > rule.clear_at) != watch.raised  # to be cleared, it must go the other way
        past = np.where(above, values > threshold, values < threshold)  # NaN passes nothing
        watch.streak = np.where(past, watch.streak + 1, np.where(full, 0, watch.streak))
        for i in np.flatnonzero(watch.streak >= rule.in_a_row).tolist():
            watch.raised[i], watch.streak[i] = not watch.raised[i], 0
            stream = None if rule.of_all else self._streams[int(watch.which[i])]
            alert = Alert(
                raised=bool(watch.raised[i]),
                kind=rule.kind,
                metric=rule.metric,
                stream=stream,
                value=float(values[i]),
                threshold=float(threshold[i]),
                at=at,
                drift=rule.drift,
            )
            if alert.raised:
                self._now[watch.number, i] = alert
            else:
                del self._now[watch.number, i]
            yield alert
