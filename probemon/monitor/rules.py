"""Events and actions of rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from probemon.core.aggregate import Aggregator
from probemon.core.baselines import is_of_traffic
from probemon.core.memory_reads import Reading
from probemon.errors import RuleError, UnsupportedDecoding
from probemon.host.reasoning_marks import marks_of
from probemon.util.checks import check_number

if TYPE_CHECKING:
    from probemon.monitor.followers import Decider
    from probemon.monitor.publisher import Publisher
    from probemon.monitor.rule_spec import Rule

ACTIONS = ("record", "stop", "raise")
ESCALATE, CALL = "escalate", "call"
TOLD_ACTIONS = (*ACTIONS, ESCALATE, CALL)  # names reported to followers
PASS = "pass"
NO_STOP_IN_BEAMS = "a stop cannot end one beam: its continuation comes from the other beams. Use a callable action"


class AskedAction:
    """An action that is decided later, for instance by a judge (`Escalate`)."""

    def check_run(self, tokenizer: Any, keep_tokens: int | None) -> None:
        """Raise `ConfigError` if such a run does not support it."""

    def decider(self, publisher: Publisher) -> Decider:
        """Return the decider of this class for one run."""
        raise NotImplementedError


Action = str | AskedAction | Callable[["Event"], object]


@dataclass(frozen=True)
class Verdict:
    """A judge's decision.

    `ruling`: "pass", "stop", "raise" or "pending"
    `failure`: "" if the judge ruled; else "late", "error" or "not asked"
    `reason`: the judge's comment, or the error
    `seconds`: since the event
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
    """A rule was met: `value` exceeded `above` at `for_tokens` successive tokens, the last at `row`, `column` of the
    padded sequence.

    `value`: the `score`, or the rule's running `aggregate`
    `provisional`: in a beam that may not be returned; `row` is `text * num_beams + beam`
    `alert_set`: the set that gave `above`, if any
    `also`: ids of the other concepts of `all_of`
    `reading`: top memory reads, with a follower `Routing`
    `blind`: why the token has no scores (`on_blind`); `score` and `value` are then meaningless
    `verdict`: of a judge; `run.events` replaces a pending one
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
        """Return a description."""
        place = f"row {self.row}, column {self.column}"
        concept = f"{self.name} ({self.concept})"
        if self.blind:
            return f"{concept} is not known at {place}: {self.blind}"
        also = f" with {', '.join(self.also)}" if self.also else ""
        return f"{concept}{also} was over {self.above} at {self.for_tokens} tokens in a row, the last at {place}"


@dataclass(frozen=True)
class Named:
    """A callable that is reported under a name such as "stop"."""

    name: str
    call: Callable[[Event], object]

    def __call__(self, event: Event) -> object:
        """Call it."""
        return self.call(event)


def named_action(action: Action) -> str:
    """Return the reported name of an action."""
    if isinstance(action, (str, Named)):
        return action if isinstance(action, str) else action.name
    return ESCALATE if isinstance(action, AskedAction) else CALL


def check_asked(rules: Sequence[Rule], tokenizer: Any, keep_tokens: int | None = None) -> None:
    """Raise `ConfigError` if a run does not support the rules' actions or parts."""
    if (of_part := next((rule for rule in rules if rule.reasons is not None), None)) and marks_of(tokenizer) is None:
        raise RuleError(
            f"within is {of_part.within!r}, and this run's tokenizer has no token such as <think>, by which reasoning"
            " is told from the reply: give 'answer'",
            "within",
        )
    for action in [action for rule in rules for action in rule.actions if isinstance(action, AskedAction)]:
        action.check_run(tokenizer, keep_tokens)


def check_beams(rules: Sequence[Rule]) -> None:
    """Raise `UnsupportedDecoding` if a rule cannot work in beams."""
    if any(action == "stop" or isinstance(action, AskedAction) for rule in rules for action in rule.actions):
        raise UnsupportedDecoding(NO_STOP_IN_BEAMS)
    if any(is_of_traffic(one) for rule in rules for one in rule.aggregators):
        raise UnsupportedDecoding(
            "a rule compares with the last tokens of all traffic, and most tokens of beams are thrown away: compare"
            " with the pack, or with the row's own (z:pack, z:last:N)"
        )


def check_above(aggregator: Aggregator, above: object, most: float) -> float:
    """Return the threshold if 0 <= `above` < `most`, else raise `ConfigError`."""
    what = "scores lie" if most == 1 else f"{aggregator} lies"
    remedy = f"{what} between 0 and {most:.6g} and must exceed it, so give 0 or more, and less than {most:.6g}"
    return check_number("above", above, low=0, high=most, open_high=True, remedy=remedy)
