"""Rules on concepts: a score, or its aggregate, over a threshold for some tokens in a row makes an event, one a streak.

[rule] = make_rules(pack, "weapon", above=0.9, for_tokens=3, aggregate="ema:0.3", action="stop")
for i, score, value in rule.observe(placed, scores, states): ...      # the tokens at which it is met
for i, reason in rule.blind_to(scores): ...                           # and those of which it does not know
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.core.aggregate import Aggregator, named
from probemon.core.baselines import ceiling, is_of_traffic, with_counts
from probemon.core.concept_names import Wanted
from probemon.core.memory_reads import Reading
from probemon.core.scores import Scores
from probemon.errors import ConfigError, NotSupportedDecoding
from probemon.packs.group import AnyPack, PackGroup
from probemon.tracking.align import PlacedTokens
from probemon.util.checks import check_count, check_number

if TYPE_CHECKING:
    from probemon.monitor.followers import Decider
    from probemon.monitor.publisher import Publisher

ACTIONS = ("record", "stop", "raise")
ESCALATE, CALL = "escalate", "call"
TOLD_ACTIONS = (*ACTIONS, ESCALATE, CALL)  # by these names followers hear of them
PASS = "pass"
NO_STOP_IN_BEAMS = (
    "a stop cannot end one beam: what it would have continued comes from the others. Use a callable action"
)


class AskedAction:
    """An action that somebody is asked for when the rule is met, such as a judge (`Escalate`): the seam for what
    decides later than at once.
    """

    def check_run(self, tokenizer: Any, keep_tokens: int | None) -> None:
        """Raise `ConfigError` where a run with this tokenizer, which keeps so many tokens, cannot ask."""

    def decider(self, publisher: Publisher) -> Decider:
        """Make what asks for the actions of this class in one run."""
        raise NotImplementedError


Action = str | AskedAction | Callable[["Event"], object]


@dataclass(frozen=True)
class Verdict:
    """What follows from an event: `ruling` is "pass", "stop" or "raise", and "pending" before it is known.

    `failure`: "" where the judge has ruled; "late", "error" or "not asked" where it has not, and `on_failure` did.
    `reason`: what the judge said beside, or what went wrong. `seconds`: from the event to the verdict.
    """

    ruling: str
    failure: str = ""
    reason: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.ruling} ({self.failure or 'judged'})"


PENDING = Verdict("pending")


@dataclass(frozen=True)
class Event:
    """A rule was met: `value` was over `above` at `for_tokens` tokens in a row, the last of them at `row`, `column`.

    `value` is the `score` of the token, or what the rule's `aggregate` makes of those so far. `column` counts from the
    start of the padded sequence; `concept` is the id, `path` the names from the root; `generation` its number in the
    run, `request` its id in continuous batching. `provisional`: met in a beam, which may not be the one returned: `row`
    is then `text * num_beams + beam`.
    `alert_set`: the pack's set of alert thresholds that `above` is of; None where it was given, or the set has no name.
    `reading`: what each memory of the host read most at the token, where a follower `Routing` watches it.
    `blind`: why the token has no scores, where the event is of `on_blind`; `score` and `value` say nothing then.
    `verdict`: of a judge (`Escalate`), where one was asked; pending until it is known, and the event of `run.events` is
    replaced by one that has it.
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
    aggregate: str = "each"
    value: float = 0.0
    generation: int = 0
    request: str = ""
    alert_set: str | None = None
    reading: tuple[Reading, ...] = ()
    blind: str = ""
    verdict: Verdict | None = None


@dataclass(frozen=True)
class Rule:
    """What to watch for, and what to do then: see `MonitorRun.on`."""

    probe: int
    above: float
    for_tokens: int
    aggregator: Aggregator
    action: Action
    alert_set: str | None = None
    on_blind: Action = PASS

    @property
    def actions(self) -> tuple[Action, ...]:
        """What it may do."""
        return self.action, self.on_blind

    def blind_to(self, scores: Scores) -> list[tuple[int, str]]:
        """Return the tokens that have no scores, and why, where that is an event."""
        unseen = [] if self.on_blind == PASS else enumerate(scores.coverage.unseen)
        return [(i, reason) for i, reason in unseen if reason]

    def observe(self, placed: PlacedTokens, scores: Scores, states: dict[int, Any]) -> list[tuple[int, float, float]]:
        """Return the entries of `placed` at which the streak reached `for_tokens`, with their score and aggregate.

        `states`: by row; its values are replaced, never changed in place. An unseen token, of which nothing is known,
        neither counts nor breaks a streak.
        """
        met = []
        for i, row in enumerate(placed.rows.tolist()):
            if scores.coverage.unseen[i]:
                continue
            active = scores.active(i)
            at = int(np.searchsorted(active, self.probe))
            score = float(scores.active_scores(i)[at]) if at < len(active) and active[at] == self.probe else 0.0
            state, streak = states.get(row, (self.aggregator.begin(), 0))
            state, values = self.aggregator.add(state, np.array([score]))
            value = float(values[0])
            streak = streak + 1 if value > self.above else 0
            states[row] = state, streak
            if streak == self.for_tokens:
                met.append((i, score, value))
        return met


def make_rules(
    pack: AnyPack,
    concept: Wanted,
    *,
    above: float | None = None,
    for_tokens: int = 1,
    aggregate: str | Aggregator | None = None,
    action: Action = "stop",
    on_blind: Action = PASS,
) -> list[Rule]:
    """Make a rule for each of the concepts, with the arguments of `run.on`. Raises `UnknownConcept`, `ConfigError`."""
    aggregator = named(aggregate)
    probes = pack.find_all(concept)
    # Each knows of its own concept, where it compares with what a pack knows.
    own = [with_counts(aggregator, pack, [probe]) for probe in probes]
    levels = pack.thresholds_for(aggregator)[probes].tolist() if above is None else [above] * len(probes)
    for probe, level, most in zip(probes, levels, map(ceiling, own), strict=True):
        if above is None and not level < 1:  # NaN: not calibrated; 1: the rate asked for is met by no lower one
            raise ConfigError(
                f"{pack.concepts[probe]['id']} has no alert threshold in {pack.name} for {aggregator} that a score"
                f" can exceed ({level}): give above="
            )
        check_above(aggregator, level, most)
    for_tokens = check_count("for_tokens", for_tokens, least=1, remedy="it counts tokens in a row, so give 1 or more")
    if action not in ACTIONS and not isinstance(action, AskedAction) and not callable(action):
        raise ConfigError(
            f"action is {action!r}: give 'record', 'stop', 'raise', an Escalate or a callable that takes the event"
            " (run.hold wraps a streamer)"
        )
    if on_blind not in (PASS, *ACTIONS) and not isinstance(on_blind, AskedAction) and not callable(on_blind):
        raise ConfigError(
            f"on_blind is {on_blind!r}: give 'pass', 'record', 'stop', 'raise', an Escalate or a callable that takes"
            " the event"
        )
    is_own = above is None and str(aggregator) == "each"
    return [
        Rule(probe, float(level), for_tokens, bound, action, _set_of(pack, probe) if is_own else None, on_blind)
        for probe, level, bound in zip(probes, levels, own, strict=True)
    ]


@dataclass(frozen=True)
class Named:
    """A callable action that is told as what it does, "stop" say, and not as a call."""

    name: str
    call: Callable[[Event], object]

    def __call__(self, event: Event) -> object:
        """Call it."""
        return self.call(event)


def named_action(action: Action) -> str:
    """Return the name by which an action is told."""
    if isinstance(action, (str, Named)):
        return action if isinstance(action, str) else action.name
    return ESCALATE if isinstance(action, AskedAction) else CALL


def check_asked(rules: Iterable[Rule], tokenizer: Any, keep_tokens: int | None = None) -> None:
    """Raise `ConfigError` where a run of this tokenizer cannot ask whom the rules ask."""
    for action in [action for rule in rules for action in rule.actions if isinstance(action, AskedAction)]:
        action.check_run(tokenizer, keep_tokens)


def check_beams(rules: Sequence[Rule]) -> None:
    """Raise `NotSupportedDecoding` where a rule could not do in beams what it is for."""
    if any(action == "stop" or isinstance(action, AskedAction) for rule in rules for action in rule.actions):
        raise NotSupportedDecoding(NO_STOP_IN_BEAMS)
    if any(is_of_traffic(rule.aggregator) for rule in rules):
        raise NotSupportedDecoding(
            "a rule compares with the last tokens of all traffic, and most tokens of beams are thrown away: compare"
            " with the pack, or with the row's own (z:pack, z:last:N)"
        )


def check_above(aggregator: Aggregator, above: object, most: float) -> float:
    """Return the threshold of a rule, which a value has to exceed, and `most` is what none exceeds. Raises
    `ConfigError`.
    """
    what = "scores lie" if most == 1 else f"{aggregator} lies"
    remedy = f"{what} between 0 and {most:.6g} and must exceed it, so give 0 or more, and less than {most:.6g}"
    return check_number("above", above, low=0, high=most, open_high=True, remedy=remedy)


def _set_of(pack: AnyPack, probe: int) -> str | None:
    """Return the name of the set of alert thresholds that is in force in a probe's pack."""
    of_all = pack.alert_set
    return pack.pack_of(probe).alert_set if of_all and isinstance(pack, PackGroup) else of_all
