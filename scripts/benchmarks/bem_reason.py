#!/usr/bin/env python3
# ruff: noqa: E402
"""Is there a reason to route? Real texts of three domains that conflict, on the demo model's last layer.

    python scripts/benchmarks/bem_reason.py      # writes docs/benchmarks/bem_reason.json

A routed adapter beside PEFT's LoRA on the same sites, a LoRA on all linear layers and X-LoRA, with as many trainable
numbers each; texts and arms are those of `domains.py` and `domain_arms.py`. What was learned is kept by seed and arm: a
run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import torch

from comparisons import compare
from domain_arms import N_STEPS, Results, config_of
from domains import DOMAINS, FIRST, HEADERS, N_TEST, N_TRAIN, ROWS, Domains
from probemon.adapters.bem import attach_bem
from probemon.bundled import load_bundled
from probemon.util.cache_folders import cache_dir
from probemon.util.files import write_text_atomically
from provenance import about

ROUTED, OTHERS = "low_rank", ("base", "lora", "lora everywhere", "x-lora")


def study(kinds: Sequence[str], others: Sequence[str], seeds: range, results: Results) -> dict[str, Any]:
    """Every arm at every seed, under each kind of header, and what the routed adapter saves beside each."""
    rows, summary = [], []
    for kind in kinds:
        data = Domains(kind)
        found = [results.of(data, method, seed) for seed in seeds for method in (*others, ROUTED)]
        kept = ("headers", "method", "seed", "lr", "tried", "n_trainable", "chosen_by", "held_out", "held_out_frozen")
        kept += ("held_out_shuffled", "code_mean", "config", "cpu_seconds")
        rows += [{name: row[name] for name in kept if name in row} for row in found]
        summary += [summarised(kind, method, found) for method in (*others, ROUTED)]
    return {"rows": rows, "summary": summary}


def summarised(kind: str, method: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, and by how much a method's loss is over the routed adapter's, seed by seed."""

    def losses(name: str, domain: str = "all", which: str = "held_out") -> list[float]:
        return [row[which][domain] for row in rows if row["method"] == name and which in row]

    own = [row for row in rows if row["method"] == method]
    found: dict[str, Any] = {
        "headers": kind,
        "method": method,
        "n_trainable": own[0]["n_trainable"],
        "nats": {domain: statistics.mean(losses(method, domain)) for domain in (*DOMAINS, "all")},
    }
    if method == ROUTED:
        for which in ("frozen", "shuffled"):
            found[which] = statistics.mean(losses(method, "all", f"held_out_{which}"))
    else:
        over = compare([b - a for a, b in zip(losses(ROUTED), losses(method), strict=True)])
        found["over_routed"] = {"mean": over.mean, "low": over.low, "high": over.high, "p": over.p, "n": over.n}
    return found


@torch.no_grad()
def cut_host_error(data: Domains) -> float:
    """The largest difference of a logit between the upper layers over kept states, with an adapter of random weights on
    them, and the whole model with the same one, beside the largest logit.
    """
    whole, host = load_bundled(torch.float32)[0], data.host()
    config = config_of(host, ROUTED, 0)
    worst = largest = 0.0
    with attach_bem(host, config) as ours, attach_bem(whole, replace(config, read_layer=FIRST)) as theirs:
        generator = torch.Generator().manual_seed(0)
        for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            other.copy_(parameter)
        for number in (0, 1, 5, 77):
            batch, ids = data.batch([number]), torch.tensor([data.rows[number].ids])
            cut = host(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            full = whole(ids).logits[..., data.vocabulary]
            worst, largest = max(worst, float((cut - full).abs().max())), max(largest, float(full.abs().max()))
    return worst / largest


def main() -> None:
    """Learn, compare, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/bem_reason.json")
    parser.add_argument("--kinds", nargs="+", choices=tuple(HEADERS), default=tuple(HEADERS))
    parser.add_argument("--beside", nargs="+", choices=OTHERS, default=OTHERS, help="what the routed adapter is beside")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=cache_dir() / "bem-domains/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made_by = about()  # now: the study outlasts a commit
    begin, results = time.perf_counter(), Results(arguments.folder)
    found: dict[str, Any] = {
        "what": "WordNet nouns in three domains, on the last layer of SmolLM2-135M-Instruct",
        "headers": HEADERS,
        "words": {"train": N_TRAIN, "test": N_TEST},
        "first_layer": FIRST,
        "steps": N_STEPS,
        "rows_a_step": ROWS,
        "cut_host_error": cut_host_error(Domains(arguments.kinds[0])),
        **study(arguments.kinds, arguments.beside, range(arguments.seeds), results),
    }
    for row in found["summary"]:
        over = row.get("over_routed")
        told = "" if over is None else f"{over['mean']:+.4f} ({over['low']:+.4f} to {over['high']:+.4f}) over routed"
        print(f"{row['headers']:6s} {row['method']:16s} {row['nats']['all']:.4f} {told}")
    found |= {"seconds": round(time.perf_counter() - begin, 1), **made_by}
    write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
