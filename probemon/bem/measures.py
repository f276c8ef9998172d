"""Measures: how large the updates of a forward are, site by site, for whoever asks.

    with ExitStack() as stack:
        bem.measure(stack)                       # until the stack closes; nothing is measured before or after
        bem.measured.register_forward_hook(...)  # is given [B, T, K] of every forward
    names_of(bem)                                # what the K columns are: [("o.3", "ratio"), ("o.3", "moved"), ...]

Of each site and token:

- `ratio`: the norm of the update over that of the site's own output. Of what was really added: within the limits, and
  rounded to the dtype of the output.
- `moved`: the norm of the update over that of the hidden state that the site's layer hands on, without this update:
  how far the update, as it is added, moves the hidden state. NaN where it is not added to it as it is: of queries, keys
  and values, and in layers that normalise what their blocks give.
- of head groups `energy 0`, `energy 1`, ..: the logarithm of the mean square of the site's input, by group.

Nothing here waits for a GPU, and nothing that is measured is changed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from probemon.bem.forms.head_groups import HeadGroups, group_energy
from probemon.bem.sites import Site
from probemon.host.model import text_config

if TYPE_CHECKING:
    from probemon.bem.attached import Bem

# What layers hold that normalise the output of a block before it is added (gemma 2 and 3, olmo 2, exaone 4, glm 4).
_NORMS_OF_OUTPUTS = ("post_feedforward_layernorm", "post_mlp_layernorm", "post_self_attn_layernorm")


class Measured(nn.Module):
    """Passes on what was measured in a forward, `[B, T, K]`, to whoever puts a hook on it; K is 0 where nobody asked
    for it before the controller ran. Without a hook it is not called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.n_asking = 0

    def forward(self, sizes: Tensor) -> Tensor:
        return sizes


class Measures:
    """What is measured in one forward of `M` tokens. `awaited`: sites, and layers, that have not run yet."""

    def __init__(self, bem: Bem) -> None:
        self._bem = bem
        self._columns: dict[str, list[Tensor]] = {}  # `[M, 1]` or more each, by site key
        self._deltas: dict[int, list[tuple[Site, Tensor]]] = {}
        self.awaited: set[str | int] = {site.key for site in bem.sites} | written_layers(bem)
        self._layers = written_layers(bem)

    @torch.no_grad()
    def take(self, site: Site, x: Tensor, base: Tensor, steered: Tensor) -> None:
        """Take a site's input `[M, in]`, its own output `[M, out]` and what that became."""
        if site.key not in self.awaited:  # in the backward pass a layer may run again
            return
        self.awaited.discard(site.key)
        wide = torch.promote_types(base.dtype, torch.float32)
        delta = steered.to(wide) - base.to(wide)
        self._columns[site.key] = [_share(_norm(delta), _norm(base.to(wide)))]
        form = self._bem.updates[site.key]
        energies = group_energy(x.to(wide), form.n_codes) if isinstance(form, HeadGroups) else delta[:, :0]
        moved = delta.new_full((len(delta), 1), math.nan)
        if site.layer in self._layers and not site.chunked:
            self._deltas.setdefault(site.layer, []).append((site, delta))
        self._columns[site.key] += [moved, energies]

    @torch.no_grad()
    def take_layer(self, layer: int, hidden: Tensor) -> None:
        """Take the hidden state that a layer hands on."""
        if layer not in self.awaited:
            return
        self.awaited.discard(layer)
        multiplier = float(getattr(text_config(self._bem.host), "residual_multiplier", None) or 1.0)
        for site, delta in self._deltas.pop(layer, []):
            flat = hidden.reshape(-1, hidden.shape[-1]).to(delta)
            if flat.shape == delta.shape:
                delta = multiplier * delta
                self._columns[site.key][1] = _share(_norm(delta), _norm(flat - delta))

    def all(self, n_tokens: int, device: torch.device) -> Tensor:
        """Return `[M, K]` in fp32: the columns that `names_of` names, NaN at sites that did not run."""
        every: list[Tensor] = []
        for site in self._bem.sites:
            unknown = (n_tokens, len(_names(self._bem, site)))
            every += self._columns.get(site.key) or [torch.full(unknown, math.nan, dtype=torch.float32)]
        return torch.cat([part.to(device, torch.float32, non_blocking=True) for part in every], dim=1)


def names_of(bem: Bem) -> list[tuple[str, str]]:
    """Return what the columns are: the name of the site, and what is measured there."""
    return [(site.name, name) for site in bem.sites for name in _names(bem, site)]


def written_layers(bem: Bem) -> set[int]:
    """Return the layers to whose hidden state some site's update is added as it is."""
    layers = bem._host[2]
    return {
        site.layer
        for site in bem.sites
        if not site.chunked and not any(hasattr(layers[site.layer], name) for name in _NORMS_OF_OUTPUTS)
    }


def _names(bem: Bem, site: Site) -> list[str]:
    form: Any = bem.updates[site.key]
    return ["ratio", "moved", *(f"energy {g}" for g in range(form.n_codes if isinstance(form, HeadGroups) else 0))]


def _norm(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=-1, keepdim=True)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """Nothing of whatever is 0; something of nothing is infinite, and so seen."""
    return torch.where(part == 0, 0.0, part / whole)
