"""Statistics of routers, and alerts on them, raised past one threshold and cleared past another.

A window is full when it holds enough tokens that count for the metric; non-finite decisions never do. Rules without
full windows are `unjudged`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace

import numpy as np
import torch

from probemon.adapters.bem.config import LEVELS
from probemon.adapters.bem.memory import gpu_memory
from probemon.adapters.routing.decisions import BEM, MOE, SLOTS, XLORA, Changes, Decisions, Numbers, Stream
from probemon.adapters.routing.statistics import METRICS, RoutingStatistics, over
from probemon.core.hierarchy import Ints, Mask
from probemon.errors import ConfigError
from probemon.util.checks import check_choice, check_count, is_number, shown
from probemon.util.host_memory import process_memory

MEMORY = "memory_share"  # of the machine
# Windows whose median is a baseline; odd, so that two bad ones are outvoted.
_BASELINE = 5
_PER_EXPERT = 100  # choices per expert in a window of `each_expert`
_DISTRIBUTIONS, _ALL = (MOE, XLORA), (MOE, XLORA, BEM, SLOTS)
_VARYING = ("chunk", "token")  # levels that change within a sequence
WINDOW = 256  # tokens; rule windows are multiples of it
Memory = Callable[[], tuple[int, int]]  # bytes in use, total bytes
Baseline = Mapping[tuple[Stream, str, int], float]  # by stream, metric, window size


@dataclass(frozen=True)
class AlertRule:
    """Raise `kind` if `metric` passes `raise_at`, clear it if the metric passes `clear_at` on the way back.

    High values are bad if raise_at > clear_at, else low ones. Raises `ConfigError`.

    - `window`: minimum tokens of a window.
    - `in_a_row`: successive windows that must pass.
    - `drift`: judge the distance from the baseline, by default the median of the first five windows without alerts.
    - `each_expert`: windows hold at least a hundred choices per expert.
    - `at_once`: windows that are not full may raise, but not clear.
    - `sources`, `levels`: kinds of router and BEM levels it applies to; no levels means all.
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
        rule = f"rule {self.kind!r}"
        check_choice(f"{rule}: metric", self.metric, (*METRICS, MEMORY))
        if not is_number(self.raise_at) or not is_number(self.clear_at) or self.raise_at == self.clear_at:
            raise ConfigError(
                f"{rule}: raise_at is {shown(self.raise_at)}, clear_at {shown(self.clear_at)}: give two numbers that"
                " differ, else it flaps"
            )
        for name in ("window", "in_a_row"):
            check_count(f"{rule}: {name}", getattr(self, name), least=1, remedy="give 1 or more")
        if self.at_once and (self.in_a_row > 1 or self.drift or self.each_expert or self.of_all):
            raise ConfigError(
                f"{rule}: at_once needs no full window, so give in_a_row=1, no drift, no each_expert, and a"
                " metric of each router"
            )
        for name, values, choices in (("sources", self.sources, _ALL), ("levels", self.levels, LEVELS)):
            listed = isinstance(values, (tuple, list)) and all(value in choices for value in values)
            if not listed or (name == "sources" and not values):
                raise ConfigError(f"{rule}: {name} is {values!r}: give a tuple of some of {', '.join(choices)}")

    @property
    def of_all(self) -> bool:
        """True if the metric covers all streams together."""
        return self.metric in (MEMORY, "latency_p95_us")

    @property
    def n_windows(self) -> int:
        """Windows needed to judge, including the baseline's."""
        return self.in_a_row + (_BASELINE if self.drift else 0)

    def applies(self, stream: Stream) -> bool:
        """True if the rule is for this stream."""
        return stream.source in self.sources and (not self.levels or stream.level in self.levels)

    def size(self, n_experts: int, n_chosen: int, window: int) -> int:
        """Tokens of a window, a multiple of `window`."""
        least = max(self.window, -(-_PER_EXPERT * n_experts // n_chosen) if self.each_expert else 0)
        return -(-least // window) * window

    def needs(self, n_experts: int, n_chosen: int, window: int) -> int:
        """Tokens needed to judge."""
        return 1 if self.at_once else self.size(n_experts, n_chosen, window) * self.n_windows


DEFAULT_RULES = (
    # One decision raises; a window without any clears.
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
    """`kind` was raised or cleared at token `at`: `value` of `metric` passed `threshold`.

    `stream` is None for a metric of all streams; with `drift`, `value` is the distance from the baseline.
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
    """A rule on its n streams `which` (1 for all together), with its state."""

    number: int
    rule: AlertRule
    which: Ints
    n: InitVar[int]
    size: int  # of a window, in tokens

    def __post_init__(self, n: int) -> None:
        self.reset(n)

    def reset(self, n: int) -> None:
        self.first = np.full((n, _BASELINE), np.nan)  # metric by baseline window
        self.n_first = np.zeros(n, dtype=np.int64)
        self.streak = np.zeros(n, dtype=np.int64)
        self.n_judged = np.zeros(n, dtype=np.int64)
        self.raised, self.has_given_baseline = np.zeros(n, dtype=bool), np.zeros(n, dtype=bool)

    def set_baseline(self, i: int, baseline: float) -> None:
        self.first[i], self.n_first[i], self.n_judged[i] = baseline, _BASELINE, _BASELINE
        self.has_given_baseline[i] = True

    @property
    def baseline(self) -> Numbers:
        """Medians `[n]`, NaN while unknown."""
        medians: Numbers = np.median(self.first, axis=1)
        return medians

    def distances(self, values: Numbers) -> Numbers:
        """Distances from the baseline, NaN while it is incomplete."""
        begins = self.n_first < _BASELINE
        self.n_judged += ~np.isnan(values) & ~begins
        return np.where(begins, np.nan, np.abs(values - self.baseline))

    def add_to_baseline(self, values: Numbers, healthy: Mask) -> None:
        taken = (self.n_first < _BASELINE) & ~np.isnan(values) & healthy
        self.first[taken, self.n_first[taken]] = values[taken]
        self.n_first += taken
        self.n_judged += taken


class Alerts:
    """Rules over S streams that decide about the same tokens; `baseline`: reference of drifts."""

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
        self._watches: dict[tuple[int, str], list[_Watch]] = {}  # by window size and `over(metric)`
        self._windows: dict[tuple[int, str], RoutingStatistics] = {}
        self._memory: dict[tuple[int, str], float] = {}
        self._alerted: dict[tuple[int, str], Mask] = {}  # streams with an alert during the window
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
        """Alerts in force, oldest first."""
        return sorted(self._now.values(), key=lambda alert: alert.at)

    @property
    def unjudged(self) -> list[tuple[AlertRule, int]]:
        """Rules that cannot judge every stream yet, with the tokens they need."""
        return [
            (
                watch.rule,
                watch.rule.needs(*self._sizes) - (watch.size * _BASELINE if watch.has_given_baseline.all() else 0),
            )
            for watch in itertools.chain.from_iterable(self._watches.values())
            if (watch.n_judged < watch.rule.n_windows).any()
        ]

    def baseline(self) -> dict[tuple[Stream, str, int], float]:
        """Return the known baselines of drifts."""
        return {
            (self._streams[int(stream)], watch.rule.metric, watch.size): float(value)
            for watch in itertools.chain.from_iterable(self._watches.values())
            if watch.rule.drift and not watch.rule.of_all
            for stream, value in zip(watch.which, watch.baseline, strict=True)
            if not math.isnan(value)
        }

    def reset_baseline(self) -> list[Alert]:
        """Measure drifts from the next window on; clear and return drift alerts."""
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
            if key in self._windows:  # begun before the reset
                self._alerted[key] |= self._windows[key].counted(key[1]) > 0
        return cleared

    def add_partial(self, statistics: RoutingStatistics) -> list[Alert]:
        """Return the alerts that `at_once` rules raise on an incomplete window."""
        alerts: list[Alert] = []
        for watch in self._at_once:
            not_raised = ~watch.raised
            values = np.where(not_raised, statistics.metric(watch.rule.metric)[watch.which], np.nan)
            watch.n_judged += ~np.isnan(values)
            alerts += self._judge(watch, values, not_raised, self._n_tokens + statistics.n_tokens)
        return alerts

    def add(self, statistics: RoutingStatistics, memory_share: float = math.nan) -> list[Alert]:
        """Add a window and the share of memory in use; return the alerts raised or cleared."""
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
        for watch, values, key in makes_baseline:  # last: windows that raise are not in baselines
            self._alerted[key] |= self._alerted_now()
            watch.add_to_baseline(values, watch.rule.of_all | ~self._alerted[key][self._which(watch)])
        for key, window, full in due:
            window.forget(full)
            self._alerted[key] &= ~full
            del self._memory[key]
        return alerts

    def _alerted_now(self) -> Mask:
        alerted = {alert.stream for alert in self._now.values()}
        return np.array([stream in alerted for stream in self._streams], dtype=bool)

    @staticmethod
    def _which(watch: _Watch) -> Ints:
        return watch.which[:1] if watch.rule.of_all else watch.which

    def _values(self, watch: _Watch, window: RoutingStatistics, full: Mask, memory_share: float) -> Numbers:
        metric, which = watch.rule.metric, self._which(watch)
        values: Numbers = np.where(
            full[which], memory_share if metric == MEMORY else window.metric(metric)[which], np.nan
        )
        return values

    def _judge(self, watch: _Watch, values: Numbers, full: Mask, at: int) -> Iterator[Alert]:
        rule = watch.rule
        threshold = np.where(watch.raised, rule.clear_at, rule.raise_at)
        above = (rule.raise_at > rule.clear_at) != watch.raised  # clearing is the reverse
        past = np.where(above, values > threshold, values < threshold)
        watch.streak = np.where(past, watch.streak + 1, np.where(full, 0, watch.streak))
        for i in np.flatnonzero(watch.streak >= rule.in_a_row).tolist():
            watch.raised[i], watch.streak[i] = not watch.raised[i], 0
            stream = None if rule.of_all else self._streams[int(watch.which[i])]
            value, passed = float(values[i]), float(threshold[i])
            alert = Alert(bool(watch.raised[i]), rule.kind, rule.metric, stream, value, passed, at, rule.drift)
            if alert.raised:
                self._now[watch.number, i] = alert
            else:
                del self._now[watch.number, i]
            yield alert


class Tally:
    """Statistics and alerts of S streams that decide about the same tokens.

    - `codes`: streams give codes, not distributions.
    - `memory`: called once a window.
    - `baseline`: reference for drifts.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        n_experts: int,
        n_chosen: int = 1,
        *,
        codes: bool = False,
        rules: Sequence[AlertRule] = DEFAULT_RULES,
        window: int = WINDOW,
        memory: Memory = lambda: (0, 0),
        baseline: Baseline | None = None,
    ) -> None:
        self.streams = list(streams)
        self.alerts = Alerts(rules, self.streams, n_experts, n_chosen, window, baseline)
        self.memory_watermark_bytes = 0
        self._memory, self._size = memory, window
        self._past = RoutingStatistics(len(self.streams), n_experts, n_chosen, codes=codes)
        self._window = self._past.empty()

    def add(self, decisions: Decisions, changes: Changes, latency_us: float) -> list[Alert]:
        """Add decisions about n tokens, each made in `latency_us`; return the alerts raised or cleared."""
        alerts: list[Alert] = []
        begin, n = 0, len(decisions)
        while begin < n:
            end = min(n, begin + self._size - self._window.n_tokens)
            if begin == 0 and end == n:
                self._window.add(decisions, changes)
            else:
                self._window.add(decisions.take(np.arange(begin, end)), changes.take(slice(begin, end)))
            self._window.latency.add(latency_us, (end - begin) * len(self.streams))
            begin = end
            alerts += self.alerts.add_partial(self._window)
            if self._window.n_tokens == self._size:
                used, most = self._memory()
                self.memory_watermark_bytes = max(self.memory_watermark_bytes, used)
                alerts += self.alerts.add(self._window, used / most if most else float("nan"))
                self._past.merge(self._window)
                self._window = self._window.empty()
        return alerts

    def total(self) -> RoutingStatistics:
        """Return the statistics so far."""
        total = self._past.empty()
        total.merge(self._past)
        total.merge(self._window)
        return total


def memory_of(device: torch.device) -> Memory:
    """Return a function that gives bytes in use and total bytes, of a GPU or this process."""
    return gpu_memory(device) if device.type == "cuda" else process_memory
