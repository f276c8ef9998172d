"""MemoryState: what a memory holds of every row, as tensors that follow the rows of a cache.

    state = MemoryState.empty(shape, n_rows, device=device, dtype=dtype)
    state.rows(indices)                             # of other rows: beams, a batch that is cut down
    state.reduced(8), state.grown(64)               # with fewer slots, the strongest; with more, empty ones

Nothing is changed in place: each write makes a new state, so that a gradient goes through all segments of a window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from probemon.adapters.ltm.config import MemoryShape
from probemon.util.checks import check_count

HISTORY = 8  # segments of which it is known how they were read and written
# What `history` keeps of a segment, in this order
SEGMENT = (
    "n_reads", "null", "entropy", "n_entropies",
    "kept", "written", "replaced", "mass_kept", "gate_written", "gate_rejected",
    "surprise", "surprise_p95", "surprise_over_one", "age_at_eviction",
)  # fmt: skip
_SLOTTED = ("keys", "values", "strength", "age", "usage", "position", "token", "mass")  # fields [B, M, ...]


@dataclass(frozen=True)
class MemoryState:
    """The memory of B rows with M slots of d dimensions, segments of C tokens, states of D dimensions.

    - `keys`, `values` `[B, M, d]`: keys are unit vectors.
    - `strength [B, M]` fp32 in (0, 1], 0 where the slot is empty; `age [B, M]` int64: segments since it was written.
    - `usage [B, M]` fp32: what it was read in all since it was written.
    - `position`, `token` `[B, M]` int64: the real token that it was written at, counted from the row's first; -1 if
      empty, and a token of -1 if the host was given embeddings.
    - `features [B, C, D]`, `ids [B, C]`: states and tokens of the open segment; `last [B, D]`: the state before it.
    - `n [B]` int64: real tokens so far.
    - `mass [B, M]`, `reads [B, 4]` fp64: of the open segment, how much each slot was read; the number of reads, the sum
      of the null slot's p, the sum of the entropies of what was read, and how many of them there are.
    - `contribution [B, 2]` fp64: the sum of what the memory added, each as a share of the stream, and the tokens.
    - `history_mass [B, 8, M]`, `history [B, 8, 14]` fp64: of the newest segments (the newest last, NaN before there was
      one), how much each slot was read, and `SEGMENT`.
    """

    keys: Tensor
    values: Tensor
    strength: Tensor
    age: Tensor
    usage: Tensor
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
        """Return the state of rows of which nothing was read."""
        b, m, d, c = n_rows, shape.slots, shape.memory_dim, shape.segment

        def zeros(*size: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(size, device=device, dtype=kind)

        whole, single, double = torch.int64, torch.float32, torch.float64
        return cls(
            keys=zeros(b, m, d),
            values=zeros(b, m, d),
            strength=zeros(b, m, kind=single),
            age=zeros(b, m, kind=whole),
            usage=zeros(b, m, kind=single),
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
        """The number of rows, B."""
        return self.keys.shape[0]

    @property
    def n_slots(self) -> int:
        """The number of slots of each row, M."""
        return self.keys.shape[1]

    @property
    def n_bytes(self) -> int:
        """Bytes of all its tensors; they do not grow with the sequence."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def each(self, function: Callable[[Tensor], Tensor]) -> MemoryState:
        """Return the state with every tensor put through a function."""
        return MemoryState(**{field.name: function(getattr(self, field.name)) for field in fields(self)})

    def rows(self, indices: Tensor) -> MemoryState:
        """Return the states of rows `indices [n]`, which may name one several times."""
        return self.each(lambda tensor: tensor[indices.to(tensor.device)])

    def detached(self) -> MemoryState:
        """Return the state as numbers, through which no gradient goes."""
        return self.each(torch.Tensor.detach)

    def effective(self, decay: float) -> Tensor:
        """Return strengths after decay, `[B, M]` fp32."""
        return self.strength if decay == 1 else self.strength * torch.pow(decay, self.age.float())

    def reduced(self, n_slots: int, decay: float = 1.0) -> MemoryState:
        """Return the state with the `n_slots` strongest slots of each row, in the order that they have.

        What is read stays as it was where the slots that go were read with p = 0; else it moves by at most twice the p
        that they had in all, times the largest norm of a value: once for what they gave, once for the rest, which is
        scaled up again.
        """
        n_slots = check_count("n_slots", n_slots, least=1, most=self.n_slots)
        order = torch.argsort(self.effective(decay), dim=1, descending=True, stable=True)[:, :n_slots]
        order = order.sort(dim=1).values

        def kept(tensor: Tensor) -> Tensor:
            index = order.reshape(*order.shape, *[1] * (tensor.dim() - 2)).expand(-1, -1, *tensor.shape[2:])
            return tensor.gather(1, index)

        return replace(
            self,
            **{name: kept(getattr(self, name)) for name in _SLOTTED},
            history_mass=self.history_mass.gather(2, order[:, None].expand(-1, HISTORY, -1)),
        )

    def grown(self, n_slots: int) -> MemoryState:
        """Return the state with empty slots added to each row, up to `n_slots`; what is read stays as it was."""
        more = check_count("n_slots", n_slots, least=self.n_slots) - self.n_slots

        def with_more(tensor: Tensor, dim: int, value: int) -> Tensor:
            size = list(tensor.shape)
            size[dim] = more
            return torch.cat([tensor, tensor.new_full(size, value)], dim=dim)

        slotted = {
            name: with_more(getattr(self, name), 1, -1 if name in ("position", "token") else 0) for name in _SLOTTED
        }
        return replace(self, **slotted, history_mass=with_more(self.history_mass, 2, 0))
