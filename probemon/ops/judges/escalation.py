"""Escalate: a rule that is met is put to a judge, slower than a probe and surer, who rules whether the row stops.

    def judge(question):
        return "stop" if is_harmful(question.text) else "pass"      # or ("stop", "why")

    run.on("weapon", action=Escalate(judge, within=2.0, meanwhile="hold", on_failure="stop"))
    ...
    run.events[0].verdict              # Verdict(ruling="pass", failure="", reason="", seconds=0.31)

Judges run in threads of their own. docs/second_opinion.md says what is bounded, and how.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from probemon.errors import ConfigError
from probemon.monitor.rules import AskedAction, Event
from probemon.ops.judges.judge_desk import Desk
from probemon.util.checks import check_callable, check_choice, check_count, check_number

if TYPE_CHECKING:
    from probemon.monitor.followers import Decider
    from probemon.monitor.publisher import Publisher

HOLD, PASS, STOP, RAISE = "hold", "pass", "stop", "raise"
MEANWHILE, ON_FAILURE = (HOLD, PASS, STOP), (PASS, STOP, RAISE)


@dataclass(frozen=True)
class Question:
    """What a judge is asked: `event` was met, and `text` is the end of its row, that token included, as the run's
    tokenizer decodes it ("" without one). `ids` are its tokens. The answer is wanted `within` so many seconds.
    `n_missing`: how many tokens would belong before these, and are not known, since they came in a cache.
    """

    event: Event
    ids: tuple[int, ...]
    text: str
    within: float
    n_missing: int = 0


Judge = Callable[[Question], str | tuple[str, str]]


@dataclass(frozen=True)
class Escalate(AskedAction):
    """The action of a rule: ask `judge`, and do as it says.

    It is asked when the rule is met, which is once for as long as the score stays over the threshold: "pass" holds
    until the score has fallen, and of an aggregate that never falls ("max") to the end of the row.

    `judge(question)`: returns "stop" or "pass", or one of these and the reason, in words.
    `within`: seconds that it has, from the event on. It counts them in a queue, too.
    `meanwhile`: "hold" lets the generation wait for the verdict, "pass" lets it go on until a verdict stops it, "stop"
    stops the row at once, and the verdict only joins the event.
    `on_failure`: "pass", "stop" or "raise" where there is no verdict in time; for what is stopped already, "stop".
    `last_tokens`: of the row that the judge is shown at most, of its prompt and of what was generated.
    `n_workers`: threads that ask at the same time. `max_waiting`: questions that wait for one; more are not asked.

    Whoever uses one object, in however many rules and runs, shares its workers. Raises `ConfigError`.
    """

    judge: Judge
    within: float
    meanwhile: str
    on_failure: str
    last_tokens: int = 64
    n_workers: int = 2
    max_waiting: int = 16
    desk: Desk = field(init=False, repr=False, compare=False)
    told: Callable[[Event, str], object] | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        check_callable("judge", self.judge)
        check_number(
            "within", self.within, low=0, open_low=True, high=3600, remedy="give seconds, more than 0, at most 3600"
        )
        check_choice("meanwhile", self.meanwhile, MEANWHILE)
        check_choice("on_failure", self.on_failure, ON_FAILURE)
        if self.meanwhile == STOP and self.on_failure != STOP:
            raise ConfigError(
                f"on_failure is {self.on_failure!r}: meanwhile='stop' has stopped the row by then, so give 'stop'"
            )
        check_count("last_tokens", self.last_tokens, least=1, remedy="it counts tokens, so give 1 or more")
        n_workers = check_count("n_workers", self.n_workers, least=1, remedy="it counts threads, so give 1 or more")
        object.__setattr__(self, "desk", Desk(n_workers, check_count("max_waiting", self.max_waiting)))

    def telling(self, told: Callable[[Event, str], object]) -> Escalate:
        """Return the same, with the same workers, which calls `told(event, "pass" or "stop" or "raise")` in the thread
        that generates, when that follows.
        """
        same = copy(self)
        object.__setattr__(same, "told", told)
        return same

    def check_run(self, tokenizer: Any, keep_tokens: int | None) -> None:
        """Let a judge that has a method `check` say whether it can be asked. Raises `ConfigError`, also where the run
        keeps fewer tokens than the judge is to be shown.
        """
        if keep_tokens is not None and keep_tokens < self.last_tokens:
            raise ConfigError(
                f"a judge is to be shown last_tokens={self.last_tokens}, and the run keeps"
                f" keep_tokens={keep_tokens} of a row: keep as many, or show fewer"
            )
        if hasattr(self.judge, "check"):
            self.judge.check(tokenizer)

    def decider(self, publisher: Publisher) -> Decider:
        """Make what asks the judges of one run."""
        from probemon.ops.judges.escalations import Escalations

        return Escalations(publisher)
