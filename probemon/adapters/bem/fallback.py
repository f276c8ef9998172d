"""Fallbacks: codes are the static 1 if the controller fails, and `Codes.fallback` says so.

    bem = attach_bem(model, config, fallback=FallbackPolicy(min_confidence=0.2))
    bem.fallbacks                                    # Fallbacks(n_forwards=40, n_failed=0, n_refused=0, ...)

With c = 1 an update is `s U V^T`, a static LoRA under the same limits.

    cause                             falls back            breaker
    the controller raises             the whole forward     a failure
    the breaker is open               the whole forward
    a code is not finite              its tokens            a failure, once per row
    confidence under a threshold      its tokens

The state goes on, so later codes are the same as without a fallback. A token falls back by its own codes alone, with a
cache or without. `ProbemonError` and out-of-memory errors are raised.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from probemon.adapters.bem.controller import Codes, Controller
from probemon.adapters.bem.memory import is_out_of_memory
from probemon.adapters.bem.state import Carry, ControllerState
from probemon.errors import ConfigError, ProbemonError
from probemon.monitor.breaker import HALF_OPEN, OPEN, Breaker, Circuit
from probemon.util.checks import LARGEST, check_count, check_number, shown

LOG = logging.getLogger("probemon")


@dataclass(frozen=True, kw_only=True)
class FallbackPolicy:
    """When codes fall back. Raises `ConfigError`.

    `min_confidence`: tokens below it fall back.
    `latency_factor`: a call fails if it takes longer than this times its baseline; None for no limit.
    `n_baseline`: first calls, whose median is the baseline.
    `window`, `n_failures`: the breaker opens at `n_failures` in the last `window` calls.
    `open_seconds`: until one call is tried; doubled at each failure, up to 16-fold.
    `clock`: returns seconds.
    """

    min_confidence: float = 0.0
    latency_factor: float | None = 2.0
    n_baseline: int = 10
    window: int = 20
    n_failures: int = 5
    open_seconds: float = 60.0
    clock: Callable[[], float] = field(default=time.perf_counter, compare=False)

    def __post_init__(self) -> None:
        for name in ("n_baseline", "window", "n_failures"):
            check_count(name, getattr(self, name), least=1, remedy="give 1 or more")
        if self.n_failures > self.window:
            raise ConfigError(
                f"n_failures is {self.n_failures}: give at most the window of {self.window} calls, or it never opens"
            )
        check_number(
            "min_confidence", self.min_confidence, low=0, high=1, open_high=True, remedy="give a number from 0, under 1"
        )
        if self.latency_factor is not None:
            remedy = "give a number over 1, or None for no limit"
            check_number("latency_factor", self.latency_factor, low=1, high=LARGEST, open_low=True, remedy=remedy)
        check_number("open_seconds", self.open_seconds, low=0, high=LARGEST, open_low=True, remedy="give over 0")
        if not callable(self.clock):
            raise ConfigError(f"clock is {shown(self.clock)}: give what returns seconds, such as time.perf_counter")


@dataclass(frozen=True)
class Fallbacks:
    """Fallbacks so far, in forwards.

    `n_failed`: the controller raised.
    `n_refused`: the breaker was open.
    `n_not_finite`, `n_unsure`: tokens had non-finite codes, or too little confidence.
    `n_unread`: not even features could be computed.
    """

    n_forwards: int = 0
    n_failed: int = 0
    n_refused: int = 0
    n_not_finite: int = 0
    n_unsure: int = 0
    n_unread: int = 0
    last_error: str | None = None


class FallbackGuard:
    """A controller's `guard`, with a `breaker` and `counts`. It waits for the GPU once a forward."""

    def __init__(self, policy: FallbackPolicy) -> None:
        self.policy, self.counts = policy, Fallbacks()
        # One error, after enough failed calls. No jitter: nothing is shared.
        self.breaker = Circuit(Breaker(errors=1, retry_after=policy.open_seconds), policy.clock, lambda: 0.0)
        self._lock = threading.Lock()
        self._calls: deque[bool] = deque(maxlen=policy.window)
        self._first: dict[Hashable, list[float]] = {}
        self._baseline: dict[Hashable, float] = {}

    def __call__(self, controller: Controller, hidden: Tensor, real: Tensor, state: ControllerState) -> Codes:
        self._count(n_forwards=1)
        if self.breaker.pauses():
            self._count(n_refused=1)
            return self._static(controller, hidden, real, state)
        n_read = state.n_columns
        try:
            before = controller.resume(state)  # not timed: it may read all history
            begin = self.policy.clock()
            codes = controller.route(hidden, real, state)
            with torch.no_grad():
                bad, unsure = self._faults(codes, real)
                any_bad, any_unsure = torch.stack([bad.any(), unsure.any()]).tolist()
            seconds = self.policy.clock() - begin
        except Exception as error:
            if isinstance(error, ProbemonError) or is_out_of_memory(error):
                self.breaker.untold()
                raise
            self._record(failed=True)
            reason = f"{type(error).__name__}: {error}"
            self._count(n_failed=1, last_error=reason)
            LOG.warning("the controller failed, this forward's codes are the static ones: %s", reason)
            return self._static(controller, hidden, real, state, fed=state.n_columns > n_read)
        # Similar work: token counts within 41 %, chunks completed or not.
        kind = (round(2 * math.log2(max(1, real.numel()))), state.inside)
        self._record(failed=self._slow(kind, seconds) or (any_bad and self._newly_lost(before, bad)))
        self._count(n_not_finite=int(any_bad), n_unsure=int(any_unsure))
        if not (any_bad or any_unsure):
            return codes
        fallback = bad | unsure
        static = {name: torch.where(fallback[..., None], 1.0, code) for name, code in codes.by_level().items()}
        return codes.replace(fallback=fallback, **static)

    def _record(self, *, failed: bool) -> None:
        with self._lock:
            state = self.breaker.state
            if state == OPEN:  # another thread opened it meanwhile
                return
            self._calls.append(failed)
            n_failed, n_calls = sum(self._calls), len(self._calls)
            if not failed:
                self.breaker.succeeded()
            elif state == HALF_OPEN or n_failed >= self.policy.n_failures:
                self._calls.clear()
                self.breaker.failed()
                LOG.warning(
                    "the controller is left out, all codes are the static ones: %d of the last %d calls failed or were"
                    " slow",
                    n_failed,
                    n_calls,
                )

    def _slow(self, kind: Hashable, seconds: float) -> bool:
        if self.policy.latency_factor is None:
            return False
        with self._lock:
            baseline = self._baseline.get(kind)
            if baseline is not None:
                return seconds > self.policy.latency_factor * baseline
            first = self._first.setdefault(kind, [])
            first.append(seconds)
            if len(first) == self.policy.n_baseline:
                self._baseline[kind] = statistics.median(self._first.pop(kind))
            return False

    def _faults(self, codes: Codes, real: Tensor) -> tuple[Tensor, Tensor]:
        """Return tokens with non-finite codes, and other unsure ones, `[B, T]` bool."""
        values = torch.cat([*codes.by_level().values(), codes.confidence[..., None]], dim=-1)
        finite = torch.isfinite(values).all(dim=-1)
        return real & ~finite, real & finite & (codes.confidence < self.policy.min_confidence)

    @torch.no_grad()
    def _newly_lost(self, before: Carry, bad: Tensor) -> bool:
        """True if a row was finite before: lost rows must not count again."""
        carried = torch.cat([before.open.flatten(1), before.code, before.summary, before.confidence[:, None]], dim=1)
        return bool((bad.any(dim=1) & torch.isfinite(carried).all(dim=1)).any())

    def _static(
        self, controller: Controller, hidden: Tensor, real: Tensor, state: ControllerState, fed: bool = False
    ) -> Codes:
        codes = controller.static(real, state)
        if not fed:
            state.feed(self._features(controller, hidden, real), real)
        return codes

    @torch.no_grad()
    def _features(self, controller: Controller, hidden: Tensor, real: Tensor) -> Tensor:
        try:
            return controller.features(hidden, real)
        except Exception as error:
            if isinstance(error, ProbemonError) or is_out_of_memory(error):
                raise
            self._count(n_unread=1, last_error=f"{type(error).__name__}: {error}")
            return controller.query.new_full((*real.shape, controller.config.width), math.nan)

    def _count(self, last_error: str | None = None, **increments: int) -> None:
        with self._lock:
            sums = {name: getattr(self.counts, name) + n for name, n in increments.items()}
            self.counts = replace(self.counts, **sums, last_error=last_error or self.counts.last_error)
