"""The selective state-space recurrence, and statistics of its decays.

    states = scan_loop(log_decay, added)                    # h[t] = exp(log_decay[t]) h[t - 1] + added[t]
    states = scan_chunked(log_decay, added, chunk=64)
    states = scan_parallel(log_decay, added)                # (Hillis and Steele, 1986)

`log_decay` `[T, ...]` broadcasts against `added` `[T, ...]`; products of decays themselves would underflow. (Gu and
Dao, "Mamba", 2023; `added = dt * B * x`.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from probemon.util.checks import check_count


def scan_loop(log_decay: Tensor, added: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the states after T tokens, `[T, ...]`."""
    state = torch.zeros_like(added[0]) if start is None else start
    states = torch.empty_like(added)
    for t, decay in enumerate(log_decay.exp()):
        state = decay * state + added[t]
        states[t] = state
    return states


def scan_chunked(log_decay: Tensor, added: Tensor, start: Tensor | None = None, *, chunk: int = 64) -> Tensor:
    """Return the same, `chunk` tokens at once."""
    check_count("chunk", chunk, least=1)
    state = torch.zeros_like(added[0]) if start is None else start
    parts = []
    for begin in range(0, len(added), chunk):
        log, new = log_decay[begin : begin + chunk], added[begin : begin + chunk]
        total = log.cumsum(dim=0)
        log_left = total[:, None] - total[None, :]  # [t, j]: log share of j left at t
        later = torch.ones(len(log), len(log), dtype=torch.bool, device=log.device).triu(1)
        # Before the exponential: sums above the diagonal may overflow.
        log_left = log_left.masked_fill(later.reshape(*later.shape, *[1] * (log_left.dim() - 2)), -math.inf)
        states = (log_left.exp() * new[None]).sum(dim=1) + total.exp() * state
        parts.append(states)
        state = states[-1]
    return torch.cat(parts)


def scan_parallel(log_decay: Tensor, added: Tensor, start: Tensor | None = None) -> Tensor:
    """Return the same, in log2(T) rounds."""
    log, states = log_decay, added
    if start is not None:
        states = torch.cat([(states[0] + log[0].exp() * start)[None], states[1:]])
    distance = 1
    while distance < len(states):
        # (a1, b1) then (a2, b2) is (a1 a2, a2 b1 + b2).
        states, log = (
            torch.cat([states[:distance], states[distance:] + log[distance:].exp() * states[:-distance]]),
            torch.cat([log[:distance], log[distance:] + log[:-distance]]),
        )
        distance *= 2
    return states


def effective_length(log_decay: Tensor, before: Tensor | float = 0.0) -> Tensor:
    """Return how many past tokens the state holds, `[T, ...]`.

    L[t] = 1 + exp(log_decay[t]) L[t - 1]; `before` is the first L[t - 1].
    """
    start = torch.zeros_like(log_decay[0]) + before
    return scan_loop(log_decay, torch.ones_like(log_decay), start)


def half_life(log_decay: Tensor) -> Tensor:
    """Return the half-life of a state in tokens, from the mean log decay.

    The mean of the decays themselves would be too high: the few tokens that forget nothing dominate it.
    """
    return math.log(2) / -log_decay.mean(dim=0)


def update_share(log_decay: Tensor, added: Tensor, before: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the new share of each state, 0 to 1. Norms are over `dims`; `before`: the states before, `[T, ...]`."""
    new = torch.linalg.vector_norm(added, dim=dims)
    remaining = torch.linalg.vector_norm(log_decay.exp() * before, dim=dims)
    return new / (new + remaining).clamp_min(torch.finfo(new.dtype).tiny)


def hidden_attention(log_decay: Tensor, into: Tensor, out_of: Tensor) -> Tensor:
    """Return the weight of token j's input in token t's output, `[T, T, ...]`, 0 for j > t.

    `into` is dt * B, `out_of` is C, both `[T, ..., N]`: sum over N of
    C[t] exp(log_decay[j + 1] + ... + log_decay[t]) dt[j] B[j]
    (Ali, Zimerman and Wolf, "The Hidden Attention of Mamba Models", 2024).
    """
    total = log_decay.cumsum(dim=0)
    later = torch.ones(len(total), len(total), dtype=torch.bool, device=total.device).triu(1)
    log_left = total[:, None] - total[None, :]
    log_left = log_left.masked_fill(later.reshape(*later.shape, *[1] * (log_left.dim() - 2)), -math.inf)
    return (out_of[:, None] * log_left.exp() * into[None]).sum(dim=-1)


def look_back(attention: Tensor) -> Tensor:
    """Return how far back outputs of a hidden attention `[T, T, ...]` look, in tokens."""
    t = torch.arange(len(attention), device=attention.device, dtype=attention.dtype)
    distance = (t[:, None] - t[None, :]).reshape(len(t), len(t), *[1] * (attention.dim() - 2))
    size = attention.abs()
    return (distance * size).sum(dim=1) / size.sum(dim=1)


def effective_rank(states: Tensor) -> Tensor:
    """Return exp of the entropy of squared singular values of `[..., P, N]`."""
    squares = torch.linalg.svdvals(states.double()).square()
    shares = squares / squares.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    return torch.exp(-torch.special.xlogy(shares, shares).sum(dim=-1))
