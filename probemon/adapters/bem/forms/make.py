"""Builds and applies the form of a site."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.func import functional_call

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.forms.film import Film
from probemon.adapters.bem.forms.form import Form
from probemon.adapters.bem.forms.head_groups import HeadGroups
from probemon.adapters.bem.forms.kronecker import Kronecker, closest_shapes
from probemon.adapters.bem.forms.rank_mask import RankMask
from probemon.errors import ConfigError


def make_form(config: BemConfig, n_in: int, n_out: int, n_heads: int | None, generator: torch.Generator) -> Form:
    """Return a fresh form. Raises `ConfigError` if it does not fit the model's `n_heads`."""
    if config.form == "head_groups":
        assert config.groups is not None
        if n_heads is None or n_heads % config.groups:
            heads = "an unknown number of heads" if n_heads is None else f"{n_heads} heads"
            raise ConfigError(
                f"groups is {config.groups}, and the model has {heads}: give a number of groups that divides it"
            )
        return HeadGroups(
            n_in,
            n_out,
            groups=config.groups,
            rank=config.rank,
            scale=config.scale,
            reads=config.gate_inputs,
            n_heads=n_heads,
            generator=generator,
        )
    if config.form == "rank_mask":
        assert config.active is not None
        return RankMask(
            n_in,
            n_out,
            rank=config.rank,
            active=config.active,
            scale=config.scale,
            hadamard=config.hadamard,
            generator=generator,
        )
    if config.form == "kronecker":
        assert config.terms is not None
        shapes = closest_shapes(n_in, n_out)
        return Kronecker(n_in, n_out, shapes=shapes, terms=config.terms, scale=config.scale, generator=generator)
    return Film(n_in, n_out, n_codes=config.rank, bound=config.bound)


def steer(
    form: Form,
    x: Tensor,
    applied: Tensor,
    base: Tensor,
    *,
    read: Tensor | None = None,
    values: Tensor | None = None,
) -> Tensor:
    """Return base `[M, out]` plus updates of x `[M, in]`, computed in fp32 or wider and rounded once.

    `applied [M, n + 1]`: codes, then shares.
    `read`, `values`: for `HeadGroups.attenuation`: x before dropout, and the token's own values.
    """
    parameters = dict(form.named_parameters())
    wide = torch.promote_types(base.dtype, torch.float32)
    for tensor in (x, applied, *parameters.values()):
        wide = torch.promote_types(wide, tensor.dtype)
    share = applied[:, -1:].to(wide)
    if isinstance(form, HeadGroups) and form.reads:
        share = share * form.attenuation(
            (x if read is None else read).to(wide), None if values is None else values.to(wide)
        )
    arguments = x.to(wide), applied[:, :-1].to(wide), base.to(wide), share
    if all(parameter.dtype == wide for parameter in parameters.values()):
        steered: Tensor = form(*arguments)
    else:
        steered = functional_call(form, {name: tensor.to(wide) for name, tensor in parameters.items()}, arguments)
    return steered.to(base.dtype)
