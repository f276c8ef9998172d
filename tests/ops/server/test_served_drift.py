"""A server whose deployment names a reference shows Prometheus the drift of its traffic, and of nothing else."""

import hashlib
import http.client
import json
import time

import numpy as np
import pytest
import torch

from conftest import make_pack
from oracle import states
from probemon import DynamicProbeManager
from probemon.errors import DeploymentError
from probemon.ops.deployment.deployment import Deployment
from probemon.ops.drift.drift_monitor import ALARM_KINDS, DriftMonitor
from probemon.ops.server.served import Served
from running_server import LIMITS, Running, demo_tokenizer, eventually, tiny_host


def prompts(seed, n=100):
    return torch.randint(1000, 3000, (n, 6), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """A pack whose concepts fire in one request of five, and a reference of 200 requests."""
    folder, tokenizer = tmp_path_factory.mktemp("drift"), demo_tokenizer()
    host = tiny_host(tokenizer)
    made = make_pack(folder / "first", host)
    manager = DynamicProbeManager(made, strategy="descent", impl="cpu")
    highest = [manager.score_all(states(host, made, row)).numpy().max(axis=0) for row in prompts(0, 60)]
    given = [made.find(f"c{i}") for i in range(made.n_probes)]
    alert = torch.from_numpy(np.quantile(np.stack(highest), 0.8, axis=0).astype(np.float32))[given]
    make_pack(folder / "pack", host, alert_threshold=alert)
    manager = DynamicProbeManager(folder / "pack", strategy="descent", impl="cpu")
    counting, ids = DriftMonitor(manager), torch.tensor(prompts(1, 200))
    with manager.attach(host, tokenizer, followers=[counting]):
        host.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, min_new_tokens=2, do_sample=False)
    counting.freeze(folder / "reference.json")
    return folder, host, tokenizer


def with_server(served, act):
    running = Running(served, token=None)
    try:
        return act(running)
    finally:
        running.close()


def ask(running, asked, **more):
    for at in range(0, len(asked), LIMITS.choices):
        body = {"model": "tiny", "prompt": asked[at : at + LIMITS.choices], "max_tokens": 2, "temperature": 0, **more}
        answer = running.ask("POST", "/v1/completions", body, Authorization=None)
        assert answer.status == 200, answer.content


def file_of(folder, **more):
    sha256 = hashlib.sha256((folder / "pack/manifest.json").read_bytes()).hexdigest()
    path = folder / "serve.json"
    content = {"deployment": 1, "packs": [{"pack": "pack", "manifest_sha256": sha256}], **more}
    path.write_text(json.dumps(content, indent=1))
    return path


def served_by(parts, **more):
    folder, host, tokenizer = parts
    deployment = Deployment.read(file_of(folder, drift={"reference": "reference.json"}, **more))
    manager = DynamicProbeManager(deployment.open_packs(), **deployment.settings)
    return Served("tiny", host, tokenizer, manager, LIMITS, deployment)


def alarms(running):
    text = running.ask("GET", "/metrics", Authorization=None).content.decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if line.startswith("probemon_drift_alarms{")]
    return {name.partition('"')[2].rpartition('"')[0]: float(value) for name, _, value in lines}


def told(running):
    answer = json.loads(running.ask("GET", "/readyz", Authorization=None).content)
    [check] = [check for check in answer["checks"] if check["name"] == "drift"]
    return answer["status"], check["state"]


def test_shifted_traffic_moves_the_metric_and_usual_traffic_does_not(parts):
    def act(running):
        assert alarms(running) == dict.fromkeys(ALARM_KINDS, 0.0)  # before the first request, too
        ask(running, prompts(2))
        assert alarms(running) == dict.fromkeys(ALARM_KINDS, 0.0) and told(running) == ("ready", "ok")
        ask(running, prompts(3, 1) * 100)
        assert alarms(running)["base_rate"] > 0 and told(running) == ("ready", "warning")

    served = served_by(parts)
    with_server(served, act)
    assert (served.drift.n_requests, served.drift.n_incomplete) == (200, 0)  # the canary's are not among them


def test_cancelled_and_blind_requests_are_not_compared(parts):
    def act(running):
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        body = json.dumps({"model": "tiny", "prompt": prompts(4, 1), "max_tokens": 48, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        connection.getresponse().read(1)
        connection.close()  # the client leaves
        gone = b'probemon_requests_total{outcome="cancelled"} 1.0'
        eventually(lambda: gone in running.ask("GET", "/metrics", Authorization=None).content)
        assert (drift.n_requests, drift.n_incomplete) == (0, 1)
        handle = host.model.embed_tokens.register_forward_hook(lambda *seen: torch.full_like(seen[2], torch.inf))
        try:
            ask(running, prompts(4, 1))
        finally:
            handle.remove()
        assert (drift.n_requests, drift.n_incomplete) == (0, 2)
        ask(running, prompts(4, 1))
        assert (drift.n_requests, drift.n_incomplete) == (1, 2)

    served, host = served_by(parts, rules=[]), parts[1]
    drift = served.drift
    slow = host.register_forward_pre_hook(lambda *seen: time.sleep(0.02))
    try:
        with_server(served, act)
    finally:
        slow.remove()


def test_drift_cannot_change_at_a_reload(parts):
    served = served_by(parts)
    file_of(parts[0], drift={})
    with pytest.raises(DeploymentError, match=r"serve\.json, line 9: drift: drift cannot change while it runs"):
        served.holding.reload()
    file_of(parts[0], drift={"reference": "reference.json"}, exclude=["c3"])
    served.holding.reload()
    with_server(served, lambda running: ask(running, prompts(5, 1)))
    assert (served.drift.n_requests, served.drift.n_incomplete) == (0, 1)  # c3 could not fire


def test_runs_of_a_deployment_share_one_monitor_unless_they_have_their_own(parts):
    folder, host, tokenizer = parts
    manager = DynamicProbeManager.from_deployment(file_of(folder, drift={"reference": "reference.json"}))
    shared, own = manager.deployment.drift(manager), DriftMonitor(manager)
    for n, given in enumerate(([], [own], []), 1):
        ids = torch.tensor(prompts(6, n))
        with manager.attach(host, tokenizer, followers=given) as run:
            host.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
        assert run.follower(DriftMonitor) is (own if given else shared)
    assert (shared.n_requests, own.n_requests) == (4, 2)


@pytest.mark.parametrize(
    ("reference", "line", "said"),
    [
        ({}, 9, "drift: random has no reference, so no alarm"),
        ({"reference": "none.json"}, 10, "drift.reference: .*none.json cannot be read"),
        ({"reference": "serve.json"}, 10, "drift.reference: .*serve.json is not a drift reference"),
        ({"reference": "few.json"}, 10, "drift.reference: the reference is of 3 requests"),
        ({"file": "reference.json"}, 10, "drift.file: the key 'file' is unknown"),
    ],
)
def test_unusable_reference_is_refused_with_its_line(parts, reference, line, said):
    folder = parts[0]
    few = json.loads((folder / "reference.json").read_text())
    for entry in few["concepts"].values():
        entry["fired"] = 0
        entry |= {name: 0 for name in ("low", "high", "flat") if name in entry}
        if "highest" in entry:
            entry["highest"] = [3, *[0] * (len(entry["highest"]) - 1)]
    few |= {"n_requests": 3, "norms": {site: {"0": 3} for site in few["norms"]}}
    (folder / "few.json").write_text(json.dumps(few))
    with pytest.raises(DeploymentError, match=rf"serve\.json, line {line}: {said}"):
        deployment = Deployment.read(file_of(folder, drift=reference))
        deployment.check_parts(deployment.open_packs())
