"""Prometheus metrics of routing."""

from __future__ import annotations

from probemon.core.metric_family import Family, table_of

ROUTING = "routing"
_ROUTER = ("site", "layer", "level")
_FAMILIES = (
    ("probemon_routing_tokens_total", "counter", ("seen",), "Tokens of the model, by whether their routing was seen"),
    (
        "probemon_routing_decisions_total",
        "counter",
        (*_ROUTER, "what"),
        "Tokens that a router decided about, by what it gave: finite, not_finite",
    ),
    (
        "probemon_routing",
        "gauge",
        (*_ROUTER, "metric"),
        "A metric of a router over all tokens of the newest run: see docs/memory-and-routing.md",
    ),
    (
        "probemon_recurrent",
        "gauge",
        ("site", "metric"),
        "A metric of a recurrent layer over all tokens of the newest run: see docs/memory-and-routing.md",
    ),
    ("probemon_routing_alerts", "gauge", ("kind",), "Alerts of routing in force, by rule"),
    ("probemon_routing_alerts_raised_total", "counter", (), "Alerts of routing that were raised"),
    (
        "probemon_routing_unjudged",
        "gauge",
        ("kind",),
        "Tokens that a rule needs before it can judge; until then a missing alert means nothing",
    ),
    ("probemon_routing_capture_seconds", "gauge", ("percentile",), "Time that a decision's capture took"),
    ("probemon_forward_seconds", "histogram", (), "Time that a forward of the model took"),
    ("probemon_controller_seconds", "histogram", (), "Time that the controller of a BEM adapter took in a forward"),
    ("probemon_token_seconds", "histogram", (), "Time from one generated token to the next"),
    ("probemon_routing_memory_watermark_bytes", "gauge", (), "The most memory that was in use"),
)
FAMILIES = {name: Family(name, kind, labels, text, ROUTING) for name, kind, labels, text in _FAMILIES}


def table() -> str:
    """Return the families as a Markdown table."""
    return table_of("Runs that a `Routing` follows, and routing monitors", list(FAMILIES.values()))
