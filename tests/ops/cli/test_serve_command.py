"""The command serve: what it refuses before it loads a model, and the demo served to the official client."""

import hashlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import openai
import pytest
import torch

from probemon import DynamicProbeManager, ProbePack
from probemon.bundled import load_bundled
from probemon.cli import app as cli
from probemon.monitor.stream import encode
from probemon.monitor.summary import summarise
from probemon.ops.cli import serve as command
from probemon.ops.deployment.deployment import Deployment

KEY = "the-same-at-every-start"
MESSAGES = [{"role": "user", "content": "Tell me about whales."}]


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--host", "0.0.0.0"], "--allow-remote"),
        (["--host", "0.0.0.0", "--allow-remote", "--no-token"], "--no-token"),
        (["--api-key", "a-key-of-16-or-more", "--no-token"], "are given: give one of the two"),
        (["--api-key", "short"], "the API key has 5 characters"),
        (["--host", "192.0.2.1", "--no-token"], "--no-token"),
        (["--host", "example.org"], "give an address"),
        (["--allow-host", "http://a"], "without scheme"),
        (["--port", "70000"], "port"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--queue", "0"], "queue"),
        (["--at-once", "0"], "at_once"),
        (["--threads", "-1"], "--threads"),
        (["--alert-set", "none"], "none"),
        (["--deployment", "examples/watch.yaml", "--alert-set", "none"], "--alert-set belongs in the deployment file"),
        (["--deployment", "pyproject.toml"], "pyproject.toml"),
    ],
)
def test_arguments_are_checked_before_the_model_is_loaded(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(command, "load_aloud", None)
    monkeypatch.setattr(sys, "argv", ["probemon", "serve", "demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error and error.count("\n") == 1


def test_taken_port_is_reported_before_the_model_is_loaded(monkeypatch, capsys):
    monkeypatch.setattr(command, "load_aloud", None)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        monkeypatch.setattr(sys, "argv", ["probemon", "serve", "demo", "--port", port])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    assert ended.value.code == 2 and f"port {port}" in capsys.readouterr().err


def written(path, rules):
    """A deployment of the demo's pack with these rules."""
    pack = Path("probes/wordnet-smollm2-135m").resolve()
    sha256 = hashlib.sha256((pack / "manifest.json").read_bytes()).hexdigest()
    packs = [{"pack": str(pack), "manifest_sha256": sha256}]
    path.write_text(json.dumps({"deployment": 1, "packs": packs, "rules": rules}))
    return path


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """`probemon serve demo` in a process of its own: its address, its token, the process, its deployment file."""
    path = written(tmp_path_factory.mktemp("served") / "watch.json", [])
    arguments = ["--deployment", str(path), "--port", "0", "--threads", "1"]
    arguments += ["--log-level", "info", "--log-format", "json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "probemon.cli", "serve", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PROBEMON_API_KEY": KEY},
    )
    try:
        line = process.stdout.readline()
        said = re.fullmatch(r"probemon serving at (http://127\.0\.0\.1:\d+/) with your API key\n", line)
        assert said, (line, process.poll())  # and not the key
        yield said[1], KEY, process, path
    finally:
        process.kill()
        process.communicate()


def test_served_demo_answer_has_the_concepts_of_a_watched_run(demo):
    model, tokenizer = load_bundled()
    inputs = encode(tokenizer, MESSAGES)
    torch.set_num_threads(1)
    with DynamicProbeManager(ProbePack.open("probes/wordnet-smollm2-135m")).attach(model, tokenizer) as run:
        out = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    result, n_before = run.result(out), inputs["input_ids"].shape[1]
    address, token, *_ = demo
    with openai.OpenAI(base_url=f"{address}v1", api_key=token, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=8, temperature=0, extra_body={"probemon": {"top_k": 5}}
        )
    message = answer.choices[0].message
    assert message.content == tokenizer.decode(out[0, n_before:], skip_special_tokens=True)
    tokens = message.model_extra["probemon"]["tokens"]
    assert len(tokens) == 8
    for told in tokens[:-1]:
        i = result.at(0, told["position"])
        assert told["fired"] == result.scores.fired(i).tolist()
        scores = map(str, result.scores.active_scores(i))
        expected = dict(zip(result.scores.active(i).tolist(), map(float, scores), strict=True))
        assert {p: score for p, score, _ in told["top"]}.items() <= expected.items()
    leading = message.model_extra["probemon"]["summary"]["leading"]
    assert leading and all(concept["strength"] > 0 and 0 < concept["precision"] <= 1 for concept in leading)
    expected = summarise(result).answer.concepts[:10]
    assert [(concept["concept"], concept["threshold"]) for concept in leading] == [
        (concept.concept, pytest.approx(concept.threshold, rel=1e-6)) for concept in expected
    ]


def test_sighup_reloads_the_deployment_and_refuses_a_bad_one(demo):
    address, token, process, path = demo
    rule = {"concepts": ["whale"], "above": 0.0, "action": "record", "on_blind": "pass"}
    written(path, [{**rule, "concepts": ["no such concept"]}])
    process.send_signal(signal.SIGHUP)
    said = process.stdout.readline()
    assert "not reloaded, the previous file still applies: watch.json, line 1: rules[0]" in said
    written(path, [rule])
    process.send_signal(signal.SIGHUP)
    sha256 = Deployment.read(path).sha256
    assert process.stdout.readline() == f"probemon serve: watch.json was read again, sha256 {sha256}\n"
    with openai.OpenAI(base_url=f"{address}v1", api_key=token, max_retries=0) as client:
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, max_tokens=4, temperature=0, extra_body={"probemon": {}}
        )
    told = answer.choices[0].message.model_extra["probemon"]
    assert told["events"] and told["summary"]["deployment"] == sha256


def test_sigterm_ends_the_server_without_a_traceback(demo):
    _, _, process, _ = demo
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=30)
    assert time.monotonic() - begun < 5  # also while others compute; Python's finalisation of the model takes longer
    assert process.returncode == 128 + signal.SIGTERM and out == ""
    lines = [json.loads(line) for line in error.splitlines()]
    assert {line["level"] for line in lines} == {"info"} and not any("traceback" in line for line in lines)
    answers = [line for line in lines if line["logger"] == "probemon" and "request" in line]
    assert [line["outcome"] for line in answers] == ["answered", "answered"]
    assert all(line["request"].startswith("chatcmpl-") and line["seconds"] > 0 for line in answers)
    assert "whale" not in error and KEY not in error
