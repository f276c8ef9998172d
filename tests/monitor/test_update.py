"""An update of what is watched takes effect whole, from one token on, as a replaying oracle shows."""

import json
import re
import threading

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from conftest import make_model, make_pack
from deployed import GREEDY, PROMPT, text_of, with_pack, written
from probemon import DynamicProbeManager
from probemon.errors import ConfigError, DeploymentError, UnknownConcept, UnsupportedDecoding
from probemon.monitor.rule_spec import RuleSpec
from tapped_states import states_of

RECORD = {"action": lambda event: None}
PARTS = [  # of each state: what is excluded, always on, and the rules as (concept, above, tokens in a row)
    ([], ["c11"], [("c9", 0.2, 2), ("c3", 0.1, 1)]),
    (["c3", "c26"], [], [("c9", 0.2, 2), ("c2", 0.3, 3)]),
    (["c2"], ["c12"], []),
    ([], [], [("c9", 0.2, 2), ("c9", 0.2, 2)]),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_pack(tmp_path_factory.mktemp("deployed"))


def rules_of(part):
    return [{"concept": concept, "above": above, "for_tokens": n, **RECORD} for concept, above, n in part[2]]


def replayed(manager, hidden, n_prompt, changes):
    """Scores and events of one row, token by token, by plans and rules of the state that holds there."""
    retained, streaks, events, scores, sites = None, {}, [], [], manager.pack.sites
    for t in range(len(hidden)):
        part = PARTS[max(number for column, number in changes if column <= t)]
        probes = [manager.pack.find(concept) for concept, *_ in part[2]]
        plan = manager.plan_with(probes, part[0], part[1])
        before = None
        if t >= n_prompt:
            before = retained if plan.watched is None else retained & plan.watched
        inputs = manager.engine.inputs({sites[0]: hidden[t : t + 1]})
        found, retained = manager.evaluate(plan, inputs, before, np.arange(1))
        scores.append(found)
        if t < n_prompt:
            continue
        held, met = {}, {}
        for concept, above, n in part[2]:
            which = (concept, above, n, met.setdefault((concept, above, n), 0))  # the same rule may stand twice
            met[concept, above, n] += 1
            score = dict(zip(found.active(0).tolist(), found.active_scores(0).tolist(), strict=True))[
                manager.pack.find(concept)
            ]
            held[which] = streaks.get(which, 0) + 1 if score > above else 0
            if held[which] == n:
                events.append((concept, t, score))
        streaks = held
    return scores, events


@pytest.mark.parametrize("arena", ["resident", "paged"])
def test_updates_equal_a_replay(folder, arena):
    model = make_model()
    manager = DynamicProbeManager(folder / "pack", keep_top_k=5, always_on=["c11"])
    if arena == "paged":
        n_bytes = manager.pack.weight_bytes() * 30 // 40
        manager = DynamicProbeManager(folder / "pack", keep_top_k=5, always_on=["c11"], arena_bytes=n_bytes)
    numbers, n_prompt = [], PROMPT.shape[1]
    with manager.attach(model) as run:
        for rule in rules_of(PARTS[0]):
            run.on(rule.pop("concept"), **rule)

        def change(placed, scores):
            if placed.columns[0] in (7, 10, 14):
                exclude, always_on, _ = part = PARTS[len(numbers) + 1]
                numbers.append(run.update(exclude=exclude, always_on=always_on, rules=rules_of(part)))

        run.follow(change)
        out = model.generate(PROMPT, **GREEDY)
        events = [(event.concept, event.column, event.score) for event in run.events]
    result = run.result(out)
    assert numbers == [1, 2, 3] and result.watches == ((0, 0, 0), (0, 8, 1), (0, 11, 2), (0, 15, 3))
    assert result.before(9).watches == ((0, 0, 0), (0, 8, 1))
    assert [one.exclude for one in run.watches[1:]] == [("c3", "c26"), ("c2",), ()]
    hidden = states_of(model, out)[0]
    scores, expected = replayed(manager, hidden, n_prompt, [(0, 0), (8, 1), (11, 2), (15, 3)])
    for t, theirs in enumerate(scores):
        assert result.scores.active(t).tolist() == theirs.active(0).tolist(), t
        assert np.allclose(result.scores.active_scores(t), theirs.active_scores(0), atol=1e-5)
        assert result.coverage.excluded[t] == theirs.coverage.excluded[0]
    assert [event[:2] for event in events] == [event[:2] for event in expected] and len(events) >= 3
    assert np.allclose([event[2] for event in events], [event[2] for event in expected], atol=1e-5)


def test_edited_file_applies_from_one_token_on_and_a_bad_one_changes_nothing(folder):
    base = text_of(folder).replace("action: stop", "action: record")
    for kind in ("jsonl", "parquet"):
        base += f"{'' if 'sinks:' in base else 'sinks:'}\n  - {{kind: {kind}, path: told.{kind}, overwrite: true}}"
    better = base.replace("always_on: [c11]", "exclude: [c26]").replace("above: 0.2", "above: 0.1")
    bad = {
        "keep_top_k: 5": ("keep_top_k: 6", r"line \d+: cascade: cascade cannot change while it runs"),
        "concepts: [c9]": ("concepts: [c99]", "has no concept 'c99'"),
        "always_on: [c11]": (
            "exclude: [c9]",
            r"line 11: exclude: c9 has a rule or is always_on, and include, exclude or depth leave it",
        ),
        "on_blind: pass": ("on_blid: pass", "unknown, did you mean"),
    }
    model, manager = make_model(), DynamicProbeManager.from_deployment(written(folder, base))
    with manager.attach(model) as run:
        run.on("c2", above=0.3, action=lambda event: None)

        def reload(placed, scores):
            if placed.columns[0] == 9:
                for old, (new, said) in bad.items():
                    with pytest.raises((DeploymentError, ConfigError), match=said):
                        run.update(written(folder, base.replace(old, new, 1), "edited.yaml"))
                with pytest.raises(UnknownConcept):
                    run.update(exclude=["c99"])
                assert len(run.watches) == 1 and run.deployment.path.name == "watch.yaml"
                run.update(written(folder, better, "edited.yaml"))

        run.follow(reload)
        out = model.generate(PROMPT, **GREEDY)
    assert not run.failures and [one.deployment for one in run.watches] == [
        DynamicProbeManager.from_deployment(folder / name).deployment.sha256 for name in ("watch.yaml", "edited.yaml")
    ]
    first, then = (one.deployment for one in run.watches)
    lines = [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]
    assert [line["deployment"] for line in lines] == [first] * 10 + [then] * (len(lines) - 10)
    assert {line["coverage"].get("excluded", 0) for line in lines[:10]} == {0} != {lines[10]["coverage"]["excluded"]}
    about = json.loads(pq.read_table(folder / "told.parquet").schema.metadata[b"probemon"])
    assert [(one["deployment"], one["position"]) for one in about["deployments"]] == [(first, 0), (then, 10)]
    assert run.result(out).watches[-1] == (0, 10, 1)
    assert run.result(out).deployment == then and run.result(out).before(9).deployment == first
    of_two = run.result(out)
    of_two.watches = (*of_two.watches, (1, 0, 0))  # a row after it that had ended before the file was edited
    assert of_two.deployment == then
    above = {(event.concept, event.above) for event in run.events}
    assert ("c9", 0.1) in above and ("c2", 0.3) in above
    assert yaml.safe_load(better)["exclude"] == list(run.watches[1].exclude)


@pytest.mark.parametrize("n_packs", [1, 2])
def test_added_always_on_concepts_do_not_exceed_the_limit(tmp_path, n_packs):
    """What a row retained gives way: it was kept while there was room for it."""
    parents = [[] if i < 2 else [f"c{i % 2}"] for i in range(30)]
    bias = torch.tensor([-9.0 if i == 1 else 9.0 for i in range(30)])[:, None]  # what is below c1 is never opened
    changes = {
        "concepts": [{"id": f"c{i}", "name": f"c{i}", "parents": above} for i, above in enumerate(parents)],
        "weights": {"w1": torch.zeros(30, 1, 16), "b1": bias},
    }
    pack = make_pack(tmp_path / "pack", make_model(), n=30, rule="independent", **changes)
    packs = pack if n_packs == 1 else {"a": pack, "b": pack}
    manager = DynamicProbeManager(packs, load_threshold=0.5, keep_top_k=14, max_loaded_probes=16)
    model, more = make_model(), [f"{'a:' * (n_packs > 1)}c{i}" for i in range(3, 30, 2)]
    with manager.attach(model) as run:
        run.follow(lambda placed, scores: placed.columns[0] == 9 and run.update(always_on=more))
        out = model.generate(PROMPT, **GREEDY)
    coverage = run.result(out).coverage
    assert not run.failures and run.result(out).watches[-1] == (0, 10, 1)
    assert coverage.active[:-1].tolist() == [16 * n_packs] * (len(out[0]) - 1)
    assert coverage.dropped[:-1].tolist() == [0] * 10 + [14] * (len(out[0]) - 11)
    assert (coverage.active + coverage.dropped + coverage.not_reached)[:-1].tolist() == [30 * n_packs] * len(out[0, 1:])


def test_second_turn_still_reports_what_the_first_watched(folder):
    model, manager = make_model(), DynamicProbeManager(folder / "pack")
    few = {**GREEDY, "max_new_tokens": 4, "return_dict_in_generate": True}
    with manager.attach(model) as run:
        first = model.generate(PROMPT, **few)
        run.update(exclude=["c0"])
        more = torch.cat([first.sequences, PROMPT[:, 1:]], dim=1)
        out = model.generate(more, past_key_values=first.past_key_values, **few)
    result = run.result(out)
    begin = first.sequences.shape[1] - 1  # the last token of a turn is run in the next one
    assert result.watches == ((0, 0, 0), (0, begin, 1))
    assert ((result.coverage.excluded > 0) == (result.position >= begin))[result.coverage.seen].all()


def test_rule_added_between_generations_is_not_reported_for_the_first(folder):
    model, manager = make_model(), DynamicProbeManager(folder / "pack", strategy="descent")
    with manager.attach(model) as run:
        run.on("c2", above=0.5, **RECORD)
        first = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 4})
        run.on("c9", above=0.2, **RECORD)
        second = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 5})
    numbers = [run.result(out).watches[-1][2] for out in (first, second)]
    assert numbers == [0, 1]
    assert [[rule.probe for rule in run.watches[number].rules] for number in numbers] == [
        manager.pack.find_all(["c2"]),
        manager.pack.find_all(["c2"]) + manager.pack.find_all(["c9"]),
    ]


def test_updates_from_another_thread_are_atomic(folder):
    model, manager = make_model(), DynamicProbeManager(folder / "pack")
    wanted = [(["c0"], "c3"), (["c3"], "c0")]  # a mixture would evaluate what is excluded, or raise
    stop = threading.Event()
    with manager.attach(model) as run:

        def change():
            while not stop.is_set():
                for exclude, concept in wanted:
                    run.update(exclude=exclude, rules=[{"concept": concept, "above": 0.0, **RECORD}])

        thread = threading.Thread(target=change)
        thread.start()
        try:
            out = model.generate(PROMPT, **{**GREEDY, "max_new_tokens": 40})
        finally:
            stop.set()
            thread.join()
    result = run.result(out)
    assert len({number for *_, number in result.watches}) > 5
    ends = [*(position for _, position, _ in result.watches[1:]), len(result)]
    for (_, begin, number), end in zip(result.watches, ends, strict=True):
        excluded = {manager.pack.find(concept) for concept in run.watches[number].exclude or ()}
        for t in range(begin, end):
            assert not excluded & set(result.scores.active(t).tolist())


def test_invalid_update_is_refused(folder):
    model, manager = make_model(), DynamicProbeManager(folder / "pack")
    with manager.attach(model) as run:
        for arguments, said in (
            ({}, "update() needs at least one of"),
            ({"rules": [{"above": 0.2}]}, "concept is missing"),
            ({"rules": [{"concept": "c1", "abov": 0.2}]}, "a rule has no 'abov', did you mean 'above'"),
            ({"rules": "c1"}, "rules is 'c1': give a list of dicts"),
            ({"deployment": written(folder, text_of(folder))}, "began without a deployment"),
            ({"exclude": [f"c{i}" for i in range(4)]}, "nothing would ever be scored"),
        ):
            with pytest.raises(ConfigError, match=re.escape(said)):
                run.update(**arguments)
        run.follow(lambda placed, scores: run.update(rules=[{"concept": "c3", "above": 0.1, "action": "stop"}]))
        model.generate(PROMPT, num_beams=2, **{**GREEDY, "max_new_tokens": 2})
        assert isinstance(run.failures[0], UnsupportedDecoding) and len(run.watches) == 1
        run._failures.errors.clear()
        run._failures.n_errors = 0
    assert RuleSpec("c3", above=0.1, for_tokens=1, aggregate=None, action="stop").rules(manager.pack)


def test_stop_added_while_beams_begin_is_an_error(folder):
    model, manager = make_model(), DynamicProbeManager(folder / "pack")
    with manager.attach(model) as run:
        late = RuleSpec("c9", above=0.0, action="stop").rules(manager.pack)
        # Past the check of run.update, as where the beams begin between that and the change.
        run.follow(lambda placed, scores: run._watches.change(late) if placed.phase == 0 else None)
        with pytest.raises(UnsupportedDecoding, match="a stop cannot end one beam"):
            model.generate(PROMPT, num_beams=2, **GREEDY)
