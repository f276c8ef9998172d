"""MonitorRun: what `manager.attach(...)` yields; watches one host model while its `with` block is open.

    with manager.attach(model, tokenizer) as run:
        run.on("weapon", above=0.9, for_tokens=3, action="stop")
        out = model.generate(**inputs, max_new_tokens=50, stopping_criteria=run.stopping_criteria)
    result = run.result(out)

A `Watcher` gives tokens with their hidden states, in order, to a `TokenScorer`; a `Publisher` records their scores and
asks the rules; `result` reads the recordings.
"""

from __future__ import annotations

import logging
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import StoppingCriteriaList

from probemon.core.aggregate import Aggregator
from probemon.core.concept_names import Wanted
from probemon.core.scores import Gap, Scores
from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError
from probemon.host.adapters import needs_its_wrapper
from probemon.host.compatibility import check_host
from probemon.host.model import unwrap
from probemon.host.site import Site
from probemon.monitor.breaker import Breaker, Circuit
from probemon.monitor.budget import Budget, Ladder, Shedding
from probemon.monitor.change import Change
from probemon.monitor.companion import Companion
from probemon.monitor.delivery import Delivery, SinkStats
from probemon.monitor.deployment import Deployment
from probemon.monitor.drift import DriftMonitor
from probemon.monitor.drift_requests import RunRequests
from probemon.monitor.escalation import Escalate, check_judges
from probemon.monitor.failures import MAX_KEPT, Failures, Guard
from probemon.monitor.followers import Follower, Followers
from probemon.monitor.health import Health, run_health
from probemon.monitor.lent_calls import LentCalls
from probemon.monitor.publisher import Listener, Publisher, changed_within
from probemon.monitor.result import Result, find_result
from probemon.monitor.rules import Action, Event, Named, Rule, check_beams, make_rules
from probemon.monitor.sinks import Sink
from probemon.monitor.token_scorer import Publish, TokenScorer
from probemon.monitor.watches import Watched, Watches
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import ScoreTokens
from probemon.tracking.hand_loop import HandLoop
from probemon.tracking.held_streamer import HeldStreamer
from probemon.tracking.recording import Recording
from probemon.tracking.stopped_rows import StoppedRows
from probemon.tracking.token_source import TokenSource
from probemon.tracking.watched_threads import WatchedThreads
from probemon.tracking.watcher import Watcher
from probemon.util.checks import check_bool, check_count
from probemon.util.counted import counted

LOG = logging.getLogger("probemon")


class MonitorRun:
    """One attachment. The constructor resolves everything, so a bad pack or host leaves nothing behind.

    `strict`: raise for another model's weights, which otherwise warn.
    `on_gap`: "raise" `AlignmentError` where our hooks did not see a forward, or a callable that gets the `Gap`; the
    tokens are unseen then.
    `callback_errors`: "raise" `CallbackFailed` when the block ends for what actions, listeners and sinks raised, or
    only "report" it (`run.failures`, the log).
    `keep_tokens`: how many tokens keep their scores at least, the oldest are forgotten first (None: all). Of each
    row the ids of as many stay, for judges.
    `one_thread`: watch only what the thread generates that enters the block. Threads can then each attach a run of its
    own to one model, with its own rules and results. Continuous batching, which has a thread of its own, is refused.
    `deployment`: the file whose rules and sinks hold from where the block begins, on the host that it names.
    `budget`: how much of a step watching may take; what is over it is left out, which coverage and the result say.
    `breaker`: errors of scoring make tokens unseen and, when there are many, pause it, instead of ending a generation.
    A `Ladder` or a `Circuit` in their place is shared by the runs that are given it.
    `drift`: compares the requests of this run, and of others, with those of a reference (`run.health()` has a check).
    `companion(model, guard)`: makes what records the same forwards beside the probes (`run.routing`).
    `source`: makes where the tokens come from, a `Watcher` by default; one of another kind checks its host itself.

    Raises `HostMismatch` (hidden size, layer count, strict weights), `NotSupportedHost`, `ConfigError`.
    """

    def __init__(
        self,
        manager: Scorer,
        model: Any,
        tokenizer: Any = None,
        *,
        strict: bool = False,
        on_gap: str | Callable[[Gap], object] = "raise",
        callback_errors: str = "raise",
        keep_tokens: int | None = None,
        one_thread: bool = False,
        companion: Callable[[Any, Guard], Companion] | None = None,
        deployment: Deployment | None = None,
        budget: Budget | Ladder | None = None,
        breaker: Breaker | Circuit | None = None,
        drift: DriftMonitor | None = None,
        source: Callable[..., TokenSource] = Watcher,
    ) -> None:
        if on_gap != "raise" and not callable(on_gap):
            raise ConfigError(f'on_gap is {on_gap!r}: give "raise" or a callable that takes the gap')
        if callback_errors not in ("raise", "report"):
            raise ConfigError(f'callback_errors is {callback_errors!r}: give "raise" or "report"')
        if keep_tokens is not None:
            keep_tokens = check_count(
                "keep_tokens", keep_tokens, least=1, remedy="it counts tokens, so give 1 or more, or None for all"
            )
        if source is Watcher:
            given, model = model, unwrap(model)
            needs_its_wrapper(given, model)  # raises where an adapter would not act
            check_host(manager.pack, model, strict=check_bool("strict", strict))
            if deployment is not None:
                deployment.check_host(manager.pack, model)
        if deployment is not None:
            budget, breaker = budget or deployment.budget, breaker or deployment.breaker
        self.deployment = deployment
        self.manager, self.model, self.tokenizer = manager, model, tokenizer
        self.gaps: deque[Gap] = deque(maxlen=MAX_KEPT)
        self.routing: Any = None  # the companion: what else is recorded of the same forwards
        self._raise_failures, self._keep_tokens = callback_errors == "raise", keep_tokens
        self._failures, self._entered, self._calls = Failures(), False, LentCalls()
        self._followers = Followers(self._failures)
        self._watches = Watches(manager)
        # The hooks on the host hold what is below, and nothing of it this run: one that is dropped is taken off.
        parts = _Parts()
        publisher = self._publisher = Publisher(
            manager.pack,
            tokenizer,
            self._watches,
            self._failures,
            self._followers,
            lambda: parts.watcher.recordings,
            lambda *entries: None if parts.routing is None else parts.routing.reads(*entries),
            keep_tokens,
        )
        self._requests = None if drift is None else drift.requests(manager, model, tokenizer, self._failures.call)
        publish: Publish = self._publisher.publish
        if self._requests is not None:
            publish = self._requests.after(publish)
        self.breaker = Circuit(breaker) if isinstance(breaker, Breaker) else breaker
        self.budget = None if budget is None else Shedding(budget, self._watches)
        if self.budget is not None:
            self.follow(self.budget)
            publish = self.budget.counting(publish)
        self._scorer = TokenScorer(manager, self._watches, self._failures, publish, self.breaker)
        self._one_thread = check_bool("one_thread", one_thread)
        sites: list[str | Site] = list(manager.pack.sites)
        score: ScoreTokens = self._scorer.score_tokens
        if self._requests is not None:
            score = self._requests.beside(score)
        on_end: Callable[[Recording], None] | None = None
        if companion is not None:
            self.routing = parts.routing = companion(model, self._failures.call)
            sites, score, on_end = [*sites, *self.routing.sites], self.routing.beside(score), self.routing.ended
        self._watcher = parts.watcher = source(
            model,
            sites,
            manager.pack.n_probes,
            score,
            check=self._publisher.check_call,
            on_gap=self._gap_caller(on_gap) if callable(on_gap) else None,
            on_end=on_end,
            acts=lambda: publisher.acts,
            observer=self._followers,
            one_thread=self._one_thread,
        )
        self._holds_host = strict or (deployment is not None and "host" in deployment.content)
        if isinstance(self._watcher, Watcher):  # what was compared above; an engine of its own has no marks
            self._publisher.newest_mark = self._watcher.host_mark()
        self._stack = ExitStack()
        self._parts = parts
        self._dropped: weakref.finalize[Any, Any] | None = None

    def __repr__(self) -> str:
        config, n_rules, n_recordings = (
            getattr(self.model, "config", None),
            len(self._publisher.rules),
            len(self.recordings),
        )
        state = "watching" if self._watcher.open else "ended" if self._entered else "not entered yet"
        return (
            f"{type(self).__name__}({state}: {type(self.model).__name__} {getattr(config, 'name_or_path', '')!r} by"
            f" {self.manager.pack.name!r}, {n_rules} rule{'s' * (n_rules != 1)}, {n_recordings}"
            f" recording{'s' * (n_recordings != 1)})"
        )

    # -- the face --------------------------------------------------------------------------------

    def on(
        self,
        concept: Wanted,
        *,
        above: float | None = None,
        for_tokens: int = 1,
        aggregate: str | Aggregator | None = None,
        action: Action = "stop",
        on_blind: Action = "pass",
    ) -> None:
        """Act when a concept scores over `above` at `for_tokens` generated tokens in a row: once, until it was at
        `above` or below it again at a token that was seen. With an aggregate that never falls, "max", that is once a
        row.

        `concept`: a name, an id, a number, a list of these, or a pattern over names and ids (`re.compile(...)`, or text
        with `*`): a rule for each.
        `above`: by default the pack's alert threshold (of the set in force, `manager.pack.alert_set`), with an
        aggregate the one calibrated for it.
        `aggregate`: compares a running score instead of each token's own: "mean", "max", "attention", "ema:0.3", ... or
        one of `probemon.core.aggregate`.
        `action`: "stop" ends that row of the generation (the token sampled meanwhile is still in the output), "raise"
        ends `generate` with `ConceptRaised`, a callable gets the `Event`, "record" does no more than put it into
        `run.events`, and `Escalate` asks a judge (`probemon.monitor.escalation`).
        `on_blind`: the same at a generated token that was not seen, whose scores nobody knows, where the run goes on
        (`attach(..., on_gap=...)`); "pass" does nothing, and a warning at the end says how many there were.

        The concepts are evaluated at every token from now on. Raises `UnknownConcept`, `ConfigError`.
        """
        if self._watcher.generating:
            raise ConfigError("run.on cannot change what is watched while generate() runs: call it before")
        rules = make_rules(
            self.manager.pack,
            concept,
            above=above,
            for_tokens=for_tokens,
            aggregate=aggregate,
            action=action,
            on_blind=on_blind,
        )
        self.add_rules(self._lending(rules))

    def _gap_caller(self, on_gap: Callable[[Gap], object]) -> Callable[[Gap], None]:
        return partial(_keep_gap, self.gaps, self._failures, self._calls.lend(on_gap))

    def _lending(self, rules: Sequence[Rule]) -> list[Rule]:
        """Return rules that hooks may hold."""
        lent = [(rule, self._lent(rule.action), self._lent(rule.on_blind)) for rule in rules]
        return [replace(rule, action=action, on_blind=on_blind) for rule, action, on_blind in lent]

    def _lent(self, action: Action) -> Action:
        return action if isinstance(action, (str, Named, Escalate)) else self._calls.lend(action)

    def add_rules(self, rules: Sequence[Rule]) -> None:
        """Ask these rules of generated tokens, too: see `on`."""
        self._check_not_ended("a rule")
        check_judges(rules, self.tokenizer, self._keep_tokens)
        self._watches.add(rules, count=bool(self._publisher.tokens))

    def hold_to(
        self,
        deployment: Deployment,
        rules: Sequence[Rule],
        always_on: Wanted | None = None,
        exclude: Wanted | None = None,
        *,
        count: bool = False,
    ) -> None:
        """Hold to a deployment's rules, and to what it says is always on and excluded, where that is given.

        `count`: from the next token on, as a new state of `watches`; else from the first one. Raises what `update`
        does.
        """
        check_judges(rules, self.tokenizer, self._keep_tokens)
        self._watches.change(
            of_file=rules, always_on=always_on, exclude=exclude, deployment=deployment.sha256, count=count
        )
        self.deployment = deployment

    def update(
        self,
        deployment: str | Path | Deployment | None = None,
        *,
        rules: Sequence[Mapping[str, Any]] | None = None,
        always_on: Wanted | None = None,
        exclude: Wanted | None = None,
    ) -> int:
        """Change what is watched while the host generates, from any thread, whole or not at all.

            run.update(exclude=["plant"], rules=[{"concept": "weapon", "above": 0.5, "action": "stop"}])
            run.update("watch.yaml")                        # a deployment file that was edited

        It holds for every token that is scored from now on. What is given replaces what was: the run's own rules, each
        with the arguments of `on`; the concepts that are always on; those that are excluded. A file replaces the rules
        of the file before it, never the run's own, and the other two; all else in it has to say what the file said
        that the run began with. A rule that stays goes on with its streaks.

        Returns the number of the state that holds now: `run.watches[number]` says what it is, and `result.watches`
        from which position on it held. Raises `DeploymentError`, `UnknownConcept`, `ConfigError`,
        `NotSupportedDecoding` (a stop while beams run); what held before goes on then.
        """
        self._check_not_ended("what is watched")
        change = Change.of(self.manager, self.deployment, deployment, rules, always_on, exclude)
        if change.rules is not None:
            change = replace(change, rules=self._lending(change.rules))
        check_judges(change.new_rules, self.tokenizer, self._keep_tokens)
        if self._watcher.running_beams:
            check_beams(change.new_rules)
        number = change.make(self._watches)
        self.deployment = change.deployment or self.deployment
        return number

    @property
    def watches(self) -> list[Watched]:
        """Return what was watched, state by state: as it began, then after every `update`, and every `on` between
        generations.
        """
        return list(self._watches.past)

    @property
    def events(self) -> deque[Event]:
        """Return the newest 1,000 events of rules, whatever their action."""
        return self._publisher.events

    def hold(self, streamer: Any, *, show_last: bool = False) -> HeldStreamer:
        """Wrap a streamer so that it shows a token only once its own score is known and no rule stopped at it.

        Use it as `generate(streamer=run.hold(streamer))`. The last token generated has no score and stays hidden,
        unless `show_last`: see `HeldStreamer`.
        """
        return HeldStreamer(streamer, self._watcher.current, show_last)

    def add_sink(self, sink: Sink, *, max_batches: int = 1024) -> Delivery:
        """Send every batch of tokens to a sink, in a thread of its own, until the block ends.

        At most `max_batches` wait; what comes while so many wait is dropped and counted in `.stats()`.
        """
        if not self._watcher.open:
            raise ConfigError("a sink is added inside the with block, whose end closes it")
        return self._publisher.add_sink(sink, max_batches)

    @property
    def stopping_criteria(self) -> StoppingCriteriaList:
        """Return criteria for `generate(stopping_criteria=...)` that end the rows that an action stopped.

        A stop takes effect without them too, since the run sees every step of `generate`: passing them states the
        intent.
        """
        return StoppingCriteriaList([StoppedRows(self._watcher)])

    def listen(self, listener: Callable[[PlacedTokens, Scores], None]) -> None:
        """Call `listener(placed, scores)` with each batch of tokens once it is scored, in the thread that generates."""
        self._check_not_ended("a listener")
        lent = self._calls.lend(listener)
        self._publisher.listeners.append(lambda placed, scores, reads: lent(placed, scores))

    def listen_with_reads(self, listener: Listener) -> None:
        """Call `listener(placed, scores, reads)`, as `listen` does; `reads`: what memories read, None without any."""
        self._check_not_ended("a listener")
        self._publisher.listeners.append(self._calls.lend(listener))

    def follow(self, follower: Follower) -> None:
        """Let `follower` hear of all that happens from now on: scores, events, times, gaps and ends."""
        self._check_not_ended("a follower")
        self._followers.add(self, follower)

    @property
    def _ended(self) -> bool:
        return self._entered and not self._watcher.open

    def _check_not_ended(self, what: str) -> None:
        """Raise `ConfigError` after the block: nothing would ever come to what is given."""
        if self._ended:
            raise ConfigError(f"this run has ended, and {what} would be asked of nothing: attach again")

    def generating(self, from_column: int) -> AbstractContextManager[HandLoop]:
        """Follow a decode loop of your own as `generate()` is followed: phases, rules, stops, streamers, results.

            with run.generating(from_column=ids.shape[1]) as loop:
                out = model(ids, past_key_values=cache)
                ...
                if loop.sampled(ids, ended=token[:, 0] == eos).all(): break

        While the block is open, the forwards of the calling thread are one generation. Columns before `from_column` are
        its prompt (those of a cache count); each forward after it brings one generated column. `loop.sampled` takes
        every column that is sampled and returns which rows are to end. `probemon.tracking.hand_loop` has a whole loop.
        Raises `ConfigError`.
        """
        return self._watcher.by_hand(
            check_count(
                "from_column",
                from_column,
                least=1,
                most=2**31,
                remedy="it is the column at which generated tokens begin, so give the prompt's length, 1 or more",
            )
        )

    def stop(self) -> None:
        """End every generation that runs at its next token, or the next one if none does; from any thread.

        Of a `generate_batch` every request ends, also those that wait; of a batching manager those that have begun.
        """
        self._watcher.stop()

    def stop_mine(self) -> None:
        """End every row of the generation from whose callback this is called; raise `ConfigError` elsewhere."""
        generation = self._watcher.current()
        if generation is None:
            raise ConfigError(
                "run.stop_mine() is for what is called in the thread that generates (an action, a listener): from"
                " elsewhere call run.stop()"
            )
        generation.stop_all_rows()

    @property
    def failures(self) -> list[Exception]:
        """Return the first 1,000 errors that callbacks and sinks raised."""
        return self._failures.errors

    @property
    def n_failures(self) -> int:
        """Return how often callbacks and sinks raised."""
        return self._failures.n_errors

    @property
    def sinks(self) -> list[SinkStats]:
        """Return what became of the tokens that each sink was sent, in the order in which they were added."""
        return self._publisher.sinks()

    @property
    def drift(self) -> DriftMonitor | None:
        """Return what compares the requests of this run with a reference, where it was given."""
        return None if self._requests is None else self._requests.drift

    @property
    def source(self) -> TokenSource:
        """Return where its tokens come from."""
        return self._watcher

    @property
    def scorer(self) -> TokenScorer:
        """Return what scores its tokens, for a source that has those of several generations at once."""
        return self._scorer

    @property
    def recordings(self) -> list[Recording]:
        """Return the recordings, one for each `generate()` or document of plain forwards, oldest first."""
        return self._watcher.recordings

    @property
    def n_gaps(self) -> int:
        """Return how often columns were run that our hooks did not see, reported or raised."""
        return self._watcher.n_gaps

    @property
    def forward_seconds(self) -> deque[float]:
        """Seconds spent in our hooks, one entry a forward of the host, of the newest 10,000."""
        return self._watcher.forward_seconds

    def health(self) -> Health:
        """Say whether this run sees what its host runs, at any time, after the block too, and from any thread.

        It runs nothing: it looks at the hooks, and at what came of every token so far. See `probemon.monitor.health`.
        """
        health = run_health(
            self._watcher,
            self._publisher,
            self._failures,
            self._threads,
            ended=self._ended,
            not_numbers=self.manager.not_numbers,
            changed_within=self._publisher.changed_within or changed_within(list(self.recordings)),
            holds_host=self._holds_host,
        )
        parts = (self.budget, self.breaker, None if self._requests is None else self._requests.drift)
        return health.with_checks(part.check() for part in parts if part is not None)

    def result(self, out: Any, *, generation: int | None = None) -> Result:
        """Return the scores of one `generate()` of this run, given its output (ids `[B, L]` or the output object).

        `out` may also be the ids of plain forwards `model(ids)`, and what `generate_batch` returned, or one of its
        outputs: row i is then its i-th request (`result.requests`). Every token that was recorded or returned is
        compared with `out`. A copy of an output is enough where one generation of the run has its ids; where several
        have, `generation` is the number of the one that is meant (as in `Event.generation`). Raises `AlignmentError`
        where not exactly one recording belongs to `out`.
        """
        ranks = self._watcher.ranks
        if ranks is not None and not ranks.scores:
            raise ConfigError(
                f"this is rank {ranks.rank} of {ranks.n_ranks}, which run one model: its scores are on rank 0"
            )
        result = find_result(
            self.manager.pack,
            self.tokenizer,
            self._watcher.recordings,
            out,
            generation=generation,
            keep_tokens=self._keep_tokens,
        )
        result.deployments = {number: self._watches.past[number].deployment for _, _, number in result.watches}
        return result

    # -- attaching -------------------------------------------------------------------------------

    def __enter__(self) -> MonitorRun:
        if self._entered:
            raise ConfigError("a run is entered once: call manager.attach again")
        with ExitStack() as stack:
            self._watches.pin(stack)
            stack.enter_context(self._watcher)
            if self._requests is not None:
                self._requests.open(threading.current_thread() if self._one_thread else None)
                stack.callback(self._requests.leave)
            if self.routing is not None:
                self.routing.open(one_thread=self._one_thread)
            if self.deployment is not None:
                self.deployment.begin(self)
            self._stack = stack.pop_all()
        self._entered = True
        closing = _Closing(type(self.model).__name__, self._watcher, self._stack, self._publisher, self._requests)
        self._dropped = weakref.finalize(self, closing.close, self._parts)
        self._dropped.atexit = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._dropped is not None:
            self._dropped.detach()
        n_generating, publisher, failures = self._watcher.n_generating, self._publisher, self._failures
        self._stack.close()
        if error is None and n_generating and publisher.acts:
            warnings.warn(
                f"{n_generating} generations of other threads were under way when this run ended: what they generate"
                " from now on is not watched, rules are not asked of it and sinks hear nothing. End them, or wait for"
                " them, inside the with block",
                UserWarning,
                stacklevel=2,
            )
        publisher.close(failed=error is not None)
        if self._requests is not None:
            self._requests.close()
        for not_recorded in self.routing.close() if self.routing is not None else ():
            failures.add("a sink of routing", not_recorded)
        for not_loaded in self.manager.engine.background_errors():
            failures.add("loading in the background", not_loaded)
        for not_run in self._watcher.batch_errors:  # of a manager that the user runs: nobody else would tell
            failures.add("continuous batching", not_run)
        self._followers.closed(self)  # once all that it has is complete
        if error is not None:
            return
        if publisher.rules and self._watcher.n_documents:
            raise ConfigError(
                f"{counted(len(publisher.rules), 'rule')} could not fire in"
                f" {counted(self._watcher.n_documents, 'document')}: plain forwards, from which no generation went on."
                " Rules are asked of generated tokens: use model.generate(), put a loop of your own into"
                " `with run.generating(from_column=...)`, or read documents in a run without rules"
            )
        publisher.warn_of_silence(self.model, self._watcher.called, self._threads)
        if self._raise_failures:
            failures.raise_first()

    @property
    def _threads(self) -> WatchedThreads:
        """Whose forwards are watched: those of every thread, where an engine of its own says what it ran."""
        return self._watcher.threads if isinstance(self._watcher, Watcher) else WatchedThreads(one_thread=False)


class _Parts:
    """Where the tokens of a run come from, and what records the same forwards: known only once the rest is made."""

    watcher: TokenSource
    routing: Any = None


@dataclass(frozen=True)
class _Closing:
    """Closes a run that was entered and dropped: whoever held it let go of it without the end of its block."""

    model: str
    watcher: TokenSource
    stack: ExitStack
    publisher: Publisher
    requests: RunRequests | None

    def close(self, parts: _Parts) -> None:
        """Take the hooks off the model at once, and close the rest in a thread of its own: this is called wherever
        Python finds the run unused, also where a lock is held that the rest needs.
        """
        n_generating = self.watcher.n_generating
        LOG.warning(
            "a run on %s was entered, and dropped without being closed: it is taken off now%s. Use `with"
            " manager.attach(...) as run`, or keep the run and call its __exit__",
            self.model,
            f", and {counted(n_generating, 'generation')} under way is not watched any more" if n_generating else "",
        )
        if isinstance(self.watcher, Watcher):
            self.watcher.__exit__(None, None, None)
        threading.Thread(target=self._close_rest, args=(parts,), name="probemon closes a dropped run").start()

    def _close_rest(self, parts: _Parts) -> None:
        self.stack.close()
        self.publisher.close(failed=True)
        if self.requests is not None:
            self.requests.close()
        if parts.routing is not None:
            parts.routing.close()


def _keep_gap(gaps: deque[Gap], failures: Failures, on_gap: Callable[[Gap], object], gap: Gap) -> None:
    gaps.append(gap)
    failures.call("on_gap", on_gap, gap)
