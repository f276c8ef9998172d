"""Measures: how large the updates of a forward are, site by site, for whoever asks.

    with ExitStack() as stack:
        bem.measure(stack)                       # until the stack closes; nothing is measured before or after
        bem.measured.register_forward_hook(...)  # is given [B, T, K] of every forward
    names_of(bem)                                # what the K columns are: [("o.3", "ratio"), ("o.4", "ratio"), ...]

Of each site and token:

- `ratio`: the norm of the update over that of the site's own output. Of what was really added: within the limits, and
  rounded to the dtype of the output.
- `moved`: the norm of the update over that of the hidden state that the site's layer hands on, without this update:
  how far the update, as it is added, moves the hidden state. NaN where it is not known to be added to it as it is: of
  queries, keys and values, and where a host makes something else of what its blocks give
  (`probemon.adapters.bem.residual`).
- of every form but low_rank `share`: what the limits leave of the update, from 0 to 1.
- of head groups `energy 0`, `energy 1`, ..: the logarithm of the mean square of the site's input, by group.

Nothing here waits for a GPU, and nothing that is measured is changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from probemon.adapters.bem.form_governance import FormGovernor
from probemon.adapters.bem.forms.head_groups import HeadGroups, group_energy
from probemon.adapters.bem.residual import multipliers
from probemon.adapters.bem.sites import Site

if TYPE_CHECKING:
    from probemon.adapters.bem.attached import Bem


class Measured(nn.Module):
    """Passes on what was measured in a forward, `[B, T, K]`, to whoever puts a hook on it; K is 0 where nobody asked
    for it before the controller ran. Without a hook it is not called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_asking = 0
        # By site key how much of an update arrives in the hidden state, and the layers of these sites: while somebody
        # asks.
        self.multipliers: dict[str, float] = {}
        self.layers: set[int] = set()

    def ask(self, bem: Bem) -> None:
        """Find out what is needed to measure an adapter's updates, before its host runs."""
        self.multipliers = multipliers(bem)
        self.layers = {site.layer for site in bem.sites if site.key in self.multipliers}
        self.n_asking += 1

    def forward(self, sizes: Tensor) -> Tensor:
        return sizes


class Measures:
    """What is measured in one forward. `awaited`: sites, and layers, that have not run yet.

    At sites and layers norms alone are taken, of all tokens; what is made of them is made once a forward.
    """

    def __init__(self, bem: Bem) -> None:
        self._bem, self._layers = bem, bem.measured.layers
        self.awaited: set[str | int] = {*(site.key for site in bem.sites), *self._layers}
        self._updates: dict[str, Tensor] = {}  # norms `[M]`, by site key
        self._outputs: dict[str, Tensor] = {}
        self._hidden: dict[str, Tensor] = {}
        self._energies: dict[str, Tensor] = {}  # `[M, G]`
        self._deltas: dict[int, list[tuple[Site, Tensor]]] = {}
        self._multipliers = bem.measured.multipliers

    @torch.no_grad()
    def take(self, site: Site, x: Tensor, base: Tensor, steered: Tensor) -> None:
        """Take a site's input `[M, in]`, its own output `[M, out]` and what that became."""
        if site.key not in self.awaited:  # in the backward pass a layer may run again
            return
        self.awaited.discard(site.key)
        wide = torch.promote_types(base.dtype, torch.float32)
        delta = steered.to(wide) - base
        self._updates[site.key] = torch.linalg.vector_norm(delta, dim=-1)
        self._outputs[site.key] = torch.linalg.vector_norm(base, dim=-1, dtype=wide)
        form = self._bem.updates[site.key]
        if isinstance(form, HeadGroups):
            self._energies[site.key] = group_energy(x.to(wide), form.n_codes)
        if site.key in self._multipliers:
            self._deltas.setdefault(site.layer, []).append((site, delta))

    @torch.no_grad()
    def take_layer(self, layer: int, hidden: Tensor) -> None:
        """Take the hidden state that a layer hands on."""
        if layer not in self.awaited:
            return
        self.awaited.discard(layer)
        flat = hidden.reshape(-1, hidden.shape[-1])
        for site, delta in self._deltas.pop(layer, []):
            if flat.shape == delta.shape:
                multiplier = self._multipliers[site.key]
                without = torch.sub(flat.to(delta.device, non_blocking=True), delta, alpha=multiplier)
                # Of the update as it is: so the share of both is how far it moves the state.
                self._hidden[site.key] = torch.linalg.vector_norm(without, dim=-1) / multiplier

    @torch.no_grad()
    def all(self, applied: Mapping[str, Tensor], n_tokens: int, device: torch.device) -> Tensor:
        """Return `[M, K]` in fp32: the columns that `names_of` names, NaN where something did not run. `applied`: what
        sites took, by key.
        """
        unknown = torch.full((n_tokens,), math.nan, dtype=torch.float32, device=device)

        def together(norms: dict[str, Tensor]) -> Tensor:
            every = [norms.get(site.key, unknown) for site in self._bem.sites]
            return torch.stack([norm.to(device, torch.float32, non_blocking=True) for norm in every], dim=1)

        updates = together(self._updates)
        columns = [
            _share(updates, together(self._outputs)),
            _share(updates, together(self._hidden)),
        ]
        if _have_shares(self._bem):
            columns.append(together({key: applied[key][:, -1].detach() for key in self._updates}))
        for site in self._bem.sites:
            n_groups = _n_groups(self._bem, site)
            if n_groups:
                energies = self._energies.get(site.key, unknown[:, None].expand(-1, n_groups))
                columns.append(energies.to(device, torch.float32, non_blocking=True))
        return torch.cat(columns, dim=1)


def names_of(bem: Bem) -> list[tuple[str, str]]:
    """Return what the columns are: the name of the site, and what is measured there."""
    sizes = ("ratio", "moved", "share") if _have_shares(bem) else ("ratio", "moved")
    shares = [(site.name, what) for what in sizes for site in bem.sites]
    return shares + [(site.name, f"energy {g}") for site in bem.sites for g in range(_n_groups(bem, site))]


def _have_shares(bem: Bem) -> bool:
    """Whether limits scale updates, not codes."""
    return isinstance(bem.governor, FormGovernor)


def _n_groups(bem: Bem, site: Site) -> int:
    form = bem.updates[site.key]
    return form.n_codes if isinstance(form, HeadGroups) else 0


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Nothing of whatever is 0, unless that is not known; something of nothing is infinite, and so seen."""
    return torch.where((part == 0) & ~whole.isnan(), 0.0, part / whole)
