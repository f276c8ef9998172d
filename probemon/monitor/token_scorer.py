"""TokenScorer: tokens with their hidden states to scores, and what each row retains carried to its next token.

scorer = TokenScorer(manager, publish)              # publish(generation, recording, placed, scores)
scorer.evaluate_always([17])                        # a probe that a rule waits for
report = scorer.score_tokens(generation, recording, placed, states)
if report is not None:
    report(True)                                    # waits for the scores and publishes them
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np

from probemon.core.hierarchy import Mask
from probemon.core.plan import CascadePlan
from probemon.core.scores import PROMPT, Scores
from probemon.engine.audit import sample
from probemon.engine.joint import JointPlan
from probemon.engine.scorer import Scorer
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording

Publish = Callable[[Generation | None, Recording, PlacedTokens, Scores], None]


class TokenScorer:
    """`score_tokens` is called in the order of the tokens, of each thread; `publish` too."""

    def __init__(self, manager: Scorer, publish: Publish) -> None:
        self._manager, self._publish = manager, publish
        self._n_probes, self._top_k = manager.pack.n_probes, manager.report_top_k
        self._plan, self._ruled, self._pinned = manager.plan, list[int](), False
        self._audit_seed = secrets.randbits(62)  # drawn anew, so that runs together are a random sample too

    def evaluate_always(self, probes: Sequence[int]) -> None:
        """Evaluate these probes too at every token from now on. Raises `ConfigError` where there is no room."""
        ruled = [*self._ruled, *probes]
        plan = self._manager.plan_with(ruled)
        names = ", ".join(self._manager.pack.concepts[probe]["id"] for probe in probes)
        self._manager.engine.check_room(plan, names)
        if self._pinned:
            self._manager.arena.pin(_always(plan))
            self._manager.arena.unpin(_always(self._plan))
        self._plan, self._ruled = plan, ruled

    def pin(self, stack: ExitStack) -> None:
        """Keep the weights of what is always evaluated on the device until `stack` closes."""
        self._manager.arena.pin(_always(self._plan))
        self._pinned = True
        stack.callback(self._unpin)

    def _unpin(self) -> None:
        self._pinned = False
        self._manager.arena.unpin(_always(self._plan))

    def score_tokens(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> Report | None:
        """Begin to score tokens with hidden states, or publish the reason why there are none.

        Returns what waits for the scores, retains and publishes them, or throws them away; None where nothing waits.
        """
        if not placed.rows.size:
            return None
        rows = placed.rows
        origin = rows
        if generation is not None and generation.origin is not None and placed.phase != PROMPT:
            origin = generation.origin[rows]
        if isinstance(states, str):
            recording.retain(rows, recording.retained_of(origin))
            scores = Scores.nothing(len(placed), self._n_probes, states, self._top_k)
            self._publish(generation, recording, placed, scores)
            return None
        audit, rate = None, self._manager.audit_rate
        if rate:
            audit = sample(rate, self._audit_seed, recording.number, rows, placed.columns)
        if placed.phase == PROMPT:
            return lambda report: self._score_prompt(generation, recording, placed, states, audit) if report else None
        # Before its first token a sequence retains nothing, and has no sets yet.
        before = recording.retained_of(origin) if recording.retained is None else recording.retained[origin]
        step = self._manager.begin(self._plan, states, before, audit)

        def end_step(report: bool) -> None:
            scores, retained = step.wait()
            if report:
                recording.retain(rows, retained)
                self._publish(generation, recording, placed, scores)

        return end_step

    def _score_prompt(
        self,
        generation: Generation | None,
        recording: Recording,
        placed: PlacedTokens,
        states: States,
        audit: Mask | None,
    ) -> None:
        # np.unique of the reversed rows finds each row's last token: its retained set starts the generation.
        prompt_rows, last = np.unique(placed.rows[::-1], return_index=True)
        retained, parts = self._manager.score_prompt(self._plan, states, (len(placed) - 1 - last).tolist(), audit=audit)
        recording.retain(prompt_rows, retained)
        self._publish(generation, recording, placed, Scores.join(parts, self._n_probes, self._top_k))


def _always(plan: CascadePlan | JointPlan) -> np.ndarray:
    return np.flatnonzero(plan.always)
