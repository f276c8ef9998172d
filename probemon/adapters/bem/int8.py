"""U and V of an adapter as int8, with a scale for each column; all else keeps its precision.

    small = quantize(bem)                  # another adapter for the same model
    with small:
        model.generate(**inputs)
    small.save_pretrained("adapter-int8/")    # attach_bem(model, "adapter-int8/") needs no torchao

Sites widen the matrices in use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from probemon.adapters.bem.sites import device_of
from probemon.errors import BemError, ConfigError, MissingExtra

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem


class Int8Update(nn.Module):
    """One site's frozen update: `U8 [out, r]`, `V8 [in, r]` int8, and column scales `[r]` fp32."""

    U8: Tensor
    V8: Tensor
    U_scale: Tensor
    V_scale: Tensor

    def __init__(self, n_in: int, n_out: int, rank: int, device: torch.device) -> None:
        super().__init__()
        for name, size in (("V", n_in), ("U", n_out)):
            self.register_buffer(f"{name}8", torch.zeros(size, rank, dtype=torch.int8, device=device))
            self.register_buffer(f"{name}_scale", torch.ones(rank, dtype=torch.float32, device=device))

    @property
    def U(self) -> Tensor:
        """`[out, r]` fp32."""
        return self.U8 * self.U_scale

    @property
    def V(self) -> Tensor:
        """`[in, r]` fp32."""
        return self.V8 * self.V_scale


def quantize(bem: Bem) -> Bem:
    """Return a copy of an adapter with int8 U and V, for the same model, not attached, and enabled.

    Controller, learned levels, frozen parameters, `impl`, fallback policy and checkpointing are the same; states and
    counts are separate. Raises `MissingExtra`, `ConfigError`; `BemError` if it is not low_rank, or int8 already.
    """
    from probemon.adapters.bem.attached import Bem  # imports this file

    if not isinstance(bem, Bem):
        raise ConfigError(f"{type(bem).__name__} is not an adapter: give what attach_bem returned")
    if bem.config.form != "low_rank":
        raise BemError(
            f"this adapter's form is {bem.config.form!r}, and only low_rank has factors in int8: keep it in"
            " half (bem.bfloat16()), or train one of form='low_rank' for int8"
        )
    if any(isinstance(update, Int8Update) for update in bem.updates.values()):
        raise BemError("this adapter's U and V are int8 already: quantise the one that it was made from")
    small = type(bem)(
        bem.host, bem.config, impl=bem.impl, fallback=bem.fallback, checkpoint_controller=bem.controller.checkpointed
    )
    small.impl_why = bem.impl_why
    make_int8(small)
    with torch.inference_mode(False):  # as when it is loaded
        others = {name: x.clone() for name, x in bem.state_dict().items() if not name.startswith("updates.")}
        # Assigned: a copy would be rounded.
        small.load_state_dict({**small.state_dict(), **others}, assign=True)
    learns = {name: parameter.requires_grad for name, parameter in bem.named_parameters()}
    for name, parameter in small.named_parameters():
        parameter.requires_grad_(learns[name])
    for key, update in small.updates.items():
        for name in "UV":
            rounded, scale = _round(getattr(bem.updates[key], name).detach())
            getattr(update, f"{name}8").copy_(rounded)
            getattr(update, f"{name}_scale").copy_(scale)
    return small


def make_int8(bem: Bem) -> None:
    """Give an unattached adapter int8 updates of zeros."""
    for site in bem.sites:
        bem.updates[site.key] = Int8Update(site.n_in, site.n_out, bem.config.rank, device_of(bem.updates[site.key]))
    bem.governor = type(bem.governor)(bem.config, bem.sites, bem.updates)


def _round(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix `[n, r]` as int8, and its column scales `[r]` fp32."""
    try:
        from torchao.quantization import Int8Tensor, PerRow
    except ImportError as error:
        raise MissingExtra("int8 U and V need torchao: pip install torchao") from error
    rounded = Int8Tensor.from_hp(matrix.float().T.contiguous(), PerRow())
    return rounded.qdata.T.contiguous(), rounded.scale.flatten().float()
