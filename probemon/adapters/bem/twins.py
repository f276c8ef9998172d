"""Low-rank twins: a form's update as `s U diag(c) V^T`.

    twin = low_rank_twin(bem.updates[site.key], bem.config)     # U [out, r], V [in, r], fp64
    twin.codes(applied)                                         # [M, r]

    low_rank       itself
    head_groups    V has V_g as blocks, U the U_g side by side; c is each gate, r times
    rank_mask      U rotated as the components; c is the mask
    kronecker      A_k (x) B_k by singular vectors; c repeats the term's number

A film is not a matrix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from probemon.adapters.bem.config import BemConfig
from probemon.adapters.bem.forms.head_groups import HeadGroups, gates
from probemon.adapters.bem.forms.kronecker import Kronecker
from probemon.adapters.bem.forms.rank_mask import RankMask, top_mask
from probemon.adapters.bem.sites import SiteUpdate
from probemon.errors import ConfigError


@dataclass(frozen=True, eq=False)
class Twin:
    """U `[out, r]` and V `[in, r]` of a site, fp64 on the CPU, and its codes."""

    U: Tensor
    V: Tensor
    of_applied: Callable[[Tensor], Tensor]

    def codes(self, applied: Tensor) -> Tensor:
        """Return codes `[M, r]` of applied ones, fp64 on the CPU."""
        return self.of_applied(applied.double().cpu())


def check_has_twin(config: BemConfig) -> None:
    """Raise `ConfigError` for a form that no static update equals."""
    if config.gate_inputs:
        raise ConfigError(
            f"this adapter's gates read {' and '.join(config.gate_inputs)} at each token (gate_inputs), which no matrix"
            " that is added to a weight does, so it has no LoRA. Keep it attached"
        )
    if config.form == "film":
        raise ConfigError(
            "this adapter's form is 'film', which scales and moves outputs: no matrix that is added to a weight does"
            " the same, so it has no LoRA. Keep it attached"
        )


@torch.no_grad()
def low_rank_twin(update: nn.Module, config: BemConfig) -> Twin:
    """Return the twin of one site's update. Raises as `check_has_twin`."""
    check_has_twin(config)
    if config.form == "low_rank":
        site_update = cast(SiteUpdate, update)
        return Twin(_plain(site_update.U), _plain(site_update.V), lambda applied: applied)
    if config.form == "head_groups":
        groups = cast(HeadGroups, update)
        u, v = _plain(groups.U), _plain(groups.V)
        return Twin(
            u.permute(1, 0, 2).flatten(1),
            torch.block_diag(*v.unbind()),
            lambda applied: (gates(applied[:, :-1]) * applied[:, -1:]).repeat_interleave(groups.rank, dim=1),
        )
    if config.form == "rank_mask":
        mask = cast(RankMask, update)
        return Twin(
            mask.rotated(_plain(mask.U)),
            _plain(mask.V),
            lambda applied: top_mask(applied[:, :-1], mask.active) * applied[:, -1:],
        )
    terms = cast(Kronecker, update)
    pairs = [_kronecker_factors(a, b) for a, b in zip(_plain(terms.A), _plain(terms.B), strict=True)]
    term_index = torch.tensor([k for k, (u, _) in enumerate(pairs) for _ in range(u.shape[1])], dtype=torch.int64)
    return Twin(
        torch.cat([u for u, _ in pairs], dim=1),
        torch.cat([v for _, v in pairs], dim=1),
        lambda applied: (applied[:, :-1] * applied[:, -1:])[:, term_index],
    )


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().double().cpu()


def _kronecker_factors(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """U `[out, r]` and V `[in, r]` with `U V^T = A (x) B`."""
    (u_a, v_a), (u_b, v_b) = _singular(a), _singular(b)
    return torch.kron(u_a, u_b), torch.kron(v_a, v_b)


def _singular(matrix: Tensor) -> tuple[Tensor, Tensor]:
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    nonzero = values > values.amax() * 1e-12
    return u[:, nonzero] * values[nonzero], v[nonzero].T
