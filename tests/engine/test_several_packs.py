"""Several packs in one manager score as each does alone, bit for bit, and share the work."""

import json
import os
from collections import Counter

import numpy as np
import pytest
import torch
from test_arena import same
from typer.testing import CliRunner

from conftest import HIDDEN, PAD, make_model, make_pack, n_hooks
from corpora import make_tokenizer, random_texts
from nets import weights
from probemon import DynamicProbeManager
from probemon.cli.app import app
from probemon.core.hierarchy import ConceptTree
from probemon.core.inputs import prepare_input
from probemon.core.scores import COUNTS
from probemon.engine import pairs as scoring
from probemon.engine.choice import Trial
from probemon.engine.memory.arena import PagedArena
from probemon.errors import ArenaFull, ConfigError, ModelMismatch, UnknownConcept, UnknownSetting
from probemon.lab.corpora.analysis_folder import Analysis
from probemon.lab.corpora.analyze import analyze
from probemon.lab.corpora.windows import Reading, Window
from probemon.packs.group import PackGroup

# name: rule, sites, hidden layers, probes. "c" and "d" are of one architecture, as are "a" and "e".
KINDS = {
    "a": ("path", ("resid_post.1",), (5,), 40), "b": ("independent", ("resid_post.0",), (), 23),
    "c": ("path", ("resid_post.2", "resid_post.1"), (6, 4), 17),
    "d": ("independent", ("resid_post.1", "resid_post.2"), (6, 4), 29),
    "e": ("path", ("resid_post.1", "resid_post.0"), (5,), 31),
}  # fmt: skip
SITES = ("resid_post.0", "resid_post.1", "resid_post.2")
SETTINGS = {
    "as recommended": {},
    "few slots": {"max_loaded_probes": 12, "load_threshold": 0.1},
    "pruned": {"keep_top_k": 3, "max_rounds": 1},
    "pure": {"keep_top_k": 0, "base_layers": [0, 1]},
    "a part": {"exclude": ["*c1", "*c7"], "depth": {"*c2": 1, "*c*3": 2}},
}
BATCH = torch.tensor([[1, 5, 9, 13, 7], [PAD, PAD, 1, 6, 8], [PAD, 1, 3, 11, 12]])
GREEDY = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": PAD}


@pytest.fixture(scope="module")
def packs(model, tmp_path_factory):
    """Packs by dtype and name, each written once."""
    made = {}

    def of(dtype=torch.float32, names="abcde", n=None):
        for i, name in enumerate(KINDS):
            if (dtype, name, n) not in made and name in names:
                rule, sites, hidden, size = KINDS[name]
                size = n or size
                made[dtype, name, n] = make_pack(
                    tmp_path_factory.mktemp("packs") / name,
                    model,
                    name=name,
                    rule=rule,
                    sites=sites,
                    n=size,
                    seed=i,
                    weights=weights(hidden, HIDDEN, dtype, size, i),
                    alert_threshold=torch.rand(size, generator=torch.Generator().manual_seed(i)) / 2 + 0.2,
                    recommended={"keep_top_k": 6 + i, "report_top_k": 3 + i},
                )
        return [made[dtype, name, n] for name in names]

    return of


def random_states(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {site: torch.randn(n, HIDDEN, generator=generator) * 2 for site in SITES}


def only(pack, hidden):
    return {site: hidden[site] for site in pack.sites}


def part(group, scores, i):
    """Of pack i: state, own number, score and whether it fired of every active probe."""
    own = np.full(group.n_probes, -1)
    own[group.numbers[i]] = np.arange(len(group.numbers[i]))
    mine = own[scores.probes] >= 0
    return scores.state_of[mine], own[scores.probes[mine]], scores.values[mine], scores.fired_mask[mine]


def check(group, scores, alone):
    """`scores` of the group hold those of each pack alone, in the same bits, and nothing else."""
    for i, theirs in enumerate(alone):
        for mine, other in zip(
            part(group, scores, i), (theirs.state_of, theirs.probes, theirs.values, theirs.fired_mask), strict=True
        ):
            assert np.array_equal(mine, other)
    assert len(scores.probes) == sum(len(theirs.probes) for theirs in alone)
    for name in COUNTS:
        assert np.array_equal(
            getattr(scores.coverage, name), sum(getattr(theirs.coverage, name) for theirs in alone)
        ), name
    cover = scores.coverage
    assert ((cover.active + cover.dropped + cover.not_reached)[cover.seen] == group.n_probes).all()
    assert all((np.diff(scores.probes[scores.ptr[t] : scores.ptr[t + 1]]) > 0).all() for t in range(len(scores)))


def stepped(together, alone, n_steps=5, n_rows=2):
    """Steps of rows, then a document, then every score: all compared."""
    group, state, states = together.pack, None, [None] * len(alone)
    n_dropped = 0
    for step in range(n_steps):
        hidden = random_states(n_rows, seed=step)
        state, scores = together.step(state, hidden)
        found = [manager.step(own, only(manager.pack, hidden)) for manager, own in zip(alone, states, strict=True)]
        states = [own for own, _ in found]
        check(group, scores, [scores for _, scores in found])
        for number, own in zip(group.numbers, states, strict=True):
            assert np.array_equal(state.retained[:, number], own.retained)
        n_dropped += int(scores.coverage.dropped.sum())
    hidden = random_states(20, seed=99)
    check(
        group,
        together.score_tokens(hidden, prompt_len=17),
        [manager.score_tokens(only(manager.pack, hidden), prompt_len=17) for manager in alone],
    )
    everything = together.score_all(hidden)
    for number, manager in zip(group.numbers, alone, strict=True):
        assert torch.equal(everything[:, number], manager.score_all(only(manager.pack, hidden)))
    return n_dropped


# -- each as alone -------------------------------------------------------------------------------


CASES = [(impl, torch.float32, settings) for impl in ("reference", "numba") for settings in SETTINGS] + [
    ("cpu", torch.float32, "few slots"),
    ("cpu", torch.bfloat16, "as recommended"),
    ("cpu", torch.int8, "pruned"),
    ("numba", torch.bfloat16, "few slots"),
    ("numba", torch.int8, "as recommended"),
    ("reference", torch.bfloat16, "pruned"),
    ("reference", torch.int8, "few slots"),
]


@pytest.mark.parametrize("impl, dtype, settings", CASES, ids=str)
def test_each_pack_scores_as_it_does_alone(packs, impl, dtype, settings):
    chosen, more = packs(dtype), SETTINGS[settings]
    strategy = "exhaustive" if settings == "pruned" else "descent"
    together = DynamicProbeManager(chosen, impl=impl, strategy=strategy, **more)
    alone = [DynamicProbeManager(pack, impl=impl, strategy=strategy, **more) for pack in chosen]
    n_dropped = stepped(together, alone)
    assert (n_dropped > 0) == (settings == "few slots")


@pytest.mark.parametrize("names, strategy", [("ae", "descent"), ("be", "descent"), ("cd", "exhaustive")])
def test_packs_in_tritons_interpreter_score_as_alone(packs, names, strategy):
    chosen = packs(names=names, n=6)
    together, *alone = (
        DynamicProbeManager(pack, impl="triton", strategy=strategy, keep_top_k=2) for pack in (chosen, *chosen)
    )
    state, states = None, [None, None]
    for step in range(2 if strategy == "descent" else 1):
        hidden = random_states(1, seed=step)
        state, scores = together.step(state, hidden)
        found = [manager.step(own, only(manager.pack, hidden)) for manager, own in zip(alone, states, strict=True)]
        states = [own for own, _ in found]
        check(together.pack, scores, [scores for _, scores in found])
        assert all(
            np.array_equal(state.retained[:, number], own.retained)
            for number, own in zip(together.pack.numbers, states, strict=True)
        )
    if strategy == "descent":
        assert all(len(engine.on_device._by_plan) == 1 for engine in together.engine.engines)


@pytest.mark.parametrize("impl", ["cpu", "numba"])
@pytest.mark.parametrize("share", [0.45, 0.8])
def test_paged_packs_score_as_alone_within_the_shared_bytes(packs, impl, share):
    chosen = packs()
    total = sum(pack.weight_bytes() for pack in chosen)
    together = DynamicProbeManager(chosen, impl=impl, arena_bytes=int(total * share), cache_bytes=3000, prefetch=0.2)
    stepped(together, [DynamicProbeManager(pack, impl=impl, strategy="descent") for pack in chosen])
    together.arena.check_integrity()
    held = sum(
        tensor.numel() * tensor.element_size() for arena in together.arena.arenas for tensor in arena.weights.values()
    )
    assert len(together.arena.arenas) == 3 and all(isinstance(arena, PagedArena) for arena in together.arena.arenas)
    assert 0.8 * total * share < held <= total * share
    assert together.arena.stats().misses > 0 and together.arena.stats().evictions > 0


def test_packs_may_have_different_strategies_that_can_be_given_again(packs, monkeypatch):
    chosen = packs(names="abd")
    monkeypatch.setattr(
        Trial,
        "_faster",
        lambda self, plan, inputs: ("exhaustive" if self.pack.name == "b" else "descent", "as the test says"),
    )
    together = DynamicProbeManager(chosen, impl="cpu")
    assert (together.strategy.step, together.strategy.batch) == ("descent+exhaustive+descent",) * 2
    assert together.strategy.why.count("golden") == 3 and together.strategy.why.startswith("a: measured")
    alone = [
        DynamicProbeManager(pack, impl="cpu", strategy=way)
        for pack, way in zip(chosen, ("descent", "exhaustive", "descent"), strict=True)
    ]
    stepped(together, alone, n_steps=2)
    again = DynamicProbeManager(chosen, impl="cpu", strategy=together.strategy.step)
    assert [engine.choice.step for engine in again.engine.engines] == ["descent", "exhaustive", "descent"]
    with pytest.raises(ConfigError, match="names 2 strategies, there are 3 packs"):
        DynamicProbeManager(chosen, strategy="descent+exhaustive")


def test_late_weights_are_counted_and_then_scores_are_as_alone(packs):
    chosen = packs(names="ace")
    total = sum(pack.weight_bytes() for pack in chosen)
    together = DynamicProbeManager(chosen, impl="cpu", arena_bytes=int(total * 0.9), late=True)
    alone = [DynamicProbeManager(pack, impl="cpu", strategy="descent") for pack in chosen]
    hidden = random_states(2)
    _, first = together.step(None, hidden)
    cover = first.coverage
    assert (
        cover.late.sum() > 0
        and (cover.late <= cover.dropped).all()
        and (cover.active + cover.dropped + cover.not_reached == together.pack.n_probes).all()
    )
    for _ in range(6):
        for fetcher in {engine.scorer.fetcher for engine in together.engine.engines}:
            fetcher.wait()
        _, scores = together.step(None, hidden)
    check(together.pack, scores, [manager.step(None, only(manager.pack, hidden))[1] for manager in alone])
    assert together.engine.background_errors() == []


def test_state_unreadable_for_one_pack_is_unseen_for_all(packs):
    chosen = packs(names="ab")
    for impl in ("cpu", "numba"):
        together = DynamicProbeManager(chosen, impl=impl, strategy="descent")
        state, _ = together.step(None, random_states(3))
        hidden = random_states(3, seed=1)
        hidden["resid_post.0"][1, 4] = float("inf")  # only "b" reads it
        after, scores = together.step(state, hidden)
        assert scores.coverage.unseen == ("", "hidden state is not finite", "")
        assert (
            all(getattr(scores.coverage, name)[1] == 0 for name in (*COUNTS, "not_reached"))
            and len(scores.active(1)) == 0
        )
        assert np.array_equal(after.retained[1], state.retained[1]) and state.retained[1].any()
        rows = {site: x[[0, 2]] for site, x in hidden.items()}
        before = type(state)(state.retained[[0, 2]])
        rest, others = together.step(before, rows)
        assert same(others, scores.take(np.array([0, 2]))) and np.array_equal(rest.retained, after.retained[[0, 2]])
        prompt = together.score_tokens(hidden)
        assert prompt.coverage.n_unseen == 1 and together.score_all(hidden)[1].isnan().all()


# -- the work is shared --------------------------------------------------------------------------


def counted(monkeypatch, manager, act):
    """How often the kernel was called while `act()` ran, by the arena's width of the first layer."""
    calls, kernel = Counter(), scoring.score_probes

    def count(hidden, weights, rows, slots, *, impl):
        calls[tuple(weights["w1"].shape[1:]), "w2" in weights] += 1
        return kernel(hidden, weights, rows, slots, impl=impl)

    with monkeypatch.context() as patch:
        patch.setattr(scoring, "score_probes", count)
        act()
    return calls


@pytest.mark.parametrize("case", ["paged", "triton"])
def test_one_kernel_call_per_architecture_and_round(packs, monkeypatch, case):
    """As many as the pack of that architecture that goes deepest needs alone; for all probes at once, one."""
    names = "abcde" if case == "paged" else "ae"
    chosen = packs(names=names, n=None if case == "paged" else 6)
    more = (
        {"impl": "reference", "arena_bytes": sum(pack.weight_bytes() for pack in chosen) - 1}
        if case == "paged"
        else {"impl": "triton", "strategy": "descent"}
    )
    together = DynamicProbeManager(chosen, load_threshold=0.2, **more)
    alone = [DynamicProbeManager(pack, load_threshold=0.2, impl=more["impl"], strategy="descent") for pack in chosen]
    hidden = random_states(17 if case == "paged" else 1)
    if case == "triton":
        monkeypatch.setattr("probemon.engine.engine._FEW", 1)  # no row goes by the device's own path
    else:
        together.score_tokens(hidden), together.score_tokens(hidden)  # what is paged is there now
    found = counted(monkeypatch, together, lambda: together.score_tokens(hidden))
    needed = [
        counted(monkeypatch, manager, lambda manager=manager: manager.score_tokens(only(manager.pack, hidden)))
        for manager in alone
    ]
    assert found == {kind: max(calls[kind] for calls in needed) for kind in set().union(*needed)} and max(
        found.values()
    ) > (2 if case == "paged" else 1)
    if case == "triton":
        exhaustive = DynamicProbeManager(chosen, impl="triton", strategy="exhaustive")
        for act in (
            lambda: exhaustive.score_tokens(hidden),
            lambda: exhaustive.score_all(hidden),
            lambda: exhaustive.step(None, hidden),
        ):
            assert list(counted(monkeypatch, exhaustive, act).values()) == [1]


def test_shared_inputs_of_packs_are_prepared_once(packs, monkeypatch):
    chosen, made = packs(names="abcde"), []

    def prepare(hidden, spec, dtype):
        made.append((spec.site, spec.norm, dtype))
        return prepare_input(hidden, spec, dtype)

    monkeypatch.setattr("probemon.core.inputs.prepare_input", prepare)
    together = DynamicProbeManager(chosen, impl="cpu", strategy="descent")
    together.step(None, random_states(2))
    assert sorted(made) == [(site, "rmsnorm", torch.float32) for site in SITES]


def test_resident_weights_stay_memory_mapped(packs):
    chosen = packs()
    for impl in ("cpu", "reference", "numba"):
        together = DynamicProbeManager(chosen, impl=impl, strategy="descent")
        for pack, engine in zip(chosen, together.engine.engines, strict=True):
            assert engine.arena.weights["w1"].data_ptr() == pack.weights["w1"].data_ptr()


def test_packs_of_one_architecture_share_an_arena_checked_by_pack(model, packs, tmp_path):
    sound = packs(names="a", n=12)[0]
    damaged = weights((5,), HIDDEN, torch.float32, 12, seed=3)
    other = make_pack(tmp_path / "f", model, name="f", n=12, weights=damaged)
    together = DynamicProbeManager([sound, other], impl="triton", strategy="exhaustive")
    [arena] = together.arena.arenas
    arena.check_integrity()
    assert len(arena.weights["w1"]) == 24 and torch.equal(arena.weights["b3"][12:], other.weights["b3"])
    arena.weights["w1"][13, 0, 0] += 1
    with pytest.raises(AssertionError, match="w1"):
        arena.check_integrity()


# -- a run ---------------------------------------------------------------------------------------


def watched(model, chosen, generate, **settings):
    """The result of what `generate()` returns, for one manager."""
    manager = DynamicProbeManager(chosen, impl="cpu", strategy="descent", **settings)
    with manager.attach(model) as run:
        out = generate()
    return manager, run.result(out), out


def compare_results(model, chosen, generate, **settings):
    manager, result, out = watched(model, chosen, generate, **settings)
    alone = [watched(model, pack, generate, **settings) for pack in chosen]
    assert all(
        torch.equal(getattr(out, "sequences", out), getattr(theirs, "sequences", theirs)) for *_, theirs in alone
    )
    for _, theirs, _ in alone:
        assert (
            np.array_equal(result.row, theirs.row)
            and np.array_equal(result.position, theirs.position)
            and result.coverage.unseen == theirs.coverage.unseen
        )
    check(manager.pack, result.scores, [theirs.scores for _, theirs, _ in alone])
    return manager, result


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}], ids=str)
def test_one_attach_gives_each_packs_result_with_padding_and_beams(model, packs, options):
    before = n_hooks(model)
    _, result = compare_results(
        model, packs(), lambda: model.generate(BATCH, attention_mask=(BATCH != PAD).long(), **GREEDY, **options)
    )
    assert n_hooks(model) == before and set(result.row) == set(range(3 * options.get("num_return_sequences", 1)))
    assert (result.phase == 0).sum() == (5 + 3 + 4) * options.get("num_return_sequences", 1)


def test_second_turn_on_a_cache_scores_as_each_pack_alone(model, packs):
    def generate():
        first = model.generate(BATCH[:1], return_dict_in_generate=True, **GREEDY)
        more = torch.cat([first.sequences, torch.tensor([[9, 4]])], dim=1)
        return model.generate(more, past_key_values=first.past_key_values, return_dict_in_generate=True, **GREEDY)

    _, result = compare_results(model, packs(names="acd"), generate)
    assert len(result) == 5 + 6 + 2 + 6


def test_results_name_the_pack_of_a_concept(model, packs):
    chosen = packs(names="abc")
    _, result, _ = watched(model, chosen, lambda: model.generate(BATCH[:1], **GREEDY))
    concepts = result.top(1000)
    assert {concept.concept.split(":")[0] for concept in concepts} == {"a", "b", "c"} and concepts == sorted(
        concepts, key=lambda c: -c.strength
    )
    for concept in concepts:
        name, _, own = concept.concept.partition(":")
        pack = chosen["abc".index(name)]
        probe = pack.find(own)
        assert concept.name == f"{name}:{pack.concepts[probe]['name']}" and concept.level == pack.tree.level[probe]
        assert (
            concept.path[0].removeprefix(f"{name}:") == pack.path(probe)[0]
            and list(concept.path[1:]) == pack.path(probe)[1:]
        )
        assert concept.threshold == float(pack.alert_threshold[probe])
    best = concepts[0]
    table = result.to_arrow().to_pylist()
    assert {row["concept"].split(":")[0] for row in table} == {"a", "b", "c"} and len(table) == len(
        result.scores.values
    )
    assert any(
        row["concept"] == best.concept
        and row["position"] == best.position
        and row["score"] == pytest.approx(best.score)
        for row in table
    )
    assert json.loads(result.to_arrow().schema.metadata[b"probemon"])["pack"] == "a + b + c"
    aggregated = result.aggregate(best.concept, "max")
    assert aggregated.values[-1] == pytest.approx(result.scores.column(best.probe)[result.phase == 1][:-1].max())


def test_rules_watch_concepts_of_any_pack_and_events_name_it(model, packs):
    chosen, events = packs(names="ab"), []
    manager = DynamicProbeManager(chosen, impl="cpu", strategy="descent", always_on=["a:c30", "b:concept 20"])
    with manager.attach(model) as run:
        run.on("b:c19", above=0.0, action=events.append)
        run.on("a:concept 39", above=0.0, action=events.append)
        out = model.generate(BATCH[:1], **GREEDY)
    assert [(event.concept, event.name) for event in events[:2]] == [
        ("b:c19", "b:concept 19"),
        ("a:c39", "a:concept 39"),
    ]
    result = run.result(out)
    for name in ("a:c30", "b:c20", "b:c19", "a:c39"):
        assert (result.scores.column(manager.pack.find(name))[result.coverage.seen] > 0).all()
    assert manager.config["a"].always_on == (chosen[0].find("c30"),) and manager.config["b"].always_on == (
        chosen[1].find("c20"),
    )


def test_always_on_concepts_need_room_in_their_architectures_arena(model, packs):
    chosen = packs(names="ab")
    with pytest.raises(ConfigError, match="one more of each of 2 architectures is needed: give at least") as caught:
        DynamicProbeManager(chosen, impl="cpu", arena_bytes=100)
    needed = int(str(caught.value).rpartition(" ")[2])
    with pytest.raises(ConfigError, match=f"give at least {needed}"):
        DynamicProbeManager(chosen, impl="cpu", arena_bytes=needed - 1)
    run = DynamicProbeManager(chosen, impl="cpu", arena_bytes=needed).attach(model)
    with pytest.raises(ArenaFull, match="with a:c30"):
        run.on("a:c30", above=0.5)
    run.on("a:c0", above=0.5)  # a root is active anyhow


def test_model_is_checked_for_every_pack(model, packs, tmp_path):
    other = make_model(seed=1)
    stranger = make_pack(tmp_path / "z", other, name="z")
    with pytest.warns(UserWarning, match="z was made for"):
        DynamicProbeManager([*packs(names="a"), stranger], impl="cpu", strategy="descent").attach(model)
    with pytest.raises(ModelMismatch, match="z was made for"):
        DynamicProbeManager([*packs(names="a"), stranger], impl="cpu", strategy="descent").attach(model, strict=True)


def test_audit_counts_over_all_packs(packs):
    chosen = packs(names="abd")
    manager = DynamicProbeManager(chosen, impl="cpu", strategy="descent", load_threshold=0.5, audit_rate=1.0)
    hidden = random_states(9)
    _, [scores] = manager.score_prompt(manager.plan, hidden, [], audit=np.ones(9, dtype=bool))
    everything = manager.score_all(hidden).numpy()
    fires = everything > manager.pack.alert_threshold.numpy()
    active = np.zeros_like(fires)
    active[scores.state_of, scores.probes] = True
    assert scores.coverage.firing.tolist() == fires.sum(axis=1).tolist()
    assert (
        scores.coverage.firing_missed.tolist() == (fires & ~active).sum(axis=1).tolist()
        and scores.coverage.firing_missed.sum() > 0
    )
    best = [set(sorted(range(manager.pack.n_probes), key=lambda p: (-row[p], p))[:10]) for row in everything]
    assert scores.coverage.top_missed.tolist() == [
        len(top - set(np.flatnonzero(here).tolist())) for top, here in zip(best, active, strict=True)
    ]


def test_stream_shows_concepts_of_all_packs(model, packs):
    manager = DynamicProbeManager(packs(names="ab"), impl="cpu", strategy="descent")
    events = list(manager.stream(model, make_tokenizer(), "abc", max_new_tokens=6, do_sample=False, eos_token_id=None))
    leading = [concept.concept for event in events for concept in event.leading(50)]
    assert {name.split(":")[0] for name in leading} == {"a", "b"} and len(events) == 6


# -- a corpus ------------------------------------------------------------------------------------


def test_analysis_has_the_rows_of_each_pack_and_names_its_packs(model, packs, tmp_path):
    chosen, texts, reading = (
        packs(names="ade"),
        random_texts(12),
        Reading(Window(24, 6), batch_tokens=100, batch_rows=5),
    )
    settings = {"impl": "cpu", "strategy": "descent", "audit_rate": 0.2}
    together = analyze(
        DynamicProbeManager(chosen, **settings),
        model,
        make_tokenizer(),
        texts,
        tmp_path / "all",
        floor=0.4,
        reading=reading,
    )
    mute = make_pack(tmp_path / "mute", model, name="mute", alert_threshold=None)
    with pytest.raises(ConfigError, match="mute has no alert thresholds, so nothing of it fires"):
        analyze(DynamicProbeManager([*chosen, mute], impl="cpu"), model, make_tokenizer(), texts, tmp_path / "none")
    rows = {name: [] for name in "ade"}
    for row in together.scores().to_pylist():
        name, _, own = row["concept"].partition(":")
        rows[name].append({**row, "concept": own})
    parents = {row["concept"]: row["parents"] for row in together.concepts().to_pylist()}
    totals = Counter()
    for pack in chosen:
        alone = analyze(
            DynamicProbeManager(pack, **settings),
            model,
            make_tokenizer(),
            texts,
            tmp_path / pack.name,
            floor=0.4,
            reading=reading,
        )
        order = lambda row: (row["document"], row["position"], row["concept"])  # noqa: E731
        assert sorted(rows[pack.name], key=order) == sorted(alone.scores().to_pylist(), key=order) and rows[pack.name]
        totals.update({name: alone.manifest["totals"][name] for name in ("rows", "active", "evaluated", "dropped")})
        assert all(
            parents[f"{pack.name}:{c['id']}"] == [f"{pack.name}:{p}" for p in c["parents"]] for c in pack.concepts
        )
    assert {name: together.manifest["totals"][name] for name in totals} == totals
    stated = together.manifest["identity"]
    assert {name: one["probes"] for name, one in stated["pack"]["packs"].items()} == {
        p.name: p.manifest["files"]["probes.safetensors"]["sha256"] for p in chosen
    }
    assert stated["cascade"]["d"]["keep_top_k"] == 9 and stated["pack"]["name"] == "a + d + e"
    with pytest.raises(ConfigError, match="pack"):
        analyze(
            DynamicProbeManager(chosen[:2], **settings),
            model,
            make_tokenizer(),
            texts,
            tmp_path / "all",
            floor=0.4,
            reading=reading,
            resume=True,
        )


# -- names and settings --------------------------------------------------------------------------


def test_group_numbers_probes_by_level_and_keeps_every_hierarchy(packs, model, tmp_path):
    chosen = [*packs(), make_pack(tmp_path / "mixed", model, name="mixed", n=23, mixed_levels=True)]
    group = PackGroup(chosen)
    assert sorted(np.concatenate(group.numbers).tolist()) == list(range(group.n_probes)) and isinstance(
        group.tree, ConceptTree
    )
    for number, pack in zip(group.numbers, chosen, strict=True):
        assert (np.diff(number) > 0).all() and np.array_equal(group.tree.level[number], pack.tree.level)
        for probe in range(pack.n_probes):
            assert group.tree.children(number[probe]).tolist() == number[pack.tree.children(probe)].tolist()
            assert group.tree.path(number[probe]) == number[pack.tree.path(probe)].tolist()
            assert group.concepts[number[probe]]["id"] == f"{pack.name}:{pack.concepts[probe]['id']}"
        assert torch.equal(group.alert_threshold[torch.from_numpy(number)], pack.alert_threshold)
    assert [own.tolist() for own in group.split([group.numbers[3][7], group.numbers[0][2], group.numbers[3][1]])] == [
        [2],
        [],
        [],
        [7, 1],
        [],
        [],
    ]


def test_concepts_are_found_by_qualified_or_unambiguous_names(packs):
    group = PackGroup(packs(names="ab"))
    a, b = (pack.find("c5") for pack in packs(names="ab"))
    assert (
        group.find("a:c5") == group.find("a:concept 5") == group.numbers[0][a]
        and group.find("b:c5") == group.numbers[1][b]
    )
    assert group.find("c35") == group.find("concept 35") == group.find("a:c35")  # "b" has 23
    with pytest.raises(UnknownConcept, match=r"2 concepts are named 'c5': give one of the ids: .*a:c5.*b:c5"):
        group.find("c5")
    with pytest.raises(UnknownConcept, match=r"a \+ b has no concept 'a:c99'"):
        group.find("a:c99")
    assert group.find_all("b:*") == group.numbers[1].tolist()
    assert {group.concepts[i]["id"] for i in group.find_all("c2*")} == {
        f"{n}:c{i}" for n in "ab" for i in (2, *range(20, 30)) if i < {"a": 40, "b": 23}[n]
    }


def test_packs_of_one_name_need_distinct_names(packs):
    [pack] = packs(names="a")
    with pytest.raises(ConfigError, match=r"2 packs are named 'a': give them names of your own, as a mapping"):
        DynamicProbeManager([pack, pack])
    manager = DynamicProbeManager({"one": pack, "two": pack}, impl="numba", strategy="descent")
    assert manager.pack.find("two:c5") == manager.pack.numbers[1][pack.find("c5")]
    stepped(manager, [DynamicProbeManager(pack, impl="numba", strategy="descent")] * 2, n_steps=2)
    for wrong in ([], {}, [pack, 3], b"a", {"a:b": pack}, {"": pack}, {3: pack}):
        with pytest.raises(ConfigError, match=r"ProbePack|is named"):
            DynamicProbeManager(wrong)


def test_packs_for_models_of_different_sizes_are_refused(model, packs, tmp_path):
    wide = make_pack(
        tmp_path / "w",
        model,
        name="w",
        n=5,
        weights=weights((), 24, torch.float32, 5),
        golden_hidden=None,
        host={"model_id": "wider", "hidden_size": 24, "n_layers": 3},
    )
    with pytest.raises(ConfigError, match=r"different sizes \{'a': 16, 'w': 24\}"):
        DynamicProbeManager([*packs(names="a"), wide])


def test_settings_apply_to_every_pack_and_defaults_are_each_packs_own(packs):
    chosen = packs(names="ab")
    manager = DynamicProbeManager(chosen, impl="cpu", strategy="descent", max_loaded_probes=100)
    assert {name: (config.keep_top_k, config.max_loaded_probes) for name, config in manager.config.items()} == {
        "a": (6, 100),
        "b": (7, 100),
    }
    assert (
        manager.report_top_k == 4
        and DynamicProbeManager(chosen, impl="cpu", strategy="descent", report_top_k=9).report_top_k == 9
    )
    with pytest.raises(UnknownSetting):
        DynamicProbeManager(chosen, keep_topk=3)
    with pytest.raises(ConfigError, match=r"^b: load_threshold='exact' needs the path rule"):
        DynamicProbeManager(chosen, load_threshold="exact")
    deep = int(max(chosen[0].tree.level)) + 1
    with pytest.raises(ConfigError, match=rf"^a: base_layers names level {deep}"):
        DynamicProbeManager(chosen, base_layers=[0, deep])
    with pytest.raises(ConfigError, match="always_on is 'a:c1': give a list"):
        DynamicProbeManager(chosen, always_on="a:c1")
    with pytest.raises(ConfigError, match=r"hidden has no site 'resid_post\.0'"):
        manager.step(None, {"resid_post.1": torch.zeros(1, HIDDEN)})


def test_aggregator_thresholds_are_those_of_the_packs_that_have_them(model, packs, tmp_path):
    values = torch.rand(6, generator=torch.Generator().manual_seed(0))
    calibrated = make_pack(tmp_path / "m", model, name="m", n=6, aggregated={"mean": values})
    group = PackGroup([*packs(names="b"), calibrated])
    found = group.thresholds_for("mean")
    assert group.aggregated == ("mean",) and torch.equal(
        found[torch.from_numpy(group.numbers[1])], calibrated.thresholds_for("mean")
    )
    assert found[torch.from_numpy(group.numbers[0])].isnan().all() and torch.equal(
        group.thresholds_for(), group.alert_threshold
    )
    with pytest.raises(ConfigError, match="not for max"):
        group.thresholds_for("max")


def test_list_of_one_pack_is_a_group_of_one(packs):
    [pack] = packs(names="a")
    manager, alone = (
        DynamicProbeManager([pack], impl="cpu", strategy="descent"),
        DynamicProbeManager(pack, impl="cpu", strategy="descent"),
    )
    stepped(manager, [alone], n_steps=2)
    assert manager.pack.concepts[3]["id"] == f"a:{pack.concepts[3]['id']}" and alone.pack is pack


# -- the command line ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The host as a user has it."""
    path = tmp_path_factory.mktemp("host")
    model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


def cli(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout.splitlines()[-1]), done.output


def test_watch_shows_concepts_of_several_packs(folder, packs):
    a, b = packs(names="ab")
    told, shown = cli(
        "watch",
        folder,
        a.directory,
        "--pack",
        f"mine={b.directory}",
        "--prompt",
        "abc",
        "--max-new-tokens",
        6,
        "--plain",
        "--json",
    )
    assert told["probes_total"] == a.n_probes + b.n_probes and told["probes_active_per_token"] > 0
    assert "watched by a + mine: 63 probes" in shown and "mine:concept" in shown
    listed = {concept["concept"].split(":")[0] for concept in told["summary"]["concepts"]}
    assert listed == {"a", "mine"}


def test_watch_counts_probes_without_thresholds(folder, model, packs, tmp_path):
    [a] = packs(names="a")
    mute = make_pack(tmp_path / "mute", model, name="mute", alert_threshold=None)
    options = ("--prompt", "abc", "--max-new-tokens", 2, "--plain", "--json")
    told, shown = cli("watch", folder, a.directory, "--pack", mute.directory, *options)
    assert (
        told["probes_without_threshold"] == 40
        and told["probes_ranked"] == 40
        and "40 of 80 probes are of packs without any alert threshold" in shown
    )
    told, shown = cli("watch", folder, a.directory, *options)
    assert told["probes_without_threshold"] == 0 and "no alert threshold" not in shown


def test_analyze_writes_and_resumes_several_packs(folder, packs, tmp_path):
    a, b = packs(names="ab")
    (tmp_path / "texts.txt").write_text("abc def\nghi\n")
    command = (
        "analyze",
        folder,
        a.directory,
        tmp_path / "texts.txt",
        "--pack",
        b.directory,
        "--out",
        tmp_path / "out",
        "--dtype",
        "float32",
        "--json",
    )
    told, _ = cli(*command)
    assert cli(*command)[0] == told and told["rows"] > 0
    concepts = {row["concept"].split(":")[0] for row in Analysis.open(tmp_path / "out").scores().to_pylist()}
    assert concepts == {"a", "b"} and told["active"] + told["dropped"] <= told["tokens"] * (a.n_probes + b.n_probes)


def test_command_line_requires_distinct_pack_names(folder, packs):
    [pack] = packs(names="a")
    done = CliRunner().invoke(app, ["watch", folder, str(pack.directory), "--pack", str(pack.directory)])
    assert isinstance(done.exception, ConfigError) and "a=FOLDER --pack b=FOLDER" in str(done.exception)


# -- a GPU ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1",
    reason="no GPU, or Triton is in its interpreter",
)
@pytest.mark.parametrize("more", [{}, {"arena_bytes": 0.6}], ids=["resident", "paged"])
def test_each_pack_on_a_gpu_scores_as_alone(packs, more):
    chosen = packs()
    shared = {name: int(share * sum(pack.weight_bytes() for pack in chosen)) for name, share in more.items()}
    together = DynamicProbeManager(chosen, device="cuda", strategy="descent", **shared)
    stepped(together, [DynamicProbeManager(pack, device="cuda", strategy="descent") for pack in chosen], n_steps=8)
    together.arena.check_integrity()
    assert len(together.arena.arenas) == 3
    if not more:
        steps = [step for engine in together.engine.engines for _, step in engine.on_device._by_plan.values()]
        assert (
            len(steps) == 5
            and len({id(step._side) for step in steps}) == 1
            and all(step.n_captured >= 1 for step in steps)
        )
