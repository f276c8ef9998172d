"""Probe inputs: hidden states normalised in fp32 and rounded to the pack's dtype."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints
from probemon.core.probes import InputSpec
from probemon.core.scores import Floats
from probemon.errors import ConfigError

# Smaller mean squares have lost fp32 digits: such a state cannot be normalised.
TINY = 2.0**-100


def prepare_input(hidden: Tensor, spec: InputSpec, dtype: torch.dtype) -> Tensor:
    """Return hidden [N, D] normalised without affine part, in `dtype`.

    Rows do not depend on their batch. States that cannot be normalised or rounded become non-finite.
    """
    check_states(hidden)
    check_norm(spec.norm, ("none", "layernorm", "rmsnorm"), "core/inputs.py")
    x = hidden.to(torch.float32).contiguous()
    if spec.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    if spec.norm != "none":
        mean = x.square().mean(dim=-1, keepdim=True)
        # inf - inf: too large a state becomes NaN, not zeros, which would score 0.5.
        square = mean + (mean - mean) + spec.eps
        if spec.eps < TINY:
            square = torch.where(square < TINY, torch.nan, square)
        x = x * torch.rsqrt(square)
    return x.to(dtype)


def check_norm(norm: str, computed: Sequence[str], where: str) -> None:
    """Raise `ConfigError` unless the code in `where` computes the norm."""
    if norm not in computed:
        raise ConfigError(
            f"{where} does not compute norm {norm!r}, only {', '.join(computed)}: use one of these, or add it"
        )


def largest_values(values: Tensor) -> Tensor:
    """Largest absolute value of each row, `[N]` fp32, or NaN; does not wait for a GPU."""
    return values.abs().amax(dim=-1).to(torch.float32)


def check_states(hidden: Tensor, width: int | None = None, name: str = "hidden") -> None:
    """Raise `ConfigError` unless hidden is a dense float `[N, D]`, with D = `width`."""
    if hidden.layout != torch.strided or hidden.device.type == "meta" or not hidden.dtype.is_floating_point:
        raise ConfigError(f"{name} is {described(hidden)}: give a dense tensor of a float dtype, with values")
    if hidden.is_neg():  # kernels read memory, which has the other sign
        raise ConfigError(f"{name} is a view that negates another tensor: give its .resolve_neg()")
    shape = tuple(hidden.shape)
    if len(shape) != 2 or shape[1] != (shape[1] if width is None else width):
        raise ConfigError(f"{name} has shape {shape}, expected [N, {'D' if width is None else width}]")


def check_pairs(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> None:
    """Raise `ConfigError` unless rows are of `hidden`, slots of `weights`, and widths agree.

    Ranges are checked on a CPU only; GPU kernels give NaN for a pair out of range.
    """
    check_lists(hidden, weights, rows, slots)
    for name, numbers, n in (("rows", rows, len(hidden)), ("slots", slots, len(weights["w1"]))):
        if numbers.device.type == "cpu" and len(numbers):
            check_range(name, int(numbers.min()), int(numbers.max()), n)


def check_lists(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> None:
    """Raise as `check_pairs`, without looking at the numbers."""
    check_states(hidden, weights["w1"].shape[2])
    device, shape = weights["w1"].device, slots.shape
    for name, numbers in (("rows", rows), ("slots", slots)):
        if numbers.dtype != torch.int64 or numbers.dim() != 1 or numbers.shape != shape:
            raise ConfigError(
                f"{name} is {described(numbers)}: expected int64 [M], a row and a slot for each of M pairs"
            )
        if not numbers.device == hidden.device == device:
            raise ConfigError(
                f"hidden is on {hidden.device}, {name} on {numbers.device}, the weights on {device}: put them on one"
                " device"
            )


def check_range(name: str, least: int, most: int, n: int) -> None:
    """Raise `ConfigError` unless numbers from `least` to `most` are within 0..n-1."""
    if not 0 <= least <= most < n:
        raise ConfigError(f"{name} are {least} to {most}, and there are {n}: give numbers from 0 to {n - 1}")


def described(tensor: Tensor) -> str:
    """Describe a tensor's dtype, shape, layout and device."""
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


# Why a state has no scores; SEEN: it has.
SEEN, NOT_FINITE, NOT_PREPARED, NO_SCORE = range(4)
FEW = 16  # states; above, one compiled call is slower


class PreparedInputs(dict[tuple[InputSpec, torch.dtype], Tensor]):
    """Prepared inputs by spec and dtype. `largest`: per state, if known and all finite."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[tuple[InputSpec, torch.dtype], Floats] = {}


class FarTerms(NamedTuple):
    """Familiarity terms: mean `[D]` fp64, components `[K, D]` fp32, limit."""

    mean: npt.NDArray[np.float64]
    basis: Floats
    limit: float


# Returns values, the largest of each (None unless all finite), and which are far.
PrepareFew = Callable[[Tensor, InputSpec, torch.dtype, FarTerms | None], tuple[Tensor, Floats | None, Ints | None]]
Normalise = Callable[[Tensor, InputSpec, torch.dtype], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Prepared inputs `[I * N, D]` of N states, one block per spec.

    `raw`: the hidden states `[N, D]` of each block; empty if the values distinguish a non-finite state (NaN) from an
    overflow (inf).
    """

    values: Tensor
    n: int
    raw: tuple[Tensor, ...] = ()
    known_largest: Floats | None = None

    def __len__(self) -> int:
        return self.n

    def take(self, which: Ints) -> Inputs:
        """Return some of the states."""
        blocks = [_rows(x, which) for x in self.values.split(self.n)]
        values = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return Inputs(values, len(which), tuple(_rows(x, which) for x in self.raw))

    @cached_property
    def largest(self) -> Floats:
        """Return the largest absolute value of each prepared input, `[I * N]`.

        inf if normalising or rounding it overflowed, NaN if the hidden state was not finite. On a GPU the first access
        waits for it.
        """
        if self.known_largest is not None:
            return self.known_largest
        if self.values.device.type == "cpu" and self.values.dtype == torch.float32:
            largest: Floats = np.abs(self.values.numpy()).max(axis=-1)  # faster for one state
        else:
            largest = largest_values(self.values).cpu().numpy()
        if self.raw and not np.isfinite(largest).all():
            raw = np.concatenate([torch.isfinite(x).all(dim=-1).cpu().numpy() for x in self.raw])
            largest = np.where(np.isfinite(largest), largest, np.where(raw, np.inf, np.nan)).astype(np.float32)
        return largest

    @cached_property
    def most(self) -> float:
        """Largest of all; NaN if one is."""
        return float(self.largest[0] if len(self.largest) == 1 else self.largest.max(initial=0))

    @cached_property
    def unseen(self) -> Ints:
        """SEEN, NOT_FINITE or NOT_PREPARED for each state `[N]`."""
        return unseen_inputs(self.largest, self.n)


def norms_of(states: Mapping[str, Tensor], sites: Sequence[str]) -> Tensor:
    """Return L2 norms `[N, S]` fp32 of states `[N, D]` at some sites, on their device."""
    return torch.stack([torch.linalg.vector_norm(states[site].detach().float(), dim=-1) for site in sites], dim=1)


class InputMaker:
    """Prepares hidden states for probes, for distinct `specs`, in `dtype`.

    - `normalise`: replaces `prepare_input`; with `keeps_raw=False` its values need no `Inputs.raw`.
    - `rounded`: converts its fp32 values to `dtype`.
    - `few`: prepares up to `FEW` states, bit for bit the same.
    """

    def __init__(
        self,
        specs: Sequence[InputSpec],
        dtype: torch.dtype,
        device: torch.device,
        normalise: Normalise | None = None,
        *,
        keeps_raw: bool = True,
        rounded: Callable[[Tensor, torch.dtype], Tensor] | None = None,
        few: PrepareFew | None = None,
    ) -> None:
        self.specs, self._dtype, self._device, self._few = list(specs), dtype, device, few
        self._normalise, self._keeps_raw, self._rounded = normalise or prepare_input, keeps_raw, rounded

    def exact(self, hidden: Tensor, spec: InputSpec) -> Tensor:
        """Normalise hidden states [N, D] in fp32."""
        normalise = self._normalise if self._keeps_raw else prepare_input
        return normalise(hidden.to(self._device), spec, torch.float32)

    def make(self, hidden: Mapping[str, Tensor], prepared: PreparedInputs | None = None) -> Inputs:
        """Prepare hidden states `[N, D]` of every site; reuses and fills `prepared`."""
        prepared = PreparedInputs() if prepared is None else prepared
        blocks, largest = [], list[Floats | None]()
        for spec in self.specs:
            key, exact = (spec, self._dtype), (spec, torch.float32)
            if key not in prepared and exact not in prepared:
                self.prepare_few(hidden, spec, None, prepared)
            if key not in prepared and self._rounded is not None and exact in prepared:
                prepared[key] = self._rounded(prepared[exact], self._dtype)
            elif key not in prepared:
                prepared[key] = self._normalise(hidden[spec.site].to(self._device), spec, self._dtype)
            blocks.append(prepared[key])
            largest.append(prepared.largest.get(key))
        raw = tuple(hidden[spec.site] for spec in self.specs) if self._keeps_raw else ()
        finite = [values for values in largest if values is not None]
        joined = None if len(finite) < len(largest) else finite[0] if len(finite) == 1 else np.concatenate(finite)
        return Inputs(blocks[0] if len(blocks) == 1 else torch.cat(blocks), len(blocks[0]), raw, joined)

    def prepare_few(
        self, hidden: Mapping[str, Tensor], spec: InputSpec, terms: FarTerms | None, prepared: PreparedInputs
    ) -> Ints | None:
        """Put few states on a CPU into `prepared`; return which are far, if `terms` are given."""
        states, key = hidden[spec.site], (spec, self._dtype)
        if self._few is None or len(states) > FEW or states.device.type != "cpu":
            return None
        prepared[key], largest, far = self._few(states, spec, self._dtype, terms)
        if largest is not None:
            prepared.largest[key] = largest
        return far


def unseen_inputs(largest: Floats, n: int) -> Ints:
    """SEEN, NOT_FINITE or NOT_PREPARED for each of N states, from `largest [I * N]`."""
    if np.isfinite(largest).all():
        return np.zeros(n, dtype=np.int64)
    blocks = largest.reshape(-1, n)
    not_prepared = np.where(np.isinf(blocks).any(axis=0), NOT_PREPARED, SEEN)
    return np.where(np.isnan(blocks).any(axis=0), NOT_FINITE, not_prepared)


def _rows(x: Tensor, which: Ints) -> Tensor:
    return x.index_select(0, torch.from_numpy(which).to(x.device))
