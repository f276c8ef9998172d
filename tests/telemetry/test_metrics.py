"""Metrics: what a real Prometheus reads equals what the run's result says."""

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from probemon import DynamicProbeManager
from probemon.errors import ConfigError
from probemon.telemetry import RoutingMonitor, Rule
from probemon.telemetry.metrics import RunMetrics
from probemon.telemetry.routing_metrics import RoutingMetrics
from probemon.telemetry.statistics import METRICS
from routed_hosts import make_moe

PROMPTS = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
MASK = (PROMPTS != 0).long()


def generate(model):
    return model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=6, do_sample=False)


def read(registry):
    """`{(name, labels): value}` of an exposition, parsed by the client."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def test_counts_are_those_of_the_result(model, pack):
    manager, registry = DynamicProbeManager(pack, audit_rate=0.5), CollectorRegistry()
    with manager.attach(model) as run, RunMetrics(run, concepts=["c1", "c30"], registry=registry):
        out = generate(model)
        found = read(registry)
    result = run.result(out)
    scored, n_fired = (
        int(result.coverage.seen.sum()),
        np.bincount(result.scores.probes[result.scores.fired_mask], minlength=pack.n_probes),
    )
    assert (
        sum(
            value
            for (name, labels), value in found.items()
            if name == "probemon_tokens_total" and ("unseen", "") in labels
        )
        == scored
        > 0
    )
    for name in ("active", "dropped", "not_reached", "evaluated"):
        assert found["probemon_probes_total", (("what", name),)] == getattr(result.coverage, name).sum()
    assert found["probemon_probes_total", (("what", "fired"),)] == n_fired.sum() > 0
    for concept in ("c1", "c30"):
        assert found["probemon_fired_total", (("concept", concept),)] == n_fired[pack.find(concept)]
    assert found["probemon_audit_total", (("sum", "tokens"),)] == result.audit.n_tokens > 0
    recall = result.audit.firing_recall
    assert found["probemon_audit_recall", (("bound", "low"), ("of", "firing"))] == recall.low
    assert found["probemon_hook_seconds", (("percentile", "95"),)] == np.percentile(run.forward_seconds, 95)
    assert found["probemon_arena_slots", (("what", "slots"),)] == pack.n_probes


def test_metrics_of_routing_are_those_of_the_report():
    model, registry = make_moe(), CollectorRegistry()
    with RoutingMonitor(model, rules=(Rule("flips", "flip_rate", raise_at=0.01, clear_at=0.0, window=8),)) as monitor:
        with RoutingMetrics(monitor, registry=registry):
            generate(model)
            found = read(registry)
        assert generate_latest(registry) == b""
    report = monitor.report()
    assert found["probemon_routing_tokens_total", (("seen", "yes"),)] == report["n_tokens"] > 0
    for stream in report["streams"]:
        router = {name: str(stream[name]) for name in ("site", "layer", "level")}
        of = {name: value for name, value in stream.items() if name in METRICS}
        assert len(of) > 8
        for metric, value in of.items():
            assert found["probemon_routing", tuple(sorted({**router, "metric": metric}.items()))] == value
    assert found["probemon_routing_alerts", (("kind", "flips"),)] == len(report["alerts"])
    assert found["probemon_routing_alerts_raised_total", ()] == report["n_alerts"]
    percentile = found["probemon_routing_capture_seconds", (("percentile", "95"),)]
    assert percentile == pytest.approx(report["latency_us"]["p95"] / 1e6)
    with pytest.raises(ConfigError, match="give a RoutingMonitor"):
        RoutingMetrics(model)


def test_why_tokens_were_not_seen_is_told(model, pack):
    registry = CollectorRegistry()

    def spoil(module, args, output):
        hidden = output.clone()
        hidden[0, -1] = float("nan")
        return hidden

    handle = model.model.layers[1].register_forward_hook(spoil)
    try:
        with DynamicProbeManager(pack).attach(model) as run, RunMetrics(run, registry=registry):
            out = generate(model)
            found = read(registry)
    finally:
        handle.remove()
    reasons = [
        reason
        for reason, seen in zip(run.result(out).coverage.unseen, run.result(out).coverage.seen, strict=True)
        if not seen
    ]
    told = {
        labels: value
        for (name, labels), value in found.items()
        if name == "probemon_tokens_total" and ("unseen", "") not in labels
    }
    assert sum(told.values()) == sum("finite" in reason for reason in reasons) > 0


def test_one_registry_holds_one_run_and_is_given_back(model, pack):
    registry = CollectorRegistry(auto_describe=True)
    with DynamicProbeManager(pack).attach(model) as run:
        with (
            RunMetrics(run, registry=registry),
            pytest.raises(ConfigError, match="another run"),
            RunMetrics(run, registry=registry),
        ):
            pass
        with RunMetrics(run, registry=registry):
            assert b"probemon_info" in generate_latest(registry)
    assert generate_latest(registry) == b""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_a_prometheus_server_reads_them(model, pack, tmp_path):
    registry, host = CollectorRegistry(), make_moe()
    with (
        DynamicProbeManager(pack, audit_rate=1.0).attach(model) as run,
        RoutingMonitor(host) as routing,
        RunMetrics(run, concepts=["c1"], registry=registry),
        RoutingMetrics(routing, registry=registry),
    ):
        out = generate(model)
        generate(host)
        server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
        try:
            with prometheus(tmp_path, server.server_port) as ask:
                tokens = ask('sum(probemon_tokens_total{unseen=""})')
                fired = ask('probemon_fired_total{concept="c1"}')
                recall = ask('probemon_audit_recall{of="firing",bound="value"}')
                entropy = ask('sum(probemon_routing{metric="decision_entropy"})')
                names = ask.api("label/__name__/values")
        finally:
            server.shutdown()
            server.server_close()
            thread.join()
        exposition = generate_latest(registry)
    result = run.result(out)
    assert tokens == result.coverage.seen.sum() and recall == pytest.approx(result.audit.firing_recall.value, abs=1e-12)
    assert fired == ((result.scores.probes == pack.find("c1")) & result.scores.fired_mask).sum()
    assert entropy == pytest.approx(sum(stream["decision_entropy"] for stream in routing.report()["streams"]))
    assert {"probemon_info", "probemon_arena_total", "probemon_hook_seconds"} <= set(names)
    checked = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True)
    assert checked.returncode == 0 and not checked.stderr, checked.stderr.decode()


class prometheus:
    """A server that scrapes one port each second; `ask(query)` waits for a number."""

    def __init__(self, folder, port):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        config = {
            "scrape_configs": [
                {
                    "job_name": "probemon",
                    "scrape_interval": "1s",
                    "static_configs": [{"targets": [f"127.0.0.1:{port}"]}],
                }
            ]
        }
        (folder / "prometheus.json").write_text(json.dumps(config))
        self.log = (folder / "log").open("w")
        self.command = [
            "prometheus",
            f"--config.file={folder / 'prometheus.json'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.port}",
        ]

    def __enter__(self):
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log)
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait(timeout=30)
        self.log.close()

    def __call__(self, query):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                found = self.api(f"query?{urllib.parse.urlencode({'query': query})}")["result"]
            except (urllib.error.URLError, ConnectionError):  # not up yet
                found = []
            if found:
                return float(found[0]["value"][1])
            time.sleep(0.2)
        raise AssertionError(f"no answer to {query}")

    def api(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]


def test_a_concept_named_twice_is_one_series(model, pack):
    registry = CollectorRegistry()
    with (
        DynamicProbeManager(pack).attach(model) as run,
        RunMetrics(run, concepts=["c1", "c1*", "concept 1"], registry=registry),
    ):
        lines = [
            line
            for line in generate_latest(registry).decode().splitlines()
            if line.startswith('probemon_fired_total{concept="c1"}')
        ]
    assert len(lines) == 1
