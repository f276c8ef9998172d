"""The controller's circuit breaker: when it opens, stays open, retries and closes."""

import numpy as np
import pytest
import torch

from probemon.adapters.bem import BemConfig, Controller, ControllerState, FallbackPolicy
from probemon.adapters.bem.fallback import FallbackGuard, Fallbacks
from probemon.errors import BemStateError, ConfigError

D = 10


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


class Guarded:
    """A guarded controller, of which a call takes as long as is asked, or raises."""

    def __init__(self, **settings):
        self.clock = Clock()
        torch.manual_seed(0)
        self.controller = Controller(D, BemConfig(sites=("down",), rank=3, width=6, level="token"))
        self.controller.requires_grad_(False)
        self.guard = self.controller.guard = FallbackGuard(FallbackPolicy(**{"clock": self.clock, **settings}))
        self.breaker, self._route = self.guard.breaker, self.controller.route

    def call(self, error=None, seconds=0.0, n_tokens=1):
        """Return whether the controller was asked."""
        n_refused = self.guard.counts.n_refused

        def route(*args):
            self.clock.now += seconds
            if error is not None:
                raise error
            return self._route(*args)

        self.controller.route = route
        self.controller(torch.zeros(1, n_tokens, D), torch.ones(1, n_tokens, dtype=torch.bool), ControllerState(1))
        return self.guard.counts.n_refused == n_refused

    def fails(self, *calls):
        for failed in calls:
            assert self.call(RuntimeError("on purpose") if failed else None)


def test_five_failures_in_twenty_calls_open_the_breaker_for_sixty_seconds():
    guarded = Guarded()
    guarded.fails(*[True, False, False, False] * 4, False)
    assert guarded.breaker.state == "closed"
    guarded.fails(*[False] * 4, True)  # the first of them is 22 calls ago
    assert guarded.breaker.state == "closed"
    guarded.fails(True)
    assert (guarded.breaker.state, guarded.call(), guarded.breaker.n_opened) == ("open", False, 1)
    guarded.clock.now += 59.9
    assert not guarded.call()
    guarded.clock.now += 0.2
    assert guarded.call() and guarded.breaker.state == "closed"


def test_successful_trial_closes_the_breaker_and_a_failed_one_doubles_the_wait():
    guarded = Guarded()
    guarded.fails(*[True] * 5)
    guarded.clock.now += 60
    guarded.fails(True)
    assert guarded.breaker.state == "open" and guarded.breaker.n_opened == 2
    guarded.clock.now += 119.9
    assert not guarded.call()
    guarded.clock.now += 0.2
    guarded.fails(False)
    assert guarded.breaker.state == "closed"
    guarded.fails(*[True] * 4)
    assert guarded.breaker.state == "closed"  # what failed before it opened is forgotten
    guarded.fails(True)
    assert guarded.breaker.state == "open"


def test_trial_without_a_verdict_lets_the_next_call_be_the_trial():
    guarded = Guarded()
    guarded.fails(*[True] * 5)
    guarded.clock.now += 60
    with pytest.raises(BemStateError):
        guarded.call(BemStateError("typed"))
    assert guarded.call() and guarded.breaker.state == "closed"


def test_latency_is_compared_with_the_median_of_first_calls_of_equal_size():
    guarded = Guarded(n_baseline=3, n_failures=1)
    for seconds in (9.0, 1.0, 1.2):  # the first call is often slow
        guarded.call(seconds=seconds)
    guarded.call(seconds=2.39)
    guarded.call(seconds=50.0, n_tokens=16)  # of another kind
    assert guarded.breaker.state == "closed"
    guarded.call(seconds=2.41)
    assert guarded.breaker.state == "open"
    patient = Guarded(n_baseline=1, n_failures=1, latency_factor=None)
    for seconds in (1.0, 100.0):
        patient.call(seconds=seconds)
    assert patient.breaker.state == "closed"


def test_healthy_calls_never_open_the_breaker():
    guarded, random = Guarded(), np.random.default_rng(0)
    for seconds in random.uniform(1.0, 1.9, size=500):
        guarded.call(seconds=float(seconds))
    assert guarded.breaker.n_opened == 0 and guarded.guard.counts == Fallbacks(n_forwards=500)


@pytest.mark.parametrize(
    "name, value",
    [
        ("min_confidence", 1.0),
        ("min_confidence", -0.1),
        ("latency_factor", 1.0),
        ("n_failures", 21),
        ("n_failures", 0),
        ("window", 2.5),
        ("open_seconds", float("inf")),
        ("open_seconds", 0),
    ],
)
def test_invalid_policy_settings_are_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is"):
        FallbackPolicy(**{name: value})
