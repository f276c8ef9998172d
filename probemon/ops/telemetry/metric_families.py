"""The Prometheus metric families, for the metrics and their page.

counter = FAMILIES["probemon_gaps_total"].made(registry)
table()                                                      # of docs/metrics.md

`PROCESS` families may be shared by processes (`PROMETHEUS_MULTIPROC_DIR`). Others are computed at the scrape.
"""

from __future__ import annotations

from probemon.core.metric_family import Family, table_of

PROCESS, SCRAPE, SERVER = WHERE = ("process", "scrape", "server")
_SECTIONS = {
    PROCESS: "Every watching process",
    SCRAPE: "A single watching process, computed at the scrape",
    SERVER: "`probemon serve`, in addition",
}


_ALL = (
    Family(
        "probemon_info",
        "gauge",
        ("pack", "probes", "kernel", "deployment"),
        "1 for what is watched: the pack, how many probes it has, the kernel, the hash of the deployment file",
        mode="livemax",
    ),
    Family("probemon_runs", "gauge", (), "Runs that are open"),
    Family(
        "probemon_tokens_total",
        "counter",
        ("phase", "unseen"),
        "Tokens of the model, by phase (prompt, generated) and why one has no scores (empty: it has; gap, not_finite,"
        " budget, failed, other)",
    ),
    Family(
        "probemon_probes_total",
        "counter",
        ("what",),
        "Pairs of token and probe, by outcome: the words of coverage, and fired",
    ),
    Family(
        "probemon_level_probes_total",
        "counter",
        ("level", "what"),
        "Pairs of token and probe that were active, and that fired, by level of the hierarchy; levels from 15 on are"
        " one",
    ),
    Family(
        "probemon_fired_total",
        "counter",
        ("concept",),
        "Tokens at which a concept exceeded its alert threshold: only of concepts that were named",
    ),
    Family(
        "probemon_events_total",
        "counter",
        ("action",),
        "Events of rules, by what followed: record, stop, raise, escalate, call",
    ),
    Family(
        "probemon_verdicts_total",
        "counter",
        ("ruling", "failure"),
        "Verdicts of judges: what they rule (pass, stop, raise), or why not (late, error, not asked, abandoned)",
    ),
    Family("probemon_verdict_seconds_total", "counter", (), "Time from events to the verdicts of judges"),
    Family("probemon_gaps_total", "counter", (), "Gaps: positions that the model ran and our hooks did not see"),
    Family(
        "probemon_forward_overhead_seconds",
        "histogram",
        (),
        "Time in our hooks, without waits for judges, once per forward",
    ),
    Family(
        "probemon_watched_seconds_total",
        "counter",
        (),
        "Time that forwards of the model took, our hooks included",
    ),
    Family("probemon_failures_total", "counter", (), "Callbacks, followers and sinks that failed"),
    Family("probemon_sink_tokens_total", "counter", ("what",), "Tokens for sinks: written, dropped"),
    Family(
        "probemon_audit_total",
        "counter",
        ("sum",),
        "Sums over audited tokens: tokens, top_found, firing_tokens, firing_found, firing, firing_missed, evaluated,"
        " active",
    ),
    Family(
        "probemon_budget_degradation",
        "gauge",
        (),
        "Degradation that keeps a budget, of the run that leaves out most: 0 none to 5 everything (docs/deployment.md)",
        mode="livemax",
    ),
    Family(
        "probemon_budget_shed_tokens_total",
        "counter",
        ("degradation",),
        "Tokens at which something was left out to keep a budget: audit, depth, named, sampled, off",
    ),
    Family(
        "probemon_breaker_open",
        "gauge",
        (),
        "1 while the breaker of a run keeps scoring paused, or tries it again",
        mode="livemax",
    ),
    Family(
        "probemon_drift_alarms",
        "gauge",
        ("kind",),
        "Present alarms of drift, if a run has a DriftMonitor",
        mode="livemax",
    ),
    Family(
        "probemon_audit_recall",
        "gauge",
        ("of", "bound"),
        "Mean share found on audited tokens, of what fires and of the best 10; low and high: 95 % interval",
        SCRAPE,
    ),
    Family(
        "probemon_arena_total",
        "counter",
        ("what",),
        "Slots of arenas, since they were made: hits, misses, evictions, uploaded_bytes, late, fetched",
        SCRAPE,
    ),
    Family("probemon_arena_slots", "gauge", ("what",), "Slots of arenas: slots, free, pinned", SCRAPE),
    Family(
        "probemon_requests_total",
        "counter",
        ("outcome",),
        "Requests that ended, by outcome: answered, cancelled, stalled, failed, refused",
        SERVER,
    ),
    Family("probemon_answers_total", "counter", ("finish_reason",), "Answers, by how they ended", SERVER),
    Family(
        "probemon_answer_tokens_total",
        "counter",
        ("what",),
        "Tokens of answers that no error ended: prompt, generated, and unseen, which are generated ones without scores,"
        " except the last, which the model never runs",
        SERVER,
    ),
    Family("probemon_request_seconds_total", "counter", (), "Time that answers took", SERVER),
    Family("probemon_requests_running", "gauge", (), "Requests being answered", SERVER),
    Family("probemon_requests_waiting", "gauge", (), "Requests in the queue", SERVER),
    Family("probemon_subscribers", "gauge", (), "Readers of the events", SERVER),
    Family("probemon_subscriber_events_dropped_total", "counter", (), "Events that slow readers lost", SERVER),
)
FAMILIES = {family.name: family for family in _ALL}


def table() -> str:
    """Return the families as Markdown tables, one per `where`."""
    return "\n\n".join(
        table_of(title, [family for family in _ALL if family.where == where]) for where, title in _SECTIONS.items()
    )
