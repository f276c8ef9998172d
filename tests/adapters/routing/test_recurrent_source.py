"""Recurrent layers monitored together with routers and probes report what a monitor alone reports."""

import pytest
import torch
from prometheus_client import CollectorRegistry

from conftest import PAD, make_model, n_hooks
from monitor.test_state_probes import pack_for
from probemon import DynamicProbeManager
from probemon.adapters.routing import RoutingMonitor, RoutingSettings
from probemon.adapters.routing.recorder import Routing
from probemon.errors import ConfigError, UnsupportedModel
from probemon.monitor.sinks import CallbackSink
from probemon.ops.telemetry.metrics import ProcessMetrics
from recurrent_hosts import BATCH, GREEDY, make_host

MASK = (BATCH != PAD).long()
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1}


@pytest.mark.parametrize("beams", [1, 3])
def test_a_run_with_probes_has_the_report_of_a_monitor_alone(tmp_path, beams):
    host = make_host("mamba2")
    manager = DynamicProbeManager(pack_for(tmp_path, host, "ssm_state.1"))
    options = {**GREEDY, "attention_mask": MASK, "num_beams": beams}
    with RoutingMonitor(host, states=True) as monitor:
        bare = host.generate(BATCH, **options)
    with manager.attach(host, followers=[Routing(RoutingSettings(states=True))]) as run:
        out = host.generate(BATCH, **options)
    assert torch.equal(out, bare) and n_hooks(host) == 0
    report = run.follower(Routing).report()
    alone = monitor.report()
    assert report["states"] == alone["states"] and report["n_tokens"] == alone["n_tokens"] > 0
    assert run.result(out).coverage.totals()["unseen"] == 3  # the last token of each row
    assert report["streams"] == report["alerts"] == [] and set(report["unjudged"]) == {
        "short", "full", "at limit", "grows"
    }  # fmt: skip


def test_model_with_experts_and_recurrent_layers_reports_both():
    host = make_host("jamba", num_hidden_layers=2, **MOE)
    with RoutingMonitor(host) as monitor:
        host.generate(BATCH, attention_mask=MASK, **GREEDY)
    report = monitor.report()
    assert [stream["site"] for stream in report["streams"]] == ["router.1"] and report["n_tokens"] == 30
    assert report["states"] == monitor.recurrent.report() and list(report["states"]) == ["ssm.0"]
    assert {"collapse", "short"} <= set(report["unjudged"]) and {"collapse", "short"} <= set(monitor.kinds)


def test_state_alerts_are_reported_and_scraped_like_router_alerts():
    host = make_host("mamba2")
    ids = torch.randint(1, 60, (1, 600), generator=torch.Generator().manual_seed(0))
    told, registry = [], CollectorRegistry()
    metrics = ProcessMetrics(registry=registry)
    with RoutingMonitor(host) as monitor, metrics.showing(monitor), torch.no_grad():
        monitor.on_alert(told.append)
        kept = [layer.mixer.A_log.clone() for layer in host.backbone.layers]
        for layer in host.backbone.layers:
            layer.mixer.A_log.fill_(12.0)
        host(ids)
        assert told == []  # decays are those that the host had when its watching began
        for layer, weight in zip(host.backbone.layers, kept, strict=True):
            layer.mixer.A_log.copy_(weight)
    with torch.no_grad():
        for layer in host.backbone.layers:
            layer.mixer.A_log.fill_(12.0)  # forgets at once
    with RoutingMonitor(host) as monitor, metrics.showing(monitor), torch.no_grad():
        monitor.on_alert(told.append)
        host(ids)
        scraped = {
            name: registry.get_sample_value(name, labels)
            for name, labels in (
                ("probemon_routing_alerts", {"kind": "short"}),
                ("probemon_recurrent", {"site": "ssm.1", "metric": "n_tokens"}),
                ("probemon_routing_alerts_raised_total", {}),
            )
        }
    assert [(alert.raised, alert.kind, str(alert.stream)) for alert in told] == [
        (True, "short", "ssm.0"), (True, "short", "ssm.1")
    ]  # fmt: skip
    assert list(scraped.values()) == [2, 600, 2] and monitor.report()["alerts"] == list(map(str, told))
    assert monitor.report()["unjudged"] == {}


def test_sinks_need_decisions_and_monitoring_needs_routers_or_states():
    with RoutingMonitor(make_host("mamba")) as monitor, pytest.raises(ConfigError, match="no decisions to write"):
        monitor.add_sink(CallbackSink(print))
    with pytest.raises(UnsupportedModel, match="no X-LoRA and no recurrent layer"):
        RoutingMonitor(make_model())
    with pytest.raises(ConfigError, match="states is 1"):
        RoutingSettings(states=1)
