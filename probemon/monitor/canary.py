"""Canary: compares a short watched generation with an unwatched one.

canary = Canary(manager, model, tokenizer)
song = canary.sing()
canary.compare(song)                  # the largest difference of a score
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.probes import is_recurrent
from probemon.core.scores import Scores
from probemon.engine.scorer import Scorer
from probemon.errors import Blind
from probemon.host.model import find_layers, site_module, unwrap
from probemon.host.tap import Tap
from probemon.monitor.health import Health
from probemon.monitor.run import MonitorRun, RunOptions

MOST_DIFFERENCE = 1e-3  # of a score: GPU kernels may sum in another order
_TEXT = "The canary sings of ships and whales."


@dataclass(frozen=True)
class Song:
    """A watched generation: ids `[1, L]`, scores of all tokens but the last, health.

    `hook_seconds`: median per generated token
    """

    out: Tensor
    scores: Scores
    health: Health
    hook_seconds: float


class Canary:
    """Generates one text again and again; `generate`: further arguments of `model.generate`."""

    def __init__(self, manager: Scorer, model: Any, tokenizer: Any, *, n_tokens: int = 2, **generate: Any) -> None:
        self._manager, self._model, self._tokenizer, self._n_tokens = manager, model, tokenizer, n_tokens
        self._ids = torch.tensor([list(tokenizer(_TEXT)["input_ids"])], device=model.device)
        self._options = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False, "num_beams": 1}
        self._options |= generate
        self.plain_seconds = float("nan")  # per token

    def sing(self) -> Song:
        """Generate, watched. Raises `Blind` if a token is unseen."""
        try:
            with MonitorRun(self._manager, self._model, self._tokenizer, options=RunOptions(one_thread=True)) as run:
                out = self._generate()
            result = run.result(out)
        except Exception as error:
            raise Blind(f"the canary could not be watched: {type(error).__name__}: {error}") from error
        unseen = {reason for reason in result.coverage.unseen[:-1] if reason}  # the last is never run
        n_tokens = self._ids.shape[1] + self._n_tokens
        if unseen or len(result) != n_tokens:
            raise Blind(f"tokens of the canary were not seen: {', '.join(sorted(unseen)) or 'they are missing'}")
        seconds = list(run.forward_seconds)[1:] or list(run.forward_seconds)
        return Song(out, result.scores.take(np.arange(n_tokens - 1)), run.health(), statistics.median(seconds))

    def compare(self, song: Song) -> float:
        """Return the largest difference from scores of all probes on an unwatched run's states. Raises `Blind` if text
        or scores differ.
        """
        out, states = self._plain()
        if not torch.equal(out, song.out):
            raise Blind("the canary generates other tokens when it is watched than when it is not")
        n_tokens = len(song.scores)
        for site, hidden in states.items():
            if len(hidden) != n_tokens:
                raise Blind(f"{site} gave {len(hidden)} states in an unwatched run of {n_tokens} tokens")
        everything, scores = self._manager.score_all(states).numpy(), song.scores
        difference = float(np.abs(everything[scores.state_of, scores.probes] - scores.values).max(initial=0.0))
        if not difference <= MOST_DIFFERENCE:
            raise Blind(f"the canary's scores are {difference:.2g} off those of an unwatched run's states")
        return difference

    def _generate(self) -> Tensor:
        out = self._model.generate(input_ids=self._ids, attention_mask=torch.ones_like(self._ids), **self._options)
        return getattr(out, "sequences", out)

    def _plain(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return ids `[1, L]` and states `{site: [T, D]}` of an unwatched run, without the last token."""
        model, sites = unwrap(self._model), list(self._manager.pack.sites)
        states_by_site: dict[str, list[Tensor]] = {site: [] for site in sites}
        _, layers = find_layers(model)
        thread = threading.get_ident()

        def keep(site: str, hidden: Tensor) -> None:
            if threading.get_ident() != thread:
                return
            states_by_site[site].append(hidden.detach().reshape(-1, hidden.shape[-1]).clone())

        def hook(site: str) -> Callable[[Any, Any, Any], None]:
            return lambda module, args, output: keep(site, output[0] if isinstance(output, (tuple, list)) else output)

        with ExitStack() as stack:
            recurrent = [site for site in sites if is_recurrent(site)]
            if recurrent:
                stack.enter_context(Tap(model, recurrent, keep))
            for site in sites:
                if site not in recurrent:
                    stack.callback(site_module(layers, site).register_forward_hook(hook(site)).remove)
            started = time.perf_counter()
            out = self._generate()
            self.plain_seconds = (time.perf_counter() - started) / self._n_tokens
        return out, {site: torch.cat(states) for site, states in states_by_site.items()}


def differ(song: Scores, first: Scores) -> str:
    """Return how two songs' scores differ, or ""."""
    if not np.array_equal(song.ptr, first.ptr) or not np.array_equal(song.probes, first.probes):
        return "the canary's active concepts are different"
    difference = float(np.abs(song.values - first.values).max(initial=0.0))
    return "" if difference <= MOST_DIFFERENCE else f"the canary's scores are different, by {difference:.2g},"
