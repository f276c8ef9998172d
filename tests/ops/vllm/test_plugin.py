"""vLLM's doors: an engine's arguments are set by a variable, and what would go unwatched or unguarded is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from test_engine_watch import SITES

import grouped_packs
from probemon.errors import ConfigError, DeploymentError, UnsupportedModel
from probemon.ops.vllm import installed, plugin
from probemon.ops.vllm.messages import CONFIG_KEY, WORKER
from probemon.ops.vllm.refusals import TESTED
from probemon.ops.vllm.routes import SERVED, Routes
from probemon.util.files import sha256


@pytest.fixture
def file(tmp_path, monkeypatch):
    grouped_packs.write(tmp_path / "pack", (), torch.bfloat16, sites=SITES)
    manifest = sha256(tmp_path / "pack" / "manifest.json")
    file = tmp_path / "watch.yaml"
    file.write_text(
        f"deployment: 1\npacks: [{{pack: pack, manifest_sha256: {manifest}}}]\n"
        "rules: [{concepts: [c0], above: 0.1, action: stop, on_blind: pass}]\n"
    )
    monkeypatch.setenv(plugin.DEPLOYMENT, str(file))
    monkeypatch.setattr(installed, "version", lambda package: TESTED[0])
    yield file
    for client in plugin._clients:
        client.close()
    plugin._clients.clear()
    SERVED.clear()


def engine(**given):
    fields = {"worker_cls": "auto", "additional_config": None, "logits_processors": None, "_api_process_count": 1}
    return SimpleNamespace(**{**fields, **given})


def test_engine_gets_the_worker_the_settings_and_the_stops(file):
    one = engine(additional_config={"mine": 1}, logits_processors=["theirs"])
    plugin._watch(one)
    client = plugin.client()
    assert one.worker_cls == WORKER and one.additional_config["mine"] == 1
    assert one.additional_config[CONFIG_KEY] == client.settings.as_config() and client.settings.stop
    assert one.logits_processors[0] == "theirs" and one.logits_processors[1].endswith(":StopRows")
    before = dict(vars(one))
    plugin._watch(one)  # by its own client already
    assert vars(one) == before


def test_variables_say_what_stops_do_and_what_is_kept(file, monkeypatch):
    monkeypatch.setenv(plugin.STOPS, "told")
    monkeypatch.setenv(plugin.CANARY, "layers")
    monkeypatch.setenv(plugin.KEEP_REQUESTS, "7")
    settings = plugin.client().settings
    assert (settings.stop, settings.canary, plugin.client()._keep_requests) == (False, "layers", 7)


@pytest.mark.parametrize(
    ("given", "says"),
    [({"_api_process_count": 2}, "--api-server-count 1"), ({"worker_cls": "theirs.Worker"}, "leave it out")],
)
def test_engine_that_cannot_be_watched_is_an_error_and_never_unwatched(file, given, says):
    with pytest.raises(ConfigError, match=says):
        plugin._watch(engine(**given))


def test_aborts_need_the_routes(file, monkeypatch):
    monkeypatch.setenv(plugin.STOPS, "abort")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with pytest.raises(ConfigError, match="answers are aborted by the routes: set VLLM_PLUGINS=probemon"):
        plugin.client()
    monkeypatch.setenv("VLLM_PLUGINS", "other,probemon")
    assert plugin.client().stops == "abort"


def test_settings_without_the_worker_are_completed_and_another_front_end_is_refused(file, monkeypatch):
    one = engine(additional_config={CONFIG_KEY: {}})
    plugin._watch(one)
    assert one.worker_cls == WORKER and one.additional_config[CONFIG_KEY] == plugin.client().settings.as_config()
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    with pytest.raises(ConfigError, match="VLLM_USE_RUST_FRONTEND"):
        plugin._watch(engine())


def test_wrong_variables_end_the_start(file, monkeypatch):
    monkeypatch.setenv(plugin.KEEP_REQUESTS, "many")
    with pytest.raises(ConfigError, match="PROBEMON_KEEP_REQUESTS is 'many'"):
        plugin.client()
    monkeypatch.setenv(plugin.KEEP_REQUESTS, "5")
    monkeypatch.setenv(plugin.DEPLOYMENT, str(file.with_name("missing.yaml")))
    with pytest.raises(DeploymentError, match=r"missing\.yaml"):
        plugin.client()
    monkeypatch.setattr(installed, "version", lambda package: "0.99.0")
    with pytest.raises(UnsupportedModel, match=r"0\.99\.0 is not tested"):
        plugin.client()


def application(**given):
    args = {"api_key": None, "host": None, "tokenizer": None, "model": "m", "served_model_name": None, **given}
    added = []
    return SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(**args)), add_middleware=added.append), added


def test_routes_are_added_with_the_servers_keys(file, monkeypatch):
    plugin.client().tokenizer = object()
    app, added = application(host="0.0.0.0", api_key=["a", "b"], served_model_name=["mine", "other"])
    plugin.Endpoints().attach_router(app)
    [served] = SERVED
    assert added == [Routes] and (served.token, served.name, served.client) == (["a", "b"], "mine", plugin.client())
    plugin.Endpoints().attach_router(app)  # the command has them already
    assert added == [Routes]


def test_routes_without_a_key_are_for_this_machine_alone(file, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    plugin.client().tokenizer = object()
    for host in (None, "0.0.0.0", "192.168.0.7"):
        app, added = application(host=host)
        with pytest.raises(ConfigError, match="give --api-key, or --host"):
            plugin.Endpoints().attach_router(app)
        assert not added and not SERVED
    app, added = application(host="127.0.0.1")
    plugin.Endpoints().attach_router(app)
    assert added == [Routes]


def test_nothing_happens_without_the_variable(monkeypatch):
    monkeypatch.delenv(plugin.DEPLOYMENT, raising=False)
    plugin.watch_engines()
    app, added = application()
    plugin.Endpoints().attach_router(app)
    assert not added and not plugin._clients
