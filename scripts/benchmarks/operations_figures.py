"""The table of what is claimed of operating probemon.

operations(found)     # lines of Markdown, of docs/benchmarks/operations.json
"""

from __future__ import annotations

from typing import Any

_SAID = {
    "series_8000_concepts": "series of a run with a random pack of 8,000 concepts, none by name",
    "scrape_ms": "a scrape with 100 concepts by name, median, ms",
    "step_overhead_pct": "what metrics add to a token of the demo host, %",
    "dashboard_expressions_ok": "expressions of the dashboard that a real Prometheus answers",
    "rules_tested": "alerts with a case that fires and one that does not",
    "ladder_down_tokens": "tokens to the last rung of a budget of 3 ms, where hooks take 30 ms more",
    "ladder_up_tokens": "tokens until all is scored again, once they do not",
    "drift_false_alarms_per_1000_days": "alarms of drift in 1,000 simulated days without any",
    "drift_detect_requests": "requests by which 95 of 100 doublings of a base rate of one in ten are found",
    "fuzzed_deployments": "deployment files at random that end in an error with a line, or in what they say",
}


def operations(found: dict[str, Any]) -> list[str]:
    """What each claim found, beside its bar."""
    lines = ["| what | found | bar |", "|---|---|---|"]
    for name, words in _SAID.items():
        claim = found["claims"][name]
        value = claim["value"]
        shown = "not reached" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:,.3g}"
        of = f" of {claim['of']}" if "of" in claim else ""
        lines.append(f"| {words} | {shown}{of} | {claim['bar']} |")
    return lines
