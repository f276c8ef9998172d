"""TokenScorer: scores tokens and carries each row's retained set to its next token.

report = scorer.score_tokens(generation, recording, placed, states)
if report is not None:
    report(True)                                    # waits for the scores and publishes them
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from probemon.core.hierarchy import Ints, Mask
from probemon.core.scores import PROMPT, Scores
from probemon.engine.audit import sample
from probemon.engine.scorer import Scorer
from probemon.monitor.breaker import PAUSED, Circuit, unscored
from probemon.monitor.degradations import AUDIT, leaves_out
from probemon.monitor.followers import Batch, Followers
from probemon.monitor.watches import Watches
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording

KNOWN = "its scores are those of an earlier forward, whose hidden states are not kept"
Publish = Callable[[Batch, Scores], None]


class _Scored(NamedTuple):
    scores: Scores
    rows: Ints
    retained: Mask


class TokenScorer:
    """Scores and publishes tokens in order.

    Tokens left out by a degradation or an open `circuit` are unseen, and so are failed ones with a `circuit` (errors go
    to `failures`).
    """

    def __init__(
        self, manager: Scorer, watches: Watches, followers: Followers, publish: Publish, circuit: Circuit | None = None
    ) -> None:
        self._manager, self._watches, self._publish = manager, watches, publish
        self._followers, self._circuit = followers, circuit
        self._n_probes, self._top_k = manager.pack.n_probes, manager.report_top_k
        self._audit_seed = secrets.randbits(62)  # so that runs together are a random sample

    def score_tokens(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> Report | None:
        """Begin to score tokens, or publish why they have no states.

        Returns a function that waits, then publishes (True) or discards (False); None if all is done.
        """
        return self.score_together([(generation, recording, placed, states)])

    def score_together(
        self, parts: Sequence[tuple[Generation | None, Recording, PlacedTokens, States | Scores | str]]
    ) -> Report | None:
        """Do the same for several recordings in one engine step, all of one phase. Known `Scores` are published."""
        watch = self._watches.now  # once, so that rules and scores match
        batches: list[Batch] = []
        site_states: list[States] = []
        circuit = self._circuit
        for generation, recording, placed, states in parts:
            if not placed.rows.size:
                continue
            origin = placed.rows
            if generation is not None and generation.origin is not None and placed.phase != PROMPT:
                origin = generation.origin[placed.rows]
            batch = Batch(watch, generation, recording, placed, origin)
            if isinstance(states, Scores):
                self._followers.states(batch, KNOWN)
                self._publish_known(batch, states)
                continue
            self._followers.states(batch, states)
            unseen = (
                states
                if isinstance(states, str)
                else leaves_out(watch.degradation, placed)
                if watch.degradation
                else ""
            )
            if not unseen and circuit is not None and circuit.pauses():
                unseen = PAUSED
            if unseen or isinstance(states, str):
                self._publish_unseen(batch, unseen)
            else:
                batches.append(batch)
                site_states.append(states)
        if not batches:
            return None
        states = (
            site_states[0]
            if len(site_states) == 1
            else {site: torch.cat([one[site] for one in site_states]) for site in site_states[0]}
        )
        if circuit is None:
            finish = self._begin(batches, states)
            return lambda report: self._publish_scored(batches, finish(report))
        try:
            finish = self._begin(batches, states)
        except Exception as error:
            self._failed(batches, circuit, error)
            return None

        def end(report: bool) -> None:
            try:
                scored = finish(report)
            except Exception as error:
                self._failed(batches if report else [], circuit, error)
                return
            circuit.untold() if scored is None else circuit.succeeded()
            self._publish_scored(batches, scored)

        return end

    # -- internals -------------------------------------------------------------------------------

    def _begin(self, batches: Sequence[Batch], states: States) -> Callable[[bool], list[_Scored] | None]:
        """Begin to score; return the function that ends it."""
        watch, rate = batches[0].watch, self._manager.audit_rate
        audit = None
        if rate and watch.degradation < AUDIT:
            samples = [
                sample(rate, self._audit_seed, one.recording.number, one.placed.rows, one.placed.columns)
                for one in batches
            ]
            if any(mask is not None for mask in samples):
                masks = zip(samples, batches, strict=True)
                audit = np.concatenate(
                    [np.zeros(len(one.placed), dtype=bool) if mask is None else mask for mask, one in masks]
                )
        if batches[0].placed.phase == PROMPT:
            return lambda report: self._score_prompts(batches, states, audit) if report else None
        sets = [_sets_of(one) for one in batches]
        before = sets[0] if len(sets) == 1 else np.concatenate(sets)
        if watch.number:  # retained ones may be excluded by now
            before = watch.plan.taken_over(before)
        step = self._manager.begin(watch.plan, states, before, audit)

        def end_step(report: bool) -> list[_Scored] | None:
            scores, retained = step.wait()
            if not report:
                return None
            if len(batches) == 1:
                return [_Scored(scores, batches[0].placed.rows, retained)]
            bounds = _bounds(batches)
            return [
                _Scored(scores.between(begin, end), one.placed.rows, retained[begin:end])
                for one, begin, end in zip(batches, bounds[:-1], bounds[1:], strict=True)
            ]

        return end_step

    def _score_prompts(self, batches: Sequence[Batch], states: States, audit: Mask | None) -> list[_Scored]:
        bounds = _bounds(batches)
        rows, last = [], []
        for one, begin in zip(batches, bounds[:-1], strict=True):
            # np.unique of the reversed rows finds each row's last token, whose retained set starts the generation.
            unique_rows, from_end = np.unique(one.placed.rows[::-1], return_index=True)
            rows.append(unique_rows)
            last.append(begin + len(one.placed) - 1 - from_end)
        retained, parts = self._manager.score_prompt(
            batches[0].watch.plan, states, np.concatenate(last).tolist(), audit=audit
        )
        scores = Scores.join(parts, self._n_probes, self._top_k)
        if len(batches) == 1:
            return [_Scored(scores, rows[0], retained)]
        sets = np.split(retained, np.cumsum([len(unique_rows) for unique_rows in rows])[:-1])
        return [
            _Scored(scores.between(begin, end), unique_rows, row_sets)
            for begin, end, unique_rows, row_sets in zip(bounds[:-1], bounds[1:], rows, sets, strict=True)
        ]

    def _publish_scored(self, batches: Sequence[Batch], scored: Sequence[_Scored] | None) -> None:
        for batch, one in zip(batches, scored or (), strict=scored is not None):
            batch.recording.retain(one.rows, one.retained)
            self._publish(batch, one.scores)

    def _publish_unseen(self, batch: Batch, reason: str) -> None:
        self._publish_known(batch, Scores.nothing(len(batch.placed), self._n_probes, reason, self._top_k))

    def _publish_known(self, batch: Batch, scores: Scores) -> None:
        batch.recording.retain(batch.placed.rows, batch.recording.retained_of(batch.origin))
        self._publish(batch, scores)

    def _failed(self, batches: Sequence[Batch], circuit: Circuit, error: Exception) -> None:
        self._followers.failures.add("scoring", error)
        circuit.failed()
        for batch in batches:
            self._publish_unseen(batch, unscored(error))


def _sets_of(batch: Batch) -> Mask:
    """Return a copy of the retained sets that tokens start from."""
    sets, rows = batch.recording.retained, batch.origin
    if sets is None:  # first token
        return batch.recording.retained_of(rows)
    return sets.copy() if rows is batch.placed.rows and len(rows) == len(sets) else sets[rows]


def _bounds(batches: Sequence[Batch]) -> list[int]:
    """Return the batches' offsets."""
    return [0, *itertools.accumulate(len(one.placed) for one in batches)]
