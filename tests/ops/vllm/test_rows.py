"""Every row of a vLLM step is matched to its token: random schedules are compared with a plain dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probemon.core.scores import GENERATED, PROMPT
from probemon.errors import AlignmentError
from probemon.ops.vllm.rows import CACHED, Placing, StepRows
from simulated_engine import SimulatedEngine

SCHEDULES = st.tuples(st.integers(0, 2**32), st.integers(1, 6), st.sampled_from([0, 1, 4]), st.sampled_from([3, 8, 32]))


def followed(schedule):
    """Every token that was placed, by request and column, with its step and row (or the reason); and the requests."""
    seed, n_requests, drafts, budget = schedule
    engine = SimulatedEngine(random.Random(seed), n_requests=n_requests, drafts=drafts, budget=budget)
    placing, placed_at, ended = Placing(), {}, {}
    order: dict[str, list[int]] = {}

    def keep(number, placed_tokens):
        for rows, placed, reason in placed_tokens:
            assert (placed.phase == PROMPT) == (placed.columns.max() < len(rows.prompt))
            assert placed.phase == PROMPT or reason or len(placed) == 1
            for column, offset, token in zip(placed.columns, placed.offsets, placed.ids, strict=True):
                key = (rows.request, int(column))
                assert key not in placed_at
                placed_at[key] = (reason or (number, int(offset)), int(token), placed.phase)
                order.setdefault(rows.request, []).append(int(column))

    for number, step in enumerate(engine.run()):
        for name in step.scheduled.finished_req_ids:
            ended[name] = placing.end(name)
        for new in step.scheduled.scheduled_new_reqs:
            placing.begin(new.req_id, new.prompt_token_ids, new.num_computed_tokens)
        for name, tokens in step.scheduled.scheduled_cached_reqs.all_token_ids.items():
            placing.resume(name, tokens)
        keep(number, placing.place(step.rows, step.drafts))
        keep(number, placing.settle(step.accepted))
    assert not placing.live
    return engine, placed_at, ended, order


@settings(max_examples=60, deadline=None)
@given(SCHEDULES)
def test_every_row_is_placed_as_a_plain_dictionary_says(schedule):
    engine, placed_at, _, order = followed(schedule)
    for request in engine.requests:
        tokens = engine.final(request)
        for column in range(len(tokens)):
            known = placed_at.get((request.name, column))
            if column < request.n_cached and known is not None:  # also where they are run after a preemption
                assert known == (CACHED, tokens[column], PROMPT)
            elif column in request.run and column not in request.reused:
                where, token, phase = known
                assert where == engine.shown[(request.name, column)]
                assert token == tokens[column]
                assert phase == (PROMPT if column < len(request.prompt) else GENERATED)
            elif column in request.reused:
                assert known[:2] == (CACHED, tokens[column])
            else:
                assert known is None
        columns = order.get(request.name, [])
        assert columns == list(range(len(columns)))
        assert len(columns) > request.n_cached or not columns


@settings(max_examples=25, deadline=None)
@given(SCHEDULES)
def test_cached_tokens_are_counted_one_by_one(schedule):
    engine, _, ended, _ = followed(schedule)
    for request in engine.requests:
        if request.name in ended and ended[request.name] is not None:
            rows = ended[request.name]
            cached = set(range(request.n_cached)) if request.run else set()
            assert rows.n_cached == len(cached) + len(request.reused)
            assert rows.n_columns == len(rows.ids) == len(request.run | request.reused | cached)


def step_of(requests, starts, ids, positions):
    return StepRows(tuple(requests), np.array(starts), np.array(ids), np.array(positions))


def test_rows_that_contradict_the_schedule_are_refused():
    step = step_of(["a", "b"], [0, 2, 3], [5, 6, 7], [0, 1, 0])
    assert step.check({"a": 2, "b": 1}) is step
    for scheduled in ({"a": 1, "b": 2}, {"a": 2}, {"a": 2, "b": 1, "c": 1}):
        with pytest.raises(AlignmentError, match="would be a guess"):
            step.check(scheduled)


def test_rows_of_another_prompt_are_refused():
    placing = Placing()
    placing.begin("a", [5, 6, 7], 0)
    with pytest.raises(AlignmentError, match="column 1 has token 9, its prompt has 6"):
        placing.place(step_of(["a"], [0, 2], [5, 9], [0, 1]), {})


def test_repeated_rows_with_another_token_are_refused():
    placing = Placing()
    placing.begin("a", [5, 6], 0)
    placing.place(step_of(["a"], [0, 2], [5, 6], [0, 1]), {})
    with pytest.raises(AlignmentError, match="again with token 8, and had 6"):
        placing.place(step_of(["a"], [0, 3], [5, 8, 1], [0, 1, 2]), {})


def test_gap_without_cached_tokens_is_refused():
    placing = Placing()
    placing.begin("a", [5, 6], 0)
    with pytest.raises(AlignmentError, match="runs on at column 4, 0 were run and 2 are known"):
        placing.place(step_of(["a"], [0, 1], [5], [4]), {})


def test_rows_of_an_unknown_request_are_refused():
    with pytest.raises(AlignmentError, match="beginning was not seen"):
        Placing().place(step_of(["a"], [0, 1], [5], [0]), {})


def test_unscored_request_is_placed_with_its_reason():
    placing = Placing()
    rows = placing.begin("a", [5, 6], 0)
    rows.unseen = "because"
    [(_, placed, reason)] = placing.place(step_of(["a"], [0, 2], [5, 6], [0, 1]), {})
    assert (placed.columns.tolist(), placed.ids.tolist(), reason) == ([0, 1], [5, 6], "because")
    [(_, placed, reason)] = placing.place(step_of(["a"], [0, 1], [9], [2]), {})
    assert (placed.columns.tolist(), placed.ids.tolist(), placed.phase, reason) == ([2], [9], GENERATED, "because")
