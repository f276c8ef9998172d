"""Latency histograms, limits and memory spikes, on a controlled clock and on a model."""

import random
import threading
from statistics import median

import numpy as np
import pytest
import torch

from bem_oracle import make_host
from conftest import make_model, n_hooks
from probemon.adapters.routing import RoutingMonitor, RoutingSettings
from probemon.adapters.routing.latency import BUCKETS, SPIKE, Durations, Latencies, LatencyLimit, MemorySpike, Spikes
from probemon.errors import ConfigError
from routed_hosts import GREEDY, PROMPT, make_bem


class Clock:
    """Goes on when it is told to."""

    now = 100.0

    def __call__(self):
        return self.now


def test_quantiles_and_buckets_equal_those_of_the_sorted_durations():
    durations, random_numbers = Durations("token", ()), random.Random(1)
    values = [random_numbers.lognormvariate(-4, 1.5) for _ in range(2000)]
    for value in values:
        durations.add(value)
    ordered = sorted(values)
    for name, q in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99)):
        assert durations.report()[name] == pytest.approx(ordered[int(q * 1999)], rel=0.011)
    ends = np.array([0.0, *BUCKETS, np.inf])
    assert durations.counts == np.histogram(values, ends)[0].tolist() and sum(durations.counts) == 2000
    assert durations.total == pytest.approx(sum(values))


def test_latency_limit_alerts_after_consecutive_windows_without_flapping():
    """Windows of 10: their second largest is what p95 by "higher" is not; the largest of 10 is."""
    durations = Durations("token", [LatencyLimit("token", 0.1, window=10, in_a_row=2, clear_seconds=0.05)])

    def window(largest):
        return [str(alert) for value in [0.01] * 9 + [largest] for alert in durations.add(value)]

    assert window(0.2) == [] and window(0.09) == []  # one is no trouble
    assert window(0.2) == []
    (raised,) = window(0.3)
    assert raised == "slow token: token_p95_seconds 0.3 (threshold 0.1) at token 40"
    assert [held.raised.kind for held in durations.limits] == ["slow token"]
    for largest in (0.09, 0.2, 0.06, 0.04, 0.06):  # between the two thresholds nothing changes, nor by one below both
        assert window(largest) == []
    assert window(0.04) == []
    assert window(0.03) == ["slow token is over: token_p95_seconds 0.03 (threshold 0.05) at token 110"]
    assert durations.limits[0].raised is None


def test_memory_rise_is_a_spike_and_a_stable_level_is_not():
    mb = 1 << 20
    spikes = Spikes(MemorySpike(rise=1.5, clear=1.2, least_bytes=50 * mb, window=8))
    told = [
        (i, alert.raised)
        for i, used in enumerate([1000] * 6 + [1400, 1600, 1600, 1300, 1000])
        for alert in spikes.add(used * mb, i)
    ]
    assert told == [(7, True), (10, False)]
    assert spikes.raised is None and median(spikes._looks) == 1150 * mb  # of 1000 four times, 1300, 1400, 1600 twice
    stays = [(i, alert.raised) for i, used in enumerate([2500] * 12) for alert in spikes.add(used * mb, i)]
    assert stays[0] == (0, True) and stays[1][1] is False and len(stays) == 2  # once it is the median
    small = Spikes(MemorySpike(least_bytes=50 * mb, window=8))
    assert [alert for used in [10] * 6 + [40] for alert in small.add(used * mb, 0)] == []  # four times, of little


class Told(torch.nn.Module):
    """Takes as long as it is told to."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, seconds):
        self.clock.now += seconds
        return seconds


class Recording:
    """What a generation is known by."""


def test_forward_and_token_durations_equal_the_clock():
    clock, alerts = Clock(), []
    host = Told(clock)
    limits = (LatencyLimit("forward", 0.5, window=2, in_a_row=1),)
    latencies = Latencies(host, None, limits, MemorySpike(every=2, window=4), lambda: (5, 10), alerts.extend, clock)
    latencies.attach()
    generation = Recording()
    for seconds, n in ((0.3, 0), (0.2, 1), (0.1, 1), (0.6, 3)):
        host(seconds)
        clock.now += 0.05
        latencies.tokens(generation, n)
    said = latencies.as_dict()
    assert said["forward"]["n"] == 4 and said["token"]["n"] == 5  # 0.25, 0.15, and thrice a third of 0.65
    assert said["forward"]["p99"] == pytest.approx(0.3, rel=0.011) and "controller" not in said
    assert latencies.histograms()["token"][1] == pytest.approx(0.25 + 0.15 + 0.65)
    assert [alert.kind for alert in alerts] == ["slow forward"] and alerts[0].value == pytest.approx(0.6)
    assert list(latencies.spikes._looks) == [5, 5]
    latencies.detach()
    host(9.0)
    assert latencies.as_dict()["forward"]["n"] == 4 and not host._forward_hooks and not host._forward_pre_hooks


def test_one_thread_mode_ignores_forwards_of_other_threads():
    clock = Clock()
    host = Told(clock)
    latencies = Latencies(host, None, (), None, lambda: (5, 10), lambda alerts: None, clock)
    latencies.attach(one_thread=True)
    beside = threading.Thread(target=host, args=(0.3,))
    beside.start()
    beside.join()
    host(0.2)
    assert latencies.as_dict()["forward"]["n"] == 1 and latencies.histograms()["forward"][1] == pytest.approx(0.2)
    latencies.detach()


def test_monitor_reports_latencies_of_a_generation_and_limit_alerts():
    model = make_model()
    bem = make_bem(model)
    before, heard = n_hooks(model), []
    limits = (LatencyLimit("controller", 1e-9, window=3, in_a_row=1), LatencyLimit("token", 3600.0, window=3))
    with RoutingMonitor(model, RoutingSettings(bem=bem, limits=limits)) as monitor:
        monitor.on_alert(heard.append)
        model.generate(PROMPT, **GREEDY)
    report = monitor.report()
    assert {kind: said["n"] for kind, said in report["seconds"].items()} == {"forward": 8, "controller": 8, "token": 7}
    for said in report["seconds"].values():
        assert 0 < said["p50"] <= said["p95"] <= said["p99"] < 60
    assert report["seconds"]["controller"]["p50"] < report["seconds"]["forward"]["p50"]
    assert [alert.kind for alert in heard] == ["slow controller"] == [alert.kind for alert in monitor.alerts]
    assert report["n_alerts"] == 1 and "slow controller: controller_p95_seconds" in report["alerts"][0]
    assert {"slow controller", "slow token", SPIKE} <= set(monitor.kinds)
    assert n_hooks(model) == before


def test_prometheus_gets_histograms_instead_of_percentiles():
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    from probemon.ops.telemetry.metrics import ProcessMetrics

    model = make_model()
    metrics = ProcessMetrics(registry=registry)
    with RoutingMonitor(model, bem=make_bem(model)) as monitor, metrics.showing(monitor):
        model.generate(PROMPT, **GREEDY)
        for kind, n in (("forward", 8), ("controller", 8), ("token", 7)):
            assert registry.get_sample_value(f"probemon_{kind}_seconds_count") == n
            assert registry.get_sample_value(f"probemon_{kind}_seconds_bucket", {"le": "+Inf"}) == n
            counts, total = monitor.latency.histograms()[kind]
            assert registry.get_sample_value(f"probemon_{kind}_seconds_sum") == pytest.approx(total)
            middle = registry.get_sample_value(f"probemon_{kind}_seconds_bucket", {"le": repr(BUCKETS[9])})
            assert middle == sum(counts[:10])
        assert registry.get_sample_value("probemon_routing_alerts", {"kind": SPIKE}) == 0


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LatencyLimit("tokens", 1.0), "kind is 'tokens': expected one of forward, controller, token"),
        (lambda: LatencyLimit("token", 0), "seconds is 0"),
        (lambda: LatencyLimit("token", 1.0, clear_seconds=1.0), "clear_seconds is 1.0"),
        (lambda: LatencyLimit("token", 1.0, quantile=1), "quantile is 1"),
        (lambda: MemorySpike(rise=1.0), "rise is 1.0"),
        (lambda: MemorySpike(rise=1.5, clear=1.5), "clear is 1.5"),
        (lambda: RoutingSettings(limits=[0.2]), r"limits is \[0.2\]: give a tuple of LatencyLimit"),
        (lambda: RoutingSettings(spike=True), "spike is True"),
        (lambda: RoutingMonitor(make_host("mixtral"), limits=(LatencyLimit("controller", 1.0),)), "no BEM adapter"),
    ],
)
def test_invalid_limits_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
