"""Forms of an adapter's sites, made of its settings.

form = make_form(config, n_in, n_out, n_heads, generator)      # of form="head_groups", "rank_mask", "kronecker", "film"
steered = steer(form, x, applied, base)                         # x, applied and base of a forward, in its dtypes
"""

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
    """Return a fresh form of a site. Raises `ConfigError` where it does not fit the host's `n_heads`."""
    if config.form == "head_groups":
        assert config.groups is not None
        if n_heads is None or n_heads % config.groups:
            of_host = "a number of heads that is not known" if n_heads is None else f"{n_heads} heads"
            raise ConfigError(
                f"groups is {config.groups}, and the host has {of_host}: give a number of groups that divides it"
            )
        return HeadGroups(n_in, n_out, groups=config.groups, rank=config.rank, scale=config.scale, generator=generator)
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


def steer(form: Form, x: Tensor, applied: Tensor, base: Tensor) -> Tensor:
    """Return base `[M, out]` with the updates of x `[M, in]`, in the dtype of base: computed in fp32 or wider, rounded
    once. `applied [M, n + 1]`: codes, and what the limits leave of each update.
    """
    parameters = dict(form.named_parameters())
    wide = torch.promote_types(base.dtype, torch.float32)
    for tensor in (x, applied, *parameters.values()):
        wide = torch.promote_types(wide, tensor.dtype)
    given = x.to(wide), applied[:, :-1].to(wide), base.to(wide), applied[:, -1:].to(wide)
    if all(parameter.dtype == wide for parameter in parameters.values()):
        steered: Tensor = form(*given)
    else:
        steered = functional_call(form, {name: tensor.to(wide) for name, tensor in parameters.items()}, given)
    return steered.to(base.dtype)
