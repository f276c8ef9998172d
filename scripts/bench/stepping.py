"""A whole step of a cascade: ours against the first implementation's way, against the scoring alone, cold, paged, and
opened.

    found = measure(n_probes=5000, n_tokens=60)
    found["rows"], found["claims"]

The slow twin of profile_cascade.py has fp32 modules and files; ours has the same weights in bf16: every value was
rounded to bf16 before either got it, and so was every hidden state, so both compute the same scores.
"""

from __future__ import annotations

import dataclasses
import gc
import shutil
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.timing import interleaved, ratio, rows_of, summary
from cascade_profile.world import LOAD_THRESHOLD, World, make_world, write_files, write_pack
from probemon import DynamicProbeManager, ProbePack
from probemon.core.scores import RowState
from profile_cascade import Disagreement, Pair, Setting, SlowTwin, SuccessorTwin, check_agreement

TOP_30 = Setting("top_30", (0,), 30)
OURS, FIXED_POINT, FP32 = "ours: a step", "ours: a step, as many rounds as it takes", "ours: a step, fp32 weights"
SCORING, SLOW, SUCCESSOR = "ours: the scoring alone", "slow twin: a step", "successor: a step"
_ALIKE = 1e-5
_COLD = 9
_OPENED = 15


class _Silent:
    def update(self) -> None:
        pass


def measure(n_probes: int, n_tokens: int) -> dict[str, Any]:
    """Rows and claims. Raises `profile_cascade.Disagreement` where the two do not do the same work."""
    world = make_world(n_probes=n_probes, n_tokens=n_tokens, hidden_size=576, seed=0)
    world = _rounded(world)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        files = write_files(world, Path(scratch) / "files")
        half = {name: w.to(torch.bfloat16) if name.startswith("w") else w for name, w in world.weights.items()}
        pack = write_pack(dataclasses.replace(world, weights=half), Path(scratch) / "pack")
        manager = _manager(pack)
        pair = Pair(TOP_30, SlowTwin(files, world.children(), world.level, TOP_30), manager, world.states)
        worst = check_agreement(pair, _Silent())  # type: ignore[arg-type]
        successor = SuccessorTwin(files, world.children(), world.level, TOP_30)
        _check_successor(pair.twin, successor, world.states)
        wide = write_pack(world, Path(scratch) / "fp32")
        steps = _steps(pair, successor, wide, n_probes)
        cold = _cold(world, files, Path(scratch) / "pack", n_probes)
        opened = _opened(Path(scratch) / "pack", n_probes)
        paged = _paged(pack, world, n_probes)
        shutil.rmtree(Path(scratch) / "files")
    rows = [*steps["rows"], *cold["rows"], *opened["rows"], *paged]
    return {
        "rows": rows,
        "claims": {**steps["claims"], **cold["claims"], **opened["claims"]},
        "agreement": {"largest_score_difference": worst, "states": world.states_are},
    }


def _rounded(world: World) -> World:
    weights = {name: w.to(torch.bfloat16).float() if name.startswith("w") else w for name, w in world.weights.items()}
    return dataclasses.replace(world, weights=weights, states=world.states.to(torch.bfloat16).float())


def _manager(pack: ProbePack, **changes: Any) -> DynamicProbeManager:
    # One round a token and no limit, as the first implementation had them; the strategy is not left to a measurement.
    settings = {
        "load_threshold": LOAD_THRESHOLD,
        "max_rounds": 1,
        "keep_top_k": 30,
        "max_loaded_probes": max(1000, pack.n_probes),
        "strategy": "descent",
    }
    return DynamicProbeManager(pack, **{**settings, **changes})


def _check_successor(twin: SlowTwin, successor: SlowTwin, states: torch.Tensor) -> None:
    """Raise `Disagreement` unless both twins score the same probes alike."""
    twin.begin()
    successor.begin()
    for at, hidden in enumerate(states.split(1)):
        one, other = twin.step(hidden).scores, successor.step(hidden).scores
        if one.keys() != other.keys() or max(abs(one[probe] - other[probe]) for probe in one) > _ALIKE:
            raise Disagreement(f"the two slow twins score token {at} differently")


def _steps(pair: Pair, successor: SlowTwin, wide: ProbePack, n_probes: int) -> dict[str, Any]:
    """Token by token in turns: the twins' steps, ours, one call that scores what our step half a stream away evaluates,
    and steps of ours with as many rounds as it takes, and with weights in fp32.
    """
    manager, states = pair.ours, pair.states
    [site] = manager.pack.sites
    sets, state = [], None  # type: ignore[var-annotated]
    for hidden in states.split(1):
        state, scores = manager.step(state, hidden)
        sets.append(torch.from_numpy(scores.active(0).astype(np.int64)))
    pair.twin.begin()
    managers = {OURS: manager, FIXED_POINT: _manager(pair.ours.pack, max_rounds=None), FP32: _manager(wide)}
    current: dict[str, RowState | None] = dict.fromkeys(managers)
    counts: dict[str, list[int]] = {name: [] for name in managers}
    n = len(states)

    def step(name: str, at: int) -> None:
        before = current[name] if at % n > 0 else None
        current[name], scores = managers[name].step(before, states[at % n : at % n + 1])
        counts[name].append(int(scores.coverage.evaluated[0]))

    ours = partial(step, OURS)

    def scoring(at: int) -> None:
        other = (at + n // 2) % n
        manager.engine.scores.of(
            manager.engine.inputs({site: states[other : other + 1]}),
            np.zeros(len(sets[other]), np.int64),
            sets[other].numpy(),
        )

    def slow(twin: SlowTwin, at: int) -> None:
        if at == 0:
            twin.begin()
        if at >= 0:
            twin.step(states[at : at + 1])

    gc.collect()
    gc.freeze()  # a collection that walks the host model's libraries takes 0.2 s, and would fall into some step
    methods: dict[str, Any] = {name: partial(step, name) for name in managers}
    twins = {SLOW: partial(slow, pair.twin), SUCCESSOR: partial(slow, successor)}
    taken = interleaved({**methods, SCORING: scoring, **twins}, n)
    gc.unfreeze()
    # Two runs through the stream without the twin between, whose modules sweep the caches.
    alone = interleaved({OURS: ours, SCORING: scoring}, 4 * n)
    where = {
        "part": "step",
        "n_probes": n_probes,
        "hidden": states.shape[1],
        "dtype": "bfloat16",
        "batch": 1,
        "evaluated": round(float(np.mean([len(s) for s in sets])), 1),
    }
    rows = rows_of(taken, where, ours=OURS, floor=None)
    for row in rows:
        if row["method"] in managers:
            row["evaluated"] = round(float(np.mean(counts[row["method"]][-n:])), 1)
            row["dtype"] = "float32" if row["method"] == FP32 else "bfloat16"
    rows += rows_of(alone, {**where, "part": "step, alone"}, ours=OURS, floor=None)
    return {
        "rows": rows,
        "claims": {
            "step_vs_slow_twin": ratio(taken[SLOW], taken[OURS]),
            "step_vs_scoring": ratio(alone[OURS], alone[SCORING]),
        },
    }


def _cold(world: World, files: list[Path], folder: Path, n_probes: int) -> dict[str, Any]:
    """The first step of a process's pack: nothing of it read before, the files in the page cache. Several, at different
    tokens.
    """
    taken: dict[str, list[float]] = {"ours: a cold step": [], "slow twin: a cold step": []}
    children = world.children()
    (folder / "probes.safetensors").read_bytes()
    for at in range(_COLD):
        hidden = world.states[[at * 7 % len(world.states)]]
        manager = _manager(ProbePack.open(folder))
        begin = time.perf_counter()
        manager.step(None, hidden)
        taken["ours: a cold step"].append(time.perf_counter() - begin)
        twin = SlowTwin(files, children, world.level, TOP_30)
        for path in files:
            path.stat()
        begin = time.perf_counter()
        twin.begin()  # its base probes are files to be read, too
        twin.step(hidden)
        taken["slow twin: a cold step"].append(time.perf_counter() - begin)
    rows = rows_of(
        taken,
        {"part": "cold", "n_probes": n_probes, "hidden": world.states.shape[1], "dtype": "bfloat16", "batch": 1},
        ours="ours: a cold step",
        floor=None,
    )
    return {
        "rows": rows,
        "claims": {"cold_vs_slow_twin": ratio(taken["slow twin: a cold step"], taken["ours: a cold step"])},
    }


def _opened(folder: Path, n_probes: int) -> dict[str, Any]:
    taken = []
    for _ in range(_OPENED):
        begin = time.perf_counter()
        ProbePack.open(folder)
        taken.append(time.perf_counter() - begin)
    row = {
        "part": "open",
        "n_probes": n_probes,
        "hidden": 576,
        "dtype": "bfloat16",
        "method": "ours: open a pack",
        **summary(taken),
    }
    return {"rows": [row], "claims": {"open_ms": statistics.median(taken) * 1e3}}


def _paged(pack: ProbePack, world: World, n_probes: int) -> list[dict[str, Any]]:
    """The same stream with the pack resident, paged from copies in RAM, and paged from the pack's file."""
    one = -(-pack.weight_bytes() // pack.n_probes)
    slots = 3 * 64 * one
    managers = {
        "resident": _manager(pack),
        "paged, copies in RAM": _manager(pack, arena_bytes=slots, cache_bytes=pack.weight_bytes()),
        "paged, nothing kept in RAM": _manager(pack, arena_bytes=slots, cache_bytes=0),
    }
    states: dict[str, RowState | None] = dict.fromkeys(managers)
    n = len(world.states)

    def step(name: str, at: int) -> None:
        states[name], _ = managers[name].step(states[name] if at % n else None, world.states[at % n : at % n + 1])

    taken = interleaved({name: partial(step, name) for name in managers}, n)
    return rows_of(
        taken,
        {"part": "paging", "n_probes": n_probes, "hidden": 576, "dtype": "bfloat16", "batch": 1, "slots": slots // one},
        ours="resident",
        floor=None,
    )
