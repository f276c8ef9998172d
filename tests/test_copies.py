"""A manager gives the same scores when forked, copied, pickled, or run under another default dtype or device."""

import copy
import os
import pickle
import shutil
import signal
import sys

import numpy as np
import pytest
import torch

from conftest import HIDDEN, make_model, make_pack
from probemon import DynamicProbeManager, ProbePack
from probemon.errors import ConfigError, PackError, SinkFailed
from probemon.packs.edit import merge
from probemon.packs.quantize import quantize
from started import started

STATES = torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(3))
MODES = {
    "reference": {"impl": "reference"}, "cpu": {"impl": "cpu"}, "numba": {"impl": "numba"},
    "triton": {"impl": "triton", "strategy": "descent"},
    "paged": {"impl": "cpu", "arena_bytes": 6000}, "late": {"impl": "numba", "arena_bytes": 6000, "late": True},
    "prefetching": {"impl": "cpu", "arena_bytes": 6000, "prefetch": 0.3}, "measured": {},
}  # fmt: skip
ONE_THREAD = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def settled(manager, states=STATES):
    """Scores when all that was asked for has arrived."""
    for _ in range(9):
        _, scores = manager.step(None, states)
        for engine in getattr(manager.engine, "engines", [manager.engine]):
            for fetcher in (engine.scorer.fetcher, engine.scorer.prefetcher):
                if fetcher is not None:
                    fetcher.wait()
        if not scores.coverage.late.any():
            break
    return scores


def same(one, two):
    assert (
        one.ptr.tolist() == two.ptr.tolist()
        and one.probes.tolist() == two.probes.tolist()
        and one.coverage.unseen == two.coverage.unseen
    )
    assert np.array_equal(one.values, two.values) and one.fired_mask.tolist() == two.fired_mask.tolist()


def in_child(work):
    """What `work()` returns in a forked process."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        signal.alarm(60)  # a deadlock ends as a failure
        status = 1
        try:
            os.close(read)
            with os.fdopen(write, "wb") as pipe:
                pickle.dump(work(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        content = pipe.read()
    assert os.waitpid(pid, 0)[1] == 0
    return pickle.loads(content)


@ONE_THREAD
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
@pytest.mark.parametrize("mode", ["late", "prefetching", "paged"])
def test_forked_child_loads_the_weights_it_needs(pack, mode):
    settings = MODES[mode] | {"max_loaded_probes": 12, "arena_bytes": 6000}
    expected = settled(DynamicProbeManager(pack, **settings), STATES[:1])
    manager = DynamicProbeManager(pack, **settings)
    manager.step(None, STATES[1:2])  # something is being loaded while it forks
    for _ in range(3):
        same(in_child(lambda: settled(manager, STATES[:1])), expected)
        manager.step(None, STATES[1:2])
    assert in_child(lambda: in_child(lambda: settled(manager, STATES[:1]).coverage.late.tolist())) == [0]
    same(settled(manager, STATES[:1]), expected)


@ONE_THREAD
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_fork_during_loading_leaves_no_held_lock_in_the_child(pack):
    """Forked again and again while the background loads: no child waits for a lock that nobody will release."""
    manager = DynamicProbeManager(pack, impl="cpu", arena_bytes=6000, late=True, max_loaded_probes=12, cache_bytes=0)
    for trial in range(12):
        manager.step(None, STATES[trial % 6 : trial % 6 + 1])
        assert in_child(lambda: settled(manager, STATES[:1]).coverage.late.tolist()) == [0]


@ONE_THREAD
@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_parents_sink_reports_in_the_child_that_it_was_forked():
    class Idle:
        def open(self, concepts):
            pass

        def write(self, batch):
            pass

        def close(self):
            pass

    delivery = started(Idle())

    def child():
        delivery.close(0.1)
        return str(delivery.stats().error), type(delivery.stats().error) is SinkFailed

    assert in_child(child) == (
        "Idle was started in another process, which forked: attach it in the process that generates",
        True,
    )
    delivery.close()
    assert delivery.stats().error is None


@pytest.mark.parametrize(
    "how",
    [copy.copy, copy.deepcopy, lambda manager: pickle.loads(pickle.dumps(manager))],
    ids=["copy", "deepcopy", "pickle"],
)
@pytest.mark.parametrize("mode", [*MODES, "group"])
def test_copied_manager_scores_as_the_original(pack, two_sites, mode, how, tmp_path):
    sources = pack
    if mode == "group":
        sources = {"one": pack, "two": make_pack(tmp_path / "two", make_model(), seed=5)}
    settings = MODES.get(mode, {"strategy": "descent+exhaustive"}) | {
        "keep_top_k": 7,
        "max_loaded_probes": 12,
        "audit_rate": 0.25,
    }
    manager = DynamicProbeManager(sources, **settings)
    other = how(manager)
    assert other is not manager and other.arena is not manager.arena
    assert (other.impl, other.impl_why, other.strategy, other.config, other.audit_rate) == (
        manager.impl,
        manager.impl_why,
        manager.strategy,
        manager.config,
        manager.audit_rate,
    )
    states = STATES[:1] if mode == "triton" else STATES  # its interpreter is slow
    same(settled(other, states), settled(manager, states))
    assert torch.equal(other.score_all(states), manager.score_all(states))


def test_unpickling_opens_the_same_pack_or_is_refused(model, tmp_path):
    pack = make_pack(tmp_path / "pack", model)
    pickled = pickle.dumps(DynamicProbeManager(pack))
    assert len(pickled) < 20_000  # no weights
    assert copy.deepcopy(pack) is pack and pickle.loads(pickle.dumps(pack)).manifest == pack.manifest
    edited = make_pack(tmp_path / "edited", model)
    edited.alert_threshold[:] = 0.02
    with pytest.raises(ConfigError, match="were written to since it was opened, and it is pickled as how to"):
        pickle.dumps(DynamicProbeManager(edited))
    shutil.rmtree(tmp_path / "pack")
    with pytest.raises(PackError, match=r"was pickled as the pack in .*pack, and is opened from there again"):
        pickle.loads(pickled)
    make_pack(tmp_path / "pack", model, seed=1)
    with pytest.raises(PackError, match="where there is another pack now"):
        pickle.loads(pickled)


@pytest.fixture(scope="module")
def small(model, tmp_path_factory):
    """For Triton's interpreter, which is slow."""
    return make_pack(tmp_path_factory.mktemp("packs") / "small", model, n=6)


@pytest.fixture
def default_dtype():
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


def everything_of(pack, model, mode):
    """Bits that a user sees of a manager made, used, attached and written now."""
    manager = DynamicProbeManager(
        pack, **{"strategy": "descent", "keep_top_k": 5, "max_loaded_probes": 12, **MODES[mode]}
    )
    states = STATES[:2] if mode == "triton" else STATES
    state, step = manager.step(None, states)
    _, second = manager.step(state, states.flip(0))
    scored = [step, second, manager.score_tokens(states, prompt_len=1)]
    with manager.attach(model) as run:
        out = model.generate(torch.tensor([[1, 44]]), max_new_tokens=2, do_sample=False, pad_token_id=0)
    scored.append(run.result(out).scores)
    return [
        *(array for scores in scored for array in (scores.ptr, scores.probes, scores.values)),
        manager.score_all(states).numpy(),
        out.numpy(),
    ]


@pytest.mark.filterwarnings("ignore:.*other weights|.*these weights are others:UserWarning")
@pytest.mark.parametrize("mode", ["reference", "cpu", "numba", "triton", "paged"])
def test_default_dtype_changes_no_score(pack, small, model, mode, default_dtype):
    pack = small if mode == "triton" else pack
    expected = everything_of(pack, model, mode)
    for dtype in (
        (torch.bfloat16, torch.float64) if mode == "triton" else (torch.bfloat16, torch.float16, torch.float64)
    ):
        default_dtype(dtype)
        for one, two in zip(everything_of(pack, model, mode), expected, strict=True):
            assert one.dtype == two.dtype and np.array_equal(one, two), dtype


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_default_dtype_changes_no_written_pack(pack, model, tmp_path, default, default_dtype):
    other = make_pack(tmp_path / "other", model, seed=2, golden_hidden=None)

    def made(folder):
        packs = [quantize(other, folder / "int8"), merge({"a": pack, "b": other}, folder / "both", name="both")]
        return [pack.manifest["files"]["probes.safetensors"]["sha256"] for pack in packs], packs[0].manifest["quality"]

    expected = made(tmp_path / "first")
    default_dtype(default)
    assert made(tmp_path / "second") == expected
    ProbePack.open(pack.directory, verify=True)


@pytest.mark.parametrize("mode", ["reference", "cpu", "numba", "triton", "paged"])
def test_default_device_changes_no_score(pack, small, mode):
    pack = small if mode == "triton" else pack
    manager, states = DynamicProbeManager(pack, keep_top_k=5, **MODES[mode]), STATES[:2]
    expected = manager.score_tokens(states, prompt_len=1)
    everything = manager.score_all(states)
    with torch.device("meta"):
        other = DynamicProbeManager(ProbePack.open(pack.directory, verify=True), keep_top_k=5, **MODES[mode])
        same(other.score_tokens(states, prompt_len=1), expected)
        assert torch.equal(other.score_all(states), everything)
