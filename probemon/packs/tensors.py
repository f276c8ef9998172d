"""Names, dtypes and checks of a pack's tensors.

check_dtypes(described, where)                         # PackCorrupt
first_wrong_threshold("alert_threshold", thresholds)   # a probe, or None
largest_magnitudes(weights)                            # of each probe
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from probemon.core.dtypes import WEIGHTS
from probemon.core.familiarity import Familiar
from probemon.core.probes import Architecture
from probemon.core.score_counts import N_BINS
from probemon.core.softmax_groups import SoftmaxGroups
from probemon.errors import PackCorrupt
from probemon.packs.claims import SET_NAME

MATRICES = ("w1", "w2", "w3")
VECTORS = {
    **dict.fromkeys(("child_ptr", "child_idx", "level", "input"), torch.int64),
    **dict.fromkeys(("alert_threshold", "expand_threshold"), torch.float32),
}
AGGREGATED = "alert_threshold:"  # + aggregator
SCORE_COUNTS = "score_counts:"  # + aggregator, or "each"
ALERT_SET = "alert_threshold@"  # + name of a set that is not in force
FAMILIAR = ("familiar_mean@", "familiar_basis@", "familiar_limit@")  # + number of an input
SOFTMAX_GROUP = "softmax_group"  # group of each probe, -1 for none
ALWAYS = -1.0  # expand threshold of a probe that is always opened
THRESHOLDS = (
    "a threshold lies between 0 and 1, as scores do (1 is exceeded by none), or is NaN (not calibrated); an expand"
    " threshold may be -1 (always opened)"
)


def name_of(dtype: torch.dtype) -> str:
    """Return a manifest's name for a dtype."""
    return next(name for name, weight_dtype in WEIGHTS.items() if weight_dtype is dtype)


class Noted:
    """Remembers a tensor: `changed(tensor)` is True if it was replaced or written to, except in inference mode."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, _version(tensor)

    def changed(self, tensor: Tensor) -> bool:
        return tensor is not self._tensor or _version(tensor) != self._version


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def check_dtypes(described: Mapping[str, Tensor], where: str) -> None:
    """Raise `PackCorrupt` if a required tensor is missing or a dtype is wrong.

    `described`: tensors without values, by name; `where`: their file
    """
    for needed in (*VECTORS, "w1", "b1"):
        if needed not in described:
            raise PackCorrupt(f"{where} holds no tensor {needed!r}: it is not a probe pack's")
    for name, dtype in VECTORS.items():
        tensor = described[name]
        if tensor.dim() != 1 or tensor.dtype != dtype:
            raise PackCorrupt(f"{where}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected a vector of {dtype}")
    for name in Architecture.parameters():
        allowed, expected = (
            (tuple(WEIGHTS.values()), "a float type or int8")
            if name in MATRICES
            else ((torch.float32,), "torch.float32")
        )
        if name in described and described[name].dtype not in allowed:
            raise PackCorrupt(f"{where}: {name} is {described[name].dtype}, expected {expected}")


def check_softmax_group(described: Mapping[str, Tensor], n_probes: int, where: str) -> bool:
    """Return whether a pack has softmax groups. Raises `PackCorrupt`."""
    tensor = described.get(SOFTMAX_GROUP)
    if tensor is not None and (tuple(tensor.shape) != (n_probes,) or tensor.dtype != torch.int32):
        raise PackCorrupt(
            f"{where}: {SOFTMAX_GROUP} is {tensor.dtype} {tuple(tensor.shape)}, expected torch.int32 ({n_probes},)"
        )
    return tensor is not None


def first_other_input(groups: SoftmaxGroups, input_index: Tensor) -> tuple[int, int] | None:
    """Return two members of a softmax group that read different inputs `[P]`, or None."""
    index = input_index.numpy()
    differing = np.flatnonzero(index[groups.members] != index[groups.firsts])
    return (int(groups.firsts[differing[0]]), int(groups.members[differing[0]])) if len(differing) else None


def aggregator_names(described: Mapping[str, Tensor], n_probes: int, where: str) -> tuple[str, ...]:
    """Return the aggregators with alert thresholds. Raises `PackCorrupt`."""
    names = sorted(key.removeprefix(AGGREGATED) for key in described if key.startswith(AGGREGATED))
    for name in names:
        key, tensor = AGGREGATED + name, described[AGGREGATED + name]
        if name in ("", "each") or tuple(tensor.shape) != (n_probes,) or tensor.dtype != torch.float32:
            raise PackCorrupt(
                f"{where}: {key} is {tensor.dtype} {tuple(tensor.shape)}, expected an aggregator's name and"
                f" torch.float32 ({n_probes},)"
            )
    return tuple(names)


def counted_names(described: Mapping[str, Tensor], n_probes: int, where: str) -> tuple[str, ...]:
    """Return the aggregators with counts of calibration scores. Raises `PackCorrupt`."""
    names = sorted(key.removeprefix(SCORE_COUNTS) for key in described if key.startswith(SCORE_COUNTS))
    for name in names:
        tensor = described[SCORE_COUNTS + name]
        if not name or tuple(tensor.shape) != (n_probes, N_BINS) or tensor.dtype != torch.int32:
            raise PackCorrupt(
                f"{where}: {SCORE_COUNTS}{ascii(name)[:80]} is {tensor.dtype} {tuple(tensor.shape)}, expected an"
                f" aggregator's name and torch.int32 ({n_probes}, {N_BINS})"
            )
    return tuple(names)


def alert_set_names(described: Mapping[str, Tensor], n_probes: int, where: str) -> tuple[str, ...]:
    """Return the names of further alert sets. Raises `PackCorrupt`."""
    names = sorted(key.removeprefix(ALERT_SET) for key in described if key.startswith(ALERT_SET))
    for name in names:
        tensor = described[ALERT_SET + name]
        if not SET_NAME.fullmatch(name) or tuple(tensor.shape) != (n_probes,) or tensor.dtype != torch.float32:
            raise PackCorrupt(
                f"{where}: {ALERT_SET}{ascii(name)[:80]} is {tensor.dtype} {tuple(tensor.shape)}, expected a name of"
                f" letters, digits and . _ - and torch.float32 ({n_probes},)"
            )
    return tuple(names)


def familiar_of(
    described: Mapping[str, Tensor], read: Callable[[str], Tensor], n_inputs: int, hidden_size: int, where: str
) -> list[Familiar | None]:
    """Return each input's `Familiar` of calibration states, or None. Raises `PackCorrupt`."""
    result: list[Familiar | None] = [None] * n_inputs
    numbers = {key.rpartition("@")[2] for key in described if key.startswith(FAMILIAR)}
    for text in sorted(numbers):
        names = [prefix + text for prefix in FAMILIAR]
        tensors = [described.get(name) for name in names]
        mean, basis, limit = tensors
        if (
            text not in map(str, range(n_inputs))
            or mean is None
            or basis is None
            or limit is None
            or [tensor.dtype for tensor in (mean, basis, limit)] != [torch.float32, torch.float16, torch.float32]
            or tuple(mean.shape) != (hidden_size,)
            or basis.dim() != 2
            or not 0 < basis.shape[0] < hidden_size == basis.shape[1]
            or tuple(limit.shape) != (1,)
        ):
            raise PackCorrupt(
                f"{where}: {', '.join(names)} are"
                f" {', '.join('missing' if t is None else f'{t.dtype} {tuple(t.shape)}' for t in tensors)}: expected"
                f" float32 [{hidden_size}], float16 [K, {hidden_size}] and float32 [1] of one of {n_inputs} inputs"
            )
        values = [read(name) for name in names]
        if not all(bool(torch.isfinite(value).all()) for value in values):
            raise PackCorrupt(f"{where}: a value of {', '.join(names)} is not finite: fetch the pack again")
        result[int(text)] = Familiar(values[0], values[1], float(values[2]))
    return result


def familiar_tensors(familiar: Sequence[Familiar | None]) -> dict[str, Tensor]:
    """Return the tensors that `familiar_of` reads."""
    tensors: dict[str, Tensor] = {}
    for i, entry in enumerate(familiar):
        if entry is not None:
            limit = torch.tensor([entry.limit], dtype=torch.float32, device="cpu")
            values = (entry.mean.float(), entry.basis.half(), limit)
            tensors |= {prefix + str(i): value.contiguous() for prefix, value in zip(FAMILIAR, values, strict=True)}
    return tensors


def check_golden(described: Mapping[str, Tensor], n_sites: int, n_probes: int, hidden_size: int, where: str) -> None:
    """Raise `PackCorrupt` if golden states or scores are incomplete or misshapen."""
    golden = {name: described[name] for name in ("golden_hidden", "golden_scores") if name in described}
    if len(golden) == 1:
        raise PackCorrupt(
            f"{where} has golden states without their scores, or scores without their states: fetch the pack again"
        )
    if not golden:
        return
    g = golden["golden_hidden"].shape[0] if golden["golden_hidden"].dim() else 0
    expected = {"golden_hidden": (g, n_sites, hidden_size), "golden_scores": (g, n_probes)}
    for name, shape in expected.items():
        if tuple(golden[name].shape) != shape or golden[name].dtype != torch.float32:
            raise PackCorrupt(
                f"{where}: {name} has shape {tuple(golden[name].shape)} in {golden[name].dtype}, expected {shape} in"
                " torch.float32"
            )


def first_wrong_threshold(name: str, thresholds: Tensor) -> int | None:
    """Return the first probe with an invalid threshold in `[P]` (see `THRESHOLDS`), or None."""
    outside = (thresholds < 0) | (thresholds > 1)
    if name == "expand_threshold":
        outside &= thresholds != ALWAYS
    return int(outside.nonzero()[0, 0]) if bool(outside.any()) else None


def largest_magnitudes(weights: Tensor) -> np.ndarray:
    """Return each probe's largest absolute weight `[n]` fp64; inf or NaN if a weight is.

    Compares bits as integers: much faster, and this delays each probe's first use.
    """
    if weights.dtype == torch.int8:
        return np.full(len(weights), 128.0)  # an upper bound
    size = weights.element_size()
    signed = {2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    bits: np.ndarray = weights.reshape(len(weights), -1).view(signed).numpy()
    largest: np.ndarray = (bits & bits.dtype.type((1 << (8 * size - 1)) - 1)).max(axis=1)
    if weights.dtype == torch.bfloat16:  # the upper half of fp32
        return (largest.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return torch.from_numpy(largest).view(weights.dtype).to(torch.float64).numpy()
