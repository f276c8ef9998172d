"""Governance of forms: how large an update may be, from sizes that each form knows of itself.

    governor = FormGovernor(config, sites, updates)
    applied = governor.apply({True: chunk_codes, False: codes})     # site key -> [.., n + 1]: codes, a share
    applied = governor.leave_out(applied, eps)                      # the share of updates of at most eps is zero

Codes of these forms are not all factors of their updates: a gate of a code of zero is 1, and a mask has no size. So the
limits scale the updates themselves, by a share from 0 to 1 that goes beside the code. As of low-rank updates
(`probemon.adapters.bem.governance`): first the trust region, one share for all sites of a token, then the cap, site by
site. Shares have no gradient. A token within the limits has a share of exactly 1, and a code of zeros one of 0: in
every form it leaves the host as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.forms.form import Form
from probemon.adapters.bem.governance import weights_norm
from probemon.adapters.bem.sites import Site


class FormGovernor:
    """Keeps the updates of forms within the limits of `config`. It keeps nothing of the parameters."""

    def __init__(self, config: BemConfig, sites: Sequence[Site], updates: nn.ModuleDict) -> None:
        self._config = config
        self._forms = {site: cast(Form, updates[site.key]) for site in sites}
        self._host_norm: float | None = None

    def apply(self, codes: Mapping[bool, Tensor]) -> dict[str, Tensor]:
        """Return `[.., n + 1]` by site key of codes `[.., n]` for sites that take chunk codes (True) and for the others
        (False): the codes, and last the share of the update that the limits leave.
        """
        cap, trust = self._config.spectral_cap, self._config.trust_region
        applied: dict[str, Tensor] = {}
        with torch.no_grad():
            shares = {site: (codes[site.chunked] != 0).any(-1).to(codes[site.chunked]) for site in self._forms}
            if cap is not None or trust is not None:
                norms = {site: self._frobenius(site, codes[site.chunked]) for site in self._forms}
                if trust is not None:
                    total = torch.stack([norm.square() for norm in norms.values()]).sum(dim=0).sqrt()
                    shrink = trust / total.clamp(min=trust)  # exactly 1 within the region
                    shares = {site: share * shrink.to(share) for site, share in shares.items()}
                if cap is not None:
                    shares = {
                        site: self._capped(site, codes[site.chunked], share, norms[site] * share, cap)
                        for site, share in shares.items()
                    }
        for site, share in shares.items():
            applied[site.key] = torch.cat([codes[site.chunked], share[..., None]], dim=-1)
        return applied

    def _capped(self, site: Site, codes: Tensor, share: Tensor, norm: Tensor, cap: float) -> Tensor:
        """The shares `[..]` of a site's updates under the cap. No singular value exceeds the Frobenius norm, so those
        that exceed the cap alone are decomposed.
        """
        exceeds = norm > cap
        if not bool(exceeds.any()):
            return share
        largest = self.sigma1(site, codes[exceeds]) * share[exceeds]
        share = share.clone()
        share[exceeds] *= (cap / largest.clamp(min=cap)).to(share)
        return share

    def _frobenius(self, site: Site, codes: Tensor) -> Tensor:
        form = self._forms[site]
        wide = _wide(form, codes)
        return form.frobenius(wide.flatten(0, -2)).view(codes.shape[:-1]).to(codes.device)

    @torch.no_grad()
    def sigma1(self, site: Site, codes: Tensor) -> Tensor:
        """Return the largest singular values `[M]` of a site's updates for codes `[M, n]`, or bounds of them."""
        form = self._forms[site]
        return form.sizes(_wide(form, codes))[0].to(codes)

    @torch.no_grad()
    def leave_out(self, applied: Mapping[str, Tensor], eps: float) -> dict[str, Tensor]:
        """Return what `apply` returned, but shares of zero where the Frobenius norm of the site's update is at most
        `eps`. What is not a number stays, so that it is seen.
        """
        kept = {}
        for site in self._forms:
            codes, share = applied[site.key][..., :-1], applied[site.key][..., -1]
            small = self._frobenius(site, codes) * share <= eps
            kept[site.key] = torch.cat([codes, share.masked_fill(small, 0.0)[..., None]], dim=-1)
        return kept

    @torch.no_grad()
    def sizes(self, applied: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return two sizes `[M]` of what `apply` returned, `[M, n + 1]`, as `bem.governance.Governor.sizes`
        does: of the update that is largest in the Frobenius norm the largest singular value (of several Kronecker terms
        a bound of it), and all of them together beside the host's weights, of films beside the outputs as they are.
        """
        norms = torch.stack(
            [self._frobenius(site, applied[site.key][:, :-1]) * applied[site.key][:, -1].abs() for site in self._forms]
        )
        total, largest = norms.square().sum(dim=0).sqrt(), norms.argmax(dim=0)
        sigma = torch.zeros_like(total)
        for i, site in enumerate(self._forms):
            own = largest == i
            if bool(own.any()):
                some = applied[site.key][own]
                sigma[own] = (self.sigma1(site, some[:, :-1]) * some[:, -1].abs()).to(sigma)
        return sigma.where(total.isfinite(), math.nan), total / self.host_norm()

    def host_norm(self) -> float:
        """Return the norm of what updates are added to, computed once until `forget_host_norm`: the host's weights, or
        of films the outputs as they are.
        """
        if self._host_norm is None:
            film = self._config.form == "film"
            self._host_norm = math.sqrt(sum(site.n_out for site in self._forms)) if film else weights_norm(self._forms)
        return self._host_norm

    def forget_host_norm(self) -> None:
        """As of `probemon.adapters.bem.governance.Governor`."""
        self._host_norm = None


def _wide(form: Form, codes: Tensor) -> Tensor:
    """Codes where the form's parameters are, in their dtype."""
    parameter = next(form.parameters())
    return codes.to(parameter)
