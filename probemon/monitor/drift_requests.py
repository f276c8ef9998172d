"""RunRequests: the requests of one run, from their tokens to what a DriftMonitor compares.

    requests = RunRequests(drift, model, tokenizer, guard)
    scorer = TokenScorer(manager, requests.after(publish))     # scores of tokens, once they are published
    score = requests.beside(scorer.score_tokens)               # their hidden states, of which norms are taken
    requests.close()                                           # with the run: whatever is left has ended

In memory is, for each request under way, what its tokens have added up to: nothing grows with their number.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from probemon.core.hierarchy import Ints
from probemon.core.inputs import norms_of
from probemon.core.request_counts import (
    MOSTLY,
    N_NORM_BINS,
    NEAR_END,
    SAME,
    RequestTraits,
    median_bins,
    norm_bins,
)
from probemon.core.scores import Scores
from probemon.monitor.failures import Guard
from probemon.monitor.token_scorer import Publish
from probemon.monitor.watches import Watch
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report, ScoreTokens
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording

if TYPE_CHECKING:
    from probemon.monitor.drift import DriftMonitor

_MOST_OPEN = 256  # documents of plain forwards, of which nobody says that they have ended


class RunRequests:
    """`guard(what, function, *arguments)` calls a function and keeps its errors from the host."""

    def __init__(self, drift: DriftMonitor, model: Any, tokenizer: Any, guard: Guard) -> None:
        self.drift, self._model, self._tokenizer, self._guard = drift, model, tokenizer, guard
        self._open: dict[Recording, _Rows] = {}
        self._compared: tuple[Watch, bool] | None = None
        self._lock, self._thread = threading.Lock(), threading.local()

    def beside(self, score: ScoreTokens) -> ScoreTokens:
        """Return what takes the norms of tokens' states, then hands them to `score`."""

        def both(
            generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
        ) -> Report | None:
            report_scores = score(generation, recording, placed, states)
            if report_scores is None or isinstance(states, str):
                return report_scores
            norms: list[Tensor] = []
            self._guard("drift", lambda: norms.append(norms_of(states, self.drift.sites)))

            def report_both(report: bool) -> None:
                self._thread.norms = norms[0] if norms else None  # for the tokens that are published in this call
                try:
                    report_scores(report)
                finally:
                    self._thread.norms = None

            return report_both

        return both

    def after(self, publish: Publish) -> Publish:
        """Return what publishes the scores of tokens, then adds them to their requests."""

        def both(
            watch: Watch, generation: Generation | None, recording: Recording, placed: PlacedTokens, scores: Scores
        ) -> None:
            publish(watch, generation, recording, placed, scores)
            self._guard("drift", self._add, watch, recording, placed, scores, getattr(self._thread, "norms", None))

        return both

    def close(self) -> None:
        """End all requests that are under way."""
        with self._lock:
            for recording in list(self._open):
                self._end(recording)

    # -- inside --------------------------------------------------------------------------------------

    def _add(
        self, watch: Watch, recording: Recording, placed: PlacedTokens, scores: Scores, norms: Tensor | None
    ) -> None:
        with self._lock:
            if recording not in self._open:
                self._end_those_before()
                host = self.drift.identity(self._model, self._tokenizer, recording.mark)
                self._open[recording] = _Rows(self.drift, host)
            rows = self._open[recording]
        values = None if norms is None else norms.cpu().numpy()
        rows.add(placed.rows, scores, values, comparable=self._compares(watch))

    def _compares(self, watch: Watch) -> bool:
        """Whether what holds now, which may have changed while the host runs, scores what the manager's settings do."""
        if self._compared is None or self._compared[0] is not watch:
            self._compared = (watch, self.drift.compares(watch.plan))
        return self._compared[1]

    def _end_those_before(self) -> None:
        """End the generations that are done; of documents the oldest, once there are many."""
        done = [one for one in self._open if one.done and one.call.prompt_columns is not None]
        documents = [one for one in self._open if one.call.prompt_columns is None]
        for recording in [*done, *documents[: max(0, len(documents) - _MOST_OPEN + 1)]]:
            self._end(recording)

    def _end(self, recording: Recording) -> None:
        rows = self._open.pop(recording)
        for traits in rows.traits(known=recording.beams is None and not recording.host_changed):
            if traits is None:
                self.drift.leave_out()
            else:
                self.drift.add(traits, rows.host)


class _Rows:
    """What the tokens of each row of a recording have added up to."""

    def __init__(self, drift: DriftMonitor, host: Mapping[str, str]) -> None:
        self.host = host
        self._place = np.full(len(drift.alert), -1, dtype=np.int64)
        self._place[drift.scored] = np.arange(len(drift.scored))
        self._shapes = {"fired": len(drift.alert), "scored": len(drift.scored), "sites": len(drift.sites)}
        self._rows: dict[str, np.ndarray] = {}
        self._grow(0)

    def _grow(self, n_rows: int) -> None:
        """Make room for more rows."""
        n_fired, n_scored, n_sites = self._shapes.values()
        fresh: dict[str, np.ndarray] = {
            "fired": np.zeros((n_rows, n_fired), dtype=bool),
            "highest": np.full((n_rows, n_scored), -np.inf, dtype=np.float32),
            "lowest": np.full((n_rows, n_scored), np.inf, dtype=np.float32),
            "n_low": np.zeros((n_rows, n_scored), dtype=np.int32),
            "n_high": np.zeros((n_rows, n_scored), dtype=np.int32),
            "norms": np.zeros((n_rows, n_sites, N_NORM_BINS), dtype=np.int32),
            "n_tokens": np.zeros(n_rows, dtype=np.int64),
            "incomplete": np.zeros(n_rows, dtype=bool),
        }
        for name, values in self._rows.items():
            fresh[name][: len(values)] = values
        self._rows = fresh

    def add(self, rows: Ints, scores: Scores, norms: np.ndarray | None, *, comparable: bool) -> None:
        if rows.size and rows.max() >= len(self._rows["n_tokens"]):
            self._grow(int(rows.max()) + 1)
        kept, coverage = self._rows, scores.coverage
        seen = coverage.seen
        kept["incomplete"][rows[~seen | (coverage.dropped > 0) | (not comparable)]] = True
        np.add.at(kept["n_tokens"], rows, 1)
        state = scores.state_of
        fired = scores.fired_mask
        kept["fired"][rows[state[fired]], scores.probes[fired]] = True
        at = np.flatnonzero(seen)
        if not len(at):
            return
        place = self._place[scores.probes]
        always = place >= 0
        dense = np.zeros((len(rows), kept["highest"].shape[1]), dtype=np.float32)
        dense[state[always], place[always]] = scores.values[always]
        order = at[np.argsort(rows[at], kind="stable")]
        which, first = np.unique(rows[order], return_index=True)
        dense = dense[order]
        kept["highest"][which] = np.maximum(kept["highest"][which], np.maximum.reduceat(dense, first))
        kept["lowest"][which] = np.minimum(kept["lowest"][which], np.minimum.reduceat(dense, first))
        kept["n_low"][which] += np.add.reduceat((dense <= NEAR_END).astype(np.int32), first)
        kept["n_high"][which] += np.add.reduceat((dense >= 1 - NEAR_END).astype(np.int32), first)
        if norms is not None:
            sites = np.arange(norms.shape[1])
            np.add.at(kept["norms"], (rows[at, None], sites[None], norm_bins(norms[at])), 1)

    def traits(self, *, known: bool) -> list[RequestTraits | None]:
        """Return those of every row that has tokens, None where they are not known."""
        kept, traits = self._rows, list[RequestTraits | None]()
        for row in np.flatnonzero(kept["n_tokens"]).tolist():
            if kept["incomplete"][row] or not known:
                traits.append(None)
                continue
            highest, mostly = kept["highest"][row], MOSTLY * kept["n_tokens"][row]
            traits.append(
                RequestTraits(
                    fired=kept["fired"][row],
                    highest=highest,
                    low=kept["n_low"][row] >= mostly,
                    high=kept["n_high"][row] >= mostly,
                    flat=highest - kept["lowest"][row] <= SAME,
                    norm_bins=median_bins(kept["norms"][row]),
                )
            )
        return traits
