"""What watching the demo model costs on this machine, for both shipped packs, as a result file.

    python scripts/benchmark_demo.py --out docs/benchmarks/demo_cpu.json

Greedy decoding on one CPU thread (a step of several stalls whenever another process takes a core), bare and watched
alternating in one process; medians over all decode steps.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.cli import PROMPT
from probemon.measure import overhead
from probemon.packfile import write_text_atomically
from probemon.stream import encode
from provenance import commit, machine

PACKS = ("probes/wordnet-smollm2-135m", "probes/wordnet-smollm2-135m-mlp")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/demo_cpu.json"))
    parser.add_argument("--pairs", type=int, default=40)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    model, tokenizer = load_bundled()
    inputs = encode(tokenizer, [{"role": "user", "content": PROMPT}])
    found: dict[str, Any] = {"host": "SmolLM2-135M-Instruct, bf16", "batch": 1, "packs": {}, "machine": {**machine(), "transformers": transformers.__version__, "commit": commit()}}
    for path in PACKS:
        pack = ProbePack.open(path)
        manager = DynamicProbeManager(pack)
        with tqdm(total=arguments.pairs, desc=pack.name, disable=None) as bar:
            cost = overhead(manager, model, inputs, n_pairs=arguments.pairs, progress=lambda line, bar=bar: bar.update())  # type: ignore[misc]
        found["packs"][pack.name] = {
            "overhead_pct": round(cost.overhead_pct, 2), "host_ms": round(cost.host_ms, 2), "watched_ms": round(cost.watched_ms, 2),
            "monitor_ms": round(cost.monitor_ms, 3), "inside_hooks_pct": round(100 * cost.monitor_ms / cost.host_ms, 2),
            "n_steps": cost.n_steps, "n_probes": pack.n_probes, "strategy": manager.strategy.step, "impl": manager.impl,
        }  # fmt: skip
        print(pack.name, found["packs"][pack.name])
    write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
