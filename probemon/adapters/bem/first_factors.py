"""First factors of updates, which multiply a site's input: their start from the model's weights, and their overlap.

    start_by_svd(sites, updates)            # BemConfig(start="svd")
    overlap(updates)                        # LossWeights(orthogonality=0.1)

Low-rank updates take V from the top right singular vectors of the site's weight, as PiSSA (Meng et al. 2024) does; here
the weight stays as it is and U is zero. Kronecker products take B from those of the weight's rearrangement, whose best
approximation of rank k is the weight's by k Kronecker products (Van Loan and Pitsianis 1993).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from probemon.adapters.bem.forms.film import Film
from probemon.adapters.bem.forms.kronecker import Kronecker
from probemon.adapters.bem.governance import multiplies_its_weight
from probemon.adapters.bem.sites import Site, SiteUpdate
from probemon.errors import ConfigError, UnsupportedModel

_TINY = 1e-12


@torch.no_grad()
def start_by_svd(sites: Sequence[Site], updates: nn.ModuleDict) -> None:
    """Set V or B of each site, scaled to the mean size of a random start. Columns beyond the weight's rank stay random.

    Decomposes each weight once, in fp32 on its device. Raises `UnsupportedModel` for a site without a plain weight.
    """
    for site in sites:
        if not multiplies_its_weight(site.module):
            raise UnsupportedModel(
                f"site {site.name}: start='svd' needs a layer with a plain floating-point weight, and"
                f" {type(site.module).__name__} has none: use start='random'"
            )
        weight, update = site.module.weight.detach().float(), updates[site.key]
        if isinstance(update, Kronecker):
            vectors = _top_right(rearranged(weight, update.shapes), update.n_codes)
            _, (rows, columns) = update.shapes
            update.B[: len(vectors)] = math.sqrt(rows / 3) * vectors.view(-1, rows, columns).to(update.B)
        else:
            v = cast(SiteUpdate, update).V
            vectors = _top_right(weight, v.shape[1])
            v[:, : len(vectors)] = math.sqrt(1 / 3) * vectors.T.to(v)


def rearranged(weight: Tensor, shapes: tuple[tuple[int, int], tuple[int, int]]) -> Tensor:
    """Return blocks of a weight `[a1 b1, a2 b2]` as rows `[a1 a2, b1 b2]`: of `A (x) B` the outer product of both."""
    (a1, a2), (b1, b2) = shapes
    return weight.view(a1, b1, a2, b2).transpose(1, 2).reshape(a1 * a2, b1 * b2)


def _top_right(matrix: Tensor, n: int) -> Tensor:
    """Up to n right singular vectors `[k, in]`, each with its largest number positive, so that signs are defined."""
    vectors: Tensor = torch.linalg.svd(matrix, full_matrices=False).Vh[:n]
    largest = vectors.gather(1, vectors.abs().argmax(dim=1, keepdim=True))
    return vectors * largest.sign()


def overlap(updates: Iterable[nn.Module]) -> Tensor:
    """Return the mean squared cosine between columns of V (of a head group's V, between the B of two Kronecker terms),
    averaged over sites: 0 if they are orthogonal, 1 if they are copies. Differentiable; 0 for single columns.

    Raises `ConfigError` for films, which have no such factor.
    """
    return torch.stack([_overlap(update).cpu() for update in updates]).mean()


def _overlap(update: nn.Module) -> Tensor:
    if isinstance(update, Film):
        raise ConfigError("a film has no factors to keep orthogonal: leave LossWeights(orthogonality=0)")
    # [.., in, r]
    columns = update.B.flatten(1).T if isinstance(update, Kronecker) else cast(SiteUpdate, update).V
    n = columns.shape[-1]
    if n < 2:
        return columns.new_zeros(())
    unit = columns / (columns.square().sum(dim=-2, keepdim=True) + _TINY).sqrt()
    cosines = unit.mT @ unit
    others = ~torch.eye(n, dtype=torch.bool, device=columns.device)
    return cosines[..., others].square().mean()
