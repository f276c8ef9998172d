"""Write docs/operations/dashboard.json, a dashboard for Grafana. Needs the extra `dev`.

python scripts/dashboard.py             # writes it
python scripts/dashboard.py --check     # status 1 where the file is another

Every expression reads `$job` and `$instance`, and the data source is a variable of the dashboard, so that nothing in it
is of one installation.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "docs/operations/dashboard.json"
_OF = 'job=~"$job", instance=~"$instance"'
_WIDTH, _HEIGHT = 8, 8  # of a panel, where the dashboard is 24 wide


class Panel(NamedTuple):
    """One panel: its title, what it says, its unit and its expressions with their legends.

    In an expression, `{}` after a metric stands for the labels that choose processes, `[]` for the time of a rate.
    """

    title: str
    says: str
    unit: str
    targets: dict[str, str]
    stat: bool = False


def _quantiles(metric: str) -> dict[str, str]:
    return {
        f"p{round(100 * q)}": f"histogram_quantile({q}, sum by (le) (rate({metric}_bucket{{}}[])))"
        for q in (0.5, 0.95, 0.99)
    }


ROWS: dict[str, tuple[Panel, ...]] = {
    "Does it see?": (
        Panel("Runs", "Runs that are open.", "short", {"runs": "sum(probemon_runs{})"}, stat=True),
        Panel(
            "Watched",
            "Packs, kernels and deployments that are watched.",
            "short",
            {
                "{{pack}} ({{probes}}), {{kernel}}, {{deployment}}": (
                    "max by (pack, probes, kernel, deployment) (probemon_info{})"
                )
            },
            stat=True,
        ),
        Panel(
            "Gaps",
            "Columns that the host ran and our hooks did not see.",
            "short",
            {"gaps": "sum(increase(probemon_gaps_total{}[]))"},
        ),
        Panel(
            "Tokens with scores, a second",
            "By phase.",
            "short",
            {"{{phase}}": 'sum by (phase) (rate(probemon_tokens_total{unseen=""}[]))'},
        ),
        Panel(
            "Share of tokens without scores",
            "By why. Above 1 % ProbemonBlind fires.",
            "percentunit",
            {
                "{{unseen}}": (
                    'sum by (unseen) (rate(probemon_tokens_total{unseen!=""}[]))'
                    " / on () group_left () sum(rate(probemon_tokens_total{}[]))"
                )
            },
        ),
        Panel(
            "Failures",
            "Callbacks, followers and sinks that raised.",
            "short",
            {"failures": "sum(increase(probemon_failures_total{}[]))"},
        ),
    ),
    "What does it cost?": (
        Panel(
            "Time in hooks, a forward",
            "Above 20 ms at p99 ProbemonOverBudget fires.",
            "s",
            _quantiles("probemon_forward_overhead_seconds"),
        ),
        Panel(
            "Share of a forward that is in hooks",
            "Of all the time that forwards took.",
            "percentunit",
            {
                "{{instance}}": (
                    "sum by (instance) (rate(probemon_forward_overhead_seconds_sum{}[]))"
                    " / sum by (instance) (rate(probemon_watched_seconds_total{}[]))"
                )
            },
        ),
        Panel(
            "Probes a token",
            "What became of a token's probes.",
            "short",
            {
                "{{what}}": (
                    "sum by (what) (rate(probemon_probes_total{}[]))"
                    ' / on () group_left () sum(rate(probemon_tokens_total{unseen=""}[]))'
                )
            },
        ),
        Panel(
            "Arena",
            "Slots that were found, loaded and given up, a second.",
            "short",
            {"{{what}}": 'sum by (what) (rate(probemon_arena_total{what!="uploaded_bytes"}[]))'},
        ),
        Panel("Slots", "Slots of arenas.", "short", {"{{what}}": "sum by (what) (probemon_arena_slots{})"}),
    ),
    "What fires?": (
        Panel(
            "Firing, by level",
            "Pairs of token and probe that fired, a second.",
            "short",
            {"level {{level}}": 'sum by (level) (rate(probemon_level_probes_total{what="fired"}[]))'},
        ),
        Panel(
            "Active, by level",
            "Pairs of token and probe that had a score, a second.",
            "short",
            {"level {{level}}": 'sum by (level) (rate(probemon_level_probes_total{what="active"}[]))'},
        ),
        Panel(
            "Named concepts",
            "Tokens at which they fired, a minute.",
            "short",
            {"{{concept}}": "60 * sum by (concept) (rate(probemon_fired_total{}[]))"},
        ),
        Panel(
            "Events of rules",
            "By what followed, a minute.",
            "short",
            {"{{action}}": "60 * sum by (action) (rate(probemon_events_total{}[]))"},
        ),
        Panel(
            "Verdicts of judges",
            "What they ruled, and why they did not, a minute.",
            "short",
            {"{{ruling}} {{failure}}": "60 * sum by (ruling, failure) (rate(probemon_verdicts_total{}[]))"},
        ),
        Panel(
            "Time to a verdict",
            "The mean.",
            "s",
            {"mean": "sum(rate(probemon_verdict_seconds_total{}[])) / sum(rate(probemon_verdicts_total{}[]))"},
        ),
    ),
    "What was missed?": (
        Panel(
            "Share of probes that were dropped",
            "Above 0 ProbemonDropped fires.",
            "percentunit",
            {
                "dropped": (
                    'sum(rate(probemon_probes_total{what="dropped"}[]))'
                    ' / sum(rate(probemon_probes_total{what=~"active|dropped|not_reached"}[]))'
                )
            },
        ),
        Panel(
            "Recall on audited tokens",
            "The share of what fires that was found, over an hour. Under 95 % in six hours ProbemonRecallLow fires.",
            "percentunit",
            {
                "of what fires": (
                    'sum(increase(probemon_audit_total{sum="firing_found"}[1h]))'
                    ' / sum(increase(probemon_audit_total{sum="firing_tokens"}[1h]))'
                )
            },
        ),
        Panel(
            "Recall since the beginning",
            "With the 95 % interval of one process.",
            "percentunit",
            {"{{of}}, {{bound}}": "min by (of, bound) (probemon_audit_recall{})"},
        ),
        Panel(
            "Tokens for sinks, a second",
            "Above 0 dropped ProbemonSinkDrops fires.",
            "short",
            {"{{what}}": "sum by (what) (rate(probemon_sink_tokens_total{}[]))"},
        ),
        Panel(
            "Alarms of drift",
            "That hold now, by what differs from the reference.",
            "short",
            {"{{kind}}": "max by (kind) (probemon_drift_alarms{})"},
        ),
    ),
    "Budget": (
        Panel("Rung", "0: all is looked at.", "short", {"{{instance}}": "max by (instance) (probemon_budget_rung{})"}),
        Panel(
            "Tokens that were shed, a second",
            "By rung.",
            "short",
            {"rung {{rung}}": "sum by (rung) (rate(probemon_budget_shed_tokens_total{}[]))"},
        ),
        Panel(
            "Breaker",
            "1: open, nothing is scored.",
            "short",
            {"{{instance}}": "max by (instance) (probemon_breaker_open{})"},
        ),
    ),
    "Server": (
        Panel(
            "Requests, a minute",
            "By what became of them.",
            "short",
            {"{{outcome}}": "60 * sum by (outcome) (rate(probemon_requests_total{}[]))"},
        ),
        Panel(
            "Answers, a minute",
            "By how they ended.",
            "short",
            {"{{finish_reason}}": "60 * sum by (finish_reason) (rate(probemon_answers_total{}[]))"},
        ),
        Panel(
            "Tokens of answers, a second",
            "Of prompts, generated, and of these without scores.",
            "short",
            {"{{what}}": "sum by (what) (rate(probemon_answer_tokens_total{}[]))"},
        ),
        Panel(
            "Requests under way",
            "Answered and waiting.",
            "short",
            {"running": "sum(probemon_requests_running{})", "waiting": "sum(probemon_requests_waiting{})"},
        ),
        Panel(
            "Time of a request",
            "The mean.",
            "s",
            {
                "mean": (
                    "sum(rate(probemon_request_seconds_total{}[]))"
                    ' / sum(rate(probemon_requests_total{outcome="answered"}[]))'
                )
            },
        ),
        Panel(
            "Readers of events",
            "And the events that slow ones lost, a second.",
            "short",
            {
                "readers": "sum(probemon_subscribers{})",
                "lost": "sum(rate(probemon_subscriber_events_dropped_total{}[]))",
            },
        ),
    ),
    "Routers and adapters": (
        Panel(
            "Tokens, a second",
            "By whether their routing was seen.",
            "short",
            {"seen: {{seen}}": "sum by (seen) (rate(probemon_routing_tokens_total{}[]))"},
        ),
        Panel(
            "Decisions, a second",
            "By whether they were numbers.",
            "short",
            {"{{what}}": "sum by (what) (rate(probemon_routing_decisions_total{}[]))"},
        ),
        Panel(
            "Entropy of decisions",
            "By router.",
            "short",
            {"{{site}} {{level}}": 'max by (site, level) (probemon_routing{metric="decision_entropy"})'},
        ),
        Panel(
            "Alerts of routing",
            "That hold now, and were raised.",
            "short",
            {
                "{{kind}}": "sum by (kind) (probemon_routing_alerts{})",
                "raised": "sum(increase(probemon_routing_alerts_raised_total{}[]))",
            },
        ),
        Panel("Time of a forward", "Of the host, with its adapters.", "s", _quantiles("probemon_forward_seconds")),
        Panel("Time of controllers", "Of BEM adapters, a forward.", "s", _quantiles("probemon_controller_seconds")),
        Panel("Time between tokens", "Generated ones.", "s", _quantiles("probemon_token_seconds")),
        Panel(
            "Time of a capture",
            "What recording a decision takes.",
            "s",
            {"p{{percentile}}": "max by (percentile) (probemon_routing_capture_seconds{})"},
        ),
        Panel(
            "Memory", "The most that was in use.", "bytes", {"most": "max(probemon_routing_memory_watermark_bytes{})"}
        ),
    ),
}
# Families that are on no panel, and why not.
NOT_SHOWN = {
    "probemon_routing_unjudged": "how many tokens rules wait for says something in the first minutes alone",
    "probemon_recurrent": "its metrics are by layer: docs/recurrent-hosts.md says which to look at",
}


def expression(text: str) -> str:
    """Return an expression with the labels that choose processes, and the time of its rates."""
    text = text.replace("[]", "[$__rate_interval]").replace("{}", f"{{{_OF}}}")
    for opening in ("{unseen", "{what", "{sum=", "{metric", "{outcome="):
        text = text.replace(opening, f"{{{_OF}, {opening[1:]}")
    return text


def dashboard() -> str:
    """Return the JSON of the dashboard."""
    from grafana_foundation_sdk.builders import dashboard as builder
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    board = (
        builder.Dashboard("probemon")
        .uid("probemon-operations")
        .tags(["probemon", "generated"])
        .description("Processes that watch language models with probemon. Written by scripts/dashboard.py.")
        .editable()
        .refresh("30s")
        .time("now-6h", "now")
        .timezone("browser")
        .with_variable(builder.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, of in (("job", "probemon_runs"), ("instance", 'probemon_runs{job=~"$job"}')):
        board = board.with_variable(_choice(builder, name, of))
    numbers = itertools.count(1)
    for title, panels in ROWS.items():
        board = board.with_row(builder.Row(title).id(next(numbers)))
        for panel in panels:
            board = board.with_panel(_panel(panel).id(next(numbers)))
    return str(JSONEncoder(sort_keys=True, indent=1).encode(board.build())) + "\n"


def _choice(builder: Any, name: str, of: str) -> Any:
    return (
        builder.QueryVariable(name)
        .label(name.capitalize())
        .query(f"label_values({of}, {name})")
        .datasource(_source())
        .refresh(2)
        .multi(True)
        .include_all(True)
    )


def _source() -> Any:
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    return DataSourceRef(type_val="prometheus", uid="${datasource}")


def _panel(panel: Panel) -> Any:
    from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
    from grafana_foundation_sdk.models.common import BigValueTextMode, LegendDisplayMode, LegendPlacement

    made: Any
    if panel.stat:
        latest = common.ReduceDataOptions().calcs(["lastNotNull"])
        made = stat.Panel().reduce_options(latest).text_mode(BigValueTextMode.VALUE_AND_NAME)
    else:
        legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        made = timeseries.Panel().min(0).legend(legend.show_legend(True))
    made = made.title(panel.title).description(panel.says).unit(panel.unit).datasource(_source())
    made = made.height(_HEIGHT).span(_WIDTH)
    for letter, (legend, text) in zip("ABC", panel.targets.items(), strict=False):
        query = prometheus.Dataquery().expr(expression(text)).legend_format(legend).ref_id(letter)
        made = made.with_target(query.datasource(_source()))
    return made


def main() -> int:
    """Write the file, or say whether it is what would be written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check, text = parser.parse_args().check, dashboard()
    if check:
        return int(not FILE.exists() or FILE.read_text(encoding="utf-8") != text)
    FILE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
