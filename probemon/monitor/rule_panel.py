"""RulePanel asks all rules of a state of what is watched at once.

panel = RulePanel(watch.rules)                                 # ((number, rule), ...)
for rule, i, known in panel.ask(placed, scores, generation.states_of_rule): ...

Most rules compare a token's own score in the answer, and ten thousand of them are compared in one pass; the others (on
running scores, on several concepts, on the prompt) are asked one by one. The order of what was met is that of the
rules, then of the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from probemon.core.aggregate import Each
from probemon.core.scores import GENERATED, PROMPT, Scores
from probemon.monitor.rule_spec import Condition, Rule
from probemon.monitor.rules import PASS
from probemon.tracking.align import PlacedTokens

OF_PANEL = -1  # rules are numbered from 0; under this number a generation keeps what a panel knows of its rows
Known = dict[str, Any]  # of an event: its score and value, or why it is blind


class RulePanel:
    """The rules of one state of what is watched, in their order."""

    def __init__(self, rules: Sequence[tuple[int, Rule]]) -> None:
        self._rules = tuple(rules)
        together = [at for at, (_, rule) in enumerate(rules) if _is_plain(rule)]
        self._alone = [at for at, (_, rule) in enumerate(rules) if not _is_plain(rule)]
        self._blind = [at for at, (_, rule) in enumerate(rules) if rule.on_blind != PASS]
        self._asks = {phase: any(rule.asks(phase) for _, rule in rules) for phase in (PROMPT, GENERATED)}
        # By probe, in which order active probes are.
        together.sort(key=lambda at: rules[at][1].probe)
        self._at = np.array(together, dtype=np.int64)
        self._numbers = np.array([rules[at][0] for at in together], dtype=np.int64)
        chosen = [rules[at][1] for at in together]
        self._probes = np.array([rule.probe for rule in chosen], dtype=np.int32)
        self._above = np.array([rule.above for rule in chosen], dtype=np.float64)
        self._for_tokens = np.array([rule.for_tokens for rule in chosen], dtype=np.int64)

    def asks(self, phase: int) -> bool:
        """Whether some rule is asked of tokens of a phase."""
        return self._asks[phase]

    def ask(
        self, placed: PlacedTokens, scores: Scores, states: Callable[[int], dict[int, Any]]
    ) -> Iterator[tuple[Rule, int, Known]]:
        """Yield each rule that is met, at which entry of `placed`, with the score and the aggregate there; and each for
        which an unseen token is an event, with the reason.

        `states`: gives what is known of each row, by a rule's number; values are replaced, never changed in place.
        """
        found: dict[int, list[tuple[int, Known]]] = {}
        if len(self._at) and placed.phase == GENERATED:
            self._compare(placed, scores, states(OF_PANEL), found)
        for at in self._alone:
            number, rule = self._rules[at]
            for i, score, value in observe(rule, placed, scores, states(number)):
                found.setdefault(at, []).append((i, {"score": score, "value": value}))
        for at in self._blind if not scores.coverage.all_seen else ():
            for i, reason in blind_to(self._rules[at][1], placed, scores):
                found.setdefault(at, []).append((i, {"blind": reason}))
        for at in sorted(found):
            for i, known in found[at]:
                yield self._rules[at][1], i, known

    def _compare(
        self, placed: PlacedTokens, scores: Scores, states: dict[int, Any], found: dict[int, list[tuple[int, Known]]]
    ) -> None:
        for i, row in enumerate(placed.rows.tolist()):
            if scores.coverage.unseen[i]:
                continue
            active, values = scores.active(i), scores.active_scores(i)
            own = np.zeros(len(self._probes))
            if len(active):
                place = np.minimum(np.searchsorted(active, self._probes), len(active) - 1)
                own = np.where(active[place] == self._probes, values[place], own)
            streak = np.where(own > self._above, self._streak(states.get(row)) + 1, 0)
            states[row] = self._numbers, streak
            for k in np.flatnonzero(streak == self._for_tokens).tolist():
                score = float(own[k])
                found.setdefault(int(self._at[k]), []).append((i, {"score": score, "value": score}))

    def _streak(self, known: tuple[Any, Any] | None) -> Any:
        """Return how long each rule has held in a row, from what this panel or one of other rules knew."""
        if known is None:
            return np.zeros(len(self._numbers), dtype=np.int64)
        numbers, streak = known
        if numbers is self._numbers:
            return streak
        before = dict(zip(numbers.tolist(), streak.tolist(), strict=True))
        return np.array([before.get(number, 0) for number in self._numbers.tolist()], dtype=np.int64)


def _is_plain(rule: Rule) -> bool:
    """Whether a rule compares each token's own score of one concept in the answer, as the panel does in one pass."""
    return type(rule.aggregator) is Each and rule.within == "answer" and not rule.also


def blind_to(rule: Rule, placed: PlacedTokens, scores: Scores) -> list[tuple[int, str]]:
    """Return the tokens of which a rule is asked that have no scores, and why, where that is an event."""
    if rule.on_blind == PASS or not rule.asks(placed.phase):
        return []
    return [(i, reason) for i, reason in enumerate(scores.coverage.unseen) if reason]


def observe(rule: Rule, placed: PlacedTokens, scores: Scores, states: dict[int, Any]) -> list[tuple[int, float, float]]:
    """Return the entries of `placed` at which the streak of a rule reached `for_tokens`, with the score of its own
    concept and what its aggregator makes of that.

    `states`: by row; its values are replaced, never changed in place. An unseen token, of which nothing is known,
    neither counts nor breaks a streak.
    """
    if not rule.asks(placed.phase):
        return []
    own = Condition(rule.probe, rule.above, rule.aggregator)
    met, conditions = [], (own, *rule.also)
    for i, row in enumerate(placed.rows.tolist()):
        if scores.coverage.unseen[i]:
            continue
        before, streak = states.get(row) or (tuple(one.aggregator.begin() for one in conditions), 0)
        running, found = [], []
        for one, state in zip(conditions, before, strict=True):
            score = _score(scores, i, one.probe)
            state, values = one.aggregator.add(state, np.array([score]))
            running.append(state)
            found.append((score, float(values[0])))
        is_over = all(value > one.above for one, (_, value) in zip(conditions, found, strict=True))
        streak = streak + 1 if is_over else 0
        states[row] = tuple(running), streak
        if streak == rule.for_tokens:
            met.append((i, *found[0]))
    return met


def _score(scores: Scores, i: int, probe: int) -> float:
    active = scores.active(i)
    at = int(np.searchsorted(active, probe))
    return float(scores.active_scores(i)[at]) if at < len(active) and active[at] == probe else 0.0
