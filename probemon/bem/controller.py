"""Controller: which code steers each token, causal and streaming; one for all sites, run once a forward.

    controller = Controller(hidden_size, config)
    codes = controller(hidden, real, state)          # hidden [B, T, D], real [B, T] bool; the state goes on
    codes.of("chunk")                                # [B, T, r]

Time is counted in real tokens of the row: token n lies in chunk n // N. With z the features of a token:

    summary of chunk k   softmax attention of a learned query over the z of the first min(P, N k) tokens;
                         learned for k = 0
    chunk code           e_k = ema e_{k-1} + (1 - ema) c_k, c_k from [mean z of chunk k-1, summary of k];
                         e_0 = c_0 learned
    prefix code          from the summary of the token's chunk
    token code           from [z of the token, summary of its chunk]

so that a code depends on its own token and on complete chunks before it. Every c is `clamp(MLP(LayerNorm(.)))` times
the confidence of the token's chunk, `sigmoid(g / exp(t))`, with g from what the chunk code is from, and learned for
chunk 0.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from probemon.bem.config import LEVELS, BemConfig
from probemon.bem.state import Carry, ControllerState
from probemon.errors import ConfigError
from probemon.host.internals import named_weights

PREFIX, CHUNK, TOKEN = range(3)
_CONFIDENT = 2.0  # logit at the start: a fresh adapter is nearly the static one of c = 1
_FP32: dict[str, Any] = {"dtype": torch.float32}  # whatever torch.set_default_dtype says


@dataclass(frozen=True, eq=False)
class Codes:
    """Codes of one forward, before governance; zeros at padding. `[B, T, r]` each, None for a level that no site uses.

    `level [B, T]` int64: which one attention outputs and MLPs take, an index into `LEVELS`. `confidence [B, T]`,
    already in the codes. `chunk_index [B, T]` int64, -1 at padding; `boundary [B, T]` bool: the first token of a chunk.
    `fallback [B, T]` bool: tokens whose codes are not the controller's but the static 1 of a `FallbackPolicy`; their
    confidence is NaN where none was computed. `sigma1`, `delta_rel_norm` `[B, T]`: of what is applied, after governance
    (`Governor.sizes`); only in what `Bem.steered` gives, where somebody listens.
    """

    prefix: Tensor | None
    chunk: Tensor | None
    token: Tensor | None
    level: Tensor
    confidence: Tensor
    chunk_index: Tensor
    boundary: Tensor
    fallback: Tensor
    sigma1: Tensor | None = None
    delta_rel_norm: Tensor | None = None

    def of(self, level: str) -> Tensor:
        """Codes of "prefix", "chunk" or "token" `[B, T, r]`. Raises `ConfigError` for one that no site uses."""
        code: Tensor | None = getattr(self, level) if level in LEVELS else None
        if code is None:
            used = [name for name in LEVELS if getattr(self, name) is not None]
            raise ConfigError(f"there are no codes of level {level!r}: this adapter uses {', '.join(used)}")
        return code

    def adaptive(self) -> Tensor:
        """What attention outputs and MLPs take `[B, T, r]`: of each token, the code of its level."""
        used = [(i, getattr(self, name)) for i, name in enumerate(LEVELS) if getattr(self, name) is not None]
        chosen: Tensor = used[0][1]
        for i, code in used[1:]:
            chosen = torch.where((self.level == i)[..., None], code, chosen)
        return chosen

    def replace(self, **changes: Tensor) -> Codes:
        """The same with other tensors: what a forward hook on the controller may return."""
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, eq=False)
class _Chunks:
    """The chunks that tokens of one forward lie in: the open one and the K that may follow; `at [B, T]` is each
    token's.
    """

    at: Tensor
    code: Tensor  # [B, K + 1, r]
    summary: Tensor  # [B, K + 1, w]
    confidence: Tensor  # [B, K + 1]


class Guard(Protocol):
    """Stands in the place of a controller's `route`, and may give other codes, as long as the state goes on by the same
    columns.
    """

    def __call__(self, controller: Controller, hidden: Tensor, real: Tensor, state: ControllerState) -> Codes: ...


class Router(nn.Sequential):
    """`MLP(LayerNorm(.))` from n_in features to r; its code is ones at first, around which it varies."""

    def __init__(self, n_in: int, width: int, rank: int) -> None:
        super().__init__(
            nn.LayerNorm(n_in, **_FP32), nn.Linear(n_in, width, **_FP32), nn.SiLU(), nn.Linear(width, rank, **_FP32)
        )
        last = self[-1]
        assert isinstance(last, nn.Linear)
        nn.init.ones_(last.bias)


class Controller(nn.Module):
    """Reads the input of one host layer. Its forward returns `Codes`, so that a forward hook on it can see or replace
    them.

    `guard`: what may fall back to static codes, or None. `checkpointed`: with gradients, what lies between the hidden
    states and the codes is computed again in the backward pass and not kept (Chen et al. 2016). `fused`: a forward of
    one column is one step of `probemon.bem.kernels.controller`, in Triton; not where it is checkpointed.
    """

    guard: Guard | None = None
    checkpointed = False
    fused = False

    def __init__(self, hidden_size: int, config: BemConfig) -> None:
        super().__init__()
        self.config = config
        width, rank, levels = config.width, config.rank, config.levels
        self.norm = nn.LayerNorm(hidden_size, **_FP32)
        self.project = nn.Linear(hidden_size, width, **_FP32)
        self.query = nn.Parameter(torch.zeros(width, **_FP32))  # at first, the mean
        self.default_summary = nn.Parameter(torch.zeros(width, **_FP32))
        # Only where something uses it: DistributedDataParallel stops at a parameter that no loss reaches.
        self.default_code = nn.Parameter(torch.ones(rank, **_FP32)) if "chunk" in levels else None
        self.default_confidence = nn.Parameter(torch.tensor(_CONFIDENT, **_FP32))
        self.confidence = nn.Sequential(nn.LayerNorm(2 * width, **_FP32), nn.Linear(2 * width, 1, **_FP32))
        last = self.confidence[-1]
        assert isinstance(last, nn.Linear)
        nn.init.constant_(last.bias, _CONFIDENT)
        self.log_temperature = nn.Parameter(torch.zeros((), **_FP32))
        self.prefix = Router(width, width, rank) if "prefix" in levels else None
        self.chunk = Router(2 * width, width, rank) if "chunk" in levels else None
        self.token = Router(2 * width, width, rank) if "token" in levels else None

    def forward(self, hidden: Tensor, real: Tensor, state: ControllerState) -> Codes:
        """hidden `[B, T, D]`, real `[B, T]` bool; `state` is that of the columns before, and goes on by these.

        Under level="auto" a state whose level is not decided takes these columns as the prompt.
        """
        if self.config.level == "auto" and state.level is None:
            state.level = self.decide(real.sum(dim=1))
        return self.route(hidden, real, state) if self.guard is None else self.guard(self, hidden, real, state)

    def route(self, hidden: Tensor, real: Tensor, state: ControllerState) -> Codes:
        """As `forward`, without a guard. An error leaves the state as if these columns had not been read."""
        before = self.resume(state)
        again = self.checkpointed and torch.is_grad_enabled()
        fused = self.fused and not again and real.shape[1] == 1
        if state.room == 0 and state.n_columns and not fused:  # the kernel sees for itself which rows complete a chunk
            # On a GPU this waits, once in N steps of decoding; the others then have a fraction of the work.
            state.room = int((self.config.chunk_tokens - 1 - before.n % self.config.chunk_tokens).min())
        inside = real.shape[1] <= state.room
        if fused:
            made = self._step(before, hidden, real, state.level)
        elif again:
            made = checkpoint(
                self._route,
                before,
                hidden,
                real,
                state.level,
                not inside,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        else:
            made = self._route(before, hidden, real, state.level, not inside)
        z, carry, codes = made
        state.append(z, real, carry)  # here and once: the backward pass of a checkpoint runs the other again
        state.room, state.inside = state.room - z.shape[1] if inside else 0, inside
        return codes

    def _route(
        self, before: Carry, hidden: Tensor, real: Tensor, level: Tensor | None, closes: bool
    ) -> tuple[Tensor, Carry, Codes]:
        """Features `[B, T, w]`, the carry after them, and codes. A plain function of its arguments: no state is
        written.
        """
        z = self.features(hidden, real)
        carry, chunks = self.advance(before, z, real, closes)
        rows = torch.arange(len(z), device=z.device)[:, None]
        confidence = torch.where(real, chunks.confidence[rows, chunks.at], 0.0)
        summary = chunks.summary[rows, chunks.at]
        prefix = chunk = token = None
        if self.prefix is not None:
            prefix = self._code(self.prefix, summary, confidence)
        if self.chunk is not None:
            chunk = torch.where(real[..., None], chunks.code[rows, chunks.at], 0.0)
        if self.token is not None:
            token = self._code(self.token, torch.cat([z, summary], dim=-1), confidence)
        return z, carry, self._codes(prefix, chunk, token, confidence, before.n, real, level, torch.zeros_like(real))

    def _step(self, before: Carry, hidden: Tensor, real: Tensor, level: Tensor | None) -> tuple[Tensor, Carry, Codes]:
        """As `_route`, of one column, by the kernel."""
        kernel: Any = importlib.import_module("probemon.bem.kernels.controller")
        config = self.config
        under, over = [LEVELS.index(config.level)] * 2 if config.level in LEVELS else (TOKEN, CHUNK)
        settings = kernel.StepSettings(
            config.ema, config.max_norm, config.prefix_tokens, config.token_limit, under, over
        )
        carry = (before.n, before.open, before.code, before.summary, before.log_mass, before.confidence)
        made = kernel.controller_step(hidden, real, carry, named_weights(self), settings)
        levels = made.level if level is None else level[:, None]
        codes = Codes(
            made.prefix,
            made.chunk,
            made.token,
            levels,
            made.confidence,
            made.chunk_index,
            made.boundary,
            torch.zeros_like(real),
        )
        return made.z, Carry(*made.carry), codes

    def static(self, real: Tensor, state: ControllerState) -> Codes:
        """Codes of 1 for the columns that a state has not read yet, real `[B, T]` bool, with what is known without the
        routers.
        """
        if state.carry is not None:
            n = state.carry.n
        else:
            n = state.history()[1].sum(dim=1) if state.n_columns else real.new_zeros(len(real), dtype=torch.int64)
        ones = real[..., None].to(self.query.dtype).expand(-1, -1, self.config.rank)
        prefix, chunk, token = (None if router is None else ones for router in (self.prefix, self.chunk, self.token))
        return self._codes(
            prefix,
            chunk,
            token,
            torch.where(real, self.query.new_tensor(math.nan), 0.0),
            n,
            real,
            state.level,
            real.clone(),
        )

    def _codes(
        self,
        prefix: Tensor | None,
        chunk: Tensor | None,
        token: Tensor | None,
        confidence: Tensor,
        n_before: Tensor,
        real: Tensor,
        level: Tensor | None,
        fallback: Tensor,
    ) -> Codes:
        n, size = n_before[:, None] + real.cumsum(dim=1) - 1, self.config.chunk_tokens
        chunk_index, boundary = torch.where(real, n // size, -1), real & (n % size == 0)
        return Codes(prefix, chunk, token, self._level(n, level), confidence, chunk_index, boundary, fallback)

    def resume(self, state: ControllerState) -> Carry:
        """The carry of a state, which has it afterwards if it has read anything: where it was cut back or only fed, all
        of it is read again.
        """
        if state.n_columns == 0:
            return self.start(state.n_rows)
        if state.carry is None:
            state.carry = self.replay(*state.history())
        return state.carry

    def decide(self, lengths: Tensor) -> Tensor:
        """Levels `[B]` int64 for rows whose prompts have `lengths [B]` real tokens, under level="auto"."""
        short, long = self.config.auto_limits
        return torch.where(lengths < short, PREFIX, torch.where(lengths < long, CHUNK, TOKEN))

    def replay(self, z: Tensor, real: Tensor) -> Carry:
        """The carry after these columns: features z `[B, L, w]`, real `[B, L]`."""
        with torch.no_grad():
            return self.advance(self.start(len(z)), z, real)[0]

    def features(self, hidden: Tensor, real: Tensor) -> Tensor:
        """z `[B, T, w]`. The hidden states of padding may be anything, even not a number: they are not read."""
        hidden = torch.where(real[..., None], hidden.to(self.project.weight.dtype), 0.0)
        projected: Tensor = self.project(self.norm(hidden))
        return projected

    def start(self, n_rows: int) -> Carry:
        """Before the first token: chunk 0 is open, with what was learned for it."""
        width, size, device = self.config.width, self.config.chunk_tokens, self.query.device
        confidence = self._sure(self.default_confidence)
        code = (
            self.query.new_zeros(self.config.rank)
            if self.default_code is None
            else self._clamp(self.default_code) * confidence
        )
        return Carry(
            n=torch.zeros(n_rows, dtype=torch.int64, device=device),
            open=self.query.new_zeros(n_rows, size, width),
            code=code.expand(n_rows, -1),
            summary=self.default_summary.expand(n_rows, -1),
            log_mass=self.query.new_full((n_rows,), -math.inf),
            confidence=confidence.expand(n_rows),
        )

    def advance(self, carry: Carry, z: Tensor, real: Tensor, closes: bool = True) -> tuple[Carry, _Chunks]:
        """The chunks that z `[B, T, w]` completes, and the carry after it. A plain function of its arguments: no state
        is written.

        `closes`: False where it is known that no row completes a chunk.
        """
        n_rows, n_columns, width = z.shape
        size = self.config.chunk_tokens
        n_closed_at_most = (
            (size - 1 + n_columns) // size if closes else 0
        )  # K; how many each row really closes stays on the device
        offset = carry.n % size
        slot = offset[:, None] + real.cumsum(dim=1) - 1
        # Tokens in their places, chunk by chunk. Padding goes to one place more, which is thrown away.
        room = (n_closed_at_most + 1) * size
        empty = z.new_zeros(n_rows, room + 1 - size, width)
        places = torch.where(real, slot, room)[..., None].expand(-1, -1, width)
        chunks = (
            torch.cat([carry.open, empty], dim=1)
            .scatter(1, places, z)[:, :room]
            .view(n_rows, n_closed_at_most + 1, size, width)
        )
        if not closes:
            same = dataclasses.replace(carry, n=carry.n + real.sum(dim=1), open=chunks[:, 0])
            return same, _Chunks(
                torch.zeros_like(slot), carry.code[:, None], carry.summary[:, None], carry.confidence[:, None]
            )
        closed = (offset + real.sum(dim=1)) // size
        summary, log_mass = self._summaries(carry, chunks, closed)
        # Of a chunk that a row does not complete, what follows is computed from zeros and chosen by no token.
        seen = torch.cat([chunks[:, :-1].mean(dim=2), summary[:, 1:]], dim=-1)
        confidence = torch.cat([carry.confidence[:, None], self._sure(self.confidence(seen)[..., 0])], dim=1)
        codes = [carry.code]
        if self.chunk is not None:
            fresh = self._code(self.chunk, seen, confidence[:, 1:])
            for k in range(n_closed_at_most):
                codes.append(torch.lerp(fresh[:, k], codes[-1], self.config.ema))
        code = torch.stack(codes if self.chunk is not None else codes * (n_closed_at_most + 1), dim=1)
        rows = torch.arange(n_rows, device=z.device)
        after = Carry(
            n=carry.n + real.sum(dim=1),
            open=chunks[rows, closed],
            code=code[rows, closed],
            summary=summary[rows, closed],
            log_mass=log_mass,
            confidence=confidence[rows, closed],
        )
        return after, _Chunks(torch.where(real, slot // size, 0), code, summary, confidence)

    def _summaries(self, carry: Carry, chunks: Tensor, closed: Tensor) -> tuple[Tensor, Tensor]:
        """The prefix summary at the start of each chunk `[B, K + 1, w]`, and the log of its denominator after all that
        close `[B]`.
        """
        prefix_chunks = self.config.prefix_tokens // self.config.chunk_tokens
        first = carry.n // self.config.chunk_tokens
        summary, log_mass, summaries = carry.summary, carry.log_mass, [carry.summary]
        for k in range(chunks.shape[1] - 1):
            if k < prefix_chunks:  # no row's prefix can grow after that
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

    def _sure(self, logit: Tensor) -> Tensor:
        return torch.sigmoid(logit / self.log_temperature.exp())

    def _level(self, n: Tensor, level: Tensor | None) -> Tensor:
        if level is not None:
            return level[:, None].expand_as(n)
        if self.config.level == "position":
            return torch.where(n < self.config.token_limit, TOKEN, CHUNK)
        return torch.full_like(n, LEVELS.index(self.config.level))
