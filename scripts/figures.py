"""The tables of README and docs/performance.md, from the result files; the tests compare them.

    python scripts/figures.py docs/benchmarks/cpu.json          # prints them
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WORDS = {
    "score_vs_floor": "scoring 64 probes in one call, over reading the same bytes",
    "step_vs_slow_twin": "a step of a 5,000-probe cascade, the first implementation's way over ours",
    "step_vs_scoring": "the same step over the scoring alone",
    "decode_overhead_pct": "added to a decode step of SmolLM2-135M",
    "prefill_overhead_pct": "added to its prefill, every prompt token scored",
    "open_ms": "opening a 5,000-probe pack",
    "cold_vs_slow_twin": "a step with nothing read before, the first implementation's way over ours",
}
UNITS = {"decode_overhead_pct": " %", "prefill_overhead_pct": " %", "open_ms": " ms"}


def claims(found: dict[str, Any]) -> list[str]:
    """What is measured, the figure, the bar."""
    lines = ["| | measured | bar |", "|---|---|---|"]
    for name, claim in found["claims"].items():
        unit = UNITS.get(name, "x")
        bar = f"at {claim['kind']} {claim['bar']:g}{unit}"
        lines.append(f"| {WORDS[name]} | {claim['value']:.2f}{unit} | {bar}{'' if claim['holds'] else ', **missed**'} |")
    return lines


def host(found: dict[str, Any]) -> list[str]:
    """Bare against watched, by pack."""
    lines = ["| pack | what | bare | watched | added | inside our hooks |", "|---|---|---|---|---|---|"]
    for row in found["rows"]:
        if "overhead_pct" in row:
            what = "a decode step" if row["part"] == "decode" else f"prefill of {row['n_tokens']} tokens"
            lines.append(f"| `{row['pack']}` | {what} | {row['host_ms']:.1f} ms | {row['watched_ms']:.1f} ms | {row['overhead_pct']:+.1f} % | {row['hooks_ms']:.2f} ms |")
    return lines


def grid(found: dict[str, Any]) -> list[str]:
    """Each cell: the floor, ours, the fastest other way, and the loop."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["part"] == "scoring":
            cells.setdefault((row["hidden"], row["dtype"], row["batch"], row["n_probes"]), {})[row["method"]] = row
    lines = ["| D | dtype | states | probes | read the bytes | ours | fastest other way | module loop |", "|---|---|---|---|---|---|---|---|"]
    for (hidden, dtype, batch, n), rows in cells.items():
        others = {name: row["median_us"] for name, row in rows.items() if not name.startswith(("ours", "floor"))}
        best = min(others, key=lambda name: others[name])
        floor, ours, loop = (rows[name]["median_us"] for name in ("floor: read the same bytes", "ours (numba)", "module loop, .item() each"))
        lines.append(f"| {hidden} | {dtype} | {batch} | {n} | {floor:,.0f} | {ours:,.0f} | {others[best]:,.0f} ({best}) | {loop:,.0f} |")
    return lines


def main() -> None:
    """Print every table."""
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    for table in (claims(found), host(found), grid(found)):
        print("\n".join(table), end="\n\n")


if __name__ == "__main__":
    main()
