"""Metrics of a memory's contents and reads, in fp64; entropies in nats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.adapters.ltm.memory import SlotMemory
from probemon.adapters.ltm.state import HISTORY, SEGMENT, MemoryState
from probemon.errors import ConfigError

Numbers = npt.NDArray[np.float64]


def entropy(shares: Numbers) -> Numbers:
    """Entropy along the last axis."""
    shares = np.asarray(shares, dtype=np.float64)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    entropies: Numbers = -(shares * logs).sum(axis=-1)
    return entropies


def metrics_of_sums(mass: Numbers, n: float, null: float, entropies: float, n_entropies: float) -> dict[str, float]:
    """Return metrics of n reads from sums of p per slot `[M]`, of the null slot's p, and of entropies.

    `read_entropy`: mean entropy of a read without the null slot.
    `marginal_entropy`: entropy of the mean share.
    `mutual_information`: their difference.

    NaN if nothing was read.
    """
    whole = float(mass.sum())
    if n == 0 or whole == 0:
        unknown = dict.fromkeys(("read_entropy", "marginal_entropy", "mutual_information", "effective_slots"), math.nan)
        return {"null_share": null / n if n else math.nan, "utilization": 0.0 if n else math.nan, **unknown}
    shares = mass / whole
    read_entropy, marginal = entropies / n_entropies, float(entropy(shares))
    return {
        "null_share": null / n,
        "utilization": float((shares > 1 / (10 * len(mass))).mean()),
        "read_entropy": read_entropy,
        "marginal_entropy": marginal,
        "mutual_information": marginal - read_entropy,
        "effective_slots": math.exp(marginal),
    }


def key_metrics(keys: Numbers) -> dict[str, float]:
    """Return the largest cosine of keys `[M, d]`, and their effective rank."""
    keys = np.asarray(keys, dtype=np.float64)
    sizes = np.linalg.norm(keys, axis=1, keepdims=True)
    if len(keys) == 0 or not np.isfinite(keys).all() or not sizes.all():
        return {"redundancy": math.nan, "effective_rank": math.nan}
    unit = keys / sizes
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    squares = np.linalg.svd(unit, compute_uv=False) ** 2
    return {
        "redundancy": float(cosines.max()) if len(keys) > 1 else math.nan,
        "effective_rank": float(np.exp(entropy(squares / squares.sum()))),
    }


def row_stats(state: MemoryState, row: int, memory: SlotMemory) -> dict[str, Any]:
    """Return metrics of one row, over its newest 8 segments and the open one."""
    shape = memory.shape
    row_state = state.rows(state.n.new_tensor([row])).detached()
    strength = _numbers(row_state.effective(shape.decay))[0]
    full = strength > 0
    history, mass = (
        _numbers(row_state.history)[0],
        _numbers(row_state.history_mass)[0].sum(axis=0) + _numbers(row_state.mass)[0],
    )
    by_name = dict(zip(SEGMENT, history.T, strict=True))
    n_reads, null, entropies, n_entropies = np.nansum(history[:, :4], axis=0) + _numbers(row_state.reads)[0]
    reads = metrics_of_sums(mass, n_reads, null, entropies, n_entropies)
    whole = mass.sum()
    shares = mass / whole if whole > 0 else np.zeros_like(mass)
    used = shares > 1 / (10 * state.n_slots)
    position, token = _numbers(row_state.position)[0], _numbers(row_state.token)[0]
    order = np.argsort(-shares, kind="stable")
    added, n_tokens = _numbers(row_state.contribution)[0]
    return {
        "occupied": float(full.mean()),
        "dead": float((full & ~used).sum() / full.sum()) if full.any() else 0.0,
        **reads,
        "strength_mean": _mean(strength[full]),
        "strength_p5": float(np.quantile(strength[full], 0.05)) if full.any() else math.nan,
        "strength_p95": float(np.quantile(strength[full], 0.95)) if full.any() else math.nan,
        "gate_written": _mean(by_name["gate_written"]),
        "gate_rejected": _mean(by_name["gate_rejected"]),
        "write_rate": _mean(by_name["written"]) / shape.segment,
        "replaced": _mean(by_name["replaced"]),
        "age_at_eviction": _mean(by_name["age_at_eviction"], np.median),
        "age_read": float((shares * _numbers(row_state.age)[0]).sum()) if whole > 0 else math.nan,
        "compression": _mean(by_name["kept"]) / shape.segment,
        "gate_mass_kept": _mean(by_name["mass_kept"]),
        **key_metrics(_numbers(row_state.keys)[0][full]),
        "surprise": _mean(by_name["surprise"]),
        "surprise_p95": _mean(by_name["surprise_p95"]),
        "surprise_over_one": _mean(by_name["surprise_over_one"]),
        "contribution": float(added / n_tokens) if n_tokens else math.nan,
        "n_tokens": int(row_state.n[0]),
        "n_bytes": row_state.n_bytes,
        "alerts": memory_alerts(row_state, memory),
        "provenance": [
            {"slot": int(i), "position": int(position[i]), "token": int(token[i]), "share": float(shares[i])}
            for i in order
            if full[i]
        ],
    }


def memory_alerts(state: MemoryState, memory: SlotMemory) -> list[str]:
    """Return the active alerts of a one-row state.

    - "not finite": a key, value, strength or read.
    - "redundant": over 0.9 of the strength has similar keys, over a cosine of 0.95.
    - "read collapse": all tokens of 8 segments read the same slot.
    - "dead slots": over 8 segments, most occupied slots were not read.
    - "nothing written": for 8 new segments.
    """
    arrays = [_numbers(part) for part in (state.keys, state.values, state.strength, state.history_mass, state.mass)]
    if not all(np.isfinite(array).all() for array in arrays):
        return ["not finite"]
    alerts = []
    strength = _numbers(state.effective(memory.shape.decay))[0]
    full = strength > 0
    if _crowded(_numbers(state.keys)[0][full], strength[full]) > 0.9:
        alerts.append("redundant")
    history = _numbers(state.history)[0]
    if np.isnan(history[:, 0]).any():  # fewer than 8 segments
        return alerts
    sums = dict(zip(SEGMENT, history.T, strict=True))
    mass = _numbers(state.history_mass)[0].sum(axis=0)
    reads = metrics_of_sums(mass, *(float(sums[name].sum()) for name in SEGMENT[:4]))
    slots_are_read = reads["null_share"] < 0.9
    if slots_are_read and reads["mutual_information"] < 0.05 * math.log(len(mass)) and reads["effective_slots"] < 2:
        alerts.append("read collapse")
    used = mass / mass.sum() > 1 / (10 * len(mass)) if mass.sum() > 0 else np.zeros(len(mass), bool)
    if slots_are_read and full.any() and (full & ~used).sum() > 0.5 * full.sum():
        alerts.append("dead slots")
    if sums["written"].sum() == 0 and sums["surprise"].mean() > 0.5:
        alerts.append("nothing written")
    return alerts


def stats_of(states: Mapping[int, MemoryState], memories: Mapping[int, SlotMemory]) -> dict[str, Any]:
    """Return metrics of each row of each layer, and means. Raises `ConfigError` without a memory."""
    if not states:
        raise ConfigError(
            "there is no memory yet: run a forward with a cache (use_cache=True, not in training), or give the cache"
            " whose memory is meant"
        )
    rows = [
        {"layer": number, "row": row, **row_stats(state, row, memories[number])}
        for number, state in states.items()
        if number in memories
        for row in range(state.n_rows)
    ]
    names = [name for name, value in rows[0].items() if isinstance(value, float)]
    return {
        **{name: _mean(np.array([row[name] for row in rows])) for name in names},
        "alerts": sorted({alert for row in rows for alert in row["alerts"]}),
        "n_segments_known": HISTORY,
        "memories": rows,
    }


def _crowded(keys: Numbers, strength: Numbers) -> float:
    """Return the share of `strength [M]` in slots with similar keys."""
    if len(keys) < 2:
        return 0.0
    cosines = keys @ keys.T
    np.fill_diagonal(cosines, -1)
    return float(strength[cosines.max(axis=1) > 0.95].sum() / strength.sum())


def _numbers(tensor: Any) -> Any:
    return tensor.detach().double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()


def _mean(values: Numbers, mean: Callable[[Numbers], Any] = np.mean) -> float:
    present = values[~np.isnan(values)]
    return float(mean(present)) if len(present) else math.nan
