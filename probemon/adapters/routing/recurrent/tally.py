"""What the steps and states of layers add up to: counts, sums and sketches by layer, and alerts of windows.

tally = StateTally(names, limit)
tally.add(told)                     # Told: of n tokens of one row, in order
tally.report()                      # {"ssm.3": {"delta_p50": ..., "half_life_p50": ..., ...}}
tally.alerts                        # the alerts that hold now
"""

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

WINDOW = 512  # tokens after which alerts are judged
FORGETS, KEEPS, RESET = 0.1, 0.99, -3.0  # decays under and over which a head forgets at once, or never; and a log decay
_OPEN = 10.0  # times the median: a step so long opens the state to its token
_SHORT, _MOST_SHORT = 2.0, 0.95
_FULL, _MOST_FULL, _FULL_FROM = 0.99, 0.95, 64  # a state that holds all tokens so far says nothing in a short text
_MOST_AT_LIMIT, _MOST_GROWTH = 0.5, 2.0
KINDS = NOT_FINITE, SHORT, FULL, AT_LIMIT = "not finite", "short", "full", "at limit"
GROWS = "grows"
# What an alert looks at, and over which value it is raised.
_ALERTS = {
    NOT_FINITE: ("tokens whose step or state is not finite", 0.0),
    SHORT: (f"share of heads that hold less than {_SHORT:.0f} tokens", _MOST_SHORT),
    FULL: ("share of heads that forget nothing", _MOST_FULL),
    AT_LIMIT: ("share of steps at their limit", _MOST_AT_LIMIT),
    GROWS: (f"growth of the state in {WINDOW} tokens", _MOST_GROWTH),
}
# How many tokens it takes to judge a kind: of all rows, and for the last of one.
_NEEDED = {SHORT: WINDOW, FULL: WINDOW, AT_LIMIT: WINDOW, GROWS: 2 * WINDOW + 1}
_SKETCHED = 64  # tokens whose steps are added to the sketches together
_CALM = 0.9  # of what raises an alert: under that it is over


@dataclass(frozen=True)
class Told:
    """Of n tokens of one row in S layers.

    - `dt` `[S, n, H]`, `log_decay` and `length` (the effective length) `[S, n, K]`, `position` `[n]` from 0.
    - `norm` `[S, n]` of the whole state, `share` `[S, n]` of it that is new, `state` `[S, *state]`, the last one: None
      where states are not followed. `grown` `[S, n]`: the norm over that of the same row `WINDOW` tokens before, NaN
      in a row's first two windows.
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
        """Where at least half of a layer's decays are under exp(-3), `[S, n]`."""
        return (self.log_decay < RESET).float().mean(dim=-1) >= 0.5

    def finite(self) -> Tensor:
        """Where a layer's step, decays, lengths and the norm of its state are finite, `[S, n]`."""
        finite = self.dt.isfinite().all(-1) & self.log_decay.isfinite().all(-1) & self.length.isfinite().all(-1)
        return finite if self.norm is None else finite & self.norm.isfinite()

    def take(self, which: Tensor) -> Told:
        """Return the tokens `which` (indices, or a mask) alone, with the state after all of them."""

        def taken(values: Tensor | None) -> Tensor | None:
            return None if values is None else values[:, which]

        return Told(
            dt=self.dt[:, which],
            log_decay=self.log_decay[:, which],
            length=self.length[:, which],
            position=self.position[which],
            norm=taken(self.norm),
            share=taken(self.share),
            grown=taken(self.grown),
            state=self.state,
        )


class StateTally:
    """Of layers of one kind. `limit`: the least and the largest step."""

    def __init__(
        self,
        names: list[str],
        limit: tuple[float, float],
        on_alert: Callable[[list[Alert]], object] = lambda alerts: None,
    ) -> None:
        self._names, self._limit, self._on_alert = names, limit, on_alert
        self._streams = [Stream(SSM, name, int(name.rpartition(".")[2])) for name in names]
        self._judged: set[str] = set()  # kinds of which something was looked at
        self.n_tokens = self._n_finite = self._n_window = 0
        self._n_not_finite = [0] * len(names)
        self._n_known = self._n_full = self._n_window_known = 0  # of which all that came before was seen
        self._steps = [LogSketch() for _ in names]
        self._unsketched: list[Tensor] = []
        self._sums: dict[str, Tensor] = {}
        self._window: dict[str, Tensor] = {}
        self._state: Tensor | None = None
        self._raised: dict[tuple[int, str], Alert] = {}

    @property
    def alerts(self) -> list[Alert]:
        """Those that hold now."""
        return list(self._raised.values())

    @property
    def needed(self) -> dict[str, int]:
        """How many tokens it takes to judge the kinds of alert that are not judged yet."""
        return {kind: n for kind, n in _NEEDED.items() if kind not in self._judged}

    def add(self, told: Told, *, known: bool = True) -> None:
        """Count n tokens; judge alerts wherever a window is full. `known`: whether all tokens before were seen.

        A token that is not finite in one of the layers is only counted: one of them would make every mean NaN.
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
                "log_decay": told.log_decay.sum(1),  # by head: [S, K]
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
        grown = told.grown[
            :, ~told.grown.isnan().any(dim=0)
        ]  # what is not known yet says nothing, also not that it is over
        if grown.shape[1]:
            for i, ratio in enumerate(grown.amax(dim=1).tolist()):
                self._judge(i, GROWS, ratio)

    def _sketch(self) -> None:
        """Add the newest steps to the sketches, of several tokens at once: one by one they cost half of all."""
        if self._unsketched:
            for sketch, dt in zip(self._steps, torch.cat(self._unsketched, dim=1), strict=True):
                sketch.add_all(dt.flatten().numpy())
            self._unsketched = []

    def report(self) -> dict[str, dict[str, Any]]:
        """Return by layer what its tokens add up to; empty without tokens.

        - `n_tokens` that are finite in every layer of the kind, of which all else is told; `n_not_finite` in this one
        - `delta_mean`, `delta_p5`, `delta_p50`, `delta_p95`: the step; `open`: the share of steps over ten times the
          median; `at_limit`: the share at the least or largest step
        - `half_life_p5`, `half_life_p50`, `half_life_p95`: in tokens, over heads
        - `length_mean`: how many tokens a state holds; `forgets`, `keeps`: the shares of decays under .1 and over .99
        - `resets`: tokens at which half of the heads forget all
        - `norm`, `update_share`, `effective_rank` (of the newest state): where states are followed
        """
        self._sketch()
        return {name: self._of_layer(i) for i, name in enumerate(self._names)} if self.n_tokens else {}

    def _of_layer(self, i: int) -> dict[str, Any]:
        n, sums, steps = self._n_finite, self._sums, self._steps[i]
        if not n:
            return {"n_tokens": 0, "n_not_finite": self._n_not_finite[i]}
        half = math.log(2) / (-sums["log_decay"][i] / n).double()
        quantiles = torch.quantile(half, torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)).tolist()
        told: dict[str, Any] = {
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
        told["length_mean"] = float(sums["length"][i]) / self._n_known if self._n_known else None
        if self._state is not None:
            told |= {
                "norm": float(sums["norm"][i]) / self._n_known,
                "update_share": float(sums["share"][i]) / self._n_known,
                "effective_rank": float(effective_rank(self._state[i]).mean()),
            }
        return told

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
        """Raise an alert of a layer, or clear it once it is clearly over; say where that is news."""
        metric, most = _ALERTS[kind]
        self._judged.add(kind)
        holds = (i, kind) in self._raised
        alert = Alert(
            raised=True,
            kind=kind,
            metric=metric,
            stream=self._streams[i],
            value=value,
            threshold=most,
            at=self.n_tokens,
        )
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
