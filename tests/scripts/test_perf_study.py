"""The report of the study on the demo model says what was measured, and a stopped study goes on."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

import bem_reason
from perf_study import report
from perf_study.demo import frontiers, verdicts
from perf_study.gates import FAILED, NOT_JUDGED, PASSED
from perf_study.kept import code_mark, kept
from probemon.adapters.bem.evaluation.latency import Timed

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
    errors = dict.fromkeys(("start", "cut", "leak", "rows", "cached"), 0.0)
    demo = {"rows": rows, "costs": costs, "verdicts": verdicts(rows, costs, timed, errors), "headers": "marks"}
    return demo, timed


def test_arms_are_judged_by_gates_beside_the_lora():
    demo, timed = one_study()
    judged = {verdict["method"]: verdict for verdict in demo["verdicts"]}
    assert set(judged) == {"low_rank", "film", "x-lora"}
    gates = {method: {name: verdict for name, (verdict, _) in v["gates"].items()} for method, v in judged.items()}
    assert set(gates["low_rank"].values()) == {PASSED} and judged["low_rank"]["promoted"]
    assert judged["low_rank"]["saved_nats"] == pytest.approx(0.1 - 0.002) and judged["low_rank"]["p"] == 1 / 32
    assert gates["film"]["no regression"] == FAILED == gates["film"]["latency"] and not judged["film"]["promoted"]
    assert gates["x-lora"]["integrity"] == NOT_JUDGED  # nobody checked it
    assert "operations +100%" in judged["low_rank"]["gates"]["budget"][1]
    quality = -np.array([[row["held_out"]["all"] for row in demo["rows"] if row["method"] == m] for m in METHODS])
    shares, on = frontiers(METHODS, demo["costs"], timed, quality)
    assert on["operations"] == [0, 1, 2] and shares["operations"] == [1.0, 1.0, 1.0, 0.0, 0.0]


def test_the_page_is_static_and_whole_and_shows_each_arm_on_each_frontier():
    demo, _ = one_study()
    demo["costs"]["<b>&"] = demo["costs"].pop("x-lora")
    demo["rows"] = [row | {"method": "<b>&"} if row["method"] == "x-lora" else row for row in demo["rows"]]
    demo["verdicts"] = [v | {"method": "<b>&"} if v["method"] == "x-lora" else v for v in demo["verdicts"]]
    machine = {"cpu": "a", "threads": 1, "torch": "2"}
    html = report.page({"demo": demo, "commit": "c" * 40, "machine": machine})
    assert not re.search(r"<script|https?:|src=|url\(|<b>&", html) and "&lt;b&gt;&amp;" in html
    seen = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag, attributes):
            seen.append(tag)

    Reader().feed(html)
    assert seen.count("svg") == 3 and seen.count("circle") == 3 * 4  # the base is on no frontier
    assert "+0.0980 (+0.0960 to +0.1000)" in html and ">not judged<" in html
    told = dict(line.split(" ", 1) for line in report.lines({"demo": demo}))
    assert "saves +0.0980" in told["low_rank"] and "latency failed" in told["film"]
    [row] = [row for row in report.summary(demo) if row["method"] == "low_rank"]
    assert row["frozen"] - row["nats"] == pytest.approx(0.5) and row["shuffled"] - row["nats"] == pytest.approx(0.7)


def test_what_was_kept_is_not_made_again(tmp_path):
    calls = []

    def make():
        calls.append(1)
        return {"a": [1.5, None]}

    for _ in range(2):
        assert kept(tmp_path / "new", "an arm, 0", make) == {"a": [1.5, None]}
    assert len(calls) == 1 and [f.name for f in (tmp_path / "new").iterdir()] == ["an_arm_0.json"]
    assert kept(None, "an arm", make) == {"a": [1.5, None]} and len(calls) == 2
    with pytest.raises(ZeroDivisionError):
        kept(tmp_path / "new", "fails", lambda: 1 / 0)
    assert len(list((tmp_path / "new").iterdir())) == 1


def test_what_other_code_learned_is_kept_apart(tmp_path, monkeypatch):
    monkeypatch.setattr("perf_study.kept.ROOT", tmp_path)
    (tmp_path / "bem").mkdir()

    def mark(code):
        (tmp_path / "bem/train.py").write_text(code)
        return code_mark("bem")

    assert mark("RATE = 0.1\n") == mark("RATE = 0.1\n") != mark("RATE = 0.2\n")


def test_the_reason_is_what_others_lose_seed_by_seed_and_the_picture_shows_each_token():
    rows = [
        {"method": m, "n_trainable": 9, "held_out": dict.fromkeys(("definition", "kinds", "above", "all"), nats + seed)}
        | ({"held_out_frozen": {"all": nats + 1}, "held_out_shuffled": {"all": nats + 2}} if m == "low_rank" else {})
        for m, nats in (("low_rank", 3.0), ("lora", 3.25))
        for seed in range(5)
    ]
    lora, routed = (bem_reason.summarised("marks", method, rows) for method in ("lora", "low_rank"))
    assert lora["over_routed"] == {"mean": 0.25, "low": 0.25, "high": 0.25, "p": 1 / 32, "n": 5}
    assert lora["nats"]["kinds"] == 5.25 and (routed["frozen"], routed["shuffled"]) == (4.0, 5.0)

    class Tokenizer:
        def decode(self, ids):
            return f" <{ids[0]}>" if ids[0] else "\n"

    along = {"word": "a & b"} | {
        domain: {"ids": list(range(n)), "codes": [[1.0 + i, 1.0] for i in range(n)]}
        for domain, n in zip(("definition", "kinds", "above"), (6, 5, 4), strict=True)
    }
    svg = bem_reason.picture(along, Tokenizer())
    assert svg.count("<rect") == 1 + 2 * 15 and "&lt;5&gt;" in svg and "a &amp; b" in svg and "<5>" not in svg
    assert svg.count("↵") == 3 and 'fill-opacity="0.00"' in svg  # a number that is always the same has no colour
