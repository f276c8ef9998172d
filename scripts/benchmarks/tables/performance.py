"""Tables of docs/performance.md and docs/scores.md."""

from __future__ import annotations

from typing import Any

from tables.words import JUDGED

WORDS = {
    "score_vs_floor": "scoring 64 probes in one call, over reading the same bytes",
    "worst_cell_vs_best_other": "the same over the fastest other way, in the worst cell of the appendix",
    "step_vs_slow_twin": "a step of a 5,000-probe cascade, the first implementation's way over ours",
    "step_vs_scoring": "the same step over the scoring alone",
    "decode_overhead_pct_high": "added to a decode step of SmolLM2-135M at most: the upper end of the interval",
    "decode_overhead_pct_width": "the width of that interval",
    "prefill_overhead_pct": "added to its prefill, every prompt token scored",
    "step_100k_vs_1k": "a step among 100,000 probes over one among 1,000 that evaluates as many",
    "open_100k_ms": "opening a pack of 100,000 probes",
    "cold_vs_slow_twin": "a step with nothing read before, the first implementation's way over ours",
}


STEPS = {
    "ours: a step": "ours, one level a token, bf16",
    "ours: a step, as many rounds as it takes": "ours, as many levels as it takes, bf16",
    "ours: a step, fp32 weights": "ours, one level a token, fp32",
    "slow twin: a step": "the first implementation's way, fp32",
    "successor: a step": "its successor's way, fp32",
}


UNITS = {
    "decode_overhead_pct_high": " %",
    "decode_overhead_pct_width": " %",
    "prefill_overhead_pct": " %",
    "open_100k_ms": " ms",
}


def claims(found: dict[str, Any]) -> list[str]:
    """What is measured, the figure, the bar."""
    lines = ["| | measured | bar |", "|---|---|---|"]
    for name, claim in found["claims"].items():
        unit = UNITS.get(name, "x")
        bar = f"at {claim['kind']} {claim['bar']:g}{unit}"
        judged = JUDGED[claim["holds"]]
        between = f" ({claim['low']:.2f} to {claim['high']:.2f})" if "low" in claim else ""
        lines.append(f"| {WORDS[name]} | {claim['value']:.2f}{unit}{between} | {bar}{judged} |")
    return lines


def host(found: dict[str, Any]) -> list[str]:
    """Bare against watched, by pack."""
    lines = ["| pack | what | bare | watching adds | 95 % interval | inside our hooks |", "|---|---|---|---|---|---|"]
    for row in found["rows"]:
        if "overhead_pct" in row:
            what = "a decode step" if row["part"] == "decode" else f"prefill of {row['n_tokens']} tokens"
            low, high = row["interval_pct"]
            lines.append(
                f"| `{row['pack']}` | {what} | {row['host_ms']:.1f} ms | {row['overhead_pct']:+.1f} % |"
                f" {low:+.1f} to {high:+.1f} % | {row['hooks_ms']:.2f} ms |"
            )
    return lines


def scale(found: dict[str, Any]) -> list[str]:
    """What the number of probes costs."""
    parts: dict[int, dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["part"].endswith(" at scale"):
            parts.setdefault(row["n_probes"], {})[row["part"].removesuffix(" at scale")] = row
    more = [name for name in ("step of 64 rows", "step of 8 sites") if any(name in rows for rows in parts.values())]
    head = ["probes", "opened in", "a manager made in", "a step", "evaluated in it", *(f"a {name}" for name in more)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for n, rows in parts.items():
        opened, made = (rows[name]["median_us"] / 1e3 for name in ("open", "manager"))
        step = rows["step"]
        cells = [
            f"{n:,}",
            f"{opened:.0f} ms",
            f"{made:.0f} ms",
            f"{step['median_us']:.0f} µs",
            f"{step['evaluated']:.0f}",
        ]
        cells += [f"{rows[name]['median_us']:,.0f} µs" if name in rows else "" for name in more]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def scale_memory(found: dict[str, Any]) -> list[str]:
    """What a step keeps and takes of memory, by the number of probes."""
    lines = ["| probes | a row keeps | a token's scores | a step takes at most |", "|---|---|---|---|"]
    for row in found["rows"]:
        if row["part"] == "step at scale":
            kept, scores, most = (f"{row[f'{name}_bytes']:,} bytes" for name in ("row", "token", "peak"))
            lines.append(f"| {row['n_probes']:,} | {kept} | {scores} | {most} |")
    return lines


def scale_rules(found: dict[str, Any]) -> list[str]:
    """What rules cost, by their number."""
    rows = [row for row in found["rows"] if row["part"] == "rules at scale"]
    head = " | ".join(f"{row['n_rules']:,}" for row in rows)
    cells = " | ".join(f"{row['median_us']:,.0f} µs" for row in rows)
    return [f"| rules | {head} |", "|---" * (len(rows) + 1) + "|", f"| asked of a token | {cells} |"]


def twins(found: dict[str, Any]) -> list[str]:
    """A step of ours beside those of the first implementation and its successor."""
    lines = ["| a step | evaluated | takes | over ours | 95 % interval |", "|---|---|---|---|---|"]
    for row in found["rows"]:
        if row["part"] == "step" and row["method"] in STEPS:
            low, high = row["ratio_to_ours_interval"]
            lines.append(
                f"| {STEPS[row['method']]} | {row['evaluated']:.0f} | {row['median_us'] / 1e3:.2f} ms |"
                f" {row['ratio_to_ours']:.2f}x | {low:.2f} to {high:.2f} |"
            )
    return lines


def paging(found: dict[str, Any]) -> list[str]:
    """A pack larger than the memory of its process: each way of watching."""
    lines = [
        "| | a token, median | 95th percentile | read from the disk a token | evaluated | late |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['way']} | {row['step_ms']:.1f} ms | {row['step_p95_ms']:.1f} ms |"
            f" {row['read_mb_per_step']:.2f} MB | {row['evaluated_per_token']:.0f} | {row['late_per_token']:.1f} |"
        )
    return lines


def first_use(found: dict[str, Any]) -> list[str]:
    """What a process waits for before its first scores."""
    lines = ["| | imports | a manager | its first step |", "|---|---|---|---|"]
    for row in found["rows"]:
        if row["part"] == "first use":
            lines.append(
                f"| {row['method']} | {row['import_s']:.1f} s | {row['manager_s']:.1f} s |"
                f" {1e3 * row['first_step_s']:.1f} ms |"
            )
    return lines


def settings(found: dict[str, Any]) -> list[str]:
    """What settings cost and find, by pack."""
    lines = ["| pack | settings | evaluated a token | dropped | µs a step | found |", "|---|---|---|---|---|---|"]
    for pack, said in found["packs"].items():
        for trial in said["trials"]:
            changes = ", ".join(f"`{name}={value}`" for name, value in trial["changes"].items())
            lines.append(
                f"| `{pack}` | {changes or 'as the pack recommends'} | {trial['n_evaluated']:.1f} |"
                f" {trial['n_dropped']:.1f} | {trial['step_us']:,.0f} | {100 * trial['found']:.1f} % |"
            )
    return lines


def grid(found: dict[str, Any]) -> list[str]:
    """Each cell of the smallest and the largest size: the floor, ours, the fastest other way, and the loop."""
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in found["rows"]:
        if row["part"] == "scoring":
            cells.setdefault((row["hidden"], row["dtype"], row["batch"], row["n_probes"]), {})[row["method"]] = row
    lines = [
        "| D | dtype | states | probes | read the bytes | ours | fastest other way | module loop |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (hidden, dtype, batch, n), rows in cells.items():
        if hidden == 2560:  # between the others, and in the file
            continue
        others = {name: row["median_us"] for name, row in rows.items() if not name.startswith(("ours", "floor"))}
        best = min(others, key=lambda name: others[name])
        floor, ours, loop = (
            rows[name]["median_us"]
            for name in ("floor: read the same bytes", "ours (numba)", "module loop, .item() each")
        )
        lines.append(
            f"| {hidden} | {dtype} | {batch} | {n} | {floor:,.0f} | {ours:,.0f} | {others[best]:,.0f} ({best}) |"
            f" {loop:,.0f} |"
        )
    return lines


def corpus(found: dict[str, Any]) -> list[str]:
    """What an analysis costs over the bare host."""
    lines = [
        "| pack | bare prefill | analysis | added | analysis of a host that is not stopped early | added |",
        "|---|---|---|---|---|---|",
    ]
    for name, pack in found["packs"].items():
        rate, cells = pack["tokens_per_second"], [f"`{name}`"]
        cells.append(f"{rate['bare']:,} tokens/s")
        for way, cost in (("analysis", "overhead"), ("whole_host", "overhead_whole_host")):
            low, high = pack[f"{cost}_interval"]
            cells += [f"{rate[way]:,} tokens/s", f"{pack[f'{cost}_pct']:+.1f} % ({low:+.1f} to {high:+.1f})"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def profile(found: dict[str, Any]) -> list[str]:
    """Mean milliseconds a token of the first implementation and of ours."""
    lines = ["| configuration | original style | probemon | ratio |", "|---|---|---|---|"]
    for name, words in (("no_pruning", "no pruning"), ("top_50", "top-50"), ("top_30", "top-30")):
        twin, ours = found["twin"][name]["mean_ms"], found["ours"][name]["mean_ms"]
        lines.append(f"| {words} | {twin:.1f} ms | {ours:.2f} ms | {twin / ours:.1f}x |")
    return lines


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
