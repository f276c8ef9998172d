"""Evaluates rules on scored tokens.

    panel = RulePanel(watch.rules)
    for rule, i, fields in panel.ask(placed, scores, generation.states_of_rule): ...

A token's own score of one concept in the answer is compared for all rules in one pass; other rules go one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from probemon.core.aggregate import Each
from probemon.core.scores import GENERATED, PROMPT, Scores
from probemon.host.reasoning_marks import N_LAST, ReasoningMarks
from probemon.monitor.rule_spec import Condition, Rule
from probemon.monitor.rules import PASS
from probemon.tracking.align import PlacedTokens

OF_PANEL, OF_PARTS = -1, -2  # keys of the panel's streaks, and of where reasoning goes on; rules count from 0
Known = dict[str, Any]  # an event's score and value, or `blind`


class RulePanel:
    """The rules of one state, `(number, rule)`."""

    def __init__(self, rules: Sequence[tuple[int, Rule]]) -> None:
        self._rules = tuple(rules)
        plain = [at for at, (_, rule) in enumerate(rules) if _is_plain(rule)]
        self._alone = [at for at, (_, rule) in enumerate(rules) if not _is_plain(rule)]
        self._blind = [at for at, (_, rule) in enumerate(rules) if rule.on_blind != PASS]
        self._asks = {phase: any(rule.asks(phase) for _, rule in rules) for phase in (PROMPT, GENERATED)}
        self._by_part = any(rule.reasons is not None for _, rule in rules)
        # Sorted as active probes are.
        plain.sort(key=lambda at: rules[at][1].probe)
        self._at = np.array(plain, dtype=np.int64)
        self._numbers = np.array([rules[at][0] for at in plain], dtype=np.int64)
        chosen = [rules[at][1] for at in plain]
        self._probes = np.array([rule.probe for rule in chosen], dtype=np.int32)
        self._above = np.array([rule.above for rule in chosen], dtype=np.float64)
        self._for_tokens = np.array([rule.for_tokens for rule in chosen], dtype=np.int64)

    def asks(self, phase: int) -> bool:
        """True if a rule applies to a phase, or needs its tokens: a prompt may begin reasoning."""
        return self._asks[phase] or self._by_part

    def ask(
        self,
        placed: PlacedTokens,
        scores: Scores,
        states: Callable[[int], dict[int, Any]],
        marks: ReasoningMarks | None = None,
        before: Callable[[int, int, int], tuple[int, ...]] | None = None,
    ) -> Iterator[tuple[Rule, int, Known]]:
        """Yield `(rule, i, fields)` for each rule met or blind at entry `i` of `placed`, in the order of rules, then
        tokens.

        - `states(number)`: a rule's state by row; values are replaced, never changed in place
        - `marks`: of reasoning, for rules on parts of the answer
        - `before(row, column, n)`: the last ids before a column, for prompts from a cache
        """
        reasons = None
        if self._by_part and marks is not None:
            reasons = _reasons(placed, states(OF_PARTS), marks, before)
        matches: dict[int, list[tuple[int, Known]]] = {}
        if len(self._at) and placed.phase == GENERATED:
            self._compare(placed, scores, states(OF_PANEL), matches)
        for at in self._alone:
            number, rule = self._rules[at]
            for i, score, value in observe(rule, placed, scores, states(number), reasons):
                matches.setdefault(at, []).append((i, {"score": score, "value": value}))
        for at in self._blind if not scores.coverage.all_seen else ():
            for i, reason in blind_to(self._rules[at][1], placed, scores, reasons):
                matches.setdefault(at, []).append((i, {"blind": reason}))
        for at in sorted(matches):
            for i, fields in matches[at]:
                yield self._rules[at][1], i, fields

    def _compare(
        self, placed: PlacedTokens, scores: Scores, states: dict[int, Any], matches: dict[int, list[tuple[int, Known]]]
    ) -> None:
        for i, row in enumerate(placed.rows.tolist()):
            if scores.coverage.unseen[i]:
                continue
            active, values = scores.active(i), scores.active_scores(i)
            own_scores = np.zeros(len(self._probes))
            if len(active):
                place = np.minimum(np.searchsorted(active, self._probes), len(active) - 1)
                own_scores = np.where(active[place] == self._probes, values[place], own_scores)
            streak = np.where(own_scores > self._above, self._streak(states.get(row)) + 1, 0)
            states[row] = self._numbers, streak
            for k in np.flatnonzero(streak == self._for_tokens).tolist():
                score = float(own_scores[k])
                matches.setdefault(int(self._at[k]), []).append((i, {"score": score, "value": score}))

    def _streak(self, earlier: tuple[Any, Any] | None) -> Any:
        """Return each rule's streak."""
        if earlier is None:
            return np.zeros(len(self._numbers), dtype=np.int64)
        numbers, streak = earlier
        if numbers is self._numbers:
            return streak
        before = dict(zip(numbers.tolist(), streak.tolist(), strict=True))
        return np.array([before.get(number, 0) for number in self._numbers.tolist()], dtype=np.int64)


def _is_plain(rule: Rule) -> bool:
    return type(rule.aggregator) is Each and rule.within == "answer" and not rule.also


def _reasons(
    placed: PlacedTokens,
    states: dict[int, Any],
    marks: ReasoningMarks,
    before: Callable[[int, int, int], tuple[int, ...]] | None,
) -> list[bool | None]:
    """Return which tokens are reasoning, None for marks. A row's state: the end of its prompt, then a flag."""
    found = list[bool | None]()
    for row, column, id in zip(placed.rows.tolist(), placed.columns.tolist(), placed.ids.tolist(), strict=True):
        state = states.get(row, ())
        if placed.phase == PROMPT:
            states[row] = (*(state if isinstance(state, tuple) else ()), id)[-N_LAST:]
            found.append(None)
            continue
        if isinstance(state, tuple) and len(state) < N_LAST and before is not None:  # of a prompt from a cache
            state = before(row, column, N_LAST) or state
        is_open = marks.opened_by(state) if isinstance(state, tuple) else state
        [reasons], states[row] = marks.parts([id], is_open)
        found.append(reasons)
    return found


def blind_to(
    rule: Rule, placed: PlacedTokens, scores: Scores, reasons: Sequence[bool | None] | None = None
) -> list[tuple[int, str]]:
    """Return `(entry, reason)` of tokens without scores, if the rule acts on these."""
    if rule.on_blind == PASS or not rule.asks(placed.phase):
        return []
    unseen = [(i, reason) for i, reason in enumerate(scores.coverage.unseen) if reason]
    return [(i, reason) for i, reason in unseen if _is_asked(rule, i, reasons)]


def _is_asked(rule: Rule, i: int, reasons: Sequence[bool | None] | None) -> bool:
    return rule.reasons is None or reasons is None or reasons[i] == rule.reasons


def observe(
    rule: Rule,
    placed: PlacedTokens,
    scores: Scores,
    states: dict[int, Any],
    reasons: Sequence[bool | None] | None = None,
) -> list[tuple[int, float, float]]:
    """Return `(entry, score, value)` wherever a rule's streak reaches `for_tokens`.

    `states`: as in `RulePanel.ask`. Unseen tokens, and those of other parts, neither extend nor break a streak.
    """
    if not rule.asks(placed.phase):
        return []
    first = Condition(rule.probe, rule.above, rule.aggregator)
    met, conditions = [], (first, *rule.also)
    for i, row in enumerate(placed.rows.tolist()):
        if scores.coverage.unseen[i] or not _is_asked(rule, i, reasons):
            continue
        before, streak = states.get(row) or (tuple(condition.aggregator.begin() for condition in conditions), 0)
        running, pairs = [], []
        for condition, state in zip(conditions, before, strict=True):
            score = _score(scores, i, condition.probe)
            state, values = condition.aggregator.add(state, np.array([score]))
            running.append(state)
            pairs.append((score, float(values[0])))
        is_over = all(value > condition.above for condition, (_, value) in zip(conditions, pairs, strict=True))
        streak = streak + 1 if is_over else 0
        states[row] = tuple(running), streak
        if streak == rule.for_tokens:
            met.append((i, *pairs[0]))
    return met


def _score(scores: Scores, i: int, probe: int) -> float:
    active = scores.active(i)
    at = int(np.searchsorted(active, probe))
    return float(scores.active_scores(i)[at]) if at < len(active) and active[at] == probe else 0.0
