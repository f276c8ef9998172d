"""What a memory holds and how it is read, in numbers: formulas in fp64, and the statistics of a state.

    read_metrics(p)                                 # of reads [N, 1 + M]: entropies, utilisation, null share
    key_metrics(keys)                               # of keys [M, d]: redundancy, effective rank
    stats_of({1: state}, {1: memory})               # what get_memory_stats() returns
    memory_alerts(state.rows(...), ...)             # which alerts hold for a row

Entropies are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.adapters.ltm.memory import SlotMemory
from probemon.adapters.ltm.state import HISTORY, SEGMENT, MemoryState
from probemon.errors import ConfigError

Numbers = npt.NDArray[np.float64]


def entropy(shares: Numbers) -> Numbers:
    """Entropy of distributions along the last axis."""
    shares = np.asarray(shares, dtype=np.float64)
    logs = np.log(np.where(shares > 0, shares, 1.0))
    entropies: Numbers = -(shares * logs).sum(axis=-1)
    return entropies


def read_metrics(p: Numbers) -> dict[str, float]:
    """Metrics of reads `[N, 1 + M]`, each p of the null slot and then of the slots."""
    p = np.asarray(p, dtype=np.float64)
    whole = p[:, 1:].sum(axis=1)
    asked = whole > 0
    entropies = entropy(p[asked, 1:] / whole[asked, None])
    return metrics_of_sums(p[:, 1:].sum(axis=0), len(p), float(p[:, 0].sum()), float(entropies.sum()), int(asked.sum()))


def metrics_of_sums(mass: Numbers, n: float, null: float, entropies: float, n_entropies: float) -> dict[str, float]:
    """The same of n reads by their sums: of p of each slot `[M]`, of p of the null slot, of entropies.

    `read_entropy` is the mean entropy of a read without the null slot, `marginal_entropy` that of the mean share;
    `mutual_information`, their difference, tells selective reads from a collapse. NaN where nothing was read.
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
    """Metrics of keys `[M, d]`: the largest cosine of two, and in how many dimensions they lie."""
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


def surprises(values: Numbers, known: Numbers) -> Numbers:
    """How far values `[C, d]` are from what was known of them: 0 for the same, 1 for nothing known."""
    values, known = np.asarray(values, dtype=np.float64), np.asarray(known, dtype=np.float64)
    far: Numbers = ((values - known) ** 2).sum(axis=-1) / (values**2).sum(axis=-1)
    return far


def row_stats(state: MemoryState, row: int, memory: SlotMemory) -> dict[str, Any]:
    """The metrics of one row; what is read and written is over its newest 8 segments and the open one."""
    shape = memory.shape
    one = state.rows(state.n.new_tensor([row])).detached()
    strength = _numbers(one.effective(shape.decay))[0]
    full = strength > 0
    history, mass = _numbers(one.history)[0], _numbers(one.history_mass)[0].sum(axis=0) + _numbers(one.mass)[0]
    by_name = dict(zip(SEGMENT, history.T, strict=True))
    n_reads, null, entropies, n_entropies = np.nansum(history[:, :4], axis=0) + _numbers(one.reads)[0]
    reads = metrics_of_sums(mass, n_reads, null, entropies, n_entropies)
    whole = mass.sum()
    shares = mass / whole if whole > 0 else np.zeros_like(mass)
    used = shares > 1 / (10 * state.n_slots)
    position, token = _numbers(one.position)[0], _numbers(one.token)[0]
    order = np.argsort(-shares, kind="stable")
    added, n_tokens = _numbers(one.contribution)[0]
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
        "age_at_eviction": _median(by_name["age_at_eviction"]),
        "age_read": float((shares * _numbers(one.age)[0]).sum()) if whole > 0 else math.nan,
        "compression": _mean(by_name["kept"]) / shape.segment,
        "gate_mass_kept": _mean(by_name["mass_kept"]),
        **key_metrics(_numbers(one.keys)[0][full]),
        "surprise": _mean(by_name["surprise"]),
        "surprise_p95": _mean(by_name["surprise_p95"]),
        "surprise_over_one": _mean(by_name["surprise_over_one"]),
        "contribution": float(added / n_tokens) if n_tokens else math.nan,
        "n_tokens": int(one.n[0]),
        "n_bytes": one.n_bytes,
        "alerts": memory_alerts(one, memory),
        "provenance": [
            {"slot": int(i), "position": int(position[i]), "token": int(token[i]), "share": float(shares[i])}
            for i in order
            if full[i]
        ],
    }


def memory_alerts(state: MemoryState, memory: SlotMemory) -> list[str]:
    """Which alerts hold for a state of one row.

    - "not finite": a key, a value, a strength or a read is no finite number.
    - "redundant": more than .9 of the strength is in slots whose key another one has, to a cosine over .95.
    - "read collapse": over 8 segments all tokens read the same one slot, and did ask.
    - "dead slots": over 8 segments most slots that hold something were not read.
    - "nothing written": 8 segments that were new to the memory left no trace in it.
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
    asked = reads["null_share"] < 0.9
    if asked and reads["mutual_information"] < 0.05 * math.log(len(mass)) and reads["effective_slots"] < 2:
        alerts.append("read collapse")
    used = mass / mass.sum() > 1 / (10 * len(mass)) if mass.sum() > 0 else np.zeros(len(mass), bool)
    if asked and full.any() and (full & ~used).sum() > 0.5 * full.sum():
        alerts.append("dead slots")
    if sums["written"].sum() == 0 and sums["surprise"].mean() > 0.5:
        alerts.append("nothing written")
    return alerts


def stats_of(states: Mapping[int, MemoryState], memories: Mapping[int, SlotMemory]) -> dict[str, Any]:
    """The metrics of each row of each layer, and their means. Raises `ConfigError` where there is no memory."""
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
    """The share of the strength `[M]` that is in slots whose key `[M, d]` has another one within a cosine of .95."""
    if len(keys) < 2:
        return 0.0
    cosines = keys @ keys.T
    np.fill_diagonal(cosines, -1)
    return float(strength[cosines.max(axis=1) > 0.95].sum() / strength.sum())


def _numbers(tensor: Any) -> Any:
    return tensor.detach().double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()


def _mean(values: Numbers) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else math.nan


def _median(values: Numbers) -> float:
    known = values[~np.isnan(values)]
    return float(np.median(known)) if len(known) else math.nan
