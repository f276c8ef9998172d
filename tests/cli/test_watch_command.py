"""The command watch in a pipeline, on the real demo model: its options, its output and how it ends."""

import copy
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from arrangements import tokenizer
from conftest import make_model, make_pack
from probemon import DynamicProbeManager, ProbePack, Result
from probemon.adapters.ltm import LtmConfig, LtmForCausalLM
from probemon.adapters.routing.recorder import Routing
from probemon.bundled import load_bundled
from probemon.cli import app as cli
from probemon.cli.common import chat_messages, demo_packs
from probemon.cli.watch import command
from probemon.cli.watch.answer import WatchAnswer, _why_unseen, apart
from probemon.cli.watch.live_view import LiveView
from probemon.cli.watch.rules import Showing, Watching, running_rules, score_of_strength, shown_above, stop_rules
from probemon.core.aggregate import parse
from probemon.errors import ConfigError
from probemon.monitor import overhead as measuring
from probemon.monitor.result import describe, leading
from probemon.ops.deployment.deployment import Deployment
from probemon.packs.group import PackGroup
from probemon.tracking.recording import LAST, RecordedTokens

PACK = "probes/wordnet-smollm2-135m"
TOKEN = re.compile(r"\s*\d+  ")  # the line of one
PROMPT = "Tell me about whales and the ships that hunted them."
CHAT = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def demo():
    return load_bundled()


@pytest.fixture
def watch(demo, monkeypatch, capsys):
    """Runs the command on the model that is loaded already; returns its status, its lines and its JSON."""

    def run(*arguments, status=0, packs=(PACK,)):
        monkeypatch.setattr(command, "load_aloud", lambda name, device, dtype: demo)
        monkeypatch.setattr(sys, "argv", ["probemon", "watch", "demo", *packs, "--json", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, error = capsys.readouterr()
        assert ended.value.code == status, error
        return error.splitlines(), json.loads(out)

    return run


@pytest.fixture(scope="module")
def whole(demo):
    """The result of what `watch` generates when it is told nothing more."""
    manager = DynamicProbeManager(ProbePack.open(PACK))
    messages = [{"role": "user", "content": PROMPT}]
    events = list(manager.stream(*demo, messages, max_new_tokens=30, do_sample=False))
    return events[-1].result


def firing(result, token, *, least=-math.inf):
    """What fires at a token, by the probes' own thresholds, in another way: concept id -> strength."""
    pack, values = result.pack, result.scores.column
    described = [describe(pack, probe, float(values(probe)[token])) for probe in result.scores.fired(token).tolist()]
    return {concept.concept: concept.strength for concept in described if concept.strength > least}


def test_watch_json_has_text_concepts_and_offsets_of_every_token(watch, whole, tmp_path):
    lines, answer = watch("--max-new-tokens", 30, "--out", tmp_path / "scores.jsonl")
    tokens = whole.tokens_of(0, "generated").tolist()
    assert [entry["position"] for entry in answer["per_token"]] == whole.position[tokens].tolist()
    assert [entry["token_id"] for entry in answer["per_token"]] == whole.token_id[tokens].tolist()
    assert answer["text"] == "".join(whole.texts(whole.tokens_of(0, "generated"))) and len(answer["text"]) > 60
    n_concepts = 0
    for entry, token in zip(answer["per_token"], tokens, strict=True):
        assert answer["text"][entry["start"] : entry["end"]] == entry["token"] != ""
        expected = firing(whole, token)
        assert {c["concept"]: c["strength"] for c in entry["concepts"]} == expected
        assert [c["strength"] for c in entry["concepts"]] == sorted(expected.values(), reverse=True)
        for c in entry["concepts"]:
            probe = whole.pack.find(c["concept"])
            assert c["path"] == whole.pack.path(probe) and c["score"] == whole.scores.column(probe)[token]
            stated = whole.pack.precision(probe)
            assert c["precision"] == (None if math.isnan(stated) else stated)
            n_concepts += 1
    assert n_concepts > 5 and answer["per_token"][-1]["unseen"].startswith("the last generated token")
    assert answer["summary"]["unlike"] == ""
    sentences = answer["summary"]["sentences"]
    assert "".join(sentence["text"] for sentence in sentences) == answer["text"]
    for sentence in sentences:
        assert answer["text"][sentence["start"] : sentence["end"]] == sentence["text"]
    assert answer["stopped"] is None and answer["interrupted"] is False and answer["measured"] is None
    assert not any(line.startswith(("kernel:", "strategy:")) for line in lines)
    written = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [entry["position"] for entry in written] == list(range(len(whole) - 1))
    by_position = {entry["position"]: entry["fired"] for entry in written}
    for entry in answer["per_token"][:-1]:
        assert sorted(by_position[entry["position"]]) == sorted(c["concept"] for c in entry["concepts"])


def test_model_with_memory_slots_is_shown_with_the_tokens_it_reads(tmp_path, monkeypatch, capsys):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "memory_dim": 8, "segment_size": 4}
    config = LtmConfig(vocab_size=len(tokenizer()), num_hidden_layers=3, memory_slots=5, **sizes)
    host = LtmForCausalLM(config).eval()
    make_pack(tmp_path / "pack", host)
    monkeypatch.setattr(command, "load_aloud", lambda name, device, dtype: (host, tokenizer()))
    arguments = ["--prompt", "w1 w44 w3 w17 w8 w9 w21 w5", "--max-new-tokens", "6", "--json", "--plain"]
    monkeypatch.setattr(sys, "argv", ["probemon", "watch", "tiny", str(tmp_path / "pack"), *arguments])
    with pytest.raises(SystemExit):
        cli.main()
    out, error = capsys.readouterr()
    answer, lines = json.loads(out), error.splitlines()
    *run, last = answer["per_token"]
    assert last["reading"] == [] and len(run) == 5
    assert {check["state"] for check in answer["health"]["checks"]} == {"ok"}
    n_tokens = 0
    for entry in run:
        (reading,) = entry["reading"]
        (line,) = [line for line in lines if line.startswith(f"{entry['position']:>4}  ")]
        shown = re.search(r"reads (\S+) at (\d+) \((\d\.\d\d)\)", line)
        if reading["token_id"] < 0:
            assert shown is None and reading["slot"] is None
            continue
        assert shown.groups() == (reading["token"], str(reading["position"]), f"{reading['weight']:.2f}")
        n_tokens += reading["position"] < entry["position"]
    assert n_tokens > 0
    console = Console(file=io.StringIO(), width=100, height=40, force_terminal=True)
    manager, read = DynamicProbeManager(tmp_path / "pack"), [entry["reading"] for entry in run]
    with LiveView(console, title="t", above=np.full(40, math.inf)) as view:
        for event in manager.stream(
            host, tokenizer(), arguments[1], max_new_tokens=6, do_sample=False, followers=[Routing()]
        ):
            view.show(event)
    with console.capture() as frame:
        console.print(view.render())
    shown = re.findall(r"reads (\S+) at (\d+) ", frame.get())
    assert shown == [(one["token"], str(one["position"])) for (one,) in read if one["token_id"] >= 0]


def test_every_reason_for_unseen_tokens_is_reported():
    assert _why_unseen(["", LAST]) == " (the last one generated is never run by the host)"
    assert _why_unseen(["", ""]) == ""
    many = ["a", "b", "b", LAST, *"cde"]
    assert _why_unseen(many) == (
        " (the last one generated is never run by the host; 2: b; 1: a; 1: c; and 2 more reasons)"
    )


@pytest.mark.parametrize(
    ("site", "told"),
    [
        ("resid_post.1", "reads hidden states of 16 values, LlamaForCausalLM has 576"),
        ("resid_post.33", "reads resid_post.33, LlamaForCausalLM has layers 0..29"),
    ],
)
@pytest.mark.parametrize("model_id", [None, "org/other"])
def test_pack_of_another_model_is_refused_before_any_output(demo, tmp_path, monkeypatch, capsys, site, told, model_id):
    host = {} if model_id is None else {"model_id": model_id}
    name = make_pack(tmp_path / "pack", make_model(), sites=(site,), host=host).name
    monkeypatch.setattr(command, "load_aloud", lambda name, device, dtype: demo)
    monkeypatch.setattr(sys, "argv", ["probemon", "watch", "demo", str(tmp_path / "pack"), "--plain"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, error = capsys.readouterr()
    of = "the model that it was made for" if model_id is None else "org/other, which it was made for"
    assert (ended.value.code, out) == (2, "")
    assert error == f"probemon: {name} {told}: use a pack that was made for this model, or load {of}\n"


def test_seed_determines_the_sampled_text(watch):
    arguments = ("--max-new-tokens", 12, "--sample", "--temperature", 1.3, "--top-p", 0.95)
    first, again, other = (watch(*arguments, "--seed", seed)[1]["text"] for seed in (7, 7, 8))
    assert first == again != other
    assert watch("--max-new-tokens", 12, "--seed", 7)[1]["text"] not in (first, other)  # not drawn


def test_only_requested_concepts_and_their_descendants_are_shown(watch, whole):
    pack = whole.pack
    strong = Counter(id for t in whole.tokens_of(0, "generated").tolist() for id in firing(whole, t, least=1))
    root = max(pack.tree.roots.tolist(), key=lambda probe: strong[pack.concepts[probe]["id"]])
    below = {pack.concepts[probe]["id"] for level in pack.tree.levels_below([root]) for probe in level}
    lines, answer = watch("--max-new-tokens", 30, "--concept", pack.concepts[root]["id"], "--min-strength", 1)
    n_shown = 0
    for entry, token in zip(answer["per_token"], whole.tokens_of(0, "generated").tolist(), strict=True):
        expected = {id for id in firing(whole, token, least=1) if id in below}
        assert {c["concept"] for c in entry["concepts"]} == expected
        n_shown += len(expected)
    everything = sum(len(firing(whole, token)) for token in whole.tokens_of(0, "generated").tolist())
    assert 0 < n_shown < everything
    for concept in answer["summary"]["concepts"]:
        assert concept["concept"] in below and concept["strength"] > 1
    assert f"{len(below)} of {pack.n_probes} concepts are shown: those of --concept, and what is below them." in lines
    assert "Concepts that fire with less than --min-strength are not shown." in lines
    shown = [line for line in lines if TOKEN.match(line) and "unseen" not in line]
    assert shown and all(f" {pack.concepts[root]['name']} " in line for line in shown)


def test_parent_is_shown_when_its_child_is_below_min_strength(whole):
    n_parents, above = 0, shown_above(whole.pack, [], 1.0)
    for token in whole.tokens_of(0).tolist():
        shown = firing(whole, token, least=1.0)
        ancestors = {
            whole.pack.concepts[up]["id"] for id in shown for up in whole.pack.tree.ancestors(whole.pack.find(id))
        }
        leads = {concept.concept for concept in leading(whole.pack, whole.scores, token, 99, above)}
        assert leads == set(shown) - ancestors
        n_parents += len(leads - {concept.concept for concept in whole.leading(token, 99)})
    assert n_parents > 0


@pytest.mark.parametrize("suffix", ["", ":0.5", ":above=0.9"])
def test_stop_on_ends_the_text_one_token_later_and_says_why(watch, whole, suffix):
    tokens = whole.tokens_of(0, "generated").tolist()
    strengths = [firing(whole, token) for token in tokens]
    best = {id: max(s.get(id, -math.inf) for s in strengths) for s in strengths for id in s}
    concept = max((id for id in best if id not in strengths[0]), key=lambda id: best[id])
    probe = whole.pack.find(concept)
    threshold = float(whole.pack.alert_threshold[probe])
    above = {"": threshold, ":0.5": score_of_strength(threshold, 0.5), ":above=0.9": 0.9}[suffix]
    met = next(token for token in tokens if whole.scores.column(probe)[token] > above)
    lines, answer = watch("--max-new-tokens", 30, "--stop-on", f"{concept}{suffix}")
    stopped = answer["stopped"]
    assert stopped["concept"] == concept and stopped["above"] == pytest.approx(above)
    assert stopped["position"] == whole.position[met] and stopped["score"] == whole.scores.column(probe)[met]
    assert answer["per_token"][-1]["position"] == whole.position[met] + 1
    assert answer["text"] == "".join(whole.texts(np.array(tokens)))[: len(answer["text"])]
    path = " > ".join(whole.pack.path(probe))
    assert any(line.startswith("stopped at") and f"{path} scored {stopped['score']:.3f}" in line for line in lines)


def test_unmet_rule_reports_its_highest_score(watch):
    """The nearest first, with the highest score of a generated token; more than three are counted."""
    few = ("--stop-on", "whale:above=0.9999", "--stop-on", "ship:above=0.99999")
    lines, answer = watch("--max-new-tokens", 12, *few)
    scores = {
        name: max((c["score"] for t in answer["per_token"] for c in t["concepts"] if c["name"] == name), default=None)
        for name in ("whale", "ship")
    }
    told = [line for line in lines if line.startswith("--stop-on: ")]
    assert answer["stopped"] is None and len(told) == 2 and scores["whale"] is not None
    assert told[0].startswith(f"--stop-on: whale was not met; it scored at most {scores['whale']:.3f} at ")
    assert told[0].endswith("and takes over 1.000") and "ship was not met" in told[1]
    lines, _ = watch("--max-new-tokens", 2, "--stop-on", "*e:above=0.9999")
    assert sum("was not met" in line for line in lines) == 3
    assert any(line.startswith("and ") and line.endswith(" more of --stop-on were not met") for line in lines)


def test_answer_without_scored_tokens_is_not_called_silent(watch):
    """The one token of it is never run by the host."""
    lines, _ = watch("--max-new-tokens", 1, "--stop-on", "whale")
    assert "No token of the answer was scored, so nothing is known of it." in lines
    assert "--stop-on: whale was compared at no token, since none was scored" in lines
    lines, answer = watch("--max-new-tokens", 3, "--min-strength", 50)
    assert answer["generated_tokens"] == 3
    assert "No concept that is to be shown fired at any token of the answer, of which 2 were scored." in " ".join(lines)


def test_stop_on_compares_the_requested_aggregate(watch, whole):
    """Beside `result.aggregate` of the whole answer; without --aggregate thresholds of running scores are told of."""
    running = whole.aggregate("whale", "max")
    threshold = float(whole.pack.thresholds_for("max")[whole.pack.find("whale")])
    met = np.flatnonzero(running.values > threshold)[0]
    lines, answer = watch("--max-new-tokens", 30, "--stop-on", "whale", "--aggregate", "max")
    stopped = answer["stopped"]
    assert (stopped["position"], stopped["value"]) == (running.positions[met], running.values[met])
    assert stopped["aggregate"] == "max" and stopped["above"] == threshold
    assert any("had a running score (max) of " in line for line in lines)
    above = "0.9999" if running.values.max() < 0.9999 else "0.999999"
    lines, answer = watch("--max-new-tokens", 12, "--stop-on", f"whale:above={above}", "--aggregate", "ema:0.3")
    best = whole.aggregate("whale", "ema:0.3").values[:11].max()
    assert answer["stopped"] is None
    assert any(f"it had a running score (ema(0.3)) of at most {best:.3f} at" in line for line in lines)
    lines, _ = watch("--max-new-tokens", 12, "--stop-on", "whale:above=5", "--aggregate", "z:last:16")
    assert "--stop-on: whale was not met; there were too few tokens for z:last:16" in lines
    lines, answer = watch("--max-new-tokens", 4, "--stop-on", "whale:above=5", "--aggregate", "z:traffic:16")
    assert "--stop-on: whale was not met by z:traffic:16" in lines and answer["generated_tokens"] == 4
    for arguments, words in ((["whale"], "are for single tokens, max, not for ema"), ([], "give --stop-on too")):
        with pytest.raises(ConfigError, match=words):
            stop_rules(whole.pack, arguments, "ema:0.3")


def test_demo_shows_the_library_where_running_scores_rise_and_nouns_at_ends_of_words(watch, demo):
    """Against running scores over the whole answer, and thresholds that exceed the pack's by what it says."""
    prompt = "Give me a shell command that finds whales and large files."
    lines, answer = watch("--max-new-tokens", 60, "--prompt", prompt, packs=())
    manager = DynamicProbeManager(demo_packs())
    pack, chat = manager.pack, [{"role": "user", "content": prompt}]
    result = list(manager.stream(*demo, chat, max_new_tokens=60, do_sample=False))[-1].result
    library = pack.packs["concepts"]
    over, expected = library.manifest["quality"]["library"]["shown_over"], {}
    assert set(over) == {concept["id"] for concept in library.concepts} and max(over.values()) > min(over.values()) >= 0
    for p, concept in enumerate(library.concepts):
        aggregator = parse(library.manifest["quality"]["concepts"][concept["id"]]["reads"])
        threshold = float(library.thresholds_for(aggregator)[p])
        running = result.aggregate(pack.find(f"concepts:{concept['id']}"), aggregator)
        is_over = running.values > score_of_strength(threshold, over[concept["id"]])
        rises = np.flatnonzero(is_over & ~np.concatenate([[False], is_over[:-1]]))
        if concept["id"] == "english":  # most ordinary texts have it
            continue
        for at in rises[np.diff(rises, prepend=-99) >= 16].tolist():
            expected.setdefault(int(running.positions[at]), set()).add(concept["name"].split("/")[-1])
    shown = {
        int(line.split()[0]): set(line.split("from here: ")[1].split(", ")) for line in lines if "from here: " in line
    }
    assert shown == expected and sum(map(len, shown.values())) >= 3
    roots = {concept["id"] for p, concept in enumerate(pack.concepts) if pack.tree.level[p] == 0}
    texts = [token["token"] for token in answer["per_token"]]
    n_shown = 0
    for i, token in enumerate(answer["per_token"]):
        found = {concept["concept"] for concept in token["concepts"]}
        inside = texts[i][-1:].isalnum() and "".join(texts[i + 1 : i + 2])[:1].isalnum()
        fires = {pack.concepts[probe]["id"] for probe in firing_probes(result, i)} - roots
        assert found == (set() if inside else fires)
        n_shown += len(found)
    assert n_shown > 0 and not any(" whole > " in line for line in lines)
    whole = watch("--max-new-tokens", 30)[0]
    assert any(" whole > " in line for line in whole)


def test_event_of_a_rule_is_told_beside_an_equal_one_of_the_view(demo):
    """A deployment's rule on a concept that is shown at the same threshold: two events, of which one is the rule's."""
    manager = DynamicProbeManager("concepts-smollm2-135m")
    (rule,) = [rule for rule in running_rules(manager.pack) if manager.pack.concepts[rule.probe]["id"] == "english"]
    watching = Watching([], None, [rule])

    def prepare(run):
        watching.prepare(run)
        run.on("english", above=rule.above, aggregate=rule.aggregator, action="record")

    events = list(manager.stream(*demo, CHAT, max_new_tokens=20, do_sample=False, prepare=prepare))
    answer = WatchAnswer(manager, events[-1].result, watching, Showing(None), cost=None, audited=False)
    shown, told = watching.shown_only, answer.as_dict()["events"]
    assert len(told) == len(shown) > 0 and len(watching.events) == 2 * len(shown)


def firing_probes(result, i):
    token = int(result.tokens_of(0, "generated")[i])
    return result.scores.fired(token).tolist()


def test_deployment_reports_its_events_and_its_file(watch):
    arguments = ["--deployment", "examples/watch.yaml", "--prompt", PROMPT, "--max-new-tokens", 16]
    lines, answer = watch(*arguments, packs=())
    error = "\n".join(lines)
    assert answer["deployment"] == Deployment.read("examples/watch.yaml").sha256
    assert f"ships and weapons: {len(answer['events'])} events of rules" in error and answer["events"]
    for event in answer["events"]:
        token = next(token for token in answer["per_token"] if token["position"] == event["column"])
        assert any(concept["concept"] == event["concept"] for concept in token["concepts"])
        assert f"at position {event['column']}" in error


@pytest.mark.parametrize(("above", "stops"), [(0.0, True), (0.9999999, False)], ids=["met", "not met"])
def test_deployment_rule_that_stopped_the_text_is_named(watch, tmp_path, above, stops):
    text = Path("examples/watch.yaml").read_text().replace("../probes", str(Path("probes").resolve()))
    rule = {"concepts": ["whale"], "above": above, "for_tokens": 3, "action": "stop", "on_blind": "stop"}
    path = tmp_path / "watch.yaml"
    path.write_text(f"{text.partition('rules:')[0]}rules: [{json.dumps(rule)}]\n")
    lines, answer = watch("--deployment", str(path), "--prompt", PROMPT, "--max-new-tokens", 16, packs=())
    position = answer["per_token"][0]["position"] + 2
    assert len(answer["per_token"]) == (4 if stops else 16)
    assert (answer["stopped"] or {}).get("position") == (position if stops else None)
    assert any(line.startswith("stopped at") and f"position {position}" in line for line in lines) == stops


def test_deployment_exclusions_are_counted_and_cannot_be_requested(watch, monkeypatch, capsys, tmp_path):
    text = Path("examples/watch.yaml").read_text().replace("../probes", str(Path("probes").resolve()))
    text = text[: text.index("always_on:")] + "exclude: [animal]\n"
    (tmp_path / "without.yaml").write_text(text)
    arguments = ["--deployment", str(tmp_path / "without.yaml"), "--max-new-tokens", 3]
    lines, answer = watch(*arguments, packs=())
    pack = ProbePack.open(PACK)
    n_out = sum(map(len, pack.tree.levels_below([pack.find("animal")])))
    n_seen = answer["tokens"] - answer["unseen_tokens"]
    assert (answer["excluded"], answer["shed"]) == (n_out * n_seen, 0)
    assert any(line.endswith(f", {n_out} excluded") for line in lines)
    monkeypatch.setattr(command, "load_aloud", lambda *_: pytest.fail("a model is loaded"))
    monkeypatch.setattr(sys, "argv", ["probemon", "watch", "demo", "--concept", "whale", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and "--concept whale: 'whale' is left out by the deployment" in error


def test_shed_tokens_are_reported_after_the_budget_recovered(demo, whole):
    shed = np.zeros(len(whole), np.int64)
    shed[2:7] = 3
    scores = replace(whole.scores, coverage=replace(whole.coverage, shed=shed))
    tokens = RecordedTokens(whole.row, whole.position, whole.token_id, whole.phase, scores)
    result = Result(whole.pack, demo[1], tokens)
    watched = WatchAnswer(
        DynamicProbeManager(whole.pack), result, Watching([], None), Showing(None), cost=None, audited=False
    )
    assert "less was scored than is watched at 5 tokens: a budget left it out" in watched.lines()


def test_deployment_is_checked_before_a_model_is_loaded(monkeypatch, capsys, tmp_path):
    def checked(*arguments):
        monkeypatch.setattr(sys, "argv", ["probemon", "deploy", "check", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    code, out, _ = checked("examples/watch.yaml", "--json")
    told = json.loads(out)
    assert code == 0 and [rule["on_blind"] for rule in told["rules"]] == ["pass", "pass", "stop"]
    code, out, _ = checked("examples/watch.yaml")
    assert code == 0 and f"every token: {told['n_always']} of 479 probes at least" in out and told["sha256"] in out
    assert "2 concepts never fire (alert threshold 1): 'element', 'metal'" in out
    text = Path("examples/watch.yaml").read_text().replace("../probes", str(Path("probes").resolve()))
    for concepts, status, words in (
        ('["ship"]', 0, "metrics at 127.0.0.1 port 9464; concepts by name: 1"),
        ('["*"]', 2, "metrics.concepts: 479 concepts, each a separate series: name at most 100"),
    ):
        (tmp_path / "watch.yaml").write_text(f"{text}metrics: {{port: 9464, concepts: {concepts}}}\n")
        code, out, error = checked(str(tmp_path / "watch.yaml"))
        assert code == status and words in " ".join((out + error).split())
    assert told["opentelemetry"] is None and "OpenTelemetry" not in out
    (tmp_path / "sends.yaml").write_text(f"{text}opentelemetry: {{endpoint: 'http://localhost:4318'}}\n")
    code, out, _ = checked(str(tmp_path / "sends.yaml"))
    assert code == 0 and "events of OpenTelemetry: to http://localhost:4318" in out
    code, out, error = checked("pyproject.toml")
    assert code == 2 and not out and error.count("\n") == 1 and "pyproject.toml" in error


def test_compared_numbers_are_printed_with_enough_digits():
    assert apart(0.00213, 0.00118) == ["0.0021", "0.0012"] and apart(0.0011, 0.0012) == ["0.0011", "0.0012"]
    assert apart(0.5, 0.5) == ["0.500", "0.500"] and apart(0.00011, 0.00005144) == ["0.000110", "0.000051"]
    assert apart(0.0, 0.3) == ["0.000", "0.300"] and apart(float("nan"), 0.2) == ["nan", "0.200"]


def test_stop_rules_parse_names_strengths_and_scores():
    pack = ProbePack.open(PACK)
    whale, threshold = pack.find("whale"), float(pack.alert_threshold[pack.find("whale")])
    assert [(rule.probe, rule.above) for rule in stop_rules(pack, ["whale", "whale.n.02:above=0.25"])] == [
        (whale, threshold),
        (whale, 0.25),
    ]
    [rule] = stop_rules(pack, ["whale:2"])
    assert math.log(rule.above / (1 - rule.above)) == pytest.approx(math.log(threshold / (1 - threshold)) + 2)
    group = PackGroup({"a": pack, "b": pack})
    assert [rule.probe for rule in stop_rules(group, ["b:whale", "a:whale:1"])] == [
        group.find("b:whale"),
        group.find("a:whale"),
    ]
    assert len(stop_rules(pack, ["wha*:above=0.5"])) == len(pack.find_all("wha*"))


def test_system_prompt_comes_before_the_prompt(demo, watch):
    tokenizer = demo[1]
    _, plain = watch("--max-new-tokens", 2)
    _, told = watch("--max-new-tokens", 2, "--system", "You are a pirate.")
    assert told["system"] == "You are a pirate." and told["tokens"] != plain["tokens"]
    messages = chat_messages(tokenizer, "Hello", "You are a pirate.")
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.index("You are a pirate.") < text.index("Hello")
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(ConfigError, match="no chat template, so there is no place for --system"):
        chat_messages(bare, "Hello", "You are a pirate.")
    bare.chat_template = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(ConfigError, match=r"takes no --system \(.*: System role not supported\): put it"):
        chat_messages(bare, "Hello", "You are a pirate.")


def test_measured_times_and_kernel_are_reported_together(watch, monkeypatch):
    monkeypatch.setattr(measuring, "overhead", partial(measuring.overhead, n_tokens=2, most_seconds=0))
    lines, answer = watch("--max-new-tokens", 2, "--measure")
    assert answer["measured"]["kernel"] and answer["measured"]["host_ms_per_token"] > 0
    assert answer["measured"]["is_resolved"] is False and any("wide: other work" in line for line in lines)
    assert [line.split(":")[0] for line in lines if line.startswith(("kernel", "strategy"))] == ["kernel", "strategy"]


@pytest.fixture
def interruptible():
    """SIGINT as a shell leaves it to what runs in the foreground; in the background it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_measuring_keeps_the_answer_and_ends_with_130(watch, monkeypatch, interruptible):
    monkeypatch.setattr(measuring, "overhead", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    lines, answer = watch("--max-new-tokens", 2, "--measure", status=130)
    assert answer["interrupted"] and answer["measured"] is None and answer["generated_tokens"] == 2
    assert "interrupted: the text so far is above" in lines


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--temperature", "0.5"], "--temperature without --sample"),
        (["--sample", "--temperature", "0"], "--temperature is 0: give more than 0"),
        (["--sample", "--top-p", "1.5"], "--top-p is 1.5: give more than 0 and at most 1"),
        (["--seed", "-1"], "--seed is -1: give 0 or more"),
        (["--min-strength", "-1"], "--min-strength is -1: give 0 or more"),
        (["--min-strength", "nan"], "--min-strength is nan: give 0 or more"),
        (["--concept", "whael"], "did you mean 'whale'?"),
        (["--concept", "automobile"], "the nearest in meaning is 'car'"),
        (["--stop-on", "region"], "'region' is two concepts of wordnet-smollm2-135m: 'region (part)' (the extended sp"),
        (["--stop-on", "region:2"], "'region (area)' (a large indefinite location on the surface of the Earth)"),
        (["--stop-on", "whael"], "no concept 'whael', did you mean 'whale'?"),
        (["--stop-on", "whael:2"], "no concept 'whael', did you mean 'whale'?"),
        (
            ["--stop-on", "whale:above=1"],
            "--stop-on whale:above=1: above=1 is not a score: give one from 0 to under 1\n",
        ),
        (
            ["--stop-on", "whale:above=134", "--aggregate", "z:last:16"],
            "above=134 is not a score on z:last:16: give one from 0 to under 133.084",
        ),
        (["--stop-on", "whale:above=high"], "--stop-on whale:above=high: 'high' is not a number"),
        (["--stop-on", "whale:abc"], "--stop-on whale:abc: 'abc' is not a number; give a strength, or above=SCORE"),
        (["--stop-on", "whael:abc"], "no concept 'whael', did you mean 'whale'?"),
        (["--prompt", "whale " * 9000], "tokens, and the model reads at most 8,192: shorten it"),
        (["--stop-on", "whale:nan"], "no score is nan over its threshold: give a lower strength"),
        (["--stop-on", "whale:over=2"], "--stop-on whale:over=2: over= is not known here; give a strength, or above="),
        (["--out", "README.md"], "--out README.md exists: give another name"),
        (["--out", "nowhere/scores.jsonl"], "nowhere is not a folder"),
        (["--deployment", "examples/watch.yaml"], "PACK belongs in the deployment file"),
        (["--dtype", "float12"], "dtype is 'float12': give one of auto"),
    ],
)
def test_invalid_option_combination_is_one_line_and_status_2(monkeypatch, capsys, arguments, words):
    monkeypatch.setattr(sys, "argv", ["probemon", "watch", "demo", PACK, *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out, error = capsys.readouterr()
    assert ended.value.code == 2 and not out and error.count("\n") == 1 and words in error


def test_ctrl_c_shows_the_summary_so_far_and_ends_with_130(tmp_path, interruptible):
    arguments = [
        "watch",
        "demo",
        PACK,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "2000",
        "--stop-on",
        "whale:above=0.999",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "probemon.cli", *arguments, "--json", "--out", str(tmp_path / "scores.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        shown = list(itertools.takewhile(lambda line: not TOKEN.match(line), process.stderr))  # until a token is shown
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    finally:
        process.kill()
    lines = "".join([*shown, error]).splitlines()
    assert process.returncode == 130, lines
    answer = json.loads(out)
    assert answer["interrupted"] is True and answer["stopped"] is None and 1 < answer["generated_tokens"] < 1000
    assert "the answer, sentence by sentence" in lines
    assert "interrupted: the text so far is above" in lines
    written = (tmp_path / "scores.jsonl").read_text().splitlines()
    assert len(written) == answer["tokens"] - 1


def test_unseen_tokens_are_reported_at_the_end_and_nothing_if_all_were_seen(tmp_path, monkeypatch, capsys):
    def watched(host):
        monkeypatch.setattr(command, "load_aloud", lambda name, device, dtype: (host, tokenizer()))
        arguments = ["--prompt", "w1 w44 w3", "--max-new-tokens", "6", "--json", "--plain"]
        monkeypatch.setattr(sys, "argv", ["probemon", "watch", "tiny", str(tmp_path / "pack"), *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        out, error = capsys.readouterr()
        lines = [line for line in error.splitlines() if line.startswith(("failed, ", "warning, "))]
        return lines, json.loads(out)["health"]

    host = make_model()
    make_pack(tmp_path / "pack", host)
    lines, health = watched(host)
    assert lines == [] and health["ok"] and len(health["checks"]) == 8
    # Seen once, then no longer: weights that overflow in the middle of a generation.
    host.model.layers[0].register_forward_hook(
        lambda module, args, output: output if output.shape[1] > 1 else output * float("nan")
    )
    lines, health = watched(host)
    assert len(lines) == 1 and "5 of 8 tokens cannot be scored (hidden state is not finite: 5)" in lines[0]
    assert not health["ok"]
