"""Recipes for extensions work as written, and the files and names in them exist."""

import hashlib
import inspect
import json
import re
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import PAD, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.core import aggregate, inputs, probes
from probemon.core.aggregate import AGGREGATORS, AggregatorForm, over, parse
from probemon.engine.kernels import IMPLS, numba_inputs
from probemon.lab.training.running_scores import highest_running
from probemon.monitor.followers import Follower
from probemon.ops.deployment import deployment

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "probemon"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
TABLE = ARCHITECTURE.split("## Extension points")[1].split("## Inputs of a score")[0]
ADDED = {
    **dict(
        re.findall(r"^- \*\*(.+?)\*\*(.+?)(?=^- \*\*|\Z)", CONTRIBUTING.split("## How to add")[1], flags=re.M | re.S)
    ),
    **{row.split("|")[1].strip(): row for row in TABLE.splitlines() if row.startswith("| ") and "a new" not in row},
}
PLAIN = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD, "eos_token_id": None}
PROMPT = torch.tensor([[1, 5, 9, 13]])


def named_by(recipe):
    """The files of the package that a recipe names."""
    return {path for path in re.findall(r"`([\w/]+\.\w+(?:\.json)?)`", ADDED[recipe]) if (PACKAGE / path).is_file()}


def files_with(pattern):
    """The files of the package in which something is written."""
    files = [file for kind in ("*.py", "*.json", "*.js") for file in PACKAGE.rglob(kind)]
    return {f.relative_to(PACKAGE).as_posix() for f in files if re.search(pattern, f.read_text(encoding="utf-8"))}


def edit(monkeypatch, function, *changes):
    """Edit the source of a function, each piece of which stands there once: whoever calls it runs what is new."""
    source = textwrap.dedent(inspect.getsource(function))
    for before, after in changes:
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    made = {}
    exec(compile("from __future__ import annotations\n" + source, __file__, "exec"), function.__globals__, made)
    monkeypatch.setattr(function, "__code__", made[function.__name__].__code__)


# -- a sink


@pytest.fixture
def calls():
    return []


@pytest.fixture
def our_sink(calls):
    """A class with the methods that the recipe names, each of which notes what it is given."""
    signatures = re.findall(r"`(\w+)\((\w*)\)`", ADDED["A sink"])
    assert {name: bool(argument) for name, argument in signatures} == {"open": True, "write": True, "close": False}
    methods = {name: (lambda self, *given, name=name: calls.append((name, given))) for name, _ in signatures}
    return type("OurSink", (), methods)


def check_calls(calls, ids):
    """Every token but the last one, which never ran, was written between the two ends."""
    assert [calls[0][0], calls[-1][0]] == ["open", "close"] and {name for name, _ in calls} == {
        "open",
        "write",
        "close",
    }
    assert all(len(given) == (name != "close") for name, given in calls)
    assert sum(len(given[0]) for name, given in calls if name == "write") == ids.shape[1] - 1


@pytest.mark.parametrize("late", [False, True])
def test_a_sink_written_as_the_recipe_says_receives_every_token(pack, our_sink, calls, late):
    model, sink = make_model(), our_sink()
    with DynamicProbeManager(pack).attach(model, followers=[] if late else [sink]) as run:
        if late:
            run.follow(sink)
        ids = model.generate(PROMPT, **PLAIN)
    check_calls(calls, ids)


def test_sink_can_be_requested_in_a_deployment_file(tmp_path, monkeypatch, our_sink, calls):
    model = make_model()
    make_pack(tmp_path / "pack", model)
    manifest = tmp_path / "pack/manifest.json"
    # `ops/deployment/deployment.py` makes it, and `ops/deployment/deployment.schema.json` lets a file say so.
    assert {"_sink", "ops/deployment/deployment.schema.json"} < set(re.findall(r"`([\w./]+)`", ADDED["sink"]))
    monkeypatch.setattr(deployment, "OurSink", our_sink, raising=False)
    edit(
        monkeypatch,
        deployment.Deployment._sink,
        (
            '    if sink["kind"] == "jsonl":',
            '    if sink["kind"] == "ours":\n        return OurSink()\n    if sink["kind"] == "jsonl":',
        ),
    )
    schema = deployment.SCHEMA.read_text(encoding="utf-8")
    assert schema.count('["jsonl", "parquet"]') == 1
    (tmp_path / "schema.json").write_text(schema.replace('["jsonl", "parquet"]', '["jsonl", "parquet", "ours"]'))
    monkeypatch.setattr(deployment, "SCHEMA", tmp_path / "schema.json")
    file = {
        "deployment": 1,
        "packs": [{"pack": "pack", "manifest_sha256": hashlib.sha256(manifest.read_bytes()).hexdigest()}],
        "rules": [],
        "sinks": [{"kind": "ours", "path": "scores"}],
    }
    (tmp_path / "watch.json").write_text(json.dumps(file))
    kept = [one for one in vars(deployment).values() if hasattr(one, "cache_clear")]
    try:
        for one in kept:
            one.cache_clear()
        with DynamicProbeManager.from_deployment(tmp_path / "watch.json").attach(model):
            ids = model.generate(PROMPT, **PLAIN)
    finally:
        for one in kept:
            one.cache_clear()
    check_calls(calls, ids)


def test_sink_recipe_names_every_place_that_makes_sinks():
    doors = files_with(r"\b(JsonLinesSink|ParquetSink)\(") - {"monitor/delivery.py", "monitor/followers.py"}  # examples
    assert {"cli/watch/rules.py", "ops/deployment/deployment.py"} <= doors <= named_by("sink")
    assert "`probemon/__init__.py`" in ADDED["sink"]


# -- a norm of inputs


def squares(name):
    """How the sum of a row's squares is written in the place of their mean."""
    return f'x.square().sum({name}) if spec.norm == "l2" else x.square().mean({name})'


@pytest.fixture
def l2(monkeypatch):
    """Divides by the root of the sum of squares: each file that the recipe names is edited; returns their names."""
    known, more = '"rmsnorm")', '"rmsnorm", "l2")'
    old, edited = probes.NORMS, {"core/probes.py", "core/inputs.py", "engine/kernels/numba_inputs.py"}
    for name, module in list(sys.modules.items()):  # one line of `core/probes.py`, which they import
        if name.startswith("probemon.") and vars(module).get("NORMS") is old:
            monkeypatch.setattr(module, "NORMS", (*old, "l2"))
    edit(
        monkeypatch,
        inputs.prepare_input,
        (known, more),
        ("x.square().mean(dim=-1, keepdim=True)", squares("dim=-1, keepdim=True")),
    )
    edit(
        monkeypatch,
        numba_inputs._squared,
        (known, more),
        ("x.square().mean(dim=-1).numpy()", f"({squares('dim=-1')}).numpy()"),
    )
    return edited


class States(Follower):
    """Keeps hidden states and their scores."""

    def __init__(self):
        self.hidden, self.scores = [], []

    def states(self, batch, hidden):
        self.hidden.append(hidden["resid_post.1"].clone())

    def scored(self, batch, scores):
        self.scores.append(scores)


@pytest.mark.parametrize("impl", [impl for impl in IMPLS if impl != "triton"])
def test_norm_written_by_the_recipe_is_computed_for_every_token(tmp_path, l2, impl):
    model, heard = make_model(), States()
    pack = make_pack(tmp_path / "l2", model, inputs=[{"site": "resid_post.1", "norm": "l2"}])
    plain = make_pack(tmp_path / "none", model, inputs=[{"site": "resid_post.1", "norm": "none"}])
    with DynamicProbeManager(pack, impl=impl).attach(model, followers=[heard]) as run:
        out = model.generate(PROMPT, **PLAIN)
    assert list(run.result(out).coverage.unseen).count("") == out.shape[1] - 1
    hidden = torch.cat(heard.hidden).double()
    by_hand = (hidden / (hidden.square().sum(-1, keepdim=True) + 1e-6).sqrt()).float()
    expected = DynamicProbeManager(plain, impl="reference").score_all(by_hand)
    found = DynamicProbeManager(pack, impl=impl).score_all(torch.cat(heard.hidden))
    assert torch.allclose(found, expected, atol=1e-5) and len(expected) == out.shape[1] - 1
    for t, scores in enumerate(one for many in heard.scores for one in each_of(many)):
        probes_of, values = scores
        assert np.allclose(values, expected[t, probes_of].numpy(), atol=1e-5) and len(values)


def each_of(scores):
    """Of each state the active probes, and their scores."""
    return [
        (scores.probes[begin:end], scores.values[begin:end])
        for begin, end in zip(scores.ptr[:-1], scores.ptr[1:], strict=True)
    ]


def test_norm_recipe_is_complete_only_with_triton(l2, monkeypatch):
    """No row is enough to see that it takes the norm; rows would need a GPU."""
    triton_pairs = pytest.importorskip("probemon.engine.kernels.triton_pairs")
    edit(monkeypatch, triton_pairs.normalise_triton, ('"rmsnorm")', '"rmsnorm", "l2")'))
    assert triton_pairs.normalise_triton(torch.empty(0, 3), "l2", 1e-6, torch.float32).shape == (0, 3)
    assert l2 | {"engine/kernels/triton_pairs.py"} == named_by("A norm of inputs") < named_by("norm of inputs")


@pytest.mark.parametrize("recipe", ["A norm of inputs", "norm of inputs"])
def test_norm_recipe_names_every_file_that_computes_norms(recipe):
    computes = files_with(" check_norm\\(")
    assert "engine/kernels/numba_inputs.py" in computes and computes < named_by(recipe)


# -- an aggregator


class Least(aggregate._Stepped):
    """Minimum since the start. State: that minimum [K]."""

    def _step(self, state, x):
        least = np.minimum(state[0], x) if state else x
        return (least,), least

    def __str__(self):
        return "least"


@pytest.fixture
def least(monkeypatch):
    """An aggregator that follows the recipe: the fold, and its line in the table."""
    monkeypatch.setitem(AGGREGATORS, "least", AggregatorForm(Least))


@pytest.mark.parametrize("written", ["least", Least()])
def test_aggregator_written_by_the_recipe_works_in_rules_and_results(pack, least, written):
    model, events = make_model(), []
    with DynamicProbeManager(pack).attach(model) as run:
        run.on("c1", above=0.0, aggregate=written, action=events.append)
        out = model.generate(PROMPT, **PLAIN)
    result = run.result(out)
    running, single = result.aggregate("c1", written).values, result.aggregate("c1", "none").values
    assert running.tolist() == np.minimum.accumulate(single).tolist() and len(running) == 3
    assert [event.column for event in events] == [4] and single.min() > 0  # met once: it was never at 0 again


def test_aggregator_written_by_the_recipe_works_in_training(least):
    scores, length = torch.rand(13, 2, dtype=torch.float64), torch.tensor([7, 1, 5])
    part = torch.repeat_interleave(torch.arange(3), length)
    highest = highest_running(parse("least"), scores, part, 3)
    assert highest.tolist() == [over(Least(), rows.numpy()).max(0).tolist() for rows in scores.split(length.tolist())]


def test_aggregator_recipe_names_every_file_that_lists_them():
    lists = files_with(r"rolling_max|RollingMax")
    assert lists - {"__init__.py"} == named_by("aggregator") - {"probemon/__init__.py"}
    assert "`probemon/__init__.py`" in ADDED["aggregator"]


# -- all of them


@pytest.mark.parametrize("recipe", ADDED)
def test_files_and_names_of_a_recipe_exist(recipe):
    code = [part for part in re.findall(r"`([^`]+)`", ADDED[recipe]) if re.fullmatch(r"[\w./-]+", part)]
    paths = [part for part in code if "/" in part or "." in part]
    files = []
    for path in paths:
        near = [folder / path for folder in (ROOT, PACKAGE, PACKAGE / "lab/importers", ROOT / "tests")]
        found = [one for one in near if one.exists()]
        assert found or "NEW" in path, path
        files += [file for one in found for file in ([one] if one.is_file() else one.rglob("*.py"))]
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    assert not [name for name in code if name not in paths and not re.search(rf"\b{name}\b", text)]
