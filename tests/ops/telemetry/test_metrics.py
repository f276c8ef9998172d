"""Metrics of a process, read by a real Prometheus, equal the summed results of its runs."""

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from blinded import Blinded
from conftest import make_model, make_pack
from corpora import make_tokenizer
from probemon import DynamicProbeManager
from probemon.adapters.routing import AlertRule, RoutingMonitor
from probemon.adapters.routing.recorder import Routing
from probemon.adapters.routing.routing_metrics import FAMILIES as ROUTING_FAMILIES
from probemon.adapters.routing.routing_metrics import table as routing_table
from probemon.adapters.routing.statistics import METRICS
from probemon.core.scores import COUNTS
from probemon.errors import ConfigError, UnknownConcept
from probemon.monitor.breaker import Breaker
from probemon.monitor.degradations import DEPTH, NAMES, OFF
from probemon.monitor.sinks import CallbackSink, JsonLinesSink, MemorySink
from probemon.ops.budget import Budget
from probemon.ops.drift.drift_monitor import DriftMonitor
from probemon.ops.judges.escalation import Escalate
from probemon.ops.telemetry.exposition import served
from probemon.ops.telemetry.metric_families import FAMILIES, SERVER, table
from probemon.ops.telemetry.metrics import ProcessMetrics
from prometheus_server import Prometheus
from routed_hosts import make_moe

ROOT = Path(__file__).parents[3]
PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
MASK = (PROMPTS != 0).long()
OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def generate(model, **options):
    return model.generate(PROMPTS, attention_mask=MASK, **{"max_new_tokens": 6, "do_sample": False, **options})


def fresh(*concepts):
    return ProcessMetrics(concepts=concepts, registry=CollectorRegistry())


def read(metrics):
    """`{(name, labels): value}` of an exposition, parsed by the client."""
    return parsed(metrics.text()[0].decode())


def parsed(text):
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def of(found, name, **labels):
    return found[name, tuple(sorted(labels.items()))]


def test_metric_counts_equal_the_results_over_all_runs(model, pack):
    manager, metrics = DynamicProbeManager(pack, audit_rate=0.5), fresh("c1", "c30")
    results, seconds = [], []
    for columns in (5, 4):
        with manager.attach(model) as run:
            run.follow(metrics)
            out = generate(model, max_new_tokens=columns)
        results.append(run.result(out))
        seconds += run.forward_seconds
    found = read(metrics)
    coverage = [result.coverage for result in results]
    for phase, number in (("prompt", 0), ("generated", 1)):
        seen = sum(int((result.coverage.seen & (result.phase == number)).sum()) for result in results)
        assert of(found, "probemon_tokens_total", phase=phase, unseen="") == seen > 0
    for name in COUNTS:
        assert of(found, "probemon_probes_total", what=name) == sum(getattr(one, name).sum() for one in coverage)
    probes = np.concatenate([result.scores.probes for result in results])
    fired = np.concatenate([result.scores.fired_mask for result in results])
    assert of(found, "probemon_probes_total", what="fired") == fired.sum() > 0
    level = pack.tree.level[probes]
    for number in np.unique(pack.tree.level).tolist():
        at = level == number
        assert of(found, "probemon_level_probes_total", level=str(number), what="active") == at.sum()
        assert of(found, "probemon_level_probes_total", level=str(number), what="fired") == (at & fired).sum()
    for concept in ("c1", "c30"):
        n = (fired & (probes == pack.find(concept))).sum()
        assert of(found, "probemon_fired_total", concept=concept) == n
    audit = results[0].audit + results[1].audit
    for name, value in audit.as_dict().items():
        if name != "n_probes":
            assert of(found, "probemon_audit_total", sum=name.removeprefix("n_")) == pytest.approx(value)
    assert of(found, "probemon_audit_recall", of="firing", bound="low") == pytest.approx(audit.firing_recall.low)
    assert of(found, "probemon_forward_overhead_seconds_count") == len(seconds) == 9
    assert of(found, "probemon_forward_overhead_seconds_sum") == pytest.approx(sum(seconds))
    assert of(found, "probemon_forward_overhead_seconds_bucket", le="0.001") == sum(s <= 0.001 for s in seconds)
    assert of(found, "probemon_watched_seconds_total") > sum(seconds)
    assert of(found, "probemon_arena_slots", what="slots") == pack.n_probes
    assert of(found, "probemon_arena_total", what="hits") == manager.arena.stats().hits > 0
    assert of(found, "probemon_info", pack="random", probes="40", kernel=manager.impl, deployment="") == 1


def test_levels_from_15_on_share_one_label(model, tmp_path):
    concepts = [{"id": f"c{i}", "name": f"c{i}", "parents": [f"c{i - 1}"] if i else []} for i in range(20)]
    deep = make_pack(tmp_path / "deep", model, n=20, concepts=concepts, alert_threshold=torch.full((20,), 1e-6))
    metrics = fresh()
    with DynamicProbeManager(deep, load_threshold=1e-9).attach(model) as run:
        run.follow(metrics)
        out = generate(model)
    scores = run.result(out).scores
    level, found = deep.tree.level[scores.probes], read(metrics)
    assert of(found, "probemon_level_probes_total", level="14", what="active") == (level == 14).sum() > 0
    assert of(found, "probemon_level_probes_total", level="15+", what="active") == (level >= 15).sum() > 0
    assert max(level) == 19


def test_several_packs_are_counted_together(model, pack, two_sites):
    metrics = fresh("c1")
    metrics_of_one = fresh("one:c1")
    manager = DynamicProbeManager({"one": pack, "two": two_sites})
    with manager.attach(model) as run:
        run.follow(metrics_of_one)
        with pytest.raises(UnknownConcept, match=r"one:c1.*two:c1"):  # each has one of this name
            run.follow(metrics)
        out = generate(model)
    scores, found = run.result(out).scores, read(metrics_of_one)
    assert of(found, "probemon_probes_total", what="active") == len(scores.probes)
    level = manager.pack.tree.level[scores.probes]
    for number in np.unique(level).tolist():
        n_fired = (scores.fired_mask & (level == number)).sum()
        assert of(found, "probemon_level_probes_total", level=str(number), what="fired") == n_fired
    fired = (scores.fired_mask & (scores.probes == manager.pack.find("one:c1"))).sum()
    assert of(found, "probemon_fired_total", concept="one:c1") == fired > 0
    assert of(found, "probemon_arena_slots", what="slots") == pack.n_probes + two_sites.n_probes


def test_open_runs_events_failures_and_sink_tokens_are_counted(model, pack):
    metrics, heard = fresh(), []

    def broken(batch):
        raise ValueError("broken")

    with DynamicProbeManager(pack).attach(model, callback_errors="report") as run:
        run.on("c1", above=0.0, action="record")
        run.on("c2", above=0.0, action=heard.append)
        run.follow(metrics)
        assert of(read(metrics), "probemon_runs") == 1
        run.follow(MemorySink())
        run.follow(CallbackSink(broken))
        out = generate(model)
    found = read(metrics)
    actions = [event.concept for event in run.events]
    assert of(found, "probemon_events_total", action="record") == actions.count("c1") > 0
    assert of(found, "probemon_events_total", action="call") == actions.count("c2") == len(heard)
    assert of(found, "probemon_events_total", action="stop") == 0
    n = int(run.result(out).coverage.seen.sum())
    assert of(found, "probemon_sink_tokens_total", what="written") == n
    assert of(found, "probemon_sink_tokens_total", what="dropped") == n
    assert of(found, "probemon_failures_total") == run.n_failures == 1 and of(found, "probemon_runs") == 0


def test_tokens_of_a_failed_sink_file_are_counted_as_dropped(model, pack, tmp_path):
    """The disk is full once many are in the file, and counted as written; of another sink nothing changes."""
    metrics, sink, full = fresh(), JsonLinesSink(tmp_path / "scores.jsonl"), threading.Event()
    append = sink._append

    def fill(batch):
        if full.is_set():
            raise OSError(28, "No space left on device")
        append(batch)

    sink._append = fill
    with DynamicProbeManager(pack).attach(model, callback_errors="report") as run:
        run.follow(metrics)
        deliveries = [run.follow(sink), run.follow(MemorySink())]
        for _ in range(2):
            generate(model)
            until = time.monotonic() + 20
            while any(one.stats().n_queued for one in deliveries) and time.monotonic() < until:
                time.sleep(0.01)
        n_before = deliveries[0].stats().n_written
        full.set()
        generate(model)
    found, n = read(metrics), deliveries[1].stats().n_written
    assert n == n_before // 2 * 3 > 0
    assert [(one.stats().n_written, one.stats().n_dropped) for one in deliveries] == [(0, n), (n, 0)]
    assert of(found, "probemon_sink_tokens_total", what="dropped") == n
    assert n + n_before // 2 <= of(found, "probemon_sink_tokens_total", what="written") <= n + n_before
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.* to judges had no answer that counts")
def test_verdicts_are_counted_by_ruling_and_failure(model, pack):
    def fails(question):
        raise ValueError("broken")

    metrics = fresh()
    with DynamicProbeManager(pack).attach(model, make_tokenizer()) as run:
        run.on("c1", above=0.0, action=Escalate(lambda question: "pass", 30.0, meanwhile="hold", on_failure="stop"))
        run.on("c2", above=0.0, action=Escalate(fails, 30.0, meanwhile="hold", on_failure="pass"))
        run.follow(metrics)
        generate(model)
    found, verdicts = read(metrics), [event.verdict for event in run.events]
    n_judged, n_failed = (sum(bool(one.failure) == failed for one in verdicts) for failed in (False, True))
    assert of(found, "probemon_events_total", action="escalate") == len(verdicts) == n_judged + n_failed
    assert of(found, "probemon_verdicts_total", ruling="pass", failure="") == n_judged > 0
    assert of(found, "probemon_verdicts_total", ruling="pass", failure="error") == n_failed > 0
    assert of(found, "probemon_verdicts_total", ruling="stop", failure="late") == 0
    assert of(found, "probemon_verdict_seconds_total") == pytest.approx(sum(one.seconds for one in verdicts))


def test_verdict_is_counted_if_its_question_preceded_the_metrics(model, pack):
    metrics, asked, followed = fresh(), threading.Event(), threading.Event()

    def judge(question):
        asked.set()
        return "pass" if followed.wait(20) else "stop"

    def follow(placed, scores):
        if not followed.is_set() and asked.wait(0.5):
            run.update(rules=[])  # no other question comes
            run.follow(metrics)
            followed.set()

    with DynamicProbeManager(pack).attach(model, make_tokenizer()) as run:
        run.on("c9", above=0.0, action=Escalate(judge, within=30, meanwhile="pass", on_failure="pass", n_workers=1))
        run.follow(follow)
        generate(model, eos_token_id=None)
    n_asked = len(run.events)
    assert not run.failures and n_asked > 0
    assert of(read(metrics), "probemon_verdicts_total", ruling="pass", failure="") == n_asked
    assert run.n_failures == 0


def test_gaps_and_reasons_of_unseen_tokens_use_a_closed_set_of_labels(model, pack):
    metrics = fresh()

    def spoil(module, args, output):
        hidden = output.clone()
        hidden[0, -1] = float("nan")
        return hidden

    with DynamicProbeManager(pack).attach(model, on_gap="report") as run:
        run.follow(metrics)
        with Blinded(model, lost={2, 4}):
            generate(model, eos_token_id=None)
    found = read(metrics)
    assert of(found, "probemon_gaps_total") == run.n_gaps == 2
    assert of(found, "probemon_tokens_total", phase="generated", unseen="gap") == 4
    handle = model.model.layers[1].register_forward_hook(spoil)
    try:
        with DynamicProbeManager(pack).attach(model) as run:
            run.follow(metrics)
            out = generate(model)
    finally:
        handle.remove()
    n = sum("finite" in reason for reason in run.result(out).coverage.unseen)
    found = read(metrics)
    told = [of(found, "probemon_tokens_total", phase=phase, unseen="not_finite") for phase in ("prompt", "generated")]
    assert sum(told) == n > 0
    assert {dict(labels)["unseen"] for name, labels in found if name == "probemon_tokens_total"} == {
        "", "gap", "not_finite", "budget", "failed", "other"
    }  # fmt: skip


def test_tokens_shed_by_a_budget_are_counted_by_degradation_level(model, pack):
    metrics = fresh()
    with DynamicProbeManager(pack).attach(model, followers=[Budget(ms=1e-6)]) as run:  # always too little
        run.follow(metrics)
        out = generate(model, max_new_tokens=60, eos_token_id=None)
        found = read(metrics)
        assert of(found, "probemon_budget_degradation") == NAMES.index(run.watching.degradation_name) == OFF
        other = DynamicProbeManager(pack).attach(model, followers=[Budget(ms=1e6)])
        other.follow(metrics)  # the gauge is of the run that leaves out most
        assert of(read(metrics), "probemon_budget_degradation") == OFF
    shed = {dict(labels)["degradation"]: n for (name, labels), n in found.items() if name.endswith("shed_tokens_total")}
    assert shed == {name: run.follower(Budget).tokens[name] for name in NAMES[1:]} and shed["off"] > 0 < shed["depth"]
    n = sum("budget" in reason for reason in run.result(out).coverage.unseen)
    assert of(found, "probemon_tokens_total", phase="generated", unseen="budget") == n > 0
    assert of(read(metrics), "probemon_budget_degradation") == 0


def test_shared_budget_is_shown_between_runs(model, pack):
    ladder, metrics, manager, runs = Budget(ms=1e-6), fresh(), DynamicProbeManager(pack), []
    for _ in range(2):
        with manager.attach(model, followers=[ladder]) as run:
            run.follow(metrics)
            generate(model, max_new_tokens=8, eos_token_id=None)
        runs.append(run)
    found = read(metrics)
    assert of(found, "probemon_budget_degradation") == ladder.degradation == DEPTH
    shed = ladder.tokens["depth"]
    assert of(found, "probemon_budget_shed_tokens_total", degradation="depth") == shed > 0


def test_breaker_metric_is_one_while_the_breaker_is_open(model, pack):
    metrics, manager = fresh(), DynamicProbeManager(pack)
    begin, calls = manager.begin, []

    def fail_once(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("broken")
        return begin(*arguments)

    manager.begin = fail_once
    breaker = Breaker(errors=1, retry_after=1e6)
    with manager.attach(model, breaker=breaker, callback_errors="report") as run:
        run.follow(metrics)
        generate(model, eos_token_id=None)
        found = read(metrics)
    assert of(found, "probemon_breaker_open") == 1 and of(read(metrics), "probemon_breaker_open") == 0
    # Of five steps of two rows the third failed, and the two after it were in its pause.
    assert of(found, "probemon_tokens_total", phase="generated", unseen="failed") == 6
    assert of(found, "probemon_tokens_total", phase="generated", unseen="") == 4
    assert of(found, "probemon_failures_total") == run.n_failures == 1


def test_wait_for_a_judge_is_no_time_of_hooks(model, pack):
    def judge(question):
        time.sleep(0.4)
        return "pass"

    metrics = fresh()
    with DynamicProbeManager(pack).attach(model, make_tokenizer(), followers=[metrics]) as run:
        run.on("c1", above=0.0, action=Escalate(judge, within=20, meanwhile="hold", on_failure="stop"))
        generate(model)
    found = read(metrics)
    inside, whole = (
        of(found, f"probemon_{name}") for name in ("forward_overhead_seconds_sum", "watched_seconds_total")
    )
    assert sum(run.forward_seconds) > 0.4 and sum(run.forward_seconds) - inside == pytest.approx(0.4, abs=0.1)
    assert 0 < inside < whole
    assert of(found, "probemon_forward_overhead_seconds_bucket", le="5.0") == 6


def test_drift_alarms_are_counted_by_kind(pack, tmp_path):
    manager, host, metrics = DynamicProbeManager(pack), make_model(), fresh()

    def watch(drift):
        with manager.attach(host, followers=[drift]) as run:
            run.follow(metrics)
            host(torch.randint(1, 60, (100, 6)))

    before = DriftMonitor(manager)
    watch(before)
    before.freeze(tmp_path / "reference.json")
    drift = DriftMonitor(manager, tmp_path / "reference.json")
    with torch.no_grad():
        host.model.layers[0].mlp.down_proj.weight.mul_(3)
    with pytest.warns(UserWarning, match="weights"):
        watch(drift)

    def shown():
        found = read(metrics).items()
        return {dict(labels)["kind"]: n for (name, labels), n in found if name == "probemon_drift_alarms"}

    assert shown() == drift.counts() and shown()["host"] == 1
    with torch.no_grad():
        host.model.layers[0].mlp.down_proj.weight.div_(3)
    calm = DriftMonitor(manager, tmp_path / "reference.json")
    watch(calm)  # what another monitor has not is no end of what this one has
    assert calm.counts()["host"] == 0 and shown()["host"] == drift.counts()["host"] == 1


def test_exemplars_carry_request_and_trace_ids_of_bounded_length(model, pack):
    trace = pytest.importorskip("opentelemetry.trace")
    span = trace.NonRecordingSpan(trace.SpanContext(0xABC, 0x1, is_remote=False))
    metrics = fresh()
    with DynamicProbeManager(pack).attach(model) as run, trace.use_span(span):
        run.follow(metrics.for_request("r" * 500))
        generate(model)
    text, content_type = metrics.text(OPENMETRICS)
    assert "openmetrics" in content_type and "trace_id" not in metrics.text()[0].decode()
    [family] = [f for f in openmetrics_families(text.decode()) if f.name == "probemon_forward_overhead_seconds"]
    exemplars = [sample.exemplar for sample in family.samples if sample.exemplar]
    assert exemplars and all(one.labels == {"request": "r" * 64, "trace_id": f"{0xABC:032x}"} for one in exemplars)
    assert run.n_failures == 0


def test_too_many_or_unknown_concepts_are_refused_by_name(model, tmp_path):
    many = make_pack(tmp_path / "many", model, n=101)
    metrics = fresh(re.compile(".*"))
    with DynamicProbeManager(many).attach(model) as run:
        with pytest.raises(ConfigError, match=r"concepts are 101 \(c0, c1, c10, c100, c11, ...\).* at most 100"):
            run.follow(metrics)
        with pytest.raises(UnknownConcept, match="nothing like it"):
            run.follow(fresh("nothing like it"))
        metrics = fresh("c1", "c1*", "concept 1")  # named twice, it is one series
        run.follow(metrics)
        with pytest.raises(ConfigError, match="follows this run already"):
            run.follow(metrics)
    with pytest.raises(ConfigError, match="one ProcessMetrics is for all runs"):
        ProcessMetrics(registry=metrics.registry)
    lines = metrics.text()[0].decode().splitlines()
    assert sum(line.startswith('probemon_fired_total{concept="c1"}') for line in lines) == 1


def test_number_of_series_does_not_grow_with_concepts(model, tmp_path):
    n_series = []
    for n in (400, 8000):
        concepts = [{"id": f"c{i}", "name": f"c{i}", "parents": [f"c{i // 2}"] if i else []} for i in range(n)]
        pack, metrics = make_pack(tmp_path / str(n), model, n=n, concepts=concepts), fresh()
        with DynamicProbeManager(pack, audit_rate=1.0).attach(model) as run:
            run.follow(metrics)
            generate(model)
        n_series.append(len(read(metrics)))
    # Of a tree with 20 times as many concepts, 5 levels more: each has 2 sums.
    assert n_series[1] < 200 and n_series[1] - n_series[0] <= 5 * 2


def test_routing_metrics_equal_the_report_and_counters_never_fall():
    model, metrics = make_moe(), fresh()
    rules = (AlertRule("flips", "flip_rate", raise_at=0.01, clear_at=0.0, window=8),)
    n_tokens = n_raised = 0
    for _ in range(2):
        with RoutingMonitor(model, rules=rules) as monitor, metrics.showing(monitor):
            generate(model)
            found = read(metrics)
        report = monitor.report()
        n_tokens, n_raised = n_tokens + report["n_tokens"], n_raised + report["n_alerts"]
        assert of(found, "probemon_routing_tokens_total", seen="yes") == n_tokens > 0
        assert of(found, "probemon_routing_alerts_raised_total") == n_raised
        for stream in report["streams"]:
            router = {name: str(stream[name]) for name in ("site", "layer", "level")}
            values = {name: value for name, value in stream.items() if name in METRICS}
            assert len(values) > 8
            for metric, value in values.items():
                assert of(found, "probemon_routing", **router, metric=metric) == value
        assert of(found, "probemon_routing_alerts", kind="flips") == len(report["alerts"])
        percentile = of(found, "probemon_routing_capture_seconds", percentile="95")
        assert percentile == pytest.approx(report["latency_us"]["p95"] / 1e6)
        assert of(found, "probemon_forward_seconds_count") == report["seconds"]["forward"]["n"] * (1 + _)
    after = read(metrics)
    assert of(after, "probemon_routing_tokens_total", seen="yes") == n_tokens
    with pytest.raises(ConfigError, match="give a RoutingMonitor"), metrics.showing(model):
        pass


def test_routing_alerts_of_all_open_monitors_are_counted():
    metrics = fresh()
    rules = (AlertRule("busy", "effective_experts", raise_at=0.5, clear_at=0.1, window=8, in_a_row=1),)
    with ExitStack() as stack:
        monitors = []
        for model, n_rows in ((make_moe(), 60), (make_moe(), 60), (make_moe("olmoe"), 1)):
            monitors.append(stack.enter_context(RoutingMonitor(model, rules=rules)))
            stack.enter_context(metrics.showing(monitors[-1]))
            model(torch.randint(1, 60, (n_rows, 10)))
        n_alerts = [len(monitor.alerts) for monitor in monitors]
        assert min(n_alerts[:2]) > 0 == n_alerts[2]
        assert of(read(metrics), "probemon_routing_alerts", kind="busy") == sum(n_alerts)
        unjudged = [monitor.report()["unjudged"].get("busy", 0) for monitor in monitors]
        assert of(read(metrics), "probemon_routing_unjudged", kind="busy") == max(unjudged) > 0


def test_routing_of_a_run_is_in_its_metrics(tmp_path):
    host, metrics = make_moe(), fresh()
    with DynamicProbeManager(make_pack(tmp_path / "pack", host)).attach(host, followers=[Routing()]) as run:
        run.follow(metrics)
        generate(host)
        assert (
            of(read(metrics), "probemon_routing_tokens_total", seen="yes")
            == run.follower(Routing).report()["n_tokens"]
            > 0
        )
    assert of(read(metrics), "probemon_routing_tokens_total", seen="yes") == run.follower(Routing).report()["n_tokens"]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_server_reads_the_metrics(model, pack, tmp_path):
    metrics, host = fresh("c1"), make_moe()
    with (
        DynamicProbeManager(pack, audit_rate=1.0).attach(model) as run,
        RoutingMonitor(host) as routing,
        metrics.showing(routing),
        served(metrics.registry, 0) as port,
    ):
        run.follow(metrics)
        out = generate(model)
        generate(host)
        with Prometheus(tmp_path, {"probemon": [f"127.0.0.1:{port}"]}) as prometheus:
            tokens = prometheus.ask('sum(probemon_tokens_total{unseen=""})')
            fired = prometheus.ask('probemon_fired_total{concept="c1"}')
            recall = prometheus.ask('probemon_audit_recall{of="firing",bound="value"}')
            entropy = prometheus.ask('sum(probemon_routing{metric="decision_entropy"})')
            names = prometheus.api("label/__name__/values")
    exposition, _ = metrics.text()
    result = run.result(out)
    assert tokens == result.coverage.seen.sum() and recall == pytest.approx(result.audit.firing_recall.value, abs=1e-12)
    assert fired == ((result.scores.probes == pack.find("c1")) & result.scores.fired_mask).sum()
    assert entropy == pytest.approx(sum(stream["decision_entropy"] for stream in routing.report()["streams"]))
    assert {"probemon_info", "probemon_arena_total", "probemon_forward_overhead_seconds_bucket"} <= set(names)
    checked = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr.decode()


# As a server that loads first and forks then: each worker has a ProcessMetrics of its own.
_PROCESSES = """
import os, sys
import torch
from prometheus_client import multiprocess
from conftest import make_model
from probemon import DynamicProbeManager, ProbePack
from probemon.ops.telemetry.metrics import ProcessMetrics

model, pack = make_model(), ProbePack.open(sys.argv[1])
manager = DynamicProbeManager(pack, impl="cpu")
workers = []
for n_tokens in (4, 5, 6):
    pid = os.fork()
    if not pid:
        metrics = ProcessMetrics(concepts=["c1"])
        with manager.attach(model) as run:
            run.follow(metrics)
            out = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=n_tokens, do_sample=False, eos_token_id=None)
        probes = run.result(out).scores.probes[run.result(out).scores.fired_mask]
        print("fired", int((probes == pack.find("c1")).sum()), flush=True)
        if n_tokens == 6:
            print(metrics.text()[0].decode(), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    workers.append(pid)
for pid in workers:
    multiprocess.mark_process_dead(pid)
print("after")
print(ProcessMetrics().text()[0].decode())
"""


def test_metrics_of_three_processes_are_summed(model, tmp_path):
    make_pack(tmp_path / "pack", model)
    (tmp_path / "together").mkdir()
    environment = {
        **os.environ,
        "PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "together"),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/support'}",
    }
    command = [sys.executable, "-c", _PROCESSES, str(tmp_path / "pack")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    fired = sum(int(n) for n in re.findall(r"^fired (\d+)$", done.stdout, flags=re.MULTILINE))
    before, after = re.sub(r"^fired .*\n", "", done.stdout, flags=re.MULTILINE).split("after\n")
    for text, alive in ((before, True), (after, False)):
        found = parsed(text)
        # 3 tokens of the prompt, and all that were generated but the last, which is never run.
        assert of(found, "probemon_tokens_total", phase="prompt", unseen="") == 9
        assert of(found, "probemon_tokens_total", phase="generated", unseen="") == 3 + 4 + 5
        assert of(found, "probemon_forward_overhead_seconds_count") == 4 + 5 + 6
        assert of(found, "probemon_forward_overhead_seconds_bucket", le="+Inf") == 4 + 5 + 6
        assert of(found, "probemon_fired_total", concept="c1") == fired > 0
        assert of(found, "probemon_runs") == 0
        assert (("probemon_info" in {name for name, _ in found}) == alive) and not any(
            name.startswith("probemon_arena") for name, _ in found
        )


def test_documented_table_lists_exactly_the_exposed_metrics(tmp_path):
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert table() in page and routing_table() in page, "scripts/metrics_table.py writes it"
    host, metrics = make_moe(), fresh("c1")
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", host), audit_rate=1.0)
    with manager.attach(host, followers=[Routing(), Budget(ms=1e6), DriftMonitor(manager)]) as run:
        run.on("c2", above=0.0, action=Escalate(lambda question: "pass", 30.0, meanwhile="hold", on_failure="stop"))
        run.follow(metrics)
        generate(host)
    text = metrics.text()[0].decode()
    exposed = {
        (family.name, family.type): {name for s in family.samples for name in s.labels} - {"le"}
        for family in text_string_to_metric_families(text)
    }
    known = {
        (family.stem, family.kind): set(family.labels)
        for family in (*FAMILIES.values(), *ROUTING_FAMILIES.values())
        if family.where != SERVER
    }
    unexposed = known.keys() - exposed.keys()
    # What this host has none of, and what no run has here.
    assert {name for name, _ in unexposed} <= {"probemon_recurrent", "probemon_controller_seconds"}
    assert exposed == {family: labels for family, labels in known.items() if family not in unexposed}
