"""Controller: causal, streaming codes for every token, shared by all sites.

    controller = Controller(hidden_size, config)
    codes = controller(hidden, real, state)          # hidden [B, T, D], real [B, T] bool; the state advances

Real token n of a row is in chunk n // N (`chunk_tokens`; P: `prefix_tokens`). With z the features of a token:

    summary of chunk k   softmax attention of a learned query over the z of the first min(P, N k) tokens;
                         learned for k = 0
    chunk code           e_k = ema e_{k-1} + (1 - ema) c_k, c_k from [mean z of chunk k-1, summary of k];
                         e_0 = c_0 learned
    prefix code          from the summary of the token's chunk
    token code           from [z of the token, summary of its chunk]

Codes depend on their token and complete chunks before it. Every c is `clamp(MLP(LayerNorm(.)))` times the chunk's
confidence `sigmoid(g / exp(t))`; g has the chunk code's input, and is learned for chunk 0.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from probemon.adapters.bem.config import LEVELS, BemConfig
from probemon.adapters.bem.packing import Packing
from probemon.adapters.bem.router import FP32, Router, spread
from probemon.adapters.bem.state import Carry, ControllerState
from probemon.errors import ConfigError
from probemon.host.internals import named_weights

PREFIX, CHUNK, TOKEN = range(3)
_CONFIDENT = 2.0  # initial logit: nearly a static adapter


@dataclass(frozen=True, eq=False, kw_only=True)
class Codes:
    """Codes of one forward before governance, `[B, T, r]` each, or None; zeros at padding.

    `level [B, T]` int64: index into `LEVELS`, for "o" and "down".
    `confidence [B, T]`: already in the codes; NaN if unknown.
    `chunk_index [B, T]` int64: -1 at padding.
    `boundary [B, T]` bool: first token of a chunk.
    `fallback [B, T]` bool: static codes of 1.
    `sigma1`, `delta_rel_norm` `[B, T]`: `Governor.sizes`, if `Bem.steered` has a hook.
    """

    prefix: Tensor | None = None
    chunk: Tensor | None = None
    token: Tensor | None = None
    level: Tensor
    confidence: Tensor
    chunk_index: Tensor
    boundary: Tensor
    fallback: Tensor
    sigma1: Tensor | None = None
    delta_rel_norm: Tensor | None = None
    packing: Packing | None = None

    def by_level(self) -> dict[str, Tensor]:
        """Return the codes `[B, T, r]` of every level in use."""
        return {name: code for name in LEVELS if (code := getattr(self, name)) is not None}

    def of(self, level: str) -> Tensor:
        """Return codes `[B, T, r]` of "prefix", "chunk" or "token". Raises `ConfigError` if unused."""
        codes = self.by_level()
        if level not in codes:
            raise ConfigError(f"there are no codes of level {level!r}: this adapter uses {', '.join(codes)}")
        return codes[level]

    def adaptive(self) -> Tensor:
        """Return each token's code `[B, T, r]` at its `level`."""
        (_, chosen), *others = self.by_level().items()
        for name, code in others:
            chosen = torch.where((self.level == LEVELS.index(name))[..., None], code, chosen)
        return chosen

    def packed(self, packing: Packing) -> Codes:
        """Return codes of sequences as those of packed columns."""
        columns: dict[str, Any] = {
            field.name: packing.join(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **columns, packing=packing)

    def replace(self, **changes: Any) -> Codes:
        """Return these codes with other tensors."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """The open chunk, and K that may follow."""

    at: Tensor  # [B, T]
    code: Tensor  # [B, K + 1, r]
    summary: Tensor  # [B, K + 1, w]
    confidence: Tensor  # [B, K + 1]
    energy: Tensor | None  # [B, K + 1], of the chunk before


class Controller(nn.Module):
    """Reads one layer's input and returns `Codes`, which a forward hook may replace.

    `guard`: runs in place of `route`, and may return other codes.
    `checkpointed`: recompute codes in the backward pass (Chen et al. 2016).
    `needed`: levels to compute.
    `fused`: run one column in Triton, unless checkpointed.
    """

    needed: Collection[str] = LEVELS
    guard: Callable[[Controller, Tensor, Tensor, ControllerState], Codes] | None = None
    checkpointed = False
    fused = False

    def __init__(self, hidden_size: int, config: BemConfig) -> None:
        super().__init__()
        self.config = config
        width, rank, levels = config.width, config.code_size, config.levels
        self.norm = nn.LayerNorm(hidden_size, **FP32)
        self.project = nn.Linear(hidden_size, width, **FP32)
        self.query = nn.Parameter(torch.zeros(width, **FP32))  # initially the mean
        self.default_summary = nn.Parameter(torch.zeros(width, **FP32))
        # Only if used: DistributedDataParallel needs every gradient.
        self.default_code = nn.Parameter(torch.ones(rank, **FP32)) if "chunk" in levels else None
        # Shape [1]: FSDP2 cannot shard scalars.
        self.default_confidence = nn.Parameter(torch.full((1,), _CONFIDENT, **FP32))
        self.confidence = nn.Sequential(nn.LayerNorm(2 * width, **FP32), nn.Linear(2 * width, 1, **FP32))
        last = self.confidence[-1]
        assert isinstance(last, nn.Linear)
        nn.init.constant_(last.bias, _CONFIDENT)
        self.log_temperature = nn.Parameter(torch.zeros(1, **FP32))
        self.prefix = Router(width, width, rank) if "prefix" in levels else None
        self.chunk = Router(2 * width, width, rank) if "chunk" in levels else None
        self.token = Router(2 * width, width, rank) if "token" in levels else None

    def forward(self, hidden: Tensor, real: Tensor, state: ControllerState) -> Codes:
        """Return codes of hidden `[B, T, D]`, real `[B, T]` bool, and advance `state`.

        Under level="auto", a state's first columns are its prompt.
        """
        if self.config.level == "auto" and state.level is None:
            state.level = self.decide((real if state.packing is None else state.packing.real).sum(dim=1))
        return self.route(hidden, real, state) if self.guard is None else self.guard(self, hidden, real, state)

    def route(self, hidden: Tensor, real: Tensor, state: ControllerState) -> Codes:
        """As `forward`, without a guard. An error leaves the state unchanged."""
        before = self.resume(state)
        learns = torch.is_grad_enabled()  # the kernel makes no gradients
        checkpointed = self.checkpointed and learns
        fused = self.fused and not learns and real.shape[1] == 1 and self.config.level not in ("energy", "learned")
        if state.room == 0 and state.n_columns and not fused:  # the kernel sees complete chunks
            # Waits for the GPU once in N steps, to save work.
            state.room = int((self.config.chunk_tokens - 1 - before.n % self.config.chunk_tokens).min())
        inside = real.shape[1] <= state.room
        arguments = (before, hidden, real, state.level)
        fused = fused and state.packing is None
        if fused:
            z, carry, codes = self._step(*arguments)
        elif checkpointed:
            z, carry, codes = checkpoint(
                self._route, *arguments, not inside, state.packing, use_reentrant=False, preserve_rng_state=False
            )
        else:
            z, carry, codes = self._route(*arguments, not inside, state.packing)
        read = real if state.packing is None else state.packing.real
        state.append(z, read, carry)  # once: checkpoints run `_route` again
        state.room, state.inside = state.room - z.shape[1] if inside else 0, inside
        return codes

    def _route(
        self,
        before: Carry,
        hidden: Tensor,
        real: Tensor,
        level: Tensor | None,
        closes: bool,
        packing: Packing | None,
    ) -> tuple[Tensor, Carry, Codes]:
        """Return features `[B, T, w]`, the carry and codes; packed sequences as rows. Changes no state."""
        z = self.features(hidden, real)
        if packing is not None:
            z, real = packing.split(z), packing.real
        carry, chunks = self.advance(before, z, real, closes)
        rows = torch.arange(len(z), device=z.device)[:, None]
        confidence = torch.where(real, chunks.confidence[rows, chunks.at], 0.0)
        summary = chunks.summary[rows, chunks.at]
        by_level = {}
        if self.prefix is not None and "prefix" in self.needed:
            by_chunk = self._code(self.prefix, chunks.summary, chunks.confidence)
            by_level["prefix"] = torch.where(real[..., None], by_chunk[rows, chunks.at], 0.0)
        if self.chunk is not None and "chunk" in self.needed:
            by_level["chunk"] = torch.where(real[..., None], chunks.code[rows, chunks.at], 0.0)
        if self.token is not None and "token" in self.needed:
            by_level["token"] = self._code(self.token, torch.cat([z, summary], dim=-1), confidence)
        if chunks.energy is not None:
            level = self.level_of(chunks.energy)[rows, chunks.at]
        codes = self._codes(by_level, confidence, before.n, real, level, torch.zeros_like(real))
        return z, carry, codes if packing is None else codes.packed(packing)

    def _step(self, before: Carry, hidden: Tensor, real: Tensor, level: Tensor | None) -> tuple[Tensor, Carry, Codes]:
        kernel: Any = importlib.import_module("probemon.adapters.bem.kernels.controller")  # imports Triton
        carry = (before.n, before.open, before.code, before.summary, before.log_mass, before.confidence)
        step = kernel.controller_step(hidden, real, carry, named_weights(self), self.config)
        codes = Codes(
            prefix=step.prefix,
            chunk=step.chunk,
            token=step.token,
            level=step.level if level is None else level[:, None],
            confidence=step.confidence,
            chunk_index=step.chunk_index,
            boundary=step.boundary,
            fallback=torch.zeros_like(real),
        )
        return step.z, Carry(*step.carry), codes

    def static(self, real: Tensor, state: ControllerState) -> Codes:
        """Return codes of 1 for unread columns."""
        if state.carry is not None:
            n = state.carry.n
        else:
            n = state.history()[1].sum(dim=1) if state.n_columns else real.new_zeros(len(real), dtype=torch.int64)
        ones = real[..., None].to(self.query.dtype).expand(-1, -1, self.config.code_size)
        confidence = torch.where(real, self.query.new_tensor(math.nan), 0.0)
        by_level = dict.fromkeys(self.config.levels, ones)
        return self._codes(by_level, confidence, n, real, state.level, real.clone())

    def _codes(
        self,
        by_level: dict[str, Any],
        confidence: Tensor,
        n_before: Tensor,
        real: Tensor,
        level: Tensor | None,
        fallback: Tensor,
    ) -> Codes:
        n, size = n_before[:, None] + real.cumsum(dim=1) - 1, self.config.chunk_tokens
        chunk_index, boundary = torch.where(real, n // size, -1), real & (n % size == 0)
        return Codes(
            **by_level,
            level=self._level(n, level),
            confidence=confidence,
            chunk_index=chunk_index,
            boundary=boundary,
            fallback=fallback,
        )

    def resume(self, state: ControllerState) -> Carry:
        """Return the carry of a state, replayed if needed."""
        if state.n_columns == 0:
            return self.start(state.n_rows)
        if state.carry is None:
            state.carry = self.replay(*state.history())
        return state.carry

    def decide(self, lengths: Tensor) -> Tensor:
        """Return levels `[B]` int64 for prompt lengths, under level="auto"."""
        short, long = self.config.auto_limits
        return torch.where(lengths < short, PREFIX, torch.where(lengths < long, CHUNK, TOKEN))

    def level_of(self, energy: Tensor) -> Tensor:
        """Return levels int64 by the previous spread, under level="energy"."""
        low, high = self.config.energy_limits
        return torch.where(energy < low, PREFIX, torch.where(energy < high, CHUNK, TOKEN))

    def replay(self, z: Tensor, real: Tensor) -> Carry:
        """Return the carry after features z `[B, L, w]`, real `[B, L]`."""
        with torch.no_grad():
            return self.advance(self.start(len(z)), z, real)[0]

    def features(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Return z `[B, T, w]`. Padding is not read."""
        hidden = torch.where(real[..., None], hidden.to(self.project.weight.dtype), 0.0)
        projected: Tensor = self.project(self.norm(hidden))
        return projected

    def start(self, n_rows: int) -> Carry:
        """Return the carry before the first token."""
        width, size, device = self.config.width, self.config.chunk_tokens, self.query.device
        confidence = self._confidence(self.default_confidence)
        if self.default_code is None:
            code = self.query.new_zeros(self.config.code_size)
        else:
            code = self._clamp(self.default_code) * confidence
        return Carry(
            n=torch.zeros(n_rows, dtype=torch.int64, device=device),
            open=self.query.new_zeros(n_rows, size, width),
            code=code.expand(n_rows, -1),
            summary=self.default_summary.expand(n_rows, -1),
            log_mass=self.query.new_full((n_rows,), -math.inf),
            confidence=confidence.expand(n_rows),
            energy=self.query.new_ones(n_rows) if self.config.level == "energy" else None,
        )

    def advance(self, carry: Carry, z: Tensor, real: Tensor, closes: bool = True) -> tuple[Carry, _Chunks]:
        """Return the carry after z `[B, T, w]`, and chunks; `closes=False` if none is completed. Changes no state."""
        n_rows, n_columns, width = z.shape
        size = self.config.chunk_tokens
        most_closed = (size - 1 + n_columns) // size if closes else 0  # K, at most
        offset = carry.n % size
        n = carry.n + real.sum(dim=1)
        slot = offset[:, None] + real.cumsum(dim=1) - 1
        # Padding goes to an extra place.
        room = (most_closed + 1) * size
        empty = z.new_zeros(n_rows, room + 1 - size, width)
        places = torch.where(real, slot, room)[..., None].expand(-1, -1, width)
        chunks = torch.cat([carry.open, empty], dim=1).scatter(1, places, z)[:, :room]
        chunks = chunks.view(n_rows, most_closed + 1, size, width)
        if not closes:
            return dataclasses.replace(carry, n=n, open=chunks[:, 0]), _Chunks(
                torch.zeros_like(slot),
                carry.code[:, None],
                carry.summary[:, None],
                carry.confidence[:, None],
                None if carry.energy is None else carry.energy[:, None],
            )
        closed = (offset + real.sum(dim=1)) // size
        summary, log_mass = self._summaries(carry, chunks, closed)
        # Incomplete chunks are never chosen.
        features = torch.cat([chunks[:, :-1].mean(dim=2), summary[:, 1:]], dim=-1)
        confidence = torch.cat([carry.confidence[:, None], self._confidence(self.confidence(features)[..., 0])], dim=1)
        codes = [carry.code]
        routed = self.chunk is not None and "chunk" in self.needed
        if self.chunk is not None and routed:
            fresh = self._code(self.chunk, features, confidence[:, 1:])
            for k in range(most_closed):
                codes.append(torch.lerp(fresh[:, k], codes[-1], self.config.ema))
        code = torch.stack(codes if routed else codes * (most_closed + 1), dim=1)
        energy = None
        if carry.energy is not None:
            energy = torch.cat([carry.energy[:, None], spread(chunks[:, :-1].detach())], dim=1)
        rows = torch.arange(n_rows, device=z.device)
        after = Carry(
            n=n,
            open=chunks[rows, closed],
            code=code[rows, closed],
            summary=summary[rows, closed],
            log_mass=log_mass,
            confidence=confidence[rows, closed],
            energy=None if energy is None else energy[rows, closed],
        )
        return after, _Chunks(torch.where(real, slot // size, 0), code, summary, confidence, energy)

    def _summaries(self, carry: Carry, chunks: Tensor, closed: Tensor) -> tuple[Tensor, Tensor]:
        """Return summaries `[B, K + 1, w]` at chunk starts, and log denominators `[B]`."""
        prefix_chunks = self.config.prefix_tokens // self.config.chunk_tokens
        first = carry.n // self.config.chunk_tokens
        summary, log_mass, summaries = carry.summary, carry.log_mass, [carry.summary]
        for k in range(chunks.shape[1] - 1):
            if k < prefix_chunks:  # no prefix grows after that
                grows = (k < closed) & (first + k < prefix_chunks)
                score = chunks[:, k] @ self.query / math.sqrt(self.config.width)
                total = torch.logaddexp(log_mass, torch.logsumexp(score, dim=1))
                grown = summary * (log_mass - total).exp()[:, None] + (
                    (score - total[:, None]).exp()[..., None] * chunks[:, k]
                ).sum(dim=1)
                summary = torch.where(grows[:, None], grown, summary)
                log_mass = torch.where(grows, total, log_mass)
            summaries.append(summary)
        return torch.stack(summaries, dim=1), log_mass

    def _code(self, router: nn.Module, features: Tensor, confidence: Tensor) -> Tensor:
        return self._clamp(router(features)) * confidence[..., None]

    def _clamp(self, code: Tensor) -> Tensor:
        norm = code.norm(dim=-1, keepdim=True)
        return code * norm.clamp(max=self.config.max_norm) / (norm + 1e-8)

    def _confidence(self, logit: Tensor) -> Tensor:
        return torch.sigmoid(logit / self.log_temperature.exp())

    def _level(self, n: Tensor, level: Tensor | None) -> Tensor:
        if level is not None:
            return level if level.dim() == 2 else level[:, None].expand_as(n)
        if self.config.level in ("energy", "learned"):  # for fallbacks; sites choose
            return torch.full_like(n, TOKEN)
        if self.config.level == "position":
            return torch.where(n < self.config.token_limit, TOKEN, CHUNK)
        return torch.full_like(n, LEVELS.index(self.config.level))
