"""Answering: one answer of the host, watched while it is generated, with its text, scores and events as they come.

answering = Answering(served, prepared, ids, choice=0, max_tokens=100, listener=job, ...)
ending = answering.run()                   # in the thread that generates; `job` was told of it meanwhile
ending.finish_reason, ending.summary
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from probemon.core.scores import GENERATED, PHASES, PROMPT, Scores
from probemon.errors import ArenaFull, ConfigError, RequestRefused, UnknownConcept
from probemon.monitor.followers import Follower
from probemon.monitor.result import Result
from probemon.monitor.rule_spec import Rule
from probemon.monitor.rules import Action, Event, Named
from probemon.ops.judges.escalation import Escalate
from probemon.ops.server.answer_text import AnswerText
from probemon.ops.server.draws import Draws
from probemon.ops.server.held import Held, Takes
from probemon.ops.server.served import Prepared, Served
from probemon.ops.server.token_objects import Told
from probemon.tracking.align import PlacedTokens


@dataclass(frozen=True)
class Piece:
    """What is new of an answer: text that may be shown, tokens with scores, rules that were met."""

    choice: int
    text: str
    tokens: list[dict[str, Any]]
    events: list[dict[str, Any]]


@dataclass(frozen=True)
class Ending:
    """How an answer ended. `finish_reason`: "stop", "length", "content_filter", or "cancelled" where nobody reads it;
    `n_tokens`: that were generated for it; `n_unseen`: of them without scores, beside the last.
    """

    choice: int
    finish_reason: str
    text: str
    summary: dict[str, Any]
    n_tokens: int
    n_unseen: int


class AnswerListener(Protocol):
    """Who is told of an answer while it is generated. `id`: of the answer."""

    id: str

    @property
    def cancelled(self) -> bool:
        """Whether the answer is not wanted any more."""

    def note(self, choice: int, tokens: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        """Hear of scores and of rules that were met, as soon as they are known."""

    def send(self, piece: Piece) -> None:
        """Send what is new after a token, which was noted before, with the text."""


class Answering(StoppingCriteria):
    """Generates one answer to the prompt `ids` and tells of it. It is the criterion that ends the generation, too.

    With `hold`, one more token is generated than is shown, so that the last one shown has its score, too.
    """

    def __init__(
        self,
        served: Served,
        prepared: Prepared,
        ids: Sequence[int],
        *,
        choice: int,
        max_tokens: int,
        seed: int | None,
        tell_prompt: bool,
        listener: AnswerListener,
        followers: Sequence[Follower] = (),
    ) -> None:
        self._served, self._prepared, self._ids = served, prepared, ids
        self._choice, self._max_tokens, self._tell_prompt = choice, max_tokens, tell_prompt
        self._listener, self._followers = listener, followers
        self._hold = prepared.watch.hold
        self._told = Told(served.manager.pack, prepared.watch.top_k, prepared.shown)
        self._text = AnswerText(served.decode, prepared.request.stop, hold=self._hold)
        self._answer_ids: list[int] = []
        self._unsettled: deque[tuple[Scores, int, int]] = deque()  # tokens whose text a stop string may yet cut
        self._tokens: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._n_noted = [0, 0]  # of these, how many tokens and events were noted
        self._complete = False  # the answer has all its tokens
        self._stopped_by: dict[str, Any] | None = None
        self._hidden_from: int | None = None  # the first token that is not shown, with `hold`
        self._n_unseen = 0
        self._run: Any = None
        self._newer: Held | None = None  # what the deployment file says since it was read again
        self._holding, self._owned = threading.Lock(), list[tuple[Rule, Rule]]()
        self._draws = Draws(seed, served.model.device) if served.draws(prepared.request) else None

    def run(self) -> Ending:
        """Generate, and return how it ended. Raises what `model.generate` raises, and `RequestRefused` where the file
        was read again since the request came, and its rules cannot be any more.
        """
        served, request = self._served, self._prepared.request
        ids = torch.tensor([list(self._ids)], device=served.model.device)
        with (
            closing(self._draws) if self._draws is not None else nullcontext(),
            served.holding.answering(self) as held,
            served.manager.attach(
                served.model,
                served.tokenizer,
                [] if served.budget is None else [served.budget],
                one_thread=True,
                # What was not seen ends the answer, unless rules of a deployment say what follows.
                on_gap="report" if held.rules else "raise",
                breaker=served.circuit,
                callback_errors="raise" if served.circuit is None else "report",
            ) as run,
        ):
            with self._holding:  # the file may have been read again meanwhile
                self._run, held = run, self._newer or held
                if held.deployment is not None:
                    rules = [self._own(rule) for rule in held.rules]
                    run.hold_to(held.deployment, rules, held.always_on, held.exclude, count=False)
            for follower in self._followers:
                run.follow(follower)
            self._watch_rules(run)
            run.follow(self._scored)
            if served.telemetry is not None:
                run.follow(served.telemetry.of_response(self._listener.id))
            out = served.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=self._max_tokens + self._hold,
                num_beams=1,
                num_return_sequences=1,
                logits_processor=LogitsProcessorList([] if self._draws is None else [self._draws]),
                stopping_criteria=StoppingCriteriaList([self]),
                **served.padding,
                **request.sampling,
            )
        return self._end(run.result(out))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Take the token that was sampled, tell what is known by now, and say whether it was the last."""
        if self._draws is not None:
            self._draws.end_step()
        # Where the answer is complete, one more was run, for the score of the last that is shown.
        ends = self._complete or (self._take(int(input_ids[0, -1])) and not self._hold)
        self._flush()
        return torch.full((len(input_ids),), ends or self._listener.cancelled, device=input_ids.device)

    # -- inside ----------------------------------------------------------------------------------

    def _take(self, token_id: int) -> bool:
        """Add a token to the answer; whether it has all its tokens then."""
        self._answer_ids.append(token_id)
        self._text.add(token_id)
        self._complete = self._text.met_stop or len(self._answer_ids) == self._max_tokens
        if self._complete:  # before its last token is told: what is left of a character is that one's text
            self._text.end()
        return self._complete

    def _watch_rules(self, run: Any) -> None:
        for at, (spec, _) in enumerate(self._prepared.rules):
            name = "stop" if spec.action == "stop" else "record"
            told = "stop" if name == "stop" else "tell"
            # Rules that a request relies on must not be silent. With `hold` the answer ends before that token.
            on_blind = "pass" if self._hold else "raise"
            spec = replace(spec, action=Named(name, partial(self._met, told)), on_blind=on_blind)
            try:
                run.add_rules(spec.rules(self._served.manager.pack))
            except (ConfigError, UnknownConcept) as error:  # it was checked when it came: the file was read again since
                raise RequestRefused(str(error), f"probemon.rules[{at}]") from None

    def hold_to(self, held: Held) -> Takes:
        """Hold to what the deployment file says now, from the next token on; from any thread.

        Where a rule of the request is on what is excluded now, or the file leaves no room beside such rules, the file's
        rules hold all the same and what is watched stays; where that cannot be either, what held before goes on.
        """
        with self._holding:
            self._newer = held
            if self._run is None or held.deployment is None:
                return "all"
            rules, refused = [self._own(rule) for rule in held.rules], (ConfigError, UnknownConcept, ArenaFull)
            with suppress(*refused):
                self._run.hold_to(held.deployment, rules, held.always_on, held.exclude, count=True)
                return "all"
            with suppress(*refused):
                self._run.hold_to(held.deployment, rules, count=True)
                return "rules"
            return "nothing"

    def _own(self, rule: Rule) -> Rule:
        """Return a rule of the deployment that acts on this answer; of one that stays the same, which goes on."""
        own = next((own for known, own in self._owned if known is rule), None)  # the same may stand twice
        if own is None:
            own = replace(rule, action=self._acting(rule.action), on_blind=self._blind(rule.on_blind))
            self._owned.append((rule, own))
        return own

    def _acting(self, action: Action) -> Action:
        if isinstance(action, Escalate):
            return action.telling(lambda event, ruling: self._met("stop" if ruling == "stop" else "tell", event))
        if not isinstance(action, str) or action == "raise":
            return action
        return Named(action, partial(self._met, "stop" if action == "stop" else "tell"))

    def _blind(self, action: Action) -> Action:
        return Named("stop", partial(self._met, "stop")) if action == "stop" else action

    def _met(self, action: str, event: Event) -> None:
        told = self._told.event(event, self._choice, action)
        self._events.append(told)
        if action == "stop" and self._stopped_by is None:
            self._stopped_by = told
            self._run.stop_mine()
            if self._hold:  # what was seen while a judge was asked stays seen
                self._hide_from(max(event.column - len(self._ids), self._text.n_allowed))

    def _hide_from(self, index: int) -> None:
        self._hidden_from = index if self._hidden_from is None else min(index, self._hidden_from)
        self._text.cut_at_token(index)

    def _scored(self, placed: PlacedTokens, scores: Scores) -> None:
        """Take the scores of some tokens, as a listener of the run."""
        if placed.phase == PROMPT:
            if self._tell_prompt:
                self._tokens += [
                    self._token(scores, i, column, token_id, self._served.raw_text(token_id), None, PROMPT)
                    for i, (column, token_id) in enumerate(
                        zip(placed.columns.tolist(), placed.ids.tolist(), strict=True)
                    )
                ]
            self._note()
            return
        for i, column in enumerate(placed.columns.tolist()):
            index = column - len(self._ids)
            if scores.coverage.unseen[i]:
                self._n_unseen += 1
                if self._hold:  # what cannot be judged is not shown
                    self._run.stop_mine()
                    self._hide_from(index)
            if self._hidden_from is None or index < self._hidden_from:
                self._text.allow(index + 1)
                self._unsettled.append((scores, i, index))
        self._note()

    def _generated(self, scores: Scores, i: int, index: int) -> dict[str, Any]:
        return self._token(
            scores,
            i,
            len(self._ids) + index,
            self._answer_ids[index],
            self._text.token_text(index),
            self._text.span(index),
            GENERATED,
        )

    def _token(
        self, scores: Scores, i: int, position: int, token_id: int, text: str, span: tuple[int, int] | None, phase: int
    ) -> dict[str, Any]:
        return self._told.token(
            scores,
            i,
            choice=self._choice,
            position=position,
            token_id=token_id,
            text=text,
            span=span,
            phase=PHASES[phase],
        )

    def _note(self) -> None:
        """Tell of scores and rules at once; the client is told when the token after has been chosen, with its text."""
        while self._unsettled and self._text.is_settled(self._unsettled[0][2]):
            self._tokens.append(self._generated(*self._unsettled.popleft()))
        tokens, events = self._tokens[self._n_noted[0] :], self._events[self._n_noted[1] :]
        self._n_noted = [len(self._tokens), len(self._events)]
        if tokens or events:
            self._listener.note(self._choice, tokens, events)

    def _flush(self) -> None:
        self._note()
        text, tokens, events = self._text.take(), self._tokens, self._events
        if text or tokens or events:
            self._tokens, self._events, self._n_noted = [], [], [0, 0]
            self._listener.send(Piece(self._choice, text, tokens, events))

    def _end(self, result: Result) -> Ending:
        self._text.end()
        n, n_before = len(self._answer_ids), len(self._ids)
        result = result.before(n_before + n)
        last = result.at(0, n_before + n - 1)
        n_withheld = 0 if self._hidden_from is None else n - self._hidden_from
        if self._hidden_from is None:
            unseen = bool(result.coverage.unseen[last])  # the host never ran it
            # The last token may be the host's end, which is text with some, or where its own time was up.
            n_withheld = int(unseen and self._hold and self._text.token_text(n - 1) != "")
            self._text.allow(n - n_withheld)
            if unseen and not n_withheld:
                self._unsettled.append((result.scores, last, n - 1))
        self._flush()
        return Ending(
            self._choice,
            self._finish_reason(),
            self._text.text,
            self._summary(result, n_withheld),
            n,
            self._n_unseen,
        )

    def _summary(self, result: Result, n_withheld: int) -> dict[str, Any]:
        summary = self._told.summary(result, self._stopped_by, n_withheld)
        if result.deployment is None:
            return summary
        held = [(position, result.deployments.get(number)) for _, position, number in result.watches]
        changes = [one for one, before in zip(held, [(0, None), *held], strict=False) if one[1] != before[1]]
        summary["deployment"] = result.deployment
        if len(changes) > 1:  # the file was read again meanwhile
            summary["deployments"] = [{"position": position, "deployment": name} for position, name in changes]
        return summary

    def _finish_reason(self) -> str:
        if self._stopped_by is not None or self._hidden_from is not None:
            return "content_filter"
        if self._text.met_stop or self._answer_ids[-1] in self._served.end_ids:
            return "stop"
        # Where nobody cancelled, the host's own settings ended it (its max_time).
        return "length" if self._complete or not self._listener.cancelled else "cancelled"
