"""The study of forms: what it measures is what its numbers say."""

import re

import pytest
import torch

import perf_track
from perf_study import report
from perf_study.gates import NOT_JUDGED, PASSED
from perf_track import Task, claims, divergence, integrity, learn, verdicts
from probemon.adapters.bem import attach_bem

MACHINE = {"cpu": "one", "threads": 1, "torch": "2"}


@pytest.fixture(scope="module")
def task():
    with pytest.MonkeyPatch.context() as changed:
        for name, value in (("N_BATCHES", 2), ("N_TEST", 1), ("ROWS", 6)):
            changed.setattr(perf_track, name, value)
        yield Task("kronecker", 0)


def test_what_is_left_is_the_divergence_from_the_teacher(task):
    batch = task.test[0]
    with torch.no_grad():
        said = task.host(batch["input_ids"]).logits.double().softmax(-1)
    target = batch["target"].double().exp()
    by_hand = float((target * (target.log() - said.log())).sum(-1).mean())
    assert float(divergence(task.host, batch)) == pytest.approx(by_hand, rel=1e-4) and by_hand > 0.5
    with perf_track.plant(task.host, "kronecker", 0), torch.no_grad():  # the teacher itself
        assert float(divergence(task.host, batch)) == pytest.approx(0, abs=1e-5)


def test_students_begin_as_the_host_and_learn(task):
    for method in ("lora", "kronecker"):
        fresh, learnt = (learn(task, method, 0.03, n_steps) for n_steps in (1, 40))
        assert abs(fresh["removed"]) < 0.05 and 0.1 < learnt["removed"] < 1
        assert abs(learnt["n_trainable"] / perf_track.BUDGET - 1) < 0.02 and learnt["flops_per_token"] > 0
    assert abs(learnt["removed_frozen"] - learnt["removed"]) > 1e-3
    assert not task.host._forward_hooks and attach_bem(task.host).detach() is None


def test_every_form_is_what_an_adapter_promises():
    errors = integrity()
    assert errors["start"] == errors["leak"] == errors["rows"] == errors["cached"] == 0 and errors["cut"] <= 1e-5


def test_claims_and_verdicts_are_judged_by_their_bars():
    def row(task, method, seed, removed, n=3072):
        return {
            "task": task,
            "method": method,
            "seed": seed,
            "removed": removed,
            "n_trainable": n,
            "flops_per_token": 9,
        }

    rows = []
    for seed in range(5):
        for form in perf_track.PLANTED:
            rows += [row(form, "lora", seed, 0.7), row(form, form, seed, 0.95 + seed / 1000, 3100)]
        rows += [row("rank_mask", f"{method}, rank 4", seed, 0.96, 900) for method in ("lora", "low_rank")]
    errors = dict.fromkeys(("start", "cut", "leak", "rows", "cached"), 0.0)
    found = claims(rows, errors)
    assert found["pt1_own_task"]["value"] == pytest.approx(0.952) and found["ahead_of_lora"]["holds"]
    assert not found["pt2_active_flops_ahead"]["holds"]  # 0.952 beside 0.96
    assert found["budget_off_pct"]["value"] == pytest.approx(100 * 28 / 3072)  # those of fewer operations do not count
    judged = verdicts(rows, errors)
    assert len(judged) == 4 and all(one["p"] == 1 / 32 and one["on_frontier_of_operations"] for one in judged)
    assert all(verdict == PASSED for one in judged for verdict, _ in one["gates"].values())
    whole = {"rows": rows, "claims": found, "verdicts": judged, "commit": "c" * 40, "machine": MACHINE}
    page, lines = report.page(whole), list(report.lines(whole))
    assert page.count("<svg") == 4 and page.count("share of the divergence left, lower is better") == 4
    assert page.count(">lora</text>") == 4 and page.count("<td>passed</td>") == 12
    shown = re.search(r"<tr><td>film</td><td>film</td><td>([^<]*)</td><td>0.031</td><td>(\d+) %", page)
    assert (
        shown and shown[1].startswith("+0.2520 (") and int(shown[2]) == round(100 * judged[3]["share_of_draws_on_it"])
    )
    assert len(lines) == 4 and "film +0.2520" in " ".join(lines[3].split()) and lines[3].endswith("gain passed")
    assert verdicts(rows, {**errors, "rows": None})[0]["gates"]["integrity"][0] == NOT_JUDGED
