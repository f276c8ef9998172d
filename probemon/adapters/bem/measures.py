"""Sizes of the updates of a forward, by site and token.

    with ExitStack() as stack:
        bem.measure(stack)
        bem.measured.register_forward_hook(...)  # is given [B, T, K]
    names_of(bem)                                # of the K columns: [("o.3", "ratio"), ("o.4", "ratio"), ...]

- `ratio`: norm of the update, as added, over that of the site's own output.
- `share` (except low_rank): what the limits leave of the update, 0 to 1.
- `energy 0`, `energy 1`, .. (head groups): log mean square of the site's input.

Nothing here waits for a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from probemon.adapters.bem.form_governance import FormGovernor
from probemon.adapters.bem.forms.head_groups import HeadGroups, group_energy
from probemon.adapters.bem.sites import Site

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem


class Measured(nn.Module):
    """Passes on a forward's measures `[B, T, K]` to hooks; K is 0 if none were asked for in time."""

    n_asking = 0

    def forward(self, sizes: Tensor) -> Tensor:
        return sizes


class Measures:
    """The measures of one forward. `awaited`: sites that have not run yet."""

    def __init__(self, bem: Bem) -> None:
        self._bem = bem
        self.awaited = {site.key for site in bem.sites}
        self._updates: dict[str, Tensor] = {}  # norms `[M]`, by site key
        self._outputs: dict[str, Tensor] = {}
        self._energies: dict[str, Tensor] = {}  # `[M, G]`

    @torch.no_grad()
    def take(self, site: Site, x: Tensor, base: Tensor, steered: Tensor) -> None:
        """Take a site's input `[M, in]`, and its own and steered output `[M, out]`."""
        if site.key not in self.awaited:  # a layer may run again in the backward pass
            return
        self.awaited.discard(site.key)
        wide = torch.promote_types(base.dtype, torch.float32)
        self._updates[site.key] = torch.linalg.vector_norm(steered.to(wide) - base, dim=-1)
        self._outputs[site.key] = torch.linalg.vector_norm(base, dim=-1, dtype=wide)
        form = self._bem.updates[site.key]
        if isinstance(form, HeadGroups):
            self._energies[site.key] = group_energy(x.to(wide), form.n_codes)

    @torch.no_grad()
    def all(self, applied: Mapping[str, Tensor], n_tokens: int, device: torch.device) -> Tensor:
        """Return `[M, K]` fp32 by `names_of`, NaN if something did not run. `applied`: codes by site key."""
        unknown = torch.full((n_tokens,), math.nan, dtype=torch.float32, device=device)

        def together(norms: dict[str, Tensor]) -> Tensor:
            every = [norms.get(site.key, unknown) for site in self._bem.sites]
            return torch.stack([norm.to(device, torch.float32, non_blocking=True) for norm in every], dim=1)

        updates = together(self._updates)
        columns = [_share(updates, together(self._outputs))]
        if _have_shares(self._bem):
            columns.append(together({key: applied[key][:, -1].detach() for key in self._updates}))
        for site in self._bem.sites:
            n_groups = _n_groups(self._bem, site)
            if n_groups:
                energies = self._energies.get(site.key, unknown[:, None].expand(-1, n_groups))
                columns.append(energies.to(device, torch.float32, non_blocking=True))
        return torch.cat(columns, dim=1)


def names_of(bem: Bem) -> list[tuple[str, str]]:
    """Return each column's site name and measure."""
    sizes = ("ratio", "share") if _have_shares(bem) else ("ratio",)
    shares = [(site.name, what) for what in sizes for site in bem.sites]
    return shares + [(site.name, f"energy {g}") for site in bem.sites for g in range(_n_groups(bem, site))]


def _have_shares(bem: Bem) -> bool:
    return isinstance(bem.governor, FormGovernor)


def _n_groups(bem: Bem, site: Site) -> int:
    form = bem.updates[site.key]
    return form.n_codes if isinstance(form, HeadGroups) else 0


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """`part / whole`; 0 for a part of 0, unless the whole is NaN."""
    return torch.where((part == 0) & ~whole.isnan(), 0.0, part / whole)
