"""What rules do: the events of those that are met, and the actions that follow. `probemon.monitor.rule_spec` has how a
rule is written, `probemon.monitor.rule_panel` how it is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probemon.core.aggregate import Aggregator
from probemon.core.baselines import is_of_traffic
from probemon.core.memory_reads import Reading
from probemon.errors import NotSupportedDecoding
from probemon.util.checks import check_number

if TYPE_CHECKING:
    from probemon.monitor.followers import Decider
    from probemon.monitor.publisher import Publisher
    from probemon.monitor.rule_spec import Rule

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
    `also`: the ids of the other concepts that were over the threshold at once, of a rule with `all_of`.
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
    also: tuple[str, ...] = ()
    reading: tuple[Reading, ...] = ()
    blind: str = ""
    verdict: Verdict | None = None

    def in_words(self) -> str:
        """Return what was met, in words."""
        where = f"row {self.row}, column {self.column}"
        who = f"{self.name} ({self.concept})"
        if self.blind:
            return f"{who} is not known at {where}: {self.blind}"
        also = f" with {', '.join(self.also)}" if self.also else ""
        return f"{who}{also} was over {self.above} at {self.for_tokens} tokens in a row, the last at {where}"


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
    if any(is_of_traffic(one) for rule in rules for one in rule.aggregators):
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
