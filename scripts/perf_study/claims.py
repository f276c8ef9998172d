"""What is planted in the study of random teachers, what is claimed of it, and each form by gates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from perf_study import gates
from perf_study.comparisons import compare, pareto, pareto_shares

BUDGET = 3_072
# What is planted, where; and what a student of that form has of settings that no budget decides.
PLANTED: dict[str, dict[str, Any]] = {
    "head_groups": {"sites": ("o",), "groups": 8, "rank": 4},
    "rank_mask": {"sites": ("o",), "rank": 18, "active": 4},
    "kronecker": {"sites": ("down",), "terms": 2},
    "film": {"sites": ("down",), "rank": 6, "bound": 1.0},
}
BARS = {
    "pt1_own_task": 0.9, "pt3_own_task": 0.9, "pt4_own_task": 0.9, "ahead_of_lora": 0.15, "pt2_active_flops_ahead": 0.0,
    "identity_max": 0.0, "cut_invariance_max": 1e-5, "budget_off_pct": 2.0,
}  # fmt: skip
NAMES = {"pt1": "head_groups", "pt2": "rank_mask", "pt3": "kronecker", "pt4": "film"}


def of(rows: Sequence[Any], task: str, method: str, what: str = "removed") -> list[float]:
    """A figure by seed."""
    return [row[what] for row in rows if row["task"] == task and row["method"] == method]


def claims(rows: Sequence[Any], errors: dict[str, float]) -> dict[str, Any]:
    """What is asked of the forms, with what was found."""
    found: dict[str, float] = {}
    ahead = []
    for name in ("pt1", "pt3", "pt4"):
        own, lora = (np.mean(of(rows, NAMES[name], method)) for method in (NAMES[name], "lora"))
        found[f"{name}_own_task"] = float(own)
        ahead.append(float(own - lora))
    found["ahead_of_lora"] = min(ahead)
    active = PLANTED["rank_mask"]["active"]
    others = [of(rows, "rank_mask", f"{method}, rank {active}") for method in ("lora", "low_rank")]
    own = of(rows, "rank_mask", "rank_mask")
    found["pt2_active_flops_ahead"] = float(min(np.mean(np.subtract(own, other)) for other in others))
    found["identity_max"], found["cut_invariance_max"] = errors["start"], errors["cut"]
    within = [row["n_trainable"] / BUDGET - 1 for row in rows if ", rank" not in row["method"]]
    found["budget_off_pct"] = 100 * max(map(abs, within))
    at_most = ("identity_max", "cut_invariance_max", "budget_off_pct")
    return {
        name: {
            "value": round(value, 9),
            "bar": BARS[name],
            "kind": "most" if name in at_most else "least",
            "holds": bool(value <= BARS[name] if name in at_most else value >= BARS[name] and value > 0),
        }
        for name, value in found.items()
    }


def verdicts(rows: Sequence[Any], errors: dict[str, float]) -> list[dict[str, Any]]:
    """Each form on each task by gates, against the LoRA: who is on the frontier of numbers and operations, too."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        methods = [m for m in dict.fromkeys(row["method"] for row in rows if row["task"] == task) if ", rank" not in m]
        qualities = np.array([of(rows, task, method) for method in methods])
        costs = np.array([[of(rows, task, method, "flops_per_token")[0]] for method in methods], dtype=np.float64)
        shares = pareto_shares(costs, qualities)
        on = pareto(np.concatenate([costs, qualities.mean(axis=1)[:, None]], axis=1))
        for i, method in enumerate(methods):
            if method == "lora":
                continue
            differences = np.subtract(of(rows, task, method), of(rows, task, "lora")).tolist()
            judged = [
                gates.integrity(errors),
                gates.budget(of(rows, task, method, "n_trainable")[0], of(rows, task, "lora", "n_trainable")[0]),
                gates.gain({task: differences}, {"operations": shares[i]}),
            ]
            compared = compare(differences)
            found.append(
                {
                    "task": task,
                    "method": method,
                    "ahead_of_lora": compared.mean,
                    "low": compared.low,
                    "high": compared.high,
                    "p": compared.p,
                    "on_frontier_of_operations": i in on,
                    "share_of_draws_on_it": shares[i],
                    "gates": {gate.name: [gate.verdict, gate.why] for gate in judged},
                }
            )
    return found
