"""Routing alerts are raised by their fault only, hold until it is over, and do not flap."""

import dataclasses
import json
import math
import sys

import numpy as np
import pytest

import routing_alarms
from probemon.adapters.routing.alerts import DEFAULT_RULES, AlertRule, Alerts, Tally
from probemon.adapters.routing.decisions import BEM, MOE, XLORA, History, Stream
from probemon.adapters.routing.statistics import RoutingStatistics
from probemon.errors import ConfigError
from streams import CHUNK, codes_of, decisions_of, logits_of


class Fed:
    """A tally of one router, fed with batches of odd sizes; `memory`: the share in use."""

    def __init__(self, source=MOE, level="", e=8, k=1, **more):
        self.memory = 0.3
        self.tally = Tally(
            [Stream(source, "site", 0, level)],
            e,
            k,
            codes=source == BEM,
            memory=lambda: (int(self.memory * 1000), 1000),
            **more,
        )
        self.history, self.alerts = History(1, 1), []

    def add(self, decisions, latency_us=5.0):
        at = 0
        while at < len(decisions):
            part = decisions.take(np.arange(at, min(len(decisions), at + 97)))
            self.alerts += self.tally.add(part, self.history.compare(np.zeros(len(part), np.int64), part), latency_us)
            at += 97
        return self

    @property
    def kinds(self):
        return [(alert.kind, alert.raised) for alert in self.alerts]


def code_stream(n, seed=0, every=CHUNK, varies=1.0, rank=8, size=1.0):
    rng = np.random.default_rng(seed)
    codes = 0.4 + varies * rng.normal(size=(-(-n // every), rank)) @ np.eye(rank, 8)
    boundary = np.arange(n) % every == 0
    return codes_of(size * codes.repeat(every, axis=0)[:n], boundary)


def without(expert, n, seed=0):
    logits = logits_of("by token", seed, n)
    logits[:, expert] = -5
    return decisions_of(logits)


def softer(n, by, seed=0):
    """Peaked less: entropies rise, far from what is indifferent."""
    return decisions_of(by * logits_of("by token", seed, n))


def not_finite(decisions, which):
    """One expert at every token, or all at some tokens."""
    raw = decisions.raw.copy()
    raw[(..., which) if isinstance(which, int) else (slice(None), which)] = np.nan
    return dataclasses.replace(decisions, raw=raw)


def biased(n, seed=0):
    """One expert is first three times in four."""
    logits = logits_of("by token", seed, n)
    logits[np.random.default_rng(seed).random(n) < 0.75, 2] += 20
    return decisions_of(logits)


N = 8192
HEALTHY = {
    MOE: lambda: decisions_of(logits_of("by token", 1, N)), XLORA: lambda: decisions_of(logits_of("by chunk", 1, N)),
    BEM: lambda: code_stream(N, seed=1),
}  # fmt: skip
FAULTS = {
    "all to one expert": (MOE, "collapse", lambda: decisions_of(logits_of("collapsed", 1, N))),
    "always the same, softly": (MOE, "collapse", lambda: decisions_of(logits_of("collapsed", 1, N) / 10 + np.array([0,
    0, 0, 1, 0, 0, 0, 0], np.float32))),
    "all to one adapter": (XLORA, "collapse", lambda: decisions_of(logits_of("collapsed", 1, N))),
    "a code that is always the same": (BEM, "collapse", lambda: code_stream(N, varies=1e-3)),
    "codes along one line": (BEM, "collapse", lambda: code_stream(N, rank=1)),
    "no choice": (MOE, "indifference", lambda: decisions_of(logits_of("indifferent", 1, N))),
    "no adapter's choice": (XLORA, "indifference", lambda: decisions_of(logits_of("indifferent", 1, N))),
    "codes of nothing": (BEM, "indifference", lambda: code_stream(N, size=1e-3)),
    "an expert without work": (MOE, "dead expert", lambda: without(5, N)),
    "an adapter without weight": (XLORA, "dead expert", lambda: without(5, N)),
    "softer than before": (MOE, "entropy drift", lambda: softer(N, 0.5)),
    "an expert that takes over": (MOE, "entropy drift", lambda: biased(N)),
    "codes that lose dimensions": (BEM, "entropy drift", lambda: code_stream(2 * N, rank=2)),
    "a code for every other token": (BEM, "code reuse", lambda: code_stream(N, every=2)),
    "an expert that is not finite": (MOE, "not finite", lambda: not_finite(decisions_of(logits_of("by token", 2, N)),
    3)),
    "few scalings that are not finite": (XLORA, "not finite", lambda: not_finite(decisions_of(logits_of("by chunk", 1,
    N)), slice(None, None, 500))),
    "codes that are not finite": (BEM, "not finite", lambda: not_finite(code_stream(N, seed=2), slice(None))),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_raises_its_alert_and_healthy_streams_raise_none(name):
    source, kind, fault = FAULTS[name]
    fed = Fed(source, "chunk" if source == BEM else "").add(HEALTHY[source]())
    assert fed.alerts == [] and fed.tally.alerts.raised == []
    fed.add(fault())
    assert (kind, True) in fed.kinds and kind in {alert.kind for alert in fed.tally.alerts.raised}
    told = next(alert for alert in fed.alerts if alert.kind == kind)
    assert (
        N < told.at <= N + len(fault())
        and told.stream == fed.tally.streams[0]
        and kind in str(told)
        and "threshold" in str(told)
    )
    for _ in range(2):
        fed.add(HEALTHY[source]())
    assert fed.tally.alerts.raised == [], "what is over is cleared"
    assert all(fed.kinds.count((k, True)) == fed.kinds.count((k, False)) for k, _ in fed.kinds)


def test_slow_capture_raises_one_alert_and_clears():
    fed = Fed().add(HEALTHY[MOE]())
    fed.add(HEALTHY[MOE](), latency_us=5000)
    assert fed.kinds == [("latency", True)] and fed.alerts[0].stream is None
    assert fed.alerts[0].value == pytest.approx(5000, rel=0.01)
    fed.add(HEALTHY[MOE](), latency_us=1500)  # between the thresholds
    assert fed.kinds == [("latency", True)]
    assert fed.add(HEALTHY[MOE]()).kinds == [("latency", True), ("latency", False)]


def test_memory_pressure_raises_one_alert_and_clears():
    fed = Fed().add(HEALTHY[MOE]())
    for share, kinds in ((0.95, [True]), (0.87, [True]), (0.95, [True]), (0.5, [True, False])):
        fed.memory = share
        assert fed.add(HEALTHY[MOE]()).kinds == [("memory", raised) for raised in kinds]
    assert fed.tally.memory_watermark_bytes == 950


def window_of(share, n=64):
    """Statistics of a window in which a share of the tokens goes to expert 0 and the others to 1."""
    first = (np.arange(n) >= share * n).astype(np.int64)
    decisions = decisions_of(9 * np.eye(4)[first])
    statistics = RoutingStatistics(1, 4)
    statistics.add(decisions, History(1, 1).compare(np.zeros(n, np.int64), decisions))
    return statistics


def told(shares, in_a_row=1, raise_at=1.5, clear_at=1.0, window=64):
    alerts = Alerts(
        [AlertRule("uneven", "max_vio", raise_at, clear_at, window=window, in_a_row=in_a_row)],
        [Stream(MOE, "site", 0)],
        4,
        1,
        64,
    )
    return [(i, alert.raised) for i, share in enumerate(shares) for alert in alerts.add(window_of(share))]


def test_metric_near_its_threshold_does_not_flap():
    """MaxVio is 4 times the larger share, less 1: 1.75, 1.25, ... about 1.5, never under 1."""
    shares = [0.6875, 0.5625] * 20
    assert told(shares) == [(0, True)]
    assert told([*shares, 0.5, 0.5]) == [(0, True)]  # exactly at the clear threshold is not past it
    assert told([*shares, 0.5], clear_at=1.1) == [(0, True), (40, False)]
    assert told([0.625] * 5) == []  # exactly at the raise threshold


@pytest.mark.parametrize("in_a_row", [1, 2, 3])
def test_alert_needs_consecutive_windows(in_a_row):
    bad, good = 0.9, 0.5
    assert told([good, *[bad] * (in_a_row - 1), good] * 4, in_a_row) == []
    raised = told([good, *[bad] * in_a_row, *[good] * in_a_row], in_a_row, clear_at=1.2)
    assert raised == [(in_a_row, True), (2 * in_a_row, False)]


def test_rules_may_alert_below_a_threshold_and_use_larger_windows():
    alerts = Alerts(
        [AlertRule("idle", "least_load", 0.01, 0.05, window=100, in_a_row=1)], [Stream(MOE, "site", 0)], 4, 1, 64
    )
    found = [(i, alert.raised) for i in range(6) for alert in alerts.add(window_of(0.5))]
    assert found == [(1, True)]  # 100 tokens are two windows of 64


def test_unknown_values_neither_raise_nor_clear():
    alerts = Alerts(
        [AlertRule("memory", "memory_share", 0.9, 0.8, window=1, in_a_row=1)], [Stream(MOE, "site", 0)], 4, 1, 64
    )
    raised = [len(alerts.add(window_of(0.5), share)) for share in (math.nan, 0.95, math.nan, 0.5, math.nan)]
    assert raised == [0, 1, 0, 1, 0]


def kinds_of(unjudged):
    return {(rule.kind, rule.metric) for rule, _ in unjudged}


def test_rule_is_judged_on_the_tokens_its_metric_counts():
    """No window of decisions that are not finite says that none collapsed; nor one of codes that steer nothing."""
    fed = Fed().add(not_finite(decisions_of(logits_of("collapsed", 1, N)), 3))
    assert fed.kinds == [("not finite", True)] and fed.alerts[0].value == 1 and fed.alerts[0].at == 97
    assert kinds_of(fed.tally.alerts.unjudged) == {
        (rule.kind, rule.metric) for rule in DEFAULT_RULES if MOE in rule.sources
    } - {
        ("not finite", "not_finite_rate"),
        ("latency", "latency_p95_us"),
        ("memory", "memory_share"),
    }
    codes = code_stream(N, varies=1e-3)
    fed = Fed(BEM, "chunk").add(dataclasses.replace(codes, steering=np.zeros((1, N), bool)))
    assert fed.alerts == [] and kinds_of(fed.tally.alerts.unjudged) == {
        ("collapse", "variation"),
        ("collapse", "effective_rank"),
        ("entropy drift", "rank_entropy"),
        ("code reuse", "code_reuse_rate"),
    }


def test_single_nonfinite_decision_raises_and_clears_with_the_next_window():
    fed = Fed().add(not_finite(HEALTHY[MOE](), slice(4000, 4001)))
    batch, window = 42 * 97, 15 * 256  # where the batch with it ends, and where its window began
    assert [(alert.kind, alert.raised, alert.at) for alert in fed.alerts] == [
        ("not finite", True, batch),
        ("not finite", False, 4096 + 512),
    ]
    assert fed.alerts[0].value == 1 / (batch - window)


@pytest.mark.parametrize("n", [1, 6, 300])
def test_nonfinite_decision_is_reported_however_few_tokens_there_are(n):
    for source, healthy in HEALTHY.items():
        fed = Fed(source, "chunk" if source == BEM else "").add(healthy().take(np.arange(n)))
        assert fed.alerts == [] and "not finite" not in {rule.kind for rule, _ in fed.tally.alerts.unjudged}
        fed.add(not_finite(healthy().take(np.arange(n)), slice(n - 1, n)))
        assert (
            fed.kinds == [("not finite", True)]
            and fed.alerts[0].at == 2 * n
            and [alert.kind for alert in fed.tally.alerts.raised] == ["not finite"]
        )
        fed.add(not_finite(healthy().take(np.arange(n)), slice(n - 1, n)))
        assert len(fed.alerts) == 1, "told once"


def test_windows_fill_over_time_if_few_tokens_count():
    """Every fourth token steers: the windows of 1,024 of them are 4,096 long, and two of them raise."""
    codes = code_stream(6 * N, varies=1e-3)
    fed = Fed(BEM, "chunk").add(dataclasses.replace(codes, steering=(np.arange(6 * N) % 4 == 0)[None]))
    assert [(alert.metric, alert.at) for alert in fed.alerts if alert.kind == "collapse"] == [("variation", 2 * 4096)]
    # From the alert on no window is healthy: there is no baseline of a drift, and so it is said.
    assert (
        kinds_of(fed.tally.alerts.unjudged) == {("entropy drift", "rank_entropy")} and fed.tally.alerts.baseline() == {}
    )


def test_stream_without_counted_tokens_does_not_delay_the_others():
    both = np.stack([logits_of("collapsed", 1, N), logits_of("collapsed", 2, N)])
    both[0, :, 3] = np.nan
    decisions = decisions_of(both)
    tally = Tally([Stream(MOE, f"router.{i}", i) for i in range(2)], 8, memory=lambda: (1, 10))
    alerts = tally.add(decisions, History(1, 2).compare(np.zeros(N, np.int64), decisions), 5.0)
    alone = Fed().add(decisions_of(both[1]))
    assert (
        [(a.kind, a.metric, a.at, a.value) for a in alerts if a.stream.layer == 1]
        == [(a.kind, a.metric, a.at, a.value) for a in alone.alerts]
        != []
    )
    assert [a.kind for a in alerts if a.stream.layer == 0] == ["not finite"] and "collapse" in {
        rule.kind for rule, _ in tally.alerts.unjudged
    }


# -- what drifts are measured from -------------------------------------------------------------------


def usual(seed, n):
    """Healthy streams of several kinds, each token's expert drawn alike."""
    return logits_of("by token", seed, n)


BAD = {
    "all to one expert": lambda seed, n: logits_of("collapsed", seed, n), "no choice": lambda seed,
    n: logits_of("indifferent", seed, n),
    "softer": lambda seed, n: 0.5 * usual(seed, n), "an expert that takes over": lambda seed, n: biased(n, seed).raw[0],
}  # fmt: skip


def drifts(logits, **more):
    """The alerts of drift over a stream, and the tally."""
    decisions = decisions_of(logits)
    tally = Tally([Stream(MOE, "site", 0)], 8, **more)
    alerts = tally.add(decisions, History(1, 1).compare(np.zeros(len(decisions), np.int64), decisions), 1.0)
    return [alert for alert in alerts if alert.kind == "entropy drift"], tally


def test_bad_window_at_the_start_does_not_become_the_baseline():
    """The stream by which a mean of the first windows was found out: bad from token 3,072 to 4,095, healthy for 100,000
    afterwards.
    """
    logits = usual(0, 102_400)
    logits[3072:4096] = 20 * np.eye(8)[3]
    alerts, tally = drifts(logits)
    assert alerts == [] and tally.alerts.raised == []
    assert {metric: round(value, 2) for (_, metric, _), value in tally.alerts.baseline().items()} == {
        "decision_entropy": 0.03,
        "marginal_entropy": 1.0,
    }


@pytest.mark.parametrize("bad", BAD)
def test_bad_stretch_does_not_spoil_the_baseline_wherever_it_occurs(bad):
    """As long as a window of 1,024, cut by windows or not: what is healthy afterwards is no drift, and what is a drift
    is told at once.
    """
    healthy, drift = usual(1, 12_288), 0.5 * usual(2, 2048)
    _, expected = drifts(healthy)
    for at in [0, *range(1, 6144, 509), 3072]:
        logits = np.concatenate([healthy, drift])
        logits[at : at + 1024] = BAD[bad](3, 1024)
        alerts, tally = drifts(logits)
        assert all(alert.at <= at + 1024 + 3 * 1024 for alert in alerts if alert.at <= len(healthy)), (at, alerts)
        late = [(alert.metric, alert.raised) for alert in alerts if alert.at > len(healthy)]
        assert ("decision_entropy", True) in late and ("decision_entropy", False) not in late, (at, alerts)
        for key, value in expected.alerts.baseline().items():
            assert abs(tally.alerts.baseline()[key] - value) < 0.02, (at, key)


def test_windows_with_an_active_alert_are_not_in_the_baseline():
    """However many they are: half of the first 20,480 tokens are bad, in one piece, and told of."""
    logits = usual(1, 40_960)
    logits[1024:11_264] = logits_of("collapsed", 1, 10_240)
    alerts, tally = drifts(logits)
    assert alerts == [] and all(
        abs(value - {"decision_entropy": 0.03, "marginal_entropy": 1.0}[metric]) < 0.02
        for (_, metric, _), value in tally.alerts.baseline().items()
    )


@pytest.mark.parametrize("first", [True, False])
def test_window_that_raises_an_alert_is_in_no_baseline(first):
    """A drift of a known baseline is raised by the first window, beside a rule of equal windows that makes its own."""
    stream = Stream(MOE, "site", 0)
    known = AlertRule("known", "marginal_entropy", 0.1, 0.05, drift=True, window=64, in_a_row=1)
    made = AlertRule("made", "max_vio", 0.1, 0.05, drift=True, window=64, in_a_row=1)
    rules = [known, made] if first else [made, known]
    alerts = Alerts(rules, [stream], 4, 1, 64, baseline={(stream, "marginal_entropy", 64): 0.5})
    told = [(i, str(a.kind)) for i, share in enumerate([1, *[0.5] * 6]) for a in alerts.add(window_of(share))]
    assert told == [(0, "known"), (1, "known")]
    assert alerts.baseline()[stream, "max_vio", 64] == window_of(0.5).metric("max_vio")[0]
    [watch] = [watch for watches in alerts._watches.values() for watch in watches if watch.rule is made]
    assert len(set(watch.first[0])) == 1  # not the first window's, and not that in which it was over


def test_baseline_can_be_given_and_reset():
    healthy, drift = usual(1, 8192), 0.5 * usual(2, 8192)
    _, tally = drifts(healthy)
    baseline = tally.alerts.baseline()
    alerts, again = drifts(drift, baseline=baseline)
    assert [(alert.metric, alert.raised, alert.at) for alert in alerts] == [
        ("decision_entropy", True, 2 * 512)
    ] and again.alerts.baseline() == baseline
    assert drifts(drift)[0] == [] and drifts(healthy, baseline=baseline)[0] == []
    _, few = drifts(healthy[:1023], baseline=baseline)
    assert {(rule.kind, needed) for rule, needed in few.alerts.unjudged if rule.drift} == {
        ("entropy drift", 2 * 512),
        ("entropy drift", 2 * 1024),
    }
    over = again.alerts.reset_baseline()
    assert (
        [(alert.kind, alert.raised, alert.at) for alert in over] == [("entropy drift", False, 8192)]
        and again.alerts.raised == []
        and again.alerts.baseline() == {}
    )
    assert {rule.metric for rule, _ in again.alerts.unjudged if rule.drift} == {"decision_entropy", "marginal_entropy"}
    decisions = decisions_of(drift)
    assert (
        again.add(decisions, History(1, 1).compare(np.zeros(len(decisions), np.int64), decisions), 1.0) == []
    )  # it is what is usual now
    assert {metric: round(value, 1) for (_, metric, _), value in again.alerts.baseline().items()} == {
        "decision_entropy": round(float(_entropies(drift).mean()), 1),
        "marginal_entropy": 1.0,
    }


def _entropies(logits):
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True).astype(np.float64))
    shares /= shares.sum(axis=-1, keepdims=True)
    return -(shares * np.log(shares)).sum(axis=-1) / np.log(shares.shape[-1])


def test_dead_experts_need_enough_tokens_to_be_judged():
    """Of 128 experts one is chosen: 512 tokens are 4 for each, and some have none by chance."""
    fed = Fed(e=128)
    rng = np.random.default_rng(0)
    fed.add(decisions_of(9 * np.eye(128)[rng.integers(0, 128, 40_000)]))
    assert fed.alerts == []
    fed.add(decisions_of(9 * np.eye(128)[rng.integers(1, 128, 40_000)]))
    assert fed.kinds == [("dead expert", True)]


def test_splitting_a_stream_changes_no_alert():
    decisions = decisions_of(np.concatenate([logits_of("by token", 2, 3000), logits_of("collapsed", 2, 3000)]))
    found = []
    for size in (1, 97, 6000):
        tally, history, alerts = Tally([Stream(MOE, "site", 0)], 8), History(1, 1), []
        for at in range(0, 6000, size):
            part = decisions.take(np.arange(at, min(6000, at + size)))
            alerts += tally.add(part, history.compare(np.zeros(len(part), np.int64), part), 1.0)
        found.append([str(alert) for alert in alerts])
    assert found[0] == found[1] == found[2] and any("collapse" in line for line in found[0])


def test_invalid_rules_are_refused():
    with pytest.raises(ConfigError, match="two numbers that differ"):
        AlertRule("x", "spread", 0.2, 0.2)
    with pytest.raises(ConfigError, match="metric is 'sprawl': expected one of decision_entropy"):
        AlertRule("x", "sprawl", 0.2, 0.3)
    with pytest.raises(ConfigError, match="1 or more"):
        AlertRule("x", "spread", 0.2, 0.3, in_a_row=0)
    for given in ({"sources": ("nope",)}, {"sources": "moe"}, {"sources": ()}, {"sources": None}):
        with pytest.raises(ConfigError, match="moe, xlora, bem"):
            AlertRule("x", "spread", 0.2, 0.3, **given)
    for levels in (("tokn",), "token", (["token"],)):
        with pytest.raises(ConfigError, match="prefix, chunk, token"):
            AlertRule("x", "variation", 0.2, 0.3, sources=(BEM,), levels=levels)
    for more in ({"in_a_row": 2}, {"in_a_row": 1, "drift": True}, {"in_a_row": 1, "each_expert": True}):
        with pytest.raises(ConfigError, match="at_once needs no full window"):
            AlertRule("x", "spread", 0.2, 0.3, at_once=True, **more)
    for numbers in (("a", 0.3), (0.2, None), (True, 0.3)):
        with pytest.raises(ConfigError, match="two numbers that differ"):
            AlertRule("x", "spread", *numbers)
    for window in ("512", 1.5, True):
        with pytest.raises(ConfigError, match="1 or more"):
            AlertRule("x", "spread", 0.2, 0.3, window=window)
    with pytest.raises(ConfigError, match="kind"):
        AlertRule("", "spread", 0.2, 0.3)
    assert {rule.kind for rule in DEFAULT_RULES} == {
        "not finite",
        "collapse",
        "indifference",
        "dead expert",
        "entropy drift",
        "latency",
        "memory",
        "code reuse",
    }


def test_healthy_streams_raise_no_false_alert(tmp_path, monkeypatch, capsys):
    """The script that counts false alarms, on few steps, and one of its streams with a fault."""
    out = tmp_path / "alarms.json"
    monkeypatch.setattr(sys, "argv", ["routing_alarms.py", "--out", str(out), "--steps", "3100", "--seed", "3"])
    routing_alarms.main()
    result = json.loads(out.read_text())
    assert (
        result["false_alarms"] == 0
        and result["steps"] == 3100 * len(result["streams"])
        and all(one["tokens"] == 12_400 for one in result["streams"])
    )
    monkeypatch.setitem(
        routing_alarms.KINDS,
        "broken",
        (MOE, "", lambda rng: routing_alarms.peaked(rng, 8, 1, np.eye(8)[0], 9, 1), 8, 1),
    )
    assert routing_alarms.run("broken", 3100, 3)["by_kind"] == {"collapse": 2, "dead expert": 1}


def test_codes_at_the_norm_limit_are_not_reported_as_nonfinite():
    """In fp32 some are a hair above it."""
    codes = code_stream(N, seed=2)
    raw = codes.raw / np.linalg.norm(codes.raw, axis=-1, keepdims=True) * np.float32(256)
    assert (np.linalg.norm(raw.astype(np.float64), axis=-1) > 256).any()
    assert not any(
        alert.kind == "not finite" for alert in Fed(BEM, "chunk").add(dataclasses.replace(codes, raw=raw)).alerts
    )
    assert any(
        alert.kind == "not finite" for alert in Fed(BEM, "chunk").add(dataclasses.replace(codes, raw=1.1 * raw)).alerts
    )
