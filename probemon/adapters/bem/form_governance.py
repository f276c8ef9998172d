"""Limits on updates of forms, by the sizes that each form computes.

    governor = FormGovernor(config, sites, updates)
    applied = governor.apply({True: chunk_codes, False: codes})     # site key -> [.., n + 1]: codes, a share

Codes of forms are not all factors, so limits scale updates by a share from 0 to 1: first the trust region, for all
sites of a token, then the cap per site. Shares have no gradient. They are exactly 1 within the limits, and 0 for codes
of zeros.
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
    """Keeps updates within the limits of `config`."""

    def __init__(self, config: BemConfig, sites: Sequence[Site], updates: nn.ModuleDict) -> None:
        self._config = config
        self._forms = {site: cast(Form, updates[site.key]) for site in sites}
        self._model_norm: float | None = None

    def apply(self, codes: Mapping[bool, Tensor]) -> dict[str, Tensor]:
        """Return `[.., n + 1]` by site key: codes, and the share that the limits leave.

        `codes [.., n]`: of sites with chunk codes (True) and others (False).
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
        """Return shares `[..]`. Only updates over the cap in the Frobenius norm are decomposed."""
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
        """Return largest singular values `[M]`, or bounds, for codes `[M, n]`."""
        form = self._forms[site]
        return form.sizes(_wide(form, codes))[0].to(codes)

    @torch.no_grad()
    def leave_out(self, applied: Mapping[str, Tensor], eps: float) -> dict[str, Tensor]:
        """Return `applied` with shares of 0 for updates of at most `eps`; NaN stays visible."""
        remaining = {}
        for site in self._forms:
            codes, share = applied[site.key][..., :-1], applied[site.key][..., -1]
            small = self._frobenius(site, codes) * share <= eps
            remaining[site.key] = torch.cat([codes, share.masked_fill(small, 0.0)[..., None]], dim=-1)
        return remaining

    @torch.no_grad()
    def sizes(self, applied: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the largest singular value of the largest update, and the norm of all over `model_norm`."""
        norms = torch.stack(
            [self._frobenius(site, applied[site.key][:, :-1]) * applied[site.key][:, -1].abs() for site in self._forms]
        )
        total, largest = norms.square().sum(dim=0).sqrt(), norms.argmax(dim=0)
        sigma = torch.zeros_like(total)
        for i, site in enumerate(self._forms):
            is_largest = largest == i
            if bool(is_largest.any()):
                subset = applied[site.key][is_largest]
                sigma[is_largest] = (self.sigma1(site, subset[:, :-1]) * subset[:, -1].abs()).to(sigma)
        return sigma.where(total.isfinite(), math.nan), total / self.model_norm()

    def model_norm(self) -> float:
        """Return the norm of the model's weights at the sites; of the identity for films. Cached."""
        if self._model_norm is None:
            film = self._config.form == "film"
            self._model_norm = math.sqrt(sum(site.n_out for site in self._forms)) if film else weights_norm(self._forms)
        return self._model_norm

    def forget_model_norm(self) -> None:
        """See `probemon.adapters.bem.governance.Governor`."""
        self._model_norm = None


def _wide(form: Form, codes: Tensor) -> Tensor:
    parameter = next(form.parameters())
    return codes.to(parameter)
