#!/usr/bin/env python3
# ruff: noqa: E402
"""Whether writing codes into buffers that are kept would be faster than making tensors anew.

    python scripts/benchmarks/code_buffers.py --json docs/benchmarks/code_buffers.json

Of every forward an adapter keeps, for each of its sites, the codes of all tokens within their limits. Two ways take
turns, on random codes that all exceed the cap: new tensors, as the adapter does it, and the same products written into
tensors that stay from forward to forward. What is seen is one forward's worth of either, beside all of governance.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmark_bem import GRID, SITES, weighted
from probemon.adapters.bem import BemConfig, attach_bem
from probemon.bundled import load_bundled
from probemon.util.files import write_text_atomically
from provenance import about

ROUNDS = 31


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    model, _ = load_bundled(torch.bfloat16)
    rows = []
    with torch.inference_mode(), weighted(attach_bem(model, BemConfig(sites=SITES))) as bem:
        n_sites, rank = len(bem.sites), bem.config.rank
        for n in sorted({batch * length for batch, length, _ in GRID} | {batch for batch, _, _ in GRID}):
            codes, scales = 1 + torch.randn(n, rank), torch.rand(n_sites, n, 1)
            kept = [torch.empty(n, rank) for _ in range(n_sites)]
            ways: dict[str, Callable[[], object]] = {
                "new": lambda codes=codes, scales=scales: [codes * scale for scale in scales],
                "kept": lambda codes=codes, scales=scales, kept=kept: [
                    torch.mul(codes, scale, out=out) for scale, out in zip(scales, kept, strict=True)
                ],
                "governance": lambda codes=codes: bem.governor.apply({False: codes}),
            }
            times = interleaved(ways)
            gain = statistics.median(a / b for a, b in zip(times["new"], times["kept"], strict=True))
            rows.append(
                {
                    "n_tokens": n,
                    **{f"{name}_us": round(1e6 * statistics.median(taken), 1) for name, taken in times.items()},
                    "new_over_kept": round(gain, 3),
                }
            )
            print(rows[-1])
    found = {"rows": rows, "n_sites": n_sites, "rank": rank, "rounds": ROUNDS, **about()}
    if arguments.json:
        write_text_atomically(arguments.json, json.dumps(found, indent=1) + "\n")


def interleaved(ways: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each, in turns, after one that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            ways[name]()
            if turn:
                times[name].append(time.perf_counter() - begin)
    return times


if __name__ == "__main__":
    main()
