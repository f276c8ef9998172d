"""function_probe: any function of hidden states as a probe, beside the packs.

    def loudness(hidden):                                   # [N, D]: N tokens
        return torch.sigmoid(hidden.float().norm(dim=-1) / 100 - 1)     # [N], from 0 to 1

    probe = function_probe(loudness, "resid_post.15", "loudness", threshold=0.9)
    with manager.attach(model, tokenizer, followers=[probe]) as run:
        run.on("loudness", for_tokens=3, action="stop")
        out = model.generate(**inputs)
    run.result(out).functions["loudness"].values            # [M], by row and position as the scores

Each token of the output is shown once, as a copy of its hidden state. The numbers are recorded with the scores of its
batch, so rows, padding, beams and accepted drafts are those of the scores.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from probemon.core.concept_names import Names, Wanted
from probemon.core.function_scores import FunctionScores
from probemon.core.probes import as_site
from probemon.core.scores import Scores
from probemon.errors import ConfigError, RuleError
from probemon.host.site import Site
from probemon.monitor.check import OK, WARNING, Check
from probemon.monitor.followers import Batch, Follower
from probemon.monitor.health import state_of
from probemon.monitor.rule_spec import TRAINED, Rule, RuleSpec
from probemon.packs.group import AnyPack
from probemon.tracking.generation import States
from probemon.util.checks import check_callable, check_number
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

Function = Callable[[Tensor], Any]


def function_probe(
    fn: Function, site: str, name: str, *, threshold: float | None = None, budget_ms: float | None = None
) -> FunctionProbe:
    """Return a follower that makes a probe of `fn`, for `attach(followers=[...])`.

    - `fn`: takes hidden states `[N, D]` of N tokens, in the model's dtype and on its device, and returns N numbers from
      0 to 1: a tensor, an array or a list. A number has to depend on its own hidden state alone
    - `site`: where they are read, such as "resid_post.15"
    - `name`: of the concept in results, rules and sinks; no concept of the pack has it
    - `threshold`: of alerts, and the default of its rules
    - `budget_ms`: longest time of a call; `run.health()` counts those that took longer

    `fn` runs in the generating thread, and the model waits for it. If it raises or returns something else than N
    numbers, the generation goes on, its tokens have no number, and the error is in `run.failures`. A number that is not
    from 0 to 1 is left out and counted. Raises `ConfigError`.
    """
    return FunctionProbe(fn, site, name, threshold=threshold, budget_ms=budget_ms)


class FunctionProbe(Follower):
    """See `function_probe`.

    - `n_tokens`, `n_unseen`: tokens recorded, and those without a number; `why_unseen` counts the reasons
    - `n_calls`, `seconds`, `slowest_seconds`, `n_slow`: of the function; `n_slow` took longer than `budget_ms`
    """

    def __init__(
        self, fn: Function, site: str, name: str, *, threshold: float | None = None, budget_ms: float | None = None
    ) -> None:
        check_callable("fn", fn)
        if not isinstance(name, str) or not name.strip():
            raise ConfigError(f"name is {name!r:.80}: give a name for the function's concept")
        if not isinstance(site, str):
            raise ConfigError(f"site is {site!r:.80}: give a place in the model, such as 'resid_post.15'")
        self.name, self.site, self._fn = name, as_site(site), fn
        self.threshold = math.nan
        if threshold is not None:
            remedy = "a score has to exceed it, so give 0 or more, and less than 1"
            self.threshold = check_number("threshold", threshold, low=0, high=1, open_high=True, remedy=remedy)
        self.budget_ms = math.inf
        if budget_ms is not None:
            remedy = "give milliseconds, more than 0"
            self.budget_ms = check_number("budget_ms", budget_ms, low=0, open_low=True, remedy=remedy)
        self.kind = f"the function probe {name!r}"
        self.n_tokens = self.n_unseen = self.n_calls = self.n_slow = 0
        self.seconds = self.slowest_seconds = 0.0
        self.why_unseen = Counter[str]()

    def attaching(self, run: MonitorRun) -> Sequence[str | Site]:
        """Ask for the site. Raises `ConfigError` if the name is taken."""
        pack = run.manager.pack
        if any(self.name in (concept["id"], concept["name"]) for concept in pack.concepts):
            raise ConfigError(f"{self.name!r} is a concept of {pack.name}: give the function another name")
        if any(isinstance(one, FunctionProbe) and one.name == self.name for one in run.followers):
            raise ConfigError(f"two functions are called {self.name!r}: give one another name")
        return [] if self.site in pack.sites else [self.site]

    def states(self, batch: Batch, hidden: States | str) -> None:
        """Call the function. Raises its errors, which the run keeps."""
        n = len(batch.placed)
        if isinstance(hidden, str):
            batch.keep_function(self.name, FunctionScores.nothing(n, hidden, self.threshold))
            return
        states, began = hidden[self.site].detach().clone(), time.perf_counter()
        devices = [states.device] if states.device.type == "cuda" else []
        try:
            # Sampling must not depend on what the function draws.
            with torch.no_grad(), torch.random.fork_rng(devices):
                numbers = self._numbers(self._fn(states), n)
        except Exception as error:
            reason = f"{self.name} raised {type(error).__name__}"
            batch.keep_function(self.name, FunctionScores.nothing(n, reason, self.threshold))
            raise
        finally:
            self._took(time.perf_counter() - began)
        batch.keep_function(self.name, self._scores(numbers))

    def scored(self, batch: Batch, scores: Scores) -> None:
        """Count the tokens."""
        unseen = [reason for reason in batch.functions[self.name].unseen if reason]
        self.n_tokens, self.n_unseen = self.n_tokens + len(batch.placed), self.n_unseen + len(unseen)
        self.why_unseen.update(unseen)

    def check(self) -> Check:
        """Return how many tokens have a number, and the time of a call."""
        name = f"function {self.name}"
        if not self.n_calls:
            return Check(name, OK, "it was not called yet")
        what = (
            f"{self.n_tokens - self.n_unseen:,} of {self.n_tokens:,} tokens have a number;"
            f" {self.seconds / self.n_calls * 1e3:.2f} ms a call, {self.slowest_seconds * 1e3:.2f} at most"
            f" ({counted(self.n_calls, 'call')})"
        )
        state, remedies = state_of(self.n_unseen, self.n_tokens), []
        if self.n_unseen:
            [(reason, n)] = self.why_unseen.most_common(1)
            what += f"; {n:,} tokens: {reason}"
            remedies.append("Return a number from 0 to 1 for each hidden state")
        if self.n_slow:
            what += f"; {counted(self.n_slow, 'call')} over {self.budget_ms:g} ms"
            state = WARNING if state == OK else state
            remedies.append("make the function faster, for the model waits for it")
        return Check(name, state, what, "; ".join(remedies))

    def rules(self, spec: RuleSpec) -> list[Rule]:
        """Return the rule of a spec that names it. Raises `ConfigError`."""
        if spec.aggregate == TRAINED:
            raise RuleError(f"{self.name} is a function and was not trained for a running score: name one", "aggregate")
        return spec.rules(self.as_pack)

    @property
    def as_pack(self) -> AnyPack:
        """Return what rules and events ask of a pack, of this concept alone."""
        return cast(AnyPack, _OneConcept(self.name, self.threshold))

    def _numbers(self, returned: Any, n: int) -> np.ndarray:
        """Return numbers `[N]` fp64. Raises `ConfigError`."""
        try:
            numbers = torch.as_tensor(returned).detach().to("cpu", torch.float64)
        except Exception as error:
            raise ConfigError(
                f"{self.name} returned {returned!r:.80} ({error}): return {n} numbers, one for each hidden state"
            ) from None
        if tuple(numbers.shape) != (n,):
            raise ConfigError(
                f"{self.name} returned {list(numbers.shape)} for {n} hidden states: return a number for each, [{n}]"
            )
        return numbers.numpy()

    def _scores(self, numbers: np.ndarray) -> FunctionScores:
        inside = (numbers >= 0) & (numbers <= 1)
        values = np.where(inside, numbers, np.nan).astype(np.float32)
        if inside.all():
            return FunctionScores(values, ("",) * len(values), self.threshold)
        reasons = np.where(np.isnan(numbers), f"{self.name} returned nan", f"{self.name} is not from 0 to 1")
        return FunctionScores(values, tuple(np.where(inside, "", reasons).tolist()), self.threshold)

    def _took(self, seconds: float) -> None:
        self.n_calls += 1
        self.seconds += seconds
        self.slowest_seconds = max(self.slowest_seconds, seconds)
        self.n_slow += seconds * 1e3 > self.budget_ms


class _OneConcept:
    """A function as a pack of one concept."""

    alert_set = None

    def __init__(self, name: str, threshold: float) -> None:
        self.name, self._threshold = f"the function {name}", threshold
        self.concepts: list[Mapping[str, Any]] = [{"id": name, "name": name, "parents": []}]
        self._names = Names(self.name, self.concepts, self.path)

    def find(self, concept: str | int) -> int:
        return self._names.find(concept)

    def find_all(self, concept: Wanted) -> list[int]:
        return self._names.find_all(concept)

    def path(self, probe: int) -> list[str]:
        return [self.concepts[probe]["name"]]

    def thresholds_for(self, aggregator: object = None) -> Tensor:
        if str(aggregator) != "each" or math.isnan(self._threshold):
            raise ConfigError(f"{self.name} has no alert threshold for {aggregator}: give above")
        return torch.tensor([self._threshold], dtype=torch.float64, device="cpu")

    def with_alert_set(self, name: str) -> Any:
        raise ConfigError(f"{self.name} has no alert sets: give above")

    def score_counts(self, aggregator: object = None) -> Tensor:
        raise ConfigError(
            f"{self.name} has no scores of calibration text to compare with: compare with its own, z:last:256"
        )
