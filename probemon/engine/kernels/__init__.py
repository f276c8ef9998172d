"""score_probes scores pairs of hidden state and probe, by one of four implementations that agree.

    scores = score_probes(hidden, weights, rows, slots, impl="numba")
    logits = probe_logits(hidden, weights, rows, slots, impl="numba")     # of members of softmax groups
    scores = group_scores(logits, starts, device, impl="numba")           # which begin at `starts`

`reference` is eager torch that gathers weights: the meaning, not the speed. `cpu` (torch) and `numba` read weights
where they lie. `triton` is one fused kernel. Each is bitwise reproducible: a pair's score depends on its hidden state
and its probe alone, never on what else is scored. Between implementations only the order of summation differs.
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
    """Return the device. Raises `ConfigError` where torch does not know it or it is not there."""
    try:
        # With its number: the current device may be another one later.
        known = torch.empty(0, device=torch.device(device)).device
    except (RuntimeError, AssertionError, TypeError, ValueError) as error:  # torch raises each of these
        raise ConfigError(f"device {device!r} cannot be used here: {first_sentence(error)}") from error
    if known.type == "meta":
        raise ConfigError(f"device {device!r} cannot be used: tensors on it have no values. Give cpu or cuda")
    return known


def choose_impl(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """Return the implementation for weights of `dtype` on `device`, and why: triton on a GPU, numba on a CPU.

    It depends on what is installed and never on a measurement: implementations differ in the last bits of a score, and
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
    """Return `impl`, or raise an error that says why it cannot run on `device`. Nothing ever falls back silently."""
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
            raise KernelUnavailable("impl='triton' needs triton, which is published for Linux only: use impl='cpu'")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise KernelUnavailable(
                f"impl='triton' needs a GPU, the weights are on {device}: use impl='cpu', or set TRITON_INTERPRET=1 "
                "before starting to run its (slow) interpreter"
            )
    return impl


def cache_folder(impl: str) -> str | None:
    """Return where a kernel's compiled code is kept from one start to the next: None if nothing is compiled, "" if no
    folder can be written. Raises `ConfigError` if Triton has none, without which it does not compile.
    """
    if impl == "numba":
        from probemon.engine.kernels.numba_compiled import score_pairs

        return str(score_pairs.stats.cache_path or "")
    if impl == "triton":
        from triton import knobs

        give_triton_a_folder()
        return str(knobs.cache.dir)
    return None


def n_compiled() -> int:
    """Return how many functions were compiled in this process because no earlier start had kept their code."""
    names = (f"{__name__}.numba_cached", f"{__name__}.triton_matrix")
    return sum(sys.modules[name].n_compiled() for name in names if name in sys.modules)


def score_probes(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor, *, impl: str) -> Tensor:
    """Return scores [M] fp32 of M pairs: hidden [N, D], rows [M] int64 into it, slots [M] int64 into weights.

    `hidden` is normalised already (`prepare_input`) and is rounded to the dtype of `weights["w1"]` (to bf16 for int8).
    Products and all that follows are fp32. Raises `KernelUnavailable` where `impl` cannot run, and `ConfigError` unless
    every pair is one of a row of `hidden` and a slot of the weights; on a GPU, which would have to be waited for, a
    pair out of range has the score NaN instead.
    """
    score, _ = _functions(impl, weights["w1"].device, weights["w1"].dtype)
    return score(_rounded(hidden, weights), weights, rows, slots)


def probe_logits(hidden: Tensor, weights: Mapping[str, Tensor], rows: Tensor, slots: Tensor, *, impl: str) -> Tensor:
    """Return logits [M] fp32 of M pairs, as `score_probes` does their scores."""
    _, logits = _functions(impl, weights["w1"].device, weights["w1"].dtype)
    return logits(_rounded(hidden, weights), weights, rows, slots)


def group_scores(logits: Floats, starts: Ints, device: torch.device, *, impl: str) -> Floats:
    """Return the softmax [M] of logits [M] on the host over segments, which begin at `starts`, each a whole group.

    `numba` and `triton` have their own: a whole descent of theirs has no other, and both must agree to the last bit.
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
    """Return what gives scores and what gives logits; only what is asked for is imported. Raises what `check_impl`
    raises.
    """
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
    """Return `hidden` rounded as it is read for these weights."""
    check_states(hidden, weights["w1"].shape[2])
    return hidden.to(input_dtype(weights["w1"].dtype))
