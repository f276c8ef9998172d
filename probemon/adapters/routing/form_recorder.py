"""FormRecorder: how forms of an update behave while they steer, and alerts.

with RoutingMonitor(model, bem=bem) as monitor:
    recorder = FormRecorder(bem, monitor)
    model.generate(**inputs)
recorder.report()            # {"o.3": {"dead": 0.25, "usage_entropy": ..., ...}, ...}
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
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
from probemon.errors import ConfigError
from probemon.tracking.align import PlacedTokens
from probemon.util.checks import LARGEST, check_count, check_number

_ALIVE = 0.1  # of an even use; below, a component is dead
_MOST_ROWS = 4096  # with a remembered last token


@dataclass(frozen=True)
class FormLimits:
    """Limits above which there is an alert; None for never.

    - `dead`: share of components that are almost never kept.
    - `saturated`: share of outputs stretched to the bound.
    - `correlated`: correlation between two gates.
    - `ratio`: update size relative to the site's own output, 95th percentile.

    Non-finite values always alert.
    """

    dead: float | None = 0.5
    saturated: float | None = 0.5
    correlated: float | None = 0.95
    ratio: float | None = 1.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            if (value := getattr(self, limit.name)) is not None:
                check_number(limit.name, value, low=0, high=LARGEST, remedy="give 0 or more, or None for no alert")


class _Newest:
    """Arrays about the newest tokens, of `most` or somewhat more; the first of a batch has a row for each."""

    def __init__(self, most: int) -> None:
        self._most, self.n = most, 0
        self._batches: deque[tuple[Singles, ...]] = deque()

    def add(self, *arrays: Singles) -> None:
        self._batches.append(arrays)
        self.n += len(arrays[0])
        while self.n - len(self._batches[0][0]) >= self._most:
            self.n -= len(self._batches.popleft()[0])

    def joined(self) -> list[Singles]:
        return [np.concatenate(parts) for parts in zip(*self._batches, strict=True)]


class FormRecorder:
    """Records codes and update sizes of the last `most_tokens` tokens of `routing`.

    Until the block of `routing` ends, the adapter measures update sizes in its forwards. Raises `ConfigError` for a
    low_rank adapter, or if `routing` does not watch this adapter.
    """

    def __init__(
        self, bem: Bem, routing: Routing, *, most_tokens: int = 1 << 16, limits: FormLimits | None = None
    ) -> None:
        if not isinstance(bem, Bem):
            raise ConfigError(f"{type(bem).__name__} is not an adapter: give what attach_bem returned")
        if bem.config.form == "low_rank":
            raise ConfigError("this adapter's form is low_rank: watch its codes with RoutingMonitor(model, bem=bem)")
        source = routing.source_of(bem) if isinstance(routing, Routing) else None
        if source is None:
            raise ConfigError(
                "routing does not watch this adapter: give RoutingMonitor(model, bem=bem), or the Routing(bem=bem) that"
                " follows a run"
            )
        if limits is not None and not isinstance(limits, FormLimits):
            raise ConfigError(f"limits is {limits!r}: give FormLimits(...) of probemon.adapters.routing.form_recorder")
        self._limits = limits or FormLimits()
        self._bem, self._source, self._most = bem, source, check_count("most_tokens", most_tokens, least=1)
        # Codes, pairs of neighbours, and shares of updates left by limits `[m, sites]`; keys as in `_takes`.
        self._taken: dict[str, _Newest] = {}
        self._sizes = _Newest(self._most)
        self._last: OrderedDict[tuple[str, int, str], tuple[int, Singles]] = OrderedDict()
        routing.listen(self._take)
        self._source.measure()

    def _takes(self) -> dict[str, str]:
        """By site, the level of its codes; "" if each token's own level decides."""
        chosen = {} if self._bem.levels is None else self._bem.levels.chosen()
        return {site.name: "chunk" if site.chunked else chosen.get(site.name, "") for site in self._bem.sites}

    def _take(self, placed: PlacedTokens, decisions: Decisions, record: RoutingRecord) -> None:
        if record.source != BEM or decisions.level is None:
            return
        if decisions.measured is not None:
            self._sizes.add(decisions.measured)
        shares = self._shares_of(decisions)
        streams = [stream.level for stream in self._source.streams]
        for level in set(self._takes().values()):
            n = np.arange(len(placed))
            codes = decisions.raw[streams.index(level) if level else decisions.level, n]
            pairs = self._neighbours(placed, record.request_id, level, codes)
            self._taken.setdefault(level, _Newest(self._most)).add(codes, pairs, shares)

    def _shares_of(self, decisions: Decisions) -> Singles:
        """Shares of updates left by the limits `[m, sites]`; NaN if not measured."""
        if decisions.measured is None:
            return np.full((len(decisions), len(self._bem.sites)), np.nan, dtype=np.float32)
        return decisions.measured[:, [name == "share" for _, name in names_of(self._bem)]]

    def _neighbours(self, placed: PlacedTokens, request: str, level: str, codes: Singles) -> Singles:
        """Codes `[m, 2, r]` of successive tokens of a sequence."""
        pairs = []
        begins = np.zeros(len(placed), bool) if placed.begins is None else placed.begins
        for row, column, begin, code in zip(
            placed.rows.tolist(), placed.columns.tolist(), begins.tolist(), codes, strict=True
        ):
            before, last = self._last.get((request, row, level), (-2, code))
            if before == column - 1 and not begin:
                pairs.append((last, code))
            self._last[request, row, level] = column, code
            self._last.move_to_end((request, row, level))
        while len(self._last) > _MOST_ROWS:
            self._last.popitem(last=False)
        return np.asarray(pairs, dtype=np.float32).reshape(-1, 2, codes.shape[1])

    @torch.no_grad()
    def report(self) -> dict[str, dict[str, Any]]:
        """Return by site name what its form did over `n_tokens` tokens. Unknown values are None.

        - every form: `ratio`, `ratio_p95` of the update to the site's own output; `n_sizes_not_finite` tokens left out
          of these.
        - head_groups: `gate_mean`, `gate_variance`, `gate_p5`, `gate_p95` by group; `gate_correlations`, and the
          largest, `gate_correlation`; `share` of the update's square by group; `energy` by group, mean log of the
          input's mean square, and `n_silent` tokens without one.
        - rank_mask: `usage` by component; `dead`, share of components; `flips` between successive tokens; `margin`
          between kept and dropped; `usage_entropy`, and `information` of a token's mask, in nats.
        - kronecker: means of applied updates: `frobenius`, `sigma1_at_most`, `stable_rank_at_least` (their squared
          ratio), exact for one term; `from_orthogonal` by term, the norm of `A A^T / tr(A A^T) - I / a1`.
        - film: `stretch`, `shift`, mean applied sizes; `saturated`, share of outputs stretched to the bound;
          `n_not_finite`.
        """
        by_site, levels, sizes = {}, self._takes(), self._measured()
        for i, site in enumerate(self._bem.sites):
            taken = self._taken.get(levels[site.name])
            if taken is None or not taken.n:
                continue
            form = cast(Form, self._bem.updates[site.key])
            codes, pairs, shares = (torch.from_numpy(array).to(next(form.parameters())) for array in taken.joined())
            records = _records(form, codes, pairs, shares[:, i])
            by_site[site.name] = {"n_tokens": len(codes), **records, **sizes.get(site.name, {})}
        return by_site

    def _measured(self) -> dict[str, dict[str, Any]]:
        sizes_by_site: dict[str, dict[str, Any]] = {}
        if not self._sizes.n:
            return sizes_by_site
        by_site: dict[str, dict[str, Numbers]] = {}
        [every] = self._sizes.joined()
        for (site, name), values in zip(names_of(self._bem), every.astype(np.float64).T, strict=True):
            by_site.setdefault(site, {})[name] = values
        for site, sizes in by_site.items():
            energies = [sizes[name] for name in sizes if name.startswith("energy")]
            sizes_by_site[site] = {
                "ratio": _of_finite(np.mean, sizes["ratio"]),
                "ratio_p95": _of_finite(np.quantile, sizes["ratio"], 0.95),
                "n_sizes_not_finite": int((~np.isfinite(sizes["ratio"])).sum()),
            }
            if energies:
                sizes_by_site[site]["energy"] = [_of_finite(np.mean, values) for values in energies]
                sizes_by_site[site]["n_silent"] = [int((~np.isfinite(values)).sum()) for values in energies]
        return sizes_by_site

    def alerts(self) -> list[str]:
        """Return a sentence for each problem of a site."""
        limits = self._limits
        past = (  # metric, limit, sentence
            ("dead", limits.dead, "{:.0%} of components are almost never kept (dead)"),
            ("saturated", limits.saturated, "{:.0%} of outputs are stretched to the bound (saturated)"),
            ("gate_correlation", limits.correlated, "two gates say the same (correlation {:.2f})"),
            (
                "ratio_p95",
                limits.ratio,
                "at one token in twenty the update is {:.2g} times as large as the site's own output",
            ),
            ("n_not_finite", 0, "codes of {} tokens were not finite"),
            ("n_sizes_not_finite", 0, "sizes of updates of {} tokens were not finite"),
        )
        return [
            f"{self._bem.config.form} {name}: {sentence.format(record[metric])}"
            for name, record in self.report().items()
            for metric, limit, sentence in past
            if limit is not None and (record.get(metric) or 0) > limit
        ]


def _records(form: Form, codes: Tensor, pairs: Tensor, shares: Tensor) -> dict[str, Any]:
    """Records of a form, by codes `[M, n]` and shares `[M]` left by the limits."""
    if isinstance(form, HeadGroups):
        return _of_head_groups(form, codes, shares)
    if isinstance(form, RankMask):
        return _of_rank_mask(form, codes, pairs)
    # Sizes are of applied updates; unknown shares are left out.
    valid = codes.isfinite().all(dim=1) & shares.isfinite()
    return {
        **_sizes(form, codes[valid], shares[valid, None]),
        **({"from_orthogonal": [_from_orthogonal(a) for a in form.A]} if isinstance(form, Kronecker) else {}),
        "n_not_finite": _n_not_finite(codes),
    }


def _sizes(form: Form, codes: Tensor, shares: Tensor) -> dict[str, float | None]:
    """Mean update sizes by codes `[M, n]` and shares `[M, 1]`."""
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
    valid = codes.isfinite().all(dim=1) & shares.isfinite()
    parts = (gate * shares[:, None])[valid].square().sum(dim=0) * squares
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
    flips = (before != after).sum(dim=1) / 2  # leaving and entering are one flip
    shares = usage / form.active
    entropy = -torch.special.xlogy(shares, shares).sum()
    token_entropy = -torch.special.xlogy(masks / form.active, masks / form.active).sum(dim=1).mean()
    return {
        "usage": usage.tolist(),
        "dead": float((usage < _ALIVE * form.active / form.rank).float().mean()),
        "flips": float(flips.mean()) if len(flips) else None,
        "margin": float(margin.mean()),
        "usage_entropy": float(entropy),
        "information": float(entropy - token_entropy),
        "n_not_finite": _n_not_finite(codes),
    }


def _from_orthogonal(a: Tensor) -> float | None:
    gram = a @ a.T
    trace = gram.trace()
    even = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) / len(gram)
    return float((gram / trace - even).norm()) if float(trace) > 0 else None


def _n_not_finite(codes: Tensor) -> int:
    return int((~codes.isfinite().all(dim=1)).sum())


def _of_finite(function: Callable[..., Any], values: Numbers, *arguments: float) -> float | None:
    finite = values[np.isfinite(values)]
    return float(function(finite, *arguments)) if len(finite) else None
