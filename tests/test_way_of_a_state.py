"""A hidden state passes from the tap to its scores through the modules that docs/architecture.md lists."""

import re
import sys
from pathlib import Path

import pytest
import torch

import probemon
from conftest import PAD, make_model
from probemon import DynamicProbeManager
from probemon.monitor.breaker import Breaker
from probemon.monitor.sinks import MemorySink

PACKAGE = Path(probemon.__file__).parent
PAGE = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
# Where a module takes hold of the state: the tap's hook, and what waits for the step that was begun with it.
DOORS = {("host/tap.py", "hook"), ("engine/scorer.py", "wait")}


class Walk:
    """Counts the modules of the package whose functions run below one of the doors, in the order of their first."""

    def __init__(self):
        self.modules, self._inside = [], 0

    def __call__(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        name = path.relative_to(PACKAGE).as_posix()
        at_door = (name, frame.f_code.co_name) in DOORS
        if event == "return":
            self._inside -= at_door
            return
        self._inside += at_door
        if self._inside and name not in self.modules:
            self.modules.append(name)


def test_token_passes_at_most_eleven_modules_from_tap_to_scores(pack):
    pytest.importorskip("numba")
    model = make_model()
    manager = DynamicProbeManager(pack, impl="numba", strategy="descent")
    walk, n_forwards = Walk(), 0

    def in_the_fifth_forward(module, args):
        nonlocal n_forwards
        n_forwards += 1
        sys.setprofile(walk if n_forwards == 5 else None)

    with manager.attach(model), model.register_forward_pre_hook(in_the_fifth_forward):
        ids = torch.tensor([[1, 5, 9, 13]])
        model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    sys.setprofile(None)
    assert n_forwards == 8 and len(walk.modules) <= 11, "\n".join(walk.modules)
    drawn = PAGE.split("## The way of one hidden state")[1].split("```")[1]
    expected = re.findall(r"^ *([a-z_/]+\.py)", drawn, flags=re.MULTILINE)
    if sys.version_info >= (3, 13):  # whose profiler is not told of compiled functions
        expected.remove("engine/kernels/numba_compiled.py")
    assert walk.modules == expected


def modules_of_a_step(manager, model, prepare=lambda run: None, **options):
    """The modules whose functions run in the whole fifth step of a generation, from one forward to the next."""
    entered, n_forwards = {}, 0

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            entered.setdefault(path.relative_to(PACKAGE).as_posix())

    def in_the_fifth_forward(module, args):
        nonlocal n_forwards
        n_forwards += 1
        sys.setprofile(note if n_forwards == 5 else None)

    handle = model.register_forward_pre_hook(in_the_fifth_forward)
    with handle, manager.attach(model, **options) as run:
        prepare(run)
        ids = torch.tensor([[1, 5, 9, 13]])
        model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    sys.setprofile(None)
    return list(entered)


def test_whole_step_enters_a_bounded_number_of_modules(pack):
    pytest.importorskip("numba")
    model, manager = make_model(), DynamicProbeManager(pack, impl="numba", strategy="descent")
    plain = modules_of_a_step(manager, model)
    acting = modules_of_a_step(
        manager,
        model,
        lambda run: run.on("c1", above=0.9, aggregate="ema:0.3", action="record"),
        followers=[MemorySink()],
        breaker=Breaker(),
    )
    assert len(plain) <= 25 and len(acting) <= 31, "\n".join([*plain, "", *acting])
