"""The store gives the right weights under any traffic, within its bytes, loaded once; errors name the probe."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from probemon import ProbePack
from probemon.engine.memory.store import PackSource, ProbeStore
from probemon.errors import ConfigError, ProbeLoadError

PACK = ProbePack.open("probes/wordnet-smollm2-135m-mlp")
ONE = sum(t[0].numel() * t.element_size() for t in PACK.weights.values())


@pytest.fixture
def source():
    return PackSource(PACK)


@pytest.mark.parametrize("room", [0, 1, 7, 100])
def test_random_traffic_gives_the_right_weights_within_the_bound(source, room):
    rng, store = random.Random(room), ProbeStore(source, max_bytes=room * ONE)
    for _ in range(25):
        asked = rng.sample(range(40), k=rng.randint(1, 9))
        got = store.get_many(asked)
        assert list(got) == asked
        for probe in asked:
            assert all(torch.equal(got[probe][name], t[probe]) for name, t in PACK.weights.items())
        store.check_integrity()
        assert store.stats().n_probes <= room


def test_least_recently_used_probe_is_evicted(source):
    store = ProbeStore(source, max_bytes=2 * ONE)
    for probe in (1, 2, 1, 3):  # 2 is the oldest when 3 comes
        store.get_many([probe])
    before = store.stats().misses
    store.get_many([1, 3])
    assert store.stats().misses == before
    store.get_many([2])
    assert (store.stats().misses, store.stats().evictions) == (before + 1, 2)


def test_entry_owns_its_memory_so_that_eviction_frees_it():
    state = ProbeStore(PackSource(PACK), max_bytes=10 * ONE).get_many([4, 5, 6])[5]
    assert sum(t.untyped_storage().nbytes() for t in state.values()) == ONE


def test_threads_get_the_right_weights(source):
    store = ProbeStore(source, max_bytes=5 * ONE)

    def ask(seed):
        asked = random.Random(seed).sample(range(40), k=6)
        got = store.get_many(asked)
        return all(torch.equal(got[p]["w1"], PACK.weights["w1"][p]) for p in asked)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(40)))
    store.check_integrity()


def test_failed_load_keeps_nothing_and_names_the_probe():
    class OneIsDamaged:
        def load(self, probes):
            if 1 in probes:
                raise ProbeLoadError("probe 1 is damaged")
            return PackSource(PACK).load(probes)

    store = ProbeStore(OneIsDamaged(), max_bytes=100 * ONE)
    with pytest.raises(ProbeLoadError, match="probe 1"):
        store.get_many([0, 1])
    assert store.stats().n_probes == 0
    store.get_many([0])
    assert store.stats().n_probes == 1


def test_negative_bound_is_refused():
    with pytest.raises(ConfigError, match="max_bytes is -1"):
        ProbeStore(PackSource(PACK), max_bytes=-1)
