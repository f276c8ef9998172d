"""numba on a CPU scores probes where their weights lie, and makes a whole descent in one compiled call.

scores = score_numba(hidden, weights, rows, slots)            # [M] of M pairs
CompiledNet.of(weights).descend(links, input_of, x, ...)      # as probemon.engine.cascade does
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.inputs import check_pairs, check_states
from probemon.engine.kernels.numba_compiled import Array, descend, score_pairs
from probemon.errors import ConfigError


@dataclass(frozen=True)
class CompiledNet:
    """Views stacked weights as compiled code reads them: int8, or bits of bf16 or fp32. They must stay alive."""

    bits: tuple[Any, ...]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor]) -> CompiledNet:
        """Make views, no copies."""
        _, h1, d = weights["w1"].shape
        h2 = weights["w2"].shape[1] if "w2" in weights else 0
        no_weights, no_bias = weights["w1"][:0], weights["b1"][:0]
        layers: list[Any] = []
        for i in (1, 2, 3):
            layers.append(_bits(weights.get(f"w{i}", no_weights)))
            layers += [_flat(weights.get(name, no_bias)) for name in (f"w{i}_scale", f"b{i}")]
        return cls((*layers, d, h1, h2, 1 + ("w2" in weights) + ("w3" in weights)))

    def descend(
        self, links: tuple[Array, Array, Array, Array], input_of: Array, n_inputs: int, hidden: Tensor, n_states: int,
        start: Array, retained: Array | None, threshold: Array,
        *, path_rule: bool, max_rounds: int | None, max_active: int, everything: bool,
    ) -> tuple[Array, Array, Array]:  # fmt: skip
        """Return active and dropped `[N, P]` bool, scores `[N, P]`.

        `links`: child_ptr, child_idx, parent_ptr, parent_idx of a hierarchy that was checked.
        `input_of [P]`: the input that each probe reads, under `n_inputs`.
        `hidden [I * N, D]`: the prepared states.
        `start`: the probes that are always active.
        `everything`: whether all probes are scored at once, and the scores searched.
        """
        shape, width = (n_states, len(input_of)), self.bits[9]
        check_states(hidden, width)
        n_slots = len(self.bits[0]) // (width * self.bits[10])
        if (
            hidden.shape[0] < n_inputs * n_states
            or shape[1] > n_slots
            or (retained is not None and retained.shape != shape)
        ):
            raise ConfigError(
                f"{len(hidden)} prepared states for {n_states} states and {n_inputs} inputs, weights of {n_slots}"
                f" probes for {shape[1]}, retained sets {None if retained is None else retained.shape}: give N states"
                f" for each input, and retained sets {list(shape)}"
            )
        active, dropped, scores = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        descend(
            self.bits, *links, input_of, _states(hidden), start,
            np.empty((0, shape[1]), np.bool_) if retained is None else retained, threshold,
            path_rule, -1 if max_rounds is None else max_rounds, max_active, everything, active, dropped, scores,
        )  # fmt: skip
        return active, dropped, scores


def score_numba(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> Tensor:
    """Return scores [M] fp32; hidden [N, D] in the pack's dtype, rows [M], slots [M]."""
    check_pairs(hidden, weights, rows, slots)
    net, x, row, slot = CompiledNet.of(weights), _states(hidden), rows.numpy(), slots.numpy()
    out = np.empty(len(slot), dtype=np.float32)
    if len(slot) < 2 or (slot[1:] >= slot[:-1]).all():  # nothing to sort
        score_pairs(net.bits, x, row, slot, out)
        return torch.from_numpy(out)
    order = np.argsort(slot, kind="stable")
    score_pairs(net.bits, x, row[order], slot[order], out)
    scores = np.empty_like(out)
    scores[order] = out
    return torch.from_numpy(scores)


def _states(hidden: Tensor) -> Array:
    return hidden.to(torch.float32).contiguous().view(-1).numpy()


def _bits(tensor: Tensor) -> Array:
    if tensor.dtype != torch.int8:
        tensor = tensor.contiguous().view(torch.uint16 if tensor.dtype == torch.bfloat16 else torch.uint32)
    return _flat(tensor)


def _flat(tensor: Tensor) -> Array:
    return tensor.contiguous().view(-1).numpy()
