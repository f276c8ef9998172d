"""Routing: records, statistics and alerts of what a model's routers decided about accepted tokens.

    routing = Routing()                             # Routing(bem=bem) for a BEM adapter's router, too
    with manager.attach(model, tokenizer, followers=[routing]) as run:      # alongside probes, of the same tokens
        routing.add_sink(RoutingParquet("routing.parquet"))
        model.generate(**inputs)
    routing.report()                                # per router: entropies, load, flips, ...; latency, memory, alerts

Without probes a `RoutingMonitor` does the same. Either hands over tokens whose place is known.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.adapters.routing.alerts import DEFAULT_RULES, Alert, AlertRule
from probemon.adapters.routing.baseline import check_baseline, entries, read_baseline, write_baseline
from probemon.adapters.routing.captures import timed, to_host
from probemon.adapters.routing.decisions import BEM, XLORA, Changes, Decisions, History, Singles, Stream
from probemon.adapters.routing.latency import Latencies
from probemon.adapters.routing.records import RoutingRecord
from probemon.adapters.routing.recurrent.recorder import StateRecorder
from probemon.adapters.routing.routers import BemController, Source, find_sources, no_router
from probemon.adapters.routing.settings import RoutingSettings
from probemon.adapters.routing.sketch import LogSketch
from probemon.adapters.routing.slot_memories import NewestReads
from probemon.adapters.routing.statistics import QUANTILES, RoutingStatistics
from probemon.adapters.routing.tally import Memory, Tally, memory_of
from probemon.core.hierarchy import Ints
from probemon.core.memory_reads import MemoryReads
from probemon.core.scores import GENERATED, PHASES, PROMPT, Scores
from probemon.errors import ConfigError
from probemon.host.model import unwrap
from probemon.host.recurrent.mixers import find_mixers
from probemon.host.site import Site
from probemon.monitor.delivery import Delivery, is_sink
from probemon.monitor.failures import as_exception, raise_error
from probemon.monitor.followers import Batch, Follower
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generation import States
from probemon.tracking.recording import Recording
from probemon.util.checks import check_callable

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

Listener = Callable[[PlacedTokens, Decisions, RoutingRecord], object]
LOG = logging.getLogger("probemon")
_CELLS = 1 << 20  # weights turned into statistics at once: a long prompt of many experts is taken in parts


@dataclass(frozen=True)
class _PendingDecisions:
    """Decisions about tokens of beams, which may not be in the output; `entries [n]`: numbers in the recording."""

    placed: PlacedTokens
    entries: Ints
    decisions: Decisions
    latency_us: float


@dataclass
class _SourceState:
    """What is kept of a source during a generation."""

    history: History
    pending: list[_PendingDecisions] = field(default_factory=list)  # until the generation ends


class Routing(Follower):
    """Follows one run, and records what the routers of its model decide about accepted tokens.

    `settings` may also be given by name: `Routing(bem=bem)`. `attach` raises `NotSupportedHost` where no router and no
    recurrent layer is known, `ConfigError` for a baseline that does not fit.

    Recurrent layers decide nothing: what they keep is added up by `recurrent`, a `StateRecorder`, None in other models.
    It is in the report, in the alerts and in `unjudged`, and in no record.

    With beams, decisions are recorded when `generate()` returns. One that several returned sequences share (in their
    prompt, or where they begin alike) is recorded and counted once, in the first row that has it.
    """

    def __init__(self, settings: RoutingSettings | None = None, **by_name: Any) -> None:
        if settings is not None and by_name:
            raise ConfigError(f"settings and {', '.join(by_name)} beside them: give either")
        if settings is not None and not isinstance(settings, RoutingSettings):
            raise ConfigError(f"settings of routing are {settings!r}: give a RoutingSettings, or settings by name")
        self._settings = RoutingSettings.by_name(**by_name) if settings is None else settings
        self._watching = False

    def watch(self, model: Any, guard: Callable[..., None]) -> None:
        """Find the routers of a model. `guard(what, function, *arguments)` calls a function of the user's, and keeps
        its errors from the model.
        """
        if self._watching:
            raise ConfigError("this Routing watches another run: make one for each")
        settings = self._settings
        self.sources: list[Source] = find_sources(model, bem=settings.bem)
        self.run_id = settings.run_id or uuid.uuid4().hex
        self.n_unseen = self.n_tokens = 0
        self.n_alerts = 0  # raised so far
        self.recurrent: StateRecorder | None = None
        if any(find_mixers(model)):
            self.recurrent = StateRecorder(model, states=settings.states, guard=guard, on_alert=self._report_alerts)
        elif not self.sources:
            raise no_router(model)
        self._guard = guard
        self._baseline = {} if settings.baseline is None else read_baseline(settings.baseline)
        check_baseline(self._baseline, self.sources, settings.rules, settings.window)
        self._memory = memory_of(model.device) if settings.memory is None else self._guarded_memory(settings.memory)
        self.latency = Latencies(
            host=unwrap(model),
            controller=next((source.controller for source in self.sources if isinstance(source, BemController)), None),
            limits=settings.limits,
            spike=settings.spike,
            memory=self._memory,
            report=self._report_alerts,
            clock=settings.clock,
        )
        self._newest_reads = NewestReads(self.sources)
        self._tallies: dict[int, Tally] = {}
        self._states: weakref.WeakKeyDictionary[Recording, dict[int, _SourceState]] = weakref.WeakKeyDictionary()
        self._deliveries: list[Delivery] = []
        self._listeners: list[Listener] = []
        self._on_alert: list[Callable[[Alert], object]] = []
        self._lock, self._closed = threading.RLock(), False
        self._reading = threading.local()
        self._taken: weakref.WeakKeyDictionary[Batch, list[Callable[[], None]]] = weakref.WeakKeyDictionary()
        routers = [timed(site, self._reading) for source in self.sources for site in source.sites]
        self.sites = [*routers, *(self.recurrent.sites if self.recurrent is not None else ())]  # for a Watcher
        self._watching = True

    # -- what a run tells ------------------------------------------------------------------------

    def attaching(self, run: MonitorRun) -> Sequence[Site]:
        """Find the routers of a run's model, and return where they are."""
        self.watch(run.model, run.guard)
        return self.sites

    def began(self, run: MonitorRun) -> None:
        """Begin to measure how long forwards take: of the calling thread alone, where that alone is watched."""
        self.latency.attach(one_thread=run.options.one_thread)

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Take tokens, which are recorded once they are scored."""
        self._taken[batch] = self.taking(batch.recording, batch.placed, hidden)

    def reads(self, batch: Batch) -> MemoryReads | None:
        """Return what memories read at the newest tokens, None where the model has no memory."""
        self.scored(batch)
        with self._lock:
            return self._newest_reads.of(batch.recording, batch.recording.n_entries, len(batch.placed))

    def scored(self, batch: Batch, scores: Scores | None = None) -> None:
        """Record what was decided about tokens, once."""
        for record in self._taken.pop(batch, ()):
            record()

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """Count what beams decided, where a generation returned: then it is known which decisions are of its output."""
        if error is not None:
            return
        if self.recurrent is not None:
            self.recurrent.ended(recording, None)
        with self._lock:
            for number, state in self._states.pop(recording, {}).items():
                if state.pending:
                    self._count_beams(number, recording, state.pending)

    def finish(self, failed: bool) -> None:
        """Finish the sinks; their errors are those of the run."""
        for error in self.close():
            self._guard("a sink of routing", raise_error, error)

    def sums(self) -> type:
        """Return what adds routing up for Prometheus."""
        from probemon.adapters.routing.routing_metrics import RoutingSums

        return RoutingSums

    # -- the face --------------------------------------------------------------------------------

    def add_sink(self, sink: Any, *, max_batches: int = 1024) -> Delivery:
        """Send every record to a sink, in a thread of its own, until the block ends.

        Sinks are `RoutingJsonLines`, `RoutingParquet` and `CallbackSink`. Raises `ConfigError` once the block has
        ended, as `listen` and `on_alert` do.
        """
        self._check_not_ended("this sink")
        if not is_sink(sink):
            raise ConfigError(
                f"a sink has open, write and close, {sink!r} has not: see probemon.adapters.routing.records"
            )
        if not self.sources:
            raise ConfigError(
                "the host has recurrent layers and no router, so there are no decisions to write: report() has what its"
                " layers keep, and recurrent.listen(...) every token"
            )
        delivery = Delivery(sink, max_batches=max_batches)
        delivery.start([])
        self._deliveries.append(delivery)
        return delivery

    def listen(self, listener: Listener) -> None:
        """Call `listener(placed, decisions, record)` with every batch of tokens, in the thread that generates.

        With beams it is called when `generate()` returns.
        """
        check_callable("listen", listener)
        self._check_not_ended("this listener")
        self._listeners.append(listener)

    def _check_not_ended(self, what: str) -> None:
        if not self._watching:
            raise ConfigError(f"nothing is watched yet, so {what} has nothing to hear: give this to attach first")
        if self._closed:
            raise ConfigError(f"the block has ended, so {what} would be given nothing: give it before")

    def watches(self, bem: Any) -> bool:
        """Whether it records the codes of this adapter."""
        return any(isinstance(source, BemController) and source.bem is bem for source in self.sources)

    def on_alert(self, action: Callable[[Alert], object]) -> None:
        """Call `action(alert)` where an alert is raised or cleared, in the thread that generates."""
        check_callable("on_alert", action)
        self._check_not_ended("this action")
        self._on_alert.append(action)

    @property
    def alerts(self) -> list[Alert]:
        """The alerts that hold now."""
        with self._lock:
            routed = [alert for tally in self._tallies.values() for alert in tally.alerts.raised]
        return [*routed, *(self.recurrent.alerts if self.recurrent is not None else ()), *self.latency.raised]

    @property
    def kinds(self) -> list[str]:
        """The kinds of alert that its rules raise, each once."""
        states = () if self.recurrent is None else self.recurrent.kinds
        return sorted({rule.kind for rule in self._settings.rules} | self.latency.alert_kinds | set(states))

    def save_baseline(self, path: str | os.PathLike[str]) -> None:
        """Write what drifts are measured from, for `baseline=` of another run.

        Raises `ConfigError` where nothing is known yet.
        """
        with self._lock:
            write_baseline(path, self._known_baseline())

    def reset_baseline(self) -> None:
        """Forget what drifts are measured from, a given baseline too, and clear the alerts of drift.

        Drifts are then measured from the next windows without alerts.
        """
        with self._lock:
            self._baseline = {}
            for tally in self._tallies.values():
                self._report_alerts(tally.alerts.reset_baseline())

    def _known_baseline(self) -> dict[tuple[Stream, str, int], float]:
        return {
            **self._baseline,
            **{key: value for tally in self._tallies.values() for key, value in tally.alerts.baseline().items()},
        }

    def statistics(self) -> list[tuple[Source, RoutingStatistics]]:
        """Return each source that decided anything, with the statistics of everything so far."""
        with self._lock:
            return [(self.sources[number], tally.total()) for number, tally in self._tallies.items()]

    def report(self) -> dict[str, Any]:
        """Return everything so far, for JSON.

        - `streams`: each router with its metrics; `states`: each recurrent layer with what it keeps
          (`StateTally.report`).
        - `latency_us`: of a decision's capture.
        - `seconds`: of forwards, of the controller and of tokens: how many, and quantiles.
        - `memory_watermark_bytes`: the most that was in use.
        - `alerts`: those that hold now; `n_alerts`: how many were raised.
        - `baseline`: what drifts are measured from, of each router and metric where it is known by now. `baseline=` of
          another run takes this report.
        - `unjudged`: kinds of alert for which some router has too few tokens that count, and how many it takes. That
          none of them was raised says nothing.

        For the baseline of a drift only windows without alerts count. Decisions that are not finite never count; codes
        that steer nothing do not count for how codes vary and are reused. What a router does not have (a choice, where
        every expert is chosen; dimensions, at a rank of 1) is never judged.
        """
        with self._lock:
            streams, latency = [], LogSketch()
            for source, statistics in self.statistics():
                latency.merge(statistics.latency)
                for stream, metrics in zip(source.streams, statistics.as_dicts(), strict=True):
                    streams.append({**asdict(stream), **metrics})
            watermark = max([self._memory()[0], *(tally.memory_watermark_bytes for tally in self._tallies.values())])
            return {
                "run_id": self.run_id,
                "n_tokens": self.n_tokens if self.sources or self.recurrent is None else self.recurrent.n_tokens,
                "n_unseen": self.n_unseen,
                "streams": streams,
                "states": {} if self.recurrent is None else self.recurrent.report(),
                "latency_us": {name: latency.quantile(q) if latency.n else None for name, q in QUANTILES.items()},
                "latency_relative_error": latency.relative_error,
                "seconds": self.latency.as_dict(),
                "memory_watermark_bytes": watermark,
                "alerts": [str(alert) for alert in self.alerts],
                "n_alerts": self.n_alerts,
                "unjudged": self._unjudged(),
                "baseline": entries(self._known_baseline()),
            }

    def _unjudged(self) -> dict[str, int]:
        """Return, by kind of alert, the most tokens that one of its unjudged rules needs.

        A rule for which there is no router is unjudged, unless it is a default one and other rules have routers: the
        default rules are for every kind of router.
        """
        rules, window = self._settings.rules, self._settings.window
        judged, unjudged = set[int](), list[tuple[AlertRule, int]]()
        for number, source in enumerate(self.sources):
            applying = [
                i
                for i, rule in enumerate(rules)
                if (any(map(rule.applies, source.streams)) if source.streams else source.kind in rule.sources)
            ]
            judged.update(applying)
            if number in self._tallies:
                unjudged += self._tallies[number].alerts.unjudged
            else:
                unjudged += [(rules[i], rules[i].needs(source.n_experts, source.n_chosen, window)) for i in applying]
        unjudged += [
            (rule, rule.needs(0, 1, window))
            for i, rule in enumerate(rules)
            if i not in judged and (rule not in DEFAULT_RULES or not (judged or not self.sources))
        ]
        most = {} if self.recurrent is None else self.recurrent.unjudged
        for rule, needed in unjudged:
            most[rule.kind] = max(most.get(rule.kind, 0), needed)
        return most

    def close(self) -> list[Exception]:
        """Finish the sinks; return their errors."""
        self._closed = True
        self.latency.detach()
        errors = []
        for delivery in self._deliveries:
            delivery.close()
            stats = delivery.stats()
            if stats.error is not None:
                errors.append(as_exception(stats.error))
            elif stats.n_dropped:
                LOG.warning(
                    "a sink of routing was too slow: %d of %d decisions were dropped",
                    stats.n_dropped,
                    stats.n_written + stats.n_dropped,
                )
        return errors

    # -- tokens with what routers gave -----------------------------------------------------------

    def take(self, recording: Recording, placed: PlacedTokens, states: States | str) -> Callable[[], None] | None:
        """Take accepted tokens, in order, before they are added to `recording`.

        Return what is to be called once the forward has ended; it records their decisions.
        """
        if not len(placed):
            return None
        # As many tokens as the row that came on most: others ended, or accepted fewer drafts.
        self.latency.tokens(recording, int(np.bincount(placed.rows).max()) if placed.phase == GENERATED else 0)
        first_entry, begin = recording.n_entries, time.perf_counter()
        if isinstance(states, str):
            with self._lock:
                self.n_unseen += len(placed)
                for state in self._states.get(recording, {}).values():
                    state.history.forget(placed.rows)
            return None
        arrays = to_host({site.name: states[site.name] for source in self.sources for site in source.sites})
        spent = time.perf_counter() - begin + getattr(self._reading, "seconds", 0.0)
        self._reading.seconds = 0.0
        return lambda: self._decode(recording, placed, arrays() if callable(arrays) else arrays, first_entry, spent)

    def taking(self, recording: Recording, placed: PlacedTokens, states: States | str) -> list[Callable[[], None]]:
        """Take tokens; return what records the decisions about them, and what recurrent layers keep."""
        taken = [self.take(recording, placed, states)]
        if self.recurrent is not None:
            taken.append(self.recurrent.take(recording, placed, states))
        return [record for record in taken if record is not None]

    def _guarded_memory(self, memory: Memory) -> Memory:
        """Return `memory` such that its errors end no generation; then the memory in use is unknown, 0 of 0."""

        def guarded() -> tuple[int, int]:
            used_of_whole = (0, 0)

            def ask() -> None:
                nonlocal used_of_whole
                used, whole = memory()
                if not (isinstance(used, int) and isinstance(whole, int) and used >= 0 and whole > 0):
                    raise ConfigError(
                        f"memory gave {used!r} of {whole!r}: give two whole numbers, bytes in use and bytes there are"
                    )
                used_of_whole = (used, whole)

            self._guard("memory", ask)
            return used_of_whole

        return guarded

    # -- inside ----------------------------------------------------------------------------------

    def _decode(
        self, recording: Recording, placed: PlacedTokens, states: Mapping[str, Singles], first_entry: int, spent: float
    ) -> None:
        """Turn what the sites gave into decisions; count them, or keep those of beams until the generation ends."""
        with self._lock:
            self._newest_reads.begin(recording, first_entry, len(placed))
            for number, source in enumerate(self.sources):
                n_cells = sum(states[site.name].shape[1] for site in source.sites)
                for part in np.array_split(np.arange(len(placed)), -(-len(placed) * n_cells // _CELLS)):
                    begin = time.perf_counter()
                    decisions = source.decisions({site.name: states[site.name][part] for site in source.sites})
                    seconds = time.perf_counter() - begin + spent * len(part) / len(placed) / len(self.sources)
                    latency_us = 1e6 * seconds / (len(part) * decisions.n_streams)
                    sources = self._states.setdefault(recording, {})
                    if number not in sources:
                        sources[number] = _SourceState(History(recording.call.n_rows, decisions.n_streams))
                    state, tokens = sources[number], placed.take(part)
                    self._newest_reads.keep(recording, number, part, tokens, decisions)
                    if recording.beams is not None:
                        state.pending.append(_PendingDecisions(tokens, first_entry + part, decisions, latency_us))
                    else:
                        changes = state.history.compare(tokens.rows, decisions, tokens.begins)
                        self._count(number, recording, tokens, decisions, changes, latency_us)
            if recording.beams is None:
                self.n_tokens += len(placed)

    def _count_beams(self, number: int, recording: Recording, pending: list[_PendingDecisions]) -> None:
        """Count the decisions of the beams that were returned, each once, in the first row that has it."""
        beams = recording.beams
        sequences = recording.ids
        assert beams is not None and sequences is not None
        decisions = Decisions.join([batch.decisions for batch in pending])
        batches = [batch.placed for batch in pending]
        columns, ids = (np.concatenate([getattr(placed, name) for placed in batches]) for name in ("columns", "ids"))
        phases = np.concatenate([np.full(len(placed), placed.phase) for placed in batches])
        latency_us = float(np.mean([batch.latency_us for batch in pending]))
        counted, history = np.zeros(len(columns), dtype=bool), History(len(sequences), decisions.n_streams)
        paths = beams.paths(sequences, recording.call.n_rows, batches, [batch.entries for batch in pending])
        for row, (path, _) in enumerate(paths):
            of_row = decisions.take(path)
            changes = history.compare(np.full(len(path), row), of_row)
            for phase in (PROMPT, GENERATED):
                new = np.flatnonzero(~counted[path] & (phases[path] == phase))
                if len(new):
                    where = path[new]
                    placed = PlacedTokens(np.full(len(new), row), columns[where], columns[where], ids[where], phase)
                    self._count(number, recording, placed, of_row.take(new), changes.take(new), latency_us)
                    self.n_tokens += len(new) if number == 0 else 0
            counted[path] = True

    def _count(
        self,
        number: int,
        recording: Recording,
        placed: PlacedTokens,
        decisions: Decisions,
        changes: Changes,
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
        alerts = tally.add(decisions, changes, latency_us)
        if self._listeners or self._deliveries:
            prompt = recording.call.prompt_columns
            steps = (
                np.zeros(len(placed), np.int64)
                if placed.phase == PROMPT or prompt is None
                else placed.columns - prompt + 1
            )
            record = RoutingRecord.of(
                decisions,
                changes,
                source.streams,
                rows=placed.rows,
                positions=placed.columns - recording.offset,
                steps=steps,
                has_norm=source.kind in (BEM, XLORA),
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
        self._report_alerts(alerts)

    def _report_alerts(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            with self._lock:
                self.n_alerts += alert.raised
            for action in self._on_alert:
                self._guard("an action on an alert", action, alert)
