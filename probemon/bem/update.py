"""The generated update of one site: `scale * ((x V) * c) U^T`, by explicit implementations that agree.

    delta = generated_update(x, V, U, codes, scale, impl="reference")                   # [M, out]
    # y + the same; rows with all |c| <= eps keep y
    output = generated_update(x, V, U, codes, scale, base=y, eps=0.01, impl="triton")
    error_bound(x, V, U, scale, eps)  # [M]: what leaving them out can cost

`reference` is eager torch. `triton` is one fused kernel. Both compute in fp32 (fp64 stays fp64) and round once.
A requested implementation that cannot run raises.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable

import torch
from torch import Tensor

from probemon.errors import ConfigError, KernelUnavailable

Update = Callable[..., Tensor]


def reference(
    x: Tensor,
    V: Tensor,
    U: Tensor,
    codes: Tensor,
    scale: float,
    *,
    base: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """Eager torch: as `generated_update`."""
    if eps:  # of eps = 0 nothing is left out: what is computed of codes of zero is zero, and they have a gradient
        rows = (~(codes.abs() <= eps).all(dim=1)).nonzero()[
            :, 0
        ]  # not abs > eps: a NaN is not left out, so that it is seen
        if len(rows) < len(x):
            kept = x.new_zeros(len(x), len(U)) if base is None else base
            return kept.index_copy(
                0, rows, reference(x[rows], V, U, codes[rows], scale, base=None if base is None else base[rows])
            )
    narrow = x.dtype if base is None else base.dtype
    if narrow != torch.float32 or not x.dtype == V.dtype == codes.dtype == narrow:
        wide = torch.promote_types(torch.promote_types(x.dtype, V.dtype), torch.float32)
        x, V, U, codes, base = (
            x.to(wide),
            V.to(wide),
            U.to(wide),
            codes.to(wide),
            None if base is None else base.to(wide),
        )
    weighted = x @ V * codes
    out = (weighted @ U.T) * scale if base is None else torch.addmm(base, weighted, U.T, alpha=scale)
    return out.to(narrow)


def _triton() -> Update:
    kernel: Update = importlib.import_module("probemon.bem.kernels.update").generated_update

    def fused(x: Tensor, *given: object, base: Tensor | None, eps: float | None) -> Tensor:
        # With 0 it leaves out rows of zeros, which is exact, and gives their codes the gradient that they have. Under
        # autocast a base is narrower than its x.
        return kernel(x if base is None else x.to(base.dtype), *given, base=base, eps=eps or 0.0)

    return fused


# Each gives its function when first used: triton is imported where it is asked for.
IMPLS: dict[str, Callable[[], Update]] = {"reference": lambda: reference, "triton": _triton}


def check_update_impl(impl: str, device: torch.device) -> str:
    """`impl`, or an error that says why it cannot run on `device`. Raises `ConfigError`, `KernelUnavailable`."""
    if impl not in IMPLS:
        raise ConfigError(f"impl {impl!r}: expected one of {', '.join(IMPLS)}; attach_bem takes 'auto' too")
    if impl == "triton":
        remedy = "use impl='reference' (of attach_bem, impl='auto' takes what runs)"
        if importlib.util.find_spec("triton") is None:
            raise KernelUnavailable(f"impl='triton' needs triton, which is published for Linux only: {remedy}")
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise KernelUnavailable(
                f"impl='triton' needs a GPU, the update is computed on {device}: {remedy}, or set TRITON_INTERPRET=1 "
                "before starting to run its (slow) interpreter"
            )
    return impl


def generated_update(
    x: Tensor,
    V: Tensor,
    U: Tensor,
    codes: Tensor,
    scale: float,
    *,
    base: Tensor | None = None,
    eps: float | None = None,
    impl: str = "reference",
) -> Tensor:
    """x [M, in], V [in, r], U [out, r], codes [M, r] -> [M, out] in the dtype of x; with `base` [M, out], base plus it,
    in its dtype.

    With `eps` over 0, rows of which every `|c| <= eps` are left out: their update is zero, and has no gradient. What
    that changes is bounded by `error_bound`. An eps of 0 changes nothing. On a GPU the reference then waits for the
    number of rows. Raises `ConfigError`, `KernelUnavailable`.
    """
    if impl == "reference":
        return reference(x, V, U, codes, scale, base=base, eps=eps)
    check_update_impl(impl, V.device)
    return IMPLS[impl]()(x, V, U, codes, scale, base=base, eps=eps)


def error_bound(x: Tensor, V: Tensor, U: Tensor, scale: float, eps: float) -> Tensor:
    """`scale * |U| |V| * eps * |x|` `[M]`: no row with `eps` is further from the whole update in the Euclidean norm.

    |U| and |V| are spectral norms, |x| is Euclidean. Of a row left out, `diag(c)` has a spectral norm of at most eps,
    and the spectral norm of a product is at most the product of theirs.
    """
    norms = torch.linalg.matrix_norm(U.float(), 2) * torch.linalg.matrix_norm(V.float(), 2)
    return abs(scale) * norms * eps * x.float().norm(dim=1)
