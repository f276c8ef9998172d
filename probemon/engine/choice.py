"""A trial measures which strategy is faster, since that depends on the machine, the pack and the rule.

    choice = Trial(pack, inputs, scores, descend).choose(plan)
    choice.step, choice.batch, choice.why      # "descent", "exhaustive", "measured on golden states: ..."

`descent` scores a probe when the hierarchy reaches it, `exhaustive` scores every probe and applies the rule to the
scores. Scores are bitwise the same either way.
"""

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
BATCH = 64  # states of the measured batch: a prompt or a document, against one token of a few rows
_REPEATS = 7
# Weights read and pairs scored in a trial of exhaustive evaluation; a larger pack's time is scaled up.
_EXHAUSTIVE_BYTES, _EXHAUSTIVE_PAIRS = 32 << 20, 1 << 16
_BATCH_CELLS = 1 << 20  # (state, probe) cells of the measured batch: of a large pack it has fewer states


@dataclass(frozen=True)
class Choice:
    """Names the strategy of a `step`, a token of a few rows, and of a `batch` of many tokens; `why` in words."""

    step: str
    batch: str
    why: str
    measured: bool = False  # so that another run on this machine may choose otherwise


@dataclass(frozen=True)
class Trial:
    """Measures a pack, with its inputs and scores; `descend(plan, inputs)` evaluates by descent."""

    pack: ProbePack
    inputs: InputMaker
    scores: PackScores
    descend: Callable[[CascadePlan, Inputs], object]

    def choose(self, plan: CascadePlan) -> Choice:
        """Time both strategies on the pack's golden states (on random ones where it has none)."""
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
        # Sites that only other packs of the arena read have to be there, whatever is in them.
        return {spec.site: next(iter(states.values())) for spec in self.inputs.specs} | states, kind

    def _faster(self, plan: CascadePlan, inputs: Inputs) -> tuple[str, str]:
        n, n_probes = len(inputs), self.pack.n_probes
        part = min(1.0, _EXHAUSTIVE_BYTES / max(1, self.pack.weight_bytes()), _EXHAUSTIVE_PAIRS / (n * n_probes))
        some = np.arange(max(1, int(n_probes * part)))
        if len(self.pack.tree.groups):  # each whole
            some = np.flatnonzero(self.pack.tree.groups.close(np.isin(np.arange(n_probes), some)[None])[0])
        everything = np.zeros((n, n_probes), dtype=np.float32)

        def exhaustive() -> None:
            scores = self.scores.of(inputs, np.repeat(np.arange(n), len(some)), np.tile(some, n))
            everything[:, some] = scores.reshape(n, len(some))

        def rule() -> None:
            scores = self.pack.tree.times_best_parent(everything.copy()) if plan.path_rule else everything
            apply_rule(plan, scores, None)

        def descent() -> None:
            self.descend(plan, inputs)

        of_some, of_descent = _interleaved([exhaustive, descent])
        scaled = of_some * n_probes / len(some)
        if scaled < of_descent:  # else the rule, which the sets of all scores still need, cannot change the answer
            scaled += _interleaved([rule])[0]
        name = "exhaustive" if scaled < of_descent else "descent"
        return name, f"{name} (all probes {scaled * 1e3:.2f} ms, a descent {of_descent * 1e3:.2f} ms)"


def _interleaved(trials: list[Callable[[], None]]) -> list[float]:
    """Return median seconds of each, in a round robin after a warm-up; fewer rounds where a round is slow."""
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
