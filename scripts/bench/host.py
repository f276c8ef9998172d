"""End to end: the demo model with and without the monitor, alternating in one process, the same tokens both times.

found = measure(n_pairs=16, seconds=60)
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from bench.timing import summary
from cascade_profile.world import PASSAGE
from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.monitor.overhead import added_pct, overhead
from probemon.monitor.stream import encode

ROOT = Path(__file__).resolve().parents[2]
PACKS = ("wordnet-smollm2-135m", "wordnet-smollm2-135m-mlp")
PROMPT = "Tell me about whales and the ships that hunted them."


def measure(n_pairs: int, seconds: float) -> dict[str, Any]:
    """Rows, and what watching adds as claims, of the pack with which it is more, in per cent of the bare host's median:
    the upper end of the 95 % interval and its width for a decode step, `(value, low, high)` for a prefill. `n_pairs` of
    prefills; `seconds` at most for the decode steps of a pack.
    """
    model, tokenizer = load_bundled()
    inputs = encode(tokenizer, [{"role": "user", "content": PROMPT}])
    document = tokenizer(PASSAGE, return_tensors="pt").input_ids
    rows, decode, prefill = [], [], []
    for name in PACKS:
        pack = ProbePack.open(ROOT / "probes" / name)
        manager = DynamicProbeManager(pack)
        where = {
            "host": "SmolLM2-135M-Instruct, bf16",
            "pack": name,
            "n_probes": pack.n_probes,
            "batch": 1,
            "strategy": manager.strategy.why,
        }
        cost = overhead(manager, model, inputs, most_seconds=seconds)
        low, high = cost.interval_pct
        decode.append((high, high - low))
        rows.append(
            {
                "part": "decode",
                **where,
                "method": "watched",
                "host_ms": cost.host_ms,
                "added_ms": cost.added_ms,
                "hooks_ms": cost.monitor_ms,
                "overhead_pct": round(cost.overhead_pct, 2),
                "interval_pct": [round(end, 2) for end in cost.interval_pct],
                "n": cost.n_steps,
            }
        )
        bare, watched, inside = _prefill(manager, model, document, n_pairs)
        pct, *interval = added_pct([[time] for time in bare], [[time] for time in watched])
        prefill.append((pct, *interval))
        rows.append(
            {
                "part": "prefill",
                **where,
                "method": "watched",
                "n_tokens": document.shape[1],
                "host_ms": statistics.median(bare) * 1e3,
                "added_ms": pct / 100 * statistics.median(bare) * 1e3,
                "hooks_ms": statistics.median(inside) * 1e3,
                "overhead_pct": round(pct, 2),
                "interval_pct": [round(end, 2) for end in interval],
                **summary(watched),
            }
        )
    claims = {
        "decode_overhead_pct_high": max(high for high, _ in decode),
        "decode_overhead_pct_width": max(width for _, width in decode),
        "prefill_overhead_pct": max(prefill, key=lambda one: one[2]),
    }
    return {"rows": rows, "claims": claims}


def _prefill(
    manager: DynamicProbeManager, model: Any, ids: torch.Tensor, n_pairs: int
) -> tuple[list[float], list[float], list[float]]:
    """Seconds of one forward over a document, every token of it scored; attaching is not counted."""
    taken: dict[bool, list[float]] = {False: [], True: []}
    inside = []
    with torch.no_grad():
        model(ids)
        for pair in range(n_pairs):
            for watched in (False, True) if pair % 2 == 0 else (True, False):
                if watched:
                    with manager.attach(model) as run:
                        begin = time.perf_counter()
                        model(ids)
                        taken[True].append(time.perf_counter() - begin)
                        inside.append(run.forward_seconds[-1])
                    assert run.result(ids).coverage.n_unseen == 0
                else:
                    begin = time.perf_counter()
                    model(ids)
                    taken[False].append(time.perf_counter() - begin)
    return taken[False], taken[True], inside
