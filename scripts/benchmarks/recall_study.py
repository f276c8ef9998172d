"""The study of associative recall: a host with memory slots beside others of its size, every one with several seeds.

    python scripts/ltm_recall.py --study --json docs/benchmarks/ltm_recall.json

Each pair of model and seed is kept under ~/.cache/probemon/ltm_recall as soon as it is measured, and is not measured
again: a study that was ended goes on where it was. All models learn by one recipe, with at most `MOST_STEPS` steps.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.mamba import modeling_mamba

import ltm_recall
from probemon.core.intervals import clopper_pearson, mean_interval
from probemon.util.cache_folders import cache_dir
from probemon.util.files import write_text_atomically
from provenance import about

PARTIAL = cache_dir() / "ltm_recall"
GAPS = (24, 48, 96, 192, 384)
N_QUERIES = 1024
MOST_STEPS = ltm_recall.MOST_STEPS
WIDENED = 117  # the feed-forward width at which a host without a memory has as many parameters
MAMBA_WIDTH = 58  # the same of a Mamba
FEW = 12


def selective_scan(
    inputs: Tensor,
    steps: Tensor,
    rates: Tensor,
    into: Tensor,
    out_of: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    **options: Any,
) -> Tensor:
    """What transformers' own scan gives without a state, to rounding, in a quarter of the time on a CPU.

    `inputs`, `steps`, `z` `[B, D, T]`, `rates [D, N]`, `into`, `out_of` `[B, N, T]`. Slices of a whole tensor each cost
    its size in the backward pass; `unbind` does not.
    """
    if options.get("return_last_state"):
        raise SystemExit("the study runs a Mamba without a cache")
    steps = functional.softplus(steps + delta_bias[:, None])
    decays = torch.exp(steps.permute(2, 0, 1)[..., None] * rates).unbind(0)
    added = ((steps * inputs).permute(2, 0, 1)[..., None] * into.permute(2, 0, 1)[:, :, None]).unbind(0)
    state, states = torch.zeros_like(added[0]), []
    for decay, new in zip(decays, added, strict=True):
        state = decay * state + new
        states.append(state)
    read = torch.einsum("tbdn,bnt->bdt", torch.stack(states), out_of)
    return (read + inputs * D[:, None]) * functional.silu(z)


def _mamba() -> Any:
    modeling_mamba.mamba_selective_scan = selective_scan
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=ltm_recall.VOCABULARY,
            hidden_size=MAMBA_WIDTH,
            state_size=16,
            num_hidden_layers=2,
            expand=2,
            pad_token_id=0,
        )
    )


MODELS: dict[str, Callable[[], Any]] = {
    "memory": ltm_recall.new_host,
    "memory, 12 slots": lambda: ltm_recall.new_host(memory_slots=FEW),
    "window only": lambda: ltm_recall.new_host(memory_layers=(), intermediate_size=WIDENED),
    "full attention": lambda: ltm_recall.new_host(
        memory_layers=(), intermediate_size=WIDENED, sliding_window=1 + max(GAPS) + 20
    ),
    "mamba": _mamba,
}


def measure(name: str, seed: int) -> dict[str, Any]:
    """Train one model with one seed, and say how it recalls at each gap."""
    trained = ltm_recall.train(MODELS[name], seed, MOST_STEPS)
    row = {
        "model": name,
        "seed": seed,
        "parameters": sum(parameter.numel() for parameter in trained.model.parameters()),
        "most_steps": MOST_STEPS,
        "steps": trained.steps,
        "steps_to_24": trained.steps_to_near,
        "solved": trained.solved,
        "seconds": round(trained.seconds, 1),
        **_recalled(trained.model),
    }
    if name == "memory":  # eviction under pressure: four segments' worth of slots become one and a half
        trained.model.reduce_slots(FEW)
        row["in_12_slots"] = _recalled(trained.model)
        for memory in trained.model.memories.values():
            memory.closed = True
        row["closed"] = _recalled(trained.model)
    return row


def _recalled(model: Any) -> dict[str, float]:
    return {f"recall_{gap}": round(ltm_recall.recall(model, gap, N_QUERIES)["recall"], 4) for gap in GAPS}


def study(n_seeds: int) -> dict[str, Any]:
    """Every model at every seed, seed by seed, so that a study that was ended has as many of each."""
    rows = []
    for seed in range(n_seeds):
        for name in MODELS:
            partial = PARTIAL / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}.json"
            row = json.loads(partial.read_text(encoding="utf-8")) if partial.exists() else None
            if row is None or (row["most_steps"] < MOST_STEPS and not row["solved"]):
                row = measure(name, seed)
                partial.parent.mkdir(parents=True, exist_ok=True)
                write_text_atomically(partial, json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            rows.append(row)
    return whole(rows)


def whole(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result file of these rows: means over seeds with intervals, and each row."""
    by_name = {name: [row for row in rows if row["model"] == name] for name in MODELS}
    summaries = {name: _summary(of_name, of_name) for name, of_name in by_name.items()}
    memory = by_name["memory"]
    for key in ("in_12_slots", "closed"):
        summaries[f"memory, {key.replace('_', ' ')}"] = _summary([row[key] for row in memory], [])
    return {
        "what": "associative recall over filler: 4 pairs of 16 keys and 16 values, window 8, 2 layers, random data",
        "n_queries": N_QUERIES,
        "gaps": GAPS,
        "summaries": summaries,
        "rows": rows,
        **about(),
    }


def _summary(recalled: list[dict[str, Any]], trained: list[dict[str, Any]]) -> dict[str, Any]:
    """Means of the seeds' recalls with 95 % intervals, which hold for any numbers between 0 and 1."""
    summary: dict[str, Any] = {"n_seeds": len(recalled)}
    for gap in GAPS:
        values = [row[f"recall_{gap}"] for row in recalled]
        low, high = mean_interval(float(np.mean(values)), len(values))
        summary[f"recall_{gap}"] = {
            "mean": round(float(np.mean(values)), 4),
            "low": round(float(low), 4),
            "high": round(float(high), 4),
            "least": min(values),
            "most": max(values),
        }
    if trained:
        near = [row["steps_to_24"] for row in trained if row["steps_to_24"] is not None]
        for key, count in (("recall_24", len(near)), ("recall_24_and_384", sum(row["solved"] for row in trained))):
            low, high = clopper_pearson(count, len(trained))
            summary[f"solved_{key}"] = {"seeds": count, "low": round(float(low), 4), "high": round(float(high), 4)}
        summary["steps_to_24"] = sorted(near)
        summary["parameters"] = trained[0]["parameters"]
    return summary
