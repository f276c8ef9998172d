"""RoutingRecorder: what routers decided about accepted tokens, as they are handed over, into records, statistics and
alerts.

    recorder = RoutingRecorder(model, RoutingSettings(), guard)
    watcher = Watcher(model, [*sites, *recorder.sites], n_probes, recorder.beside(score), on_end=recorder.ended)
    recorder.report()                               # per router: entropies, load, flips, ...; latency, memory, alerts

It is hosted by a `RoutingMonitor`, or by the run that watches with probes: either hands over tokens whose place is
known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.checks import check_count
from probemon.core.hierarchy import Ints
from probemon.core.scores import GENERATED, PHASES, PROMPT
from probemon.errors import ConfigError, UnknownSetting, closest
from probemon.host.tap import Site
from probemon.monitor.delivery import Delivery
from probemon.telemetry.alerts import DEFAULT_RULES, Alert, Rule
from probemon.telemetry.baseline import check_baseline, entries, read_baseline, write_baseline
from probemon.telemetry.decisions import MOE, Decisions, History, Singles, Stream, Told
from probemon.telemetry.records import RoutingRecord
from probemon.telemetry.routers import Source, find_sources
from probemon.telemetry.sketch import LogSketch
from probemon.telemetry.statistics import QUANTILES, RoutingStatistics
from probemon.telemetry.tally import WINDOW, Memory, Tally, memory_of
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report, ScoreTokens
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording

Listener = Callable[[PlacedTokens, Decisions, RoutingRecord], object]
LOG = logging.getLogger("probemon")
_CELLS = 1 << 20  # weights turned into statistics at once: a long prompt of many experts is taken in parts


@dataclass(frozen=True)
class RoutingSettings:
    """How routing is watched. `rules`: for alerts; `window`: tokens of their smallest windows. `bem`: what `attach_bem`
    gave, or its controller.

    `run_id`: in every record, else one is made; `memory`: gives (bytes in use, bytes there are), else the GPU's or the
    process's. `baseline`: what drifts are measured from,
    of an earlier run: its report, or the file that `save_baseline` wrote; without it, of a router that it lacks or
    after `reset_baseline`, what is seen first in windows without alerts.
    """

    rules: tuple[Rule, ...] = DEFAULT_RULES
    window: int = WINDOW
    bem: Any = None
    run_id: str = ""
    memory: Memory | None = None
    baseline: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "window", check_count("window", self.window, least=1, remedy="it counts tokens, so give 1 or more")
        )
        if self.memory is not None and not callable(self.memory):
            raise ConfigError(f"memory is {self.memory!r}: give what returns bytes in use and bytes there are")
        if not isinstance(self.rules, (tuple, list)):
            raise ConfigError(f"rules is {self.rules!r}: give a tuple of rules")
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ConfigError(
                    f"{rule!r} is no rule: give Rule(...) of probemon.telemetry.alerts, or leave rules out"
                )

    @classmethod
    def by_name(cls, **settings: Any) -> RoutingSettings:
        """The same. Raises `UnknownSetting` naming all that there are."""
        known = [one.name for one in fields(cls)]
        for name in settings:
            if name not in known:
                raise UnknownSetting(
                    f"there is no setting {name!r} of routing{closest(name, known)}: there are {', '.join(known)}"
                )
        return cls(**settings)


@dataclass(frozen=True)
class _Waiting:
    """Decisions about tokens of beams, which may not be in the output; `entries [n]`: which of their recording each
    token is.
    """

    placed: PlacedTokens
    entries: Ints
    decisions: Decisions
    latency_us: float


@dataclass
class _Followed:
    """One source's part of a generation: what its rows had last, and what waits for the generation's end."""

    history: History
    waiting: list[_Waiting] = field(default_factory=list)


class RoutingRecorder:
    """`guard(what, function, *arguments)` calls what the user gave, and keeps what it raises from the host. Raises
    `NotSupportedHost`, `ConfigError`.

    With beams, decisions are told of when `generate()` returns. One that several returned sequences share (of their
    prompt, or of what they begin with) is recorded and counted once, in the first row that has it.
    """

    def __init__(self, model: Any, settings: RoutingSettings | None, guard: Callable[..., None]) -> None:
        if settings is not None and not isinstance(settings, RoutingSettings):
            raise ConfigError(
                f"settings of routing are {settings!r}: give a RoutingSettings, with bem= for a BEM adapter;"
                " manager.attach takes routing=True for the defaults"
            )
        settings = settings or RoutingSettings()
        self.sources: list[Source] = find_sources(model, bem=settings.bem)
        self.run_id = settings.run_id or uuid.uuid4().hex
        self.n_unseen = self.n_tokens = 0
        self.n_alerts = 0  # raised so far
        self._settings, self._guard = settings, guard
        self._baseline = {} if settings.baseline is None else read_baseline(settings.baseline)
        check_baseline(self._baseline, self.sources, settings.rules, settings.window)
        self._memory = memory_of(model.device) if settings.memory is None else self._guarded_memory(settings.memory)
        self._tallies: dict[int, Tally] = {}
        self._followed: weakref.WeakKeyDictionary[Recording, dict[int, _Followed]] = weakref.WeakKeyDictionary()
        self._deliveries: list[Delivery] = []
        self._listeners: list[Listener] = []
        self._on_alert: list[Callable[[Alert], object]] = []
        self._lock, self._closed = threading.RLock(), False
        self._reading = threading.local()
        self.sites = [_timed(site, self._reading) for source in self.sources for site in source.sites]  # for a Watcher

    # -- the face --------------------------------------------------------------------------------

    def add_sink(self, sink: Any, *, max_batches: int = 1024) -> Delivery:
        """Send every record to a sink (`RoutingJsonLines`, `RoutingParquet`, `CallbackSink`), in a thread of its own,
        until the block ends.
        """
        if self._closed:
            raise ConfigError("the block has ended, so this sink would be given nothing: add it before")
        if not all(callable(getattr(sink, name, None)) for name in ("open", "write", "close")):
            raise ConfigError(f"a sink has open, write and close, {sink!r} has not: see probemon.telemetry.records")
        self._deliveries.append(Delivery(sink, [], max_batches=max_batches))
        return self._deliveries[-1]

    def listen(self, listener: Listener) -> None:
        """Call `listener(placed, decisions, record)` with every batch of tokens, in the thread that generates: with
        beams, at the end.
        """
        _check_call("listen", listener)
        self._listeners.append(listener)

    def on_alert(self, action: Callable[[Alert], object]) -> None:
        """Call `action(alert)` where an alert is raised or cleared, in the thread that generates."""
        _check_call("on_alert", action)
        self._on_alert.append(action)

    @property
    def alerts(self) -> list[Alert]:
        """Those that hold now."""
        with self._lock:
            return [alert for tally in self._tallies.values() for alert in tally.alerts.raised]

    def save_baseline(self, path: str | os.PathLike[str]) -> None:
        """Write what drifts are measured from, for `baseline=` of another run. Raises `ConfigError` where none is known
        yet.
        """
        with self._lock:
            write_baseline(path, self._known_baseline())

    def reset_baseline(self) -> None:
        """Forget what drifts are measured from, a given baseline too: it is found anew in the next windows without
        alerts. Alerts of drift that hold are over.
        """
        with self._lock:
            self._baseline = {}
            for tally in self._tallies.values():
                self._tell(tally.alerts.reset_baseline())

    def _known_baseline(self) -> dict[tuple[Stream, str, int], float]:
        return {
            **self._baseline,
            **{key: value for tally in self._tallies.values() for key, value in tally.alerts.baseline().items()},
        }

    def statistics(self) -> list[tuple[Source, RoutingStatistics]]:
        """Of each source that decided anything, of everything so far."""
        with self._lock:
            return [(self.sources[number], tally.total()) for number, tally in self._tallies.items()]

    def report(self) -> dict[str, Any]:
        """Everything so far, for JSON: `streams` with their metrics, `latency_us` of a decision's capture,
        `memory_watermark_bytes`, `alerts`.

        `baseline`: what drifts are measured from, of each router and metric where it is known by now; `baseline=` of
        another run takes this report.

        `unjudged`: kinds of alert for which too few tokens that count were seen of some router, and how many it takes:
        that there is none of them says nothing. For baselines
        of drift count windows without alerts alone. Decisions
        that are not finite do not count, nor do, for how codes vary and are reused, codes that steer nothing. What a
        router has not (a choice, where every expert is chosen; dimensions, at a rank of 1) is never judged.
        """
        with self._lock:
            streams, latency = [], LogSketch()
            for source, statistics in self.statistics():
                latency.merge(statistics.latency)
                for stream, metrics in zip(source.streams, statistics.as_dicts(), strict=True):
                    streams.append(
                        {
                            "source": stream.source,
                            "site": stream.site,
                            "layer": stream.layer,
                            "level": stream.level,
                            **metrics,
                        }
                    )
            watermark = max([self._memory()[0], *(tally.memory_watermark_bytes for tally in self._tallies.values())])
            return {
                "run_id": self.run_id,
                "n_tokens": self.n_tokens,
                "n_unseen": self.n_unseen,
                "streams": streams,
                "latency_us": {name: latency.quantile(q) if latency.n else None for name, q in QUANTILES.items()},
                "latency_relative_error": latency.relative_error,
                "memory_watermark_bytes": watermark,
                "alerts": [str(alert) for alert in self.alerts],
                "n_alerts": self.n_alerts,
                "unjudged": self._unjudged(),
                "baseline": entries(self._known_baseline()),
            }

    def _unjudged(self) -> dict[str, int]:
        """By kind of alert, the tokens that its rules need and have not seen; the most, where they differ.

        A rule that no router here is for is among them, unless it is a default one beside others: those are for every
        kind of router.
        """
        rules, window = self._settings.rules, self._settings.window
        judged, unjudged = set[int](), list[tuple[Rule, int]]()
        for number, source in enumerate(self.sources):
            mine = [
                i
                for i, rule in enumerate(rules)
                if (any(map(rule.applies, source.streams)) if source.streams else source.kind in rule.sources)
            ]
            judged.update(mine)
            if number in self._tallies:
                unjudged += self._tallies[number].alerts.unjudged
            else:
                unjudged += [(rules[i], rules[i].needs(source.n_experts, source.n_chosen, window)) for i in mine]
        unjudged += [
            (rule, rule.needs(0, 1, window))
            for i, rule in enumerate(rules)
            if i not in judged and (rule not in DEFAULT_RULES or not judged)
        ]
        found: dict[str, int] = {}
        for rule, needed in unjudged:
            found[rule.kind] = max(found.get(rule.kind, 0), needed)
        return found

    def close(self) -> list[Exception]:
        """Finish the sinks; what they failed with."""
        self._closed = True
        for delivery in self._deliveries:
            delivery.close()
            stats = delivery.stats()
            if stats.error is None and stats.n_dropped:
                LOG.warning(
                    "a sink of routing was too slow: %d of %d decisions were dropped",
                    stats.n_dropped,
                    stats.n_written + stats.n_dropped,
                )
        errors = [delivery.stats().error for delivery in self._deliveries]
        return [
            error if isinstance(error, Exception) else RuntimeError(repr(error))
            for error in errors
            if error is not None
        ]

    # -- tokens with what routers gave -----------------------------------------------------------

    def take(self, recording: Recording, placed: PlacedTokens, states: States | str) -> Callable[[], None] | None:
        """Accepted tokens, in order, before they are added to `recording`: what records their decisions once the
        forward has ended.
        """
        if not len(placed):
            return None
        first_entry, begin = recording.n_entries, time.perf_counter()
        if isinstance(states, str):
            with self._lock:
                self.n_unseen += len(placed)
                for followed in self._followed.get(recording, {}).values():
                    followed.history.forget(placed.rows)
            return None
        arrived = _to_host({site.name: states[site.name] for source in self.sources for site in source.sites})
        spent = time.perf_counter() - begin + getattr(self._reading, "seconds", 0.0)
        self._reading.seconds = 0.0
        return lambda: self._arrived(recording, placed, arrived() if callable(arrived) else arrived, first_entry, spent)

    def beside(self, score: ScoreTokens) -> ScoreTokens:
        """What takes tokens for routing, then hands them to `score`."""

        def both(
            generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
        ) -> Report | None:
            record, report_scores = self.take(recording, placed, states), score(generation, recording, placed, states)

            def report_both(report: bool) -> None:
                if record is not None and report:
                    record()
                if report_scores is not None:
                    report_scores(report)

            return report_both

        return both

    def ended(self, recording: Recording) -> None:
        """A generation returned: with beams it is known now which decisions are of its output."""
        with self._lock:
            for number, followed in self._followed.pop(recording, {}).items():
                if followed.waiting:
                    self._settle(number, recording, followed.waiting)

    def _guarded_memory(self, memory: Memory) -> Memory:
        """The same, where what it raises ends no generation: then how much is in use is unknown, 0 of 0."""

        def guarded() -> tuple[int, int]:
            found = (0, 0)

            def ask() -> None:
                nonlocal found
                used, whole = memory()
                if not (isinstance(used, int) and isinstance(whole, int) and used >= 0 and whole > 0):
                    raise ConfigError(
                        f"memory gave {used!r} of {whole!r}: give two whole numbers, bytes in use and bytes there are"
                    )
                found = (used, whole)

            self._guard("memory", ask)
            return found

        return guarded

    # -- inside ----------------------------------------------------------------------------------

    def _arrived(
        self, recording: Recording, placed: PlacedTokens, states: Mapping[str, Singles], first_entry: int, spent: float
    ) -> None:
        with self._lock:
            for number, source in enumerate(self.sources):
                n_cells = sum(states[site.name].shape[1] for site in source.sites)
                for part in np.array_split(np.arange(len(placed)), -(-len(placed) * n_cells // _CELLS)):
                    begin = time.perf_counter()
                    decisions = source.decisions({site.name: states[site.name][part] for site in source.sites})
                    seconds = time.perf_counter() - begin + spent * len(part) / len(placed) / len(self.sources)
                    latency_us = 1e6 * seconds / (len(part) * decisions.n_streams)
                    followed = self._followed.setdefault(recording, {})
                    if number not in followed:
                        followed[number] = _Followed(History(recording.call.n_rows, decisions.n_streams))
                    if recording.beams is not None:
                        followed[number].waiting.append(
                            _Waiting(placed.take(part), first_entry + part, decisions, latency_us)
                        )
                    else:
                        told = followed[number].history.tell(placed.rows[part], decisions)
                        self._count(number, recording, placed.take(part), decisions, told, latency_us)
            if recording.beams is None:
                self.n_tokens += len(placed)

    def _settle(self, number: int, recording: Recording, waiting: list[_Waiting]) -> None:
        """Count the decisions of the beams that were returned: each once, in the first row of the output that
        has it.
        """
        beams = recording.beams
        sequences = recording.ids
        assert beams is not None and sequences is not None
        decisions, each = (
            Decisions.join([one.decisions for one in waiting]),
            len(sequences) // (recording.call.n_rows // beams.n_beams),
        )
        rows, columns, ids = (
            np.concatenate([getattr(one.placed, name) for one in waiting]) for name in ("rows", "columns", "ids")
        )
        phases = np.concatenate([np.full(len(one.placed), one.placed.phase) for one in waiting])
        at = {entry: i for i, entry in enumerate(np.concatenate([one.entries for one in waiting]).tolist())}
        latency_us = float(np.mean([one.latency_us for one in waiting]))
        counted, history = np.zeros(len(rows), dtype=bool), History(len(sequences), decisions.n_streams)
        for row, sequence in enumerate(sequences):
            b = row // each
            entries, _ = beams.follow(b, sequence[beams.begin :])
            prompt = np.flatnonzero((phases == PROMPT) & (rows == b * beams.n_beams))
            path = np.concatenate([prompt, [at[entry] for entry in entries if entry in at]]).astype(
                np.int64
            )  # one that is not was unseen
            mine = decisions.take(path)
            told = history.tell(np.full(len(path), row), mine)
            for phase in (PROMPT, GENERATED):
                new = np.flatnonzero(~counted[path] & (phases[path] == phase))
                if len(new):
                    where = path[new]
                    placed = PlacedTokens(np.full(len(new), row), columns[where], columns[where], ids[where], phase)
                    self._count(number, recording, placed, mine.take(new), told.take(new), latency_us)
                    self.n_tokens += len(new) if number == 0 else 0
            counted[path] = True

    def _count(
        self,
        number: int,
        recording: Recording,
        placed: PlacedTokens,
        decisions: Decisions,
        told: Told,
        latency_us: float,
    ) -> None:
        source = self.sources[number]
        tally = self._tallies.get(number)
        if tally is None:
            tally = self._tallies[number] = Tally(
                source.streams,
                decisions.raw.shape[2],
                source.n_chosen,
                codes=source.codes,
                rules=self._settings.rules,
                window=self._settings.window,
                memory=self._memory,
                baseline=self._baseline,
            )
        alerts = tally.add(decisions, told, latency_us)
        if self._listeners or self._deliveries:
            prompt = recording.call.prompt_columns
            steps = (
                np.zeros(len(placed), np.int64)
                if placed.phase == PROMPT or prompt is None
                else placed.columns - prompt + 1
            )
            record = RoutingRecord.of(
                decisions,
                told,
                source.streams,
                rows=placed.rows,
                positions=placed.columns - recording.offset,
                steps=steps,
                has_norm=source.kind != MOE,
                run_id=self.run_id,
                request_id=recording.request or str(recording.number),
                source=source.kind,
                phase=PHASES[placed.phase],
                t_capture_us=latency_us,
                dropped=self.n_unseen * decisions.n_streams,
            )
            for listener in self._listeners:
                self._guard("a listener", listener, placed, decisions, record)
            for delivery in self._deliveries:
                delivery.put(record.with_dropped(delivery.stats().n_dropped))  # type: ignore[arg-type]
        self._tell(alerts)

    def _tell(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            self.n_alerts += alert.raised
            for action in self._on_alert:
                self._guard("an action on an alert", action, alert)


def _check_call(name: str, given: object) -> None:
    if not callable(given):
        raise ConfigError(f"{name} is given {given!r}: give a function to call")


def _timed(site: Site, reading: Any) -> Site:
    """The same, with the time its reading takes added up."""

    def read(output: Any) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return site.read(output)
        begin = time.perf_counter()
        found = site.read(output)
        reading.seconds = getattr(reading, "seconds", 0.0) + time.perf_counter() - begin
        return found

    return Site(site.name, site.module, read, site.width, site.flat, site.early)


def _to_host(states: Mapping[str, Tensor]) -> dict[str, Singles] | Callable[[], dict[str, Singles]]:
    """States as arrays; of a GPU, what waits for them and gives them."""
    device = next((x.device for x in states.values() if x.is_cuda), None)
    if device is None:
        return {site: x.detach().float().cpu().numpy() for site, x in states.items()}
    together = torch.cat(
        [x.detach().float().to(device) for x in states.values()], dim=1
    )  # one copy, however many sites
    copy = torch.empty(together.shape, dtype=torch.float32, device="cpu", pin_memory=True).copy_(
        together, non_blocking=True
    )
    arrived = torch.cuda.current_stream(device).record_event()

    def wait() -> dict[str, Singles]:
        arrived.synchronize()
        parts = copy.split([x.shape[1] for x in states.values()], dim=1)
        return {site: part.numpy() for site, part in zip(states, parts, strict=True)}

    return wait
