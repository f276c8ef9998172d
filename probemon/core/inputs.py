"""What a probe reads of a hidden state: normalised in fp32, then rounded to the pack's dtype; what kernels may read."""

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

# Squares this small (or eps, where it is larger) have lost digits of fp32: a state that leaves less cannot be
# normalised.
TINY = 2.0**-100


def prepare_input(hidden: Tensor, spec: InputSpec, dtype: torch.dtype) -> Tensor:
    """Return hidden [N, D] of any float dtype as [N, D] in `dtype`, normalised without affine part.

    Reductions run along D alone, so a row's result does not depend on the batch it came in. What is not finite, and
    what cannot be normalised in fp32 or rounded to `dtype`, has values that are not finite.
    """
    check_states(hidden)
    check_norm(spec.norm, ("none", "layernorm", "rmsnorm"), "core/inputs.py")
    x = hidden.to(torch.float32).contiguous()
    if spec.norm == "layernorm":
        x = x - x.mean(dim=-1, keepdim=True)
    if spec.norm != "none":
        mean = x.square().mean(dim=-1, keepdim=True)
        # inf - inf: a state too large to be squared becomes NaN, which is not seen, instead of zeros, which score 0.5.
        square = mean + (mean - mean) + spec.eps
        if spec.eps < TINY:
            square = torch.where(square < TINY, torch.nan, square)
        x = x * torch.rsqrt(square)
    return x.to(dtype)


def check_norm(norm: str, computed: Sequence[str], where: str) -> None:
    """Raise `ConfigError` unless the norm is one that the code of `where` computes: it would be taken for another."""
    if norm not in computed:
        raise ConfigError(f"{where} computes no norm {norm!r}, only {', '.join(computed)}: use one of these, or add it")


def largest_values(values: Tensor) -> Tensor:
    """The largest absolute value of each row, `[N]` fp32, NaN where one is NaN; on a GPU without waiting."""
    return values.abs().amax(dim=-1).to(torch.float32)


def check_states(hidden: Tensor, width: int | None = None, name: str = "hidden") -> None:
    """Raise `ConfigError` unless hidden is a dense `[N, D]` of real floats, of `width` values each."""
    if hidden.layout != torch.strided or hidden.device.type == "meta" or not hidden.dtype.is_floating_point:
        raise ConfigError(f"{name} is {described(hidden)}: give a dense tensor of a float dtype, with values")
    if hidden.is_neg():  # kernels read what lies in memory, which has the other sign
        raise ConfigError(f"{name} is a view that negates another tensor: give its .resolve_neg()")
    shape = tuple(hidden.shape)
    if len(shape) != 2 or shape[1] != (shape[1] if width is None else width):
        raise ConfigError(f"{name} has shape {shape}, expected [N, {'D' if width is None else width}]")


def check_pairs(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> None:
    """Raise `ConfigError` unless a kernel can read these pairs: every row is one of `hidden`, every slot one of
    `weights`, and the widths agree.

    The numbers are looked at on a CPU. On a GPU that would wait for them: its kernels skip a pair that is out of range,
    whose score is NaN.
    """
    check_lists(hidden, weights, rows, slots)
    for name, numbers, n in (("rows", rows, len(hidden)), ("slots", slots, len(weights["w1"]))):
        if numbers.device.type == "cpu" and len(numbers):
            check_range(name, int(numbers.min()), int(numbers.max()), n)


def check_lists(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor) -> None:
    """Raise what `check_pairs` does, but for the numbers themselves, which nothing looks at."""
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
    """Raise `ConfigError` unless numbers, the least and the most of them, count n things from 0."""
    if not 0 <= least <= most < n:
        raise ConfigError(f"{name} are {least} to {most}, and there are {n}: give numbers from 0 to {n - 1}")


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


# Why a state has no scores: what is no number, in the order in which it is noticed. SEEN: it has scores.
SEEN, NOT_FINITE, NOT_PREPARED, NO_SCORE = range(4)
FEW = 16  # states up to which compiled code that prepares them at once takes less time than a call for each thing


class PreparedInputs(dict[tuple[InputSpec, torch.dtype], Tensor]):
    """Inputs that were prepared already, by what they are and in which dtype; `largest` of those of which it is known:
    the largest absolute value of each state, all of them finite.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest: dict[tuple[InputSpec, torch.dtype], Floats] = {}


class FarTerms(NamedTuple):
    """What says that a prepared state is far: the mean `[D]` fp64, components `[K, D]` fp32, a limit."""

    mean: npt.NDArray[np.float64]
    basis: Floats
    limit: float


# Prepares few states: the values, the largest of each, and, where it is asked for, which are far. The largest are
# missing where something is not finite.
PrepareFew = Callable[[Tensor, InputSpec, torch.dtype, FarTerms | None], tuple[Tensor, Floats | None, Ints | None]]
Normalise = Callable[[Tensor, InputSpec, torch.dtype], Tensor]


@dataclass(frozen=True)
class Inputs:
    """Prepared inputs `[I * N, D]` of N states, one block of N for each of the I specs that probes read.

    `raw`: the hidden states `[N, D]` that each block was made of, or nothing where the values say of themselves what
    they were made of (`normalise_triton`): NaN of what was not finite, infinite of what became so.
    """

    values: Tensor
    n: int
    raw: tuple[Tensor, ...] = ()
    known_largest: Floats | None = None

    def __len__(self) -> int:
        return self.n

    def take(self, which: Ints) -> Inputs:
        """Some of the states."""
        blocks = [_rows(x, which) for x in self.values.split(self.n)]
        values = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
        return Inputs(values, len(which), tuple(_rows(x, which) for x in self.raw))

    @cached_property
    def largest(self) -> Floats:
        """The largest absolute value of each prepared input `[I * N]`: infinite where it overflowed when it was
        normalised or rounded, NaN where the hidden state was not finite. On a GPU the first access waits.
        """
        if self.known_largest is not None:
            return self.known_largest
        if self.values.device.type == "cpu" and self.values.dtype == torch.float32:
            largest: Floats = np.abs(self.values.numpy()).max(axis=-1)  # half of the time of torch's, for one state
        else:
            largest = largest_values(self.values).cpu().numpy()
        if self.raw and not np.isfinite(largest).all():
            raw = np.concatenate([torch.isfinite(x).all(dim=-1).cpu().numpy() for x in self.raw])
            largest = np.where(np.isfinite(largest), largest, np.where(raw, np.inf, np.nan)).astype(np.float32)
        return largest

    @cached_property
    def most(self) -> float:
        """The largest of them all, in fp64; NaN where one is."""
        return float(self.largest[0] if len(self.largest) == 1 else self.largest.max(initial=0))

    @cached_property
    def unseen(self) -> Ints:
        """Of each state `[N]`, SEEN, NOT_FINITE or NOT_PREPARED."""
        return unseen_inputs(self.largest, self.n)


def norms_of(states: Mapping[str, Tensor], sites: Sequence[str]) -> Tensor:
    """Return the L2 norms `[N, S]` fp32 of states `[N, D]` at some sites, on their device."""
    return torch.stack([torch.linalg.vector_norm(states[site].detach().float(), dim=-1) for site in sites], dim=1)


class InputMaker:
    """Prepares hidden states for probes: `specs` says what they read, each spec once, and `dtype` what of.

    `normalise` may take the place of `prepare_input`. `keeps_raw=False`: its values say of themselves what they were
    made of. `rounded`: turns what it makes in fp32 into what it makes in `dtype`, where it can be had so. `few`: makes
    up to `FEW` states, the same to the last bit.
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
        """Normalise hidden states [N, D] in fp32, without rounding them."""
        normalise = self._normalise if self._keeps_raw else prepare_input
        return normalise(hidden.to(self._device), spec, torch.float32)

    def make(self, hidden: Mapping[str, Tensor], prepared: PreparedInputs | None = None) -> Inputs:
        """Prepare hidden states `[N, D]` of every site. `prepared` holds what is there already, and takes the rest."""
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
        known = [one for one in largest if one is not None]
        all_known = None if len(known) < len(largest) else known[0] if len(known) == 1 else np.concatenate(known)
        return Inputs(blocks[0] if len(blocks) == 1 else torch.cat(blocks), len(blocks[0]), raw, all_known)

    def prepare_few(
        self, hidden: Mapping[str, Tensor], spec: InputSpec, terms: FarTerms | None, prepared: PreparedInputs
    ) -> Ints | None:
        """Put states into `prepared`, where they are few and that can be done at once; say which are far, if asked."""
        states, key = hidden[spec.site], (spec, self._dtype)
        if self._few is None or len(states) > FEW or states.device.type != "cpu":
            return None
        prepared[key], largest, far = self._few(states, spec, self._dtype, terms)
        if largest is not None:
            prepared.largest[key] = largest
        return far


def unseen_inputs(largest: Floats, n: int) -> Ints:
    """Of each of N states SEEN, NOT_FINITE or NOT_PREPARED, by the largest values `[I * N]` of its prepared inputs."""
    if np.isfinite(largest).all():
        return np.zeros(n, dtype=np.int64)
    blocks = largest.reshape(-1, n)
    not_prepared = np.where(np.isinf(blocks).any(axis=0), NOT_PREPARED, SEEN)
    return np.where(np.isnan(blocks).any(axis=0), NOT_FINITE, not_prepared)


def _rows(x: Tensor, which: Ints) -> Tensor:
    return x.index_select(0, torch.from_numpy(which).to(x.device))
