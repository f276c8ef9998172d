"""Limits on the size of updates, from r x r matrices alone, and penalties on codes for training.

    governor = Governor(config, sites, updates)
    applied = governor.apply({True: chunk_codes, False: codes})     # site key -> codes [B, T, r]
    applied = governor.leave_out(applied, eps)
    sigma1(codes, *factors(U, V, scale))                            # [M]

For `dW = s U diag(c) V^T`, `|dW|^2 = s^2 c^T ((U^T U) o (V^T V)) c` (Frobenius). Its singular values are those of
`s R_u diag(c) R_v^T`, with `U = Q_u R_u` and `V = Q_v R_v`. They are computed only if the norm exceeds the cap.

The trust region scales a token's codes by one number, then the cap each site's. Scales have no gradient.
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

# Fused optimisers, as Trainer's default, write to parameters without raising their versions.
_n_steps = [0]
register_optimizer_step_post_hook(lambda *_: _n_steps.__setitem__(0, _n_steps[0] + 1))


# Most that are decomposed at once, to bound memory.
_MOST_MATRICES, _MOST_CELLS = 1 << 14, 1 << 24


def gram(U: Tensor, V: Tensor, scale: float) -> Tensor:
    """Return `s^2 (U^T U) o (V^T V)` `[r, r]`."""
    return scale**2 * (U.T @ U) * (V.T @ V)


def frobenius_squared(codes: Tensor, grams: Tensor) -> Tensor:
    """Return squared norms `[M, S]` of updates, from codes `[M, r]` and grams `[S, r, r]`."""
    outer = codes[:, :, None] * codes[:, None, :]
    return (outer.flatten(1) @ grams.flatten(1).T).clamp(min=0)  # rounding may give less than 0


def factors(U: Tensor, V: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return `s R_u` and `R_v` `[r, r]`. A side with fewer than r values is padded with zero rows."""
    _, r_u = torch.linalg.qr(U, mode="r")
    _, r_v = torch.linalg.qr(V, mode="r")
    r_u, r_v = (nn.functional.pad(factor, (0, 0, 0, factor.shape[1] - factor.shape[0])) for factor in (r_u, r_v))
    return scale * r_u, r_v


def sigma1(codes: Tensor, r_u: Tensor, r_v: Tensor) -> Tensor:
    """Return the largest singular values `[M]` of updates, NaN if not finite: codes `[M, r]`, factors `[r, r]` or `[M,
    r, r]`.
    """
    updates = (r_u * codes[:, None, :]) @ r_v.mT
    finite = updates.isfinite().all(dim=-1).all(dim=-1)  # else torch raises
    return torch.linalg.svdvals(updates.where(finite[:, None, None], 0.0))[:, 0].where(finite, math.nan)


@dataclass(frozen=True, eq=False)
class _Matrices:
    """Grams and factors `[S, r, r]` of S sites, by group. `versions`: optimiser steps, then each parameter's address
    and version.
    """

    versions: list[tuple[int, int]]
    grams: dict[bool, Tensor]
    factors: dict[bool, tuple[Tensor, Tensor]]


class Governor:
    """Scales codes down to the limits of `config`.

    Matrices of U and V are cached until these change. A forward with gradients for them, and the next, always compute
    again. Otherwise a write through `.data` goes unnoticed: use `torch.no_grad()`.
    """

    def __init__(self, config: BemConfig, sites: Sequence[Site], updates: nn.ModuleDict) -> None:
        self._config = config
        self._updates = {site: updates[site.key] for site in sites}
        # Walking the modules takes longer than a small model's layer.
        self._stored = [stored_tensors(update) for update in self._updates.values()]
        groups = {chunked: [site for site in sites if site.chunked == chunked] for chunked in (True, False)}
        self._groups = {chunked: group for chunked, group in groups.items() if group}
        self._matrices, self._learning = _Matrices([], {}, {}), False
        self._model_norm: float | None = None

    def _parameters(self) -> Iterator[Tensor]:
        return (tensor for stored in self._stored for tensor in stored.values() if tensor is not None)

    @torch.no_grad()
    def _current_matrices(self, device: torch.device) -> _Matrices:
        """Replaced whole: another thread may be reading the old ones."""
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
        """Return the largest singular values `[M]` for a site's codes `[M, r]`."""
        index = self._groups[site.chunked].index(site)
        r_u, r_v = (factor[index] for factor in self._factors(site.chunked, codes.device))
        return sigma1(codes.to(r_u), r_u, r_v).to(codes)

    def _factors(self, chunked: bool, device: torch.device) -> tuple[Tensor, Tensor]:
        """Factors `[S, r, r]` of a group's sites."""
        matrices = self._current_matrices(device)
        if chunked not in matrices.factors:
            pairs = [factors(*self._u_and_v(site), self._config.scale) for site in self._groups[chunked]]
            r_u, r_v = (torch.stack([factor.to(device) for factor in side]) for side in zip(*pairs, strict=True))
            matrices.factors[chunked] = (r_u, r_v)
        return matrices.factors[chunked]

    @torch.no_grad()
    def sizes(self, applied: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return two sizes `[M]` of applied codes by site key `[M, r]`.

        `sigma1`: of the update that is largest in the Frobenius norm.
        `delta_rel_norm`: norm of all updates over that of the weights; NaN if unknown.
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
        return sigma.where(total.isfinite(), math.nan), total.sqrt() / self.model_norm()

    def model_norm(self) -> float:
        """Return `weights_norm`, cached until `forget_model_norm`."""
        if self._model_norm is None:
            self._model_norm = weights_norm(self._updates)
        return self._model_norm

    def forget_model_norm(self) -> None:
        """Compute the norm again next time."""
        self._model_norm = None

    def apply(self, codes: Mapping[bool, Tensor]) -> dict[str, Tensor]:
        """Return codes by site key within the limits: `[.., r]` for chunk-coded sites (True) and the others (False).

        A token within the limits keeps its codes bit for bit. On a GPU this waits once a forward.
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
        """Return applied codes `[M, r]` by site key, zero if the update's Frobenius norm is at most `eps`. Codes that
        are not finite stay.
        """
        code_by_site: dict[str, Tensor] = {}
        for chunked, group in self._groups.items():
            codes = torch.stack([applied[site.key] for site in group])  # [S, M, r]
            grams = self._current_matrices(codes.device).grams[chunked]
            wide = codes.to(grams.dtype)
            small = ((wide @ grams) * wide).sum(dim=-1) <= eps**2
            codes = codes.masked_fill(small[..., None], 0.0)
            code_by_site |= {site.key: code for site, code in zip(group, codes, strict=True)}
        return code_by_site

    @torch.no_grad()
    def _cap(self, chunked: bool, codes: Tensor, exceeds: Tensor, cap: float) -> Tensor:
        """Scales `[S, M]` for codes `[M, r]` whose norm `exceeds [M, S]` the cap, else 1."""
        rows = exceeds.any(dim=1).nonzero()[:, 0]
        unique, inverse = codes[rows], torch.zeros_like(rows)
        if len(rows) > 1:  # chunk codes repeat
            unique, inverse = unique.unique(dim=0, return_inverse=True)
        r_u, r_v = self._factors(chunked, codes.device)
        unique_scales = codes.new_ones(len(unique), len(r_u))
        needed = torch.zeros(unique_scales.shape, dtype=torch.bool, device=codes.device)
        needed.index_put_((inverse,), exceeds[rows], accumulate=True)
        # At once: a call per site takes longer than a layer.
        for pairs in needed.nonzero().split(max(1, _MOST_CELLS // codes.shape[1] ** 2)):
            code, site = pairs.unbind(dim=1)
            largest = sigma1(unique[code].to(r_u), r_u[site], r_v[site])
            unique_scales[code, site] = (cap / largest.clamp(min=cap)).to(codes)
        scales = codes.new_ones(len(r_u), len(codes))
        scales[:, rows] = unique_scales[inverse].T
        return scales


def weights_norm(sites: Iterable[Site]) -> float:
    """Return the joint Frobenius norm of the model's weights at sites; NaN unless each is a plain weight."""
    squares = [
        float(_whole(site.module.weight.detach().to(torch.float32).square().sum()))
        if multiplies_its_weight(site.module)
        else math.nan
        for site in sites
    ]
    return math.sqrt(sum(squares))


def multiplies_its_weight(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a layer is known to multiply by its plain weight."""
    stored = dict(module.named_parameters()) | dict(module.named_buffers())
    if not isinstance(module, nn.Linear) or not set(stored) <= {"weight", "bias"}:
        return False
    weight = module.weight
    packed = is_wrapping_tensor(weight) and not hasattr(weight, "full_tensor")  # sharded is not packed
    if packed or weight.is_meta or not weight.is_floating_point():
        return False
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return True
    x = torch.linspace(-1, 1, module.in_features).to(weight)
    try:
        with torch.no_grad():
            output, expected = forward(module, x[None]), nn.functional.linear(x[None], weight, module.bias)
            return bool(torch.linalg.vector_norm(output - expected) <= 0.01 * torch.linalg.vector_norm(expected))
    except Exception:  # a foreign layer may raise anything
        return False


def _whole(total: Tensor) -> Tensor:
    """Sum over ranks, if the weight is sharded."""
    whole: Tensor = total.full_tensor() if hasattr(total, "full_tensor") else total
    return whole


def decorrelation(codes: Tensor, real: Tensor) -> Tensor:
    """Return the mean squared correlation between dimensions of codes `[B, T, r]` over real tokens `[B, T]`."""
    rank, codes = codes.shape[-1], codes[real]
    if rank < 2 or len(codes) < 2:
        return codes.new_zeros(())
    centred = codes - codes.mean(dim=0)
    unit = centred / (centred.norm(dim=0) + 1e-8)
    correlation = unit.T @ unit
    return (correlation.square().sum() - correlation.diagonal().square().sum()) / (rank * (rank - 1))


def soft_flips(codes: Tensor, real: Tensor) -> Tensor:
    """Return the mean of 1 - cos(|c_t|, |c_t+1|) over neighbouring real tokens: codes `[B, T, r]`, real `[B, T]`."""
    pairs = real[:, 1:] & real[:, :-1]
    if not bool(pairs.any()):
        return codes.new_zeros(())
    size = codes.abs()
    return (1 - torch.cosine_similarity(size[:, 1:], size[:, :-1], dim=-1))[pairs].mean()


def flip_penalty(codes: Tensor, real: Tensor, weight: float = 0.1, free: float = 0.1) -> Tensor:
    """Return `weight * max(0, flips - free)^2` of `soft_flips`."""
    return weight * (soft_flips(codes, real) - free).clamp(min=0).square()
