"""MemoryState: a memory's contents, as tensors that follow the rows of a cache.

    state = MemoryState.empty(shape, n_rows, device=device, dtype=dtype)
    state.rows(indices), state.reduced(8), state.grown(64)

Nothing changes in place, so gradients flow through all segments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from probemon.adapters.ltm.config import MemoryShape
from probemon.util.checks import check_count

HISTORY = 8  # recorded segments
# Columns of `history`
SEGMENT = (
    "n_reads", "null", "entropy", "n_entropies",
    "kept", "written", "replaced", "mass_kept", "gate_written", "gate_rejected",
    "surprise", "surprise_p95", "surprise_over_one", "age_at_eviction",
)  # fmt: skip
_SLOTTED = ("keys", "values", "strength", "age", "position", "token", "mass")  # fields [B, M, ...]


@dataclass(frozen=True)
class MemoryState:
    """Memory of B rows: M slots of d dimensions, segments of C tokens, hidden states of D dimensions.

    - `keys`, `values` `[B, M, d]`: keys are unit vectors.
    - `strength [B, M]` fp32: up to 1; 0 if empty.
    - `age [B, M]` int64: segments since the write.
    - `position`, `token` `[B, M]` int64: of the token written, or -1.
    - `features [B, C, D]`, `ids [B, C]`: of the open segment.
    - `last [B, D]`: the hidden state before it.
    - `n [B]` int64: real tokens.
    - `mass [B, M]`, `reads [B, 4]` fp64: of the open segment, reads per slot and the first four of `SEGMENT`.
    - `contribution [B, 2]` fp64: sum of update sizes, relative to the stream; tokens.
    - `history_mass [B, 8, M]`, `history [B, 8, 14]` fp64: reads per slot and `SEGMENT` of past segments, newest last;
      NaN in `history` if none.
    """

    keys: Tensor
    values: Tensor
    strength: Tensor
    age: Tensor
    position: Tensor
    token: Tensor
    features: Tensor
    ids: Tensor
    last: Tensor
    n: Tensor
    mass: Tensor
    reads: Tensor
    contribution: Tensor
    history_mass: Tensor
    history: Tensor

    @classmethod
    def empty(cls, shape: MemoryShape, n_rows: int, *, device: torch.device, dtype: torch.dtype) -> MemoryState:
        """Return the state before the first token."""
        b, m, d, c = n_rows, shape.slots, shape.memory_dim, shape.segment

        def zeros(*size: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(size, device=device, dtype=kind)

        whole, single, double = torch.int64, torch.float32, torch.float64
        return cls(
            keys=zeros(b, m, d),
            values=zeros(b, m, d),
            strength=zeros(b, m, kind=single),
            age=zeros(b, m, kind=whole),
            position=zeros(b, m, kind=whole) - 1,
            token=zeros(b, m, kind=whole) - 1,
            features=zeros(b, c, shape.hidden_size),
            ids=zeros(b, c, kind=whole) - 1,
            last=zeros(b, shape.hidden_size),
            n=zeros(b, kind=whole),
            mass=zeros(b, m, kind=double),
            reads=zeros(b, 4, kind=double),
            contribution=zeros(b, 2, kind=double),
            history_mass=zeros(b, HISTORY, m, kind=double),
            history=zeros(b, HISTORY, len(SEGMENT), kind=double) + torch.nan,
        )

    @property
    def n_rows(self) -> int:
        """Number of rows, B."""
        return self.keys.shape[0]

    @property
    def n_slots(self) -> int:
        """Number of slots per row, M."""
        return self.keys.shape[1]

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def each(self, function: Callable[[Tensor], Tensor]) -> MemoryState:
        """Apply a function to every tensor."""
        return MemoryState(**{field.name: function(getattr(self, field.name)) for field in fields(self)})

    def rows(self, indices: Tensor) -> MemoryState:
        """Return rows `indices [n]`, also repeatedly."""
        return self.each(lambda tensor: tensor[indices.to(tensor.device)])

    def detached(self) -> MemoryState:
        """Return the state without gradients."""
        return self.each(torch.Tensor.detach)

    def effective(self, decay: float) -> Tensor:
        """Return strengths after decay, `[B, M]` fp32."""
        return self.strength if decay == 1 else self.strength * torch.pow(decay, self.age.float())

    def reduced(self, n_slots: int, decay: float = 1.0) -> MemoryState:
        """Return the state with each row's strongest slots.

        Reads change by at most twice the removed slots' p, times the largest norm of a value.
        """
        n_slots = check_count("n_slots", n_slots, least=1, most=self.n_slots)
        order = torch.argsort(self.effective(decay), dim=1, descending=True, stable=True)[:, :n_slots]
        order = order.sort(dim=1).values

        return replace(
            self,
            **{name: taken_at(getattr(self, name), order) for name in _SLOTTED},
            history_mass=torch.take_along_dim(self.history_mass, order[:, None], dim=2),
        )

    def grown(self, n_slots: int) -> MemoryState:
        """Return the state with empty slots added; reads do not change."""
        n_added = check_count("n_slots", n_slots, least=self.n_slots) - self.n_slots

        def extended(tensor: Tensor, dim: int, value: int) -> Tensor:
            size = list(tensor.shape)
            size[dim] = n_added
            return torch.cat([tensor, tensor.new_full(size, value)], dim=dim)

        slotted = {
            name: extended(getattr(self, name), 1, -1 if name in ("position", "token") else 0) for name in _SLOTTED
        }
        return replace(self, **slotted, history_mass=extended(self.history_mass, 2, 0))


def taken_at(values: Tensor, index: Tensor) -> Tensor:
    """Return `[B, k, ...]`: `values [B, N, ...]` at `index [B, k]`."""
    return torch.take_along_dim(values, index.reshape(*index.shape, *[1] * (values.dim() - 2)), dim=1)
