"""The measured overhead of watching comes with an interval that contains the true value."""

import threading
import time

import pytest
import torch

from conftest import make_model
from probemon import DynamicProbeManager
from probemon.errors import ConfigError
from probemon.monitor.lockstep import in_lockstep, shared_copy
from probemon.monitor.overhead import added_pct, compared, overhead

IDS = torch.arange(5)[None]


def generating(model, taken=None):
    def side(criteria, n_tokens):
        options = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False}
        out = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), stopping_criteria=criteria, **options)
        if taken is not None:
            taken.append(out.tolist())

    return side


def test_sides_alternate_steps_and_generate_as_they_would_alone():
    model, steps, lock = make_model(), [], threading.Lock()
    other, outs = shared_copy(model), []

    def note(side):
        def hook(module, args, kwargs):
            assert lock.acquire(blocking=False), "both ran at once"
            steps.append(side)

        return hook

    for side, host in enumerate((model, other)):
        host.model.register_forward_pre_hook(note(side), with_kwargs=True)
        host.model.register_forward_hook(lambda *_: lock.release())
    seconds = in_lockstep(generating(model, outs), generating(other, outs), 6, first=1)
    assert steps == [1, 0] * 6 and seconds.shape == (5, 2) and (seconds > 0).all()
    assert outs[0] == outs[1] == make_model().generate(
        input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=6, min_new_tokens=6, do_sample=False
    ).tolist()  # fmt: skip


def test_shared_copy_has_the_same_weights_and_no_later_hooks():
    model = make_model()
    other = shared_copy(model)
    model.register_forward_hook(lambda *_: pytest.fail("the copy has the hook"))
    other(IDS)
    ours, copied = dict(model.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == copied.keys() and all(ours[name] is copied[name] for name in ours)
    model.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM cannot be copied .*lock"):
        shared_copy(model)


@pytest.mark.parametrize("failing", [0, 1])
def test_failing_side_ends_the_other_and_is_reported(failing):
    model = make_model()
    other, n, before = shared_copy(model), [], threading.active_count()

    def fail(module, args, kwargs):
        n.append(1)
        if len(n) == 3:
            raise ValueError("third step")

    (model, other)[failing].model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(ValueError, match="third step"):
        in_lockstep(generating(model), generating(other), 6)
    assert threading.active_count() == before


def test_extra_work_of_a_side_is_measured_and_equal_sides_show_none():
    model = make_model()
    other, times = shared_copy(model), {}
    extra = 0.004

    def work(*_):
        end = time.perf_counter() + extra
        while time.perf_counter() < end:
            pass

    for name in ("same", "more"):
        handle = other.model.register_forward_hook(work) if name == "more" else None
        turns = [in_lockstep(generating(model), generating(other), 8, first=i % 2) for i in range(10)]
        times[name] = [[step[side] for step in turn] for side in range(2) for turn in turns]
        if handle:
            handle.remove()
    bare, same = times["same"][:10], times["same"][10:]
    _, low, high = added_pct(bare, same)
    assert low - 5 < 0 < high + 5  # a step of this host takes a millisecond: 5 % are 50 us
    bare, more = times["more"][:10], times["more"][10:]
    value, low, high = added_pct(bare, more)
    host = sorted(step for turn in bare for step in turn)[len(bare) * 7 // 2]
    assert low * 0.8 < 100 * extra / host < high * 1.2 and value > 0


def test_sides_swap_models_between_turns_and_start_equally_often():
    model, begun = make_model(), []

    def side(name):
        def generate(criteria, n_tokens):
            begun.append(name)
            generating(model)(criteria, n_tokens)

        return generate

    compared([(side("a"), side("b")), (side("c"), side("d"))], 3, 1e9, 600)
    assert "".join(begun) == "abcdbadc" * 2


def test_measurement_ends_at_a_narrow_interval_or_when_time_is_up(pack, model):
    manager, inputs = DynamicProbeManager(pack), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    wide = overhead(manager, model, inputs, n_tokens=3, width_pct=1e9, most_seconds=600)
    assert wide.is_resolved and wide.n_steps == 8 * 2
    short = overhead(manager, model, inputs, n_tokens=3, width_pct=0, most_seconds=0)
    assert not short.is_resolved and short.n_steps == 2 * 2 and short.interval_pct[0] <= short.overhead_pct + 1e-9
    assert short.overhead_pct == pytest.approx(100 * short.added_ms / short.host_ms) and short.monitor_ms > 0
