"""A deployment file does what the same calls do in Python, and an error in it is reported with its line."""

import copy
import hashlib
import json
import pickle
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
import yaml

import grouped_packs
from conftest import make_model
from corpora import make_tokenizer
from deployed import GREEDY, PROMPT, text_of, with_pack, written
from fuzzed_deployments import at_random
from probemon import DynamicProbeManager, JsonLinesSink
from probemon.errors import ConfigError, DeploymentError, ModelMismatch, PackError, ProbemonError
from probemon.ops.budget import Budget
from probemon.ops.deployment.cost import cost_of
from probemon.ops.deployment.deployment import Deployment, schema
from probemon.ops.judges.escalation import Escalate


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_pack(tmp_path_factory.mktemp("deployed"))


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_deployment_file_does_what_the_same_calls_do(folder, kind):
    text = text_of(folder) + "sinks:\n  - {kind: jsonl, path: scores.jsonl, top_k: 3, overwrite: true}\n"
    text = text if kind == "yaml" else json.dumps(yaml.safe_load(text), indent=1)
    model = make_model()
    manager = DynamicProbeManager.from_deployment(written(folder, text, f"watch.{kind}"), strategy="descent")
    with manager.attach(model) as run:
        out = model.generate(PROMPT, **GREEDY)
    own = DynamicProbeManager(folder / "pack", keep_top_k=5, always_on=["c11"], audit_rate=1.0, strategy="descent")
    with own.attach(model, on_gap="report") as other:
        other.on("c9", above=0.2, action=lambda event: None)
        low = own.pack.with_alert_set("rate_0.01").alert_threshold
        for probe in own.pack.find_all(["c1*", "c3"]):
            other.on(probe, above=float(low[probe]), for_tokens=2, on_blind="raise")
        other.follow(JsonLinesSink(folder / "own.jsonl", top_k=3))
        expected = model.generate(PROMPT, **GREEDY)
    assert torch.equal(out, expected) and out.shape[1] < 19, "it stops"
    mine, theirs = ([{**vars(event), "alert_set": None} for event in one.events] for one in (run, other))
    assert mine == theirs and {event.alert_set for event in run.events} >= {"rate_0.01"}
    a, b = run.result(out), other.result(expected)
    assert a.scores.values.tolist() == b.scores.values.tolist() and a.audit == b.audit and len(a.coverage.audited)
    lines = [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()]
    assert {line.pop("deployment") for line in lines} == {a.deployment}
    assert lines == [json.loads(line) for line in (folder / "own.jsonl").read_text().splitlines()]
    (folder / "own.jsonl").unlink()
    assert a.deployment == a.before(6).deployment == Deployment.read(folder / f"watch.{kind}").sha256
    assert b.deployment is None


def test_each_rule_follows_its_on_blind_at_an_unseen_token(folder):
    model, text = make_model(), text_of(folder).replace("on_blind: pass", "on_blind: stop")
    manager = DynamicProbeManager.from_deployment(written(folder, text))

    def lose(module, args, kwargs):
        if kwargs["position_ids"][0, -1] == 6:
            module.layers[1]._forward_hooks.clear()

    handle = model.model.register_forward_pre_hook(lose, with_kwargs=True)
    with manager.attach(model) as run, pytest.raises(ProbemonError, match="is not known at row 0, column 6"):
        model.generate(PROMPT, **GREEDY)
    handle.remove()
    assert len(run.gaps) >= 1 and any(event.blind for event in run.events)


def test_deployment_rules_take_baseline_aggregates(folder):
    text = text_of(folder).replace("above: 0.2", "above: 1.5\n    aggregate: z:last:16")
    text = text.replace("action: stop", "action: record")
    model, long = make_model(), {**GREEDY, "max_new_tokens": 40}
    manager = DynamicProbeManager.from_deployment(written(folder, text))
    with manager.attach(model) as run:
        out = model.generate(PROMPT, **long)
    values = run.result(out).aggregate("c9", "z:last:16").values
    met = [event for event in run.events if event.aggregate == "z:last:16"]
    assert [(event.above, event.value) for event in met] == [(1.5, value) for value in crossings(values, 1.5)]
    assert met and np.isnan(values[:16]).all() and not np.isnan(values[16:]).any()


def crossings(values, above):
    over = values > above
    return values[over & ~np.concatenate([[False], over[:-1]])].tolist()


def test_stream_uses_the_deployment_rules(folder):
    path = written(folder, text_of(folder))
    events = list(
        DynamicProbeManager.from_deployment(path).stream(make_model(), make_tokenizer(), "some words", **GREEDY)
    )
    assert events[-1].result.deployment == Deployment.read(path).sha256 and len(events) < GREEDY["max_new_tokens"]


def test_deployment_hash_depends_on_content_not_on_format(folder):
    text = text_of(folder)
    content = yaml.safe_load(text)
    same = [f"# a remark\n{text}\n", yaml.safe_dump(content), json.dumps(content)]
    assert len({Deployment.read(written(folder, one, "a.yaml")).sha256 for one in [text, *same]}) == 1
    assert (
        Deployment.read(written(folder, text.replace("0.2", "0.3"))).sha256
        != Deployment.read(written(folder, text, "b.yaml")).sha256
    )


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))])
def test_copied_manager_keeps_the_deployment_rules(folder, copied):
    manager = copied(DynamicProbeManager.from_deployment(written(folder, text_of(folder))))
    run = manager.attach(make_model())
    assert run.deployment.sha256 == Deployment.read(folder / "watch.yaml").sha256
    assert len(run.deployment.rules(manager.pack)) == 13 and manager.audit_rate == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))])
def test_manager_with_judges_can_be_copied(folder, copied):
    text = text_of(folder).replace("action: record", f"{JUDGED}pass", 1)
    manager = copied(DynamicProbeManager.from_deployment(written(folder, text)))
    assert [isinstance(rule.action, Escalate) for rule in manager.deployment.rules(manager.pack)].count(True) == 1


JUDGE = """judge:
      url: "http://localhost:1/v1"
      model: guard
      within: 2
      meanwhile: hold"""
JUDGED = f"action: escalate\n    {JUDGE}\n      on_failure: "
CASES = [
    ("on_blind: pass", "on_blid: pass", 17, "unknown, did you mean 'on_blind'"),
    ("    on_blind: pass\n", "", 14, "on_blind is missing"),
    ("on_blind: pass", "on_blind: halt", 17, "'halt' is not one of"),
    ("deployment: 1", "deployment: 2", 1, "1 was expected"),
    ("above: 0.2", "above: 1.0", 15, "greater than or equal to the maximum of 1"),
    ("above: 0.2", "above: 3\n    aggregate: rank:last:64", 15, "greater than or equal to the maximum of 1"),
    ("above: 0.2", "above: 3\n    aggregate: z:last:8", 16, "last is 8: it counts tokens, so give 16 or more"),
    ("above: 0.2", "above: 300\n    aggregate: z:last:64", 15, "z:last:64 lies between 0 and 133.084"),
    ("above: 0.2", "above: 3\n    aggregate: z:pack", 16, "probemon calibrate --benign FILE --statistics counts it"),
    ("above: 0.2", "above: .nan", 15, "nan is not a usable number"),
    ("above: 0.2", "above: 0.2\n    rate: 0.1", 16, "above is given, too"),
    ("above: 0.2", "above: 0.2\n    above: 0.3", 16, "'above' is in line 15 already"),
    ("above: 0.2", "above: &x 0.2\n    for_tokens: *x", 16, "an alias hides"),
    ("[c9]", "[c99]", 14, "has no concept 'c99'"),
    ("rate: 0.01", "rate: 0.02", 19, "no set of alert thresholds 'rate_0.02'"),
    ("keep_top_k: 5", "keep_top: 5", 10, "did you mean 'keep_top_k'"),
    ("keep_top_k: 5", "max_loaded_probes: 1", 10, "max_loaded_probes is 1"),
    ("keep_top_k: 5", "base_layers: [99]", 10, "base_layers names level 99"),
    ("[c11]", "[c99]", 11, "has no concept 'c99'"),
    ("manifest_sha256: ", "manifest_sha256: 0", 8, "does not match"),
    ("model: tiny", "model: large", 7, "was made for tiny, host.model is large"),
    ("pack: pack\n", "pack: pock\n", 7, "pock"),
    ("concepts: [c9]", "concepts: [c9", 15, "is not YAML"),
    ("name: two rules", "name: 2026-13-45", 1, "is not YAML: month must be in"),
    ("name: two rules", "name: 3", 2, "3 is not of type 'string'"),
    ("audit_rate: 1", "exclude: [c9]\ndepth: {c1: 2}", 11, "c11 has a rule or is always_on, and include, exclude"),
    ("audit_rate: 1", "include: [c0, c1]\nexclude: [c2, c77]", 13, "has no concept 'c77'"),
    ("audit_rate: 1", "depth:\n  c0: 1\n  c88: 2", 14, "has no concept 'c88'"),
    ("audit_rate: 1", "depth: {c0: -1}", 12, "-1 is less than the minimum of 0"),
    (
        "audit_rate: 1",
        "exclude: [c39]\nmetrics: {concepts: [c9, c39]}",
        13,
        "'concept 39' is left out by include, excl",
    ),
    ("audit_rate: 1", "include: []", 12, "[] should be non-empty"),
    ("rules:", "rules: 3\nrulez:", 14, "unknown, did you mean 'rules'"),
    ("action: stop", "action: escalate", 18, "judge is missing: the endpoint like OpenAI's that is asked"),
    ("action: stop", f"action: escalate\n    {JUDGE}", 22, "on_failure is missing: what follows where there is no"),
    ("action: stop", JUDGED + "hold", 27, "'hold' is not one of ['pass'"),
    ("action: stop", f"action: stop\n    {JUDGE}", 22, "rules[1].judge: this is for action: escalate"),
    (
        "action: stop",
        JUDGED.replace("http:", "ftp:") + "stop",
        23,
        "url is 'ftp:",
    ),
    (
        "action: stop",
        JUDGED.replace("model", "modle") + "stop",
        24,
        "'modle' is",
    ),
    (
        "action: stop",
        JUDGED.replace("hold", "stop") + "pass",
        27,
        "so give 'stop'",
    ),
    ("action: stop", f"{JUDGED}stop\n      pattern: '(safe'", 28, "rules[1].judge.pattern: pattern is '(safe', not"),
    (
        "action: stop",
        f"{JUDGED}stop\n      rulings: {{yes: stop, maybe: pass}}",
        28,
        "key True is not a text: put it in",
    ),
    ("action: stop", f"{JUDGED}stop\n      rulings: {{'yes': halt}}", 28, "'halt' is not one of ['pass', 'stop']"),
    ("action: stop", f"{JUDGED}stop\n      preset: lama-guard", 28, "'lama-guard' is not one of ['llama-guard'"),
    ("action: stop", f"{JUDGED}stop\n      question: '{{txt}}'", 28, "{txt}, which is unknown, did you mean 'text'"),
    ("audit_rate: 1", "depth: {c0: 1, 2: 1}", 12, "depth: the key 2 is not a text"),
    ("audit_rate: 1", "breaker: {errors: 2.0}", 12, "errors is 2.0: it counts errors, so give 1 or more"),
    ("audit_rate: 1", f"budget: {{ms: 1{400 * '0'}}}", 12, "is not a usable number here"),
    ("audit_rate: 1", "sinks:\n  - {kind: parquet, path: a.parquet, top_k: 3}", 13, "top_k is of jsonl"),
    ("audit_rate: 1", "sinks:\n  - {kind: jsonl, path: nowhere/a.jsonl}", 13, "nowhere is not a folder: make it first"),
    (
        "audit_rate: 1",
        "sinks:\n  - {kind: jsonl, path: a.jsonl, overwrite: true}\n"
        "  - {kind: jsonl, path: ./a.jsonl, overwrite: true, top_k: 1}",
        14,
        "a second sink writes ./a.jsonl",
    ),
    ("audit_rate: 1", "opentelemetry: {}", 12, "endpoint is missing: the address of a collector"),
    ("audit_rate: 1", "opentelemetry:\n  endpoint: localhost:4317", 13, "The address of a collector that takes OTLP"),
    ("audit_rate: 1", "opentelemetry:\n  endpoint: http://[", 12, "endpoint is 'http://[': give the address"),
]


@pytest.mark.parametrize(("old", "new", "line", "said"), CASES, ids=[f"{new.strip()[:30]}" for _, new, *_ in CASES])
def test_deployment_error_names_its_line(folder, old, new, line, said):
    text = text_of(folder)
    assert old in text
    with pytest.raises((DeploymentError, PackError), match=re.escape(said)) as raised:
        deployment = Deployment.read(written(folder, text.replace(old, new, 1)))
        pack = deployment.open_packs()
        cost_of(deployment, pack)
        deployment.check_parts(pack)
    if "not YAML: month" not in said:
        assert f"watch.yaml, line {line}" in str(raised.value), raised.value


@pytest.mark.parametrize("budget", [{"ms": 2.5}, {"share": 0.1}, {"ms": 2.5, "share": 0.1}])
def test_budget_of_a_file_is_that_of_its_runs(folder, budget):
    text = text_of(folder).replace("audit_rate: 1", f"budget: {json.dumps(budget)}")
    run = DynamicProbeManager.from_deployment(written(folder, text)).attach(make_model())
    assert repr(run.follower(Budget)) == repr(Budget(**budget))


LONG = 5000 * "x"


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("pack: pack\n", f"pack: {LONG}\n", 7),
        ("model: tiny", f"model: {LONG}", 7),
        ("name: two rules", f"name: {LONG}", 2),
        ("[c11]", f"['{LONG} {LONG}\u00e9']", 11),
        ("[c9]", f"[{LONG}]", 14),
        ("keep_top_k: 5", f"{LONG[:900]}: 5", 10),
        ("keep_top_k: 5", f"keep_top_k: {LONG}", 10),
        ("for_tokens: 2", f"for_tokens: 2\n    aggregate: {LONG}", 21),
        ("audit_rate: 1", f"sinks: [{{kind: jsonl, path: {LONG}/a}}]", 12),
        ("audit_rate: 1", f"drift: {{reference: {LONG}}}", 12),
        ("audit_rate: 1", f"include: !{LONG} c0", 12),
        ("audit_rate: 1", "name\a: 1", 12),
        ("audit_rate: 1", "rules: \ud7ff\ufffe", 12),
    ],
    ids=lambda value: str(value)[:24].strip(),
)
def test_error_about_a_long_or_unprintable_value_is_one_short_line_with_its_place(folder, old, new, line):
    with pytest.raises(DeploymentError) as raised:
        deployment = Deployment.read(written(folder, text_of(folder).replace(old, new, 1)))
        pack = deployment.open_packs()
        cost_of(deployment, pack)
        deployment.check_parts(pack)
    said = str(raised.value)
    assert said.startswith(f"watch.yaml, line {line}") and len(said) < 500 and said.isprintable(), said


def test_cut_softmax_group_is_reported_with_the_line_that_cuts_it(tmp_path):
    grouped_packs.write(tmp_path / "pack", (), torch.float32)
    sha256 = hashlib.sha256((tmp_path / "pack/manifest.json").read_bytes()).hexdigest()
    packs = f"packs:\n  - pack: pack\n    manifest_sha256: {sha256}"
    text = f"deployment: 1\n{packs}\ncascade: {{keep_top_k: 3}}\nexclude: [c2]"
    deployment = Deployment.read(written(tmp_path, text))
    with pytest.raises(
        DeploymentError, match=r"watch.yaml, line 6: exclude: c2 is left out by exclude or depth, and c3"
    ):
        cost_of(deployment, deployment.open_packs())


def test_another_model_is_refused_with_the_line_of_host(folder):
    manager = DynamicProbeManager.from_deployment(written(folder, text_of(folder)))
    with (
        pytest.warns(UserWarning, match="weights are others"),
        pytest.raises(ModelMismatch, match=r"yaml, line 5: host"),
    ):
        manager.attach(make_model(seed=1))
    with (
        pytest.warns(UserWarning, match="weights are others"),
        pytest.raises(ModelMismatch, match=r"yaml, line 5: host"),
    ):
        manager.analyze(make_model(seed=1), make_tokenizer(), ["w5 w6"], folder / "analysed")
    with pytest.raises(ConfigError, match="keep_top_k belongs in the deployment file"):
        DynamicProbeManager.from_deployment(folder / "watch.yaml", keep_top_k=3)
    with pytest.raises(DeploymentError, match="is not a file"):
        DynamicProbeManager.from_deployment(folder / "none.yaml")


@pytest.mark.filterwarnings("ignore:random was made for tiny")
def test_named_model_without_fingerprint_is_checked_against_the_packs(folder):
    text = re.sub(r"  fingerprint: .*\n", "", text_of(folder))
    manager = DynamicProbeManager.from_deployment(written(folder, text))
    manager.attach(make_model())
    with pytest.raises(ModelMismatch, match=r"watch\.yaml, line 4: host\.model: random was made for tiny"):
        manager.attach(make_model(seed=1))
    unnamed = DynamicProbeManager.from_deployment(written(folder, text.replace("host:\n  model: tiny\n", "")))
    unnamed.attach(make_model(seed=1))  # warns, as everywhere


def test_deployment_cost_matches_the_managers_plan(folder):
    deployment = Deployment.read(written(folder, text_of(folder)))
    cost = cost_of(deployment, deployment.open_packs())
    manager = DynamicProbeManager.from_deployment(folder / "watch.yaml")
    rules = deployment.rules(manager.pack)
    assert cost.n_rules == len(rules) == 13
    assert cost.n_always == len(manager.plan_with([rule.probe for rule in rules]).start)
    assert cost.n_probes == cost.n_watched == cost.n_most == 40 and cost.weight_bytes == manager.pack.weight_bytes()
    assert cost.always_bytes == cost.weight_bytes * cost.n_always // 40


def test_deployment_include_exclude_depth_equal_the_settings(folder):
    part = {"include": ["c0", "c*1*"], "exclude": ["c26"], "depth": {"c0": 2}}
    text = text_of(folder).partition("rules:")[0].replace("always_on: [c11]\n", "") + yaml.safe_dump(part)
    path, model = written(folder, text), make_model()
    scores = []
    for manager in (
        DynamicProbeManager.from_deployment(path),
        DynamicProbeManager(folder / "pack", keep_top_k=5, audit_rate=1.0, **part),
    ):
        with manager.attach(model) as run:
            out = model.generate(PROMPT, **GREEDY)
        scores.append(run.result(out).scores)
    a, b = scores
    assert a.values.tolist() == b.values.tolist() and a.probes.tolist() == b.probes.tolist()
    deployment = Deployment.read(path)
    cost = cost_of(deployment, deployment.open_packs())
    assert 0 < cost.n_watched == cost.n_most < 40
    seen = a.coverage.seen
    assert (a.coverage.excluded[seen] == 40 - cost.n_watched).all() and not a.coverage.excluded[~seen].any()


def test_every_part_of_the_schema_has_a_description():
    whole = schema()
    jsonschema.Draft202012Validator.check_schema(whole)
    assert all("description" in part for part in whole["properties"].values())


def test_example_deployment_is_valid_and_shown_in_the_docs():
    example = Path(__file__).parents[3] / "examples/watch.yaml"
    deployment = Deployment.read(example)
    assert cost_of(deployment, deployment.open_packs()).n_rules == 3
    page = (example.parents[1] / "docs/deployment.md").read_text()
    assert yaml.safe_load(re.search(r"```yaml\n(.*?)```", page, re.DOTALL)[1]) == deployment.content
    named = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert named == set(schema()["properties"])


def test_randomly_mutated_files_are_valid_or_fail_with_a_line(folder):
    ends = at_random(folder, text_of(folder), 200)
    assert ends["read"] > 30 and ends["DeploymentError"] > 60
