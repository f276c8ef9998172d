"""Metrics computed at the scrape: audit recall, arenas, sums of followers."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from probemon.engine.audit import Audit, Estimate
from probemon.monitor.followers import Follower
from probemon.ops.telemetry.metric_families import FAMILIES, SCRAPE

_COUNTS = ("hits", "misses", "evictions", "uploaded_bytes", "late", "fetched")
_SLOTS = ("slots", "free", "pinned")


class ScrapedMetrics:
    """A collector of `prometheus_client`."""

    def __init__(self) -> None:
        self.arenas = Arenas()
        self._sums: dict[type, Any] = {}
        self._audit = Audit(0)
        self._estimated: tuple[Audit | None, tuple[tuple[str, Estimate | None], ...]] = (None, ())
        self._lock = threading.Lock()

    def sums_of(self, follower: Follower) -> Any:
        """Return the sums of a follower's kind; None if it has none."""
        kind = follower.sums()
        if kind is None:
            return None
        with self._lock:
            if kind not in self._sums:
                self._sums[kind] = kind()
            return self._sums[kind]

    def add_audit(self, audit: Audit) -> None:
        """Add audited tokens of any pack."""
        with self._lock:
            self._audit = self._audit + replace(audit, n_probes=0)

    def describe(self) -> list[Any]:
        """Return the families without samples."""
        from prometheus_client.core import Metric

        return [Metric(family.stem, family.help, family.kind) for family in FAMILIES.values() if family.where == SCRAPE]

    def collect(self) -> Iterator[Any]:
        """Yield every family with its values."""
        recalls = FAMILIES["probemon_audit_recall"].scraped()
        for of, recall in self._recalls():
            for bound in ("value", "low", "high") if recall is not None else ():
                recalls.add_metric([of, bound], getattr(recall, bound))
        yield recalls
        counts, slots = self.arenas.read()
        for name, what, values in (("total", _COUNTS, counts), ("slots", _SLOTS, slots)):
            family = FAMILIES[f"probemon_arena_{name}"].scraped()
            for label in what if self.arenas else ():
                family.add_metric([label], values[label])
            yield family
        for sums in list(self._sums.values()):
            yield from sums.collect()

    def _recalls(self) -> tuple[tuple[str, Estimate | None], ...]:
        """Return both recalls, estimated only after new audits."""
        with self._lock:
            audit, (of, estimates) = self._audit, self._estimated
        if of is not audit:
            estimates = (("firing", audit.firing_recall), ("top", audit.top_recall))
            with self._lock:
                self._estimated = (audit, estimates)
        return estimates


class Arenas:
    """Adds up the arenas of a process; counts outlive their arena."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._known: weakref.WeakKeyDictionary[Any, Counter[str]] = weakref.WeakKeyDictionary()
        self._any, self._lock = False, threading.Lock()

    def __bool__(self) -> bool:
        return self._any

    def add(self, arena: Any) -> None:
        """Count an arena from its beginning."""
        with self._lock:
            self._any = True
            self._known.setdefault(arena, Counter())

    def read(self) -> tuple[Counter[str], Counter[str]]:
        """Return all counts so far, and the slots of live arenas."""
        slots = Counter[str]()
        with self._lock:
            for arena, before in list(self._known.items()):
                stats = arena.stats()
                now = Counter({name: int(getattr(stats, name)) for name in _COUNTS})
                self._counts += now - before
                self._known[arena] = now
                slots.update({name: int(getattr(stats, f"n_{name}")) for name in _SLOTS})
            return Counter(self._counts), slots
