"""Background paging and records: prefetching changes no score, and late mode counts what it leaves out."""

import threading
import time

import numpy as np
import pytest
import torch
from test_arena import CPU, ONE, PACK, fetch, same

from conftest import HIDDEN, make_pack
from probemon import DynamicProbeManager
from probemon.engine.memory.arena import PagedArena
from probemon.engine.memory.fetcher import Fetcher
from probemon.engine.memory.slab import Layout, Slab, SlabRecord, runs_of
from probemon.engine.memory.store import PackSource, ProbeStore
from probemon.engine.memory.uploads import Direct, Staged
from probemon.errors import ConfigError, ProbeLoadError
from probemon.packs.quantize import quantize_weights

STATES = PACK.golden_hidden[:, 0]
BUSY = int((PACK.golden_scores > 0.3).sum(1).argmax())  # the state that opens most of the tree


def test_record_holds_every_tensor_of_its_probe_and_stacks():
    for weights in (PACK.weights, quantize_weights({name: w[:5].clone() for name, w in PACK.weights.items()})):
        layout = Layout.of(weights)
        memory = torch.zeros(3, layout.n_bytes, dtype=torch.uint8)
        for i in range(3):
            SlabRecord.of(layout, {name: w[i + 1] for name, w in weights.items()}, memory[i])
        assert all(torch.equal(stacked, weights[name][1:4]) for name, stacked in layout.views(memory).items())
        assert (
            layout.n_bytes % 256 == 0
            and layout.n_bytes < sum(w[0].numel() * w.element_size() for w in weights.values()) + 9 * 16 + 256
        )


def test_slab_gives_contiguous_runs_and_reuses_released_rows():
    slab = Slab(Layout.of(PACK.weights), 10, register=False)
    first, second = slab.take(4), slab.take(3)
    assert slab.n_free == 3 and runs_of(first) == [(0, 4)]
    del first[1], first[1]
    assert slab.n_free == 5
    third = slab.take(3)  # 7, 8, 9 are neighbours; 1 and 2 are free before them
    assert runs_of(third) == [(0, 3)] and len(slab.take(9)) == 2
    assert runs_of([*first, *third]) == [(0, 1), (1, 2), (2, 5)]
    del first, second, third
    assert slab.n_free == 10


def staged(n_slots, n_registered, cache_probes=40):
    made = []
    source = PackSource(PACK)
    if n_registered:
        source._slab = Slab(source._layout, n_registered, register=False)
    store = ProbeStore(source, max_bytes=cache_probes * Layout.of(PACK.weights).n_bytes)
    arena = PagedArena(
        store,
        like=PACK.weights,
        n_slots=n_slots,
        device=CPU,
        upload=lambda weights: made.append(Staged(weights, 5)) or made[0],
    )
    return arena, made[0], source


@pytest.mark.parametrize("n_registered", [0, 12, 60])
def test_staged_uploads_show_the_right_weights(n_registered):
    """As on a GPU, without its streams: slabs too small for the cache, and staging smaller than a wave."""
    arena, _, source = staged(9, n_registered)
    rng = np.random.default_rng(0)
    for _ in range(15):
        probes = rng.choice(PACK.n_probes, size=rng.integers(1, 25), replace=False)
        for probe, state in zip(probes, fetch(arena, probes), strict=True):
            assert all(torch.equal(state[name], PACK.weights[name][probe]) for name in state)
        arena.check_integrity()
        assert source._slab is None or source._slab.n_free >= n_registered - 40


@pytest.mark.parametrize("upload", [Direct, lambda weights: Staged(weights, 5)], ids=["direct", "staged"])
def test_arena_made_in_inference_mode_can_be_filled_outside_it(upload):
    with torch.inference_mode():
        arena = PagedArena(
            ProbeStore(PackSource(PACK), max_bytes=0), like=PACK.weights, n_slots=4, device=CPU, upload=upload
        )
        fetch(arena, [1, 2])
    fetch(arena, [3, 4, 5])
    arena.check_integrity()


def test_failed_upload_costs_no_slot():
    arena, upload, _ = staged(4, 0)
    real, arena._upload = arena._upload, lambda states, slots: 1 / 0
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            fetch(arena, [1, 2, 3])
    arena._upload = real
    fetch(arena, [1, 2, 3, 4])
    assert upload.n_copies > 0
    arena.check_integrity()


def test_siblings_are_uploaded_in_one_copy():
    arena, upload, _ = staged(40, 60)
    fetch(arena, range(100, 105))
    assert upload.n_copies == 1
    fetch(arena, [200, 7, 201, 8])  # two runs of the pack; neighbours in RAM all the same
    assert upload.n_copies == 2


def settled(manager):
    manager.engine.scorer.fetcher.wait()
    manager.engine.scorer.fetcher.raise_error()


@pytest.mark.parametrize("n_slots", [17, 60, 200])
def test_prefetching_changes_no_score_and_saves_misses(n_slots):
    settings = {"keep_top_k": 0, "load_threshold": 0.3, "max_rounds": 1}
    plain, ahead = (
        DynamicProbeManager(PACK, arena_bytes=n_slots * ONE, prefetch=margin, **settings) for margin in (0.0, 0.3)
    )
    state, other = None, None
    for hidden in STATES.repeat(3, 1).split(1):
        state, mine = plain.step(state, hidden)
        other, theirs = ahead.step(other, hidden)
        assert same(mine, theirs)
        ahead.engine.scorer.prefetcher.wait()
        ahead.arena.check_integrity()
    assert (ahead.arena.stats().fetched > 0) == (
        n_slots > 17
    ) and plain.arena.stats().fetched == 0  # 17 are too few to spare any
    assert ahead.arena.stats().misses <= plain.arena.stats().misses
    if n_slots == 200:
        assert ahead.arena.stats().misses < plain.arena.stats().misses


def test_prefetched_probes_take_no_slot_in_use():
    arena, _, _ = staged(10, 0)
    fetch(arena, range(8))
    arena.fetch([50, 51, 52, 53], prefetched=True)
    assert (arena.held(np.arange(8)) >= 0).all() and (arena.held(np.arange(50, 54)) >= 0).sum() == 2
    before = arena.stats().misses
    fetch(arena, [0, 1, 2, 60])  # the one that is new takes the place of one that was only foreseen
    assert arena.stats().misses == before + 1 and (arena.held(np.arange(8)) >= 0).all()
    for _ in range(100):
        fetch(arena, [0])
    arena.fetch([54, 55], prefetched=True)
    assert (arena.held(np.array([0, 54, 55])) >= 0).all()
    assert all(p in arena._store._cache for p in (52, 53))  # in RAM at any rate
    arena.check_integrity()


def exact_of(manager, hidden):
    return DynamicProbeManager(manager.pack, strategy="descent", load_threshold=0.3).step(None, hidden)[1]


def test_late_mode_counts_missing_probes_and_finds_them_later():
    manager = DynamicProbeManager(PACK, arena_bytes=200 * ONE, late=True, load_threshold=0.3)
    hidden = STATES[BUSY : BUSY + 1]
    expected = exact_of(manager, hidden)
    seen = []
    for _ in range(9):
        _, scores = manager.step(None, hidden)
        cover = scores.coverage
        assert (cover.active + cover.dropped + cover.not_reached == PACK.n_probes).all() and (
            cover.late <= cover.dropped
        ).all()
        mine = dict(zip(scores.active(0).tolist(), scores.active_scores(0).tolist(), strict=True))
        theirs = dict(zip(expected.active(0).tolist(), expected.active_scores(0).tolist(), strict=True))
        assert all(theirs[p] == value for p, value in mine.items())  # what is there is right
        seen.append((len(mine), int(cover.late[0])))
        settled(manager)
    assert seen[0][1] > 0 and seen[0][0] < len(theirs)
    assert seen[-1] == (len(theirs), 0) and same(scores, expected)
    assert manager.arena.stats().late == sum(late for _, late in seen) and manager.arena.stats().misses == int(
        manager.plan.always.sum()
    )


@pytest.mark.parametrize("rule", ["path", "independent"])
def test_late_mode_never_gives_a_wrong_score_on_random_dags(model, tmp_path, rule):
    pack = make_pack(tmp_path / "pack", model, rule=rule)
    manager = DynamicProbeManager(
        pack, arena_bytes=17 * -(-pack.weight_bytes() // pack.n_probes), late=True, load_threshold=0.2
    )
    everything = DynamicProbeManager(pack, strategy="descent").score_all
    generator, state, n_late = torch.Generator().manual_seed(0), None, 0
    for _ in range(40):
        hidden = torch.randn(3, HIDDEN, generator=generator)
        state, scores = manager.step(state, hidden)
        exact = everything(hidden).numpy()
        for row in range(3):
            assert np.array_equal(scores.active_scores(row), exact[row, scores.active(row)])
        assert (scores.coverage.active + scores.coverage.dropped + scores.coverage.not_reached == pack.n_probes).all()
        n_late += int(scores.coverage.late.sum())
    assert n_late > 0
    settled(manager)
    manager.arena.check_integrity()


def test_prompt_is_waited_for_in_late_mode():
    manager = DynamicProbeManager(PACK, arena_bytes=200 * ONE, late=True, load_threshold=0.3)
    expected = DynamicProbeManager(PACK, strategy="descent", load_threshold=0.3).score_tokens(STATES)
    assert same(manager.score_tokens(STATES), expected)


def test_background_error_is_raised_at_the_next_step():
    class Source(PackSource):
        def load(self, probes):
            if threading.current_thread() is not threading.main_thread():
                raise ProbeLoadError("probe 33 could not be read")
            return super().load(probes)

    manager = DynamicProbeManager(PACK, arena_bytes=200 * ONE, late=True, load_threshold=0.3)
    manager.arena._store = ProbeStore(Source(PACK), max_bytes=0)
    manager.step(None, STATES[BUSY : BUSY + 1])
    manager.engine.scorer.fetcher.wait()
    with pytest.raises(ProbeLoadError, match="probe 33"):
        manager.step(None, STATES[BUSY : BUSY + 1])


def test_fetcher_batches_requests_that_arrive_meanwhile():
    asked, begin, go_on = [], threading.Event(), threading.Event()

    def slow(probes):
        asked.append(probes)
        begin.set()
        go_on.wait(10)

    fetcher = Fetcher(slow)
    fetcher.ask([1])
    begin.wait(10)
    start = time.perf_counter()
    for probes in ([2, 3], [3, 4]):
        fetcher.ask(probes)
    assert time.perf_counter() - start < 1
    go_on.set()
    fetcher.wait()
    assert asked == [[1], [2, 3, 4]]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"late": True}, "whole pack is on the device"),
        ({"prefetch": 0.1}, "whole pack is on the device"),
        ({"prefetch": 2.0, "arena_bytes": 40 * ONE}, "prefetch is 2.0"),
        ({"late": 1, "arena_bytes": 40 * ONE}, "late is 1"),
    ],
)
def test_invalid_paging_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        DynamicProbeManager(PACK, **settings)
