"""Reference implementation of scoring in eager torch, fp32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probemon.core.dtypes import input_dtype
from probemon.core.hierarchy import ConceptTree
from probemon.core.inputs import check_pairs, prepare_input
from probemon.core.probes import Architecture, InputSpec
from probemon.core.score_rules import follows_path
from probemon.core.softmax_groups import softmax


class Probes(Protocol):
    """Attributes of a pack that scoring needs."""

    @property
    def n_probes(self) -> int: ...
    @property
    def architecture(self) -> Architecture: ...
    @property
    def weights(self) -> Mapping[str, Tensor]: ...
    @property
    def inputs(self) -> Sequence[InputSpec]: ...
    @property
    def input_index(self) -> Tensor: ...
    @property
    def score_rule(self) -> str: ...
    @property
    def tree(self) -> ConceptTree: ...


def score_reference(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Scores [M] fp32 of single probes: sigmoids of `logits_reference`."""
    return sigmoid(logits_reference(hidden, weights, rows, slots))


def logits_reference(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Logits [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M]."""
    check_pairs(hidden, weights, rows, slots)
    x = hidden[rows].to(torch.float32)
    gathered = {name: tensor[slots].to(torch.float32) for name, tensor in weights.items()}

    def layer(i: int, x: Tensor) -> Tensor:
        sums = (gathered[f"w{i}"] * x).sum(dim=-1)
        return (sums * gathered[f"w{i}_scale"] if f"w{i}_scale" in gathered else sums) + gathered[f"b{i}"]

    h = layer(1, x[:, None, :])
    if "w2" in gathered:
        h = layer(2, h.relu()[:, None, :])
    return layer(3, h.relu()) if "w3" in gathered else h[:, 0]


def sigmoid(logits: Tensor) -> Tensor:
    """Sigmoid [M] fp32, the same at every position: torch's CPU vector body and scalar tail differ."""
    if logits.device.type != "cpu":
        return torch.sigmoid(logits)
    with np.errstate(over="ignore"):
        return torch.from_numpy(1.0 / (1.0 + np.exp(-logits.contiguous().numpy().astype(np.float64)))).to(torch.float32)


_BLOCK_BYTES = 64 << 20


def exhaustive_reference(
    hidden: Mapping[str, Tensor], pack: Probes, weights: Mapping[str, Tensor] | None = None
) -> Tensor:
    """Scores [N, P] fp32 of every probe by the pack's score rule; `weights` replace the pack's."""
    weights = pack.weights if weights is None else weights
    n = len(next(iter(hidden.values())))
    logits = torch.empty(n, pack.n_probes, dtype=torch.float32, device="cpu")
    # Bounds the copies of weights.
    block = max(1, _BLOCK_BYTES // (4 * pack.architecture.parameters_per_probe()))
    for i, spec in enumerate(pack.inputs):
        probes = (pack.input_index == i).nonzero()[:, 0]
        x = prepare_input(hidden[spec.site], spec, input_dtype(weights["w1"].dtype))
        for chunk in probes.split(block):
            for row in range(n):
                logits[row, chunk] = logits_reference(x, weights, torch.full_like(chunk, row), chunk)
    return torch.from_numpy(scores_of_logits(logits, pack.tree, pack.score_rule))


def scores_of_logits(logits: Tensor, tree: ConceptTree, score_rule: str) -> npt.NDArray[np.float32]:
    """Scores [N, P]: sigmoids, or softmax within a group; by the path rule times the best parent's score."""
    scores: npt.NDArray[np.float32] = sigmoid(logits.reshape(-1)).reshape(logits.shape).numpy()
    members, ptr = tree.groups.members, tree.groups.ptr
    if len(members):
        starts = (np.arange(len(logits))[:, None] * len(members) + ptr[:-1]).reshape(-1)
        scores[:, members] = softmax(logits.numpy()[:, members].reshape(-1), starts).reshape(len(logits), len(members))
    return tree.times_best_parent(scores) if follows_path(score_rule) else scores
