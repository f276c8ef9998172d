"""What a probe reads of a hidden state: normalised in fp32, then rounded to the pack's dtype; what kernels may read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from probemon.core.probes import InputSpec
from probemon.errors import ConfigError

# Squares this small (or eps, where it is larger) have lost digits of fp32: a state that leaves less cannot be
# normalised.
TINY = 2.0**-100


def prepare_input(hidden: Tensor, spec: InputSpec, dtype: torch.dtype) -> Tensor:
    """Return hidden [N, D] of any float dtype as [N, D] in `dtype`, normalised without affine part.

    Reductions run along D alone, so a row's result does not depend on the batch it came in. What is not finite, and
    what cannot be normalised in fp32 or rounded to `dtype`, has values that are not finite.
    """
    check_states(hidden)
    x = hidden.to(torch.float32)
    if spec.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    if spec.norm in ("layernorm", "rmsnorm"):
        mean = x.square().mean(dim=-1, keepdim=True)
        # inf - inf: a state too large to be squared becomes NaN, which is not seen, instead of zeros, which score 0.5.
        square = mean + (mean - mean) + spec.eps
        if spec.eps < TINY:
            square = torch.where(square < TINY, torch.nan, square)
        x = x * torch.rsqrt(square)
    return x.to(dtype)


def largest_values(values: Tensor) -> Tensor:
    """The largest absolute value of each row, `[N]` fp32, NaN where one is NaN; on a GPU without waiting."""
    return values.abs().amax(dim=-1).to(torch.float32)


def check_states(hidden: Tensor, width: int | None = None, name: str = "hidden") -> None:
    """Raise `ConfigError` unless hidden is a dense `[N, D]` of real floats, of `width` values each."""
    if hidden.layout != torch.strided or hidden.device.type == "meta" or not hidden.dtype.is_floating_point:
        raise ConfigError(f"{name} is {described(hidden)}: give a dense tensor of a float dtype, with values")
    shape = tuple(hidden.shape)
    if len(shape) != 2 or shape[1] != (shape[1] if width is None else width):
        raise ConfigError(f"{name} has shape {shape}, expected [N, {'D' if width is None else width}]")


def check_pairs(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> None:
    """Raise `ConfigError` unless a kernel can read these pairs: every row is one of `hidden`, every slot one of
    `weights`, and the widths agree.

    The numbers are looked at on a CPU. On a GPU that would wait for them: its kernels skip a pair that is out of range,
    whose score is NaN.
    """
    n_slots, _, width = weights["w1"].shape
    check_states(hidden, width)
    for name, numbers, n in (("rows", rows, len(hidden)), ("slots", slots, n_slots)):
        if numbers.dtype != torch.int64 or numbers.dim() != 1 or numbers.shape != slots.shape:
            raise ConfigError(
                f"{name} is {described(numbers)}: expected int64 [M], a row and a slot for each of M pairs"
            )
        if not numbers.device == hidden.device == weights["w1"].device:
            raise ConfigError(
                f"hidden is on {hidden.device}, {name} on {numbers.device}, the weights on {weights['w1'].device}: put"
                " them on one device"
            )
        if numbers.device.type == "cpu" and len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < n:
            raise ConfigError(
                f"{name} are {int(numbers.min())} to {int(numbers.max())}, and there are {n}: give numbers from 0 to"
                f" {n - 1}"
            )


def described(tensor: Tensor) -> str:
    """What a tensor is, in words: its dtype, its shape, and where it lies, if that is unusual."""
    unusual = (
        ""
        if tensor.layout == torch.strided
        else " sparse"
        if "sparse" in str(tensor.layout)
        else f" {str(tensor.layout).removeprefix('torch.')}"
    )
    nowhere = " on the meta device" if tensor.device.type == "meta" else ""
    return (
        f"{str(tensor.dtype).removeprefix('torch.')}{unusual}"
        f" {list(tensor.shape) if not tensor.is_nested else 'nested'}{nowhere}"
    )
