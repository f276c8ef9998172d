"""Trial measures which strategy is faster: `descent` or `exhaustive`, with equal scores."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probemon.core.inputs import InputMaker, Inputs
from probemon.core.plan import CascadePlan
from probemon.engine.cascade import apply_rule
from probemon.engine.pairs import PackScores
from probemon.packs.pack import ProbePack

STRATEGIES = ("auto", "descent", "exhaustive")
BATCH = 64
_REPEATS = 7
# Limits of an exhaustive trial, whose time is scaled up.
_EXHAUSTIVE_BYTES, _EXHAUSTIVE_PAIRS = 32 << 20, 1 << 16
_BATCH_CELLS = 1 << 20


@dataclass(frozen=True)
class Choice:
    """Strategies of a `step` (one token) and of a `batch`; `why` in words."""

    step: str
    batch: str
    why: str
    measured: bool = False


@dataclass(frozen=True)
class Trial:
    """Measures a pack; `descend(plan, inputs)` evaluates by descent."""

    pack: ProbePack
    inputs: InputMaker
    scores: PackScores
    descend: Callable[[CascadePlan, Inputs], object]

    def choose(self, plan: CascadePlan) -> Choice:
        """Time both strategies on the pack's golden states, or on random ones."""
        n = min(BATCH, max(2, _BATCH_CELLS // self.pack.n_probes))
        states, kind = self._states(n)
        step, step_why = self._faster(plan, self.inputs.make({site: x[:1] for site, x in states.items()}))
        batch, batch_why = self._faster(plan, self.inputs.make(states))
        why = f"measured on {kind} states: one token {step_why}; {n} tokens {batch_why}"
        return Choice(step, batch, why, measured=True)

    def _states(self, n: int) -> tuple[dict[str, Tensor], str]:
        golden, sites = self.pack.golden_hidden, self.pack.sites
        if golden is not None and len(golden):
            repeated = golden[torch.arange(n, device="cpu") % len(golden)]
            states, kind = {site: repeated[:, i] for i, site in enumerate(sites)}, "golden"
        else:
            generator = torch.Generator().manual_seed(0)
            size = (n, self.pack.architecture.hidden_size)
            random = [torch.randn(size, generator=generator, dtype=torch.float32, device="cpu") for _ in sites]
            states, kind = dict(zip(sites, random, strict=True)), "random"
        return {spec.site: next(iter(states.values())) for spec in self.inputs.specs} | states, kind

    def _faster(self, plan: CascadePlan, inputs: Inputs) -> tuple[str, str]:
        n, n_probes = len(inputs), self.pack.n_probes
        share = min(1.0, _EXHAUSTIVE_BYTES / max(1, self.pack.weight_bytes()), _EXHAUSTIVE_PAIRS / (n * n_probes))
        sample = np.arange(max(1, int(n_probes * share)))
        if len(self.pack.tree.groups):
            sample = np.flatnonzero(self.pack.tree.groups.close(np.isin(np.arange(n_probes), sample)[None])[0])
        everything = np.zeros((n, n_probes), dtype=np.float32)

        def exhaustive() -> None:
            scores = self.scores.of(inputs, np.repeat(np.arange(n), len(sample)), np.tile(sample, n))
            everything[:, sample] = scores.reshape(n, len(sample))

        def rule() -> None:
            scores = self.pack.tree.times_best_parent(everything.copy()) if plan.path_rule else everything
            apply_rule(plan, scores, None)

        def descent() -> None:
            self.descend(plan, inputs)

        sample_seconds, descent_seconds = _interleaved([exhaustive, descent])
        exhaustive_seconds = sample_seconds * n_probes / len(sample)
        if exhaustive_seconds < descent_seconds:  # else the rule's time changes nothing
            exhaustive_seconds += _interleaved([rule])[0]
        name = "exhaustive" if exhaustive_seconds < descent_seconds else "descent"
        return name, f"{name} (all probes {exhaustive_seconds * 1e3:.2f} ms, a descent {descent_seconds * 1e3:.2f} ms)"


def _interleaved(trials: list[Callable[[], None]]) -> list[float]:
    """Return median seconds of each, interleaved after a warm-up."""
    seconds: list[list[float]] = [[] for _ in trials]
    begin = time.perf_counter()
    for repeat in range(_REPEATS + 1):
        for trial, times in zip(trials, seconds, strict=True):
            start = time.perf_counter()
            trial()
            if repeat:
                times.append(time.perf_counter() - start)
        if repeat and time.perf_counter() - begin > 0.5:
            break
    return [statistics.median(times) for times in seconds]
