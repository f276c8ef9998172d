"""The result of scripts/profile_cascade.py for people: the write-up's tables, twin beside ours.

show(result)            # `result`: the object that --json prints
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

NAMES = {"no_pruning": "no pruning", "top_50": "top-50", "top_30": "top-30"}
PARTS = {
    "scoring_loaded": "scoring what is loaded", "child_lookup": "child lookup", "loading": "loading children",
    "scoring_children": "scoring children", "sorting": "sorting and pruning",
    "file_read": "file read", "model_and_weights": "model creation and weights", "transfer": "transfer",
}  # fmt: skip
N_SHOWN = 10  # tokens of a per-token table, as in the write-up


def show(result: dict[str, Any]) -> None:
    """Print every table and the closing sentences. Plain text where the output is not a terminal."""
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    machine = result["machine"]
    console.print(
        f"{result['n_probes']} probes ({result['settings']['architecture']}, random weights, fp32), hidden size"
        f" {result['hidden']}, {'/'.join(map(str, result['probes_per_level']))} by level, {result['n_tokens']}"
        f" tokens.\nHidden states: {result['states']}.\n{machine['cpu']}, {machine['threads']} thread, torch"
        f" {machine['torch']}; our kernel: {result['settings']['impl']}.\nBefore timing: same probes evaluated and kept"
        f" at all {result['agreement']['tokens_compared']} compared tokens, scores within"
        f" {result['agreement']['largest_score_difference']:.1e}."
    )
    for table in (
        _load(result),
        _steps(result),
        _tokens(result, "no_pruning"),
        _tokens(result, "top_30"),
        _compared(result),
    ):
        console.print()
        console.print(table)
    console.print()
    console.print(_hundred(result))
    console.print(_growth(result))
    console.print(f"Ours is {result['speedup_top_30']:.1f} times as fast per token at top-30.")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    return table


def _load(result: dict[str, Any]) -> Table:
    split = result["load_split"]
    table = _table(f"One load of the twin (mean of {split['n_loads']})", "part", "ms", "share")
    for part in ("file_read", "model_and_weights", "transfer"):
        table.add_row(PARTS[part], f"{split[part]['ms']:.3f}", f"{split[part]['share']:.1%}")
    table.add_row("total", f"{split['total_ms']:.3f}", "100.0%")
    return table


def _steps(result: dict[str, Any]) -> Table:
    table = _table(
        "A step of the twin (mean over the tokens)", "part", *(f"{NAMES[n]}, ms" for n in NAMES), "share at top-30"
    )
    for part in result["step_breakdown"]["top_30"]:
        cells = [f"{result['step_breakdown'][name][part]['mean_ms']:.3f}" for name in NAMES]
        table.add_row(PARTS[part], *cells, f"{result['step_breakdown']['top_30'][part]['share']:.1%}")
    return table


def _tokens(result: dict[str, Any], name: str) -> Table:
    rows = result[f"per_token_{name}"]
    shown = rows[:N_SHOWN] + (rows[-1:] if len(rows) > N_SHOWN else [])
    table = _table(f"Token by token, {NAMES[name]}", "token", "children", "loaded", "unloaded", "twin ms", "ours ms")
    for row in shown:
        table.add_row(
            str(row["token"]),
            str(row["children"]),
            str(row["loaded"]),
            str(row["unloaded"]),
            f"{row['twin_ms']:.1f}",
            f"{row['ours_ms']:.2f}",
            end_section=row["token"] == N_SHOWN,
        )
    return table


def _compared(result: dict[str, Any]) -> Table:
    n = result["n_tokens"]
    columns = ("configuration", "twin mean", "max", "ours mean", "median", "max", "final loaded", "speed-up")
    table = _table(f"The comparison over {n} tokens (ms; final loaded: base and retained)", *columns)
    offline = result["offline_configuration"]
    rows = [(NAMES[name], result["twin"][name], result["ours"][name], result["speedups"][name]) for name in NAMES]
    rows.append(("offline (levels 0-1, top-100)", offline["twin"], offline["ours"], offline["speedup"]))
    for name, twin, ours, speedup in rows:
        table.add_row(
            name,
            f"{twin['mean_ms']:.1f}",
            f"{twin['max_ms']:.1f}",
            f"{ours['mean_ms']:.2f}",
            f"{ours['median_ms']:.2f}",
            f"{ours['max_ms']:.2f}",
            str(ours["final_loaded"]),
            f"{speedup:.1f}x",
        )
    return table


def _hundred(result: dict[str, Any]) -> str:
    sums = result["hundred_tokens_ms"]
    if sums is None:
        return f"100-token overhead: not measured, the stream has {result['n_tokens']} tokens."
    each = "; ".join(
        f"{NAMES[name]} {sums['twin'][name] / 1e3:.2f} s, ours {sums['ours'][name] / 1e3:.3f} s" for name in NAMES
    )
    return f"100-token overhead, measured: {each}."


def _growth(result: dict[str, Any]) -> str:
    rows, pruned = result["per_token_no_pruning"], result["per_token_top_30"]
    early = rows[min(N_SHOWN, len(rows)) - 1]
    children = [row["children"] for row in pruned]
    return (
        f"Without pruning {early['loaded']} probes are loaded after {early['token']} tokens and {rows[-1]['loaded']}"
        f" after {rows[-1]['token']}; at top-30 a token loads {sum(children) / len(children):.1f} children on average,"
        f" {max(children)} at most, and {result['parents_over_threshold']['top_30']:.0%} of the scored parents pass the"
        f" threshold ({result['parents_over_threshold']['no_pruning']:.0%} without pruning)."
    )
