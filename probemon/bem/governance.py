"""Governance: how large an update may be, from matrices of r x r alone, and penalties on codes for training.

    governor = Governor(config, sites, updates)
    applied = governor.apply({True: chunk_codes, False: codes})     # site key -> codes [B, T, r] within the limits
    applied = governor.leave_out(applied, eps)                      # codes of updates of at most eps are zeros
    sigma1(codes, *factors(U, V, scale))                            # [M]: largest singular value of each update

The update of a token is `dW = s U diag(c) V^T`. Its Frobenius norm needs one quadratic form:
`|dW|^2 = s^2 c^T ((U^T U) o (V^T V)) c`. Its singular values are those of `R_u diag(c) R_v^T`, with `U = Q_u R_u` and
`V = Q_v R_v`, since the columns of Q are orthonormal. The largest one is at most the Frobenius norm, so it is computed
only where that exceeds the cap.

First the trust region scales all codes of a token by one number, then the cap scales those of a site. Scales have no
gradient.

What `sparse_eps` leaves out is measured by the same Frobenius norm, after both limits: by what a token's update is, and
not by its code. The size of a code says nothing
by itself, since U and V may be as large or small as training made them: of a capped adapter with a large U, full-size
updates have small codes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from probemon.bem.config import BemConfig
from probemon.bem.sites import Site
from probemon.host.internals import stored_tensors, write_marks

# Of all of torch's optimisers: the fused ones, Trainer's default among them, write to parameters without raising their
# versions.
_steps = [0]
register_optimizer_step_post_hook(lambda *_: _steps.__setitem__(0, _steps[0] + 1))

_MOST = 1 << 14  # matrices at once
_CELLS = 1 << 24  # of matrices whose singular values are found at once: bounds the memory of a long prompt


def gram(U: Tensor, V: Tensor, scale: float) -> Tensor:
    """`s^2 (U^T U) o (V^T V)` `[r, r]`, the quadratic form of the squared Frobenius norm."""
    return scale**2 * (U.T @ U) * (V.T @ V)


def frobenius_squared(codes: Tensor, grams: Tensor) -> Tensor:
    """Of the updates of codes `[M, r]` at S sites, grams `[S, r, r]`: `[M, S]`."""
    outer = codes[:, :, None] * codes[:, None, :]
    return (outer.flatten(1) @ grams.flatten(1).T).clamp(min=0)  # rounding may give a little less than nothing


def factors(U: Tensor, V: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`s R_u` and `R_v` `[r, r]`, of `U = Q_u R_u` and `V = Q_v R_v`; where a side has fewer than r values, rows of
    zeros below, which no singular value sees.
    """
    _, r_u = torch.linalg.qr(U, mode="r")
    _, r_v = torch.linalg.qr(V, mode="r")
    r_u, r_v = (nn.functional.pad(factor, (0, 0, 0, factor.shape[1] - factor.shape[0])) for factor in (r_u, r_v))
    return scale * r_u, r_v


def sigma1(codes: Tensor, r_u: Tensor, r_v: Tensor) -> Tensor:
    """Largest singular value of the update of each of codes `[M, r]`: `[M]`, NaN where it is not finite. Factors `[r,
    r]`, or `[M, r, r]`: each code's own.
    """
    updates = (r_u * codes[:, None, :]) @ r_v.mT
    finite = updates.isfinite().all(dim=-1).all(dim=-1)  # of others there is no decomposition, and torch raises
    return torch.linalg.svdvals(updates.where(finite[:, None, None], 0.0))[:, 0].where(finite, math.nan)


@dataclass(frozen=True, eq=False)
class _Kept:
    """Of parameters at these places and versions (first: after how many steps of optimisers), by group: grams `[S, r,
    r]`, and factors, two of `[S, r, r]`, where they were asked for.
    """

    seen: list[tuple[int, int]]
    grams: dict[bool, Tensor]
    factors: dict[bool, tuple[Tensor, Tensor]]


class Governor:
    """Scales codes down to the limits of `config`. What it needs of U and V is kept until an optimiser or anyone else
    writes to them.

    A forward that makes gradients for them computes it anew, and so does the one after it: whoever trains is about to
    write, in whatever way. A write through `.data` at
    another time is invisible to torch, and so to this: use `torch.no_grad()`.
    """

    def __init__(self, config: BemConfig, sites: Sequence[Site], updates: nn.ModuleDict) -> None:
        self._config = config
        self._updates = {site: updates[site.key] for site in sites}
        # Their dicts of parameters (of int8: buffers): walking modules takes longer than the forward of a small host's
        # layer.
        self._stored = {site: stored_tensors(update) for site, update in self._updates.items()}
        self._groups = {chunked: [site for site in sites if site.chunked == chunked] for chunked in (True, False)}
        self._kept, self._learning = _Kept([], {}, {}), False
        self._host_norm: float | None = None

    @torch.no_grad()
    def _matrices_now(self, device: torch.device) -> _Kept:
        """What follows from U and V as they are. Put in place whole: another thread may be reading the older one."""
        seen = [
            (_steps[0], 0),
            *write_marks(self._stored.values()),
        ]
        kept = self._kept
        if seen != kept.seen:
            grams = {
                chunked: [gram(*self._matrices(site), self._config.scale).to(device) for site in group]
                for chunked, group in self._groups.items()
            }
            kept = self._kept = _Kept(
                seen, {chunked: torch.stack(found) for chunked, found in grams.items() if found}, {}
            )
        return kept

    def _matrices(self, site: Site) -> tuple[Tensor, Tensor]:
        u, v = (cast(Tensor, getattr(self._updates[site], name)).detach() for name in "UV")
        wide = torch.promote_types(u.dtype, torch.float32)  # there is no QR in bf16
        return u.to(wide), v.to(wide)

    def sigma1(self, site: Site, codes: Tensor) -> Tensor:
        """Largest singular value of a site's update for each of codes `[M, r]`: `[M]`."""
        r_u, r_v = (
            factor[self._groups[site.chunked].index(site)] for factor in self._factors(site.chunked, codes.device)
        )
        return sigma1(codes.to(r_u), r_u, r_v).to(codes)

    def _factors(self, chunked: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Of a group's sites, in their order, `[S, r, r]` each."""
        kept = self._matrices_now(device)
        if chunked not in kept.factors:
            pairs = [factors(*self._matrices(site), self._config.scale) for site in self._groups[chunked]]
            r_u, r_v = (torch.stack([factor.to(device) for factor in side]) for side in zip(*pairs, strict=True))
            kept.factors[chunked] = (r_u, r_v)
        return kept.factors[chunked]

    @torch.no_grad()
    def sizes(self, applied: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Of codes by site key `[M, r]` as they are applied: `sigma1 [M]`, the largest singular value of the update
        that is largest in the Frobenius norm, and `delta_rel_norm [M]`, the Frobenius norm of all updates together over
        that of the weights they are added to (NaN where a site has no weight of its own).
        """
        any_codes = next(iter(applied.values()))
        grams = self._matrices_now(any_codes.device).grams
        whole, largest = torch.zeros_like(any_codes[:, 0]), torch.full_like(any_codes[:, 0], -1.0)
        sigma = torch.zeros_like(largest)
        for chunked, group in self._groups.items():
            if not group:
                continue
            codes = torch.stack([applied[site.key] for site in group]).to(grams[chunked].dtype)
            squares = ((codes @ grams[chunked]) * codes).sum(dim=-1).clamp(min=0)
            whole = whole + squares.sum(dim=0).to(whole)
            most, at = squares.max(dim=0)
            r_u, r_v = self._factors(chunked, codes.device)
            mine = codes[at, torch.arange(len(at), device=at.device)]
            found = torch.cat(
                [sigma1(c, r_u[i], r_v[i]) for c, i in zip(mine.split(_MOST), at.split(_MOST), strict=True)]
            )
            more = most.to(largest) > largest
            sigma, largest = torch.where(more, found.to(sigma), sigma), torch.where(more, most.to(largest), largest)
        return sigma.where(whole.isfinite(), math.nan), whole.sqrt() / self._weights_norm()

    def _weights_norm(self) -> float:
        """Frobenius norm of the host's weights at all sites together, found once."""
        if self._host_norm is None:
            weights = [getattr(site.module, "weight", None) for site in self._updates]
            squares = [
                float(weight.detach().to(torch.float32).square().sum()) if isinstance(weight, Tensor) else math.nan
                for weight in weights
            ]
            self._host_norm = math.sqrt(sum(squares))
        return self._host_norm

    def apply(self, codes: Mapping[bool, Tensor]) -> dict[str, Tensor]:
        """Codes `[.., r]` for sites that take chunk codes (True) and for the others (False) -> by site key, within the
        limits.

        A token within them keeps its codes bit for bit. On a GPU this waits once a forward, for whether any exceeds the
        cap.
        """
        learning = torch.is_grad_enabled() and any(
            p.requires_grad for stored in self._stored.values() for p in stored.values() if p is not None
        )
        if learning or self._learning:
            self._kept, self._learning = _Kept([], {}, {}), learning
        cap, trust = self._config.spectral_cap or math.inf, self._config.trust_region
        if cap == math.inf and trust is None:
            return {site.key: codes[site.chunked] for site in self._updates}
        any_codes = next(iter(codes.values()))
        shrink = over = None
        with torch.no_grad():
            all_grams = self._matrices_now(any_codes.device).grams
            squares = {
                chunked: frobenius_squared(codes[chunked].flatten(0, -2).to(grams.dtype), grams)
                for chunked, grams in all_grams.items()
            }
            if trust is not None:
                total = torch.stack([square.sum(dim=1) for square in squares.values()]).sum(dim=0).sqrt()
                shrink = (trust / total.clamp(min=trust)).to(any_codes.dtype)[:, None]  # exactly 1 within the region
            if cap < math.inf:
                over = {
                    chunked: (square.sqrt() if shrink is None else square.sqrt() * shrink) > cap
                    for chunked, square in squares.items()
                }
        scaled = (
            codes
            if shrink is None
            else {chunked: code * shrink.view(*code.shape[:-1], 1) for chunked, code in codes.items()}
        )
        applied = {site.key: scaled[site.chunked] for site in self._updates}
        for chunked, exceeds in (over or {}).items():
            if not bool(exceeds.any()):
                continue
            code = scaled[chunked]
            scales = self._cap(chunked, code.detach().flatten(0, -2), exceeds, cap)
            for site, scale in zip(self._groups[chunked], scales, strict=True):
                applied[site.key] = code * scale.view(*code.shape[:-1], 1)
        return applied

    @torch.no_grad()
    def leave_out(self, applied: Mapping[str, Tensor], eps: float) -> dict[str, Tensor]:
        """Codes by site key `[M, r]` as `apply` gave them; zeros where the Frobenius norm of the site's update is at
        most `eps`.

        Of an input x, an output so differs by at most `eps |x|`, for no singular value exceeds that norm. A code that
        is not finite stays, so that it is seen.
        """
        kept = dict(applied)
        for chunked, group in self._groups.items():
            if group:
                codes = torch.stack([applied[site.key] for site in group])  # [S, M, r]
                grams = self._matrices_now(codes.device).grams[chunked]
                wide = codes.to(grams.dtype)
                small = ((wide @ grams) * wide).sum(dim=-1) <= eps**2
                kept |= {
                    site.key: code for site, code in zip(group, codes.masked_fill(small[..., None], 0.0), strict=True)
                }
        return kept

    @torch.no_grad()
    def _cap(self, chunked: bool, codes: Tensor, exceeds: Tensor, cap: float) -> Tensor:
        """Scales `[S, M]` of codes `[M, r]`: what brings the largest singular value under the cap where `exceeds [M,
        S]`, the Frobenius norm being over it; else 1.
        """
        rows = exceeds.any(dim=1).nonzero()[:, 0]
        unique, of = (
            codes[rows].unique(dim=0, return_inverse=True) if len(rows) > 1 else (codes[rows], torch.zeros_like(rows))
        )  # chunk codes repeat
        r_u, r_v = self._factors(chunked, codes.device)
        scales = codes.new_ones(len(unique), len(r_u))
        wanted = torch.zeros(scales.shape, dtype=torch.bool, device=codes.device)
        wanted.index_put_((of,), exceeds[rows], accumulate=True)
        # All at once, not site by site: of a step's one token, 60 calls take longer than the host's layer.
        for some in wanted.nonzero().split(max(1, _CELLS // codes.shape[1] ** 2)):
            code, site = some.unbind(dim=1)
            scales[code, site] = (cap / sigma1(unique[code].to(r_u), r_u[site], r_v[site]).clamp(min=cap)).to(codes)
        every = codes.new_ones(len(r_u), len(codes))
        every[:, rows] = scales[of].T
        return every


def decorrelation(codes: Tensor, real: Tensor) -> Tensor:
    """Mean squared correlation between different dimensions of codes `[B, T, r]` over real tokens `[B, T]`; 0 for none.

    A penalty: 1 where all dimensions say the same. A dimension that does not vary correlates with none.
    """
    rank = codes.shape[-1]
    kept = codes[real]
    if rank < 2 or len(kept) < 2:
        return codes.new_zeros(())
    centred = kept - kept.mean(dim=0)
    unit = centred / (centred.norm(dim=0) + 1e-8)
    correlation = unit.T @ unit
    return (correlation.square().sum() - correlation.diagonal().square().sum()) / (rank * (rank - 1))


def flip_rate(codes: Tensor, real: Tensor) -> Tensor:
    """Share of neighbouring real tokens whose largest `|c|` is another: codes `[B, T, r]`, real `[B, T]`."""
    pairs = real[:, 1:] & real[:, :-1]
    top = codes.abs().argmax(dim=-1)
    return (top[:, 1:] != top[:, :-1])[pairs].to(codes.dtype).mean() if bool(pairs.any()) else codes.new_zeros(())


def soft_flips(codes: Tensor, real: Tensor) -> Tensor:
    """As `flip_rate`, with a gradient: the mean of 1 - cos(|c_t|, |c_t+1|). Equal to it where each code has one
    entry.
    """
    pairs = real[:, 1:] & real[:, :-1]
    if not bool(pairs.any()):
        return codes.new_zeros(())
    size = codes.abs()
    return (1 - torch.cosine_similarity(size[:, 1:], size[:, :-1], dim=-1))[pairs].mean()


def flip_penalty(codes: Tensor, real: Tensor, weight: float = 0.1, free: float = 0.1) -> Tensor:
    """`weight * max(0, flips - free)^2` of `soft_flips`."""
    return weight * (soft_flips(codes, real) - free).clamp(min=0).square()
