#!/usr/bin/env python3
# ruff: noqa: E402
"""Which probe should a full arena give up? Policies on recorded traces, beside the best that could be done knowing the
future.

    python scripts/benchmarks/eviction.py --out docs/benchmarks/eviction.json

A trace is the probes that a cascade evaluates, token by token, on the demo model's real hidden states: of the shipped
pack with hidden layers and of a random pack of 5,000 probes. Probes that are always active are pinned and not counted,
and nothing that the token at hand needs is evicted. Only misses are counted, so nothing here is a time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

from cascade_profile.world import LOAD_THRESHOLD, PASSAGE, make_world, write_pack
from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.engine.memory.arena import HALF_LIFE
from probemon.util.files import write_text_atomically
from provenance import about

Trace = list[list[int]]
MARGINS = (0.0, 0.02, 0.05, 0.1, 0.2)  # of prefetching
SHARES = (1.1, 1.5, 2.0, 3.0)  # slots, as a multiple of the most that one token needs


class Held:
    """What is known of the probes that a policy chooses among: when each was used last, how often, how often lately."""

    def __init__(self, trace: Trace, n_probes: int) -> None:
        self.last, self.count, self.lately = np.full(n_probes, -1.0), np.zeros(n_probes), np.zeros(n_probes)
        self.loaded = np.zeros(n_probes)
        self.uses: list[list[int]] = [[] for _ in range(n_probes)]
        for at, probes in enumerate(trace):
            for probe in probes:
                self.uses[probe].append(at)

    def next_use(self, probe: int, now: int) -> float:
        return next((at for at in self.uses[probe] if at > now), float("inf"))


# Which of the held probes goes first: the one with the smallest key.
POLICIES: dict[str, Callable[[Held, int, int], float]] = {
    "least recently used": lambda held, probe, now: held.last[probe],
    "least often used": lambda held, probe, now: held.count[probe],
    "least often used lately": lambda held, probe, now: (
        held.lately[probe] * 0.5 ** ((now - held.last[probe]) / HALF_LIFE)
    ),
    "first in, first out": lambda held, probe, now: held.loaded[probe],
    "bound: used again last (knows the future)": lambda held, probe, now: -held.next_use(probe, now),
}


def misses(trace: Trace, n_probes: int, n_slots: int, key: Callable[[Held, int, int], float]) -> int:
    """Loads over a trace, from an empty arena."""
    held, here, found = Held(trace, n_probes), set(), 0  # type: ignore[var-annotated]
    for now, probes in enumerate(trace):
        needed = set(probes)
        for probe in probes:
            held.lately[probe] = held.lately[probe] * 0.5 ** ((now - held.last[probe]) / HALF_LIFE) + 1
            held.last[probe], held.count[probe] = now, held.count[probe] + 1
        missing = [probe for probe in probes if probe not in here]
        found += len(missing)
        for _ in range(len(here) + len(missing) - n_slots):
            here.remove(min(here - needed, key=lambda probe: (key(held, probe, now), probe)))
        here.update(missing)
        held.loaded[missing] = now
    return found


def trace_of(manager: DynamicProbeManager, states: torch.Tensor) -> Trace:
    """Token by token, each starting from what the one before retained."""
    state, found = None, []
    for hidden in states.split(1):
        state, scores = manager.step(state, hidden)
        found.append([p for p in scores.active(0).tolist() if not manager.plan.always[p]])
    return found


def prefetched(pack: ProbePack, states: torch.Tensor, margin: float) -> dict[str, int]:
    """Misses that a step had to wait for, and probes loaded in the background, which is done before the next token;
    room for a third of the pack.
    """
    manager = DynamicProbeManager(pack, arena_bytes=pack.weight_bytes() // 3, prefetch=margin)
    state = None
    before = manager.arena.stats().misses
    for hidden in states.split(1):
        state, _ = manager.step(state, hidden)
        if manager.engine.scorer.prefetcher is not None:
            manager.engine.scorer.prefetcher.wait()
    stats = manager.arena.stats()
    return {"misses": stats.misses - before, "fetched": stats.fetched}


def main() -> None:
    """Record, count, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/eviction.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = load_bundled()
    pack = ProbePack.open(ROOT / "probes/wordnet-smollm2-135m-mlp")
    found: dict[str, Any] = {"traces": {}, "half_life_tokens": HALF_LIFE}
    kept: list[torch.Tensor] = []
    handle = model.model.layers[15].register_forward_hook(
        lambda module, args, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    with torch.no_grad():
        model(tokenizer(PASSAGE, return_tensors="pt").input_ids)
    handle.remove()
    traces = {
        pack.name: (
            trace_of(DynamicProbeManager(pack, strategy="descent"), kept[0].reshape(-1, kept[0].shape[-1])[1:]),
            pack.n_probes,
        )
    }
    with tempfile.TemporaryDirectory() as scratch:
        world = make_world(n_probes=5000, n_tokens=200, hidden_size=576, seed=0)
        random = write_pack(world, Path(scratch) / "pack")
        settings: dict[str, Any] = {
            "load_threshold": LOAD_THRESHOLD,
            "max_rounds": 1,
            "max_loaded_probes": 5000,
            "strategy": "descent",
        }
        traces["5,000 random probes"] = (trace_of(DynamicProbeManager(random, **settings), world.states), 5000)
    found["prefetch"] = {
        "pack": pack.name,
        "tokens": len(traces[pack.name][0]),
        "margins": {f"{m}": prefetched(pack, kept[0].reshape(-1, kept[0].shape[-1])[1:], m) for m in MARGINS},
    }
    print("prefetch", json.dumps(found["prefetch"]))
    for name, (trace, n_probes) in traces.items():
        most = max(map(len, trace))
        found["traces"][name] = {
            "tokens": len(trace),
            "most_at_a_token": most,
            "distinct": len(set().union(*trace)),
            "misses": {
                f"{share}": {
                    policy: misses(trace, n_probes, int(most * share), key) for policy, key in POLICIES.items()
                }
                for share in SHARES
            },
        }
        print(name, json.dumps(found["traces"][name], indent=1))
    write_text_atomically(arguments.out, json.dumps({**found, **about()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
