"""Alerts on routing: raised where a metric is past one threshold, cleared where it is back over another, neither for a moment's sake.

    alerts = Alerts(DEFAULT_RULES, streams, n_experts=8, n_chosen=2, window=256)
    for alert in alerts.add(statistics_of_256_tokens, memory_share=0.4): ...       # Alert(raised=True, kind="collapse", ...)
    alerts.raised                                                               # what holds now

A rule looks at windows of each stream, one after the other; what it sees must hold for several in a row, but for a rule of one token,
`at_once`. Between its two thresholds it leaves things as they are, so that a metric near one does not flap. A window is full when it holds enough tokens of those
that its metric is over: decisions that are not finite fill none, codes that steer nothing fill none of how codes vary. A rule whose windows
do not fill is silent since it sees nothing, and is `unjudged`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass

import numpy as np

from probemon.bem.config import LEVELS
from probemon.checks import is_int, is_number, shown
from probemon.errors import ConfigError
from probemon.hierarchy import Ints, Mask
from probemon.telemetry.decisions import BEM, MOE, XLORA, Numbers, Stream
from probemon.telemetry.statistics import METRICS, RoutingStatistics, over

MEMORY = "memory_share"  # not of the routers: told beside them
_BASELINE = 4  # windows whose mean a drift is measured from
_PER_EXPERT = 100  # choices a window must hold for each expert, before one of them is said to have none
_DISTRIBUTIONS, _ALL = (MOE, XLORA), (MOE, XLORA, BEM)


@dataclass(frozen=True)
class Rule:
    """Raise `kind` where `metric` is beyond `raise_at`, clear it where it is back beyond `clear_at`: above if raise_at > clear_at, else below.

    Over windows of at least `window` tokens that the metric is over, `in_a_row` of them each time. `drift`: what is compared is the distance of the metric from
    its mean over the first four windows. `each_expert`: windows hold a hundred choices for each expert at least. `at_once`: it is raised by what there is of a
    window too, with the tokens of the batch that passed the threshold; it is cleared by full ones alone. For streams of `sources`, and of `levels` where any are
    named. Raises `ConfigError`.
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
            raise ConfigError(f"rule {self.kind!r}: {self.metric!r} is no metric of routing: there are {', '.join((*METRICS, MEMORY))}")
        if not is_number(self.raise_at) or not is_number(self.clear_at) or self.raise_at == self.clear_at:
            raise ConfigError(f"rule {self.kind!r}: raise_at is {shown(self.raise_at)}, clear_at {shown(self.clear_at)}: give two numbers that differ, else it flaps")
        if not is_int(self.window) or not is_int(self.in_a_row) or self.window < 1 or self.in_a_row < 1:
            raise ConfigError(f"rule {self.kind!r}: window is {shown(self.window)}, in_a_row {shown(self.in_a_row)}: give 1 or more")
        if self.at_once and (self.in_a_row > 1 or self.drift or self.each_expert or self.of_all):
            raise ConfigError(f"rule {self.kind!r}: at_once needs no full window, so give in_a_row=1, no drift, no each_expert, and a metric of each router")
        for name, given, choices in (("sources", self.sources, _ALL), ("levels", self.levels, LEVELS)):
            if not isinstance(given, (tuple, list)) or not all(one in choices for one in given):
                raise ConfigError(f"rule {self.kind!r}: {name} is {given!r}: give a tuple of some of {', '.join(choices)}")
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
    Rule("not finite", "not_finite_rate", 1e-9, 1e-10, in_a_row=1, at_once=True, sources=_ALL),  # one is enough; a window without any clears it
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
    Rule("entropy drift", "rank_entropy", 0.4, 0.25, window=2048, drift=True, sources=(BEM,), levels=("chunk", "token")),
    Rule("latency", "latency_p95_us", 2000.0, 1000.0, sources=_ALL),
    Rule("memory", MEMORY, 0.9, 0.85, sources=_ALL),
    Rule("code reuse", "code_reuse_rate", 0.9, 0.92, sources=(BEM,), levels=("chunk",)),
)  # fmt: skip


@dataclass(frozen=True)
class Alert:
    """`kind` was raised, or cleared, at token `at` of its streams: `value` of `metric` passed `threshold`. `stream`: None where it is of all; `drift`: value is a distance."""

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
        return f"{self.kind}{'' if self.raised else ' is over'}: {f'{self.stream}, ' if self.stream else ''}{what} (threshold {self.threshold:g}) at token {self.at}"


@dataclass
class _Watch:
    """A rule on its streams `which` (n of them, or 1 for all together): for how many windows a threshold was passed, of how many something is known, and what it was at first."""

    number: int
    rule: Rule
    which: Ints
    n: InitVar[int]

    def __post_init__(self, n: int) -> None:
        self.first, self.n_first = np.zeros(n), np.zeros(n, dtype=np.int64)
        self.streak, self.raised = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=bool)
        self.n_judged = np.zeros(n, dtype=np.int64)

    def moved(self, values: Numbers) -> Numbers:
        """How far values are from the mean of their first ones; NaN while these are few."""
        begins = self.n_first < _BASELINE
        told = begins & ~np.isnan(values)
        self.first[told] += values[told] / _BASELINE
        self.n_first += told
        return np.where(begins, np.nan, np.abs(values - self.first))


class Alerts:
    """Rules over S streams that are told about the same tokens, so many (`window`) with each `add`."""

    def __init__(self, rules: Sequence[Rule], streams: Sequence[Stream], n_experts: int, n_chosen: int, window: int) -> None:
        self._streams, self._sizes = list(streams), (n_experts, n_chosen, window)
        self._n_tokens = 0
        self._now: dict[tuple[int, int], Alert] = {}
        self._at_once: list[_Watch] = []
        self._watches: dict[tuple[int, str], list[_Watch]] = {}  # by how many tokens their windows have, and which
        self._windows: dict[tuple[int, str], RoutingStatistics] = {}
        self._memory: dict[tuple[int, str], float] = {}
        for number, rule in enumerate(rules):
            which = [i for i, stream in enumerate(streams) if rule.applies(stream)]
            if which:
                watch = _Watch(number, rule, np.array(which), 1 if rule.of_all else len(which))
                self._at_once += [watch] if rule.at_once else []
                self._watches.setdefault((rule.size(n_experts, n_chosen, window), over(rule.metric)), []).append(watch)

    @property
    def raised(self) -> list[Alert]:
        """What holds now, as it was raised, oldest first."""
        return sorted(self._now.values(), key=lambda alert: alert.at)

    @property
    def unjudged(self) -> list[tuple[Rule, int]]:
        """Rules that have not seen enough of each of their streams to be raised, with how many tokens they need: their silence says nothing."""
        return [
            (watch.rule, watch.rule.needs(*self._sizes)) for watches in self._watches.values() for watch in watches if (watch.n_judged < watch.rule.n_windows).any()
        ]

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
        found: list[Alert] = []
        for key, watches in self._watches.items():
            size, counts = key
            held = self._windows.setdefault(key, statistics.empty())
            held.merge(statistics)
            self._memory[key] = float(np.fmax(self._memory.get(key, math.nan), memory_share))
            full = held.counted(counts) >= size
            if full.any():
                found += [alert for watch in watches for alert in self._look(watch, held, full, self._memory[key])]
                held.forget(full)
                del self._memory[key]
        return found

    def _look(self, watch: _Watch, window: RoutingStatistics, full: Mask, memory_share: float) -> Iterator[Alert]:
        """At a window of those streams that have a `full` one; that of the others goes on."""
        rule = watch.rule
        which = watch.which[:1] if rule.of_all else watch.which
        full = full[which]
        values = np.where(full, memory_share if rule.metric == MEMORY else window.metric(rule.metric)[which], np.nan)
        return self._judge(watch, values, full, self._n_tokens)

    def _judge(self, watch: _Watch, values: Numbers, full: Mask, at: int) -> Iterator[Alert]:
        """At the metric's `values`, NaN where it is not known; `full`: where a window is counted."""
        rule = watch.rule
        watch.n_judged += ~np.isnan(values)
        if rule.drift:
            values = watch.moved(values)
        threshold = np.where(watch.raised, rule.clear_at, rule.raise_at)
        above = (rule.raise_at > rule.clear_at) != watch.raised  # to be cleared, it must go the other way
        past = np.where(above, values > threshold, values < threshold)  # NaN passes nothing
        watch.streak = np.where(past, watch.streak + 1, np.where(full, 0, watch.streak))
        for i in np.flatnonzero(watch.streak >= rule.in_a_row).tolist():
            watch.raised[i], watch.streak[i] = not watch.raised[i], 0
            stream = None if rule.of_all else self._streams[int(watch.which[i])]
            alert = Alert(bool(watch.raised[i]), rule.kind, rule.metric, stream, float(values[i]), float(threshold[i]), at, rule.drift)
            if alert.raised:
                self._now[watch.number, i] = alert
            else:
                del self._now[watch.number, i]
            yield alert
