#!/usr/bin/env python3
# ruff: noqa: E402
"""The benchmark: scoring, steps, large packs and a real host, ours beside the ways that people do it, in one process.

    python scripts/benchmark.py                                       # --suite quick: within five minutes
    python scripts/benchmark.py --suite cpu --json docs/benchmarks/cpu.json
    python scripts/benchmark.py --suite gpu --json docs/benchmarks/h200.json          # on a machine that has one

Every method must first give the right scores (against fp64, or the same sets as the slow twin); only then is anything
timed, in turns, so that what else the machine does falls on all alike. Times are medians of one interleaved run:
compare them within a file, never between files. The file has `rows` (method, figure, ratio to ours and to the floor)
and `claims`. Weights and hierarchies of the scoring and step parts are random; the host, its hidden states and its
packs are real.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts/benchmarks")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from bench.scoring import Cell, WrongScores
from probemon.util.files import write_text_atomically
from profile_cascade import Disagreement
from provenance import about

HEADLINE = Cell(576, "bfloat16", 1, 64)
QUICK = (HEADLINE, Cell(576, "float32", 1, 64), Cell(576, "bfloat16", 8, 64), Cell(2560, "bfloat16", 1, 64))
FULL = tuple(
    Cell(d, dtype, batch, n)
    for d in (576, 2560, 4096)
    for dtype in ("bfloat16", "float32")
    for batch, n in ((1, 16), (1, 64), (8, 64), (64, 64))
)
# The bar of each claim, and whether it is the most or the least that will do.
BARS = {
    "score_vs_floor": (1.35, "most"), "worst_cell_vs_best_other": (1.0, "most"), "step_vs_slow_twin": (60.0, "least"),
    "step_vs_scoring": (1.5, "most"), "decode_overhead_pct_high": (2.0, "most"),
    "decode_overhead_pct_width": (1.0, "most"), "prefill_overhead_pct": (1.0, "most"),
    "step_100k_vs_1k": (1.5, "most"), "open_100k_ms": (200.0, "most"), "cold_vs_slow_twin": (30.0, "least"),
}  # fmt: skip
JUDGED = {True: "holds", False: "MISSED", None: "cannot be told: the interval has the bar in it"}
GPU_BARS = {
    "kernel_read_fraction": (0.7, "least"),
    "step_us": (50.0, "most"),
    "decode_overhead_pct": (1.0, "most"),
    "vs_repaired_bank": (5.0, "least"),
    "worst_cell_vs_best_other": (1.0, "most"),
}


def run_gpu() -> dict[str, Any]:
    """Every row and claim of a GPU."""
    begin = time.perf_counter()
    from bench import gpu

    found = gpu.measure(torch.device("cuda"))
    claims = {name: _claim(value, None, *GPU_BARS[name]) for name, value in found["claims"].items()}
    return {
        "suite": "gpu",
        "gpu": torch.cuda.get_device_name(),
        "claims": claims,
        "rows": found["rows"],
        "read_gb_per_s": found["read_gb_per_s"],
        "seconds": round(time.perf_counter() - begin, 1),
        **about(),
        "cuda": torch.version.cuda,
    }


def run(suite: str) -> dict[str, Any]:
    """Every row and claim of a suite."""
    from bench import first_use, host, scale, scoring, stepping  # of what a machine with a GPU need not have

    quick = suite == "quick"
    rows: list[dict[str, Any]] = []
    begin = time.perf_counter()
    for cell in QUICK if quick else FULL:
        _say(begin, f"scoring: {cell}")
        rows += scoring.measure(cell, 60 if cell == HEADLINE else 20, compiled=cell == HEADLINE and not quick)
    [headline] = [
        row
        for row in rows
        if row["method"] == "ours (numba)"
        and all(row[key] == getattr(HEADLINE, key) for key in ("hidden", "dtype", "batch", "n_probes"))
    ]
    claims = {
        "score_vs_floor": (headline["ratio_to_floor"], *headline["ratio_to_floor_interval"]),
        "worst_cell_vs_best_other": max(scoring.ratios_to_best_other(rows).values()),
    }
    _say(begin, "steps of a 5,000-probe cascade, beside the slow twin")
    steps = stepping.measure(5000, 60 if quick else 100)
    _say(begin, "packs of 1,000 to 100,000 probes")
    scaled = scale.measure((1000, 100_000) if quick else (1000, 10_000, 100_000), 100 if quick else 300)
    _say(begin, "the demo model, watched and bare")
    watched = host.measure(10 if quick else 100, seconds=60 if quick else 300)
    for part in (steps, scaled, watched):
        rows += part["rows"]
        claims |= part["claims"]
    if not quick:
        _say(begin, "a first use, with nothing compiled before")
        rows += first_use.measure(ROOT / "probes/wordnet-smollm2-135m-mlp")
    _say(begin, "done")
    return {
        "suite": suite,
        "claims": {name: _claim(*_with_interval(claims[name]), *bar) for name, bar in BARS.items()},
        "rows": rows,
        "agreement": steps["agreement"],
        "seconds": round(time.perf_counter() - begin, 1),
        **about(),
    }


def _with_interval(claim: float | tuple[float, float, float]) -> tuple[float, tuple[float, float] | None]:
    return (claim[0], claim[1:]) if isinstance(claim, tuple) else (claim, None)


def _claim(value: float, interval: tuple[float, float] | None, bar: float, kind: str) -> dict[str, Any]:
    """A figure with an interval holds where all of the interval does, and is missed where none of it does; `holds` is
    None where the interval has the bar in it.
    """
    ends = [end <= bar if kind == "most" else end >= bar for end in interval or (value,)]
    return {
        "value": round(value, 3),
        **({} if interval is None else {"low": round(interval[0], 3), "high": round(interval[1], 3)}),
        "bar": bar,
        "kind": kind,
        "holds": bool(ends[0]) if len(set(ends)) == 1 else None,
    }


def _say(begin: float, what: str) -> None:
    print(f"[{time.perf_counter() - begin:6.1f} s] {what}", file=sys.stderr)


def show(found: dict[str, Any]) -> None:
    """Tables for a reader."""
    for row in found["rows"]:
        where = ", ".join(
            str(row[key]) for key in ("part", "hidden", "dtype", "batch", "n_probes", "pack") if key in row
        )
        if "overhead_pct" in row:
            print(
                f"{where:55s} {row['host_ms']:9.2f} ms bare, watching adds {row['added_ms']:7.2f} ms:"
                f" {row['overhead_pct']:+.2f} % ({row['interval_pct'][0]:+.2f} to {row['interval_pct'][1]:+.2f})"
            )
        elif "median_us" in row:
            ratios = "".join(
                f"   {row[key]:8.2f} x {name}"
                for key, name in (("ratio_to_ours", "ours"), ("ratio_to_floor", "floor"))
                if row.get(key) is not None
            )
            print(f"{where:55s} {row['method']:36s} {row['median_us']:11.1f} us (p99 {row['p99_us']:11.1f}){ratios}")
    print()
    for name, claim in found["claims"].items():
        print(f"{name:22s} {claim['value']:9.3f}   bar: at {claim['kind']} {claim['bar']:g}   {JUDGED[claim['holds']]}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"benchmark: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, show, write. Status 1 if a method was wrong, so nothing was timed; a missed bar is published, not
    hidden.
    """
    parser = _Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=("quick", "cpu", "gpu"), default="quick")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and claims to FILE")
    arguments = parser.parse_args(argv)
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.absolute().parent.is_dir()):
        parser.error(f"--json {arguments.json}: give a file in a folder that exists")
    if arguments.suite == "gpu" and not torch.cuda.is_available():
        parser.error("--suite gpu needs a GPU, torch sees none here")
    torch.set_num_threads(1)  # a parallel region of two stalls whenever another process takes a core
    try:
        found = run_gpu() if arguments.suite == "gpu" else run(arguments.suite)
    except (WrongScores, Disagreement) as error:
        print(f"benchmark: nothing was timed: {error}", file=sys.stderr)
        return 1
    show(found)
    if arguments.json is not None:
        write_text_atomically(arguments.json, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
