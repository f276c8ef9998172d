"""Tables of the pages about hosts: compatibility, those that remember, and how they are run well."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tables.words import JUDGED, reason_of


def architectures(found: dict[str, Any]) -> list[str]:
    """Architectures with the same outcomes share a row; a mode that no column names is exact."""
    modes, rows = found["modes"], found["architectures"]
    built = {name: row["modes"] for name, row in rows.items() if "modes" in row}
    refused = {name: row["refused"] for name, row in rows.items() if "refused" in row}
    missing = {
        name: row.get("not built", row.get("error", ""))
        for name, row in rows.items()
        if name not in built and name not in refused
    }
    count = Counter(entry["outcome"] for row in built.values() for entry in row.values())
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, row in built.items():
        cells = (
            "; ".join(mode for mode in modes if row[mode]["outcome"] == outcome)
            for outcome in ("as run", "refused", "host fails")
        )
        alike.setdefault(tuple(cells), []).append(name)
    return [
        (
            f"{len(rows)} architectures: {len(built)} models run in {len(modes)} modes each ({', '.join(modes)}),"
            f" {len(refused)} refused when attached, {len(missing)} not built. Of {sum(count.values()):,} pairs"
            f" {count['exact']:,} are exact, {count['as run']} are scored as the model ran, {count['refused']} are"
            f" refused, in {count['host fails']} the model itself fails, {count['wrong']} are wrong. Every mode that a"
            " row does not name is exact."
        ),
        "",
        "| architectures | scored as run | refused | the model itself fails |",
        "|---|---|---|---|",
        *(
            f"| {', '.join(names)} | " + " | ".join(cells) + " |"
            for cells, names in sorted(alike.items(), key=lambda item: -len(item[1]))
        ),
        "",
        "Refused when attached, because their layers are not found or do not give one hidden state per token:",
        "",
        *(f"- {name}: {reason_of(reason)}" for name, reason in refused.items()),
        "",
        "Not built from a small configuration, by an error of transformers:",
        "",
        *(f"- {name}: {reason_of(reason)}" for name, reason in missing.items()),
    ]


def memory_overhead(found: dict[str, Any]) -> list[str]:
    """What watching states and slots adds to a decode step."""
    what = {"steps": "steps", "states": "steps and states", "reads": "reads of slots, as routing"}
    lines = [
        "| host | watched | a bare step | added (95 % interval) | inside our hooks (95 % interval) | bar |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        judged = JUDGED[row["holds"]]
        bar = "none" if row["bar"] is None else f"at most {row['bar']:g} %{judged}"
        lines.append(
            f"| {row['host']} | {what[row['way']]} | {row['bare_ms']:.0f} ms | {row['added_pct']:+.1f} %"
            f" ({row['low']:+.1f} to {row['high']:+.1f}) |"
            f" {row['hooks_pct']:.1f} % ({row['hooks_low']:.1f} to {row['hooks_high']:.1f}) |"
            f" {bar} |"
        )
    return lines


_STUDIED = {
    "memory": "memory, 40 slots",
    "memory, in 12 slots": "the same, with 12 slots from then on",
    "memory, closed": "the same, its memory closed",
    "memory, 12 slots": "memory, 12 slots from the beginning",
}


def recall_study(found: dict[str, Any]) -> list[str]:
    """Recall beyond the window by model: in how many seeds it is learnt, and the mean over seeds."""
    gaps = (24, 96, 384)
    lines = [
        f"| model | parameters | learnt at 24 | and at 384 | {' | '.join(f'recall at {gap}' for gap in gaps)} |",
        f"|---|---|---|---|{'---|' * len(gaps)}",
    ]
    for name in ("memory", "memory, in 12 slots", "memory, closed", *found["summaries"]):
        summary = found["summaries"][name]
        row = _recall_row(_STUDIED.get(name, name), summary, gaps)
        if row not in lines:
            lines.append(row)
    return lines


def _recall_row(name: str, summary: dict[str, Any], gaps: tuple[int, ...]) -> str:
    if "parameters" in summary:
        n, learnt = summary["n_seeds"], (summary[f"solved_recall_{key}"]["seeds"] for key in ("24", "24_and_384"))
        cells = [f"{summary['parameters']:,}", *(f"{count} of {n}" for count in learnt)]
    else:
        cells = ["", "", ""]
    for gap in gaps:
        recall = summary[f"recall_{gap}"]
        cells.append(f"{recall['mean']:.3f} ({recall['low']:.2f} to {recall['high']:.2f})")
    return f"| {name} | {' | '.join(cells)} |"


RECIPE_HOSTS = ("ltm", "mamba2", "falcon_h1")


EXACT = 1e-5  # what a score may be off in fp32


def recipes(found: dict[str, Any]) -> list[str]:
    """How hosts are run well: what was checked, and by host how far it is off."""
    lines = [
        "| recipe | done by | what is measured | bound | slots (ltm) | mamba2 | falcon_h1 | elsewhere | watched |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rows in _by_recipe(found["rows"]):
        cells = {row["host"]: _recipe_cell(row) for row in rows}
        known = " | ".join(cells.pop(host, "") for host in RECIPE_HOSTS)
        other = "; ".join(text if host == "any" else f"{host}: {text}" for host, text in cells.items())
        first = rows[0]
        bound = "" if first["bound"] is None else f"{first['bound']:g}"
        lines.append(
            f"| {first['name']} | {first['library']} | {first['check']} | {bound} | {known} | {other} |"
            f" {_watched_cell(rows)} |"
        )
    return lines


def recipe_traps(found: dict[str, Any]) -> list[str]:
    """The wrong ways, and how far off each is."""
    lines = ["| recipe | the trap | how far off |", "|---|---|---|"]
    for rows in _by_recipe(found["rows"]):
        if rows[0]["trap"] is not None:
            off = "; ".join(f"{row['host']}: {row['trap_value']:.2g}".removeprefix("any: ") for row in rows)
            lines.append(f"| {rows[0]['name']} | {rows[0]['trap']} | {off} |")
    return lines


def recipe_refusals(found: dict[str, Any]) -> list[str]:
    """What is refused on which hosts, and by whom."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for row in found["rows"]:
        if row["verdict"] == "refused":
            who = "probemon" if row["value"].startswith("UnsupportedDecoding") else "transformers"
            hosts.setdefault((row["name"], who), []).append(row["host"])
    lines = ["| recipe | refused by | models |", "|---|---|---|"]
    return lines + [f"| {name} | {who} | {', '.join(models)} |" for (name, who), models in hosts.items()]


def _by_recipe(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    grouped: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(row["name"], []).append(row)
    return list(grouped.values())


def _watched_cell(rows: list[dict[str, Any]]) -> str:
    """How far what was watched is off at most, on any host, and its bound where that is not the usual one."""
    seen = [row for row in rows if row["watched"] is not None]
    if not seen:
        return "" if all(row["verdict"] == "refused" for row in rows) else "nothing"
    most, bound = max(row["watched"] for row in seen), seen[0]["watched_bound"]
    return f"{f'{most:.2g}' if most else 'exact'}{'' if bound == EXACT else f' (of {bound:g})'}"


def _recipe_cell(row: dict[str, Any]) -> str:
    if row["verdict"] == "failed" and isinstance(row["value"], float):
        return f"{row['value']:.2g}, **missed**"
    return f"{row['value']:.2g}" if row["verdict"] == "within bound" else row["verdict"]
