"""The drift reference of a pack, as tensors and manifest entry.

tensors = drift_tensors(reference, ids, sites, order)              # concept order[i] is probe i
reference = drift_of(manifest, read, ids, sites, where)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.drift_reference import DriftReference
from probemon.core.hierarchy import Ints
from probemon.core.request_counts import N_NORM_BINS, N_SCORE_BINS, RequestCounts
from probemon.errors import PackCorrupt, PackError

FIRED, SCORES, NORMS = DRIFT = ("drift_fired", "drift_scores", "drift_norms")
_ENDS = 3  # low, high and flat precede the bins


def drift_tensors(
    reference: DriftReference, ids: Sequence[str], sites: Sequence[str], order: Ints
) -> dict[str, Tensor]:
    """Return the pack's tensors, int64. Raises `PackError` unless the reference has all of its concepts, in order and
    with scores, and its sites.
    """
    counts = reference.counts
    if list(reference.ids) != list(ids) or len(reference.scored) != len(ids) or list(reference.sites) != list(sites):
        raise PackError(
            f"the reference of drift is of {len(reference.ids)} concepts, {len(reference.scored)} with scores, at"
            f" {list(reference.sites)}: a pack holds one of all its {len(ids)} concepts at {list(sites)}"
        )
    scores = np.concatenate([np.stack([counts.low, counts.high, counts.flat], axis=1), counts.highest], axis=1)
    values = {FIRED: counts.fired[order], SCORES: scores[order], NORMS: counts.norms}
    return {name: torch.from_numpy(np.ascontiguousarray(value, dtype=np.int64)) for name, value in values.items()}


def check_drift(
    manifest: Mapping[str, Any], described: Mapping[str, Tensor], n_probes: int, n_sites: int, where: str
) -> bool:
    """Return whether a pack has a reference. Raises `PackCorrupt` if it is incomplete or has wrong shapes."""
    entry, names = manifest.get("drift"), [name for name in DRIFT if name in described]
    if entry is None and not names:
        return False
    shapes = {FIRED: (n_probes,), SCORES: (n_probes, _ENDS + N_SCORE_BINS), NORMS: (n_sites, N_NORM_BINS)}
    for name, shape in shapes.items():
        tensor = described.get(name)
        if entry is None or tensor is None or tuple(tensor.shape) != shape or tensor.dtype != torch.int64:
            is_now = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise PackCorrupt(
                f"{where}: {name} is {is_now}, expected torch.int64 {shape}, and drift in the manifest: fetch"
                " the pack again"
            )
    return True


def drift_of(
    manifest: Mapping[str, Any], read: Callable[[str], Tensor], ids: Sequence[str], sites: Sequence[str], where: str
) -> DriftReference:
    """Return a pack's reference. Raises `PackCorrupt` for impossible counts."""
    entry = manifest["drift"]
    n = int(entry["n_requests"])
    fired, scores, norms = (read(name).numpy() for name in DRIFT)
    highest = scores[:, _ENDS:]
    if (
        min(values.min(initial=0) for values in (fired, scores, norms)) < 0
        or max(fired.max(initial=0), scores.max(initial=0), norms.sum(axis=1).max(initial=0)) > n
        or (highest.sum(axis=1) != n).any()
    ):
        raise PackCorrupt(f"{where}: {', '.join(DRIFT)} are not counts of {n} requests: fetch the pack again")
    low, high, flat = (scores[:, i] for i in range(_ENDS))
    counts = RequestCounts(n, fired, low, high, flat, highest, norms)
    every: Ints = np.arange(len(ids))
    alert = read("alert_threshold").numpy()  # of the same file
    return DriftReference(tuple(ids), every, tuple(sites), counts, entry["host"], {}, entry.get("alert_set"), alert)
