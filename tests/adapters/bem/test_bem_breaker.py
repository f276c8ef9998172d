"""The circuit breaker opens after five failures in twenty calls, stays open for sixty seconds, and closes after three
successes on trial.
"""

import numpy as np
import pytest

from probemon.adapters.bem import CircuitBreaker, FallbackPolicy
from probemon.errors import ConfigError


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def policy(**settings):
    return FallbackPolicy(**{"clock": Clock(), **settings})


def fails(breaker, *calls):
    for failed in calls:
        assert breaker.allows()
        breaker.record(failed=failed)


def test_five_failures_in_twenty_calls_open_the_breaker_for_sixty_seconds():
    breaker = CircuitBreaker(given := policy())
    fails(breaker, *[True, False, False, False] * 4, False)
    assert breaker.state == "closed"
    fails(breaker, *[False] * 4, True)  # the first of them is 22 calls ago
    assert breaker.state == "closed" and breaker.allows()
    fails(breaker, True)
    assert (breaker.state, breaker.allows(), breaker.n_opened) == ("open", False, 1)
    given.clock.now += 59.9
    breaker.record(failed=False)  # of a thread that had begun before: no trial
    assert not breaker.allows()
    given.clock.now += 0.2
    assert (breaker.state, breaker.allows()) == ("half-open", True)


def test_three_successes_close_it_and_one_failure_opens_it_again():
    breaker = CircuitBreaker(given := policy())
    fails(breaker, *[True] * 5)
    given.clock.now += 60
    fails(breaker, False, False)
    assert breaker.state == "half-open"
    fails(breaker, True)
    assert breaker.state == "open" and breaker.n_opened == 2
    given.clock.now += 60
    fails(breaker, False, False, False)
    assert breaker.state == "closed"
    fails(breaker, *[True] * 4)
    assert breaker.state == "closed"  # what failed before it opened is forgotten
    fails(breaker, True)
    assert breaker.state == "open"


def test_latency_is_compared_with_the_median_of_the_first_calls_of_its_kind():
    breaker = CircuitBreaker(policy(n_baseline=3, n_failures=1))
    for seconds in (9.0, 1.0, 1.2):  # the first call is often slow
        breaker.record(failed=False, seconds=seconds, kind="decode")
    assert breaker.baseline("decode") == 1.2 and breaker.baseline("prefill") is None
    breaker.record(failed=False, seconds=2.4, kind="decode")
    breaker.record(failed=False, seconds=50.0, kind="prefill")
    assert breaker.state == "closed"
    breaker.record(failed=False, seconds=2.41, kind="decode")
    assert breaker.state == "open"
    patient = CircuitBreaker(policy(n_baseline=1, n_failures=1, latency_factor=None))
    for seconds in (1.0, 100.0):
        patient.record(failed=False, seconds=seconds)
    assert patient.state == "closed"


def test_healthy_calls_never_open_it():
    breaker, random = CircuitBreaker(policy()), np.random.default_rng(0)
    for seconds in random.uniform(1.0, 1.9, size=5000):
        breaker.record(failed=False, seconds=float(seconds))
    assert breaker.n_opened == 0


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
        ("n_successes", True),
    ],
)
def test_a_setting_that_cannot_work_is_refused(name, value):
    with pytest.raises(ConfigError, match=f"{name} is"):
        FallbackPolicy(**{name: value})
