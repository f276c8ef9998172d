"""The recurrence of a selective state-space layer, in three forms that agree, and what follows from its decays.

    states = scan_loop(log_decay, added)                    # h[t] = exp(log_decay[t]) h[t - 1] + added[t]
    states = scan_chunked(log_decay, added, chunk=64)       # the same: within chunks at once, from chunk to chunk
    states = scan_parallel(log_decay, added)                # the same: log2(T) rounds (Hillis and Steele, 1986)

`log_decay` is `[T, ...]` and broadcasts against `added` `[T, ...]`; the first state before them is `start`, zeros where
none is given. Decays are handed over as logarithms: their products underflow, and a quotient of products overflows.
(Gu and Dao, "Mamba", 2023; with the Euler step that every implementation uses, `added = dt * B * x`.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from probemon.util.checks import check_count


def scan_loop(log_decay: Tensor, added: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the state after each of T tokens, `[T, ...]`, one after the other."""
    state = torch.zeros_like(added[0]) if start is None else start
    states = torch.empty_like(added)
    for t, decay in enumerate(log_decay.exp()):
        state = decay * state + added[t]
        states[t] = state
    return states


def scan_chunked(log_decay: Tensor, added: Tensor, start: Tensor | None = None, *, chunk: int = 64) -> Tensor:
    """Return the state after each of T tokens, of chunks of `chunk` tokens at once."""
    check_count("chunk", chunk, least=1)
    state = torch.zeros_like(added[0]) if start is None else start
    parts = []
    for begin in range(0, len(added), chunk):
        log, new = log_decay[begin : begin + chunk], added[begin : begin + chunk]
        total = log.cumsum(dim=0)
        gone = total[:, None] - total[None, :]  # [t, j]: what is left at t of what was added at j
        later = torch.ones(len(log), len(log), dtype=torch.bool, device=log.device).triu(1)
        # Masked before the exponential: above the diagonal the sums are positive and may overflow.
        gone = gone.masked_fill(later.reshape(*later.shape, *[1] * (gone.dim() - 2)), -math.inf)
        states = (gone.exp() * new[None]).sum(dim=1) + total.exp() * state
        parts.append(states)
        state = states[-1]
    return torch.cat(parts)


def scan_parallel(log_decay: Tensor, added: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the state after each of T tokens, in log2(T) rounds over all of them."""
    log, states = log_decay, added
    if start is not None:
        states = torch.cat([(states[0] + log[0].exp() * start)[None], states[1:]])
    distance = 1
    while distance < len(states):
        # Both from the old values: (a1, b1) then (a2, b2) is (a1 a2, a2 b1 + b2), and the order matters.
        states, log = (
            torch.cat([states[:distance], states[distance:] + log[distance:].exp() * states[:-distance]]),
            torch.cat([log[:distance], log[distance:] + log[:-distance]]),
        )
        distance *= 2
    return states


def effective_length(log_decay: Tensor, before: Tensor | float = 0.0) -> Tensor:
    """Return how many past tokens the state holds after each of T tokens, at most t + 1, `[T, ...]`.

    L[t] = 1 + exp(log_decay[t]) L[t - 1]; `before` is L before the first of them.
    """
    start = torch.zeros_like(log_decay[0]) + before
    return scan_loop(log_decay, torch.ones_like(log_decay), start)


def half_life(log_decay: Tensor) -> Tensor:
    """Return in how many tokens half of a state is gone, from the mean *logarithm* of the decays `[T, ...]`.

    A mean of the decays themselves would say too much: it is led by the few tokens at which nothing was forgotten.
    """
    return math.log(2) / -log_decay.mean(dim=0)


def update_share(log_decay: Tensor, added: Tensor, before: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return how much of each new state is new, from 0 to 1: 1 at a reset. Norms are over `dims`.

    `before`: the state before each of the T tokens, `[T, ...]`.
    """
    new = torch.linalg.vector_norm(added, dim=dims)
    kept = torch.linalg.vector_norm(log_decay.exp() * before, dim=dims)
    return new / (new + kept).clamp_min(torch.finfo(new.dtype).tiny)


def hidden_attention(log_decay: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
    """Return how much the input of token j counts in the output of token t, `[T, T, ...]`, 0 for j > t.

    `into` `[T, ..., N]` is dt * B, `out_of` `[T, ..., N]` is C, `log_decay` `[T, ..., N]`: the sum over N of
    C[t] exp(log_decay[j + 1] + ... + log_decay[t]) dt[j] B[j] (Ali, Zimerman and Wolf, "The Hidden Attention of Mamba
    Models", 2024). It takes memory of T squared: for short texts.
    """
    total = log_decay.cumsum(dim=0)
    later = torch.ones(len(total), len(total), dtype=torch.bool, device=total.device).triu(1)
    gone = total[:, None] - total[None, :]
    gone = gone.masked_fill(later.reshape(*later.shape, *[1] * (gone.dim() - 2)), -math.inf)
    return (out_of[:, None] * gone.exp() * into[None]).sum(dim=-1)


def look_back(attention: Tensor) -> Tensor:
    """Return how far back each output of a hidden attention `[T, T, ...]` looks, in tokens, `[T, ...]`."""
    t = torch.arange(len(attention), device=attention.device, dtype=attention.dtype)
    distance = (t[:, None] - t[None, :]).reshape(len(t), len(t), *[1] * (attention.dim() - 2))
    size = attention.abs()
    return (distance * size).sum(dim=1) / size.sum(dim=1)


def effective_rank(states: Tensor) -> Tensor:
    """Return exp of the entropy of the squared singular values of states `[..., P, N]`, from 1 to min(P, N)."""
    squares = torch.linalg.svdvals(states.double()).square()
    shares = squares / squares.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return torch.exp(-torch.special.xlogy(shares, shares).sum(dim=-1))
