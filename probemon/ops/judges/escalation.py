"""The action that asks a judge, slower and surer than a probe, whether a sequence stops.

def judge(question):
    return "stop" if is_harmful(question.text) else "pass"      # or ("stop", "why")

run.on("weapon", action=Escalate(judge, within=2.0, meanwhile="hold", on_failure="stop"))
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
    """A question to a judge.

    - `event`: that was met
    - `ids`, `text`: the end of its sequence, up to that token; "" without a tokenizer
    - `within`: seconds to answer
    - `n_missing`: earlier tokens that are unknown, since they came in a cache
    - `plain_text`: `text` without special tokens, which another model would read as the end of a turn; None: as `text`
    """

    event: Event
    ids: tuple[int, ...]
    text: str
    within: float
    n_missing: int = 0
    plain_text: str | None = None


Judge = Callable[[Question], str | tuple[str, str]]


@dataclass(frozen=True)
class Escalate(AskedAction):
    """The action of a rule: ask `judge`, and apply its ruling. Raises `ConfigError`.

    It is asked once while the score stays over the threshold.

    - `judge(question)`: returns "stop" or "pass", or one of these with a reason
    - `within`: seconds from the event on, including the queue
    - `meanwhile`: "hold" waits, "pass" goes on, "stop" stops at once
    - `on_failure`: "pass", "stop" or "raise" if there is no verdict in time
    - `last_tokens`: most tokens shown to the judge
    - `n_workers`, `max_waiting`: threads that ask, and waiting questions
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
    abandoned: Callable[[], bool] | None = field(init=False, repr=False, compare=False, default=None)

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

    def telling(self, told: Callable[[Event, str], object], abandoned: Callable[[], bool]) -> Escalate:
        """Return a copy with the same workers that calls `told(event, ruling)` when a ruling is applied.

        It holds a generation only as long as `abandoned()` is False.
        """
        same = copy(self)
        object.__setattr__(same, "told", told)
        object.__setattr__(same, "abandoned", abandoned)
        return same

    def check_run(self, tokenizer: Any, keep_tokens: int | None) -> None:
        """Call the judge's `check`. Raises `ConfigError`, also if the run keeps fewer than `last_tokens` tokens."""
        if keep_tokens is not None and keep_tokens < self.last_tokens:
            raise ConfigError(
                f"a judge is to be shown last_tokens={self.last_tokens}, and the run keeps"
                f" keep_tokens={keep_tokens} of a row: keep as many, or show fewer"
            )
        if hasattr(self.judge, "check"):
            self.judge.check(tokenizer)

    def decider(self, publisher: Publisher) -> Decider:
        """Return the decider of one run."""
        from probemon.ops.judges.escalations import Escalations

        return Escalations(publisher)
