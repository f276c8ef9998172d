"""Routing: records, statistics and alerts of a model's routers at accepted tokens.

routing = Routing()                             # Routing(bem=bem) to include a BEM adapter
with manager.attach(model, tokenizer, followers=[routing]) as run:
    routing.add_sink(RoutingParquet("routing.parquet"))
    model.generate(**inputs)
routing.report()
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.adapters.routing.alerts import DEFAULT_RULES, Alert, AlertRule, Tally, memory_of
from probemon.adapters.routing.baseline import check_baseline, entries, read_baseline, write_baseline
from probemon.adapters.routing.captures import returned, timed, to_host
from probemon.adapters.routing.decisions import Changes, Decisions, History, Singles, Stream
from probemon.adapters.routing.latency import Latencies
from probemon.adapters.routing.records import RoutingRecord
from probemon.adapters.routing.recurrent.recorder import StateRecorder
from probemon.adapters.routing.routers import NO_ROUTER, BemController, Source, find_sources
from probemon.adapters.routing.settings import RoutingSettings
from probemon.adapters.routing.sketch import RELATIVE_ERROR, LogSketch
from probemon.adapters.routing.slot_memories import NewestReads
from probemon.adapters.routing.statistics import QUANTILES
from probemon.core.hierarchy import Ints
from probemon.core.memory_reads import MemoryReads
from probemon.core.scores import GENERATED, PROMPT, Scores
from probemon.errors import ConfigError, UnsupportedModel
from probemon.host.model import unwrap
from probemon.host.recurrent.mixers import find_mixers
from probemon.host.site import Site
from probemon.monitor.delivery import Delivery, is_sink
from probemon.monitor.failures import as_exception, raise_error
from probemon.monitor.followers import Batch, Follower
from probemon.tracking.align import PlacedTokens
from probemon.tracking.generation import States
from probemon.tracking.recording import Recording
from probemon.util.checks import check_callable, check_settings

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

Listener = Callable[[PlacedTokens, Decisions, RoutingRecord], object]
LOG = logging.getLogger("probemon")
_CELLS = 1 << 20  # weights processed at once


@dataclass(frozen=True)
class _PendingDecisions:
    """Decisions about beam tokens; `entries [n]`: numbers in the recording."""

    placed: PlacedTokens
    entries: Ints
    decisions: Decisions
    latency_us: float


@dataclass
class _SourceState:
    history: History
    pending: list[_PendingDecisions] = field(default_factory=list)  # of beams, until the generation ends


class Routing(Follower):
    """Follows one run, and records what its model's routers decide about accepted tokens.

    Without probes, use `RoutingMonitor`. `settings` may be given by name: `Routing(bem=bem)`. `attach` raises
    `UnsupportedModel` without a known router or recurrent layer, `ConfigError` for an unsuitable baseline. `recurrent`:
    the `StateRecorder` of recurrent layers, or None.

    With beams, decisions are recorded when `generate()` returns; one shared by several sequences counts once.
    """

    def __init__(self, settings: RoutingSettings | None = None, **by_name: Any) -> None:
        if settings is not None and by_name:
            raise ConfigError(f"settings and {', '.join(by_name)} are both given: give one or the other")
        if settings is not None and not isinstance(settings, RoutingSettings):
            raise ConfigError(f"settings of routing are {settings!r}: give a RoutingSettings, or settings by name")
        check_settings(RoutingSettings, by_name, "routing")
        self._settings = RoutingSettings(**by_name) if settings is None else settings
        self._watching = False

    def watch(self, model: Any, guard: Callable[..., None]) -> None:
        """Find a model's routers. `guard(what, function, *arguments)` calls user functions and catches their errors."""
        if self._watching:
            raise ConfigError("this Routing watches another run: make one for each")
        settings = self._settings
        self.sources: list[Source] = find_sources(model, bem=settings.bem)
        self.run_id = settings.run_id or uuid.uuid4().hex
        self.n_unseen = self.n_tokens = 0
        self.n_alerts = 0
        self.recurrent: StateRecorder | None = None
        if any(find_mixers(model)):
            self.recurrent = StateRecorder(model, states=settings.states, guard=guard, on_alert=self._report_alerts)
        elif not self.sources:
            raise UnsupportedModel(f"{type(model).__name__}{NO_ROUTER}")
        self._guard = guard
        self._baseline = {} if settings.baseline is None else read_baseline(settings.baseline)
        check_baseline(self._baseline, self.sources, settings.rules, settings.window)
        self._memory = memory_of(model.device)
        self.latency = Latencies(
            host=unwrap(model),
            controller=None if (adapter := self.source_of(settings.bem)) is None else adapter.controller,
            limits=settings.limits,
            spike=settings.spike,
            memory=self._memory,
            report=self._report_alerts,
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
        self.sites = [*routers, *(self.recurrent.sites if self.recurrent is not None else ())]
        self._watching = True

    def attaching(self, run: MonitorRun) -> Sequence[Site]:
        """Find the routers of a run's model, and return their sites."""
        self.watch(run.model, run.guard)
        return self.sites

    def began(self, run: MonitorRun) -> None:
        """Start measuring durations."""
        self.latency.attach(one_thread=run.options.one_thread)

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Take tokens, to be recorded once scored."""
        self._taken[batch] = self.taking(batch.recording, batch.placed, hidden)

    def reads(self, batch: Batch) -> MemoryReads | None:
        """Return the newest memory reads, None without a memory."""
        self.scored(batch)
        with self._lock:
            return self._newest_reads.of(batch.recording, batch.recording.n_entries, len(batch.placed))

    def scored(self, batch: Batch, scores: Scores | None = None) -> None:
        """Record the decisions about tokens, once."""
        for record in self._taken.pop(batch, ()):
            record()

    def ended(self, recording: Recording, error: BaseException | None) -> None:
        """Count the decisions of returned beams."""
        if error is not None:
            return
        if self.recurrent is not None:
            self.recurrent.ended(recording, None)
        with self._lock:
            for number, state in self._states.pop(recording, {}).items():
                if state.pending:
                    self._count_beams(number, recording, state.pending)

    def finish(self, failed: bool) -> None:
        """Close the sinks; report their errors to the run."""
        for error in self.close():
            self._guard("a sink of routing", raise_error, error)

    def sums(self) -> type:
        """Return the class that sums routing for Prometheus."""
        from probemon.adapters.routing.routing_metrics import RoutingSums

        return RoutingSums

    def add_sink(self, sink: Any, *, max_batches: int = 1024) -> Delivery:
        """Send every record to a sink, in a separate thread, until the block ends.

        Sinks are `RoutingJsonLines`, `RoutingParquet`, `CallbackSink`. Raises `ConfigError` outside the block.
        """
        self._check_not_ended("this sink")
        if not is_sink(sink):
            raise ConfigError(
                f"a sink has open, write and close, {sink!r} has not: see probemon.adapters.routing.records"
            )
        if not self.sources:
            raise ConfigError(
                "the model has recurrent layers and no router, so there are no decisions to write: report() has what"
                " its layers keep, and recurrent.listen(...) every token"
            )
        delivery = Delivery(sink, max_batches=max_batches)
        delivery.start([])
        self._deliveries.append(delivery)
        return delivery

    def listen(self, listener: Listener) -> None:
        """Call `listener(placed, decisions, record)` with every batch, in the generating thread.

        With beams, when `generate()` returns.
        """
        check_callable("listen", listener)
        self._check_not_ended("this listener")
        self._listeners.append(listener)

    def _check_not_ended(self, what: str) -> None:
        if not self._watching:
            raise ConfigError(f"nothing is watched yet, so {what} would receive nothing: give this to attach first")
        if self._closed:
            raise ConfigError(f"the block has ended, so {what} would be given nothing: give it before")

    def source_of(self, bem: Any) -> BemController | None:
        """Return the source of an adapter that it records, else None."""
        sources = (source for source in self.sources if isinstance(source, BemController))
        return next((source for source in sources if source.bem is bem), None)

    def on_alert(self, action: Callable[[Alert], object]) -> None:
        """Call `action(alert)` when an alert is raised or cleared, in the generating thread."""
        check_callable("on_alert", action)
        self._check_not_ended("this action")
        self._on_alert.append(action)

    @property
    def alerts(self) -> list[Alert]:
        """Alerts in force."""
        with self._lock:
            routed = [alert for tally in self._tallies.values() for alert in tally.alerts.raised]
        return [*routed, *(self.recurrent.alerts if self.recurrent is not None else ()), *self.latency.raised]

    @property
    def kinds(self) -> list[str]:
        """Alert kinds of the rules."""
        states = () if self.recurrent is None else self.recurrent.kinds
        return sorted({rule.kind for rule in self._settings.rules} | self.latency.alert_kinds | set(states))

    def save_baseline(self, path: str | os.PathLike[str]) -> None:
        """Write the baseline for `baseline=` of another run. Raises `ConfigError` if there is none yet."""
        with self._lock:
            write_baseline(path, self._known_baseline())

    def reset_baseline(self) -> None:
        """Clear the baseline and drift alerts; the next windows without alerts make another."""
        with self._lock:
            self._baseline = {}
            for tally in self._tallies.values():
                self._report_alerts(tally.alerts.reset_baseline())

    def _known_baseline(self) -> dict[tuple[Stream, str, int], float]:
        return {
            **self._baseline,
            **{key: value for tally in self._tallies.values() for key, value in tally.alerts.baseline().items()},
        }

    def report(self) -> dict[str, Any]:
        """Return everything so far, for JSON.

        - `streams`: metrics of each router; `states`: of each recurrent layer (`StateTally.report`).
        - `latency_us`: of a decision's capture.
        - `seconds`: counts and quantiles of forwards, controller and tokens.
        - `memory_watermark_bytes`: peak memory in use.
        - `alerts`: those in force; `n_alerts`: number raised.
        - `baseline`: known references of drifts; `baseline=` takes this report.
        - `unjudged`: tokens needed by each kind of alert that some router cannot judge yet.

        Non-finite decisions never count, nor do windows with alerts for the baseline.
        """
        with self._lock:
            streams, latency = [], LogSketch()
            for number, tally in self._tallies.items():
                statistics = tally.total()
                latency.merge(statistics.latency)
                for stream, metrics in zip(self.sources[number].streams, statistics.as_dicts(), strict=True):
                    streams.append({**asdict(stream), **metrics})
            watermark = max([self._memory()[0], *(tally.memory_watermark_bytes for tally in self._tallies.values())])
            return {
                "run_id": self.run_id,
                "n_tokens": self.n_tokens if self.sources or self.recurrent is None else self.recurrent.n_tokens,
                "n_unseen": self.n_unseen,
                "streams": streams,
                "states": {} if self.recurrent is None else self.recurrent.report(),
                "latency_us": {name: latency.quantile(q) if latency.n else None for name, q in QUANTILES.items()},
                "latency_relative_error": RELATIVE_ERROR,
                "seconds": self.latency.as_dict(),
                "memory_watermark_bytes": watermark,
                "alerts": [str(alert) for alert in self.alerts],
                "n_alerts": self.n_alerts,
                "unjudged": self._unjudged(),
                "baseline": entries(self._known_baseline()),
            }

    def _unjudged(self) -> dict[str, int]:
        """By kind of alert, the most tokens that an unjudged rule needs.

        Default rules without a router are left out if others have one.
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
        """Close the sinks; return their errors."""
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

    def take(self, recording: Recording, placed: PlacedTokens, states: States | str) -> Callable[[], None] | None:
        """Take accepted tokens, before they are added to `recording`.

        Return a function that records their decisions once the forward has ended, or None.
        """
        if not len(placed):
            return None
        # The most of any row: others may have ended.
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
        return lambda: self._decode(recording, placed, arrays(), first_entry, spent)

    def taking(self, recording: Recording, placed: PlacedTokens, states: States | str) -> list[Callable[[], None]]:
        """Take tokens; return the functions that record them."""
        taken = [self.take(recording, placed, states)]
        if self.recurrent is not None:
            taken.append(self.recurrent.take(recording, placed, states))
        return [record for record in taken if record is not None]

    def _decode(
        self, recording: Recording, placed: PlacedTokens, states: Mapping[str, Singles], first_entry: int, spent: float
    ) -> None:
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
        decisions = Decisions.join([batch.decisions for batch in pending])
        batches = [batch.placed for batch in pending]
        columns, ids = (np.concatenate([getattr(placed, name) for placed in batches]) for name in ("columns", "ids"))
        phases = np.concatenate([np.full(len(placed), placed.phase) for placed in batches])
        latency_us = float(np.mean([batch.latency_us for batch in pending]))
        for row, path, _, is_new in returned(recording, batches, [batch.entries for batch in pending]):
            row_decisions = decisions.take(path)
            changes = History(1, decisions.n_streams).compare(np.zeros(len(path), np.int64), row_decisions)
            for phase in (PROMPT, GENERATED):
                new = np.flatnonzero(is_new & (phases[path] == phase))
                if len(new):
                    indices = path[new]
                    placed = PlacedTokens(
                        np.full(len(new), row), columns[indices], columns[indices], ids[indices], phase
                    )
                    self._count(number, recording, placed, row_decisions.take(new), changes.take(new), latency_us)
                    self.n_tokens += len(new) if number == 0 else 0

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
            record = RoutingRecord.of(
                decisions,
                changes,
                source.streams,
                placed,
                recording,
                run_id=self.run_id,
                t_capture_us=latency_us,
                dropped=self.n_unseen * decisions.n_streams,
            )
            for listener in self._listeners:
                self._guard("a listener", listener, placed, decisions, record)
            for delivery in self._deliveries:
                counted = replace(record, dropped=record.dropped + delivery.stats().n_dropped)
                delivery.put(counted)  # type: ignore[arg-type]
        self._report_alerts(alerts)

    def _report_alerts(self, alerts: list[Alert]) -> None:
        for alert in alerts:
            with self._lock:
                self.n_alerts += alert.raised
            for action in self._on_alert:
                self._guard("an action on an alert", action, alert)
