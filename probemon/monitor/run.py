"""MonitorRun: what `manager.attach(...)` yields; watches one host model while its `with` block is open.

    with manager.attach(model, tokenizer) as run:
        run.on("weapon", above=0.9, for_tokens=3, action="stop")
        out = model.generate(**inputs, max_new_tokens=50, stopping_criteria=run.stopping_criteria)
    result = run.result(out)

A `Watcher` gives tokens with their hidden states, in order, to a `TokenScorer`; a `Publisher` records their scores,
asks the rules and tells the followers; `result` reads the recordings.
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
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, Unpack

from transformers import StoppingCriteriaList

from probemon.core.concept_names import Wanted
from probemon.core.scores import Gap
from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError
from probemon.host.adapters import needs_its_wrapper
from probemon.host.compatibility import check_host
from probemon.host.model import unwrap
from probemon.host.site import Site
from probemon.monitor.breaker import Breaker, Circuit
from probemon.monitor.change import Change, DeploymentFile
from probemon.monitor.delivery import Delivery, SinkStats, is_sink
from probemon.monitor.failures import MAX_KEPT, Failures, Guard
from probemon.monitor.followers import Follower, Followers, Listener
from probemon.monitor.health import Health, run_health
from probemon.monitor.lent_calls import LentCalls
from probemon.monitor.publisher import Publisher, changed_within
from probemon.monitor.result import Result, find_result
from probemon.monitor.rule_spec import Rule, RuleFields, RuleSpec
from probemon.monitor.rules import Action, AskedAction, Event, Named, check_asked, check_beams
from probemon.monitor.token_scorer import TokenScorer
from probemon.monitor.watches import Watched, Watches
from probemon.tracking.hand_loop import HandLoop
from probemon.tracking.held_streamer import HeldStreamer
from probemon.tracking.recording import Recording
from probemon.tracking.stopped_rows import StoppedRows
from probemon.tracking.token_source import TokenSource
from probemon.tracking.watched_threads import WatchedThreads
from probemon.tracking.watcher import Watcher
from probemon.util.checks import check_bool, check_count
from probemon.util.counted import counted

F = TypeVar("F", bound=Follower)
LOG = logging.getLogger("probemon")


@dataclass(frozen=True)
class RunOptions:
    """How a run deals with what goes wrong, and what it keeps: the options of `manager.attach`. Raises `ConfigError`.

    - `strict`: raise for another model's weights, which otherwise warn
    - `on_gap`: "raise" `AlignmentError` where our hooks did not see a forward, or "report" it: the tokens are unseen
      then, `run.gaps` has it, and followers hear of it
    - `callback_errors`: "raise" `CallbackFailed` when the block ends for what actions, followers and sinks raised, or
      only "report" it (`run.failures`, the log)
    - `keep_tokens`: how many tokens keep their scores at least, the oldest are forgotten first (None: all). Of each row
      the ids of as many stay, for judges
    - `one_thread`: watch only what the thread generates that enters the block. Threads can then each attach a run of
      their own to one model, with its own rules and results. Continuous batching, which has a thread of its own, is
      refused
    - `breaker`: errors of scoring make tokens unseen and, when there are many, pause it, instead of ending a
      generation. A `Circuit` in its place is shared by the runs that are given it
    """

    strict: bool = False
    on_gap: str = "raise"
    callback_errors: str = "raise"
    keep_tokens: int | None = None
    one_thread: bool = False
    breaker: Breaker | Circuit | None = None

    def __post_init__(self) -> None:
        if callable(self.on_gap):
            raise ConfigError('on_gap is "raise" or "report": give a follower with a method gap() what is to be called')
        for name in ("on_gap", "callback_errors"):
            if getattr(self, name) not in ("raise", "report"):
                raise ConfigError(f'{name} is {getattr(self, name)!r}: give "raise" or "report"')
        if self.keep_tokens is not None:
            remedy = "it counts tokens, so give 1 or more, or None for all"
            object.__setattr__(
                self, "keep_tokens", check_count("keep_tokens", self.keep_tokens, least=1, remedy=remedy)
            )
        for name in ("strict", "one_thread"):
            check_bool(name, getattr(self, name))
        if self.breaker is not None and not isinstance(self.breaker, (Breaker, Circuit)):
            raise ConfigError(f"breaker is {self.breaker!r}: give Breaker(...), or a Circuit that runs share")


class MonitorRun:
    """One attachment. The constructor resolves everything, so a bad pack or host leaves nothing behind.

    - `followers`: what hears the run, in order: a `Follower`, a sink, or a callable `(placed, scores)`
    - `options`: see `RunOptions`
    - `deployment`: the file whose rules and followers hold from where the block begins, on the host that it names
    - `source`: makes where the tokens come from, a `Watcher` by default; one of another kind checks its host itself

    Raises `HostMismatch` (hidden size, layer count, strict weights), `NotSupportedHost`, `ConfigError`.
    """

    def __init__(
        self,
        manager: Scorer,
        model: Any,
        tokenizer: Any = None,
        followers: Sequence[Any] = (),
        options: RunOptions = RunOptions(),
        deployment: DeploymentFile | None = None,
        source: Callable[..., TokenSource] = Watcher,
    ) -> None:
        if source is Watcher:
            given, model = model, unwrap(model)
            needs_its_wrapper(given, model)  # raises where an adapter would not act
            check_host(manager.pack, model, strict=options.strict)
            if deployment is not None:
                deployment.check_host(manager.pack, model)
        self.manager, self.model, self.tokenizer, self.deployment = manager, model, tokenizer, deployment
        self.options, self.gaps = options, deque[Gap](maxlen=MAX_KEPT)
        self._failures, self._entered, self._calls = Failures(), False, LentCalls()
        self._followers, self._begun = Followers(self._failures), list[Follower]()
        self._watches = Watches(manager)
        # The hooks on the host hold what is below, and nothing of it this run: one that is dropped is taken off.
        parts = _Parts()
        publisher = self._publisher = Publisher(
            manager.pack,
            tokenizer,
            self._watches,
            self._followers,
            lambda: parts.watcher.recordings,
            options.keep_tokens,
        )
        if options.on_gap == "report":
            self._followers.add(_KeptGaps(self.gaps))
        filed = () if deployment is None else deployment.followers(manager.pack, followers)
        sites: list[str | Site] = list(manager.pack.sites)
        for follower in map(self._as_follower, [*filed, *_listed(followers)]):
            sites += self._sites_of(follower)
            self._followers.add(follower, sink=isinstance(follower, Delivery))
        breaker = options.breaker or (None if deployment is None else deployment.breaker)
        self.breaker = Circuit(breaker) if isinstance(breaker, Breaker) else breaker
        self._scorer = TokenScorer(manager, self._watches, self._followers, publisher.publish, self.breaker)
        self._watcher = parts.watcher = source(
            model,
            sites,
            manager.pack.n_probes,
            self._scorer.score_tokens,
            check=publisher.check_call,
            report_gaps=options.on_gap == "report",
            acts=lambda: publisher.acts,
            reports=self._followers,
            one_thread=options.one_thread,
        )
        self._holds_host = options.strict or (deployment is not None and deployment.names_host)
        if isinstance(self._watcher, Watcher):  # what was compared above; an engine of its own has no marks
            publisher.newest_mark = self._watcher.host_mark()
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

    def on(self, concept: Wanted | None = None, **fields: Unpack[RuleFields]) -> None:
        """Act when a concept scores over a threshold, with the fields of a `RuleSpec` (`probemon.monitor.rule_spec`):

            run.on("weapon", above=0.9, for_tokens=3, action="stop")
            run.on("injection", within="prompt", action="record")
            run.on(all_of=["weapon", "crime"], action=print)

        The concepts are evaluated at every token from now on. Raises `UnknownConcept`, `ConfigError`.
        """
        if self._watcher.generating:
            raise ConfigError("run.on cannot change what is watched while generate() runs: call it before")
        given: dict[str, Any] = {"concept": concept, **fields}
        self.add_rules(self._lending(RuleSpec.from_dict(given).rules(self.manager.pack)))

    def _lending(self, rules: Sequence[Rule]) -> list[Rule]:
        """Return rules that hooks may hold."""
        lent = [(rule, self._lent(rule.action), self._lent(rule.on_blind)) for rule in rules]
        return [replace(rule, action=action, on_blind=on_blind) for rule, action, on_blind in lent]

    def _lent(self, action: Action) -> Action:
        return action if isinstance(action, (str, Named, AskedAction)) else self._calls.lend(action)

    def add_rules(self, rules: Sequence[Rule]) -> None:
        """Ask these rules of generated tokens, too: see `on`."""
        self._check_not_ended("a rule")
        self._check_rules(rules)
        self._watches.add(rules, count=bool(self._publisher.tokens))

    def _check_rules(self, rules: Sequence[Rule]) -> None:
        """Raise `ConfigError` where this run cannot ask whom they ask; and let what asks hear the run."""
        check_asked(rules, self.tokenizer, self.options.keep_tokens)
        self._publisher.prepare(rules)

    def hold_to(
        self,
        deployment: DeploymentFile,
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
        self._check_rules(rules)
        self._watches.change(
            of_file=rules, always_on=always_on, exclude=exclude, deployment=deployment.sha256, count=count
        )
        self.deployment = deployment

    def update(
        self,
        deployment: str | Path | DeploymentFile | None = None,
        *,
        rules: Sequence[Mapping[str, Any]] | None = None,
        always_on: Wanted | None = None,
        exclude: Wanted | None = None,
    ) -> int:
        """Change what is watched while the host generates, from any thread, whole or not at all.

            run.update(exclude=["plant"], rules=[{"concept": "weapon", "above": 0.5, "action": "stop"}])
            run.update("watch.yaml")                        # a deployment file that was edited

        It holds for every token that is scored from now on. What is given replaces what was: the run's own rules, each
        with the fields of a `RuleSpec`; the concepts that are always on; those that are excluded. A file replaces the
        rules of the file before it, never the run's own, and the other two; all else in it has to say what the file
        said that the run began with. A rule that stays goes on with its streaks.

        Returns the number of the state that holds now: `run.watches[number]` says what it is, and `result.watches`
        from which position on it held. Raises `DeploymentError`, `UnknownConcept`, `ConfigError`,
        `NotSupportedDecoding` (a stop while beams run); what held before goes on then.
        """
        self._check_not_ended("what is watched")
        change = Change.of(self.manager, self.deployment, deployment, rules, always_on, exclude)
        if change.rules is not None:
            change = replace(change, rules=self._lending(change.rules))
        self._check_rules(change.new_rules)
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

    @property
    def stopping_criteria(self) -> StoppingCriteriaList:
        """Return criteria for `generate(stopping_criteria=...)` that end the rows that an action stopped.

        A stop takes effect without them too, since the run sees every step of `generate`: passing them states the
        intent.
        """
        return StoppingCriteriaList([StoppedRows(self._watcher)])

    def follow(self, follower: Any) -> Follower:
        """Let somebody hear all that happens from now on: a `Follower`, a sink or a callable `(placed, scores)`.

        Returns the follower that it is or became (a `Delivery` for a sink). Raises `ConfigError` after the block, for
        one that reads hidden states at further sites (give it to `attach`), and what its `began` raises.
        """
        self._check_not_ended("a follower")
        added = self._as_follower(follower)
        if self._sites_of(added):
            raise ConfigError(
                f"{type(added).__name__} reads hidden states at further sites, and those are tapped when a run is made:"
                " give it to attach(followers=[...])"
            )
        if self._watcher.open:
            self._begin(added)  # what this raises leaves nothing behind
        self._followers.add(added, sink=isinstance(added, Delivery))
        return added

    def _as_follower(self, given: Any) -> Follower:
        if isinstance(given, Follower):
            return given
        if is_sink(given):
            if any(isinstance(one, Delivery) and one.sink is given for one in self._followers):
                raise ConfigError(f"this {type(given).__name__} was added before: a sink receives one run, once")
            return Delivery(given)
        if callable(given) and not isinstance(given, type):
            return Listener(self._calls.lend(given))
        raise ConfigError(
            f"{given!r:.80} cannot follow a run: give a Follower, a sink (with open, write and close) or a callable"
            " that takes (placed, scores)"
        )

    def _sites_of(self, follower: Follower) -> list[str | Site]:
        """Return the further sites that a follower reads, which is new here."""
        if any(one is follower for one in self._followers):
            raise ConfigError(f"this {type(follower).__name__} follows this run already: give it once")
        return list(follower.attaching(self))

    def _begin(self, follower: Follower) -> None:
        follower.began(self)
        self._begun.append(follower)

    @property
    def guard(self) -> Guard:
        """Return what calls a function `guard(what, function, *arguments)` and keeps its errors in `run.failures`."""
        return self._failures.call

    @property
    def followers(self) -> list[Follower]:
        """Return what hears the run, in the order in which it is told."""
        return list(self._followers)

    def follower(self, kind: type[F]) -> F | None:
        """Return the first follower of a class, None where there is none: `run.follower(Budget)`."""
        return next((one for one in self._followers if isinstance(one, kind)), None)

    @property
    def watching(self) -> Watches:
        """Return what is watched now, and the rungs on which less of it can be."""
        return self._watches

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
        of_breaker = [] if self.breaker is None else [self.breaker.check()]
        return health.with_checks([*self._followers.checks(), *of_breaker])

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
            keep_tokens=self.options.keep_tokens,
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
            try:
                if self.deployment is not None:
                    self.hold_to(self.deployment, self.deployment.rules(self.manager.pack))
                for follower in list(self._followers):
                    self._begin(follower)
            except BaseException:
                for begun in self._begun:
                    self._failures.call(begun.kind, begun.finish, True)
                    self._failures.call(begun.kind, begun.closed, self)
                raise
            self._stack = stack.pop_all()
        self._entered = True
        closing = _Closing(type(self.model).__name__, self._watcher, self._stack, self._followers)
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
        self._followers.finish(error is not None)
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
        if self.options.callback_errors == "raise":
            failures.raise_first()

    @property
    def _threads(self) -> WatchedThreads:
        """Whose forwards are watched: those of every thread, where an engine of its own says what it ran."""
        return self._watcher.threads if isinstance(self._watcher, Watcher) else WatchedThreads(one_thread=False)


class _Parts:
    """Where the tokens of a run come from: known only once the rest is made."""

    watcher: TokenSource


@dataclass(frozen=True)
class _Closing:
    """Closes a run that was entered and dropped: whoever held it let go of it without the end of its block."""

    model: str
    watcher: TokenSource
    stack: ExitStack
    followers: Followers

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
        threading.Thread(target=self._close_rest, name="probemon closes a dropped run").start()

    def _close_rest(self) -> None:
        self.stack.close()
        self.followers.finish(True)


class _KeptGaps(Follower):
    """Keeps the gaps of a run that reports them."""

    def __init__(self, gaps: deque[Gap]) -> None:
        self._gaps = gaps

    def gap(self, gap: Gap) -> None:
        """Keep one."""
        self._gaps.append(gap)


def _listed(followers: Any) -> Sequence[Any]:
    if isinstance(followers, (str, bytes)) or not isinstance(followers, Sequence):
        raise ConfigError(f"followers is {type(followers).__name__}: give a list of followers, sinks and callables")
    return followers
