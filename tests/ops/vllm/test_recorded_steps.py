"""Steps recorded from both model runners of a real vLLM 0.32 engine, compared with what the engine returned.

Two runs of each are recorded (scripts/benchmarks/vllm_steps.py): one with drafts of n-grams, one with a prefix cache,
several answers to a prompt and so few blocks that requests were preempted.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from probemon.errors import AlignmentError
from probemon.ops.vllm.rows import CACHED, Placing, rows_of_v1, rows_of_v2

RECORDED = Path(__file__).parent / "recorded"
RUNS = ("v1_drafts", "v1_preempted", "v2_drafts", "v2_preempted")


def read(name):
    return json.loads((RECORDED / f"{name}.json").read_text())


def v1(had, as_tensor=torch.tensor):
    """The parts of a model runner of the first kind that a step is read from."""
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=had["req_ids"], num_reqs=had["num_reqs"]),
        query_start_loc=SimpleNamespace(np=np.array(had["query_start_loc"], dtype=np.int32)),
        input_ids=SimpleNamespace(gpu=as_tensor(had["input_ids"])),
        positions=as_tensor(had["positions"]),
    )


def v2(had):
    """The parts of the `InputBatch` of the second kind that a step is read from."""
    return SimpleNamespace(
        req_ids=had["req_ids"],
        num_reqs=had["num_reqs"],
        query_start_loc_np=np.array(had["query_start_loc"], dtype=np.int32),
        input_ids=torch.tensor(had["input_ids"]),
        positions=torch.tensor(had["positions"]),
    )


ROWS_OF = {
    "v1": lambda step: rows_of_v1(v1(step["runner"]), step["scheduled"]),
    "v2": lambda step: rows_of_v2(v2(step["runner"]), step["scheduled"]),
}


@pytest.mark.parametrize("run", RUNS)
def test_every_recorded_token_is_placed_once_and_matches_the_output(run):
    recorded = read(run)
    placing, placed_at, ended = Placing(), {}, {}

    def keep(placed_tokens):
        for rows, placed, reason in placed_tokens:
            for column, token in zip(placed.columns.tolist(), placed.ids.tolist(), strict=True):
                assert (rows.request, column) not in placed_at
                placed_at[rows.request, column] = (token, reason)

    for step in recorded["steps"]:
        for name in step["finished"]:
            ended[name] = placing.end(name)
        for name, prompt, n_cached, *prefilled in step["new"]:
            if name in placing.live:  # as runner V2 tells of a request that goes on after a preemption
                placing.resume(name, prefilled[0])
            else:
                placing.begin(name, prompt, n_cached)
        for name, ids in step["resumed"].items():
            placing.resume(name, ids)
        if step["runner"] is None:
            continue
        rows = ROWS_OF[recorded["runner"]](step)
        keep(placing.place(rows, step["drafts"]))
        keep(placing.settle({name: n - 1 for name, n in step["sampled"].items() if n}))
    for name in list(placing.live):  # an engine in the process of its user runs no step to tell of the last ends
        ended[name] = placing.end(name)
    assert len(ended) == len(recorded["outputs"])
    for output in recorded["outputs"]:
        own = f"{output['index']}_{output['request']}-" if output["n"] > 1 else f"{output['request']}-"
        [name] = [name for name in ended if name.startswith(own)]
        ids, rows = output["prompt"] + output["output"], ended[name]
        n_cached = rows.call.first_column
        for column in range(len(ids) - 1):
            if column < n_cached:
                assert (name, column) not in placed_at
            else:
                token, reason = placed_at[name, column]
                assert token == ids[column]
                assert reason in ("", CACHED)
        if output["n"] == 1:  # of several answers vLLM reports one number
            assert rows.n_cached == output["cached"]


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_recordings_contain_drafts_preemption_and_chunked_prompts(runner):
    drafts, preempted = (read(f"{runner}_{run}")["steps"] for run in ("drafts", "preempted"))
    n_drafted = sum(sum(step["drafts"].values()) for step in drafts)
    n_accepted = sum(sum(n - 1 for n in step["sampled"].values() if n) for step in drafts)
    assert 0 < n_accepted < n_drafted  # some were rejected
    new = [name for step in preempted for name, *_ in step["new"]]
    assert any(step["resumed"] for step in preempted) if runner == "v1" else len(new) > len(set(new))
    assert any(n_cached for step in preempted for _, _, n_cached, *_ in step["new"])
    assert any(name.startswith("1_") for step in preempted for name, *_ in step["new"])
    chunked = [step for step in preempted if max(step["scheduled"].values(), default=0) > 1 < len(step["scheduled"])]
    assert chunked  # chunks of prompts beside tokens of others


def test_step_whose_bounds_differ_from_the_schedule_is_refused():
    step = next(step for step in read("v1_drafts")["steps"] if step["drafts"])
    had = dict(step["runner"])
    had["query_start_loc"] = [0, had["query_start_loc"][1] - 1, *had["query_start_loc"][2:]]
    for rows_of, made in ((rows_of_v1, v1(had)), (rows_of_v2, v2(had))):
        with pytest.raises(AlignmentError, match="would be a guess"):
            rows_of(made, step["scheduled"])


def test_step_rows_are_copies_of_the_runners_reused_buffers():
    step = next(step for step in read("v1_drafts")["steps"] if step["runner"])
    runner = v1(step["runner"])
    rows = rows_of_v1(runner, step["scheduled"])
    before = rows.ids.tolist(), rows.positions.tolist(), rows.starts.tolist()
    runner.input_ids.gpu.zero_()
    runner.positions.zero_()
    runner.query_start_loc.np[:] = 0
    assert (rows.ids.tolist(), rows.positions.tolist(), rows.starts.tolist()) == before
