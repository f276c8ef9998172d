"""What forms of an update do while they steer: of each form what can go wrong with it, and alerts.

    with RoutingMonitor(model, bem=bem) as monitor:         # or manager.attach(..., followers=[Routing(bem=bem)])
        recorder = FormRecorder(bem, monitor)               # and the Routing
        model.generate(**inputs)
    recorder.report()            # {"o.3": {"dead": 0.25, "usage_entropy": ..., ...}, ...}
    recorder.alerts()            # ["rank_mask o.3: 60% of components are all but never kept (dead)", ...]

Beside the routing telemetry of codes, which knows nothing of forms, and of the same tokens: those of the output. It
keeps the codes of the last tokens that were steered, and sizes of their updates, and computes when it is asked.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from probemon.adapters.bem.attached import Bem
from probemon.adapters.bem.forms.film import Film
from probemon.adapters.bem.forms.form import Form
from probemon.adapters.bem.forms.head_groups import HeadGroups, gate_correlation, gates
from probemon.adapters.bem.forms.kronecker import Kronecker
from probemon.adapters.bem.forms.rank_mask import RankMask, top_mask
from probemon.adapters.bem.measures import names_of
from probemon.adapters.routing.decisions import BEM, Decisions, Numbers, Singles
from probemon.adapters.routing.recorder import Routing
from probemon.adapters.routing.records import RoutingRecord
from probemon.adapters.routing.routers import BemController
from probemon.errors import ConfigError
from probemon.tracking.align import PlacedTokens
from probemon.util.checks import LARGEST, check_count, check_number

_ALIVE = 0.1  # of an even use: a component that is kept more rarely is dead
_MOST_ROWS = 4096  # whose last token is remembered


@dataclass(frozen=True)
class FormLimits:
    """Past these there is an alert; None for never.

    - `dead`: share of components that are all but never kept.
    - `saturated`: share of outputs that are stretched to the bound.
    - `correlated`: correlation between two gates.
    - `ratio`: of an update to the site's own output, at one token in twenty: of 1 the update is as large.
    - `moved`: how far an update moves the hidden state, as a share of it, at one token in twenty.

    What is not finite is always an alert.
    """

    dead: float | None = 0.5
    saturated: float | None = 0.5
    correlated: float | None = 0.95
    ratio: float | None = 1.0
    moved: float | None = 0.5

    def __post_init__(self) -> None:
        for one in fields(self):
            if (value := getattr(self, one.name)) is not None:
                check_number(one.name, value, low=0, high=LARGEST, remedy="give 0 or more, or None for no alert")


class FormRecorder:
    """Records the codes that an attached adapter's sites take, of the last `most_tokens` that `routing` records, and
    how large the updates of these tokens were. From when it is made until the block of `routing` ends, the adapter
    measures that in its forwards (`probemon.adapters.bem.measures`). `limits`: when there is an alert.

    Raises `ConfigError` for an adapter of low_rank, whose codes the routing telemetry tells all of, and where `routing`
    does not watch this adapter.
    """

    def __init__(
        self, bem: Bem, routing: Routing, *, most_tokens: int = 1 << 16, limits: FormLimits | None = None
    ) -> None:
        if not isinstance(bem, Bem):
            raise ConfigError(f"{type(bem).__name__} is no adapter: give what attach_bem returned")
        if bem.config.form == "low_rank":
            raise ConfigError("this adapter's form is low_rank: watch its codes with RoutingMonitor(model, bem=bem)")
        if not isinstance(routing, Routing) or not routing.watches(bem):
            raise ConfigError(
                "routing does not watch this adapter: give RoutingMonitor(model, bem=bem), or the Routing(bem=bem) that"
                " follows a run"
            )
        if limits is not None and not isinstance(limits, FormLimits):
            raise ConfigError(f"limits is {limits!r}: give FormLimits(...) of probemon.adapters.routing.form_recorder")
        self._limits = limits or FormLimits()
        self._bem, self._most = bem, check_count("most_tokens", most_tokens, least=1)
        [self._source] = [
            source for source in routing.sources if isinstance(source, BemController) and source.bem is bem
        ]
        # By what sites take, as `_takes` says.
        self._codes: dict[str, deque[Singles]] = {}
        self._pairs: dict[str, deque[Singles]] = {}
        self._shares: dict[str, deque[Singles]] = {}  # `[m, sites]`: what the limits left of updates
        self._n: dict[str, int] = {}
        self._sizes: deque[Singles] = deque()
        self._n_sizes = 0
        self._last: OrderedDict[tuple[str, int, str], tuple[int, Singles]] = OrderedDict()
        routing.listen(self._take)
        self._source.measure()

    def _takes(self) -> dict[str, str]:
        """Of each site by its name, the one level whose codes it takes; "" where each token's own level decides."""
        chosen = {} if self._bem.levels is None else self._bem.levels.chosen()
        return {site.name: "chunk" if site.chunked else chosen.get(site.name, "") for site in self._bem.sites}

    def _take(self, placed: PlacedTokens, decisions: Decisions, record: RoutingRecord) -> None:
        if record.source != BEM or decisions.level is None:
            return
        if decisions.measured is not None:
            self._sizes.append(decisions.measured)
            self._n_sizes += len(decisions)
            while self._n_sizes - len(self._sizes[0]) >= self._most:
                self._n_sizes -= len(self._sizes.popleft())
        shares = self._shares_of(decisions)
        streams = [stream.level for stream in self._source.streams]
        for takes in set(self._takes().values()):
            n = np.arange(len(placed))
            taken = decisions.raw[streams.index(takes) if takes else decisions.level, n]
            self._codes.setdefault(takes, deque()).append(taken)
            self._pairs.setdefault(takes, deque()).append(self._neighbours(placed, record.request_id, takes, taken))
            self._shares.setdefault(takes, deque()).append(shares)
            self._n[takes] = self._n.get(takes, 0) + len(taken)
            while self._n[takes] - len(self._codes[takes][0]) >= self._most:
                self._n[takes] -= len(self._codes[takes].popleft())
                self._pairs[takes].popleft()
                self._shares[takes].popleft()

    def _shares_of(self, decisions: Decisions) -> Singles:
        """What the limits left of each token's updates, `[m, sites]`; NaN where it was not measured."""
        if decisions.measured is None:
            return np.full((len(decisions), len(self._bem.sites)), np.nan, dtype=np.float32)
        return decisions.measured[:, [name == "share" for _, name in names_of(self._bem)]]

    def _neighbours(self, placed: PlacedTokens, request: str, takes: str, taken: Singles) -> Singles:
        """The codes `[m, 2, r]` of tokens that follow each other in a sequence, in this batch or the last."""
        pairs = []
        begins = np.zeros(len(placed), bool) if placed.begins is None else placed.begins
        for row, column, begin, code in zip(
            placed.rows.tolist(), placed.columns.tolist(), begins.tolist(), taken, strict=True
        ):
            before, last = self._last.get((request, row, takes), (-2, code))
            if before == column - 1 and not begin:
                pairs.append((last, code))
            self._last[request, row, takes] = column, code
            self._last.move_to_end((request, row, takes))
        while len(self._last) > _MOST_ROWS:
            self._last.popitem(last=False)
        return np.asarray(pairs, dtype=np.float32).reshape(-1, 2, taken.shape[1])

    @torch.no_grad()
    def report(self) -> dict[str, dict[str, Any]]:
        """Return what each site's form did, by the site's name; `n_tokens` says over how many. Empty without tokens.

        - every form: `ratio` and `ratio_p95`, of the update to the site's own output; `moved` and `moved_p95`, how far
          the update moves the hidden state that its layer hands on. Each is a mean and a quantile over tokens, as
          `probemon.adapters.bem.measures` says; None where that is not known. `n_sizes_not_finite`: tokens of which the
          ratio is not finite, which are in no mean. All of them are left out where no token was measured
        - head_groups: `gate_mean`, `gate_variance`, `gate_p5`, `gate_p95` by group; `gate_correlations` of each two
          (None where one does not vary), and `gate_correlation`, the largest of them; `share` of the update's square by
          group; `energy` by group, of what the site is given: the logarithm of its mean square, as a mean over tokens
          where it is finite (None: nowhere), and `n_silent`, the tokens where it is not
        - rank_mask: `usage` by component, `dead` share of components, `flips` between neighbouring tokens of a
          sequence (of `active`; None where there were none), `margin` between what is kept and what is not,
          `usage_entropy` and `information` (of a token's mask, in nats)
        - kronecker: `frobenius`, `sigma1_at_most` and `stable_rank_at_least`, their squared ratio: means of what was
          added, after the limits, exact for one term; `from_orthogonal` by term, the norm of `A A^T / tr(A A^T) -
          I / a1`: 0 where the rows of A are orthogonal and of one length; None for an A of zeros
        - film: `stretch` and `shift`, mean sizes of what was added, after the limits; `saturated`, the share of outputs
          that it stretched to the bound; `n_not_finite` tokens

        Means of what was added are None where it is of no token known.
        """
        found, takes, sizes = {}, self._takes(), self._measured()
        for i, site in enumerate(self._bem.sites):
            if not self._n.get(takes[site.name]):
                continue
            form = cast(Form, self._bem.updates[site.key])
            codes, pairs, shares = (
                torch.from_numpy(np.concatenate(list(kept[takes[site.name]]))).to(next(form.parameters()))
                for kept in (self._codes, self._pairs, self._shares)
            )
            records = _records(form, codes, pairs, shares[:, i])
            found[site.name] = {"n_tokens": len(codes), **records, **sizes.get(site.name, {})}
        return found

    def _measured(self) -> dict[str, dict[str, Any]]:
        """What is told of the sizes of updates, by the site's name; empty where none were measured."""
        found: dict[str, dict[str, Any]] = {}
        if not self._n_sizes:
            return found
        by_site: dict[str, dict[str, Numbers]] = {}
        every = np.concatenate(list(self._sizes)).astype(np.float64)
        for (site, name), values in zip(names_of(self._bem), every.T, strict=True):
            by_site.setdefault(site, {})[name] = values
        for site, sizes in by_site.items():
            energies = [sizes[name] for name in sizes if name.startswith("energy")]
            found[site] = {
                **{name: _mean(sizes[name]) for name in ("ratio", "moved")},
                **{f"{name}_p95": _quantile(sizes[name], 0.95) for name in ("ratio", "moved")},
                "n_sizes_not_finite": int((~np.isfinite(sizes["ratio"])).sum()),
            }
            if energies:
                found[site]["energy"] = [_mean(values) for values in energies]
                found[site]["n_silent"] = [int((~np.isfinite(values)).sum()) for values in energies]
        return found

    def alerts(self) -> list[str]:
        """Return a sentence for each site and what is wrong with it."""
        found, limits = [], self._limits
        for name, said in self.report().items():
            where = f"{self._bem.config.form} {name}"

            def past(what: str, limit: float | None, said: Mapping[str, Any] = said) -> bool:
                return limit is not None and (said.get(what) or 0) > limit

            if past("dead", limits.dead):
                found.append(f"{where}: {said['dead']:.0%} of components are all but never kept (dead)")
            if past("saturated", limits.saturated):
                found.append(f"{where}: {said['saturated']:.0%} of outputs are stretched to the bound (saturated)")
            if past("gate_correlation", limits.correlated):
                found.append(f"{where}: two gates say the same (correlation {said['gate_correlation']:.2f})")
            if past("ratio_p95", limits.ratio):
                times = f"{said['ratio_p95']:.2g} times as large as the site's own output"
                found.append(f"{where}: at one token in twenty the update is {times}")
            if past("moved_p95", limits.moved):
                share = f"{said['moved_p95']:.0%} of it"
                found.append(f"{where}: at one token in twenty the update moves the hidden state by {share}")
            if said.get("n_not_finite", 0):
                found.append(f"{where}: codes of {said['n_not_finite']} tokens were not finite")
            if said.get("n_sizes_not_finite", 0):
                found.append(f"{where}: sizes of updates of {said['n_sizes_not_finite']} tokens were not finite")
        return found


def _records(form: Form, codes: Tensor, pairs: Tensor, shares: Tensor) -> dict[str, Any]:
    """What is told of a form by codes `[M, n]` and the shares `[M]` of its updates that the limits left."""
    if isinstance(form, HeadGroups):
        return _of_head_groups(form, codes, shares)
    if isinstance(form, RankMask):
        return _of_rank_mask(form, codes, pairs)
    # Sizes are of what was added; of what is not finite `n_not_finite` tells, and of a share that is not known nobody.
    known = codes.isfinite().all(dim=1) & shares.isfinite()
    return {
        **_sizes(form, codes[known], shares[known, None]),
        **({"from_orthogonal": [_from_orthogonal(a) for a in form.A]} if isinstance(form, Kronecker) else {}),
        "n_not_finite": _n_not_finite(codes),
    }


def _sizes(form: Form, codes: Tensor, shares: Tensor) -> dict[str, float | None]:
    """Mean sizes of updates by codes `[M, n]`, of which the limits left shares `[M, 1]`; None where there are none."""
    if isinstance(form, Kronecker):
        sigma1, frobenius = (size * shares[:, 0] for size in form.sizes(codes))
        stable = (frobenius / sigma1).square().where(sigma1 > 0, 0.0)
        sizes = {"frobenius": frobenius, "sigma1_at_most": sigma1, "stable_rank_at_least": stable}
    else:
        film = cast(Film, form)
        gamma, beta = (part.abs() * shares for part in film.gamma_beta(codes))
        sizes = {"stretch": gamma, "shift": beta, "saturated": film.saturation(gamma)}
    return {name: float(size.mean()) if len(size) else None for name, size in sizes.items()}


def _of_head_groups(form: HeadGroups, codes: Tensor, shares: Tensor) -> dict[str, Any]:
    gate = gates(codes)
    low, high = torch.quantile(gate.nan_to_num(), torch.tensor([0.05, 0.95]).to(gate), dim=0)
    correlations = gate_correlation(gate)
    between = correlations.clone().fill_diagonal_(0).abs().nan_to_num()
    squares = ((form.U.mT @ form.U) * (form.V.mT @ form.V)).sum(dim=(1, 2)).clamp(min=0)
    known = codes.isfinite().all(dim=1) & shares.isfinite()
    parts = (gate * shares[:, None])[known].square().sum(dim=0) * squares
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


def _mean(values: Numbers) -> float | None:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else None


def _quantile(values: Numbers, q: float) -> float | None:
    finite = values[np.isfinite(values)]
    return float(np.quantile(finite, q)) if len(finite) else None
