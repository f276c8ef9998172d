"""One answer of the model, watched while it is generated."""

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
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

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
from probemon.ops.server.logprobs import Logprobs, TokenLogprob, ToldLogprob, told
from probemon.ops.server.penalties import Penalties
from probemon.ops.server.served import Prepared, Served
from probemon.ops.server.token_objects import Told
from probemon.tracking.align import PlacedTokens
from probemon.util.token_texts import TokenTexts

_NO_TOKEN = 2**31 - 1  # an id that nothing ends at


@dataclass(frozen=True)
class Piece:
    """New texts, tokens with scores, and events of an answer.

    - `prompt`: the text of the prompt, if it is a part of the answer; before its other texts
    - `logprobs`, `prompt_logprobs`: of the tokens of its texts, and of the prompt
    """

    choice: int
    text: str
    reasoning: str
    tokens: list[dict[str, Any]]
    events: list[dict[str, Any]]
    prompt: str = ""
    logprobs: Sequence[ToldLogprob] = ()
    prompt_logprobs: Sequence[ToldLogprob] = ()

    @property
    def n_characters(self) -> int:
        """Its approximate size."""
        n_values = sum(1 + len(one.top) for one in (*self.logprobs, *self.prompt_logprobs))
        return len(self.text) + len(self.reasoning) + len(self.prompt) + 64 * n_values


@dataclass(frozen=True)
class Ending:
    """How an answer ended.

    - `finish_reason`: "stop", "length", "content_filter" or "cancelled"
    - `reasoning`: None if it is not told apart from the text
    - `n_unseen`: tokens without scores, not counting the last
    """

    choice: int
    finish_reason: str
    text: str
    reasoning: str | None
    summary: dict[str, Any]
    n_tokens: int
    n_unseen: int


class AnswerListener(Protocol):
    """Receives an answer while it is generated."""

    id: str

    @property
    def cancelled(self) -> bool:
        """True if the answer is no longer wanted."""

    def note(self, choice: int, tokens: list[dict[str, Any]], events: list[dict[str, Any]]) -> None:
        """Receive scores and met rules at once."""

    def send(self, piece: Piece) -> None:
        """Send text, with the tokens and events noted before."""


class Answering(StoppingCriteria):
    """Generates one answer to the prompt `ids`; also the criterion that ends the generation.

    With `hold`, one token more is generated than shown, so that the last shown one has a score.
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
        self._text = AnswerText(
            served.decode,
            prepared.request.stop,
            hold=self._hold,
            marks=prepared.marks,
            reasons=prepared.marks is not None and prepared.marks.opened_by(ids),
        )
        self._answer_ids: list[int] = []
        self._unsettled: deque[tuple[Scores, int, int]] = deque()  # may still be cut by a stop string
        self._tokens: list[dict[str, Any]] = []
        self._events: list[dict[str, Any]] = []
        self._n_noted = [0, 0]  # tokens, events
        self._complete = False
        self._stopped_by: dict[str, Any] | None = None
        self._hidden_from: int | None = None
        self._n_unseen = 0
        self._run: Any = None
        self._newer: Held | None = None  # a reloaded deployment
        self._holding, self._owned = threading.Lock(), list[tuple[Rule, Rule]]()
        request = prepared.request
        self._draws = Draws(seed, served.model.device) if served.draws(request) else None
        self._ends = served.ends_of(request)
        self._echoes = request.echoes  # until the prompt is sent
        n_top = request.n_top_logprobs
        self._logprobs = None if n_top is None else Logprobs(ids, n_top, prompt=self._echoes)
        self._untold: deque[TokenLogprob] = deque()  # their texts may still be cut
        self._n_told = 0

    def run(self) -> Ending:
        """Generate the answer. Raises `RequestRefused` if a reloaded deployment conflicts with the request's rules."""
        served, request = self._served, self._prepared.request
        ids = torch.tensor([list(self._ids)], device=served.model.device)
        with (
            closing(self._draws) if self._draws is not None else nullcontext(),
            self._logprobs.following(served.model) if self._logprobs is not None else nullcontext(),
            served.holding.answering(self) as held,
            served.manager.attach(
                served.model,
                served.tokenizer,
                [*([] if served.budget is None else [served.budget]), *served.followers],
                one_thread=True,
                # Unseen tokens end the answer, unless a deployment's rules decide.
                on_gap="report" if held.rules else "raise",
                breaker=served.circuit,
                callback_errors="raise" if served.circuit is None else "report",
            ) as run,
        ):
            with self._holding:
                self._run, held = run, self._newer or held
                if held.deployment is not None:
                    rules = [self._own(rule) for rule in held.rules]
                    run.hold_to(held.deployment, rules, held.always_on, held.exclude, count=False)
            for follower in self._followers:
                run.follow(follower)
            self._watch_rules(run)
            run.follow(self._scored)
            if served.telemetry is not None:
                about = {"model": request.model, "traceparent": self._prepared.traceparent}
                run.follow(served.telemetry.of_response(self._listener.id, **about))
            out = served.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max(self._max_tokens + self._hold, 1),
                num_beams=1,
                num_return_sequences=1,
                logits_processor=LogitsProcessorList(self._processors()),
                stopping_criteria=StoppingCriteriaList([self]),
                **served.padding,
                **request.sampling,
                **self._more_options(),
            )
        return self._end(run.result(out))

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        """Return whether the sampled token was the last."""
        if self._draws is not None:
            self._draws.end_step()
        # A complete answer ran one step more, to score its last token. With max_tokens 0, the prompt is the answer.
        ends = not self._max_tokens or self._complete or (self._take(int(input_ids[0, -1])) and not self._hold)
        self._flush()
        if cancelled := self._finish_reason() == "cancelled":
            self._run.stop_mine(cancelled=True)
        return torch.full((len(input_ids),), ends or cancelled, device=input_ids.device)

    # -- inside ----------------------------------------------------------------------------------

    def _processors(self) -> list[LogitsProcessor]:
        """Return what changes logits; `Draws` is last, because it holds a lock."""
        request, processors = self._prepared.request, list[LogitsProcessor]()
        if request.penalises:
            presence, frequency = request.presence_penalty, request.frequency_penalty
            processors.append(
                Penalties(len(self._ids), presence=presence, frequency=frequency, bias=request.logit_bias)
            )
        return processors if self._draws is None else [*processors, self._draws]

    def _more_options(self) -> dict[str, Any]:
        """Return options of `generate` that most requests do not need."""
        request, options = self._prepared.request, dict[str, Any]()
        if request.stop_token_ids or request.ignore_eos:
            options["eos_token_id"] = sorted(self._ends) or [_NO_TOKEN]
        if self._logprobs is not None and self._echoes and self._served.keeps_logits:
            options["logits_to_keep"] = 0  # all
        return options

    def _take(self, token_id: int) -> bool:
        self._answer_ids.append(token_id)
        self._text.add(token_id)
        if self._logprobs is not None:
            self._untold.append(self._logprobs.take(token_id))
        self._complete = self._text.met_stop or len(self._answer_ids) == self._max_tokens
        if self._complete:  # so that the last token gets the rest of a split character
            self._text.end()
        return self._complete

    def _watch_rules(self, run: Any) -> None:
        for at, (spec, _) in enumerate(self._prepared.rules):
            name = "stop" if spec.action == "stop" else "record"
            # A request's rules must not go blind silently. With `hold`, the answer ends first.
            on_blind = "pass" if self._hold else "raise"
            spec = replace(spec, action=Named(name, partial(self._met, name)), on_blind=on_blind)
            try:
                run.add_rules(spec.rules(self._served.manager.pack))
            except (ConfigError, UnknownConcept) as error:  # the deployment was reloaded
                raise RequestRefused(str(error), f"probemon.rules[{at}]") from None

    def hold_to(self, held: Held) -> Takes:
        """Apply a reloaded deployment from the next token on. Thread-safe.

        Returns "rules" or "nothing" if rules of the request are on excluded concepts or leave no room.
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
        acting = next((acting for source, acting in self._owned if source is rule), None)  # equal rules may occur twice
        if acting is None:
            acting = replace(rule, action=self._acting(rule.action), on_blind=self._blind(rule.on_blind))
            self._owned.append((rule, acting))
        return acting

    def _acting(self, action: Action) -> Action:
        if isinstance(action, Escalate):
            return action.telling(
                lambda event, ruling: self._met("stop" if ruling == "stop" else "record", event),
                lambda: self._listener.cancelled,
            )
        if not isinstance(action, str) or action == "raise":
            return action
        return Named(action, partial(self._met, "stop" if action == "stop" else "record"))

    def _blind(self, action: Action) -> Action:
        return Named("stop", partial(self._met, "stop")) if action == "stop" else action

    def _met(self, action: str, event: Event) -> None:
        entry = self._told.event(event, self._choice, action)
        self._events.append(entry)
        if action == "stop" and self._stopped_by is None:
            self._stopped_by = entry
            self._run.stop_mine()
            if self._hold:  # keep tokens shown while a judge was asked
                self._hide_from(max(event.column - len(self._ids), self._text.n_allowed))

    def _hide_from(self, index: int) -> None:
        self._hidden_from = index if self._hidden_from is None else min(index, self._hidden_from)
        self._text.cut_at_token(index)

    def _scored(self, placed: PlacedTokens, scores: Scores) -> None:
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
                if self._hold:
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
            "reasoning" if self._text.is_reasoning(index) else None,
        )

    def _token(
        self,
        scores: Scores,
        i: int,
        position: int,
        token_id: int,
        text: str,
        span: tuple[int, int] | None,
        phase: int,
        part: str | None = None,
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
            part=part,
        )

    def _note(self) -> None:
        """Report scores and rules at once; their text follows after the next token."""
        while self._unsettled and self._text.is_settled(self._unsettled[0][2]):
            self._tokens.append(self._generated(*self._unsettled.popleft()))
        tokens, events = self._tokens[self._n_noted[0] :], self._events[self._n_noted[1] :]
        self._n_noted = [len(self._tokens), len(self._events)]
        if tokens or events:
            self._listener.note(self._choice, tokens, events)

    def _flush(self) -> None:
        self._note()
        texts, tokens, events, logprobs = self._text.take(), self._tokens, self._events, self._settled_logprobs()
        if any(texts) or tokens or events or logprobs or self._echoes:
            self._tokens, self._events, self._n_noted = [], [], [0, 0]
            prompt, of_prompt = self._echo()
            piece = Piece(self._choice, texts.reply, texts.reasoning, tokens, events, prompt, logprobs, of_prompt)
            self._listener.send(piece)

    def _echo(self) -> tuple[str, list[ToldLogprob]]:
        """Return the text of the prompt with its log probabilities, once."""
        if not self._echoes:
            return "", []
        self._echoes = False
        pieces, text, starts = TokenTexts(self._served.decode), "", list[int]()
        for token_id in self._ids:
            starts.append(len(text))
            text += pieces.add(token_id)
        of_prompt = [] if self._logprobs is None else self._logprobs.of_prompt
        return text + pieces.finish(), [
            told(one, start, self._served.told_token) for one, start in zip(of_prompt, starts, strict=False)
        ]

    def _settled_logprobs(self) -> list[ToldLogprob]:
        """Return log probabilities whose texts are sent: an answer that is held may still lose tokens."""
        n_shown = self._text.n_allowed if self._hold else len(self._answer_ids)
        if self._hidden_from is not None:
            n_shown = min(n_shown, self._hidden_from)
        found = list[ToldLogprob]()
        while self._untold and self._n_told < n_shown and self._text.is_settled(self._n_told):
            start, _ = self._text.span(self._n_told)
            found.append(told(self._untold.popleft(), start, self._served.told_token))
            self._n_told += 1
        return found

    def _end(self, result: Result) -> Ending:
        self._text.end()
        n, n_before = len(self._answer_ids), len(self._ids)
        result = result.before(n_before + n)
        last = result.at(0, n_before + n - 1)
        n_withheld = 0 if self._hidden_from is None else n - self._hidden_from
        if self._hidden_from is None:
            unseen = bool(result.coverage.unseen[last])
            # The last token may be an end token with text, or the one at which max_time was up.
            n_withheld = int(bool(n) and unseen and self._hold and self._text.token_text(n - 1) != "")
            self._text.allow(n - n_withheld)
            if n and unseen and not n_withheld:
                self._unsettled.append((result.scores, last, n - 1))
        self._flush()
        shown = self._text.shown
        return Ending(
            self._choice,
            self._finish_reason(),
            shown.reply,
            None if self._prepared.marks is None else shown.reasoning,
            self._summary(result, n_withheld),
            n,
            self._n_unseen,
        )

    def _summary(self, result: Result, n_withheld: int) -> dict[str, Any]:
        summary = self._told.summary(result, self._stopped_by, n_withheld)
        if result.deployment is None:
            return summary
        periods = [(position, result.deployments.get(number)) for _, position, number in result.watches]
        changes = [one for one, before in zip(periods, [(0, None), *periods], strict=False) if one[1] != before[1]]
        summary["deployment"] = result.deployment
        if len(changes) > 1:
            summary["deployments"] = [{"position": position, "deployment": name} for position, name in changes]
        return summary

    def _finish_reason(self) -> str:
        if self._stopped_by is not None or self._hidden_from is not None:
            return "content_filter"
        if self._text.met_stop or (self._answer_ids and self._answer_ids[-1] in self._ends):
            return "stop"
        # Not cancelled: ended by the model's settings (max_time).
        return "length" if self._complete or not self._listener.cancelled else "cancelled"
