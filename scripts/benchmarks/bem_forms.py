#!/usr/bin/env python3
# ruff: noqa: E402
"""Forms of an update on the demo model, which learns real texts: what each leaves and costs, and what gates say of it.

    python scripts/benchmarks/bem_forms.py      # writes docs/benchmarks/bem_forms.json

The texts and arms are those of `domains.py` and `domain_arms.py`. Costs are of the layer that learns and the cut head
alone, so that what an adapter adds to a layer is seen large. `cut_error` is the oracle's: how far logits are from those
of the whole model.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np
import torch
from transformers import DynamicCache

import gates
from comparisons import compare, pareto, pareto_shares
from domain_arms import METHODS, Results, config_of, made
from domains import DOMAINS, HEADERS, Domains
from flops import flops
from probemon.adapters.bem.evaluation.profiler import peak_memory, profile_sites
from probemon.util.cache_folders import cache_dir
from probemon.util.files import write_text_atomically
from provenance import about
from turns import Timed, median_ratio, take_turns

N_ROUNDS = 120
REFERENCE = "lora"


def study(seeds: Sequence[int], folder: Path, headers: str) -> dict[str, Any]:
    """Learn every arm at every seed, or read what was learned; measure costs; judge against the LoRA."""
    data, results = Domains(headers), Results(folder)
    rows = [results.of(data, method, seed) for seed in seeds for method in METHODS]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    print("timing calls that take turns", file=sys.stderr)
    measured, timed = costs(data, methods)
    kept = ("headers", "method", "seed", "lr", "n_trainable", "tried", "held_out", "held_out_frozen", "config")
    kept += ("held_out_shuffled", "cpu_seconds")
    return {
        "headers": headers,
        "cut_error": data.error(config_of(data.host(), "low_rank", 0)),
        "rows": [{name: row[name] for name in kept if name in row} for row in rows],
        "costs": measured,
        "verdicts": verdicts(rows, measured, timed),
    }


@torch.no_grad()
def costs(data: Domains, methods: Sequence[str]) -> tuple[dict[str, Any], dict[str, Timed]]:
    """Of each method: operations a token beside the host's own, highest memory of a forward, seconds of a forward of a
    batch and of a step of one token behind it, and where a routed adapter's time goes.
    """
    _, _, test = data.parts(0)
    batch = {name: test["kinds"][0][name] for name in ("input_ids", "attention_mask")}
    models = {method: made(data.host(), method, 0) for method in methods}
    n_tokens, alone = batch["input_ids"].numel(), flops(lambda: data.host()(**batch))
    prefill = take_turns({m: partial(model, **batch) for m, (model, _, _) in models.items()}, N_ROUNDS)
    steps = {m: partial(_step, model, batch) for m, (model, _, _) in models.items() if m != "x-lora"}  # has no cache
    step = take_turns({method: begun() for method, begun in steps.items()}, N_ROUNDS)
    found = {}
    for method, (model, bem, learning) in models.items():
        found[method] = {
            "n_trainable": sum(parameter.numel() for parameter in learning),
            "operations": round((flops(partial(model, **batch)) - alone) / n_tokens),
            "memory": peak_memory(partial(model, **batch)),
            "prefill": _summary(prefill, method),
            "step": _summary(step, method) if method in step else None,
        }
        if bem is not None:
            whole = profile_sites(bem, partial(model, **batch))
            found[method]["profile"] = {"total": whole.total.seconds, "controller": whole.controller.seconds} | {
                f"{part} {key}": getattr(site, part).seconds
                for key, site in whole.sites.items()
                for part in ("layer", "update")
            }
    return found, prefill


def _step(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """A call that runs one more token behind a prompt, again and again from the same cache."""
    prompt, cache = batch["input_ids"][:, :-1], DynamicCache()
    model(input_ids=prompt, past_key_values=cache, use_cache=True)
    n = prompt.shape[1]

    def step() -> None:
        model(input_ids=batch["input_ids"][:, -1:], past_key_values=cache, use_cache=True)
        cache.crop(n - cache.get_seq_length())

    return step


def _summary(timed: dict[str, Timed], method: str) -> dict[str, Any]:
    """Milliseconds with their intervals, and the median ratio to the LoRA's."""
    found: dict[str, Any] = {}
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        one = timed[method].quantile(q)
        found[name] = [None if x is None else round(1e3 * x, 4) for x in (one.value, one.low, one.high)]
    ratio = median_ratio(timed[method], timed[REFERENCE])
    found["ratio"] = [None if x is None else round(x, 4) for x in (ratio.value, ratio.low, ratio.high)]
    found["cpu_p50"] = round(1e3 * float(np.median(timed[method].cpu)), 4)
    return found


def losses(rows: Sequence[Any], method: str, domain: str, which: str = "held_out") -> list[float]:
    """Nats a token by seed."""
    return [row[which][domain] for row in rows if row["method"] == method]


def verdicts(rows: Sequence[Any], measured: dict[str, Any], timed: dict[str, Timed]) -> list[dict[str, Any]]:
    """Each arm by gates, against the LoRA on the same sites: what it saves of nats a token, by domain."""
    methods = list(measured)
    differences = {
        (method, domain): np.subtract(losses(rows, REFERENCE, domain), losses(rows, method, domain))
        for method in methods
        for domain in (*DOMAINS, "all")
    }
    looked_at = {
        f"{method}: {domain}": differences[method, domain].tolist()
        for method in methods
        for domain in DOMAINS
        if method not in (REFERENCE, "base")
    }
    quality = -np.array([losses(rows, method, "all") for method in methods])
    shares, on = frontiers(methods, measured, timed, quality)
    found = []
    for i, method in enumerate(methods):
        if method in (REFERENCE, "base"):
            continue
        relative = {d: differences[method, d] / losses(rows, REFERENCE, d) for d in DOMAINS}
        ours = [name for name in looked_at if name.startswith(f"{method}: ")]
        judged = [
            *gates.budget(counted(measured[method]), counted(measured[REFERENCE])),
            gates.no_regression({d: values.tolist() for d, values in relative.items()}),
            gates.gain(looked_at, {name: by_method[i] for name, by_method in shares.items()}, own=ours),
            gates.latency(timed[method].ratios(timed[REFERENCE])),
        ]
        compared = compare(differences[method, "all"])
        found.append(
            {
                "method": method,
                "saved_nats": compared.mean,
                "low": compared.low,
                "high": compared.high,
                "p": compared.p,
                "frontiers": {name: [i in on[name], by_method[i]] for name, by_method in shares.items()},
                "gates": {gate.name: [gate.verdict, gate.why] for gate in judged},
                "promoted": gates.promoted(judged),
            }
        )
    return found


def counted(costs: dict[str, Any]) -> dict[str, float]:
    """The costs that a budget is about."""
    return {"parameters": costs["n_trainable"], "operations": costs["operations"], "memory": costs["memory"]}


def frontiers(
    methods: Sequence[str], measured: dict[str, Any], timed: dict[str, Timed], quality: Any
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Of each kind of cost, in which share of drawn seeds (and rounds) each method is on its frontier, and which are
    on that of the means.
    """
    means, shares, on = quality.mean(axis=1), {}, {}
    for name in ("operations", "memory", "latency"):
        if name == "latency":
            rounds = np.array([timed[method].wall for method in methods])
            column = np.median(rounds, axis=1)
            shares[name] = pareto_shares(np.empty((len(methods), 0)), quality, latencies=rounds)
        else:
            column = np.array([measured[method][name] for method in methods], dtype=np.float64)
            shares[name] = pareto_shares(column[:, None], quality)
        on[name] = pareto(np.stack([column, means], axis=1))
    return shares, on


def main() -> None:
    """Learn what was not learned yet, measure costs, judge, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "docs/benchmarks/bem_forms.json")
    parser.add_argument("--headers", choices=tuple(HEADERS), default="marks", help="what tells a domain")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=cache_dir() / "bem-domains/results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    made_by, begin = about(), time.perf_counter()  # now: the study outlasts a commit
    found = study(range(arguments.seeds), arguments.folder, arguments.headers)
    for verdict in found["verdicts"]:
        told = f"saves {verdict['saved_nats']:+.4f} ({verdict['low']:+.4f} to {verdict['high']:+.4f})"
        gates_of = ", ".join(f"{name} {one}" for name, (one, _) in verdict["gates"].items())
        print(f"{verdict['method']:16s} {told}  {gates_of}")
    found |= {"seconds": round(time.perf_counter() - begin, 1), **made_by}
    write_text_atomically(arguments.out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
