"""Sums over steps and states of recurrent layers, and alerts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from probemon.adapters.routing.alerts import Alert
from probemon.adapters.routing.decisions import SSM, Stream
from probemon.adapters.routing.sketch import LogSketch
from probemon.host.recurrent.scan import effective_rank

WINDOW = 512  # tokens between judgements
FORGETS, KEEPS, RESET = 0.1, 0.99, -3.0  # the last one is a log decay
_OPEN = 10.0  # times the median step
_SHORT, _MOST_SHORT = 2.0, 0.95
_FULL, _MOST_FULL, _FULL_FROM = 0.99, 0.95, 64  # a short text is always held whole
_MOST_AT_LIMIT, _MOST_GROWTH = 0.5, 2.0
KINDS = NOT_FINITE, SHORT, FULL, AT_LIMIT = "not finite", "short", "full", "at limit"
GROWS = "grows"
# Metric, threshold, and tokens needed to judge (of GROWS in one row).
_ALERTS = {
    NOT_FINITE: ("tokens whose step or state is not finite", 0.0, 0),
    SHORT: (f"share of heads that hold less than {_SHORT:.0f} tokens", _MOST_SHORT, WINDOW),
    FULL: ("share of heads that forget nothing", _MOST_FULL, WINDOW),
    AT_LIMIT: ("share of steps at their limit", _MOST_AT_LIMIT, WINDOW),
    GROWS: (f"growth of the state in {WINDOW} tokens", _MOST_GROWTH, 2 * WINDOW + 1),
}
_SKETCHED = 64  # tokens sketched together
_CALM = 0.9  # of the threshold; below, alerts clear


@dataclass(frozen=True)
class Told:
    """What S layers did at n tokens of one row.

    - `dt` `[S, n, H]`; `log_decay`, `length` (effective) `[S, n, K]`; `position` `[n]` from 0.
    - `norm` of the state `[S, n]`; `share` `[S, n]`, its new part; `state` after the last token `[S, *state]`.
    - `grown` `[S, n]`: norm over that `WINDOW` tokens before; NaN in a row's first two windows.
    """

    dt: Tensor
    log_decay: Tensor
    length: Tensor
    position: Tensor
    norm: Tensor | None = None
    share: Tensor | None = None
    grown: Tensor | None = None
    state: Tensor | None = None

    @property
    def resets(self) -> Tensor:
        """Mask `[S, n]`: half of a layer's decays are under exp(-3)."""
        return (self.log_decay < RESET).float().mean(dim=-1) >= 0.5

    def finite(self) -> Tensor:
        """Mask `[S, n]`: all values are finite."""
        finite = self.dt.isfinite().all(-1) & self.log_decay.isfinite().all(-1) & self.length.isfinite().all(-1)
        return finite if self.norm is None else finite & self.norm.isfinite()

    def take(self, which: Tensor) -> Told:
        """Return some tokens, by indices or mask; `state` stays."""

        by_layer = {name: getattr(self, name) for name in ("dt", "log_decay", "length", "norm", "share", "grown")}
        taken = {name: values[:, which] for name, values in by_layer.items() if values is not None}
        return replace(self, position=self.position[which], **taken)


class StateTally:
    """Sums and alerts of layers of one kind. `limit`: the smallest and largest step."""

    def __init__(
        self,
        names: list[str],
        limit: tuple[float, float],
        on_alert: Callable[[list[Alert]], object] = lambda alerts: None,
    ) -> None:
        self._names, self._limit, self._on_alert = names, limit, on_alert
        self._streams = [Stream(SSM, name, int(name.rpartition(".")[2])) for name in names]
        self._judged: set[str] = set()
        self.n_tokens = self._n_finite = self._n_window = 0
        self._n_not_finite = [0] * len(names)
        self._n_known = self._n_full = self._n_window_known = 0  # tokens whose past was seen
        self._steps = [LogSketch() for _ in names]
        self._unsketched: list[Tensor] = []
        self._sums: dict[str, Tensor] = {}
        self._window: dict[str, Tensor] = {}
        self._state: Tensor | None = None
        self._raised: dict[tuple[int, str], Alert] = {}

    @property
    def alerts(self) -> list[Alert]:
        """Alerts in force."""
        return list(self._raised.values())

    @property
    def needed(self) -> dict[str, int]:
        """Tokens needed by each kind of alert not judged yet."""
        return {kind: n for kind, (_, _, n) in _ALERTS.items() if n and kind not in self._judged}

    def add(self, told: Told, *, known: bool = True) -> None:
        """Count n tokens, and judge alerts when a window is full. `known`: all earlier tokens were seen.

        Tokens that are not finite in some layer are only counted.
        """
        self.n_tokens += told.dt.shape[1]
        finite = told.finite()
        if not bool(finite.all()):
            for i, lost in enumerate((~finite).sum(dim=1).tolist()):
                self._n_not_finite[i] += lost
                if lost:
                    self._judge(i, NOT_FINITE, self._n_not_finite[i])
            told = told.take(finite.all(dim=0))
        n = told.dt.shape[1]
        if not n:
            return
        self._n_finite += n
        self._n_window += n
        self._unsketched.append(told.dt)
        if sum(dt.shape[1] for dt in self._unsketched) >= _SKETCHED:
            self._sketch()
        decay = told.log_decay.exp()
        low, high = self._limit
        at_limit = ((told.dt <= low) & (low > 0) | (told.dt >= high)).float().mean(-1).sum(-1)
        _add(self._window, {"at_limit": at_limit})
        _add(
            self._sums,
            {
                "at_limit": at_limit,
                "dt": told.dt.mean(-1).sum(-1),
                "log_decay": told.log_decay.sum(1),  # [S, K]
                "forgets": (decay < FORGETS).float().mean(-1).sum(-1),
                "keeps": (decay > KEEPS).float().mean(-1).sum(-1),
                "resets": told.resets.float().sum(-1),
            },
        )
        if known:
            self._add_known(told)
        if self._n_window >= WINDOW:
            self._judge_window()

    def _add_known(self, told: Told) -> None:
        long = told.position >= _FULL_FROM
        most = (told.position + 1).to(told.length)[None, :, None]
        _add(
            self._window,
            {
                "short": (told.length < _SHORT).float().mean(-1).sum(-1),
                "full": (told.length > _FULL * most)[:, long].float().mean(-1).sum(-1),
            },
        )
        _add(self._sums, {"length": told.length.mean(-1).sum(-1)})
        self._n_known += told.dt.shape[1]
        self._n_window_known += told.dt.shape[1]
        self._n_full += int(long.sum())
        if told.norm is None or told.share is None or told.grown is None:
            return
        _add(self._sums, {"norm": told.norm.sum(-1), "share": told.share.sum(-1)})
        if told.state is not None and bool(told.state.isfinite().all()):
            self._state = told.state
        grown = told.grown[:, ~told.grown.isnan().any(dim=0)]  # NaN neither raises nor clears
        if grown.shape[1]:
            for i, ratio in enumerate(grown.amax(dim=1).tolist()):
                self._judge(i, GROWS, ratio)

    def _sketch(self) -> None:
        if self._unsketched:
            for sketch, dt in zip(self._steps, torch.cat(self._unsketched, dim=1), strict=True):
                sketch.add_all(dt.flatten().numpy())
            self._unsketched = []

    def report(self) -> dict[str, dict[str, Any]]:
        """Return the sums by layer; empty without tokens.

        - `n_tokens`: finite in every layer; `n_not_finite`: in this layer.
        - `delta_*`: the step; `open`: share over ten times the median; `at_limit`: share at the smallest or largest.
        - `half_life_*`: in tokens, over heads; `length_mean`: tokens that a state holds.
        - `forgets`, `keeps`: shares of decays under 0.1 and over 0.99.
        - `resets`: tokens at which half of the heads reset.
        - `norm`, `update_share`, `effective_rank`: if states are followed.
        """
        self._sketch()
        return {name: self._of_layer(i) for i, name in enumerate(self._names)} if self.n_tokens else {}

    def _of_layer(self, i: int) -> dict[str, Any]:
        n, sums, steps = self._n_finite, self._sums, self._steps[i]
        if not n:
            return {"n_tokens": 0, "n_not_finite": self._n_not_finite[i]}
        half = math.log(2) / (-sums["log_decay"][i] / n).double()
        quantiles = torch.quantile(half, torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        summary: dict[str, Any] = {
            "n_tokens": n,
            "n_not_finite": self._n_not_finite[i],
            "delta_mean": float(sums["dt"][i]) / n,
            **{f"delta_p{int(100 * q)}": steps.quantile(q) for q in (0.05, 0.5, 0.95)},
            "open": steps.share_over(_OPEN * steps.quantile(0.5)),
            "at_limit": float(sums["at_limit"][i]) / n,
            **dict(zip(("half_life_p5", "half_life_p50", "half_life_p95"), quantiles, strict=True)),
            "forgets": float(sums["forgets"][i]) / n,
            "keeps": float(sums["keeps"][i]) / n,
            "resets": int(sums["resets"][i]),
        }
        summary["length_mean"] = float(sums["length"][i]) / self._n_known if self._n_known else None
        if self._state is not None:
            summary |= {
                "norm": float(sums["norm"][i]) / self._n_known,
                "update_share": float(sums["share"][i]) / self._n_known,
                "effective_rank": float(effective_rank(self._state[i]).mean()),
            }
        return summary

    def _judge_window(self) -> None:
        window = self._window
        for i in range(len(self._names)):
            self._judge(i, AT_LIMIT, float(window["at_limit"][i]) / self._n_window)
            if self._n_window_known:
                self._judge(i, SHORT, float(window["short"][i]) / self._n_window_known)
            if self._n_full:
                self._judge(i, FULL, float(window["full"][i]) / self._n_full)
        self._window, self._n_window, self._n_window_known, self._n_full = {}, 0, 0, 0

    def _judge(self, i: int, kind: str, value: float) -> None:
        metric, most, _ = _ALERTS[kind]
        self._judged.add(kind)
        holds = (i, kind) in self._raised
        alert = Alert(True, kind, metric, self._streams[i], value, most, self.n_tokens)
        if value > most:
            self._raised[i, kind] = alert
            if not holds:
                self._on_alert([alert])
        elif holds and value < _CALM * most:
            del self._raised[i, kind]
            self._on_alert([replace(alert, raised=False, threshold=_CALM * most)])


def _add(to: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        to[name] = to[name] + value.double() if name in to else value.double()
