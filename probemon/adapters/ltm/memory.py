"""SlotMemory: reads slots at every token and writes them after each segment.

    memory = SlotMemory(MemoryShape(hidden_size=48))
    output = memory(states, state, valid, ids)      # states [B, T, D]; state or None
    states + output.update, output.state

A token reads what earlier segments wrote, however a sequence is split into forwards. Sources: Memorizing Transformers
(2203.08913), Titans (2501.00663).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from probemon.adapters.ltm.config import MemoryShape
from probemon.adapters.ltm.state import MemoryState, taken_at

SHOWN = 4  # slots per read
_EMPTY = -1e9  # logit with p = 0


@dataclass(frozen=True)
class MemoryOutput:
    """Output for T tokens of B rows; optional parts are None in training.

    - `update [B, T, D]`: added to the stream.
    - `reads [B, T, 1 + M]` fp32: p of the null slot, then of each slot.
    - `top_slot`, `top_position`, `top_token` `[B, T, k]` int64, `top_p [B, T, k]`: the most read slots; -1 if empty.
    """

    update: Tensor
    state: MemoryState
    reads: Tensor
    top_slot: Tensor | None = None
    top_position: Tensor | None = None
    top_token: Tensor | None = None
    top_p: Tensor | None = None


class SlotMemory(nn.Module):
    """Slots that are read with a softmax and written through a gate.

    `closed`: add nothing to the stream.
    `zero`: the output projection starts at zero.
    """

    def __init__(self, shape: MemoryShape, *, zero: bool = False) -> None:
        super().__init__()
        d, h = shape.memory_dim, shape.hidden_size
        self.shape, self.closed, self.zero = shape, False, zero
        self.query = nn.Linear(h, d, bias=False)
        self.key = nn.Linear(2 * h, d, bias=False)  # of two states: values are found by context
        self.value = nn.Linear(h, d, bias=False)
        self.write_gate = nn.Linear(2 * h, 1)
        self.read_gate = nn.Linear(h, 1)
        self.output = nn.Linear(d, h, bias=False)
        # At 1 / sqrt(d), unit vectors would read all slots alike.
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(10.0)))
        self.null_logit = nn.Parameter(torch.zeros(()))
        self.surprise_weight = nn.Parameter(torch.zeros(()))
        if zero:
            nn.init.zeros_(self.output.weight)

    def probabilities(self, queries: Tensor, state: MemoryState) -> Tensor:
        """Return p `[B, T, 1 + M]` fp32 for queries `[B, T, d]`, the null slot first."""
        with torch.autocast(queries.device.type, enabled=False):  # sharp reads need precision
            cosines = functional.normalize(queries.float(), dim=-1) @ state.keys.float().transpose(1, 2)
        strength = state.effective(self.shape.decay)[:, None]
        logits = self.log_sharpness.float().exp() * cosines + strength.clamp_min(1e-30).log()
        logits = torch.where(strength > 0, logits, _EMPTY)  # an empty slot has no share
        null = self.null_logit.float().expand(*logits.shape[:2], 1)
        return torch.cat([null, logits], dim=-1).softmax(dim=-1)

    def read(self, queries: Tensor, state: MemoryState) -> tuple[Tensor, Tensor]:
        """Return what is read `[B, T, d]`, and p."""
        p = self.probabilities(queries, state)
        with torch.autocast(queries.device.type, enabled=False):
            values = p[..., 1:] @ state.values.float()
        return values.to(queries.dtype), p

    def surprise(self, keys: Tensor, values: Tensor, state: MemoryState) -> Tensor:
        """Return how far values `[B, C, d]` are from memory: 0 if known, 1 if empty."""
        recalled = self.read(keys, state)[0].float()
        return (values.float() - recalled).square().sum(-1) / values.float().square().sum(-1).clamp_min(1e-12)

    def chosen(self, gates: Tensor) -> Tensor:
        """Return how many of a segment's strongest tokens may be written, `[B]`, at most K.

        `gates [B, K + 1]`: the K largest, descending, then the sum over the segment. With `adaptive_mass` under 1 it
        is the smallest number of tokens whose gates add up to that share of the sum.
        """
        most = gates.shape[1] - 1
        if self.shape.adaptive_mass >= 1:
            return torch.full(gates.shape[:1], most, device=gates.device)
        wanted = self.shape.adaptive_mass * gates[:, -1:]
        short = gates[:, :-1].cumsum(1) < wanted
        return (1 + short.sum(1)).clamp_max(most)

    def write(
        self, segment: Tensor, before: Tensor, ids: Tensor, state: MemoryState, begin: Tensor, rows: Tensor
    ) -> Any:
        """Return the state after a segment `[B, C, D]`, and a `Decided`.

        `before [B, C, D]`: hidden states one token earlier.
        `begin [B]`: first position.
        `rows [B]` bool: rows that completed it.
        """
        pairs = torch.cat([segment, before], dim=-1)
        keys, values = functional.normalize(self.key(pairs), dim=-1), self.value(segment)
        surprise = self.surprise(keys, values, state)
        logits = self.write_gate(pairs).float()[..., 0] + self.surprise_weight.float() * (surprise - 1)
        gates = logits.sigmoid()
        k = min(self.shape.most_written, state.n_slots)
        strongest, token = torch.sort(gates, dim=1, descending=True, stable=True)
        n_chosen = self.chosen(torch.cat([strongest[:, :k], gates.sum(1, keepdim=True)], dim=1).detach())
        strongest, token = strongest[:, :k], token[:, :k]
        now = replace(state, age=state.age + (state.strength > 0))  # a segment has passed
        weakest, slot = torch.sort(now.effective(self.shape.decay), dim=1, stable=True)
        weakest, slot = weakest[:, :k], slot[:, :k]
        accepted = (strongest > weakest) & (torch.arange(k, device=gates.device) < n_chosen[:, None]) & rows[:, None]

        def put(old: Tensor, new: Tensor) -> Tensor:
            index, mask = slot, accepted
            if old.dim() == 3:
                index, mask = slot[..., None].expand(-1, -1, old.shape[2]), accepted[..., None]
            return old.scatter(1, index, torch.where(mask, new.to(old.dtype), old.gather(1, index)))

        aged = torch.where(rows[:, None], now.age, state.age)
        written = replace(
            state,
            keys=put(state.keys, taken_at(keys, token)),
            values=put(state.values, taken_at(values, token)),
            strength=put(state.strength, strongest),
            age=put(aged, torch.zeros_like(slot)),
            position=put(state.position, begin[:, None] + token),
            token=put(state.token, taken_at(ids, token)),
        )
        decided = Decided(
            gates.detach(),
            surprise.detach(),
            torch.zeros_like(gates, dtype=torch.bool).scatter(1, token, accepted),
            n_chosen,
            torch.where(accepted & (weakest > 0), aged.gather(1, slot), -1),
        )
        return written, decided

    def forward(
        self,
        hidden: Tensor,
        state: MemoryState | None,
        valid: Tensor,
        ids: Tensor | None = None,
        stream: Tensor | None = None,
    ) -> MemoryOutput:
        """Read at `hidden [B, T, D]`, and write complete segments.

        `valid [B, T]` bool: False at padding before a row.
        `stream [B, T, D]`: what the update is added to; None for `hidden`.
        """
        b, t, _ = hidden.shape
        c = self.shape.segment
        if state is None:
            state = MemoryState.empty(self.shape, b, device=hidden.device, dtype=hidden.dtype)
        if ids is None:
            ids = torch.full((b, t), -1, device=hidden.device)
        offset = state.n % c
        place = offset[:, None] + valid.cumsum(1) - 1  # from the open segment's start
        total = offset + valid.sum(1)
        n_segments = max(1, -(-int(total.max()) // c))
        n_places = n_segments * c
        target = torch.where(valid, place, n_places)  # padding goes to an extra place
        features = _placed(state.features, hidden, target, n_places)
        tokens = _placed(state.ids[..., None], ids[..., None], target, n_places)[..., 0]
        before = torch.cat([state.last[:, None], features[:, :-1]], dim=1)
        queries = self.query(features)
        places = torch.arange(n_places, device=hidden.device)
        new = (places >= offset[:, None]) & (places < total[:, None])
        complete = total[:, None] >= c * (1 + torch.arange(n_segments, device=hidden.device))
        begin = state.n - offset
        read, reads, top_reads = [], [], []
        for number, any_complete in enumerate(complete.any(0).tolist()):
            at = slice(number * c, (number + 1) * c)
            values, p = self.read(queries[:, at], state)
            read.append(values)
            reads.append(p)
            if not self.training:
                top_reads.append(_shown(p.detach(), state))
                state = _counted(state, p.detach(), new[:, at])
            if any_complete:
                rows = complete[:, number]
                previous_state = state
                state, decided = self.write(
                    features[:, at], before[:, at], tokens[:, at], state, begin + number * c, rows
                )
                if not self.training:
                    state = _closed(state, previous_state, decided, rows)
                if self.shape.detach_every and (number + 1) % self.shape.detach_every == 0:
                    state = state.detached()
        state = _opened(state, features, tokens, total, c)
        state = replace(state, n=state.n + valid.sum(1))
        spot = torch.where(valid, place, 0)
        value = taken_at(torch.cat(read, dim=1), spot)
        update = torch.sigmoid(self.read_gate(hidden)) * self.output(value)
        update = torch.where(valid[..., None], update * (not self.closed), 0)
        p = torch.where(valid[..., None], taken_at(torch.cat(reads, dim=1), spot), 0)
        if self.training:
            return MemoryOutput(update, state, p)
        slot, position, token, weight = (
            taken_at(torch.cat(part, dim=1), spot) for part in zip(*top_reads, strict=True)
        )
        size = (hidden if stream is None else stream).detach().float().norm(dim=-1)
        share = update.detach().float().norm(dim=-1) / size.clamp_min(1e-30)
        totals = torch.stack([share.double().sum(1), valid.sum(1).double()], dim=1)
        state = replace(state, contribution=state.contribution + totals)
        return MemoryOutput(
            update=update,
            state=state,
            reads=p,
            top_slot=slot,
            top_position=position,
            top_token=token,
            top_p=weight,
        )


@dataclass(frozen=True)
class Decided:
    """Decisions about a segment.

    `gates`, `surprise`, `written` `[B, C]`: per token.
    `kept [B]`: tokens that compression left.
    `evicted [B, K]`: ages of overwritten slots, else -1.
    """

    gates: Tensor
    surprise: Tensor
    written: Tensor
    kept: Tensor
    evicted: Tensor


def _placed(opened: Tensor, values: Tensor, target: Tensor, n_places: int) -> Tensor:
    """Return `[B, n_places, D]`: the open segment, then `values [B, T, D]` at `target [B, T]`."""
    b, c, d = opened.shape
    grid = torch.cat([opened, opened.new_zeros(b, max(0, n_places + 1 - c), d)], dim=1)
    return grid.scatter(1, target[..., None].expand(-1, -1, d), values.to(opened.dtype))[:, :n_places]


def _opened(state: MemoryState, features: Tensor, tokens: Tensor, total: Tensor, c: int) -> MemoryState:
    full = total // c
    spots = (full * c)[:, None] + torch.arange(c, device=total.device)
    inside = spots < total[:, None]
    spots = spots.clamp_max(features.shape[1] - 1)
    last = taken_at(features, (full * c - 1).clamp_min(0)[:, None])[:, 0]
    return replace(
        state,
        features=torch.where(inside[..., None], taken_at(features, spots), 0),
        ids=torch.where(inside, taken_at(tokens, spots), -1),
        last=torch.where((full > 0)[:, None], last, state.last),
    )


@torch.no_grad()
def _shown(p: Tensor, state: MemoryState) -> tuple[Tensor, ...]:
    top = torch.sort(p[..., 1:], dim=-1, descending=True, stable=True)
    k = min(SHOWN, state.n_slots)
    slot, weight = top.indices[..., :k], top.values[..., :k]
    b, c, _ = slot.shape

    def at_slots(values: Tensor) -> Tensor:
        return values.gather(1, slot.reshape(b, c * k)).reshape(b, c, k)

    return slot, at_slots(state.position), at_slots(state.token), weight


@torch.no_grad()
def _counted(state: MemoryState, p: Tensor, new: Tensor) -> MemoryState:
    slots = torch.where(new[..., None], p[..., 1:], 0).double()
    whole = slots.sum(-1)
    shares = slots / whole.clamp_min(1e-300)[..., None]
    entropy = torch.special.entr(shares).sum(-1)
    has_reads = (whole > 0).double()
    null = torch.where(new, p[..., 0], 0).double()
    totals = torch.stack([new.sum(1).double(), null.sum(1), (entropy * has_reads).sum(1), has_reads.sum(1)], dim=1)
    return replace(state, mass=state.mass + slots.sum(1), reads=state.reads + totals)


@torch.no_grad()
def _closed(state: MemoryState, before: MemoryState, decided: Decided, rows: Tensor) -> MemoryState:
    gates, written, surprise = decided.gates.double(), decided.written, decided.surprise.double()
    # Gate mass that compression left, written or not
    ordered = torch.sort(gates, dim=1, descending=True).values
    selected = torch.arange(gates.shape[1], device=gates.device) < decided.kept[:, None]
    ages = torch.where(decided.evicted < 0, torch.nan, decided.evicted.double())
    n_written = written.sum(1).double()
    segment = torch.stack(
        [
            *before.reads.unbind(1),
            decided.kept.double(),
            n_written,
            (decided.evicted >= 0).sum(1).double(),
            (ordered * selected).sum(1) / ordered.sum(1).clamp_min(1e-300),
            torch.where(written, gates, 0).sum(1) / n_written,
            torch.where(written, 0, gates).sum(1) / (gates.shape[1] - n_written),
            surprise.mean(1),
            torch.quantile(surprise, 0.95, dim=1),
            (surprise > 1).double().mean(1),
            torch.nanmedian(ages, dim=1).values,
        ],
        dim=1,
    )

    def pushed(history: Tensor, newest: Tensor) -> Tensor:
        return torch.where(rows[:, None, None], torch.cat([history[:, 1:], newest[:, None]], dim=1), history)

    return replace(
        state,
        mass=torch.where(rows[:, None], 0, before.mass),
        reads=torch.where(rows[:, None], 0, before.reads),
        history_mass=pushed(state.history_mass, before.mass),
        history=pushed(state.history, segment),
    )
