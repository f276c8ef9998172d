"""Controller step over one column of decoding in Triton, without gradients.

    step = controller_step(hidden, real, carry, weights, config)        # hidden [B, 1, D], real [B, 1] bool

The reference is `probemon.adapters.bem.controller`. Programs share the projection's weights in one launch; a second
does the rest, one program per row. All is fp32 or fp64, without tf32. A row's result is bitwise the same in every run
and batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from probemon.adapters.bem.config import LEVELS, BemConfig
from probemon.adapters.bem.kernels import controller_forward as forward
from probemon.adapters.bem.update import MOST_RANK, MOST_WIDTH
from probemon.errors import ConfigError

EPS = 1e-5  # of every LayerNorm
# Rows and features per program; fixed, to keep the order of a row's sums.
ROWS, OUT = 4, 4
_TILE = 8192  # values per tile, 32 per thread
_WARPS = 8
_COMMON = (
    "norm.weight", "norm.bias", "project.weight", "project.bias", "query",
    "confidence.0.weight", "confidence.0.bias", "confidence.1.weight", "confidence.1.bias", "log_temperature",
)  # fmt: skip
_PARTS_OF_ROUTER = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
ROUTERS = {"prefix": 1, "chunk": 2, "token": 2}  # inputs of `width` features
CARRY = ("n", "open", "code", "summary", "log_mass", "confidence")
WEIGHTS = (*_COMMON, *(f"{router}.{part}" for router in ROUTERS for part in _PARTS_OF_ROUTER))
_FIRST = {router: WEIGHTS.index(f"{router}.0.weight") for router in ROUTERS}


class ColumnStep(NamedTuple):
    """Outputs of a column: features `z [B, 1, w]`, `carry` as `CARRY`, the rest as in `Codes`."""

    z: Tensor
    carry: tuple[Tensor, ...]
    prefix: Tensor | None
    chunk: Tensor | None
    token: Tensor | None
    confidence: Tensor
    chunk_index: Tensor
    boundary: Tensor
    level: Tensor


@functools.lru_cache(maxsize=64)
def step_meta(width: int, rank: int, chunk_tokens: int, config: BemConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return compile-time arguments per row."""
    w = triton.next_power_of_2(width)
    # Levels of tokens below and from `token_limit`.
    under, over = (config.level,) * 2 if config.level in LEVELS else ("token", "chunk")
    return {
        "WIDTH": width, "RANK": rank, "SIZE": chunk_tokens, "PREFIX_CHUNKS": config.prefix_tokens // chunk_tokens,
        "LIMIT": config.token_limit,
        "UNDER": LEVELS.index(under), "OVER": LEVELS.index(over), "EMA": config.ema, "MAX_NORM": config.max_norm,
        "ROOT": math.sqrt(width), "W": w,
        "R": triton.next_power_of_2(rank), "BLOCK": min(w, _TILE // (2 * w)),
        "SLOTS": min(triton.next_power_of_2(chunk_tokens), _TILE // w),
        **_arithmetic(dtype),
    }  # fmt: skip


@functools.lru_cache(maxsize=64)
def features_meta(width: int, hidden_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return compile-time arguments of the projection."""
    block = min(triton.next_power_of_2(hidden_size), _TILE // (ROWS * OUT))
    return {"WIDTH": width, "OUT": OUT, "BLOCK": block, **_arithmetic(dtype)}


def _arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    accumulator = tl.float64 if dtype == torch.float64 else tl.float32
    # Only explicit fma fuses; see `update`.
    return {"EPS": EPS, "ACC": accumulator, "num_warps": _WARPS, "enable_fp_fusion": False}


def _forward(
    config: BemConfig, hidden: Tensor, real: Tensor, carry: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> tuple[Any, ...]:
    """Return features, carry, codes, confidence, chunk index, boundary, level."""
    n, open_, code, *_ = carry
    (b, size, width), rank, d = open_.shape, code.shape[1], hidden.shape[2]
    z, new_carry = open_.new_empty(b, 1, width), [torch.empty_like(t) for t in carry]
    codes = [None if weights[_FIRST[router]] is None else open_.new_empty(b, 1, rank) for router in ROUTERS]
    columns = (open_.new_empty(b, 1), n.new_empty(b, 1), torch.empty_like(real), n.new_empty(b, 1))
    if b:
        norm, shift, project, bias, *others = weights
        with torch.cuda.device_of(hidden):  # Triton launches on the current device
            meta = features_meta(width, d, open_.dtype)
            forward.features[(triton.cdiv(b, ROWS), triton.cdiv(width, OUT))](
                hidden, real, norm, shift, project, bias, z, b, d, ROWS=ROWS, **meta
            )
            meta = step_meta(width, rank, size, config, open_.dtype)
            forward.step[(b,)](z, real, *carry, *others, *new_carry, *codes, *columns, **meta)
    return (z, *new_carry, *codes, *columns)


def controller_step(
    hidden: Tensor, real: Tensor, carry: Sequence[Tensor], weights: Mapping[str, Tensor], config: BemConfig
) -> ColumnStep:
    """Return the outputs of one more token per row: hidden `[B, 1, D]`, real `[B, 1]` bool (False keeps the carry).

    `carry`: n `[B]` int64, open `[B, N, w]`, code `[B, r]`, summary `[B, w]`, log_mass `[B]`, confidence `[B]`.
    `weights`: by `WEIGHTS`, of present routers.

    Widths up to 1,024, ranks up to 64. Makes no gradients. Raises `ConfigError` if inputs do not fit.
    """
    ordered = [weights.get(name) for name in WEIGHTS]
    _check(tuple(None if t is None else (t.shape, t.dtype, t.device) for t in (hidden, real, *carry, *ordered)))
    hidden, real, carry = hidden.contiguous(), real.contiguous(), [t.contiguous() for t in carry]
    ordered = [None if t is None else t.contiguous() for t in ordered]
    outputs = _forward(config, hidden, real, carry, ordered)
    return ColumnStep(outputs[0], outputs[1:7], *outputs[7:])


@functools.lru_cache(maxsize=64)  # decoding steps look alike
def _check(kinds: tuple[tuple[torch.Size, torch.dtype, torch.device] | None, ...]) -> None:
    """Raise `ConfigError` if inputs do not fit: kernels check no address."""
    names = ("hidden", "real", *CARRY, *WEIGHTS)
    present = {name: kind for name, kind in zip(names, kinds, strict=True) if kind is not None}
    shapes = {name: tuple(shape) for name, (shape, _, _) in present.items()}
    if [len(shapes.get(name, ())) for name in ("hidden", "open", "code")] != [3, 3, 2]:
        raise ConfigError(
            f"shapes { ({name: shapes.get(name) for name in ('hidden', 'open', 'code')}) } do not fit: expected hidden"
            " [B, 1, D], open [B, N, w], code [B, r]"
        )
    (b, _, d), (_, size, w), (_, r) = shapes["hidden"], shapes["open"], shapes["code"]
    expected: dict[str, tuple[int, ...]] = dict(
        zip(names, ((b, 1, d), (b, 1), (b,), (b, size, w), (b, r), (b, w), (b,), (b,)), strict=False)
    )
    expected |= dict(
        zip(_COMMON, ((d,), (d,), (w, d), (w,), (w,), (2 * w,), (2 * w,), (1, 2 * w), (1,), (1,)), strict=True)
    )
    for router, n_in in ROUTERS.items():
        if f"{router}.0.weight" in present:
            n = n_in * w
            router_shapes = zip(_PARTS_OF_ROUTER, ((n,), (n,), (w, n), (w,), (r, w), (r,)), strict=True)
            expected |= {f"{router}.{part}": shape for part, shape in router_shapes}
    given, dtype, device = present["hidden"][1], present["open"][1], present["hidden"][2]
    dtypes = {"n": torch.int64, "real": torch.bool, "hidden": given if given.is_floating_point else dtype}
    wanted = {name: (shape, dtypes.get(name, dtype), device) for name, shape in expected.items()}
    have = {name: (shapes[name], *kind[1:]) for name, kind in present.items()}
    wrong = {name: (have.get(name), wanted.get(name)) for name in names if have.get(name) != wanted.get(name)}
    if wrong:
        raise ConfigError(
            f"inputs differ as (given, expected) in {wrong}: give weights by their names in the controller, and one"
            " column of B rows, on one device"
        )
    if dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"the carry is {dtype}: the kernel has torch.float32 and torch.float64; use impl='reference' for others"
        )
    if not (1 <= r <= MOST_RANK and 1 <= w <= MOST_WIDTH and d and size):
        raise ConfigError(
            f"rank {r}, width {w}, hidden size {d}, chunks of {size}: the kernel has ranks from 1 to"
            f" {MOST_RANK}, widths from 1 to {MOST_WIDTH}; use impl='reference' for others"
        )
