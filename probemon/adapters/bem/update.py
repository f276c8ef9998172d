"""The generated update of one site, `scale * ((x V) * c) U^T`.

    delta = generated_update(x, V, U, codes, scale, impl="reference")                   # [M, out]
    output = generated_update(x, V, U, codes, scale, base=y, eps=0.01, impl="triton")
    choose_impl("auto", devices, config)                                    # ("triton", why), if that runs

`reference` is eager torch, `triton` one fused kernel. Both compute in fp32 (fp64 stays fp64) and round once.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from probemon.adapters.bem.config import BemConfig
from probemon.errors import ConfigError, KernelUnavailable

LOG = logging.getLogger("probemon")
IMPLS = ("reference", "triton")
MOST_RANK, MOST_WIDTH = 64, 1024  # of the kernels; here, to need no Triton


def check_update_impl(impl: str, device: torch.device) -> None:
    """Raise `ConfigError` or `KernelUnavailable` if `impl` cannot run on `device`."""
    if impl not in IMPLS:
        raise ConfigError(f"impl {impl!r}: expected one of {', '.join(IMPLS)}; attach_bem takes 'auto' too")
    if impl == "triton":
        remedy = "use impl='reference' (attach_bem's impl='auto' takes what runs)"
        if importlib.util.find_spec("triton") is None:
            raise KernelUnavailable(
                f"impl='triton' needs triton: pip install 'probemon[triton]' (on Linux), or {remedy}"
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            raise KernelUnavailable(
                f"impl='triton' needs a GPU, the update is computed on {device}: {remedy}, or set TRITON_INTERPRET=1 "
                "before starting to run its (slow) interpreter"
            )


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
    """Return the updates `[M, out]` of x `[M, in]` by V `[in, r]`, U `[out, r]` and codes `[M, r]`, in x's dtype.

    `base [M, out]`: added, and gives the dtype.
    `eps`: if over 0, rows with every `|c| <= eps` get no update and no gradient: an error of at most `scale * |U| |V|
    * eps * |x|` (spectral norms). On a GPU the reference then waits.

    Raises `ConfigError`, `KernelUnavailable`.
    """
    if impl != "reference":
        check_update_impl(impl, V.device)
        # Here: it imports Triton. With eps 0 it skips zeros, but gives their codes gradients.
        kernel = importlib.import_module("probemon.adapters.bem.kernels.update").generated_update
        # Under autocast a base is narrower than its x.
        x = x if base is None else x.to(base.dtype)
        update: Tensor = kernel(x, V, U, codes, scale, base=base, eps=eps or 0.0)
        return update
    if eps:  # at 0, codes of zero keep a gradient
        # Not abs > eps: a NaN must stay visible.
        rows = (~(codes.abs() <= eps).all(dim=1)).nonzero()[:, 0]
        if len(rows) < len(x):
            unchanged = x.new_zeros(len(x), len(U)) if base is None else base
            changed = generated_update(x[rows], V, U, codes[rows], scale, base=None if base is None else base[rows])
            return unchanged.index_copy(0, rows, changed)
    narrow = x.dtype if base is None else base.dtype
    if narrow != torch.float32 or not x.dtype == V.dtype == codes.dtype == narrow:
        wide = torch.promote_types(torch.promote_types(x.dtype, V.dtype), torch.float32)
        x, V, U, codes = (tensor.to(wide) for tensor in (x, V, U, codes))
        base = None if base is None else base.to(wide)
    weighted = x @ V * codes
    out = (weighted @ U.T) * scale if base is None else torch.addmm(base, weighted, U.T, alpha=scale)
    return out.to(narrow)


def choose_impl(impl: str, devices: Sequence[torch.device], config: BemConfig) -> tuple[str, str]:
    """Return the implementation for sites on `devices`, and why; "auto" tries the kernel. Raises `ConfigError`,
    `KernelUnavailable` for one that cannot run.
    """
    if config.form != "low_rank":
        only = f"updates of form {config.form!r} have no kernel"
        if impl == "triton":
            raise ConfigError(f"{only}: use impl='reference' or 'auto'")
        if impl == "auto":
            return "reference", only
    too_large = config.rank > MOST_RANK or config.width > MOST_WIDTH
    sizes = (
        f"the kernels have ranks to {MOST_RANK} and widths to {MOST_WIDTH}, this adapter has rank {config.rank} and"
        f" width {config.width}"
    )
    if impl == "triton" and too_large:
        raise ConfigError(f"{sizes}: use impl='reference' or 'auto'")
    if impl == "auto":
        chosen, why = ("reference", sizes) if too_large else _best_impl(devices)
        LOG.info("updates are computed by %s: %s", chosen, why)
        return chosen, why
    for device in set(devices):
        check_update_impl(impl, device)
    return impl, "it was asked for"


def _best_impl(devices: Sequence[torch.device]) -> tuple[str, str]:
    unique = sorted(set(devices), key=str)
    other = next((device for device in unique if device.type != "cuda"), None)
    if other is not None:
        return "reference", f"the kernels are for GPUs, and a site or the layer that is read is on {other}"
    for device in unique:
        try:
            x, v, codes = (torch.ones(2, n, dtype=torch.float32, device=device) for n in (16, 16, 2))
            generated_update(x, v.T.contiguous(), v.T.contiguous(), codes, 1.0, impl="triton").sum().item()
        except KernelUnavailable as error:
            return "reference", str(error)
        except Exception as error:  # a missing compiler, an old driver
            return "reference", f"the kernel does not run on {device}: {type(error).__name__}: {error}"
    return "triton", "every site is on a GPU, and the kernel runs"
