"""Followers hear everything a run does, in order and in the generating thread; their errors end nothing."""

import threading
from contextlib import nullcontext

import pytest
import torch

from blinded import Blinded
from conftest import PAD
from hears import hears
from probemon import DynamicProbeManager
from probemon.core.scores import PROMPT
from probemon.errors import AlignmentError, ConceptRaised, ConfigError, ProbemonError
from probemon.monitor.followers import Decider, Follower
from probemon.monitor.rules import AskedAction
from probemon.ops.judges.escalation import Escalate

GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
PROMPTS = torch.tensor([[PAD, PAD, 5, 6, 7], [8, 9, 10, 11, 12]])
MASK = (PROMPTS != PAD).long()


class Diary(Follower):
    """Writes down what it hears, and in which thread."""

    def __init__(self):
        self.heard, self.threads = [], set()

    def note(self, *what):
        self.heard.append(what)
        self.threads.add(threading.get_ident())

    def began(self, run):
        self.note("began", run)

    def scored(self, batch, scores):
        self.note("scored", batch.placed.phase, len(scores))

    def event(self, event, action):
        self.note("event", event, action)

    def stopped(self, event):
        self.note("stopped", event)

    def forward(self, time):
        self.note("forward", time)

    def gap(self, gap):
        self.note("gap", gap)

    def ended(self, recording, error):
        self.note("ended", recording, error)

    def closed(self, run):
        self.note("closed", run)

    def of(self, kind):
        return [what[1:] for what in self.heard if what[0] == kind]


def test_followers_hear_everything_in_order(model, pack):
    diary = Diary()
    with DynamicProbeManager(pack).attach(model) as run:
        run.on("c1", above=0.0, action="record")
        run.follow(diary)
        out = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
        again = model.generate(PROMPTS[1:], **GREEDY)
    kinds = [what[0] for what in diary.heard]
    assert kinds[0] == "began" and kinds[-1] == "closed" and diary.threads == {threading.get_ident()}
    result = run.result(out)
    # The last token of a row is sampled and never run; the first forward runs the prompts, each later one a column.
    assert sum(n for _, n in diary.of("scored")) == int(result.coverage.seen.sum()) + 5 + 5
    assert sum(n for phase, n in diary.of("scored") if phase == PROMPT) == int(MASK.sum()) + 5
    times = [time for (time,) in diary.of("forward")]
    assert [time[2:] for time in times] == [(8, 0), *[(0, 2)] * 5, (5, 0), *[(0, 1)] * 5]
    assert [time.inside for time in times] == list(run.forward_seconds)
    assert all(0 < time.inside < time.whole for time in times)
    assert [event for event, _ in diary.of("event")] == list(run.events)
    assert {action for _, action in diary.of("event")} == {"record"}
    assert [(one.number, error) for one, error in diary.of("ended")] == [(0, None), (1, None)]
    assert diary.of("ended")[1][0].output is again  # it is told once the output is known
    assert diary.of("gap") == []


@pytest.mark.parametrize("judged", [None, "stop", "pass"])
def test_stop_of_a_sequence_is_reported_once(model, pack, judged):
    diary = Diary()
    with DynamicProbeManager(pack).attach(model) as run:
        run.follow(diary)
        action = "stop" if judged is None else Escalate(lambda question: judged, 20.0, "hold", "raise")
        run.on("c1", above=0.0, for_tokens=2, action=action)
        model.generate(PROMPTS[1:], **GREEDY)
    assert [event.column for (event,) in diary.of("stopped")] == ([] if judged == "pass" else [6])


def test_generation_ended_by_an_error_is_reported_with_it(model, pack):
    diary = Diary()
    with DynamicProbeManager(pack).attach(model) as run, pytest.raises(ConceptRaised):
        run.follow(diary)
        run.on("c1", above=0.0, action="raise")
        model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    [(_, error)] = diary.of("ended")
    assert isinstance(error, ConceptRaised) and diary.of("event")[0][1] == "raise"


@pytest.mark.parametrize("reported", [True, False])
def test_gaps_reach_followers_whether_reported_or_raised(model, pack, reported):
    diary, gaps = Diary(), []
    with DynamicProbeManager(pack).attach(
        model, on_gap="report" if reported else "raise", followers=[hears(gap=gaps.append)]
    ) as run:
        run.follow(diary)
        with Blinded(model, lost={2, 4}), nullcontext() if reported else pytest.raises(AlignmentError):
            model.generate(PROMPTS[1:], **GREEDY)
    told = [gap for (gap,) in diary.of("gap")]
    assert [(gap.first, gap.last) for gap in told] == ([(6, 6), (8, 8)] if reported else [(6, 6)])
    assert run.n_gaps == len(told) and gaps == told == list(run.gaps) if reported else gaps == told


def test_error_of_a_follower_ends_no_generation(model, pack):
    class Broken(Follower):
        def scored(self, batch, scores):
            raise ValueError("broken")

    expected = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    diary = Diary()
    with DynamicProbeManager(pack).attach(model, callback_errors="report") as run:
        run.follow(Broken())
        run.follow(diary)
        out = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    assert torch.equal(out, expected) and run.n_failures == len(diary.of("scored")) == 6


def test_refused_follower_hears_nothing(model, pack):
    class Refusing(Diary):
        def began(self, run):
            raise ValueError("refused")

    class Elsewhere(Diary):
        def attaching(self, run):
            return ["resid_post.0"]

    diaries = [Refusing(), Elsewhere()]
    with DynamicProbeManager(pack).attach(model) as run:
        with pytest.raises(ValueError, match="refused"):
            run.follow(diaries[0])
        with pytest.raises(ConfigError, match=r"give it to attach\(followers="):
            run.follow(diaries[1])
        model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    assert [diary.heard for diary in diaries] == [[], []] and not set(diaries) & set(run.followers)


def test_followers_hear_after_judges_and_before_sinks_each_with_its_helper_behind_it(model, pack):
    order = []

    class Named(Follower):
        def __init__(self, name, helper=None):
            self.name, self.helper = name, helper

        def began(self, run):
            if self.helper is not None:
                run.follow(self.helper)

        def scored(self, batch, scores):
            order.append(self.name)

    class Sink:
        open = close = lambda self, *_: None

        def write(self, batch):
            pass

    sink = Sink()
    with DynamicProbeManager(pack).attach(
        model, followers=[sink, Named("a", Named("helper of a")), Named("b")], callback_errors="report"
    ) as run:
        run.follow(Named("c", Named("helper of c")))
        run.on("c1", above=0.99, action=Escalate(lambda question: "pass", 20.0, "hold", "raise"))
        model.generate(PROMPTS[1:], **{**GREEDY, "max_new_tokens": 1})
        names = [getattr(one, "name", type(one).__name__) for one in run.followers]
    assert order == ["a", "helper of a", "b", "c", "helper of c"]
    assert names[0] not in order and names[1:] == [*order, "Delivery"]


def test_error_of_a_check_or_a_judge_is_kept_and_ends_nothing(model, pack):
    class Broken(Follower):
        def check(self):
            raise ValueError("no check")

    class Undecided(AskedAction):
        def decider(self, publisher):
            return Unable()

    class Unable(Decider):
        def ask(self, action, event, generation):
            raise ValueError("no judge")

    expected = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
    with DynamicProbeManager(pack).attach(model, followers=[Broken()], callback_errors="report") as run:
        run.on("c1", above=0.0, action=Undecided())
        out = model.generate(PROMPTS, attention_mask=MASK, **GREEDY)
        [check] = [check for check in run.health().wrong if check.name == "followers"]
    assert torch.equal(out, expected) and check.state == "failed" and "Broken.check() raised" in check.what
    assert {str(error) for error in run.failures} == {"no check", "no judge"}


def test_failed_update_leaves_the_followers_as_they_were(model, pack):
    rule = {"concept": "c1", "above": 0.5, "action": Escalate(lambda question: "pass", 20.0, "hold", "raise")}
    with DynamicProbeManager(pack).attach(model) as run:
        with pytest.raises(ProbemonError):
            run.update(rules=[rule], exclude=["c1"])
        assert run.followers == []
        run.update(rules=[rule])
        assert len(run.followers) == 1
        model.generate(PROMPTS, attention_mask=MASK, **GREEDY)


def test_followers_in_the_place_of_the_tokenizer_are_refused(model, pack):
    with pytest.raises(ConfigError, match=r"give followers as followers=\[...\]"):
        DynamicProbeManager(pack).attach(model, [Diary()])
