"""Prometheus metrics of a process.

    metrics = ProcessMetrics(concepts=["weapon"])         # one per process
    with served(metrics.registry, 9464), manager.attach(model, tokenizer, followers=[metrics]):
        model.generate(**inputs)

docs/metrics.md lists the families. Needs the extra `metrics`.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from probemon.core.concept_names import MOST_NAMED
from probemon.engine.audit import Audit
from probemon.errors import ConfigError, MissingExtra
from probemon.monitor.followers import Follower
from probemon.ops.budget import Budget
from probemon.ops.telemetry.exposition import exposition, several_processes
from probemon.ops.telemetry.metric_families import FAMILIES, PROCESS
from probemon.ops.telemetry.run_counts import RunCounts
from probemon.ops.telemetry.scraped_metrics import ScrapedMetrics

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

_MOST_CHARACTERS = 64  # of a request's id: an exemplar holds 128, with a trace's


class ProcessMetrics(Follower):
    """Counts its runs until the process ends.

    - `concepts`: counted by name, at most 100
    - `registry`: by default the client's

    With several processes (`PROMETHEUS_MULTIPROC_DIR`), families of the scrape are left out. Raises `MissingExtra`, or
    `ConfigError` for names in use. `run.follow(metrics)` raises `UnknownConcept`, or `ConfigError` for too many
    concepts.
    """

    def __init__(self, *, concepts: Sequence[str | int | re.Pattern[str]] = (), registry: Any = None) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtra("ProcessMetrics needs prometheus-client: pip install 'probemon[metrics]'") from error
        self.registry = prometheus_client.REGISTRY if registry is None else registry
        self._concepts, self._named = list(concepts), set[str]()
        self._open: weakref.WeakSet[MonitorRun] = weakref.WeakSet()
        self._described = Counter[tuple[str, ...]]()  # open runs, by the labels of probemon_info
        self._newest: tuple[str, ...] | None = None
        self._highest = defaultdict[tuple[str, ...], weakref.WeakKeyDictionary[Any, float]](weakref.WeakKeyDictionary)
        self._n_runs: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by budget and by breaker
        self._lock = threading.RLock()
        self._scraped = ScrapedMetrics()
        try:
            self._families = {
                name: family.made(self.registry) for name, family in FAMILIES.items() if family.where == PROCESS
            }
            if not several_processes():
                self.registry.register(self._scraped)
        except ValueError as error:
            raise ConfigError(
                f"this registry has metrics of these names already: one ProcessMetrics is for all runs of a process, or"
                f" give registry= ({error})"
            ) from error

    def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the exposition and its content type, for a header Accept."""
        return exposition(self.registry, accept)

    def began(self, run: MonitorRun) -> None:
        """Count what `run` does from now on."""
        self._follow(run, {})

    def for_request(self, request: str) -> Follower:
        """Return a follower with a request's id in its exemplars."""
        return _Request(self, request)

    @contextmanager
    def showing(self, follower: Follower) -> Iterator[None]:
        """Show the sums of a follower without a run, such as a `RoutingMonitor`, while the block is open."""
        sums = self._scraped.sums_of(follower) if isinstance(follower, Follower) else None
        if sums is None:
            raise ConfigError(f"{type(follower).__name__} adds up nothing for Prometheus: give a RoutingMonitor")
        sums.begin(follower)
        try:
            yield
        finally:
            sums.end(follower)

    # -- inside --------------------------------------------------------------------------------------

    def _follow(self, run: MonitorRun, exemplar: Mapping[str, str]) -> None:
        pack = run.manager.pack
        probes = pack.find_all(self._concepts) if self._concepts else []
        with self._lock:
            if run in self._open:
                raise ConfigError("these metrics follow this run already: what it does would be counted twice")
            named = self._named | {pack.concepts[probe]["id"] for probe in probes}
            if len(named) > MOST_NAMED:
                examples = ", ".join(sorted(named)[:5])
                raise ConfigError(
                    f"concepts are {len(named)} ({examples}, ...), each a separate series: name at most {MOST_NAMED}."
                    " All of them are counted by level"
                )
            self._named = named
            counts = RunCounts(self, run, probes, exemplar)
            self._open.add(run)
            for shared in (run.follower(Budget), run.breaker):
                if shared is not None:
                    self._n_runs[shared] = self._n_runs.get(shared, 0) + 1
            self._scraped.arenas.add(run.manager.arena)
            self._families["probemon_runs"].set(len(self._open))
        for follower in run.followers:
            if (sums := self._scraped.sums_of(follower)) is not None:
                sums.begin(follower)
        run.follow(counts)

    def family(self, name: str) -> Any:
        """Return a family's object."""
        return self._families[name]

    def describe_run(self, labels: tuple[str, ...], before: tuple[str, ...] | None) -> None:
        """Set what a run watches, instead of `before`."""
        with self._lock:
            if before is not None:
                self._described[before] -= 1
            self._described[labels] += 1
            self._newest = labels
            self._say_what_is_watched()

    def _say_what_is_watched(self) -> None:
        for labels, n in self._described.items():
            self._families["probemon_info"].labels(*labels).set(int(n > 0 or labels == self._newest))

    def set_highest(self, name: str, of: object, value: float, *labels: str) -> None:
        """Set the value of `of` in a gauge that shows the highest."""
        family = self._families[name]
        with self._lock:
            values = self._highest[name, *labels]
            values[of] = value
            (family.labels(*labels) if labels else family).set(max(values.values()))

    def _forget(self, name: str, of: object) -> None:
        if of is not None and self._n_runs[of] == 1 and self._highest[name,].pop(of, None) is not None:
            self._families[name].set(max(self._highest[name,].values(), default=0))

    def add_audit(self, audit: Audit) -> None:
        """Add audited tokens."""
        self._scraped.add_audit(audit)

    def end_run(self, run: MonitorRun, labels: tuple[str, ...]) -> None:
        """Forget an ended run; counts stay."""
        with self._lock:
            self._open.discard(run)
            self._described[labels] -= 1
            self._say_what_is_watched()
            self._families["probemon_runs"].set(len(self._open))
            self._forget("probemon_budget_degradation", run.follower(Budget))
            self._forget("probemon_breaker_open", run.breaker)
        self._scraped.arenas.read()
        for follower in run.followers:
            if (sums := self._scraped.sums_of(follower)) is not None:
                sums.end(follower)


class _Request(Follower):
    """Follows the run of one request."""

    def __init__(self, metrics: ProcessMetrics, request: str) -> None:
        self._metrics, self._request = metrics, request[:_MOST_CHARACTERS]

    def began(self, run: MonitorRun) -> None:
        self._metrics._follow(run, {"request": self._request})
