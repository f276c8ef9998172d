"""One exporter per port shows the metrics that deployment files ask for, for all managers made from them."""

import copy
import hashlib
import json
import pickle
import socket
import urllib.request

import pytest
import torch

from conftest import make_pack
from corpora import make_tokenizer
from probemon import DynamicProbeManager
from probemon.errors import ConfigError, DeploymentError

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
GREEDY = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics")
    make_pack(folder / "pack", model)
    return folder


def written(folder, **metrics):
    sha256 = hashlib.sha256((folder / "pack/manifest.json").read_bytes()).hexdigest()
    path = folder / "watch.json"
    packs = [{"pack": "pack", "manifest_sha256": sha256}]
    path.write_text(json.dumps({"deployment": 1, "packs": packs, "metrics": metrics}, indent=1))
    return path


def shown(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


def test_runs_of_a_deployment_are_counted_at_its_port(model, folder):
    port = free_port()
    path = written(folder, concepts=["c1", "c3*"], port=port)
    manager, again = (DynamicProbeManager.from_deployment(path) for _ in range(2))
    shared = [one.deployment.exporter(one.pack) for one in (manager, again)]
    assert shared[0] is shared[1] and shown(port)["probemon_runs"] == 0
    with manager.attach(model) as run:
        out = model.generate(PROMPT, **GREEDY)
    n = int(run.result(out).coverage.seen.sum())
    assert shown(port)['probemon_tokens_total{phase="prompt",unseen=""}'] == 5
    with again.attach(model) as run:
        out_again = model.generate(PROMPT, **GREEDY)
    found = shown(port)
    assert sum(value for name, value in found.items() if name.startswith("probemon_tokens_total{")) == 2 * n == 16
    scores = run.result(out_again).scores
    fired = int((scores.fired_mask & (scores.probes == manager.pack.find("c1"))).sum())
    assert found['probemon_fired_total{concept="c1"}'] == 2 * fired
    assert f'deployment="{manager.deployment.sha256}"' in next(one for one in found if one.startswith("probemon_info"))
    with pytest.raises(ConfigError, match=rf"port {port} name c1, c3, .* already"):
        DynamicProbeManager.from_deployment(written(folder, concepts=["c2"], port=port))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))])
def test_copied_manager_counts_at_the_same_port(model, folder, copied):
    port = free_port()
    manager = DynamicProbeManager.from_deployment(written(folder, port=port))
    for n, one in enumerate((manager, copied(manager)), 1):
        with one.attach(model):
            model.generate(PROMPT, **GREEDY)
        assert shown(port)['probemon_tokens_total{phase="prompt",unseen=""}'] == 5 * n
    list(copied(manager).stream(model, make_tokenizer(), "the cat sat", **GREEDY))
    assert shown(port)['probemon_tokens_total{phase="prompt",unseen=""}'] > 10


def test_concept_counted_by_name_cannot_be_excluded_during_a_run(model, folder):
    path, port = folder / "watch.json", free_port()
    manager = DynamicProbeManager.from_deployment(written(folder, concepts=["c7"], port=port))
    with manager.attach(model) as run:
        content = json.loads(path.read_text())
        path.write_text(json.dumps({**content, "exclude": ["c7"]}))
        with pytest.raises(DeploymentError, match=r"metrics\.concepts: 'concept 7' is left out"):
            run.update(path)
        with pytest.raises(ConfigError, match=r"exclude leaves out 'c7', which metrics of watch\.json count"):
            run.update(exclude=["c7"])
        assert len(run.watches) == 1
        run.update(exclude=["c9"])


def test_updated_deployment_is_the_one_shown_in_metrics(model, folder):
    port = free_port()
    manager = DynamicProbeManager.from_deployment(written(folder, port=port))
    with manager.attach(model) as run:
        before = run.deployment.sha256
        content = json.loads((folder / "watch.json").read_text())
        (folder / "watch.json").write_text(json.dumps({**content, "exclude": ["c7"]}))
        run.update(folder / "watch.json")
        model.generate(PROMPT, **GREEDY)
        told = {name: value for name, value in shown(port).items() if name.startswith("probemon_info")}
    assert run.deployment.sha256 != before and len(told) == 2
    for sha256, value in ((before, 0), (run.deployment.sha256, 1)):
        assert [n for name, n in told.items() if f'deployment="{sha256}"' in name] == [value]


def test_streams_are_counted_and_call_prepare(model, folder):
    port, prepared = free_port(), []
    manager = DynamicProbeManager.from_deployment(written(folder, port=port))
    options = {**GREEDY, "include_prompt": True, "prepare": prepared.append}
    events = list(manager.stream(model, make_tokenizer(), "the cat sat", **options))
    found = shown(port)
    n_seen = sum(not event.unseen for event in events)
    assert sum(value for name, value in found.items() if name.startswith("probemon_tokens_total{")) == n_seen > 4
    assert len(prepared) == 1 and found["probemon_runs"] == 0


def test_invalid_metrics_settings_name_their_line_or_port(folder):
    for metrics, said in (
        ({"concepts": ["nothing like it"]}, r"line \d+: metrics.concepts: .*nothing like it"),
        ({"address": "127.0.0.1"}, r"line \d+: metrics: 'port' is a dependency of 'address'"),
        ({"port": 0}, r"line \d+: metrics.port: 0 is less than the minimum of 1"),
        ({"porth": 9464}, r"the key 'porth' is unknown, did you mean 'port'"),
    ):
        with pytest.raises(DeploymentError, match=said):
            DynamicProbeManager.from_deployment(written(folder, **metrics))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot show metrics at 127.0.0.1 port {port}: .*; give another port"):
            DynamicProbeManager.from_deployment(written(folder, port=port))
