"""Fallbacks: where the controller cannot be relied on, its codes are the static 1, and every code says so.

    bem = attach_bem(model, config, fallback=FallbackPolicy(min_confidence=0.2))
    model.generate(**inputs)
    bem.fallbacks                                    # Fallbacks(n_forwards=40, n_failed=0, n_refused=0, ...)

With c = 1 an update is `s U V^T`: a static LoRA of the same U and V, under the same spectral limits. What falls back,
and how much:

    the controller raises             the whole forward             a failure for the breaker
    the breaker is open               the whole forward
    a code is not finite              the tokens that it is of      a failure for the breaker, once for each row
    confidence under a threshold      the tokens that it is of

Keys and values that are cached stay as they are, and the state goes on: what was not routed is still read (its features
alone), and the first forward that is routed again reads what it missed. So a code after a fallback is the one it would
have been for the same hidden states. Where not even the features could be computed they are NaN, and so are all codes
that depend on them, which fall back one by one. What falls back by token depends on that token's codes alone: nothing
from the future leaks, and cached still equals full. Tokens are told in `Codes.fallback`.

Errors of probemon's own (`ProbemonError`) are raised as they are, and so is a lack of memory, which has a remedy of its
own (`probemon.bem.memory`).
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from probemon.bem.config import BemConfig
from probemon.bem.controller import Codes, Controller
from probemon.bem.memory import is_out_of_memory
from probemon.bem.state import Carry, ControllerState
from probemon.bem.update import check_update_impl, generated_update
from probemon.core.checks import is_int, is_number, shown
from probemon.errors import ConfigError, KernelUnavailable, ProbemonError

LOG = logging.getLogger("probemon")
CLOSED, OPEN, HALF_OPEN = "closed", "open", "half-open"


@dataclass(frozen=True, kw_only=True)
class FallbackPolicy:
    """When codes fall back; the numbers of the breaker are those of the source. Raises `ConfigError`.

    `min_confidence`: tokens under it fall back; 0 for none. The breaker opens at `n_failures` among the last `window`
    calls, for `open_seconds`, and closes after `n_successes` in a row. A call fails that takes longer than
    `latency_factor` times the median of the first `n_baseline` calls of its kind; None for no limit. `clock` gives
    seconds.
    """

    min_confidence: float = 0.0
    latency_factor: float | None = 2.0
    n_baseline: int = 10
    window: int = 20
    n_failures: int = 5
    open_seconds: float = 60.0
    n_successes: int = 3
    clock: Callable[[], float] = field(default=time.perf_counter, compare=False)

    def __post_init__(self) -> None:
        for name in ("n_baseline", "window", "n_failures", "n_successes"):
            self._check(name, is_int(getattr(self, name)) and getattr(self, name) >= 1, "give 1 or more")
        self._check(
            "n_failures",
            self.n_failures <= self.window,
            f"give at most the window of {self.window} calls, or it never opens",
        )
        self._check(
            "min_confidence",
            is_number(self.min_confidence) and 0 <= self.min_confidence < 1,
            "give a number from 0, under 1",
        )
        self._check(
            "latency_factor",
            self.latency_factor is None or (is_number(self.latency_factor) and self.latency_factor > 1),
            "give a number over 1, or None for no limit",
        )
        self._check("open_seconds", is_number(self.open_seconds) and self.open_seconds >= 0, "give 0 or more")
        self._check("clock", callable(self.clock), "give what returns seconds, such as time.perf_counter")

    def _check(self, name: str, fine: bool, remedy: str) -> None:
        if not fine:
            raise ConfigError(f"{name} is {shown(getattr(self, name))}: {remedy}")


class CircuitBreaker:
    """Stops asking what keeps failing, and tries again later (Nygard 2007). Any number of threads may use it.

        if breaker.allows():
            breaker.record(failed=False, seconds=0.01, kind="decode")

    `state`: "closed" (all is well), "open" (nothing is allowed), "half-open" (on trial: the first failure opens it
    again).
    """

    def __init__(self, policy: FallbackPolicy | None = None) -> None:
        self.policy = policy or FallbackPolicy()
        self.n_opened = 0
        self._lock = threading.Lock()
        self._state, self._opened_at, self._n_fine = CLOSED, 0.0, 0
        self._calls: deque[bool] = deque(maxlen=self.policy.window)
        self._first: dict[Hashable, list[float]] = {}
        self._baseline: dict[Hashable, float] = {}

    @property
    def state(self) -> str:
        """What it is now."""
        with self._lock:
            return self._now()

    def baseline(self, kind: Hashable = None) -> float | None:
        """Seconds that a call of this kind takes; None while too few were seen."""
        with self._lock:
            return self._baseline.get(kind)

    def allows(self) -> bool:
        """Whether to make the call."""
        with self._lock:
            return self._now() != OPEN

    def record(self, *, failed: bool, seconds: float | None = None, kind: Hashable = None) -> None:
        """How a call went that it allowed. Calls of one `kind` should take about as long as each other. Raises
        `ConfigError` where `seconds` is no duration.
        """
        if seconds is not None and not (is_number(seconds) and seconds >= 0):
            raise ConfigError(f"seconds is {seconds!r}: give how long the call took, 0 or more, or None")
        with self._lock:
            state = self._now()
            if state == OPEN:
                return  # another thread opened it meanwhile
            failed = failed or (seconds is not None and self._slow(kind, seconds))
            self._calls.append(failed)
            if state == HALF_OPEN:
                self._n_fine += 1
                if failed:
                    self._open("a call on trial failed")
                elif self._n_fine >= self.policy.n_successes:
                    self._state = CLOSED
                    self._calls.clear()
                    LOG.info("the controller is used again: %d calls on trial went well", self._n_fine)
            elif sum(self._calls) >= self.policy.n_failures:
                self._open(f"{sum(self._calls)} of the last {len(self._calls)} calls failed or were slow")

    def _now(self) -> str:
        if self._state == OPEN and self.policy.clock() - self._opened_at >= self.policy.open_seconds:
            self._state, self._n_fine = HALF_OPEN, 0
        return self._state

    def _open(self, why: str) -> None:
        self._state, self._opened_at = OPEN, self.policy.clock()
        self._calls.clear()
        self.n_opened += 1
        LOG.warning(
            "the controller is left out for %g s, all codes are the static ones: %s", self.policy.open_seconds, why
        )

    def _slow(self, kind: Hashable, seconds: float) -> bool:
        if self.policy.latency_factor is None:
            return False
        baseline = self._baseline.get(kind)
        if baseline is not None:
            return seconds > self.policy.latency_factor * baseline
        first = self._first.setdefault(kind, [])
        first.append(seconds)
        if len(first) == self.policy.n_baseline:
            self._baseline[kind] = statistics.median(self._first.pop(kind))
        return False


@dataclass(frozen=True)
class Fallbacks:
    """What fell back so far, in forwards: `n_failed` of which the controller raised, `n_refused` by an open breaker,
    both whole; with tokens whose codes were `n_not_finite` or `n_unsure`; `n_unread`: of which not even features could
    be computed. `last_error`: what was raised last.
    """

    n_forwards: int = 0
    n_failed: int = 0
    n_refused: int = 0
    n_not_finite: int = 0
    n_unsure: int = 0
    n_unread: int = 0
    last_error: str | None = None


class FallbackGuard:
    """A `Guard` by a policy: `breaker`, and `told` (what fell back). On a GPU it waits once a forward, for what the
    codes are and how long they took.
    """

    def __init__(self, policy: FallbackPolicy) -> None:
        self.policy, self.breaker = policy, CircuitBreaker(policy)
        self.told = Fallbacks()
        self._lock = threading.Lock()

    def __call__(self, controller: Controller, hidden: Tensor, real: Tensor, state: ControllerState) -> Codes:
        self._count(n_forwards=1)
        if not self.breaker.allows():
            self._count(n_refused=1)
            return self._static(controller, hidden, real, state)
        read = state.n_columns
        try:
            before = controller.resume(state)  # not timed: after a fallback it reads all of the history again
            begin = self.policy.clock()
            codes = controller.route(hidden, real, state)
            with torch.no_grad():
                bad, unsure = self._faults(codes, real)
                any_bad, any_unsure = torch.stack([bad.any(), unsure.any()]).tolist()
            seconds = self.policy.clock() - begin
        except Exception as error:
            if isinstance(error, ProbemonError) or is_out_of_memory(error):
                raise
            self.breaker.record(failed=True)
            self._count(n_failed=1, last_error=f"{type(error).__name__}: {error}")
            LOG.warning(
                "the controller failed, this forward's codes are the static ones: %s: %s", type(error).__name__, error
            )
            return self._static(controller, hidden, real, state, fed=state.n_columns > read)
        # About as much to compute: as many tokens, to 41 %, and whether chunks may be completed.
        self.breaker.record(
            failed=any_bad and self._lost(before, bad),
            seconds=seconds,
            kind=(round(2 * math.log2(max(1, real.numel()))), state.inside),
        )
        self._count(n_not_finite=int(any_bad), n_unsure=int(any_unsure))
        if not (any_bad or any_unsure):
            return codes
        taken = bad | unsure
        levels = {name: code for name in ("prefix", "chunk", "token") if (code := getattr(codes, name)) is not None}
        return codes.replace(
            fallback=taken, **{name: torch.where(taken[..., None], 1.0, code) for name, code in levels.items()}
        )

    def _faults(self, codes: Codes, real: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens whose codes are not finite, and others of too little confidence: `[B, T]` bool both."""
        used = [code for code in (codes.prefix, codes.chunk, codes.token) if code is not None]
        finite = torch.isfinite(torch.cat([*used, codes.confidence[..., None]], dim=-1)).all(dim=-1)
        return real & ~finite, real & finite & (codes.confidence < self.policy.min_confidence)

    @torch.no_grad()
    def _lost(self, before: Carry, bad: Tensor) -> bool:
        """Whether a row with such tokens was all numbers before. One that was not stays so: counted again and again, it
        would take the others with it.
        """
        known = torch.cat([before.open.flatten(1), before.code, before.summary, before.confidence[:, None]], dim=1)
        return bool((bad.any(dim=1) & torch.isfinite(known).all(dim=1)).any())

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

    def _count(self, last_error: str | None = None, **more: int) -> None:
        with self._lock:
            sums = {name: getattr(self.told, name) + n for name, n in more.items()}
            self.told = replace(self.told, **sums, last_error=last_error or self.told.last_error)


MOST_RANK, MOST_WIDTH = 64, 1024  # that the kernels have; here too, so that choosing needs no Triton


def choose_impl(impl: str, devices: Sequence[torch.device], config: BemConfig) -> tuple[str, str]:
    """What computes the updates of sites on `devices`, and why. "auto" takes the kernel where every site is on a GPU
    and a trial of it runs.

    Any other is taken as it is. Raises `ConfigError`, `KernelUnavailable` for one that cannot run; "auto" always can.
    """
    too_large = config.rank > MOST_RANK or config.width > MOST_WIDTH
    sizes = (
        f"the kernels have ranks to {MOST_RANK} and widths to {MOST_WIDTH}, this adapter has rank {config.rank} and"
        f" width {config.width}"
    )
    if impl == "triton" and too_large:
        raise ConfigError(f"{sizes}: use impl='reference' or 'auto'")
    if impl == "auto":
        chosen, why = ("reference", sizes) if too_large else _best_impl(devices)
        LOG.info("updates are computed by %s: %s", chosen, why)
        return chosen, why
    for device in set(devices):
        check_update_impl(impl, device)
    return impl, "it was asked for"


def _best_impl(devices: Sequence[torch.device]) -> tuple[str, str]:
    where = sorted(set(devices), key=str)
    other = next((device for device in where if device.type != "cuda"), None)
    if other is not None:
        return "reference", f"the kernels are for GPUs, and a site or the layer that is read is on {other}"
    for device in where:
        try:
            x, v, codes = (torch.ones(2, n, dtype=torch.float32, device=device) for n in (16, 16, 2))
            generated_update(x, v.T.contiguous(), v.T.contiguous(), codes, 1.0, impl="triton").sum().item()
        except KernelUnavailable as error:
            return "reference", str(error)
        except Exception as error:  # a compiler that is not there, a driver that is too old: each raises something else
            return "reference", f"the kernel does not run on {device}: {type(error).__name__}: {error}"
    return "triton", "every site is on a GPU, where the kernel runs"
