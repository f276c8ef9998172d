"""Canary: a short generation through our taps, and the same one without them, of whose states scores are made anew.

canary = Canary(manager, model, tokenizer)
song = canary.sing()                  # watched; Blind where a token of it is unseen
canary.compare(song)                  # the largest difference of a score from a plain run's; Blind where it is large
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

MOST_DIFFERENCE = 1e-3  # of a score: kernels of a GPU may add up in another order
_TEXT = "The canary sings of ships and whales."


@dataclass(frozen=True)
class Song:
    """What a watched canary gave: the ids `[1, L]`, the scores of every token but the last, the health of its run.

    `hook_seconds`: of a generated token, in our hooks, the median.
    """

    out: Tensor
    scores: Scores
    health: Health
    hook_seconds: float


class Canary:
    """`generate`: more arguments of the host's `generate`. Any thread may let it sing: it watches itself alone."""

    def __init__(self, manager: Scorer, model: Any, tokenizer: Any, *, n_tokens: int = 2, **generate: Any) -> None:
        self._manager, self._model, self._tokenizer, self._n_tokens = manager, model, tokenizer, n_tokens
        self._ids = torch.tensor([list(tokenizer(_TEXT)["input_ids"])], device=model.device)
        self._options = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens, "do_sample": False, "num_beams": 1}
        self._options |= generate
        self.plain_seconds = float("nan")  # of a token of the last plain run

    def sing(self) -> Song:
        """Generate, watched. Raises `Blind`."""
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
        """Return how far scores of a song are at most from those of all probes on the states of an unwatched run.

        The states are read by hooks of torch, forward by forward (of recurrent layers, by a tap of ours). Raises
        `Blind`, also where the unwatched run generates another text.
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
        """Generate unwatched; return the ids `[1, L]`, and the states of every token but the last, `{site: [T, D]}`."""
        host, sites = unwrap(self._model), list(self._manager.pack.sites)
        seen: dict[str, list[Tensor]] = {site: [] for site in sites}
        _, layers = find_layers(host)
        singing = threading.get_ident()

        def keep(site: str, hidden: Tensor) -> None:
            if threading.get_ident() != singing:
                return
            seen[site].append(hidden.detach().reshape(-1, hidden.shape[-1]).clone())

        def hook(site: str) -> Callable[[Any, Any, Any], None]:
            return lambda module, args, output: keep(site, output[0] if isinstance(output, (tuple, list)) else output)

        with ExitStack() as stack:
            recurrent = [site for site in sites if is_recurrent(site)]
            if recurrent:
                stack.enter_context(Tap(host, recurrent, keep))
            for site in sites:
                if site not in recurrent:
                    stack.callback(site_module(layers, site).register_forward_hook(hook(site)).remove)
            begun = time.perf_counter()
            out = self._generate()
            self.plain_seconds = (time.perf_counter() - begun) / self._n_tokens
        return out, {site: torch.cat(states) for site, states in seen.items()}


def differ(song: Scores, first: Scores) -> str:
    """Return in what the scores of one song differ from those of an earlier one, "" where they are the same."""
    if not np.array_equal(song.ptr, first.ptr) or not np.array_equal(song.probes, first.probes):
        return "the canary's active concepts are others"
    difference = float(np.abs(song.values - first.values).max(initial=0.0))
    return "" if difference <= MOST_DIFFERENCE else f"the canary's scores are others, by {difference:.2g},"
