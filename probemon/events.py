"""Rules on concepts: a score over a threshold for some tokens in a row makes an event, and an event an action.

    rule = Rule(probe=17, above=0.9, for_tokens=3, action="stop")
    for i, score in rule.observe(placed, scores, streaks): ...      # the tokens at which it is met
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from probemon.align import Placed
from probemon.types import Scores


@dataclass(frozen=True)
class Event:
    """A rule was met: `for_tokens` generated tokens of `row` in a row scored over `above`, the last at `column`.

    `column` counts from the start of the padded sequence; `concept` is the id, `path` the names from the root.
    `provisional`: it was met in a beam, which may not be the one that is returned.
    """

    concept: str
    name: str
    path: tuple[str, ...]
    row: int
    column: int
    token_id: int
    score: float
    above: float
    for_tokens: int
    provisional: bool = False


@dataclass(frozen=True)
class Rule:
    """What to watch for."""

    probe: int
    above: float
    for_tokens: int
    action: str | Callable[[Event], object]

    def observe(self, placed: Placed, scores: Scores, streaks: dict[int, int]) -> list[tuple[int, float]]:
        """Entries of `placed` at which the streak reached `for_tokens`, with their scores. `streaks`: by row, kept here.

        An unseen token neither counts nor breaks a streak: nothing is known of it.
        """
        met = []
        for i, row in enumerate(placed.rows.tolist()):
            if scores.coverage.unseen[i]:
                continue
            active = scores.active(i)
            at = int(np.searchsorted(active, self.probe))
            score = float(scores.active_scores(i)[at]) if at < len(active) and active[at] == self.probe else 0.0
            streaks[row] = streaks.get(row, 0) + 1 if score > self.above else 0
            if streaks[row] == self.for_tokens:
                met.append((i, score))
        return met
