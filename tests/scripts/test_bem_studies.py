"""The adapter studies on the demo model report what was measured and can be resumed."""

from types import SimpleNamespace

import numpy as np
import pytest

import domain_arms
from bem_forms import frontiers, verdicts
from gates import FAILED, PASSED
from turns import Timed

METHODS = ("base", "lora", "low_rank", "film", "x-lora")
NATS = {"base": 4.0, "lora": 3.2, "low_rank": 3.1, "film": 3.3, "x-lora": 3.2}


def one_study():
    """Five seeds of arms whose loss is known; the clock of a film takes half as long again as the LoRA's."""
    rows = []
    for method in METHODS:
        for seed in range(5):
            nats = NATS[method] + 0.01 * seed + (0.001 * seed if method == "low_rank" else 0)
            held = {domain: nats for domain in ("definition", "kinds", "above", "all")}
            routed = {"held_out_frozen": {"all": nats + 0.5}, "held_out_shuffled": {"all": nats + 0.7}}
            rows.append({"method": method, "seed": seed, "held_out": held} | (routed if method == "low_rank" else {}))
    second = np.random.default_rng(0).normal(1.0, 0.01, 40)
    timed = {m: Timed(tuple(second * (1.5 if m == "film" else 1.0)), tuple(second)) for m in METHODS}
    clock = {
        "p50": [1, 0.9, 1.1],
        "p95": [2, None, None],
        "p99": [3, None, None],
        "ratio": [1.0, 0.9, 1.1],
        "cpu_p50": 1,
    }
    costs = {
        m: {"n_trainable": 1000 + i, "operations": 100 * i, "memory": 1_000_000 + 30_000 * i}
        | {"prefill": clock, "step": clock}
        for i, m in enumerate(METHODS)
    }
    costs["x-lora"]["step"] = None
    demo = {"rows": rows, "costs": costs, "verdicts": verdicts(rows, costs, timed), "headers": "marks"}
    return demo, timed


def test_methods_are_judged_by_gates_against_the_lora():
    demo, timed = one_study()
    judged = {verdict["method"]: verdict for verdict in demo["verdicts"]}
    assert set(judged) == {"low_rank", "film", "x-lora"}
    gates = {method: {name: verdict for name, (verdict, _) in v["gates"].items()} for method, v in judged.items()}
    assert gates["low_rank"].pop("operations") == FAILED and not judged["low_rank"]["promoted"]  # twice the LoRA's
    assert set(gates["low_rank"].values()) == {PASSED}
    assert judged["low_rank"]["saved_nats"] == pytest.approx(0.1 - 0.002) and judged["low_rank"]["p"] == 1 / 32
    assert gates["film"]["no regression"] == FAILED == gates["film"]["latency"] and not judged["film"]["promoted"]
    assert judged["low_rank"]["gates"]["operations"] == [FAILED, "200 beside 100: +100.00%"]
    assert gates["film"]["memory"] == FAILED  # 5.8 % over
    quality = -np.array([[row["held_out"]["all"] for row in demo["rows"] if row["method"] == m] for m in METHODS])
    shares, on = frontiers(METHODS, demo["costs"], timed, quality)
    assert on["operations"] == [0, 1, 2] and shares["operations"] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_finished_runs_are_not_trained_again(tmp_path, monkeypatch):
    calls = []

    def learn(data, method, seed, rate):
        calls.append(method)
        return {"held_out": {"all": 1.5}, "cpu_seconds": 0.1}

    monkeypatch.setattr(domain_arms, "learned", learn)
    results = domain_arms.Results(tmp_path / "new")
    found = [results.at(SimpleNamespace(kind="marks"), "an arm, 0", 3, 0.01) for _ in range(2)]
    assert found[0] == found[1] and calls == ["an arm, 0"]
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["marks-an_arm_0-3-0.01.json"]
