"""TokenScorer: tokens with their hidden states to scores, and what each row retains carried to its next token.

scorer = TokenScorer(manager, watches, failures, publish)    # publish(watch, generation, recording, placed, scores)
report = scorer.score_tokens(generation, recording, placed, states)
if report is not None:
    report(True)                                    # waits for the scores and publishes them
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.core.scores import PROMPT, Scores
from probemon.engine.audit import sample
from probemon.engine.scorer import Scorer
from probemon.monitor.breaker import PAUSED, Circuit, unscored
from probemon.monitor.failures import Failures
from probemon.monitor.rungs import AUDIT, leaves_out
from probemon.monitor.watches import Watch, Watches
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording

Publish = Callable[[Watch, Generation | None, Recording, PlacedTokens, Scores], None]


class _Batch(NamedTuple):
    """Tokens, what they are scored by, and the rows `origin` whose sets they start from."""

    watch: Watch
    generation: Generation | None
    recording: Recording
    placed: PlacedTokens
    origin: Ints


class _Scored(NamedTuple):
    """Scores, and the sets that these rows retain."""

    scores: Scores
    rows: Ints
    retained: Mask


class TokenScorer:
    """`score_tokens` is called in the order of the tokens, of each thread; `publish` too.

    What the rung of a watch leaves out is published as unseen. With a `circuit`, so is what comes while it is open, and
    what an error kept from being scored, which is then in `failures`; without one that error is raised.
    """

    def __init__(
        self, manager: Scorer, watches: Watches, failures: Failures, publish: Publish, circuit: Circuit | None = None
    ) -> None:
        self._manager, self._watches, self._publish = manager, watches, publish
        self._failures, self._circuit = failures, circuit
        self._n_probes, self._top_k = manager.pack.n_probes, manager.report_top_k
        self._audit_seed = secrets.randbits(62)  # drawn anew, so that runs together are a random sample too

    def score_tokens(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> Report | None:
        """Begin to score tokens with hidden states, or publish the reason why there are none.

        Returns what waits for the scores, retains and publishes them, or throws them away; None where nothing waits.
        """
        if not placed.rows.size:
            return None
        watch = self._watches.now  # once: what scores these tokens also judges them
        origin = placed.rows
        if generation is not None and generation.origin is not None and placed.phase != PROMPT:
            origin = generation.origin[placed.rows]
        batch, circuit = _Batch(watch, generation, recording, placed, origin), self._circuit
        unseen = states if isinstance(states, str) else leaves_out(watch.rung, placed) if watch.rung else ""
        if not unseen and circuit is not None and circuit.pauses():
            unseen = PAUSED
        if unseen or isinstance(states, str):
            self._publish_unseen(batch, unseen)
            return None
        if circuit is None:
            ended = self._begin(batch, states)
            return lambda report: self._publish_scored(batch, ended(report))
        try:
            ended = self._begin(batch, states)
        except Exception as error:
            self._failed(batch, circuit, error)
            return None

        def end(report: bool) -> None:
            try:
                scored = ended(report)
            except Exception as error:
                self._failed(batch if report else None, circuit, error)
                return
            circuit.untold() if scored is None else circuit.succeeded()
            self._publish_scored(batch, scored)

        return end

    # -- inside ----------------------------------------------------------------------------------

    def _begin(self, batch: _Batch, states: States) -> Callable[[bool], _Scored | None]:
        """Begin to score; returns what ends it, with False to throw the scores away."""
        watch, _, recording, placed, origin = batch
        audit, rate = None, self._manager.audit_rate
        if rate and watch.rung < AUDIT:
            audit = sample(rate, self._audit_seed, recording.number, placed.rows, placed.columns)
        if placed.phase == PROMPT:
            return lambda report: self._score_prompt(batch, states, audit) if report else None
        # Before its first token a sequence retains nothing, and has no sets yet.
        before = recording.retained_of(origin) if recording.retained is None else recording.retained[origin]
        if watch.number:  # what is left out since then may have been retained, and more may be always on
            before = watch.plan.taken_over(before)
        step = self._manager.begin(watch.plan, states, before, audit)

        def end_step(report: bool) -> _Scored | None:
            scores, retained = step.wait()
            return _Scored(scores, placed.rows, retained) if report else None

        return end_step

    def _score_prompt(self, batch: _Batch, states: States, audit: Mask | None) -> _Scored:
        # np.unique of the reversed rows finds each row's last token: its retained set starts the generation.
        placed = batch.placed
        prompt_rows, last = np.unique(placed.rows[::-1], return_index=True)
        last_tokens = (len(placed) - 1 - last).tolist()
        retained, parts = self._manager.score_prompt(batch.watch.plan, states, last_tokens, audit=audit)
        return _Scored(Scores.join(parts, self._n_probes, self._top_k), prompt_rows, retained)

    def _publish_scored(self, batch: _Batch, scored: _Scored | None) -> None:
        if scored is not None:
            batch.recording.retain(scored.rows, scored.retained)
            self._publish(batch.watch, batch.generation, batch.recording, batch.placed, scored.scores)

    def _publish_unseen(self, batch: _Batch, reason: str) -> None:
        watch, generation, recording, placed, origin = batch
        recording.retain(placed.rows, recording.retained_of(origin))
        scores = Scores.nothing(len(placed), self._n_probes, reason, self._top_k)
        self._publish(watch, generation, recording, placed, scores)

    def _failed(self, batch: _Batch | None, circuit: Circuit, error: Exception) -> None:
        """Note what scoring raised; tokens, where there are any, are unseen for it."""
        self._failures.add("scoring", error)
        circuit.failed()
        if batch is not None:
            self._publish_unseen(batch, unscored(error))
