"""The controller's step over one column of decoding in Triton, forward and backward: codes of B tokens, and what is
carried to the next.

    step = controller_step(hidden, real, carry, weights, settings)      # hidden [B, 1, D], real [B, 1] bool
    step.token, step.carry  # [B, 1, r]; n, open, code, summary, log_mass, confidence

The mathematics is that of `probemon.adapters.bem.controller`, whose eager code is the reference. There are two
launches. The first is the projection: several processors read its weights, which are nearly all, at once. The second is
all the rest, by a program a row, which sees for itself whether its row completes a chunk, so that nothing waits for the
device. Weights and carry are fp32 (or all fp64), and so is everything made of them; no matrix unit is used, so nothing
is rounded to tf32. A row's result, and the gradients of its hidden state and carry, are bitwise the same from run to
run and whatever other rows there are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from probemon.adapters.bem.kernels import controller_backward as backward
from probemon.adapters.bem.kernels import controller_forward as forward
from probemon.adapters.bem.kernels.update import sum_over_rows
from probemon.adapters.bem.update import MOST_RANK, MOST_WIDTH
from probemon.errors import ConfigError

EPS = 1e-5  # of every LayerNorm
# Rows and features of a program of the projection. Fixed: a tile that grew with the batch would change the order in
# which a row's sums are made.
ROWS, OUT = 4, 4
_TILE = 8192  # values of a tile, 32 of each of 256 threads
_WARPS = 8
_COMMON = (
    "norm.weight", "norm.bias", "project.weight", "project.bias", "query",
    "confidence.0.weight", "confidence.0.bias", "confidence.1.weight", "confidence.1.bias", "log_temperature",
)  # fmt: skip
_PARTS_OF_ROUTER = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
ROUTERS = {"prefix": 1, "chunk": 2, "token": 2}  # and how many features, of `width` each, they read
CARRY = ("n", "open", "code", "summary", "log_mass", "confidence")
WEIGHTS = (*_COMMON, *(f"{router}.{part}" for router in ROUTERS for part in _PARTS_OF_ROUTER))
_FIRST = {router: WEIGHTS.index(f"{router}.0.weight") for router in ROUTERS}  # where its weights begin in WEIGHTS


@dataclass(frozen=True)
class StepSettings:
    """Settings as in `BemConfig`. `under`, `over`: levels of tokens before and from `token_limit` on."""

    ema: float
    max_norm: float
    prefix_tokens: int
    token_limit: int
    under: int
    over: int


class ColumnStep(NamedTuple):
    """What a column makes. `z [B, 1, w]`: features. `carry`: n, open, code, summary, log_mass, confidence, after it.
    The rest is as in `Codes`, `[B, 1, ..]`.
    """

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
def step_meta(width: int, rank: int, chunk_tokens: int, settings: StepSettings, dtype: torch.dtype) -> dict[str, Any]:
    """Return compile-time sizes and settings of the kernels of a row."""
    w = triton.next_power_of_2(width)
    return {
        "WIDTH": width, "RANK": rank, "SIZE": chunk_tokens, "PREFIX_CHUNKS": settings.prefix_tokens // chunk_tokens,
        "LIMIT": settings.token_limit,
        "UNDER": settings.under, "OVER": settings.over, "EMA": settings.ema, "MAX_NORM": settings.max_norm,
        "ROOT": math.sqrt(width), "W": w,
        "R": triton.next_power_of_2(rank), "BLOCK": min(w, _TILE // (2 * w)),
        "SLOTS": min(triton.next_power_of_2(chunk_tokens), _TILE // w),
        **_arithmetic(dtype),
    }  # fmt: skip


@functools.lru_cache(maxsize=64)
def features_meta(width: int, hidden_size: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return compile-time sizes of the kernels of the projection."""
    block = min(triton.next_power_of_2(hidden_size), _TILE // (ROWS * OUT))
    return {"WIDTH": width, "OUT": OUT, "BLOCK": block, **_arithmetic(dtype)}


def _arithmetic(dtype: torch.dtype) -> dict[str, Any]:
    accumulator = tl.float64 if dtype == torch.float64 else tl.float32
    # As in `update`: what is to be fused says so, else a row's bits would depend on its place in the batch.
    return {"EPS": EPS, "ACC": accumulator, "num_warps": _WARPS, "enable_fp_fusion": False}


def _forward(
    settings: StepSettings, hidden: Tensor, real: Tensor, carry: Sequence[Tensor], weights: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Features, the carry, codes, confidence, chunk index, boundary, level."""
    n, open_, code, *_ = carry
    (b, size, width), rank, d = open_.shape, code.shape[1], hidden.shape[2]
    z, new_carry = open_.new_empty(b, 1, width), [torch.empty_like(t) for t in carry]
    codes = [None if weights[_FIRST[router]] is None else open_.new_empty(b, 1, rank) for router in ROUTERS]
    # Confidence, chunk index, boundary, level.
    columns = (open_.new_empty(b, 1), n.new_empty(b, 1), torch.empty_like(real), n.new_empty(b, 1))
    if b:
        norm, shift, project, bias, *others = weights
        with torch.cuda.device_of(hidden):  # Triton launches on the current device
            meta = features_meta(width, d, open_.dtype)
            forward.features[(triton.cdiv(b, ROWS), triton.cdiv(width, OUT))](
                hidden, real, norm, shift, project, bias, z, b, d, ROWS=ROWS, **meta
            )
            meta = step_meta(width, rank, size, settings, open_.dtype)
            forward.step[(b,)](z, real, *carry, *others, *new_carry, *codes, *columns, **meta)
    return (z, *new_carry, *codes, *columns)


class _ControllerStep(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, settings: StepSettings, hidden: Tensor, real: Tensor, *inputs: Tensor | None
    ) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        carry, weights = inputs[:6], inputs[6:]
        outputs = _forward(settings, hidden, real, carry, weights)  # type: ignore[arg-type]
        z, n, _, _, summary, mass, confidence = outputs[:7]
        ctx.mark_non_differentiable(n, *outputs[11:])
        ctx.save_for_backward(hidden, real, z, summary, mass, confidence, *inputs)
        ctx.settings = settings
        return outputs

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator,unused-ignore]
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, real, z, *saved = ctx.saved_tensors
        outputs, carry, weights = saved[:3], saved[3:9], saved[9:]
        (b, size, width), rank, d = carry[1].shape, carry[2].shape[1], hidden.shape[2]
        of_outputs = [
            None if grad is None else grad.contiguous() for i, grad in enumerate(grads[:11]) if i != 1
        ]  # no n
        of_z, *of_carry = (torch.empty_like(t) for t in (z, *carry[1:]))
        at, n_parts = _places(weights, width, rank)
        parts = z.new_zeros(b, n_parts)
        norm, _, project, *_ = weights
        hat, of_y, moments = (z.new_empty(b, m) for m in (d, d, 3))
        if b:
            with torch.cuda.device_of(hidden):
                meta = dict(step_meta(width, rank, size, ctx.settings, z.dtype))
                for forward_only in ("LIMIT", "UNDER", "OVER", "ACC"):
                    del meta[forward_only]
                backward.step_back[(b,)](
                    z, real, *carry, *weights[4:], *outputs, *of_outputs, of_z, *of_carry, parts, PARTS=n_parts,
                    AT_PREFIX=at["prefix"], AT_CHUNK=at["chunk"], AT_TOKEN=at["token"], **meta,
                )  # fmt: skip
                backward.features_back[(b,)](
                    hidden, real, norm, project, of_z, hat, of_y, moments, d, **features_meta(width, d, z.dtype)
                )
        of_hidden = None
        if ctx.needs_input_grad[1]:  # row by row: what torch sums along a row on a GPU depends on how many there are
            scale, plain, along = moments.split(1, dim=1)
            of_hidden = torch.where(real, (of_y * norm - plain - hat * along) * scale, 0.0)
            of_hidden = of_hidden.view(hidden.shape).to(hidden.dtype)
        of_weights: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[9:]):
            of_weights = [
                *_of_normalised_linear(hat, of_y, norm, weights[1], of_z[:, 0]), *_of_confidence(parts, weights, width),
                *(grad for router, n_in in ROUTERS.items() for grad in _of_router(parts[:, at[router] :], weights,
                router, n_in * width, width, rank)),
            ]  # fmt: skip
        return None, of_hidden, None, None, *of_carry, *of_weights


def _places(weights: Sequence[Tensor | None], width: int, rank: int) -> tuple[dict[str, int], int]:
    """Where in a row's parts each router's begin, and how long they are together."""
    at, end = {}, 3 * width + 2
    for router, n_in in ROUTERS.items():
        at[router] = end
        if weights[_FIRST[router]] is not None:
            end += (2 * n_in + 2) * width + rank
    return at, end


def _transposed_product(a: Tensor, b: Tensor) -> Tensor:
    """`a^T b`, in the fixed order and without the tf32 that torch's own product may be set to use."""
    a = a.contiguous()
    return sum_over_rows(b.contiguous(), a, torch.ones_like(a), 1.0, 0.0, a).t()


def _of_normalised_linear(hat: Tensor, of_y: Tensor, gain: Tensor, bias: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of a LayerNorm and the linear layer that follows; `grad`: that of the layer's output."""
    return (of_y * hat).sum(dim=0), of_y.sum(dim=0), _transposed_product(grad, hat * gain + bias), grad.sum(dim=0)


def _of_confidence(parts: Tensor, weights: Sequence[Tensor], width: int) -> tuple[Tensor, ...]:
    """Gradients of the query, the confidence and its temperature."""
    of_query, of_logit, of_heat, hat = parts[:, : 3 * width + 2].split([width, 1, 1, 2 * width], dim=1)
    gain, bias, weight = weights[5:8]
    return of_query.sum(dim=0), *_of_normalised_linear(hat, of_logit * weight, gain, bias, of_logit), of_heat.sum(dim=0)


def _of_router(
    parts: Tensor, weights: Sequence[Tensor | None], router: str, n_in: int, width: int, rank: int
) -> tuple[Tensor | None, ...]:
    first = _FIRST[router]
    gain, bias = weights[first : first + 2]
    if gain is None or bias is None:
        return (None,) * len(_PARTS_OF_ROUTER)
    hat, of_y, middle, of_middle, of_raw = parts[:, : 2 * n_in + 2 * width + rank].split(
        [n_in, n_in, width, width, rank], dim=1
    )
    linear = _of_normalised_linear(hat, of_y, gain, bias, of_middle)
    return *linear, _transposed_product(of_raw, middle), of_raw.sum(dim=0)


def controller_step(
    hidden: Tensor, real: Tensor, carry: Sequence[Tensor], weights: Mapping[str, Tensor], settings: StepSettings
) -> ColumnStep:
    """Read one more token of each of B rows: hidden `[B, 1, D]` of any float dtype, real `[B, 1]` bool (padding is not
    read, and leaves its row's carry as it was).

    `carry`: as in `probemon.adapters.bem.state.Carry`, n `[B]` int64, open `[B, N, w]`, code `[B, r]`, summary `[B,
    w]`, log_mass `[B]`, confidence `[B]`. `weights`: by their names in the controller (`WEIGHTS`); those of a router
    that it does not have are absent.

    Widths are from 1 to 1,024, ranks from 1 to 64. It is differentiable once in hidden, carry and weights. Raises
    `ConfigError` where they do not fit.
    """
    ordered = [weights.get(name) for name in WEIGHTS]
    _check(tuple(None if t is None else (t.shape, t.dtype, t.device) for t in (hidden, real, *carry, *ordered)))
    hidden, real, carry = hidden.contiguous(), real.contiguous(), [t.contiguous() for t in carry]
    ordered = [None if t is None else t.contiguous() for t in ordered]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (hidden, *carry, *ordered)):
        outputs = _ControllerStep.apply(settings, hidden, real, *carry, *ordered)  # type: ignore[no-untyped-call,unused-ignore]
    else:
        outputs = _forward(settings, hidden, real, carry, ordered)
    return ColumnStep(outputs[0], outputs[1:7], *outputs[7:])


@functools.lru_cache(maxsize=64)  # a step of decoding looks like the one before
def _check(kinds: tuple[tuple[torch.Size, torch.dtype, torch.device] | None, ...]) -> None:
    """The kernels check no address: what does not fit must not reach them."""
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
    if shapes != expected:
        wrong = {
            name: (shapes.get(name), expected.get(name)) for name in names if shapes.get(name) != expected.get(name)
        }
        raise ConfigError(
            f"what is given and expected differs in (given, expected) {wrong}: give weights by their names in the"
            " controller, and one column of B rows"
        )
    dtype, device = present["open"][1], present["hidden"][2]
    for name, (_, own_dtype, own_device) in present.items():
        if name == "hidden":
            fine = own_dtype.is_floating_point
        else:
            fine = own_dtype == {"n": torch.int64, "real": torch.bool}.get(name, dtype)
        if own_device != device or not fine:
            raise ConfigError(
                f"{name} is {own_dtype} on {own_device}; hidden is on {device}, open {dtype}: n is int64, real bool,"
                " hidden floating, all else as open, on one device"
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
