"""TokenScorer: tokens with their hidden states to scores, and what each row retains carried to its next token.

scorer = TokenScorer(manager, watches, publish)     # publish(watch, generation, recording, placed, scores)
report = scorer.score_tokens(generation, recording, placed, states)
if report is not None:
    report(True)                                    # waits for the scores and publishes them
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

import numpy as np

from probemon.core.hierarchy import Mask
from probemon.core.scores import PROMPT, Scores
from probemon.engine.audit import sample
from probemon.engine.scorer import Scorer
from probemon.monitor.watches import Watch, Watches
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording

Publish = Callable[[Watch, Generation | None, Recording, PlacedTokens, Scores], None]


class TokenScorer:
    """`score_tokens` is called in the order of the tokens, of each thread; `publish` too."""

    def __init__(self, manager: Scorer, watches: Watches, publish: Publish) -> None:
        self._manager, self._watches, self._publish = manager, watches, publish
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
        rows = placed.rows
        origin = rows
        if generation is not None and generation.origin is not None and placed.phase != PROMPT:
            origin = generation.origin[rows]
        if isinstance(states, str):
            recording.retain(rows, recording.retained_of(origin))
            scores = Scores.nothing(len(placed), self._n_probes, states, self._top_k)
            self._publish(watch, generation, recording, placed, scores)
            return None
        audit, rate = None, self._manager.audit_rate
        if rate:
            audit = sample(rate, self._audit_seed, recording.number, rows, placed.columns)
        if placed.phase == PROMPT:
            return lambda report: (
                self._score_prompt(watch, generation, recording, placed, states, audit) if report else None
            )
        # Before its first token a sequence retains nothing, and has no sets yet.
        before = recording.retained_of(origin) if recording.retained is None else recording.retained[origin]
        if watch.number and watch.plan.watched is not None:  # what is excluded since then may have been retained
            before = before & watch.plan.watched
        step = self._manager.begin(watch.plan, states, before, audit)

        def end_step(report: bool) -> None:
            scores, retained = step.wait()
            if report:
                recording.retain(rows, retained)
                self._publish(watch, generation, recording, placed, scores)

        return end_step

    def _score_prompt(
        self,
        watch: Watch,
        generation: Generation | None,
        recording: Recording,
        placed: PlacedTokens,
        states: States,
        audit: Mask | None,
    ) -> None:
        # np.unique of the reversed rows finds each row's last token: its retained set starts the generation.
        prompt_rows, last = np.unique(placed.rows[::-1], return_index=True)
        last_tokens = (len(placed) - 1 - last).tolist()
        retained, parts = self._manager.score_prompt(watch.plan, states, last_tokens, audit=audit)
        recording.retain(prompt_rows, retained)
        self._publish(watch, generation, recording, placed, Scores.join(parts, self._n_probes, self._top_k))
