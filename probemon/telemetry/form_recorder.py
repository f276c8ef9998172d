"""What forms of an update do while they steer: of each form what can go wrong with it, and alerts.

    with RoutingMonitor(model, bem=bem) as monitor:         # or manager.attach(..., routing=RoutingSettings(bem=bem))
        recorder = FormRecorder(bem, monitor)               # and run.routing
        model.generate(**inputs)
    recorder.report()            # {"o.3": {"dead": 0.25, "usage_entropy": ..., ...}, ...}
    recorder.alerts()            # ["rank_mask o.3: 60% of components are all but never kept (dead)", ...]

Beside the routing telemetry of codes, which knows nothing of forms, and of the same tokens: those of the output. It
keeps the codes of the last tokens that were steered, and computes when it is asked.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from probemon.bem.attached import Bem
from probemon.bem.forms.film import Film
from probemon.bem.forms.form import Form
from probemon.bem.forms.head_groups import HeadGroups, gate_correlation, gates
from probemon.bem.forms.kronecker import Kronecker
from probemon.bem.forms.rank_mask import RankMask, top_mask
from probemon.core.checks import check_count
from probemon.errors import ConfigError
from probemon.telemetry.decisions import BEM, Decisions, Singles
from probemon.telemetry.recorder import RoutingRecorder
from probemon.telemetry.records import RoutingRecord
from probemon.telemetry.routers import BemController
from probemon.tracking.align import PlacedTokens

# From these on there is an alert: shares of components and outputs, and a correlation between two gates.
MOST_DEAD, MOST_SATURATED, MOST_CORRELATED = 0.5, 0.5, 0.95
_ALIVE = 0.1  # of an even use: a component that is kept more rarely is dead
_MOST_ROWS = 4096  # whose last token is remembered


class FormRecorder:
    """Records the codes that an attached adapter's sites take, of the last `most_tokens` that `routing` records.

    Raises `ConfigError` for an adapter of low_rank, whose codes the routing telemetry tells all of, and where `routing`
    does not watch this adapter.
    """

    def __init__(self, bem: Bem, routing: RoutingRecorder, *, most_tokens: int = 1 << 16) -> None:
        if not isinstance(bem, Bem):
            raise ConfigError(f"{type(bem).__name__} is no adapter: give what attach_bem returned")
        if bem.config.form == "low_rank":
            raise ConfigError("this adapter's form is low_rank: watch its codes with RoutingMonitor(model, bem=bem)")
        if not isinstance(routing, RoutingRecorder) or not routing.watches(bem):
            raise ConfigError(
                "routing does not watch this adapter: give RoutingMonitor(model, bem=bem), or run.routing of"
                " manager.attach(..., routing=RoutingSettings(bem=bem))"
            )
        self._bem, self._most = bem, check_count("most_tokens", most_tokens, least=1)
        [self._source] = [
            source for source in routing.sources if isinstance(source, BemController) and source.bem is bem
        ]
        # By what sites take, as `_takes` says.
        self._codes: dict[str, deque[Singles]] = {}
        self._pairs: dict[str, deque[Singles]] = {}
        self._n: dict[str, int] = {}
        self._last: OrderedDict[tuple[str, int, str], tuple[int, Singles]] = OrderedDict()
        routing.listen(self._take)

    def _takes(self) -> dict[str, str]:
        """Of each site by its name, the one level whose codes it takes; "" where each token's own level decides."""
        chosen = {} if self._bem.levels is None else self._bem.levels.chosen()
        return {site.name: "chunk" if site.chunked else chosen.get(site.name, "") for site in self._bem.sites}

    def _take(self, placed: PlacedTokens, decisions: Decisions, record: RoutingRecord) -> None:
        if record.source != BEM or decisions.level is None:
            return
        streams = [stream.level for stream in self._source.streams]
        for takes in set(self._takes().values()):
            n = np.arange(len(placed))
            taken = decisions.raw[streams.index(takes) if takes else decisions.level, n]
            self._codes.setdefault(takes, deque()).append(taken)
            self._pairs.setdefault(takes, deque()).append(self._neighbours(placed, record.request_id, takes, taken))
            self._n[takes] = self._n.get(takes, 0) + len(taken)
            while self._n[takes] - len(self._codes[takes][0]) >= self._most:
                self._n[takes] -= len(self._codes[takes].popleft())
                self._pairs[takes].popleft()

    def _neighbours(self, placed: PlacedTokens, request: str, takes: str, taken: Singles) -> Singles:
        """The codes `[m, 2, r]` of tokens that follow each other in a row, in this batch or the last."""
        pairs = []
        for row, column, code in zip(placed.rows.tolist(), placed.columns.tolist(), taken, strict=True):
            before, last = self._last.get((request, row, takes), (-2, code))
            if before == column - 1:
                pairs.append((last, code))
            self._last[request, row, takes] = column, code
            self._last.move_to_end((request, row, takes))
        while len(self._last) > _MOST_ROWS:
            self._last.popitem(last=False)
        return np.asarray(pairs, dtype=np.float32).reshape(-1, 2, taken.shape[1])

    @torch.no_grad()
    def report(self) -> dict[str, dict[str, Any]]:
        """Return what each site's form did, by the site's name; `n_tokens` says over how many. Empty without tokens.

        - head_groups: `gate_mean`, `gate_variance`, `gate_p5`, `gate_p95` by group; `gate_correlations` of each two
          (None where one does not vary), and `gate_correlation`, the largest of them; `share` of the update's square by
          group
        - rank_mask: `usage` by component, `dead` share of components, `flips` between neighbouring tokens of a row (of
          `active`; None where there were none), `margin` between what is kept and what is not, `usage_entropy` and
          `information` (of a token's mask, in nats)
        - kronecker: `frobenius`, `sigma1_at_most` and `stable_rank_at_least`, their squared ratio: means, exact for one
          term; `from_orthogonal` by term, the norm of `A A^T / tr(A A^T) - I / a1`: 0 where the rows of A are
          orthogonal and of one length; None for an A of zeros
        - film: `stretch` and `shift`, mean sizes; `saturated` share of outputs; `n_not_finite` tokens
        """
        found, takes = {}, self._takes()
        for site in self._bem.sites:
            if not self._n.get(takes[site.name]):
                continue
            form = cast(Form, self._bem.updates[site.key])
            codes, pairs = (
                torch.from_numpy(np.concatenate(list(kept[takes[site.name]]))).to(next(form.parameters()))
                for kept in (self._codes, self._pairs)
            )
            found[site.name] = {"n_tokens": len(codes), **_records(form, codes, pairs)}
        return found

    def alerts(self) -> list[str]:
        """Return a sentence for each site and what is wrong with it."""
        found = []
        for name, said in self.report().items():
            where = f"{self._bem.config.form} {name}"
            if said.get("dead", 0) > MOST_DEAD:
                found.append(f"{where}: {said['dead']:.0%} of components are all but never kept (dead)")
            if said.get("saturated", 0) > MOST_SATURATED:
                found.append(f"{where}: {said['saturated']:.0%} of outputs are stretched to the bound (saturated)")
            if said.get("gate_correlation", 0) > MOST_CORRELATED:
                found.append(f"{where}: two gates say the same (correlation {said['gate_correlation']:.2f})")
            if said.get("n_not_finite", 0):
                found.append(f"{where}: codes of {said['n_not_finite']} tokens were not finite")
        return found


def _records(form: Form, codes: Tensor, pairs: Tensor) -> dict[str, Any]:
    if isinstance(form, HeadGroups):
        return _of_head_groups(form, codes)
    if isinstance(form, RankMask):
        return _of_rank_mask(form, codes, pairs)
    if isinstance(form, Kronecker):
        sigma1, frobenius = form.sizes(codes)
        stable = (frobenius / sigma1).square().where(sigma1 > 0, 0.0)
        return {
            "frobenius": float(frobenius.mean()),
            "sigma1_at_most": float(sigma1.mean()),
            "stable_rank_at_least": float(stable.mean()),
            "from_orthogonal": [_from_orthogonal(a) for a in form.A],
            "n_not_finite": _n_not_finite(codes),
        }
    film = cast(Film, form)
    finite = codes[codes.isfinite().all(dim=1)]
    gamma, beta = film.gamma_beta(finite)
    return {
        "stretch": float(gamma.abs().mean()),
        "shift": float(beta.abs().mean()),
        "saturated": float(film.saturation(finite).mean()),
        "n_not_finite": _n_not_finite(codes),
    }


def _of_head_groups(form: HeadGroups, codes: Tensor) -> dict[str, Any]:
    gate = gates(codes)
    low, high = torch.quantile(gate.nan_to_num(), torch.tensor([0.05, 0.95]).to(gate), dim=0)
    correlations = gate_correlation(gate)
    between = correlations.clone().fill_diagonal_(0).abs().nan_to_num()
    squares = ((form.U.mT @ form.U) * (form.V.mT @ form.V)).sum(dim=(1, 2)).clamp(min=0)
    parts = gate.square().mean(dim=0) * squares
    return {
        "gate_mean": gate.mean(dim=0).tolist(),
        "gate_variance": gate.var(dim=0, unbiased=False).tolist(),
        "gate_p5": low.tolist(),
        "gate_p95": high.tolist(),
        "gate_correlations": [[None if math.isnan(r) else r for r in row] for row in correlations.tolist()],
        "gate_correlation": float(between.max()) if len(codes) > 2 else 0.0,
        "share": (parts / parts.sum().clamp(min=torch.finfo(parts.dtype).tiny)).tolist(),
        "n_not_finite": _n_not_finite(codes),
    }


def _of_rank_mask(form: RankMask, codes: Tensor, pairs: Tensor) -> dict[str, Any]:
    masks = top_mask(codes, form.active)
    usage = masks.mean(dim=0)
    ordered = codes.sort(dim=-1, descending=True).values
    margin = ordered[:, form.active - 1] - ordered[:, form.active] if form.active < form.rank else ordered[:, :0].sum(1)
    before, after = (top_mask(pairs[:, i], form.active) for i in (0, 1))
    flips = (before != after).sum(dim=1) / 2  # a component that leaves makes room for one
    shares = usage / form.active
    entropy = -torch.special.xlogy(shares, shares).sum()
    own = -torch.special.xlogy(masks / form.active, masks / form.active).sum(dim=1).mean()
    return {
        "usage": usage.tolist(),
        "dead": float((usage < _ALIVE * form.active / form.rank).float().mean()),
        "flips": float(flips.mean()) if len(flips) else None,
        "margin": float(margin.mean()),
        "usage_entropy": float(entropy),
        "information": float(entropy - own),
        "n_not_finite": _n_not_finite(codes),
    }


def _from_orthogonal(a: Tensor) -> float | None:
    gram = a @ a.T
    trace = gram.trace()
    even = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) / len(gram)
    return float((gram / trace - even).norm()) if float(trace) > 0 else None


def _n_not_finite(codes: Tensor) -> int:
    return int((~codes.isfinite().all(dim=1)).sum())
