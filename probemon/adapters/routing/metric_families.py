"""The metrics of routing for Prometheus: one table, of which the metrics and the page are made."""

from __future__ import annotations

from probemon.core.metric_family import Family, table_of

ROUTING = "routing"
_ROUTER = ("site", "layer", "level")
FAMILIES = {
    family.name: family
    for family in (
        Family(
            "probemon_routing_tokens_total",
            "counter",
            ("seen",),
            "Tokens of the host, by whether their routing was seen",
            ROUTING,
        ),
        Family(
            "probemon_routing_decisions_total",
            "counter",
            (*_ROUTER, "what"),
            "Tokens that a router decided about, by what it gave: finite, not_finite",
            ROUTING,
        ),
        Family(
            "probemon_routing",
            "gauge",
            (*_ROUTER, "metric"),
            "A metric of a router over all tokens of the newest run: see docs/routing.md",
            ROUTING,
        ),
        Family(
            "probemon_recurrent",
            "gauge",
            ("site", "metric"),
            "A metric of a recurrent layer over all tokens of the newest run: see docs/recurrent-hosts.md",
            ROUTING,
        ),
        Family(
            "probemon_routing_alerts", "gauge", ("kind",), "Alerts of routing that hold now, by their rule", ROUTING
        ),
        Family("probemon_routing_alerts_raised_total", "counter", (), "Alerts of routing that were raised", ROUTING),
        Family(
            "probemon_routing_unjudged",
            "gauge",
            ("kind",),
            "Tokens that a rule needs before it can be judged: until then no alert says nothing",
            ROUTING,
        ),
        Family(
            "probemon_routing_capture_seconds", "gauge", ("percentile",), "Time that a decision's capture took", ROUTING
        ),
        Family("probemon_forward_seconds", "histogram", (), "Time that a forward of the host took", ROUTING),
        Family(
            "probemon_controller_seconds",
            "histogram",
            (),
            "Time that the controller of a BEM adapter took in a forward",
            ROUTING,
        ),
        Family("probemon_token_seconds", "histogram", (), "Time from one generated token to the next", ROUTING),
        Family("probemon_routing_memory_watermark_bytes", "gauge", (), "The most memory that was in use", ROUTING),
    )
}


def table() -> str:
    """Return the families as a table of Markdown."""
    return table_of("Of runs that a `Routing` follows, and of monitors of routing", list(FAMILIES.values()))
