"""What watching recurrent states and memory slots adds to a decode step. Hosts are random, of sizes that people run.

    python scripts/benchmarks/memory_overhead.py                   # writes docs/benchmarks/memory_overhead.json
    python scripts/benchmarks/memory_overhead.py --rounds 3 --json FILE

In each round the bare host and every way of watching it generate the same tokens, in an order that turns. `added_pct`
is what the median generation of a way takes over the bare one's, in CPU time of the one thread that computes. Two
generations of the same host differ by more than what is looked for, so `hooks_pct` is beside it: the time inside our
hooks over the rest of the very same generation. Both with the 95 % interval of `added_pct`. The bar is 5 % for
records of steps and of reads, and is held or missed by the time inside hooks; `states=True` computes the recurrence
again, and has none.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from probemon.adapters.ltm import LtmConfig, LtmForCausalLM
from probemon.adapters.routing import RoutingMonitor
from probemon.adapters.routing.captures import timed
from probemon.monitor.overhead import added_pct
from probemon.util.files import write_text_atomically
from provenance import about

FILE = Path(__file__).parents[2] / "docs/benchmarks/memory_overhead.json"
BAR = 5.0
N_NEW, N_PROMPT = 24, 16
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
SIZES: dict[str, dict[str, Any]] = {
    "mamba2": {
        "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "n_groups": 1, "state_size": 128,
    },
    "falcon_h1": {
        "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 8,
        "num_key_value_heads": 2, "mamba_d_ssm": 768, "mamba_n_heads": 24, "mamba_d_state": 128,
    },
    "probemon_ltm": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "memory_layers": [5, 11],
    },
}  # fmt: skip


def host(kind: str) -> Any:
    """A random host."""
    torch.manual_seed(0)
    if kind == "probemon_ltm":
        return LtmForCausalLM(LtmConfig(vocab_size=8192, **SIZES[kind])).eval()
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=8192, **SIZES[kind])).eval()


def measure(kind: str, rounds: int) -> list[dict[str, Any]]:
    """Bare against each way, in turns."""
    model = host(kind)
    ids = torch.randint(5, 8000, (1, N_PROMPT), generator=torch.Generator().manual_seed(0))
    ways: dict[str, Callable[[], Any]] = {"bare": contextlib.nullcontext}
    if kind == "probemon_ltm":
        ways["reads"] = lambda: RoutingMonitor(model)
    else:
        ways["steps"] = lambda: RoutingMonitor(model)
        ways["states"] = lambda: RoutingMonitor(model, states=True)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    inside: dict[str, list[float]] = {way: [] for way in ways}
    whole: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for number in range(rounds + 1):
        for way in order:
            made, reading = ways[way](), types.SimpleNamespace(seconds=0.0)
            if way != "bare":  # what a monitor tells is the time after a site was read
                tap = made._watcher._hooks._tap
                tap.own = {name: timed(site, reading) for name, site in tap.own.items()}
            with made as monitor:
                model.generate(ids, max_new_tokens=2, **GREEDY)  # the first one in a block tries what the host can do
                reading.seconds, n_before = 0.0, 0 if monitor is None else len(monitor.forward_seconds)
                begin, clock = time.process_time(), time.perf_counter()
                model.generate(ids, max_new_tokens=N_NEW, min_new_tokens=N_NEW, **GREEDY)
                if number:  # the first round is to warm up
                    seconds[way].append(time.process_time() - begin)
                    whole[way].append(time.perf_counter() - clock)
                    told = [] if monitor is None else monitor.forward_seconds[n_before:]
                    inside[way].append(reading.seconds + sum(told))
        order = order[1:] + order[:1]
    bare = seconds.pop("bare")
    bare_ms, rows = 1e3 * statistics.median(bare) / N_NEW, []
    for way, taken in seconds.items():
        # A turn is one generation of each.
        added, low, high = added_pct([[one] for one in bare], [[one] for one in taken])
        rest = [one - ours for one, ours in zip(whole[way], inside[way], strict=True)]
        hooks, hooks_low, hooks_high = added_pct([[one] for one in rest], [[one] for one in whole[way]])
        bar = None if way == "states" else BAR
        rows.append(
            {
                "host": kind, "way": way, "bare_ms": bare_ms,
                "added_pct": added, "low": low, "high": high,
                "hooks_pct": hooks, "hooks_low": hooks_low, "hooks_high": hooks_high, "bar": bar,
                "holds": None if bar is None or hooks_low < bar < hooks_high else hooks_high <= bar,
            }
        )  # fmt: skip
    return rows


def main() -> None:
    """Measure, show, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, default=FILE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for kind in SIZES:
        for row in measure(kind, options.rounds):
            rows.append(row)
            print(
                f"{row['host']:13} {row['way']:7} {row['bare_ms']:7.1f} ms bare, {row['added_pct']:+5.1f} %"
                f" ({row['low']:+.1f} to {row['high']:+.1f}), in hooks {row['hooks_pct']:.1f} %"
                f" ({row['hooks_low']:.1f} to {row['hooks_high']:.1f})",
                flush=True,
            )
    found = {"data": "random hosts and prompts", "rounds": options.rounds, "rows": rows}
    write_text_atomically(options.json, json.dumps({**found, **about()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
