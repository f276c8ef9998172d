"""The command deploy.

probemon deploy check watch.yaml
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from probemon.cli import options as opt
from probemon.cli.terminal import answer, plain_table, say, terminal
from probemon.ops.cli.deployments import open_deployment
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.monitor.rule_spec import Rule

deploy = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Check a deployment file.")
_SHOWN = 20  # rules


@deploy.callback()
def callback() -> None:
    """Check a deployment file: what is watched, and what follows."""


@deploy.command()
def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Deployment, YAML or JSON.")],
    as_json: opt.AsJson = False,
) -> None:
    """Check FILE without loading a model: keys, packs and their hashes, concepts, thresholds; and what it will cost.

    An error is one line, with the line of the file, and exit status 2.
    """
    from probemon.ops.deployment.cost import cost_of
    from probemon.packs.group import told_of_never

    deployment, pack = open_deployment(file)
    cost = cost_of(deployment, pack)
    rules = deployment.rules(pack)
    endpoint = deployment.content.get("opentelemetry", {}).get("endpoint")
    if as_json:
        about = {"name": deployment.name, "sha256": deployment.sha256, "packs": pack.name, **asdict(cost)}
        answer({**about, "rules": [rule.as_dict(pack) for rule in rules], "opentelemetry": endpoint})
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
        place = f"at {metrics.get('address', '127.0.0.1')} port {metrics['port']}" if "port" in metrics else "to show"
        say(f"metrics {place}; concepts by name: {len(metrics['concepts'])}")
    host = deployment.content.get("host", {})
    say("host: " + (", ".join(f"{name} {value}" for name, value in host.items()) or "any that the packs fit"))
    if rules:
        terminal(soft_wrap=False).print(_table(pack, rules[:_SHOWN]))
    if len(rules) > _SHOWN:
        say(f"and {len(rules) - _SHOWN} more rules")
    if not rules:
        say("no rules: scores are recorded, and nothing follows from them")
    if (reference := deployment.reference(pack)) is not None:
        say(f"drift: compared with {counted(reference.counts.n, 'request')}")
    if endpoint is not None:
        say(f"events of OpenTelemetry: to {endpoint}")


@deploy.command(name="schema")
def print_schema() -> None:
    """Print the JSON Schema of a deployment file, for an editor."""
    from probemon.ops.deployment.deployment import schema

    answer(schema())


def _table(pack: Any, rules: list[Rule]) -> Any:
    table = plain_table()
    for name in ("concept", "over", "for", "then", "not seen"):
        table.add_column(name, overflow="fold")
    for rule in rules:
        about = rule.as_dict(pack)
        table.add_row(about["concept"], *rule.in_words(), about["action"], about["on_blind"])
    return table


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB" if n_bytes >= 1e6 else f"{n_bytes / 1e3:.0f} kB"
