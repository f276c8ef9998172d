"""Metrics of a run for Prometheus: what was scored, what was not, what the audit found missing, what it cost.

    from prometheus_client import start_http_server

    with manager.attach(model, tokenizer) as run, RunMetrics(run, concepts=["weapon"]):
        start_http_server(9464)                       # http://localhost:9464/metrics
        model.generate(**inputs)

Counts are added up as tokens are scored. Arena, gaps and times are read when somebody scrapes. Needs the extra
`metrics`.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.core.scores import COUNTS, PROMPT, Scores
from probemon.engine.audit import Audit
from probemon.telemetry.collector import Collector
from probemon.tracking.align import PlacedTokens

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

_PERCENTILES = (50, 95, 99)
_ARENA = ("hits", "misses", "evictions", "uploaded_bytes", "late", "fetched")


class RunMetrics(Collector):
    """A collector of `prometheus_client` over one run, registered while its `with` block is open.

    `concepts` are counted by name: each is a series of its own, so name few. `registry` is the client's default one, or
    yours. Raises `UnknownConcept`, `MissingExtra`, and `ConfigError` where a registry holds these series already.
    """

    def __init__(
        self, run: MonitorRun, *, concepts: Sequence[str | int | re.Pattern[str]] = (), registry: Any = None
    ) -> None:
        super().__init__(registry)
        self._run, self._pack = run, run.manager.pack
        self._probes = self._pack.find_all(list(concepts)) if concepts else []  # each once
        self._lock = threading.Lock()
        self._tokens: Counter[tuple[str, str]] = Counter()  # by phase and why it was not seen
        self._pairs: Counter[str] = Counter(dict.fromkeys((*COUNTS, "fired"), 0))
        self._fired = np.zeros(self._pack.n_probes, dtype=np.int64)
        self._audit = Audit(self._pack.n_probes)
        run.listen(self._add)

    def _add(self, placed: PlacedTokens, scores: Scores) -> None:
        """Add one batch of tokens to the sums, as a listener of the run."""
        phase, coverage = "prompt" if placed.phase == PROMPT else "generated", scores.coverage
        audit = Audit.of(coverage) if coverage.audited.any() else None
        with self._lock:
            self._tokens.update((phase, reason) for reason in coverage.unseen)
            for name in COUNTS:
                self._pairs[name] += int(getattr(coverage, name).sum())
            self._pairs["fired"] += int(scores.fired_mask.sum())
            np.add.at(self._fired, scores.probes[scores.fired_mask], 1)
            if audit is not None:
                self._audit += audit

    def collect(self) -> Iterator[Any]:
        """Yield every family as it is now, for `prometheus_client`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

        with self._lock:
            tokens, pairs, audit = dict(self._tokens), dict(self._pairs), self._audit
            fired = self._fired[self._probes].tolist()
        arena, seconds = self._run.manager.arena.stats(), list(self._run.forward_seconds)
        yield InfoMetricFamily(
            "probemon",
            "What is watched",
            {"pack": self._pack.name, "probes": str(self._pack.n_probes), "kernel": self._run.manager.impl},
        )
        family: Metric
        family = CounterMetricFamily(
            "probemon_tokens",
            "Tokens of the host, by phase and why one has no scores (empty: it has)",
            labels=["phase", "unseen"],
        )
        for (phase, reason), count in sorted(tokens.items()):
            family.add_metric([phase, reason], count)
        yield family
        family = CounterMetricFamily(
            "probemon_probes", "Pairs of token and probe, by what became of them", labels=["what"]
        )
        for name, count in pairs.items():
            family.add_metric([name], count)
        yield family
        if self._probes:
            family = CounterMetricFamily(
                "probemon_fired", "Tokens at which a concept exceeded its alert threshold", labels=["concept"]
            )
            for probe, count in zip(self._probes, fired, strict=True):
                family.add_metric([self._pack.concepts[probe]["id"]], count)
            yield family
        family = CounterMetricFamily(
            "probemon_audit", "Sums over audited tokens: see probemon.engine.audit.Audit", labels=["sum"]
        )
        for name, value in audit.as_dict().items():
            if name != "n_probes":
                family.add_metric([name.removeprefix("n_")], value)
        yield family
        family = GaugeMetricFamily(
            "probemon_audit_recall",
            "Mean share found on audited tokens; low and high: 95 % interval",
            labels=["of", "bound"],
        )
        for of, recall in (("firing", audit.firing_recall), ("top", audit.top_recall)):
            for bound in ("value", "low", "high") if recall is not None else ():
                family.add_metric([of, bound], getattr(recall, bound))
        yield family
        family = CounterMetricFamily("probemon_arena", "Slots of the arena since it was made", labels=["what"])
        for name in _ARENA:
            family.add_metric([name], getattr(arena, name))
        yield family
        family = GaugeMetricFamily("probemon_arena_slots", "Slots of the arena", labels=["what"])
        for name in ("slots", "free", "pinned"):
            family.add_metric([name], getattr(arena, f"n_{name}"))
        yield family
        family = GaugeMetricFamily(
            "probemon_hook_seconds",
            "Time inside our hooks, a forward of the host, over the newest 10,000",
            labels=["percentile"],
        )
        for percentile in _PERCENTILES if seconds else ():
            family.add_metric([str(percentile)], float(np.percentile(seconds, percentile)))
        yield family
        yield GaugeMetricFamily(
            "probemon_gaps",
            "Forwards that our hooks did not see (the newest 1,000 are kept)",
            value=len(self._run.gaps),
        )
        yield CounterMetricFamily("probemon_failures", "Callbacks and sinks that failed", value=self._run.n_failures)
