"""What the number of probes costs: packs of 1,000 to 100,000 opened and made managers of, and steps that evaluate as
many probes in each: of one row, of 64 rows at once, and of a pack that reads 8 sites. What a step keeps and takes of
memory is counted, and rules are asked of a token, up to 10,000 of them.

    found = measure((1000, 10_000, 100_000), n_steps=200)
    found["rows"], found["claims"]

Weights, hierarchies (nine levels, a third of the probes with two parents) and states are random. The threshold that
opens concepts is set for each pack so that a step evaluates some 200 probes of a row.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.timing import interleaved, rows_of, summary, wall_clock
from probemon import DynamicProbeManager, ProbePack
from probemon.core.scores import RowState
from probemon.monitor.rule_panel import RulePanel
from probemon.monitor.rule_spec import RuleSpec
from probemon.tracking.align import GENERATED, PlacedTokens

HIDDEN = 576
N_EVALUATED = 200
N_ROOTS = 20
_GROWTH = (1, 4, 12, 24, 36, 48, 60, 60)  # of the levels below the roots
N_ROWS, N_SITES = 64, 8
_OPENED = 9
_WARM = 20
_N_RULES = (10, 1000, 10_000)


def measure(numbers: Sequence[int], n_steps: int) -> dict[str, Any]:
    """Rows and claims of the packs' sizes, ascending: what is claimed compares the last with the first."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as scratch:
        packs = {n: _written(Path(scratch) / str(n), n) for n in numbers}
        managers = {n: _evaluating(pack, _states(n_steps)) for n, pack in packs.items()}
        rows = [row for n, manager in managers.items() for row in _begun(manager, n)]
        steps = _steps(managers, n_steps)
        rows += _steps(managers, n_steps // 4, n_rows=N_ROWS)
        few = numbers[0]
        of_sites = _written(Path(scratch) / "sites", few, N_SITES)
        both = {few: managers[few], -few: _evaluating(of_sites, _states(n_steps))}
        rows += [row for row in _steps(both, n_steps) if row["part"] != "step at scale"]
        rows += _rules(managers[numbers[-1]], n_steps)
    [opened] = [row for row in rows if row["part"] == "open at scale" and row["n_probes"] == numbers[-1]]
    [largest] = [row for row in steps if row["n_probes"] == numbers[-1]]
    claims = {
        "open_100k_ms": opened["median_us"] / 1e3,
        "step_100k_vs_1k": (largest["ratio_to_ours"], *largest["ratio_to_ours_interval"]),
    }
    return {"rows": [*rows, *steps], "claims": claims}


def _written(folder: Path, n: int, n_sites: int = 1) -> ProbePack:
    rng, generator = np.random.default_rng(n), torch.Generator().manual_seed(n)
    sizes = [N_ROOTS, *((n - N_ROOTS) * np.array(_GROWTH) // sum(_GROWTH)).tolist()]
    sizes[-1] += n - sum(sizes)
    concepts, first = [], 0
    for above, size in zip([0, *sizes], sizes, strict=False):
        for i in range(size):
            parents = set(rng.integers(first - above, first, size=1 + (i % 3 == 0)).tolist()) if above else set()
            concepts.append(
                {"id": f"random-{len(concepts)}", "name": "random", "parents": [f"random-{p}" for p in sorted(parents)]}
            )
        first += size
    return ProbePack.write(
        folder,
        name="random-scale",
        concepts=concepts,
        weights={
            "w1": (torch.randn(n, 1, HIDDEN, generator=generator) / HIDDEN**0.5).to(torch.bfloat16),
            "b1": torch.zeros(n, 1),
        },
        score_rule="independent",
        inputs=[{"site": f"resid_post.{site}", "norm": "none"} for site in range(n_sites)],
        input_index=torch.arange(n) % n_sites,
        host={"hidden_size": HIDDEN},
        licence="Apache-2.0",
        card="Random weights, for measuring time only.\n",
        alert_threshold=torch.full((n,), 0.9),
    )


def _begun(manager: DynamicProbeManager, n: int) -> list[dict[str, Any]]:
    """How long a pack takes to open, and a manager of it to make, with everything in the page cache."""
    assert isinstance(manager.pack, ProbePack)
    calls: dict[str, Callable[[], object]] = {
        "open at scale": partial(ProbePack.open, manager.pack.directory),
        "manager at scale": partial(_manager, manager.pack, manager.config.load_threshold),
    }
    where = {"n_probes": n, "hidden": HIDDEN, "dtype": "bfloat16", "method": "ours"}
    rows = []
    for part, call in calls.items():
        taken = [wall_clock(call) for _ in range(_OPENED + 1)][1:]
        rows.append({"part": part, **where, **summary(taken)})
    return rows


def _manager(pack: ProbePack, threshold: float, strategy: str = "auto") -> DynamicProbeManager:
    return DynamicProbeManager(pack, load_threshold=threshold, strategy=strategy, max_loaded_probes=pack.n_probes)


def _states(n: int) -> torch.Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(0))


def _steps(managers: dict[int, DynamicProbeManager], n_steps: int, n_rows: int = 1) -> list[dict[str, Any]]:
    """Steps of some rows through the same states, the packs in turns."""
    states, rows = _states(n_steps * n_rows), dict[int, RowState | None].fromkeys(managers)
    counts: dict[int, list[float]] = {n: [] for n in managers}

    def step(n: int, at: int) -> None:
        first = at % n_steps * n_rows
        hidden = dict.fromkeys(managers[n].pack.sites, states[first : first + n_rows])
        rows[n], scores = managers[n].step(rows[n] if at % n_steps else None, hidden)
        counts[n].append(float(scores.coverage.evaluated.mean()))

    taken = interleaved({str(n): partial(step, n) for n in managers}, n_steps, n_warm=_WARM)
    found = []
    for n, timed in zip(managers, rows_of(taken, {}, ours=str(next(iter(managers))), floor=None), strict=True):
        manager = managers[n]
        n_sites = len(manager.pack.sites)
        of = f" of {n_rows} rows" if n_rows > 1 else f" of {n_sites} sites" if n_sites > 1 else ""
        where = {"part": f"step{of} at scale", "n_probes": manager.pack.n_probes, "hidden": HIDDEN, "dtype": "bfloat16"}
        where["batch"] = n_rows
        where["evaluated"] = round(float(np.mean(counts[n][_WARM:])), 1)
        found.append({**timed, **where, "method": "ours", **_memory(manager, states[:n_rows])})
    return found


def _memory(manager: DynamicProbeManager, states: torch.Tensor) -> dict[str, int]:
    """Bytes that a step keeps for the next one, by row, and of its scores, by token; and what it takes of memory
    at most, which NumPy tells `tracemalloc`: an array of all probes shows there.
    """
    hidden = dict.fromkeys(manager.pack.sites, states)
    state, _ = manager.step(None, hidden)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        state, scores = manager.step(state, hidden)
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    kept = [getattr(part, field.name) for part in (scores, scores.coverage) for field in dataclasses.fields(part)]
    n_bytes = sum(one.nbytes for one in kept if isinstance(one, np.ndarray))
    return {
        "row_bytes": state.retained.nbytes // len(states),
        "token_bytes": n_bytes // len(states),
        "peak_bytes": peak,
    }


def _rules(manager: DynamicProbeManager, n_steps: int) -> list[dict[str, Any]]:
    """What it takes to ask rules on tokens' own scores of a token, of as many concepts as there are rules."""
    _, scores = manager.step(None, dict.fromkeys(manager.pack.sites, _states(1)))
    one = np.zeros(1, dtype=np.int64)
    placed = PlacedTokens(one, one, one, one, GENERATED)
    panels = {}
    for n in _N_RULES:
        chosen = [concept["id"] for concept in manager.pack.concepts[:n]]
        panels[str(len(chosen))] = RulePanel(list(enumerate(RuleSpec(chosen, above=0.9).rules(manager.pack))))
    known: dict[str, dict[int, Any]] = {name: {} for name in panels}
    taken = interleaved(
        {
            name: lambda at, name=name, panel=panel: list(panel.ask(placed, scores, lambda _: known[name]))
            for name, panel in panels.items()
        },
        n_steps,
        n_warm=_WARM,
    )
    where = {"part": "rules at scale", "n_probes": manager.pack.n_probes}
    return [{**where, "n_rules": int(name), "method": "ours", **summary(seconds)} for name, seconds in taken.items()]


def _evaluating(pack: ProbePack, states: torch.Tensor) -> DynamicProbeManager:
    """A manager whose steps through states evaluate about `N_EVALUATED` probes of a pack."""
    low, high = 0.0, 1.0
    for _ in range(12):
        manager = _manager(pack, (low + high) / 2, "descent")
        state: RowState | None = None
        evaluated = []
        for hidden in states.split(1):
            state, scores = manager.step(state, dict.fromkeys(pack.sites, hidden))
            evaluated.append(int(scores.coverage.evaluated[0]))
        mean = statistics.mean(evaluated)
        if abs(mean - N_EVALUATED) <= 0.02 * N_EVALUATED:
            break
        middle = (low + high) / 2
        low, high = (middle, high) if mean > N_EVALUATED else (low, middle)
    return manager
