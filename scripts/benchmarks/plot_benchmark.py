"""Draw a benchmark's result file: what scoring costs beside the bytes it reads, and what a step costs beside the slow
twin.

# needs matplotlib: pip install -e '.[docs]'
python scripts/benchmarks/plot_benchmark.py docs/benchmarks/cpu.json docs/cpu.svg
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from probemon.util.files import write_text_atomically

OURS, OTHERS, FLOOR = "#1f6f8b", "#b9b4a7", "#d9843b"


def bars(axis: Any, rows: Sequence[dict[str, Any]], title: str) -> None:
    """Median microseconds on a logarithmic axis, the fastest on top; a line where the 99th percentile lies."""
    ordered = sorted(rows, key=lambda row: -row["median_us"])
    colours = [
        OURS if row["method"].startswith("ours") else FLOOR if row["method"].startswith("floor") else OTHERS
        for row in ordered
    ]
    at = range(len(ordered))
    axis.barh(at, [row["median_us"] for row in ordered], color=colours, height=0.65)
    for i, row in enumerate(ordered):
        axis.plot([row["p99_us"]] * 2, [i - 0.25, i + 0.25], color="#444444", linewidth=1)
        axis.text(
            row["median_us"] * 1.04,
            i,
            f" {row['median_us']:,.0f} µs",
            va="center",
            fontsize=8,
            color="#222222",
            bbox={"facecolor": "white", "alpha": 0.6, "pad": 0.5, "linewidth": 0},
        )
    axis.set_yticks(at, [row["method"] for row in ordered], fontsize=8)
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(low * 0.8, high * 2.2)
    axis.set_title(title, fontsize=9, loc="left")
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def main() -> None:
    """Read, draw, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    found = json.loads(arguments.results.read_text(encoding="utf-8"))

    def rows(**wanted: Any) -> list[dict[str, Any]]:
        return [row for row in found["rows"] if all(row.get(key) == value for key, value in wanted.items())]

    plt.rcParams["svg.hashsalt"] = "probemon"  # the same picture from the same file
    plt.rcParams["font.family"] = "sans-serif"
    figure, axes = plt.subplots(3, 1, figsize=(8.4, 7.6), height_ratios=[10, 3, 2], constrained_layout=True)
    one = rows(part="scoring", hidden=576, dtype="bfloat16", batch=1, n_probes=64)
    bars(axes[0], one, "Scoring 64 probes (128-64-1, D = 576, bf16) for one state")
    step = rows(part="step")
    bars(
        axes[1],
        step,
        f"A step of a cascade of {step[0]['n_probes']:,} probes, {step[0]['evaluated']:.0f} of them evaluated on"
        " average",
    )
    bars(axes[2], rows(part="cold"), "The first step, nothing of the pack read before")
    axes[2].set_xlabel(
        f"microseconds, logarithmic; medians, a tick at the 99th percentile. {found['machine']['cpu']}, one thread",
        fontsize=8,
    )
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    write_text_atomically(arguments.picture, out.getvalue())


if __name__ == "__main__":
    main()
