"""Both arenas keep one contract, and promise 3: no arena, cache or load order changes a score."""

import random
import re
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_pack
from probemon import DynamicProbeManager, ProbePack
from probemon.engine.memory.arena import PagedArena, ResidentArena
from probemon.engine.memory.store import PackSource, ProbeStore
from probemon.errors import ArenaFull, ConfigError, ProbeLoadError

PACK = ProbePack.open("probes/wordnet-smollm2-135m-mlp")
LINEAR = ProbePack.open("probes/wordnet-smollm2-135m")
ONE = -(-PACK.weight_bytes() // PACK.n_probes)
CPU = torch.device("cpu")


def paged(n_slots, source=None, cache_probes=40):
    return PagedArena(
        ProbeStore(source or PackSource(PACK), max_bytes=cache_probes * ONE),
        like=PACK.weights,
        n_slots=n_slots,
        device=CPU,
    )


@pytest.fixture(params=["resident", 1, 2, 7, 31, PACK.n_probes])
def arena(request):
    if request.param == "resident":
        return ResidentArena(PACK.weights, CPU, PACK.check_finite)
    return paged(request.param)


def fetch(arena, probes):
    """Every probe's weights as the arena shows them, wave by wave; each position exactly once."""
    shown = {}
    for at, slots in arena.waves(np.asarray(probes, dtype=np.int64)):
        for i, slot in zip(at.tolist(), slots.tolist(), strict=True):
            assert i not in shown
            shown[i] = {name: tensor[slot].clone() for name, tensor in arena.weights.items()}
    assert sorted(shown) == list(range(len(probes)))
    return [shown[i] for i in range(len(probes))]


def test_random_traffic_shows_the_right_weights(arena):
    rng = random.Random(1)
    for _ in range(12):
        probes = rng.sample(range(PACK.n_probes), k=rng.choice([0, 1, 5, 60]))
        for probe, state in zip(probes, fetch(arena, probes), strict=True):
            assert all(torch.equal(state[name], PACK.weights[name][probe]) for name in state)
        arena.check_integrity()


def test_hits_and_misses_add_up(arena):
    rng, asked = random.Random(2), 0
    for _ in range(8):
        probes = rng.sample(range(PACK.n_probes), k=9)
        asked += len(probes)
        fetch(arena, probes)
        stats = arena.stats()
        assert stats.hits + stats.misses == asked
        assert stats.misses - stats.evictions <= stats.n_slots
        if isinstance(arena, PagedArena):
            assert stats.n_slots - stats.n_free == stats.misses - stats.evictions


@pytest.mark.parametrize("n_slots", [3, 8])
def test_pinned_probes_stay_resident(n_slots):
    arena, rng = paged(n_slots), random.Random(3)
    arena.pin([5, 200])
    for _ in range(10):
        fetch(arena, rng.sample(range(PACK.n_probes), k=20))
        before = arena.stats().misses
        fetch(arena, [200, 5])
        assert arena.stats().misses == before
        arena.check_integrity()
    arena.pin([5])
    arena.unpin([5])  # pinned twice, once is left
    fetch(arena, list(range(100, 140)))
    before = arena.stats().misses
    fetch(arena, [5])
    assert arena.stats().misses == before
    arena.unpin([5, 200])
    assert arena.stats().n_pinned == 0


def test_least_recently_used_probe_is_evicted_first():
    arena = paged(3)
    fetch(arena, [1, 2, 3])
    fetch(arena, [1])
    fetch(arena, [4])  # 2 is the oldest
    before = arena.stats().misses
    fetch(arena, [1, 3, 4])
    assert arena.stats().misses == before
    fetch(arena, [2])
    assert arena.stats().misses == before + 1


def test_resident_probes_are_used_before_they_are_evicted():
    arena = paged(4)
    fetch(arena, [10, 11, 12, 13])
    before = arena.stats().misses
    fetch(arena, [1, 2, 3, 10, 11, 12, 13])
    assert arena.stats().misses == before + 3


def test_fully_pinned_arena_raises_arena_full():
    arena = paged(2)
    arena.pin([0, 1])
    with pytest.raises(ArenaFull, match="2 slots, all pinned, none for 1 more"):
        fetch(arena, [0, 1, 2])
    with pytest.raises(ArenaFull, match="3 probes to pin, 2 slots"):
        arena.pin([2])
    arena.check_integrity()


def test_empty_slots_are_nan():
    arena = paged(4)
    fetch(arena, [7])
    assert sum(bool(torch.isnan(arena.weights["w1"][slot]).all()) for slot in range(4)) == 3


class FailingSource(PackSource):
    def load(self, probes):
        if 33 in probes:
            raise ProbeLoadError("concept 'x' (probe 33) could not be read")
        return super().load(probes)


def test_failed_load_names_the_probe_and_loses_nothing():
    arena = paged(4, FailingSource(PACK))
    fetch(arena, [1, 2, 3, 4])
    with pytest.raises(ProbeLoadError, match="probe 33"):
        fetch(arena, [32, 33])
    arena.check_integrity()
    before = arena.stats().misses
    fetch(arena, [1, 2, 3, 4])
    assert arena.stats().misses == before


def same(a, b):
    return (
        np.array_equal(a.ptr, b.ptr)
        and np.array_equal(a.probes, b.probes)
        and np.array_equal(a.values, b.values)
        and np.array_equal(a.fired_mask, b.fired_mask)
        and all(
            np.array_equal(getattr(a.coverage, n), getattr(b.coverage, n))
            for n in ("active", "dropped", "not_reached", "released", "excluded")
        )
    )


def run(manager, hidden):
    n_tokens = len(hidden) if isinstance(hidden, torch.Tensor) else len(next(iter(hidden.values())))
    return manager.score_tokens(hidden, prompt_len=n_tokens // 2)


@pytest.mark.parametrize("pack", [PACK, LINEAR], ids=["mlp", "linear"])
@pytest.mark.parametrize(
    "settings", [{}, {"max_loaded_probes": 24}, {"load_threshold": 0.02, "keep_top_k": 5, "max_rounds": 1}], ids=str
)
def test_no_arena_cache_or_load_order_changes_a_score(pack, settings):
    hidden = pack.golden_hidden[:, 0]
    one = -(-pack.weight_bytes() // pack.n_probes)
    resident = DynamicProbeManager(pack, strategy="descent", **settings)
    expected = run(resident, hidden)
    assert same(run(DynamicProbeManager(pack, strategy="exhaustive", **settings), hidden), expected)
    smallest = int(resident.plan.always.sum()) + 1
    for n_slots in (smallest, smallest + 3, 40, pack.n_probes - 1):
        for cache in (0, 5 * one, 1 << 30):
            manager = DynamicProbeManager(pack, arena_bytes=n_slots * one, cache_bytes=cache, **settings)
            assert isinstance(manager.arena, PagedArena) and manager.arena.stats().n_slots == n_slots
            run(manager, hidden.flip(0))  # another history: other probes are held
            assert same(run(manager, hidden), expected), (n_slots, cache)
            manager.arena.check_integrity()


def test_too_small_arena_says_how_much_it_needs():
    n_always = int(DynamicProbeManager(PACK, strategy="descent").plan.always.sum())
    with pytest.raises(ConfigError, match=f"give at least {(n_always + 1) * ONE}"):
        DynamicProbeManager(PACK, arena_bytes=(n_always + 1) * ONE - 1)
    with pytest.raises(ConfigError, match="raise arena_bytes"):
        DynamicProbeManager(PACK, arena_bytes=(n_always + 1) * ONE, strategy="exhaustive")
    with pytest.raises(ConfigError, match="expected one of auto, descent, exhaustive"):
        DynamicProbeManager(PACK, strategy="fast")


def test_strategy_choice_is_measured_and_explained():
    strategy = DynamicProbeManager(PACK).strategy
    assert strategy.step in ("descent", "exhaustive") and strategy.batch in ("descent", "exhaustive")
    assert "golden states" in strategy.why and re.search(
        r"one token \w+ \(all probes \d+\.\d\d ms, a descent \d+\.\d\d ms\)", strategy.why
    )
    assert DynamicProbeManager(PACK, arena_bytes=40 * ONE).strategy.why == "the pack is paged"


@pytest.mark.parametrize("rule", ["path", "independent"])
@pytest.mark.parametrize("sites", [("resid_post.1",), ("resid_post.0", "resid_post.2")], ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_random_dags_score_the_same_in_every_arena(model, tmp_path, rule, sites, dtype):
    for seed in range(3):
        pack = make_pack(
            tmp_path / str(seed), model, rule=rule, sites=sites, seed=seed, dtype=dtype, mixed_levels=seed == 2
        )
        hidden = {
            site: torch.randn(12, HIDDEN, generator=torch.Generator().manual_seed(seed + i))
            for i, site in enumerate(sites)
        }
        one = -(-pack.weight_bytes() // pack.n_probes)
        most = int(DynamicProbeManager(pack, strategy="descent").plan.always.sum()) + 3 if seed == 2 else 9
        for settings in (
            {},
            {"max_loaded_probes": most, "keep_top_k": 4},
            {"load_threshold": 0.4, "aggressive_pruning": False},
            {"include": ["c0", "c1", "c2"], "exclude": ["c12"], "depth": {"c1": 2}, "keep_top_k": 4},
        ):
            resident = DynamicProbeManager(pack, strategy="descent", **settings)
            expected = run(resident, hidden)
            assert expected.coverage.active.sum() > 0
            assert same(run(DynamicProbeManager(pack, strategy="exhaustive", **settings), hidden), expected)
            for n_slots in (smallest := int(resident.plan.always.sum()) + 1, max(17, smallest)):
                manager = DynamicProbeManager(pack, arena_bytes=n_slots * one, cache_bytes=3 * one, **settings)
                run(manager, {site: x.flip(0) for site, x in hidden.items()})
                assert same(run(manager, hidden), expected)
                manager.arena.check_integrity()


def test_threads_sharing_a_paged_arena_get_their_own_scores():
    hidden = PACK.golden_hidden[:, 0]
    expected = run(DynamicProbeManager(PACK, strategy="descent"), hidden)
    manager = DynamicProbeManager(PACK, arena_bytes=40 * ONE, cache_bytes=10 * ONE)
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: same(run(manager, hidden), expected), range(12)))
    manager.arena.check_integrity()


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: {**state, "w1": state["w1"][:, :-1]},
        lambda state: {name: t for name, t in state.items() if name != "b1"},
    ],
    ids=["shape", "missing"],
)
def test_malformed_state_dict_is_named_and_costs_no_slot(damage):
    class Source:
        def load(self, probes):
            found = PackSource(PACK).load(probes)
            return [damage(state) if probe == 7 else state for probe, state in zip(probes, found, strict=True)]

    arena = PagedArena(ProbeStore(Source(), max_bytes=0), like=PACK.weights, n_slots=2, device=torch.device("cpu"))
    for _ in range(3):
        with pytest.raises(ProbeLoadError, match="probe 7"):
            list(arena.waves(np.array([7])))
    for probes in ([1, 2], [3, 4]):
        assert len(list(arena.waves(np.array(probes)))) == 1
        with pytest.raises(ProbeLoadError, match="probe 7"):
            list(arena.waves(np.array([7])))
        arena.check_integrity()
