"""MonitorRun: watches one model while its `with` block is open.

    with manager.attach(model, tokenizer) as run:
        run.on("weapon", above=0.9, for_tokens=3, action="stop")
        out = model.generate(**inputs, max_new_tokens=50, stopping_criteria=run.stopping_criteria)
    result = run.result(out)

Tokens go from a `Watcher` through a `TokenScorer` to a `Publisher`, which serves recordings, rules and followers.
"""

from __future__ import annotations

import logging
import os
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
from probemon.monitor.delivery import Delivery, SinkStats, as_follower
from probemon.monitor.failures import MAX_KEPT, Failures, Guard
from probemon.monitor.followers import Follower, Followers
from probemon.monitor.function_probes import FunctionProbe
from probemon.monitor.health import Health, run_health
from probemon.monitor.kept_states import KeepStates
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
    """The options of `manager.attach`. Raises `ConfigError`.

    - `strict`: raise for another model's weights, instead of a warning
    - `on_gap`: if a forward bypassed our hooks, "raise" `AlignmentError`, or "report" it (`run.gaps`, followers)
    - `callback_errors`: "raise" `CallbackFailed` at the end, or only "report" them (`run.failures`, log)
    - `keep_tokens`: keep the scores of at least so many tokens (None: all), and so many ids a row for judges
    - `one_thread`: watch only the thread that enters the block, so that each thread can attach a run. Excludes
      continuous batching
    - `breaker`: scoring errors make tokens unseen and, if frequent, pause scoring. Runs may share a `Circuit`
    """

    strict: bool = False
    on_gap: str = "raise"
    callback_errors: str = "raise"
    keep_tokens: int | None = None
    one_thread: bool = False
    breaker: Breaker | Circuit | None = None

    def __post_init__(self) -> None:
        if callable(self.on_gap):
            raise ConfigError('on_gap is "raise" or "report": for a callback, give a follower with a method gap()')
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
    """One attachment. The constructor resolves everything, so an error leaves no hooks behind.

    - `followers`: each a `Follower`, a sink, or a callable `(placed, scores)`
    - `source`: makes the token source; others than `Watcher` check their model themselves

    Raises `ModelMismatch` (hidden size, layer count, strict weights), `UnsupportedModel`, `ConfigError`.
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
        if isinstance(tokenizer, (list, tuple, Follower)):
            raise ConfigError(f"tokenizer is a {type(tokenizer).__name__}: give followers as followers=[...]")
        if source is Watcher:
            wrapped, model = model, unwrap(model)
            needs_its_wrapper(wrapped, model)  # raises if an adapter would have no effect
            check_host(manager.pack, model, strict=options.strict)
            if deployment is not None:
                deployment.check_host(manager.pack, model)
        self.manager, self.model, self.tokenizer, self.deployment = manager, model, tokenizer, deployment
        self.options, self.gaps = options, deque[Gap](maxlen=MAX_KEPT)
        self._failures, self._entered, self._calls = Failures(), False, LentCalls()
        self._beginning: list[list[Follower]] = []  # what those that begin now have added
        self._followers, self._begun = Followers(self._failures), list[Follower]()
        self._watches = Watches(manager)
        # Hooks hold the objects below but never this run, so a dropped run can be collected.
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
        file_followers = () if deployment is None else deployment.followers(manager, followers)
        sites: list[str | Site] = list(manager.pack.sites)
        for follower in map(self._as_follower, [*file_followers, *_listed(followers)]):
            sites += [site for site in self._sites_of(follower) if site not in sites]
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
        self._holds_model = options.strict or (deployment is not None and deployment.names_model)
        if isinstance(self._watcher, Watcher):  # external engines have no marks
            publisher.newest_mark = self._watcher.model_mark()
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

    # -- public interface ------------------------------------------------------------------------

    def on(self, concept: Wanted | None = None, **fields: Unpack[RuleFields]) -> None:
        """Act when a concept scores over a threshold. `fields`: of `probemon.monitor.rule_spec.RuleSpec`.

            run.on("weapon", above=0.9, for_tokens=3, action="stop")
            run.on("injection", within="prompt", action="record")
            run.on(all_of=["weapon", "crime"], action=print)
            run.on("loudness", above=0.9)                   # a function probe of the run, by its name alone

        Raises `UnknownConcept`, `ConfigError`.
        """
        if self._watcher.generating:
            raise ConfigError("run.on cannot change what is watched while generate() runs: call it before")
        spec_fields: dict[str, Any] = {"concept": concept, **fields}
        spec = RuleSpec.from_dict(spec_fields)
        function = next((one for one in self._function_probes if one.name == concept), None)
        if function is None:
            if named := next((one.name for one in self._function_probes if one.name in spec.listed), None):
                raise ConfigError(
                    f"{named!r} is a function, which takes rules by its name alone: give it one of its own"
                )
            self.add_rules(self._lending(spec.rules(self.manager.pack)))
            return
        self._check_not_ended("a rule")
        rules = self._lending(function.rules(spec))
        with self._preparing(rules):
            self._publisher.add_function_rules(function.name, function.as_pack, rules)

    @property
    def _function_probes(self) -> list[FunctionProbe]:
        return [one for one in self._followers if isinstance(one, FunctionProbe)]

    @property
    def function_names(self) -> list[str]:
        """Return the names of its function probes."""
        return [one.name for one in self._function_probes]

    def _lending(self, rules: Sequence[Rule]) -> list[Rule]:
        """Return rules that hooks may hold."""
        lent = [(rule, self._lent(rule.action), self._lent(rule.on_blind)) for rule in rules]
        return [replace(rule, action=action, on_blind=on_blind) for rule, action, on_blind in lent]

    def _lent(self, action: Action) -> Action:
        return action if isinstance(action, (str, Named, AskedAction)) else self._calls.lend(action)

    def add_rules(self, rules: Sequence[Rule]) -> None:
        """Add rules: see `on`."""
        self._check_not_ended("a rule")
        with self._preparing(rules):
            self._watches.add(rules, count=bool(self._publisher.tokens))

    def _preparing(self, rules: Sequence[Rule]) -> AbstractContextManager[None]:
        """Add deciders for a block that adds the rules. Raises `ConfigError` for unsupported actions."""
        check_asked(rules, self.tokenizer, self.options.keep_tokens)
        return self._publisher.preparing(rules)

    def hold_to(
        self,
        deployment: DeploymentFile,
        rules: Sequence[Rule],
        always_on: Wanted | None = None,
        exclude: Wanted | None = None,
        *,
        count: bool = False,
    ) -> None:
        """Apply a deployment's rules, `always_on` and `exclude`. `count`: as a new state. Raises as `update`."""
        with self._preparing(rules):
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
        """Change what is watched, atomically and from any thread, for every token scored from now on.

            run.update(exclude=["plant"], rules=[{"concept": "weapon", "above": 0.5, "action": "stop"}])
            run.update("watch.yaml")                        # an edited deployment file

        Each argument replaces the former value; `rules` the run's own rules, a file those of the former file. Nothing
        else in a file may change. Rules that stay keep their streaks.

        Returns the new state's number in `run.watches` and `result.watches`. Raises `DeploymentError`,
        `UnknownConcept`, `ConfigError`, `UnsupportedDecoding` (a stop while beams run), and then changes nothing.
        """
        self._check_not_ended("what is watched")
        change = Change.of(self.manager, self.deployment, deployment, rules, always_on, exclude)
        if change.rules is not None:
            change = replace(change, rules=self._lending(change.rules))
        if self._watcher.running_beams:
            check_beams(change.new_rules)
        with self._preparing(change.new_rules):
            number = change.make(self._watches)
        self.deployment = change.deployment or self.deployment
        return number

    @property
    def watches(self) -> list[Watched]:
        """Return what was watched, state by state."""
        return list(self._watches.past)

    @property
    def events(self) -> deque[Event]:
        """Return the newest 1,000 events."""
        return self._publisher.events

    def hold(self, streamer: Any, *, show_last: bool = False) -> HeldStreamer:
        """Wrap a streamer for `generate(streamer=...)` to show tokens only after their rules. The last token has no
        score and is hidden, unless `show_last`.
        """
        return HeldStreamer(streamer, self._watcher.current, show_last)

    @property
    def stopping_criteria(self) -> StoppingCriteriaList:
        """Return criteria for `generate(stopping_criteria=...)`. Optional: stops take effect without them."""
        return StoppingCriteriaList([StoppedRows(self._watcher)])

    def follow(self, follower: Any) -> Follower:
        """Add a `Follower`, sink or callable `(placed, scores)`; return its follower.

        Raises `ConfigError` after the block or for further sites (use `attach`), and errors of `began`.
        """
        self._check_not_ended("a follower")
        added = self._as_follower(follower)
        if self._sites_of(added):
            raise ConfigError(
                f"{type(added).__name__} reads hidden states at further sites, and those are tapped when a run is made:"
                " give it to attach(followers=[...])"
            )
        helpers = self._begin(added) if self._watcher.open else []  # may raise
        if self._beginning:
            self._beginning[-1] += [added, *helpers]
        else:
            self._followers.add(added, sink=isinstance(added, Delivery))
            self._add_after(added, helpers)
        return added

    def _add_after(self, follower: Follower, helpers: Sequence[Follower]) -> None:
        """Add what a follower added when it began, directly after it."""
        for helper in helpers:
            self._followers.add(helper, sink=isinstance(helper, Delivery), after=follower)
            follower = helper

    def _as_follower(self, candidate: Any) -> Follower:
        return as_follower(candidate, self._followers, self._calls.lend)

    def keep_states(
        self, to: str | os.PathLike[str], *, phase: str | None = None, max_bytes: int = 4 << 30
    ) -> KeepStates:
        """Write the hidden states at the packs' sites to a folder, until the run ends; return the follower.

            run.keep_states("states/", phase="generated")
            read_states("states/")["resid_post.15"]     # probemon.monitor.kept_states

        Further sites: give a `KeepStates` to `attach`. Raises `ConfigError` for a folder that has states.
        """
        kept = KeepStates(to, phase=phase, max_bytes=max_bytes)
        self.follow(kept)
        return kept

    def _sites_of(self, follower: Follower) -> list[str | Site]:
        """Return further sites of a new follower."""
        return list(follower.attaching(self))

    def _begin(self, follower: Follower) -> list[Follower]:
        """Call `began`; return the followers that it added."""
        self._beginning.append([])
        try:
            follower.began(self)
        finally:
            helpers = self._beginning.pop()
        self._begun.append(follower)
        return helpers

    @property
    def guard(self) -> Guard:
        """Return `guard(what, function, *arguments)`, which keeps errors in `failures`."""
        return self._failures.call

    @property
    def followers(self) -> list[Follower]:
        """Return the followers in calling order."""
        return [one for one in self._followers if not isinstance(one, _KeptGaps)]

    def follower(self, kind: type[F]) -> F | None:
        """Return the first follower of a class, or None."""
        return next((one for one in self._followers if isinstance(one, kind)), None)

    @property
    def watching(self) -> Watches:
        """Return what is watched now, and its degradations."""
        return self._watches

    @property
    def _ended(self) -> bool:
        return self._entered and not self._watcher.open

    def _check_not_ended(self, what: str) -> None:
        if self._ended:
            raise ConfigError(f"this run has ended, so {what} would have no effect: attach again")

    def generating(self, from_column: int) -> AbstractContextManager[HandLoop]:
        """Follow your own decode loop like `generate()`.

            with run.generating(from_column=ids.shape[1]) as loop:
                out = model(ids, past_key_values=cache)
                ...
                if loop.sampled(ids, ended=token[:, 0] == eos).all(): break

        This thread's forwards in the block are one generation. Columns before `from_column`, also cached ones, are the
        prompt. `loop.sampled` takes each sampled column and returns the rows to end. See `probemon.tracking.hand_loop`.
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
        """End running generations at their next token, or else the next one; from any thread.

        This ends all requests of `generate_batch`, but only those that have begun of a batching manager.
        """
        self._watcher.stop()

    def stop_mine(self, *, cancelled: bool = False) -> None:
        """End the generation that runs this callback. Raises `ConfigError` elsewhere.

        `cancelled`: nobody wants the rest, so it says little of the traffic (drift, events).
        """
        generation = self._watcher.current()
        if generation is None:
            raise ConfigError(
                "run.stop_mine() works only in the generating thread (in an action or a listener): from"
                " elsewhere call run.stop()"
            )
        if cancelled:
            generation.recording.cancel()
        generation.stop_all_rows()

    @property
    def failures(self) -> list[Exception]:
        """Return the first 1,000 errors of callbacks and sinks."""
        return self._failures.errors

    @property
    def n_failures(self) -> int:
        """Return their number."""
        return self._failures.n_errors

    @property
    def sinks(self) -> list[SinkStats]:
        """Return each sink's statistics."""
        return self._publisher.sinks()

    @property
    def source(self) -> TokenSource:
        """Return the token source."""
        return self._watcher

    @property
    def scorer(self) -> TokenScorer:
        """Return the token scorer."""
        return self._scorer

    @property
    def recordings(self) -> list[Recording]:
        """Return the recordings, oldest first: one for each `generate()` or document."""
        return self._watcher.recordings

    @property
    def n_gaps(self) -> int:
        """Return the number of gaps, reported or raised."""
        return self._watcher.n_gaps

    @property
    def forward_seconds(self) -> deque[float]:
        """Return the seconds in our hooks of the newest forwards."""
        return self._watcher.forward_seconds

    def health(self) -> Health:
        """Return whether this run sees what its model runs; from any thread, without a forward."""
        health = run_health(
            self._watcher,
            self._publisher,
            self._failures,
            self._threads,
            ended=self._ended,
            not_numbers=self.manager.not_numbers,
            changed_within=self._publisher.changed_within or changed_within(list(self.recordings)),
            holds_model=self._holds_model,
        )
        breaker_checks = [] if self.breaker is None else [self.breaker.check()]
        return health.with_checks([*self._followers.checks(), *breaker_checks])

    def result(self, out: Any, *, generation: int | None = None) -> Result:
        """Return the scores of one `generate()`, given its output (ids `[B, L]` or the output object).

        `out` may be the ids of plain forwards, or from `generate_batch`: row i is request i (`result.requests`). Every
        token is compared with `out`. `generation` selects one of several generations with these ids. Raises
        `AlignmentError` unless exactly one recording matches.
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
                    self._add_after(follower, self._begin(follower))
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
                f"{n_generating} generations of other threads were under way when this run ended: their further"
                " tokens are not watched and reach no rule or sink. End them, or wait for"
                " them, inside the with block",
                UserWarning,
                stacklevel=2,
            )
        self._followers.finish(error is not None)
        for load_error in self.manager.engine.background_errors():
            failures.add("loading in the background", load_error)
        for batch_error in self._watcher.batch_errors:  # reported nowhere else
            failures.add("continuous batching", batch_error)
        self._followers.closed(self)
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
        """Return the watched threads: all, for an external engine."""
        return self._watcher.threads if isinstance(self._watcher, Watcher) else WatchedThreads(one_thread=False)


class _Parts:
    """The token source, set last."""

    watcher: TokenSource


@dataclass(frozen=True)
class _Closing:
    """Closes an entered run that was dropped."""

    model: str
    watcher: TokenSource
    stack: ExitStack
    followers: Followers

    def close(self, parts: _Parts) -> None:
        """Detach now; close the rest in a new thread, since a collected run may hold locks."""
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
    def __init__(self, gaps: deque[Gap]) -> None:
        self._gaps = gaps

    def gap(self, gap: Gap) -> None:
        """Keep it."""
        self._gaps.append(gap)


def _listed(followers: Any) -> Sequence[Any]:
    if isinstance(followers, (str, bytes)) or not isinstance(followers, Sequence):
        raise ConfigError(f"followers is {type(followers).__name__}: give a list of followers, sinks and callables")
    return followers
