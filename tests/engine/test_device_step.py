"""Steps on a device, in Triton's interpreter: results, transfers, and that the model is not waited for."""

import numpy as np
import pytest
import torch
from test_arena import same

from conftest import EOS, HIDDEN, make_model, make_pack
from probemon import DynamicProbeManager
from probemon.engine.device_steps import PendingResults

PROMPT = torch.tensor([[1, 5, 9, 13, 7], [1, 6, 8, 3, 11]])
GREEDY = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


@pytest.fixture(scope="module")
def pack(model, tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("packs") / "small", model, n=12)  # the interpreter is slow


def managers(pack, **settings):
    return [DynamicProbeManager(pack, impl=impl, strategy="descent", **settings) for impl in ("triton", "cpu")]


def close(mine, theirs):
    assert (
        np.array_equal(mine.ptr, theirs.ptr)
        and np.array_equal(mine.probes, theirs.probes)
        and np.abs(mine.values - theirs.values).max(initial=0) < 1e-6
    )
    for name in ("active", "dropped", "not_reached", "released"):
        assert np.array_equal(getattr(mine.coverage, name), getattr(theirs.coverage, name)), name
    assert mine.coverage.unseen == theirs.coverage.unseen


def steps_of(manager):
    [(_, steps)] = manager.engine.on_device._by_plan.values()
    return steps


ONE, TWO = ("resid_post.1",), ("resid_post.0", "resid_post.2")


@pytest.mark.parametrize(
    "sites, settings",
    [
        (ONE, {"keep_top_k": 3}),
        (ONE, {"aggressive_pruning": False}),
        (ONE, {"max_loaded_probes": 7, "load_threshold": 0.1}),
        (TWO, {}),
        (TWO, {"keep_top_k": 0}),
        (TWO, {"max_loaded_probes": 7, "load_threshold": 0.1}),
    ],
    ids=str,
)
def test_device_steps_equal_cpu_steps_and_keep_retained_sets_on_the_device(model, tmp_path, sites, settings):
    mixed = len(sites) == 2 and "max_loaded_probes" not in settings
    pack = make_pack(tmp_path / "pack", model, sites=sites, n=12, mixed_levels=mixed)
    mine, theirs = managers(pack, **settings)
    generator, states = torch.Generator().manual_seed(0), [None, None]
    for _ in range(4):
        hidden = {site: torch.randn(2, HIDDEN, generator=generator) for site in sites}
        (states[0], here), (states[1], there) = (
            manager.step(state, hidden) for manager, state in zip((mine, theirs), states, strict=True)
        )
        close(here, there)
        assert np.array_equal(states[0].retained, states[1].retained)
    if "max_loaded_probes" in settings:
        assert mine.engine.on_device.n_overflowed > 0  # the exact path's retained sets had to be brought there
    else:
        assert mine.engine.on_device.n_overflowed == 0 and steps_of(mine).n_uploaded == 0


def test_changed_retained_sets_are_uploaded_and_nonfinite_rows_keep_theirs(pack):
    mine, theirs = managers(pack, keep_top_k=2)
    hidden = torch.randn(4, 2, HIDDEN, generator=torch.Generator().manual_seed(1))
    hidden[2, 1, 3] = float("nan")
    results = []
    for manager in (mine, theirs):
        first, _ = manager.step(None, hidden[0])
        second, _ = manager.step(first, hidden[1])
        _, again = manager.step(first, hidden[3])  # from an older state
        third, hurt = manager.step(second, hidden[2])
        assert np.array_equal(third.retained[1], second.retained[1]) and hurt.coverage.unseen == (
            "",
            "hidden state is not finite",
        )
        results.append((again, hurt, manager.step(third, hidden[3])[1]))
    for here, there in zip(*results, strict=True):
        close(here, there)
    assert steps_of(mine).n_uploaded == 3  # for the older state, back, and for the row that was not seen


@pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning", "ignore:invalid value encountered:RuntimeWarning"
)
def test_hidden_states_too_large_to_square_are_unseen(pack):
    for manager in managers(pack):
        _, scores = manager.step(None, torch.full((1, HIDDEN), 1e25))
        assert scores.coverage.unseen == ("hidden state is finite, but not once normalised and rounded to float32",)


def test_device_scores_are_read_after_the_models_forward(model, pack, monkeypatch):
    """The results of a step are waited for once the decoder is through, and before anything of the next forward."""
    mine, theirs = managers(pack)
    log, real = [], PendingResults.wait

    def wait(self):
        log.append("read")
        return real(self)

    monkeypatch.setattr(PendingResults, "wait", wait)
    expected = []
    for manager in (mine, theirs):
        handles = [
            model.model.layers[i].register_forward_hook(lambda module, args, output, i=i: log.append(i))
            for i in range(3)
        ]
        events = []
        with manager.attach(model) as run:
            run.on(
                "c3",
                above=0.2,
                action=lambda event, events=events: events.append((event.row, event.column, event.concept)),
            )
            out = model.generate(PROMPT, **GREEDY)
            result = run.result(out)
        for handle in handles:
            handle.remove()
        expected.append((out.tolist(), result, events))
        if manager is mine:
            assert log == [0, 1, 2, "read"] * 5  # the prompt, too, is read once its forward has ended
            assert steps_of(mine).n_uploaded <= 1  # what the prompt retained
    (out, result, events), (same_out, other, others) = expected
    assert out == same_out and events == others and len(events) > 0
    close(result.scores, other.scores)


def test_device_stop_is_at_the_same_token_as_on_the_cpu(pack):
    stopped = []
    for manager in managers(pack):
        model = make_model()
        with manager.attach(model) as run:
            run.on([concept["id"] for concept in pack.concepts[:20]], above=0.45, for_tokens=2, action="stop")
            stopped.append(model.generate(PROMPT, **{**GREEDY, "eos_token_id": EOS}).tolist())
    assert stopped[0] == stopped[1] and len(stopped[0][0]) < PROMPT.shape[1] + 5


def test_inference_mode_leaves_writable_tensors(pack):
    mine, theirs = managers(pack)
    hidden = torch.randn(3, 1, HIDDEN, generator=torch.Generator().manual_seed(4))
    state, expected = None, None
    for x, mode in zip(hidden, (True, False, True), strict=True):
        with torch.inference_mode(mode):
            state, scores = mine.step(state, x)
        expected, there = theirs.step(expected, x)
        close(scores, there)


def test_two_steps_in_progress_have_separate_results(pack):
    mine, _ = managers(pack)
    hidden = torch.randn(2, 1, HIDDEN, generator=torch.Generator().manual_seed(3))
    none = np.zeros((1, pack.n_probes), bool)
    begun = [mine.begin(mine.plan, {"resid_post.1": x}, none) for x in hidden]
    for x, step in zip(hidden, begun, strict=True):
        assert same(step.wait()[0], mine.step(None, x)[1])
