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

What `sparse_eps` leaves out is measured by the same Frobenius norm, after both limits: by a token's update, not by its
code. The size of a code says nothing by itself, since U and V may be as large or small as training made them: where a
capped adapter has a large U, full-size updates have small codes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.sites import Site
from probemon.host.internals import is_wrapping_tensor, stored_tensors, write_marks

# Steps of all of torch's optimisers: the fused ones, Trainer's default among them, write to parameters without raising
# their versions.
_n_steps = [0]
register_optimizer_step_post_hook(lambda *_: _n_steps.__setitem__(0, _n_steps[0] + 1))


def optimiser_steps() -> int:
    """Return how many steps optimisers have taken, which may have written to parameters."""
    return _n_steps[0]


# These bound the memory of a long prompt: matrices whose singular values are computed at once, and cells of them.
_MOST_MATRICES, _MOST_CELLS = 1 << 14, 1 << 24


def gram(U: Tensor, V: Tensor, scale: float) -> Tensor:
    """Return `s^2 (U^T U) o (V^T V)` `[r, r]`, the quadratic form of the squared Frobenius norm."""
    return scale**2 * (U.T @ U) * (V.T @ V)


def frobenius_squared(codes: Tensor, grams: Tensor) -> Tensor:
    """Return squared norms `[M, S]` of the updates of codes `[M, r]` at S sites, by their grams `[S, r, r]`."""
    outer = codes[:, :, None] * codes[:, None, :]
    return (outer.flatten(1) @ grams.flatten(1).T).clamp(min=0)  # rounding may give a little less than nothing


def factors(U: Tensor, V: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return `s R_u` and `R_v` `[r, r]`, of `U = Q_u R_u` and `V = Q_v R_v`. Where a side has fewer than r values they
    end in rows of zeros, which change no singular value.
    """
    _, r_u = torch.linalg.qr(U, mode="r")
    _, r_v = torch.linalg.qr(V, mode="r")
    r_u, r_v = (nn.functional.pad(factor, (0, 0, 0, factor.shape[1] - factor.shape[0])) for factor in (r_u, r_v))
    return scale * r_u, r_v


def sigma1(codes: Tensor, r_u: Tensor, r_v: Tensor) -> Tensor:
    """Return the largest singular values `[M]` of the updates of codes `[M, r]`, NaN for an update that is not finite.
    Factors `[r, r]`, or `[M, r, r]`: each code's own.
    """
    updates = (r_u * codes[:, None, :]) @ r_v.mT
    finite = updates.isfinite().all(dim=-1).all(dim=-1)  # others have no decomposition, and torch raises
    return torch.linalg.svdvals(updates.where(finite[:, None, None], 0.0))[:, 0].where(finite, math.nan)


@dataclass(frozen=True, eq=False)
class _Matrices:
    """What follows from U and V, by group of S sites: grams `[S, r, r]`, and two factors `[S, r, r]` once they are
    asked for. `versions`: the number of optimisers' steps, then where each parameter lay and its version.
    """

    versions: list[tuple[int, int]]
    grams: dict[bool, Tensor]
    factors: dict[bool, tuple[Tensor, Tensor]]


class Governor:
    """Scales codes down to the limits of `config`. What it needs of U and V it keeps until somebody writes to them.

    A forward that makes gradients for them computes it anew, and so does the one after it: whoever trains is about to
    write, in whatever way. At other times neither torch nor this sees a write through `.data`: use `torch.no_grad()`.
    """

    def __init__(self, config: BemConfig, sites: Sequence[Site], updates: nn.ModuleDict) -> None:
        self._config = config
        self._updates = {site: updates[site.key] for site in sites}
        # Their dicts of parameters (of int8: buffers): walking modules takes longer than the forward of a small host's
        # layer.
        self._stored = [stored_tensors(update) for update in self._updates.values()]
        groups = {chunked: [site for site in sites if site.chunked == chunked] for chunked in (True, False)}
        self._groups = {chunked: group for chunked, group in groups.items() if group}
        self._matrices, self._learning = _Matrices([], {}, {}), False
        self._host_norm: float | None = None

    def _parameters(self) -> Iterator[Tensor]:
        return (tensor for stored in self._stored for tensor in stored.values() if tensor is not None)

    @torch.no_grad()
    def _current_matrices(self, device: torch.device) -> _Matrices:
        """What follows from U and V as they are. Put in place whole: another thread may be reading the older one."""
        versions = [(_n_steps[0], 0), *write_marks(list(self._parameters()))]
        matrices = self._matrices
        if versions != matrices.versions:
            grams = {
                chunked: torch.stack([gram(*self._u_and_v(site), self._config.scale).to(device) for site in group])
                for chunked, group in self._groups.items()
            }
            matrices = self._matrices = _Matrices(versions, grams, {})
        return matrices

    def _u_and_v(self, site: Site) -> tuple[Tensor, Tensor]:
        u, v = (cast(Tensor, getattr(self._updates[site], name)).detach() for name in "UV")
        wide = torch.promote_types(u.dtype, torch.float32)  # there is no QR in bf16
        return u.to(wide), v.to(wide)

    def sigma1(self, site: Site, codes: Tensor) -> Tensor:
        """Return the largest singular values `[M]` of a site's updates for codes `[M, r]`."""
        index = self._groups[site.chunked].index(site)
        r_u, r_v = (factor[index] for factor in self._factors(site.chunked, codes.device))
        return sigma1(codes.to(r_u), r_u, r_v).to(codes)

    def _factors(self, chunked: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Factors `[S, r, r]` of a group's sites, in their order."""
        matrices = self._current_matrices(device)
        if chunked not in matrices.factors:
            pairs = [factors(*self._u_and_v(site), self._config.scale) for site in self._groups[chunked]]
            r_u, r_v = (torch.stack([factor.to(device) for factor in side]) for side in zip(*pairs, strict=True))
            matrices.factors[chunked] = (r_u, r_v)
        return matrices.factors[chunked]

    @torch.no_grad()
    def sizes(self, applied: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return two sizes `[M]` of codes by site key `[M, r]` as they are applied.

        `sigma1`: the largest singular value of the update that is largest in the Frobenius norm.
        `delta_rel_norm`: the Frobenius norm of all updates together over that of the weights they are added to (NaN
        where that is not known).
        """
        any_codes = next(iter(applied.values()))
        grams = self._current_matrices(any_codes.device).grams
        total, largest = torch.zeros_like(any_codes[:, 0]), torch.full_like(any_codes[:, 0], -1.0)
        sigma = torch.zeros_like(largest)
        for chunked, group in self._groups.items():
            codes = torch.stack([applied[site.key] for site in group]).to(grams[chunked].dtype)
            squares = ((codes @ grams[chunked]) * codes).sum(dim=-1).clamp(min=0)
            total = total + squares.sum(dim=0).to(total)
            group_largest, site = squares.max(dim=0)
            r_u, r_v = self._factors(chunked, codes.device)
            codes = codes[site, torch.arange(len(site), device=site.device)]
            pieces = zip(codes.split(_MOST_MATRICES), site.split(_MOST_MATRICES), strict=True)
            group_sigma = torch.cat([sigma1(c, r_u[i], r_v[i]) for c, i in pieces])
            larger = group_largest.to(largest) > largest
            sigma = torch.where(larger, group_sigma.to(sigma), sigma)
            largest = torch.where(larger, group_largest.to(largest), largest)
        return sigma.where(total.isfinite(), math.nan), total.sqrt() / self.host_norm()

    def host_norm(self) -> float:
        """Return the Frobenius norm of the host's weights at all sites together, computed once until
        `forget_host_norm`; NaN as `weights_norm` says.
        """
        if self._host_norm is None:
            self._host_norm = weights_norm(self._updates)
        return self._host_norm

    def forget_host_norm(self) -> None:
        """Compute the norm of the host's weights anew when it is asked for next: they may be others."""
        self._host_norm = None

    def apply(self, codes: Mapping[bool, Tensor]) -> dict[str, Tensor]:
        """Return codes by site key, within the limits, of codes `[.., r]` for sites that take chunk codes (True) and
        for the others (False).

        A token within the limits keeps its codes bit for bit. On a GPU this waits once a forward, for whether any
        exceeds the cap.
        """
        learning = torch.is_grad_enabled() and any(p.requires_grad for p in self._parameters())
        if learning or self._learning:
            self._matrices, self._learning = _Matrices([], {}, {}), learning
        cap, trust = self._config.spectral_cap or math.inf, self._config.trust_region
        if cap == math.inf and trust is None:
            return {site.key: codes[site.chunked] for site in self._updates}
        any_codes = next(iter(codes.values()))
        shrink = over = None
        with torch.no_grad():
            squares = {
                chunked: frobenius_squared(codes[chunked].flatten(0, -2).to(grams.dtype), grams)
                for chunked, grams in self._current_matrices(any_codes.device).grams.items()
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
        """Return codes by site key `[M, r]` as `apply` returned them, but zeros where the Frobenius norm of the site's
        update is at most `eps`.

        For an input x this changes an output by at most `eps |x|`, since no singular value exceeds that norm. A code
        that is not finite stays, so that it is seen.
        """
        kept: dict[str, Tensor] = {}
        for chunked, group in self._groups.items():
            codes = torch.stack([applied[site.key] for site in group])  # [S, M, r]
            grams = self._current_matrices(codes.device).grams[chunked]
            wide = codes.to(grams.dtype)
            small = ((wide @ grams) * wide).sum(dim=-1) <= eps**2
            codes = codes.masked_fill(small[..., None], 0.0)
            kept |= {site.key: code for site, code in zip(group, codes, strict=True)}
        return kept

    @torch.no_grad()
    def _cap(self, chunked: bool, codes: Tensor, exceeds: Tensor, cap: float) -> Tensor:
        """Scales `[S, M]` of codes `[M, r]`: what brings the largest singular value under the cap where the Frobenius
        norm is over it (`exceeds [M, S]`), else 1.
        """
        rows = exceeds.any(dim=1).nonzero()[:, 0]
        unique, inverse = codes[rows], torch.zeros_like(rows)
        if len(rows) > 1:  # chunk codes repeat
            unique, inverse = unique.unique(dim=0, return_inverse=True)
        r_u, r_v = self._factors(chunked, codes.device)
        unique_scales = codes.new_ones(len(unique), len(r_u))
        needed = torch.zeros(unique_scales.shape, dtype=torch.bool, device=codes.device)
        needed.index_put_((inverse,), exceeds[rows], accumulate=True)
        # All at once, not site by site: for a step's one token, 60 calls take longer than the host's layer.
        for pairs in needed.nonzero().split(max(1, _MOST_CELLS // codes.shape[1] ** 2)):
            code, site = pairs.unbind(dim=1)
            largest = sigma1(unique[code].to(r_u), r_u[site], r_v[site])
            unique_scales[code, site] = (cap / largest.clamp(min=cap)).to(codes)
        scales = codes.new_ones(len(r_u), len(codes))
        scales[:, rows] = unique_scales[inverse].T
        return scales


def weights_norm(sites: Iterable[Site]) -> float:
    """Return the Frobenius norm of the host's weights at all sites together; NaN where a site has none of its own, or
    multiplies by something else than its weight as it is (a scale beside it, packed numbers, an adapter's part).
    """
    squares = [
        float(_whole(site.module.weight.detach().to(torch.float32).square().sum()))
        if _multiplies_its_weight(site.module)
        else math.nan
        for site in sites
    ]
    return math.sqrt(sum(squares))


def _multiplies_its_weight(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is known to give the product of its weight, as that is, and what it is given."""
    stored = dict(module.named_parameters()) | dict(module.named_buffers())
    if not isinstance(module, nn.Linear) or not set(stored) <= {"weight", "bias"}:
        return False
    weight = module.weight
    packed = is_wrapping_tensor(weight) and not hasattr(weight, "full_tensor")  # what ranks share is no packing
    if packed or weight.is_meta or not weight.is_floating_point():
        return False
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return True
    x = torch.linspace(-1, 1, module.in_features).to(weight)
    try:
        with torch.no_grad():
            given, expected = forward(module, x[None]), nn.functional.linear(x[None], weight, module.bias)
            return bool(torch.linalg.vector_norm(given - expected) <= 0.01 * torch.linalg.vector_norm(expected))
    except Exception:  # of every kind: it is of a foreign layer
        return False


def _whole(total: Tensor) -> Tensor:
    """A sum over ranks, of a weight that they have in parts."""
    whole: Tensor = total.full_tensor() if hasattr(total, "full_tensor") else total
    return whole


def decorrelation(codes: Tensor, real: Tensor) -> Tensor:
    """Return the mean squared correlation between different dimensions of codes `[B, T, r]` over real tokens `[B, T]`.

    It is 1 where all dimensions say the same, and 0 where there is nothing to compare. A dimension that does not vary
    correlates with none.
    """
    rank, codes = codes.shape[-1], codes[real]
    if rank < 2 or len(codes) < 2:
        return codes.new_zeros(())
    centred = codes - codes.mean(dim=0)
    unit = centred / (centred.norm(dim=0) + 1e-8)
    correlation = unit.T @ unit
    return (correlation.square().sum() - correlation.diagonal().square().sum()) / (rank * (rank - 1))


def soft_flips(codes: Tensor, real: Tensor) -> Tensor:
    """Return the mean of 1 - cos(|c_t|, |c_t+1|) over neighbouring real tokens: codes `[B, T, r]`, real `[B, T]`. Where
    each code has one entry it is the share of neighbours whose entry is another.
    """
    pairs = real[:, 1:] & real[:, :-1]
    if not bool(pairs.any()):
        return codes.new_zeros(())
    size = codes.abs()
    return (1 - torch.cosine_similarity(size[:, 1:], size[:, :-1], dim=-1))[pairs].mean()


def flip_penalty(codes: Tensor, real: Tensor, weight: float = 0.1, free: float = 0.1) -> Tensor:
    """Return `weight * max(0, flips - free)^2` of `soft_flips`."""
    return weight * (soft_flips(codes, real) - free).clamp(min=0).square()
