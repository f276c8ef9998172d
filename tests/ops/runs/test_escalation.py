"""A judge gives a second opinion on an event within its time limit, or the stated failure action follows."""

import dataclasses
import json
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import get_current_span
from transformers import ContinuousBatchingConfig, DynamicCache, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from blinded import Blinded
from conftest import OLDEST, PAD
from corpora import make_tokenizer
from probemon import DynamicProbeManager
from probemon.core.scores import Scores
from probemon.errors import ConceptRaised, ConfigError, UnsupportedDecoding
from probemon.monitor.followers import Follower
from probemon.ops.budget import Budget
from probemon.ops.judges.escalation import Escalate
from probemon.ops.judges.escalations import last_ids
from probemon.ops.judges.judge_desk import Asked
from probemon.tracking.align import PlacedTokens, SequenceColumns
from probemon.tracking.recording import Recording
from probemon.tracking.run_recordings import keep_newest

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
BATCH = torch.tensor([[PAD, PAD, 1, 5, 9], [1, 44, 3, 17, 8], [PAD, 1, 21, 22, 23]])
MASK = (BATCH != PAD).long()
GREEDY = {"max_new_tokens": 14, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}
SLOW = 20.0  # seconds that nobody waits
LEAST = 0.3  # a limit that a loaded machine keeps
pytestmark = pytest.mark.filterwarnings("ignore:.* to judges had no answer that counts")


@pytest.fixture
def manager(pack):
    return DynamicProbeManager(pack)


@pytest.fixture(scope="module")
def free(model):
    return model.generate(PROMPT, **GREEDY)[0].tolist()


def run_with(manager, model, escalate, *, ids=PROMPT, tokenizer=None, for_tokens=3, followers=(), **options):
    """Generate with a rule on c9 that is met at generated token `for_tokens`, once; return the run and the ids."""
    with manager.attach(model, tokenizer) as run:
        for one in followers:
            run.follow(one)
        run.on("c9", above=0.0, for_tokens=for_tokens, action=escalate)
        out = model.generate(ids, **{**GREEDY, **options})
    return run, out


class Hung:
    """A judge that answers nobody until it is let go, and counts whom it was asked about."""

    def __init__(self):
        self.free, self.asked = threading.Event(), []

    def __call__(self, question):
        self.asked.append(question.event)
        self.free.wait(SLOW)
        return "pass"


@pytest.fixture
def hung():
    judge = Hung()
    yield judge
    judge.free.set()


# -- what follows from a verdict -----------------------------------------------------------------


def test_stop_verdict_acts_as_action_stop_and_pass_changes_nothing(manager, model, free):
    for for_tokens in (1, 3, 8):
        with manager.attach(model) as run:
            run.on("c9", above=0.0, for_tokens=for_tokens, action="stop")
            stopped = model.generate(PROMPT, **GREEDY)[0].tolist()
        assert stopped == free[: 5 + for_tokens + 1]  # the token that met the rule, and one more
        for ruling, expected in (("stop", stopped), ("pass", free)):
            judge = Escalate(lambda question, ruling=ruling: (ruling, "because"), SLOW, "hold", "raise")
            run, out = run_with(manager, model, judge, for_tokens=for_tokens)
            [event] = run.events
            assert out[0].tolist() == expected and event.column == 5 + for_tokens - 1
            assert (event.verdict.ruling, event.verdict.failure, event.verdict.reason) == (ruling, "", "because")
            assert 0 < event.verdict.seconds < SLOW


def test_keep_tokens_below_the_judges_last_tokens_is_refused(manager, model):
    judge = Escalate(lambda question: "pass", SLOW, "hold", "raise", last_tokens=12)
    with manager.attach(model, keep_tokens=11) as run:
        with pytest.raises(ConfigError, match=r"last_tokens=12, and the run keeps keep_tokens=11"):
            run.on("c9", above=0.0, action=judge)
        run.on("c9", above=0.0, action=dataclasses.replace(judge, last_tokens=11))
        model.generate(PROMPT, **GREEDY)


def test_sequences_of_a_batch_have_separate_verdicts(manager, model):
    expected = model.generate(BATCH, attention_mask=MASK, **{**GREEDY, "eos_token_id": 60})
    judge = Escalate(lambda question: "stop" if question.event.row == 1 else "pass", SLOW, "hold", "raise")
    run, out = run_with(manager, model, judge, ids=BATCH, attention_mask=MASK, eos_token_id=60)
    assert {event.row: event.verdict.ruling for event in run.events} == {0: "pass", 1: "stop", 2: "pass"}
    assert torch.equal(out[[0, 2]], expected[[0, 2]])
    assert out[1].tolist() == [*expected[1, :9].tolist(), *[PAD] * 10]


def test_unheld_sequence_stops_at_the_next_token_after_the_verdict(manager, model, free):
    """The judge rules in the forward of the token at column 10: that token was sampled before, and one more is."""
    ruling, ruled = threading.Event(), threading.Event()

    class Ruled(Follower):
        def verdict(self, event):
            ruled.set()

    def judge(question):
        ruling.wait(SLOW)
        return "stop"

    def rule_at_10(module, args, kwargs):
        if kwargs["position_ids"][0, -1] == 10:
            ruling.set()
            assert ruled.wait(SLOW)

    handle = model.model.register_forward_pre_hook(rule_at_10, with_kwargs=True)
    run, out = run_with(manager, model, Escalate(judge, SLOW, "pass", "raise"), followers=[Ruled()])
    handle.remove()
    assert out[0].tolist() == free[:12] and run.events[0].column == 7 and run.events[0].verdict.ruling == "stop"


def test_immediately_stopped_sequence_still_records_the_verdict(manager, model, free):
    run, out = run_with(manager, model, Escalate(lambda question: "pass", SLOW, "stop", "stop"))
    assert out[0].tolist() == free[:9] and run.events[0].verdict.ruling == "pass"  # stopped all the same


def test_verdict_stops_a_sequence_in_a_custom_decode_loop(manager, model, free):
    ids = PROMPT
    with manager.attach(model) as run, torch.no_grad():
        run.on("c9", above=0.0, for_tokens=3, action=Escalate(lambda question: "stop", SLOW, "hold", "raise"))
        with run.generating(from_column=5) as loop:
            while True:
                ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
                if loop.sampled(ids).all():
                    break
    assert ids[0].tolist() == free[:9]


@pytest.mark.skipif(OLDEST, reason="continuous batching of transformers 5.0 is refused")
def test_verdict_stops_only_its_request_in_continuous_batching(manager, model):
    from transformers import ContinuousBatchingConfig

    def generate(rules):
        with manager.attach(model) as run:
            for settings in rules:
                run.on("c9", above=0.0, for_tokens=3, **settings)
            outputs = model.generate_batch(
                [[8, 9, 10], [11, 12]],
                generation_config=GenerationConfig(
                    do_sample=False, max_new_tokens=8, pad_token_id=PAD, eos_token_id=60
                ),
                continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=16, page_size=4, num_blocks=64),
                progress_bar=False,
            )
        return run, [output.generated_tokens for output in outputs.values()]

    def judge(question):
        return "stop" if question.ids[:2] == (11, 12) else "pass"

    _, (first, second) = generate([])
    run, (kept, cut) = generate([{"action": Escalate(judge, SLOW, "hold", "raise")}])
    assert kept == first and cut == second[:4] and len(second) == 8
    assert {event.verdict.ruling for event in run.events} == {"pass", "stop"} and len(run.events) == 2


def test_held_streamer_hides_tokens_that_the_judge_stopped(manager, model, free):
    class Shown(BaseStreamer):
        def __init__(self):
            self.ids = []

        def put(self, value):
            self.ids += value.reshape(-1).tolist()

        def end(self):
            pass

    shown = Shown()
    with manager.attach(model) as run:
        run.on("c9", above=0.0, for_tokens=3, action=Escalate(lambda question: "stop", SLOW, "hold", "raise"))
        model.generate(PROMPT, **GREEDY, streamer=run.hold(shown))
    assert shown.ids == free[:7]


@pytest.mark.filterwarnings("ignore:.* generated tokens have no scores")
def test_judge_can_be_asked_about_an_unseen_token(manager, model, free):
    questions = []

    def judge(question):
        questions.append(question)
        return "stop"

    with manager.attach(model, on_gap="report") as run:
        run.on("c9", above=0.9999999, action="record", on_blind=Escalate(judge, SLOW, "hold", "raise"))
        with Blinded(model, lost={3}):
            out = model.generate(PROMPT, **GREEDY)
    [question], [event] = questions, run.events
    assert question.event.blind and event.column == 7 and question.ids == tuple(free[:8])
    assert event.verdict.ruling == "stop" and out[0].tolist() == free[: out.shape[1]] and out.shape[1] < 12


# -- what the judge is shown ---------------------------------------------------------------------


@pytest.mark.parametrize("last_tokens", [1, 3, 7, 64])
def test_judge_gets_the_last_tokens_of_its_sequence_only(manager, model, last_tokens):
    questions, tokenizer = [], make_tokenizer()

    def judge(question):
        questions.append(question)
        return "pass"

    escalate = Escalate(judge, SLOW, "hold", "raise", last_tokens=last_tokens)
    _, out = run_with(manager, model, escalate, ids=BATCH, attention_mask=MASK, tokenizer=tokenizer)
    assert len(questions) == 3
    for question in questions:
        row, column = question.event.row, question.event.column
        own = [int(token) for token, real in zip(out[row, : column + 1], [*MASK[row], *[1] * 14], strict=False) if real]
        assert list(question.ids) == own[-last_tokens:] and question.text == tokenizer.decode(own[-last_tokens:])
        assert question.event.verdict.ruling == "pending" and question.within == SLOW


def test_judge_gets_tokens_of_earlier_turns_on_the_cache(manager, model):
    questions = []
    escalate = Escalate(lambda question: questions.append(question) or "pass", SLOW, "hold", "raise", last_tokens=64)
    turn = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
    with manager.attach(model) as run:
        first = model.generate(PROMPT, return_dict_in_generate=True, **turn)
        run.on("c9", above=0.0, action=escalate)
        out = model.generate(
            torch.cat([first.sequences, PROMPT[:, 1:]], dim=1), past_key_values=first.past_key_values, **turn
        )
    assert questions
    for question in questions:
        assert list(question.ids) == out[0, : question.event.column + 1].tolist()


@pytest.mark.parametrize("last_tokens", [3, 64])
@pytest.mark.parametrize("n", [1, 2])
def test_judge_gets_tokens_of_a_prefilled_cache(manager, model, last_tokens, n):
    """That was filled before the run, also beside padding and where rows are copied; nobody scored that."""
    questions, cache = [], DynamicCache(config=model.config)
    escalate = Escalate(
        lambda question: questions.append(question) or "pass", SLOW, "hold", "raise", last_tokens=last_tokens
    )
    with torch.no_grad():
        model(BATCH[:, :4], attention_mask=MASK[:, :4], past_key_values=cache)
    cache.batch_repeat_interleave(n)
    ids, mask = (torch.cat([one, one[:, 2:]], dim=1).repeat_interleave(n, dim=0) for one in (BATCH, MASK))
    _, out = run_with(manager, model, escalate, ids=ids, attention_mask=mask, past_key_values=cache)
    assert len(questions) == 3 * n
    for question in questions:
        row, end = question.event.row, question.event.column + 1
        own = [int(token) for token, real in zip(out[row, :end], [*mask[row], *[1] * 14], strict=False) if real]
        assert list(question.ids) == own[-last_tokens:] and question.n_missing == 0


def test_judge_gets_tokens_of_a_prefix_shared_between_requests(manager, model):
    questions, prompts = [], [[*range(3, 19), 30 + i] for i in range(4)]
    escalate = Escalate(lambda question: questions.append(question) or "pass", SLOW, "hold", "raise", last_tokens=64)
    with manager.attach(model) as run:
        run.on("c9", above=0.0, action=escalate)
        out = model.generate_batch(
            prompts,
            generation_config=GenerationConfig(max_new_tokens=3, do_sample=False, eos_token_id=-1, pad_token_id=PAD),
            continuous_batching_config=ContinuousBatchingConfig(max_batch_tokens=16, page_size=4, num_blocks=64),
            progress_bar=False,
        )
    assert len(questions) == 4 and any("shared" in why for why in run.result(out).coverage.unseen)
    for question in questions:
        whole = [*out[question.event.request].prompt_ids, *out[question.event.request].generated_tokens]
        assert list(question.ids) == whole[: question.event.column + 1] and question.n_missing == 0


def test_number_of_unknown_prefix_tokens_is_reported():
    """A cache of which the ids were not given: vLLM's prefix cache."""
    recording = Recording(SequenceColumns(6), 0, n_probes=1)
    recording.begin(4, 1, None)
    at = np.array([4, 5, 6])
    recording.add(PlacedTokens(np.zeros(3, dtype=np.int64), at, at, at + 10, 1), Scores.nothing(3, 1, "not here", 1))
    assert last_ids(recording, 0, 6, 64) == ((14, 15, 16), 4) and last_ids(recording, 0, 6, 5) == ((14, 15, 16), 2)
    assert last_ids(recording, 0, 6, 3) == ((14, 15, 16), 0)


def test_last_ids_end_at_the_token_of_the_event():
    """Also where later tokens of it came in the same batch, and where an earlier batch has the beginning."""
    recording = Recording(SequenceColumns(2), 0, n_probes=1)
    scores = Scores.nothing(4, 1, "not scored here", 1)
    for columns, ids, phase in (([0, 1, 0, 1], [10, 11, 20, 21], 0), ([2, 3, 2, 3], [12, 13, 22, 23], 1)):
        rows, at = np.array([0, 0, 1, 1]), np.array(columns)
        recording.add(PlacedTokens(rows, at, at, np.array(ids), phase), scores)
    assert [last_ids(recording, 1, column, 2)[0] for column in (0, 1, 2, 3)] == [(20,), (20, 21), (21, 22), (22, 23)]
    assert last_ids(recording, 0, 2, 64) == ((10, 11, 12), 0)


@pytest.mark.parametrize("n_rows", [1, 4, 7])
def test_judge_gets_its_last_tokens_whatever_keep_tokens_drops(manager, model, n_rows):
    """`keep_tokens` is of all rows together; also where the row began in earlier turns on the cache."""
    questions, ids, cache = [], torch.randint(3, 60, (n_rows, 5), generator=torch.Generator().manual_seed(1)), None
    escalate = Escalate(lambda question: questions.append(question) or "pass", SLOW, "hold", "raise", last_tokens=16)
    with manager.attach(model, keep_tokens=16) as run:
        run.on("c9", above=0.0, for_tokens=9, action=escalate)
        for _ in range(3):
            out = model.generate(ids, past_key_values=cache, return_dict_in_generate=True, **GREEDY)
            ids, cache = out.sequences, out.past_key_values
    assert len(questions) >= n_rows
    for question in questions:
        row, stop = question.event.row, question.event.column + 1
        assert list(question.ids) == ids[row, max(0, stop - 16) : stop].tolist()


def test_dropped_token_ids_stay_known_as_far_back_as_is_kept():
    """Rows that end, begin late and go on in another turn, which cut some columns off, beside another recording."""
    random, keep, cut, scores = np.random.default_rng(5), 11, 4, Scores.nothing(1, 1, "not scored here", 1)

    def add(recording, rows, columns, ids):
        recording.add(PlacedTokens(rows, columns, columns, ids, 1), scores.take(np.zeros(len(rows), dtype=np.int64)))
        keep_newest(kept, keep)

    other = Recording(SequenceColumns(0), 0, n_probes=1)
    kept, turn, expected = [other], None, [[] for _ in range(6)]
    for number in range(6):
        begin = 50 * number - cut * (turn is not None)
        expected = [[pair for pair in row if pair[0] < begin] for row in expected]
        turn = Recording(SequenceColumns(0), 0, n_probes=1, earlier=turn, number=number)
        turn.begin(begin, 6, None)
        kept.append(turn)
        for column in range(begin, 50 * (number + 1)):
            rows = np.flatnonzero(random.random(6) < [1, 0.9, 0.5, 0.1, column > 120, column < 70])
            ids = random.integers(0, 999, len(rows))
            add(turn, rows, np.full(len(rows), column), ids)
            for row, token in zip(rows, ids, strict=True):
                expected[row].append((column, token))
            if random.random() < 0.3:
                add(other, rows[:1], np.full(len(rows[:1]), column), ids[:1])
            for row in range(6):
                known = tuple(token for _, token in expected[row])
                assert last_ids(turn, row, column, keep - cut)[0] == known[cut - keep :]
        turn.close()
    assert sum(len(ids) for _, _, ids in turn.forgotten_ids.pieces()) <= 2 * 6 * keep + 6


def test_judge_runs_in_the_callers_span(manager, model):
    seen = []

    def judge(question):
        seen.append(get_current_span().get_span_context().span_id)
        return "pass"

    with TracerProvider(shutdown_on_exit=False).get_tracer("t").start_as_current_span("chat") as span:
        run_with(manager, model, Escalate(judge, SLOW, "hold", "raise"))
    assert seen == [span.get_span_context().span_id]


class Diary(Follower):
    def __init__(self):
        self.heard = []

    def event(self, event, action):
        self.heard.append((action, event.verdict and event.verdict.ruling))

    def verdict(self, event):
        self.heard.append(("verdict", event.verdict.ruling))

    def closed(self, run):
        self.heard.append("closed")


def test_followers_get_event_and_verdict_before_the_run_closes(manager, model):
    for meanwhile in ("hold", "pass"):
        diary = Diary()
        judge = Escalate(lambda question: time.sleep(0.1) or "pass", SLOW, meanwhile, "raise")
        run_with(manager, model, judge, for_tokens=13, followers=[diary])  # at the last token that is run
        assert diary.heard == [("escalate", "pending"), ("verdict", "pass"), "closed"]


# -- judges that fail ----------------------------------------------------------------------------


def failing(question):
    raise OSError("nobody there")


@pytest.mark.parametrize("on_failure", ["pass", "stop", "raise"])
@pytest.mark.parametrize(
    ("judge", "reason"),
    [
        (failing, "OSError: nobody there"),
        (lambda question: exec("raise SystemExit(3)"), "SystemExit: 3"),
        (lambda question: "Stop!", "the judge answered 'Stop!'"),
        (lambda question: ("stop", 3), "the judge answered ('stop', 3)"),
        (lambda question: torch.zeros(3), "the judge answered tensor"),
    ],
    ids=["error", "exit", "another word", "no reason", "a tensor"],
)
def test_failing_or_unclear_judge_leads_to_on_failure(manager, model, free, judge, reason, on_failure):
    escalate = Escalate(judge, SLOW, "hold", on_failure)
    if on_failure == "raise":
        with pytest.raises(ConceptRaised) as raised:
            run_with(manager, model, escalate)
        verdict = raised.value.event.verdict
    else:
        run, out = run_with(manager, model, escalate)
        assert out[0].tolist() == (free if on_failure == "pass" else free[:9])
        verdict = run.events[0].verdict
    assert (verdict.ruling, verdict.failure) == (on_failure, "error") and verdict.reason.startswith(reason)


@pytest.mark.parametrize("on_failure", ["pass", "stop"])
def test_hanging_judge_delays_a_generation_at_most_by_its_limit(manager, model, hung, on_failure):
    """Twelve rules are met at twelve tokens, of which the first is asked, and waited for."""
    escalate = Escalate(hung, LEAST, "hold", on_failure)
    with manager.attach(model) as run:
        for n in range(1, 13):
            run.on("c9", above=0.0, for_tokens=n, action=escalate)
        begin = time.monotonic()
        out = model.generate(PROMPT, **GREEDY)
        took = time.monotonic() - begin
    assert LEAST <= took < LEAST + 1, took
    expected = ["late", *["not asked"] * 11] if on_failure == "pass" else ["late"]
    assert [event.verdict.failure for event in run.events] == expected
    assert len(hung.asked) == 1 and out.shape[1] == (19 if on_failure == "pass" else 7)


def test_questions_of_one_step_are_waited_for_together(manager, model, hung):
    escalate = Escalate(hung, LEAST, "hold", "pass", n_workers=2)
    with manager.attach(model) as run:
        run.on([f"c{i}" for i in range(8)], above=0.0, action=escalate)
        begin = time.monotonic()
        model.generate(PROMPT, **GREEDY)
        took = time.monotonic() - begin
    assert LEAST <= took < LEAST + 1 and len(hung.asked) == 2, took
    assert [event.verdict.failure for event in run.events] == ["late"] * 8


def test_late_answer_is_ignored(manager, model, free):
    answered = threading.Event()

    def judge(question):
        time.sleep(LEAST + 0.2)
        answered.set()
        return "stop"

    for meanwhile in ("hold", "pass"):
        answered.clear()
        run, out = run_with(manager, model, Escalate(judge, LEAST, meanwhile, "pass"))
        assert out[0].tolist() == free and run.events[0].verdict.failure == "late"
        assert answered.wait(SLOW)
        time.sleep(0.05)
        assert run.events[0].verdict.failure == "late" and run.events[0].verdict.ruling == "pass"


@pytest.mark.parametrize("answer", ["pass", failing])
def test_answer_after_the_limit_is_late_even_if_nobody_waited(answer):
    joined = []

    def ask():
        time.sleep(0.02)
        return answer if isinstance(answer, str) else answer(None)

    asked = Asked(ask, within=0.01, on_failure="stop", join=joined.append, tell=list)
    asked.answer()
    asked.fail("not asked", "a second verdict")
    assert joined == [asked.verdict] and asked.told.is_set()
    assert (asked.verdict.ruling, asked.verdict.failure) == ("stop", "late") and asked.verdict.seconds > 0.01


def slow(question):
    time.sleep(LEAST)
    return "stop"


@pytest.mark.parametrize(
    ("judge", "meanwhile", "on_failure", "state"),
    [
        (failing, "hold", "pass", "failed"),
        (failing, "hold", "stop", "failed"),
        (lambda question: "pass", "hold", "pass", "ok"),
        (slow, "pass", "raise", "ok"),
        (None, "hold", "pass", "warning"),
        (None, "pass", "raise", "warning"),
    ],
    ids=["error", "error, stopped", "judged", "judged at the end", "late", "late at the end"],
)
def test_failed_verdicts_are_reported_at_the_end_and_by_health(
    manager, model, hung, judge, meanwhile, on_failure, state
):
    """The rule is met at the last token that is run, so that the answer is complete before a judge that is not held."""
    escalate = Escalate(judge or hung, SLOW if judge else LEAST, meanwhile, on_failure)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run, _ = run_with(manager, model, escalate, for_tokens=13)
    [check] = [check for check in run.health().checks if check.name == "judges"]
    assert check.state == state
    assert (state == "ok") == (check.what == "1 question had an answer")
    expected = "1 of 1 question to judges had no answer that counts, and their rows went on"
    assert [str(one.message)[: len(expected)] for one in told] == (
        [expected] if on_failure != "stop" and state != "ok" else []
    )


def test_waiting_for_a_judge_does_not_count_against_the_budget(manager, model):
    def judge(question):
        time.sleep(1.0)
        return "pass"

    with manager.attach(model, followers=[Budget(ms=100)]) as run:
        run.on("c9", above=0.0, for_tokens=9, action=Escalate(judge, SLOW, "hold", "raise"))
        model.generate(PROMPT, **GREEDY)
    assert run.events[0].verdict.seconds >= 1.0 and max(run.forward_seconds) >= 1.0
    assert run.watching.degradation_name == "all" and set(run.follower(Budget).tokens) == {"all"}


def test_unheld_sequence_stops_when_the_verdict_is_late(manager, model, free, hung):
    """The limit passes in the forward of the token at column 10."""

    def pass_at_10(module, args, kwargs):
        if kwargs["position_ids"][0, -1] == 10:
            time.sleep(LEAST)

    handle = model.model.register_forward_pre_hook(pass_at_10, with_kwargs=True)
    run, out = run_with(manager, model, Escalate(hung, LEAST, "pass", "stop"))
    handle.remove()
    assert out[0].tolist() in (free[:12], *(free[:n] for n in (9, 10, 11))) and run.events[0].verdict.failure == "late"


def test_full_queue_fails_the_question_at_once(manager, model, hung):
    escalate = Escalate(hung, SLOW, "pass", "stop", n_workers=2, max_waiting=3)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="enough"), manager.attach(model) as run:
        run.on([f"c{i}" for i in range(8)], above=0.0, action=escalate)
        out = model.generate(PROMPT, **GREEDY)
        raise RuntimeError("enough")  # a run that ends by an error waits for no judge
    assert time.monotonic() - begin < SLOW / 2 and out.shape[1] == 7  # those that nobody was asked about stopped it
    verdicts = [event.verdict for event in run.events]
    assert Counter(verdict.failure for verdict in verdicts) == {"late": 5, "not asked": 3}
    assert [verdict.failure for verdict in verdicts[5:]] == ["not asked"] * 3 and len(hung.asked) == 2
    assert verdicts[5].reason == "3 questions wait, as many as may" and verdicts[0].reason == "the run has ended before"


def test_judge_workers_are_few_shared_by_runs_and_end_when_idle(manager, model):
    at_once, most, lock = 0, 0, threading.Lock()

    def judge(question):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.02)
        with lock:
            at_once -= 1
        return "pass"

    escalate = Escalate(judge, SLOW, "pass", "raise", n_workers=3, max_waiting=40)
    with manager.attach(model) as run, manager.attach(model) as other:
        for one in (run, other):
            one.on([f"c{i}" for i in range(8)], above=0.0, action=escalate)
        model.generate(PROMPT, **GREEDY)
    assert most == 3 and {event.verdict.ruling for event in (*run.events, *other.events)} == {"pass"}
    until = time.monotonic() + 5
    while any(thread.name == "probemon judge" for thread in threading.enumerate()):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_hanging_judge_does_not_keep_the_process_alive():
    script = """
import time
from probemon.ops.judges.judge_desk import Asked, Desk
desk = Desk(n_workers=2, max_waiting=2)
for _ in range(4):
    desk.put(Asked(lambda: time.sleep(60), within=60, on_failure="stop", join=print, tell=print))
time.sleep(0.1)
print(time.time())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=50)
    assert time.time() - float(done.stdout) < 2, done.stderr


# -- what is refused -----------------------------------------------------------------------------


def test_beams_with_an_escalate_rule_are_refused(manager, model):
    with manager.attach(model) as run:
        run.on("c9", above=0.0, action=Escalate(lambda question: "pass", SLOW, "hold", "pass"))
        with pytest.raises(UnsupportedDecoding, match="cannot end one beam"):
            model.generate(PROMPT, num_beams=2, **GREEDY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"judge": "gpt"}, "judge is given 'gpt'"),
        ({"within": 0}, "within is 0"),
        ({"within": float("nan")}, "within is nan"),
        ({"meanwhile": "wait"}, "meanwhile is 'wait'"),
        ({"on_failure": "hold"}, "on_failure is 'hold'"),
        ({"meanwhile": "stop", "on_failure": "pass"}, "has stopped the row by then"),
        ({"last_tokens": 0}, "last_tokens is 0"),
        ({"n_workers": 0}, "n_workers is 0"),
        ({"max_waiting": -1}, "max_waiting is -1"),
    ],
)
def test_invalid_escalate_settings_are_refused(changes, said):
    settings = {"judge": failing, "within": 1.0, "meanwhile": "hold", "on_failure": "stop"}
    with pytest.raises(ConfigError, match=said):
        Escalate(**{**settings, **changes})


def test_equal_escalate_rules_compare_equal(manager, model):
    """So that a rule of an edited file goes on with its streaks, and with its workers."""
    one, other = (Escalate(failing, 1.0, "hold", "stop") for _ in range(2))
    assert one == other and one != Escalate(failing, 2.0, "hold", "stop")


def test_events_with_verdicts_serialise_to_json(manager, model):
    from dataclasses import asdict

    run, _ = run_with(manager, model, Escalate(lambda question: "pass", SLOW, "hold", "pass"))
    assert json.loads(json.dumps(asdict(run.events[0])))["verdict"]["ruling"] == "pass"
