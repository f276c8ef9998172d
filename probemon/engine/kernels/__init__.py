"""Scores of (hidden state, probe) pairs by one of four implementations.

    scores = score_probes(hidden, weights, rows, slots, impl="numba")
    logits = probe_logits(hidden, weights, rows, slots, impl="numba")     # of softmax groups' members
    scores = group_scores(logits, starts, device, impl="numba")           # groups begin at `starts`

`reference`: eager torch. `cpu` (torch) and `numba` read weights in place. `triton`: one fused kernel. A score depends
bitwise only on its state and probe; implementations differ in the order of summation.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from probemon.core.dtypes import input_dtype
from probemon.core.inputs import check_states
from probemon.core.reference import logits_reference, score_reference
from probemon.core.softmax_groups import Floats, Ints, softmax
from probemon.errors import ConfigError, KernelUnavailable
from probemon.util.cache_folders import give_triton_a_folder
from probemon.util.checks import check_choice
from probemon.util.first_sentence import first_sentence

IMPLS = ("reference", "cpu", "numba", "triton")
_OfPairs = Callable[[Tensor, Mapping[str, Tensor], Tensor, Tensor], Tensor]
_NUMBA = (torch.float32, torch.bfloat16, torch.int8)


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def check_device(device: str | torch.device) -> torch.device:
    """Return the device with its number. Raises `ConfigError` if it cannot be used."""
    try:
        # With its number, since the current device may change.
        resolved = torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"device {device!r} cannot be used here: {first_sentence(error)}") from error
    if resolved.type == "meta":
        raise ConfigError(f"device {device!r} cannot be used: tensors on it have no values. Give cpu or cuda")
    return resolved


def choose_impl(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return the implementation for weights of `dtype` on `device`, and why: triton on a GPU, numba on a CPU.

    It depends on what is installed, never on a measurement: implementations differ in the last bits of a score, and
    two runs of one program must not.
    """
    if device.type == "cuda":
        return "triton", "the weights are on a GPU"
    if device.type != "cpu":
        return "reference", f"no other runs on {device.type}"
    if dtype not in _NUMBA:
        return "cpu", f"numba does not read {dtype}"
    if not _installed("numba"):
        return "cpu", "numba is not installed (probemon[cpu])"
    return "numba", "the weights are on a CPU"


def check_impl(impl: str, device: torch.device, dtype: torch.dtype) -> str:
    """Return `impl`. Raises `KernelUnavailable`, `ConfigError`."""
    check_choice("impl", impl, IMPLS)
    if impl in ("cpu", "numba") and device.type != "cpu":
        raise KernelUnavailable(
            f"impl={impl!r} runs on a CPU, the weights are on {device}: use 'triton' or 'reference'"
        )
    if impl == "numba":
        if not _installed("numba"):
            raise KernelUnavailable("impl='numba' needs numba: pip install 'probemon[cpu]', or use impl='cpu'")
        if dtype not in _NUMBA:
            raise KernelUnavailable(f"impl='numba' reads float32, bfloat16 and int8 packs, not {dtype}: use impl='cpu'")
    if impl == "triton":
        if not _installed("triton"):
            other = "cpu" if device.type == "cpu" else "reference"
            raise KernelUnavailable(
                f"impl='triton' needs triton: pip install 'probemon[triton]' (on Linux), or use impl={other!r}"
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise KernelUnavailable(
                f"impl='triton' needs a GPU, the weights are on {device}: use impl='cpu', or set TRITON_INTERPRET=1 "
                "before starting to run its (slow) interpreter"
            )
    return impl


def cache_folder(impl: str) -> str | None:
    """Folder of compiled code; None if nothing is compiled, "" if none is writable. Raises `ConfigError`."""
    if impl == "numba":
        from probemon.engine.kernels.numba_compiled import score_pairs

        return str(score_pairs.stats.cache_path or "")
    if impl == "triton":
        from triton import knobs

        give_triton_a_folder()
        return str(knobs.cache.dir)
    return None


def n_compiled() -> int:
    """Number of functions compiled in this process, not loaded from a cache."""
    names = (f"{__name__}.numba_cached", f"{__name__}.triton_matrix")
    return sum(sys.modules[name].n_compiled() for name in names if name in sys.modules)


def score_probes(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor, *, impl: str) -> Tensor:
    """Return scores [M] fp32 of M pairs: hidden [N, D], rows [M] int64 into it, slots [M] int64 into weights.

    `hidden` is normalised (`prepare_input`) and rounded here to the weights' dtype (bf16 for int8). Sums are fp32.
    Raises `KernelUnavailable`, and `ConfigError` for pairs out of range; on a GPU these score NaN.
    """
    score, _ = _functions(impl, weights["w1"].device, weights["w1"].dtype)
    return score(_rounded(hidden, weights), weights, rows, slots)


def probe_logits(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor, *, impl: str) -> Tensor:
    """Return logits [M] fp32; arguments as `score_probes`."""
    _, logits = _functions(impl, weights["w1"].device, weights["w1"].dtype)
    return logits(_rounded(hidden, weights), weights, rows, slots)


def group_scores(logits: Floats, starts: Ints, device: torch.device, *, impl: str) -> Floats:
    """Return the softmax [M] of logits [M] in host memory over whole groups, which begin at `starts`.

    `numba` and `triton` use their descents' code, for equal bits.
    """
    if impl == "numba":
        from probemon.engine.kernels.numba_cpu import softmax_numba

        return softmax_numba(logits, starts)
    if impl == "triton":
        from probemon.engine.kernels.triton_softmax import softmax_triton

        return softmax_triton(logits, starts, device)
    return softmax(logits, starts)


@functools.cache
def _functions(impl: str, device: torch.device, dtype: torch.dtype) -> tuple[_OfPairs, _OfPairs]:
    check_impl(impl, device, dtype)
    if impl == "reference":
        return score_reference, logits_reference
    if impl == "cpu":
        from probemon.engine.kernels.cpu import logits_cpu, score_cpu

        return score_cpu, logits_cpu
    if impl == "numba":
        from probemon.engine.kernels.numba_cpu import logits_numba, score_numba

        return score_numba, logits_numba
    from probemon.engine.kernels.triton_pairs import logits_triton, score_triton

    return score_triton, logits_triton


def _rounded(hidden: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    check_states(hidden, weights["w1"].shape[2])
    return hidden.to(input_dtype(weights["w1"].dtype))
