"""A latency budget: over it, levels of degradation leave out probes that have no rule, and come back later.

Time is a clock of the test's own, so that every step says what it took.
"""

import types
from pathlib import Path

import numpy as np
import pytest
import torch

import grouped_packs
from conftest import PAD, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.errors import ConfigError
from probemon.monitor.degradations import ALL, AUDIT, DEPTH, EVERY, LEFT_OUT, NAMED, NAMES, OFF, SAMPLED
from probemon.ops.budget import DOWN_AFTER, RESUME, UP_AFTER, Budget
from probemon.tracking import decoder_hooks
from probemon.tracking.source_reports import ForwardTime
from tapped_states import states_of

PROMPT = torch.tensor([[1, 5, 9, 13, 7]])
GREEDY = {"do_sample": False, "pad_token_id": PAD, "eos_token_id": None}


@pytest.fixture
def clock(monkeypatch):
    """`clock.seconds` pass only where the test says so."""
    clock = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(decoder_hooks, "time", types.SimpleNamespace(perf_counter=lambda: clock.seconds))
    return clock


def slowed(run, clock, seconds):
    """Let `run` take `seconds()` of the clock in every forward."""

    def wait(placed, scores):
        clock.seconds += seconds()

    run.follow(wait)


def generate(model, n):
    return model.generate(PROMPT, max_new_tokens=n, **GREEDY)


def degradations_of(run, result):
    """The degradation of every position of an output's first row."""
    number = np.zeros(len(result), dtype=int)
    for _, position, at in result.watches:
        number[position:] = at
    return [run.watches[at].degradation for at in number.tolist()]


def managers(folder, model, kind):
    if kind == "several packs":
        packs = {
            "one": make_pack(folder / "one", model, rule="independent"),
            "two": make_pack(folder / "two", model, n=25, seed=3, rule="independent"),
        }
        return DynamicProbeManager(packs, keep_top_k=5)
    rule = "path" if kind.startswith("path") else "independent"
    if kind.endswith("softmax groups"):
        return DynamicProbeManager(
            grouped_packs.write(folder / "pack", (), torch.float32, rule), keep_top_k=5, audit_rate=0.5
        )
    pack = make_pack(folder / "pack", model, rule=rule)
    options = {"arena_bytes": pack.weight_bytes() * 3 // 4} if kind == "paged" else {}
    impl = {"impl": "cpu"} if kind == "cpu" else {}
    return DynamicProbeManager(pack, keep_top_k=5, audit_rate=0.5, **options, **impl)


KINDS = ["path", "independent", "paged", "cpu", "several packs", "independent, softmax groups", "path, softmax groups"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_degradation_level_leaves_out_what_it_names_and_nothing_else(tmp_path, clock, kind):
    model = make_model()
    manager = managers(tmp_path, model, kind)
    pack, name = manager.pack, "one:c14" if kind == "several packs" else "c12" if "groups" in kind else "c14"
    always = pack.find(name)
    with manager.attach(model, followers=[Budget(ms=1.0)]) as run:
        run.update(always_on=[name])
        slowed(run, clock, lambda: 0.010)
        out = generate(model, 60)
    result = run.result(out)
    degradations, coverage = degradations_of(run, result), result.coverage
    expected = [DEPTH, NAMED, SAMPLED, OFF] if kind == "several packs" else [AUDIT, DEPTH, NAMED, SAMPLED, OFF]
    assert list(dict.fromkeys(degradations)) == [ALL, *expected] and run.watching.degradation_name == "off"
    assert [degradations.count(degradation) for degradation in expected[:-1]] == [DOWN_AFTER] * len(expected[:-1])
    everything = manager.score_all(states_of(model, out)[0]).numpy()
    groups = {pack.find(f"c{i}"): group for i, group in enumerate(grouped_packs.GROUPS)} if "groups" in kind else {}

    def needed(probes):
        """With the parents of each by the path rule, and with the members of their groups."""
        more = set(probes)
        for probe in probes:
            more |= {int(parent) for parent in pack.tree.parents(probe)} if kind.startswith("path") else set()
            more |= {mate for mate, group in groups.items() if group == groups.get(probe, -1) != -1}
        return more if more == set(probes) else needed(more)

    named, inner = needed({always}), {probe for probe in range(pack.n_probes) if len(pack.tree.children(probe))}
    start = set(np.flatnonzero(manager.plan_with([name]).always).tolist())
    kept = needed(inner | start)
    n_shed = {ALL: 0, AUDIT: 0, DEPTH: pack.n_probes - len(kept), NAMED: pack.n_probes - len(named)}
    for t, degradation in enumerate(degradations[:-1]):
        seen = degradation < SAMPLED or (degradation == SAMPLED and t % EVERY == 0)
        assert coverage.unseen[t] == ("" if seen else LEFT_OUT[degradation]), t
        if not seen:
            assert len(result.scores.active(t)) == 0 == coverage.shed[t]
            continue
        active = result.scores.active(t)
        assert coverage.active[t] + coverage.dropped[t] + coverage.not_reached[t] == pack.n_probes
        assert coverage.shed[t] == n_shed[min(degradation, NAMED)] <= coverage.not_reached[t]
        assert np.allclose(result.scores.active_scores(t), everything[t, active], atol=1e-5)
        assert always in active
        if degradation == DEPTH:
            assert set(active.tolist()) <= kept
        elif degradation >= NAMED:
            assert set(active.tolist()) == named
        if degradation >= AUDIT:
            assert coverage.audited[t] == 0
    if kind != "several packs":
        assert coverage.audited.sum() > 0
    told = {NAMES[degradation]: degradations.count(degradation) for degradation in (ALL, *expected)}
    told["off"] -= 1  # the last token, which the host never runs
    assert dict(run.follower(Budget).tokens) == told


def test_depth_level_scores_as_a_pack_without_its_leaves(tmp_path, clock):
    model = make_model()
    manager = DynamicProbeManager(make_pack(tmp_path / "pack", model), keep_top_k=5)
    pack = manager.pack
    start = set(np.flatnonzero(manager.plan.always).tolist())
    leaves = [pack.concepts[p]["id"] for p in range(pack.n_probes) if not len(pack.tree.children(p)) and p not in start]
    narrow = DynamicProbeManager(pack, keep_top_k=5, exclude=leaves)
    ladder = Budget(ms=1.0)
    ladder.degradation = DEPTH
    with manager.attach(model, followers=[ladder]) as run, narrow.attach(model) as other:
        out = generate(model, 12)
    result, same = run.result(out), other.result(out)
    assert result.coverage.shed[0] == len(leaves) == same.coverage.excluded[0] > 0
    for t in range(len(result) - 1):
        assert result.scores.active(t).tolist() == same.scores.active(t).tolist()
        assert result.scores.active_scores(t).tolist() == same.scores.active_scores(t).tolist()


def test_probes_with_rules_are_never_left_out(tmp_path, clock):
    model, manager = make_model(), DynamicProbeManager(make_pack(tmp_path / "pack", make_model()), audit_rate=1)
    events = []
    for budget in (None, Budget(ms=1.0)):
        with manager.attach(model, followers=[budget] if budget else []) as run:
            run.on(["c9", "c10", "c26"], above=0.2, for_tokens=2, action="record")
            slowed(run, clock, lambda: 0.010)
            out = generate(model, 80)
        events.append([(event.concept, event.column, event.score) for event in run.events])
    result = run.result(out)
    assert events[0] == events[1] and len(events[0]) > 3
    assert set(degradations_of(run, result)) == {ALL, AUDIT, DEPTH, NAMED} and run.watching.degradation_name == "named"
    assert not any(result.coverage.unseen[:-1])
    assert {result.scores.active(t).size for t in range(len(result) - 2, len(result) - 1)} == {
        int(manager.plan_with(["c9", "c10", "c26"]).named.sum())
    }
    check = run.health().checks[-1]
    assert check.name == "budget" and check.state == "warning" and "nothing more may be left out" in check.what


def test_degradation_ends_when_steps_are_fast_again(tmp_path, clock):
    model = make_model()
    slow = {"seconds": 0.010}
    with DynamicProbeManager(make_pack(tmp_path / "pack", model), audit_rate=1).attach(
        model, followers=[Budget(ms=1.0)]
    ) as run:
        slowed(run, clock, lambda: slow["seconds"])
        first = generate(model, 60)
        slow["seconds"] = 0.0005
        then = [generate(model, 100), generate(model, 100)]
        assert run.watching.degradation_name == "all" and run.health().checks[-1].state == "ok"
    degradations = [degradations_of(run, run.result(first))] + [degradations_of(run, run.result(out)) for out in then]
    assert degradations[0].index(OFF) - PROMPT.shape[1] <= 50
    back = [degradation for part in degradations[1:] for degradation in part[PROMPT.shape[1] : -1]]
    assert back.index(ALL) <= 200 and list(dict.fromkeys(back)) == [OFF, SAMPLED, DEPTH, AUDIT, ALL]
    assert "less was scored than is watched" in run.health().checks[-1].what


class Steps:
    """A ladder whose steps take what they are said to."""

    def __init__(self, tmp_path, budget):
        model = make_model()
        self.run = DynamicProbeManager(make_pack(tmp_path / "pack", model), audit_rate=1).attach(
            model, followers=[budget]
        )
        self.run.__enter__()
        self.shedding = self.run.followers[-1]

    def take(self, n, inside, host=0.0, prompt=False):
        for _ in range(n):
            self.shedding.forward(ForwardTime(inside, inside + host, 5 * prompt, not prompt))
        return self.run.watching.degradation_name


def test_budget_allows_the_larger_of_ms_and_share_and_ignores_prompts(tmp_path):
    steps = Steps(tmp_path, Budget(ms=1.0, share=0.1))
    assert steps.take(100, inside=0.002, host=0.021) == "all"  # 2.1 ms are allowed
    assert steps.take(100, inside=9.0, prompt=True) == "all"
    assert steps.take(100, inside=0.0009, host=0.0) == "all"  # 1 ms is
    assert steps.take(1, inside=0.1) == "audit"  # one that is far over moves the mean over it
    assert steps.take(DOWN_AFTER - 1, inside=0.0021, host=0.02) == "audit"
    assert steps.take(1, inside=0.0021, host=0.02) == "depth"


def test_runs_sharing_a_budget_degrade_as_far_as_their_rules_allow(tmp_path, clock):
    model, manager = make_model(), DynamicProbeManager(make_pack(tmp_path / "pack", make_model()), audit_rate=1)
    ladder, slow = Budget(ms=1.0), {"seconds": 0.010}
    with manager.attach(model, followers=[ladder]) as run:
        slowed(run, clock, lambda: slow["seconds"])
        generate(model, 50)
        assert run.watching.degradation_name == "off"
    with manager.attach(model, followers=[ladder]) as ruled:
        ruled.on("c9", above=0.2, action="record")
        slowed(ruled, clock, lambda: slow["seconds"])
        out = generate(model, 6)
        assert ruled.watching.degradation_name == "named" and ladder.degradation == OFF
        assert ruled.result(out).coverage.unseen[:-1].count("") == len(out[0]) - 1
        slow["seconds"] = 0.0
        generate(model, UP_AFTER + DOWN_AFTER)
        assert ladder.degradation < NAMED  # what holds for one holds for all
    with manager.attach(model, followers=[ladder]) as third:
        assert third.watching.degradation_name == NAMES[ladder.degradation]


def test_rules_added_to_a_degraded_run_restore_what_they_watch(tmp_path):
    manager, ladder = DynamicProbeManager(make_pack(tmp_path / "pack", make_model(), n=4)), Budget(ms=1.0)
    ladder.degradation = OFF  # by another run, say
    with manager.attach(make_model(), followers=[ladder]) as run:
        run.on(["c0", "c1", "c2", "c3"], above=0.2, action="record")  # all that there is: nothing may be left out
        generate(run.model, 1)
    assert run.watching.degradation_name == "all" and [len(one.rules) for one in run.watches] == [4]


def test_step_time_between_both_limits_changes_no_level(tmp_path):
    steps = Steps(tmp_path, Budget(ms=1.0))
    assert steps.take(DOWN_AFTER, inside=0.002) == "audit"
    assert steps.take(500, inside=0.0008) == "audit"
    assert steps.take(UP_AFTER, inside=0.0001) == "all"


def test_updated_rules_keep_the_degradation_level_they_allow(tmp_path):
    steps = Steps(tmp_path, Budget(ms=1.0))
    assert steps.take(5 * DOWN_AFTER, inside=0.01) == "off"
    steps.run.update(rules=[{"concept": "c9", "above": 0.5, "action": "record"}])
    assert steps.run.watching.degradation_name == "named"
    steps.run.update(rules=[], exclude=["c3"])
    assert steps.run.watching.degradation_name == "off" and steps.run.watches[-1].exclude == ("c3",)


def test_documented_degradation_steps_match_the_constants():
    page = " ".join((Path(__file__).parents[3] / "docs/deployment.md").read_text(encoding="utf-8").split())
    assert (
        f"After {DOWN_AFTER} steps at a level" in page
        and f"After {UP_AFTER} steps, if it is under {RESUME:.0%}".replace("%", " %") in page
    )
    assert [name for name in NAMES if f"| {NAMES.index(name)} | {name} |" in page] == list(NAMES)


@pytest.mark.parametrize(
    ("wrong", "said"), [({}, "neither ms nor share"), ({"ms": 0}, "ms is 0"), ({"share": -1}, "share is -1")]
)
def test_budget_without_a_positive_limit_is_refused(wrong, said):
    with pytest.raises(ConfigError, match=said):
        Budget(**wrong)
