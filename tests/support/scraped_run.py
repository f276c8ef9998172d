"""A real Prometheus over tiny random hosts that generate: a server, a run with routers, an adapter, a drift monitor."""

import threading
from contextlib import ExitStack, contextmanager

import torch
from prometheus_client import CollectorRegistry

from conftest import PAD, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.adapters.routing import RoutingMonitor
from probemon.adapters.routing.recorder import Routing
from probemon.monitor.breaker import Breaker
from probemon.monitor.sinks import MemorySink
from probemon.ops.budget import Budget
from probemon.ops.drift.drift_monitor import DriftMonitor
from probemon.ops.judges.escalation import Escalate
from probemon.ops.telemetry.exposition import served
from probemon.ops.telemetry.metrics import ProcessMetrics
from prometheus_server import Prometheus
from routed_hosts import make_bem, make_moe
from running_server import Running, tiny_served

_PROMPT = torch.tensor([[1, 44, 3, 17, 8]])
_GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
_BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}


@contextmanager
def scraped_run(folder):
    """Yield the Prometheus, while the hosts go on generating."""
    for name in ("served", "moe", "prometheus"):
        (folder / name).mkdir()
    moe, bem = make_moe(), make_model(seed=1)
    pack, metrics = make_pack(folder / "moe/pack", moe), ProcessMetrics(concepts=["c1"], registry=CollectorRegistry())
    manager = DynamicProbeManager(pack, audit_rate=1.0)
    over = threading.Event()
    running = Running(tiny_served(folder / "served/pack"), token=None)
    with ExitStack() as stack:
        stack.callback(running.close)
        monitor = stack.enter_context(RoutingMonitor(bem, bem=make_bem(bem)))
        stack.enter_context(metrics.showing(monitor))
        run = stack.enter_context(
            manager.attach(
                moe,
                followers=[Routing(), DriftMonitor(manager), Budget(ms=1e6)],
                breaker=Breaker(),
            )
        )
        run.on("c1", above=0.0, action="record")
        run.on("c2", above=0.0, action=Escalate(lambda question: "pass", 5.0, meanwhile="pass", on_failure="pass"))
        run.follow(metrics)
        run.follow(MemorySink())
        port = stack.enter_context(served(metrics.registry, 0))

        def go_on():
            while not over.is_set():
                moe.generate(_PROMPT, **_GREEDY)
                bem.generate(_PROMPT, **_GREEDY)
                running.ask("POST", "/v1/chat/completions", _BODY, Authorization=None)
                over.wait(0.1)

        traffic = threading.Thread(target=go_on)
        addresses = [f"127.0.0.1:{port}", f"127.0.0.1:{running.port}"]
        with Prometheus(folder / "prometheus", {"probemon": addresses}) as prometheus:
            traffic.start()
            try:
                yield prometheus
            finally:
                over.set()
                traffic.join()
