"""A breaker turns scoring errors into unseen tokens; scoring pauses, is tried again, and recovers."""

import types

import pytest
import torch

from conftest import PAD, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.core.scores import RowState
from probemon.errors import ConceptRaised, ConfigError
from probemon.monitor.breaker import CLOSED, HALF_OPEN, JITTER, LONGEST, OPEN, PAUSED, Breaker, Circuit
from tapped_states import states_of

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
FAILED = "scoring failed: RuntimeError"


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def circuit(clock, **settings):
    return Circuit(Breaker(**{"errors": 3, "within": 10.0, "retry_after": 4.0, **settings}), clock, draw=lambda: 0.5)


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A host, and a manager whose scoring raises at the columns that the test says, when begun or when waited for."""
    model, manager = make_model(), DynamicProbeManager(make_pack(tmp_path / "pack", make_model()))
    broken = types.SimpleNamespace(steps=(), waits=(), prompt=False, n=0)
    begin, prompt = manager.begin, manager.score_prompt

    def failing(*arguments):
        broken.n += 1
        if broken.n in broken.steps:
            raise RuntimeError("broken")
        step = begin(*arguments)
        if broken.n in broken.waits:
            step.wait()
            step.wait = lambda: (_ for _ in ()).throw(RuntimeError("broken"))
        return step

    def failing_prompt(*arguments, **options):
        if broken.prompt:
            raise RuntimeError("broken")
        return prompt(*arguments, **options)

    monkeypatch.setattr(manager, "begin", failing)
    monkeypatch.setattr(manager, "score_prompt", failing_prompt)
    return types.SimpleNamespace(model=model, manager=manager, broken=broken)


def attach(watched, **settings):
    return watched.manager.attach(
        watched.model, callback_errors="report", breaker=Breaker(**{"retry_after": 1000.0, **settings})
    )


def test_error_without_a_breaker_ends_the_generation(watched):
    watched.broken.steps = (2,)
    with watched.manager.attach(watched.model), pytest.raises(RuntimeError, match="broken"):
        watched.model.generate(PROMPT, **GREEDY)


@pytest.mark.parametrize("where", ["steps", "waits"])
def test_one_error_leaves_one_token_unseen_and_the_others_unchanged(watched, where):
    with watched.manager.attach(watched.model) as run:
        plain = watched.model.generate(PROMPT, **GREEDY)
    expected = run.result(plain)
    setattr(watched.broken, where, (watched.broken.n + 3,))
    with attach(watched) as run:
        out = watched.model.generate(PROMPT, **GREEDY)
    result = run.result(out)
    assert torch.equal(out, plain) and run.n_failures == 1 and run.breaker.state == CLOSED
    assert [i for i, reason in enumerate(result.coverage.unseen[:-1]) if reason] == [7]
    assert result.coverage.unseen[7] == FAILED
    for t in range(7):
        assert result.scores.active(t).tolist() == expected.scores.active(t).tolist()
    # What is retained is carried over the token that is not known, as if that were not there.
    manager, hidden = watched.manager, states_of(watched.model, out)[0]
    [site] = manager.pack.sites
    retained, _ = manager.score_prompt(manager.plan, {site: hidden[:5]}, [4])
    row = RowState(retained)
    for t in (5, 6, *range(8, len(hidden))):
        row, scores = manager.step(row, hidden[t : t + 1])
        assert result.scores.active(t).tolist() == scores.active(0).tolist(), t
    assert "after 1 errors" in run.health().checks[-1].what


def test_scoring_pauses_after_some_errors_and_recovers_after_a_try(watched):
    watched.broken.steps = (2, 3, 4, 5)
    clock = Clock()
    with attach(watched, errors=3, retry_after=10.0) as run:
        run.breaker._clock = clock

        def tick(placed, scores):
            clock.now += 4.0

        run.follow(tick)
        out = watched.model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 18})
        assert run.breaker.state == CLOSED
    unseen = run.result(out).coverage.unseen
    # Three errors; a pause of 10 to 11 s, the try after it fails; one of 20 to 22 s; the try after that goes well.
    assert unseen[5:-1] == ("", *[FAILED] * 3, *[PAUSED] * 2, FAILED, *[PAUSED] * 5, *[""] * 5)
    assert run.breaker.n_opened == 2 and run.breaker.n_errors == 4


def test_unscored_prompt_is_unseen_and_later_tokens_are_scored(watched):
    watched.broken.prompt = True
    with attach(watched) as run:
        out = watched.model.generate(PROMPT, **GREEDY)
    unseen = run.result(out).coverage.unseen
    assert unseen[:5] == (FAILED,) * 5 and not any(unseen[5:-1])


def test_rules_follow_on_blind_when_scoring_failed(watched):
    watched.broken.steps = (3,)
    with attach(watched) as run:
        run.on("c9", above=0.999, on_blind="raise")
        with pytest.raises(ConceptRaised, match=f"column 7: {FAILED}"):
            watched.model.generate(PROMPT, **GREEDY)


def test_open_breaker_fails_the_health(watched):
    watched.broken.steps = range(100)
    with attach(watched, errors=1) as run:
        watched.model.generate(PROMPT, **GREEDY)
        [check] = [check for check in run.health().checks if check.name == "breaker"]
    assert check.state == "failed" and not run.health().ok and "scoring pauses (open)" in check.what


def test_breaker_opens_only_for_errors_close_together():
    clock = Clock()
    spread, together = circuit(clock), circuit(clock)
    for clock.now in (0.0, 5.1, 10.2, 15.3):
        spread.failed()
    for clock.now in (20.0, 25.0, 30.0):
        together.failed()
    assert spread.state == CLOSED and together.state == OPEN


def test_one_caller_retries_and_pauses_grow_to_a_maximum():
    clock = Clock()
    one = circuit(clock, errors=1)
    one.failed()
    pause, pauses = 4.0 * (1 + JITTER / 2), []
    for _ in range(7):
        begun = clock.now
        while one.pauses():
            clock.now += 0.05
        pauses.append(clock.now - begun)
        assert one.state == HALF_OPEN and one.pauses()  # another thread meanwhile
        one.failed()
    assert pauses == pytest.approx([pause * min(2**n, LONGEST) for n in range(7)], abs=0.06)
    clock.now += 1000
    assert not one.pauses()
    one.untold()  # what was tried was thrown away: the next one may
    assert one.state == OPEN and not one.pauses()
    one.succeeded()
    assert one.state == CLOSED and not one.pauses()
    one.failed()
    begun = clock.now
    while one.pauses():
        clock.now += 0.05
    assert clock.now - begun == pytest.approx(pause, abs=0.06)  # as at first


@pytest.mark.parametrize("wrong", [{"errors": 0}, {"within": 0}, {"retry_after": -1.0}])
def test_invalid_breaker_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Breaker(**wrong)
