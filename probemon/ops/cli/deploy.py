"""The command deploy check.

probemon deploy check watch.yaml
probemon deploy check watch.yaml --json
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from probemon.cli.options import AsJson
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.ops.cli.deployments import open_deployment
from probemon.util.counted import counted

deploy = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check a deployment file.")
_SHOWN = 20  # rules


@deploy.callback()
def callback() -> None:
    """Check a deployment file: what is watched, and what follows."""


@deploy.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Deployment, YAML or JSON.")],
    as_json: AsJson = False,
) -> None:
    """Check FILE without loading a model: keys, packs and their hashes, concepts, thresholds; and what it will cost.

    What is wrong is one line, which names the line of the file, and exit status 2.
    """
    from probemon.monitor.rules import named_action
    from probemon.ops.deployment.cost import cost_of
    from probemon.packs.group import told_of_never

    deployment, pack = open_deployment(file)
    cost = cost_of(deployment, pack)
    rules = [
        {
            "concept": pack.concepts[rule.probe]["id"],
            "above": rule.above,
            "alert_set": rule.alert_set,
            "aggregate": str(rule.aggregator),
            "for_tokens": rule.for_tokens,
            "action": named_action(rule.action),
            "on_blind": rule.on_blind,
        }
        for rule in deployment.rules(pack)
    ]
    endpoint = deployment.content.get("opentelemetry", {}).get("endpoint")
    if as_json:
        about = {"name": deployment.name, "sha256": deployment.sha256, "packs": pack.name, **asdict(cost)}
        answer({**about, "rules": rules, "opentelemetry": endpoint})
        return
    say(f"{deployment.name}: {pack.name}", f"sha256 of what it says: {deployment.sha256}")
    say(
        f"every token: {cost.n_always} of {counted(cost.n_probes, 'probe')} at least ({_size(cost.always_bytes)}),"
        f" {cost.n_most} at most ({_size(cost.most_bytes)}); weights in memory: {_size(cost.weight_bytes)}"
    )
    if cost.n_watched < cost.n_probes:
        n_left_out = cost.n_probes - cost.n_watched
        say(f"watched: {counted(cost.n_watched, 'probe')}; include, exclude and depth leave out {n_left_out}")
    if never := told_of_never(pack):
        say(never)
    metrics = deployment.metrics(pack)
    if metrics is not None:
        where = f"at {metrics.get('address', '127.0.0.1')} port {metrics['port']}" if "port" in metrics else "to show"
        say(f"metrics {where}; concepts by name: {len(metrics['concepts'])}")
    host = deployment.content.get("host", {})
    say("host: " + (", ".join(f"{name} {value}" for name, value in host.items()) or "any that the packs fit"))
    if rules:
        terminal(soft_wrap=False).print(_table(rules[:_SHOWN]))
    if len(rules) > _SHOWN:
        say(f"and {len(rules) - _SHOWN} more rules")
    if not rules:
        say("no rules: scores are recorded, and nothing follows from them")
    if endpoint is not None:
        say(f"events of OpenTelemetry: to {endpoint}")


def _table(rules: list[dict[str, Any]]) -> Any:
    from probemon.packs.strength import in_short

    table = plain_table()
    for name in ("concept", "over", "for", "then", "not seen"):
        table.add_column(name, overflow="fold")
    for rule in rules:
        aggregate = "" if rule["aggregate"] == "each" else f" of {rule['aggregate']}"
        of_set = f" ({rule['alert_set']})" if rule["alert_set"] else ""
        n = rule["for_tokens"]
        table.add_row(
            rule["concept"],
            f"{in_short(rule['above'], '.3g')}{aggregate}{of_set}",
            f"{n} token{'s' * (n > 1)}",
            rule["action"],
            rule["on_blind"],
        )
    return table


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
