"""The tables and the words of the page about GPU kernels: what a GPU took, and on paper what they need of one.

gpu(found), gpu_claims(found), kernel_resources(found), kernel_summary(found)     # lines of Markdown
"""

from __future__ import annotations

from typing import Any

_STATE, _STATES = "64 128-64-1 probes, 1 state", "64 128-64-1 probes, 64 states"
# Of each kernel that moves much, what is used most or needs most.
_SHOWN = (
    ("_states", _STATE, "bfloat16"),
    ("_states", _STATES, "bfloat16"),
    ("_layered", _STATE, "float32"),
    ("_layered_groups", _STATES, "float32"),
    ("_linear", "64 linear probes, 1 state", "bfloat16"),
    ("_score", "descent of 1 state, 256 128-64-1 probes, all active", "bfloat16"),
    ("_normalise", "RMSNorm of 64 states", "bfloat16"),
    ("_over_rows", "update of rank 8, 512 rows", "bfloat16"),
    ("_over_columns", "the same in training, 512 rows", "float32"),
    ("features", "a step of the controller, 16 rows", "bfloat16"),
    ("step", "a step of the controller, 16 rows", "bfloat16"),
    ("step_back", "a step of the controller, 16 rows", "bfloat16"),
    ("features_back", "a step of the controller, 16 rows", "float32"),
)


_WAYS = {
    "floor: first layers summed by torch": "torch sums the first layers",
    "ours (triton)": "ours",
    "ours (triton), int8 copies": "ours, int8 copies",
    "stacked bank, repaired": "stacked bank, repaired",
    "gather, then bmm": "gather, then bmm",
}
_SAID_OF_CLAIMS = {
    "kernel_read_fraction": "64 probes, one state: the rate at which their bytes are read, over that of a long read",
    "step_us": "a step among 8,000 probes of D = 4,096, µs",
    "decode_overhead_pct": "added to a decode step of an 8B shape as one graph, %",
    "vs_repaired_bank": "the stacked bank over ours, one state",
    "worst_cell_vs_best_other": "ours over the fastest other way, in the worst cell",
}


def gpu(found: dict[str, Any]) -> list[str]:
    """Microseconds of scoring 64 probes on a GPU, cell by cell, and the largest error of ours and of the bank."""
    lines = [
        f"| D | states | {' | '.join(_WAYS.values())} | error of ours | of the bank |",
        f"|{'---|' * (4 + len(_WAYS))}",
    ]
    cells: dict[tuple[int, int], dict[str, Any]] = {}
    for row in found["rows"]:
        if row["part"] == "scoring":
            cells.setdefault((row["hidden"], row["batch"]), {})[row["method"]] = row
    for (d, n_states), by_way in cells.items():
        times = " | ".join(f"{by_way[name]['median_us']:.1f}" for name in _WAYS)
        errors = " | ".join(f"{by_way[name]['max_error']:.0e}" for name in ("ours (triton)", "stacked bank, repaired"))
        lines.append(f"| {d:,} | {n_states} | {times} | {errors} |")
    return lines


def gpu_claims(found: dict[str, Any]) -> list[str]:
    """What was measured on a GPU, beside its bars."""
    lines = ["| | measured | bar |", "|---|---|---|"]
    for name, claim in found["claims"].items():
        missed = "" if claim["holds"] else ", **missed**"
        value, bar = f"{claim['value']:.3g}", f"at {claim['kind']} {claim['bar']:g}"
        lines.append(f"| {_SAID_OF_CLAIMS[name]} | {value} | {bar}{missed} |")
    return lines


def kernel_resources(found: dict[str, Any]) -> list[str]:
    """What compiled launches need, and what bounds them, chip by chip."""
    names = " / ".join(chip["name"] for chip in found["chips"].values())
    lines = [
        f"| kernel, {names} | launch | programs | registers a thread | spilled bytes | KB shared | warps of 64 |"
        " µs to read | µs of products |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for kernel, launch, dtype in _SHOWN:
        rows = rows_of(found, kernel, launch, dtype)
        cells = [f"`{kernel}`", f"{launch}, {dtype}", f"{rows[0]['programs']:,}"]
        cells += [
            _each(f"{row['registers']}" for row in rows),
            _each(f"{row['spill_stores'] + row['spill_loads']}" for row in rows),
            _each(_kilobytes(row["static_shared"] + row["dynamic_shared"]) for row in rows),
            _each(f"{row['resident_warps']}" for row in rows),
            _each(_short(row["read_us"]) for row in rows),
            "" if rows[0]["flops_us"] is None else _each(_short(row["flops_us"]) for row in rows),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _each(values: Any) -> str:
    different = list(dict.fromkeys(shown := list(values)))
    return different[0] if len(different) == 1 else " / ".join(shown)


def _kilobytes(n_bytes: int) -> str:
    return f"{n_bytes / 1024:.3g}" if n_bytes >= 1024 else "under 1"


def _short(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 10 else f"{microseconds:.2g}"


def rows_of(found: dict[str, Any], kernel: str, launch: str, dtype: str) -> list[dict[str, Any]]:
    """A launch at the largest hidden size that there is of it, on each chip."""
    rows = [row for row in found["rows"] if (row["kernel"], row["launch"], row["dtype"]) == (kernel, launch, dtype)]
    largest = max(row["hidden"] for row in rows)
    by_chip = {row["sm"]: row for row in reversed(rows) if row["hidden"] == largest}
    return [by_chip[int(chip)] for chip in found["chips"]]


def kernel_summary(found: dict[str, Any]) -> list[str]:
    """What is said of all launches."""
    rows = [row for row in found["rows"] if "error" not in row]
    n_failed, n_chips = len(found["rows"]) - len(rows), len(found["chips"])
    spills = [row["spill_stores"] + row["spill_loads"] for row in rows]
    shared = max(row["static_shared"] + row["dynamic_shared"] for row in rows)
    least = min(chip["shared_of_program"] for chip in found["chips"].values())
    return [
        (
            f"Of {len(found['rows'])} compiled launches ({len(found['rows']) // n_chips} on each of {n_chips} chips)"
            f" {n_failed or 'none'} failed."
            f" The most that a program needs is {max(row['registers'] for row in rows)} registers a thread, of 255, and"
            f" {shared / 1024:.0f} KB of shared memory, of {least >> 10}."
            f" {sum(1 for n in spills if n)} launches spill, {max(spills)} bytes at most."
            f" {sum(row['matrix_unit'] for row in rows)} use matrix units."
        )
    ]
