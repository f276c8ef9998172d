"""Bounding probes: linear probes whose logit is never below that of a group's members.

    groups = group_probes(pack, alert_threshold, 1.0)
    opened = opened_groups(pack, groups, hidden)      # states [G, S, D] -> bool [G, n]

For a member i and any c, `w_i x + b_i <= c x + b_i + |w_i - c| |x|`; normalised states have |x| <= sqrt(D); c is the
mean. Clusters: spherical k-means (Dhillon and Modha 2001).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probemon.core.dtypes import of_dtype
from probemon.core.hierarchy import Ints
from probemon.core.inputs import prepare_input
from probemon.packs.opened import OpenedPack

_ROUNDS = 30
# Relative growth of a state's norm by rounding.
_ROUNDING = {torch.float32: 2.0**-22, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class Group:
    """Probes `members` under a bounding probe `weight [D]`, `bias`.

    `threshold`: the members' smallest alert threshold
    """

    members: Ints
    weight: Tensor
    bias: float
    threshold: float
    input: int


def group_probes(pack: OpenedPack, alert_threshold: Tensor, factor: float) -> list[Group]:
    """Return groups of probes with alert thresholds, by input: at most `factor * sqrt(n)`."""
    groups = []
    weights, biases = pack.weights["w1"][:, 0], pack.weights["b1"][:, 0].double()
    size = pack.architecture.hidden_size
    for number, spec in enumerate(pack.inputs):
        probes = ((pack.input_index == number) & ~alert_threshold.isnan()).nonzero()[:, 0]
        if spec.norm == "none" or len(probes) < 2:
            continue
        longest = math.sqrt(size) * (1 + of_dtype(_ROUNDING, pack.dtype, "rounding of inputs"))
        for cluster in _clusters(weights[probes].float(), max(1, round(factor * math.sqrt(len(probes))))):
            members = probes[cluster]
            rows = weights[members].double()
            centre = rows.mean(dim=0).to(pack.dtype)
            distance = (rows - centre.double()).norm(dim=1)
            # Fp32 sums of D products err by D units in the last place of the sum of magnitudes.
            sum_error = size * 2.0**-23 * longest * (rows.norm(dim=1) + centre.double().norm())
            slack = sum_error + 2.0**-20 * biases[members].abs()
            bias = np.float32(float((biases[members] + distance * longest + slack).max()))
            bias_up = float(np.nextafter(bias, np.float32(np.inf)))
            groups.append(Group(members.numpy(), centre, bias_up, float(alert_threshold[members].min()), number))
    return groups


def opened_groups(pack: OpenedPack, groups: list[Group], hidden: Tensor) -> np.ndarray:
    """Return whether states `[G, S, D]` open n groups, `[G, n]`."""
    opened = np.zeros((len(hidden), len(groups)), dtype=bool)
    for number, spec in enumerate(pack.inputs):
        indices = [i for i, group in enumerate(groups) if group.input == number]
        if indices:
            x = prepare_input(hidden[:, pack.sites.index(spec.site)], spec, pack.input_dtype).double()
            weights = torch.stack([groups[i].weight for i in indices]).double()
            biases = torch.tensor([groups[i].bias for i in indices], dtype=torch.float64)
            thresholds = torch.tensor([groups[i].threshold for i in indices], dtype=torch.float64)
            opened[:, indices] = ((x @ weights.T + biases).sigmoid() > thresholds).numpy()
    return opened


def _clusters(rows: Tensor, k: int) -> list[Tensor]:
    """Return the members of clusters of rows `[P, D]`, nearest first; deterministic."""
    units = torch.nn.functional.normalize(rows, dim=1)
    centres = units[:1]
    nearest = units @ centres[0]
    for _ in range(min(k, len(units)) - 1):
        centres = torch.cat([centres, units[nearest.argmin()][None]])
        nearest = torch.maximum(nearest, units @ centres[-1])
    cluster_of = torch.full((len(units),), -1, device=units.device)
    for _ in range(_ROUNDS):
        closest = (units @ centres.T).argmax(dim=1)
        if torch.equal(closest, cluster_of):
            break
        cluster_of = closest
        sums = torch.zeros_like(centres).index_add_(0, cluster_of, units)
        filled = sums.norm(dim=1) > 0
        centres = torch.where(filled[:, None], torch.nn.functional.normalize(sums, dim=1), centres)
    clusters = []
    for cluster in range(len(centres)):
        members = (cluster_of == cluster).nonzero()[:, 0]
        if len(members) > 1:
            clusters.append(members[(units[members] @ centres[cluster]).argsort(descending=True, stable=True)])
    return clusters
