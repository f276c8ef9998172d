"""MonitorRun: what `manager.attach(...)` yields; watches one host model while its `with` block is open.

    with manager.attach(model, tokenizer) as run:
        run.on("weapon", above=0.9, for_tokens=3, action="stop")
        out = model.generate(**inputs, max_new_tokens=50, stopping_criteria=run.stopping_criteria)
    result = run.result(out)

The watcher hands over tokens with their hidden states in order; the run has them scored, carries what each row
retains, asks the rules, and keeps the recordings that `result` reads.
"""

from __future__ import annotations

import logging
import secrets
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from probemon.aggregate import Aggregator, named
from probemon.core.checks import check_bool, check_count, check_number
from probemon.core.concept_names import Wanted
from probemon.core.hierarchy import Mask
from probemon.core.scores import GENERATED, PROMPT, Gap, Scores, TokenBatch
from probemon.engine.audit import sample
from probemon.engine.scorer import Scorer
from probemon.errors import (
    AlignmentError,
    CallbackFailed,
    ConceptRaised,
    ConfigError,
    NotSupportedDecoding,
)
from probemon.host.compatibility import check_host
from probemon.host.model import unwrap
from probemon.host.tap import Site
from probemon.monitor.delivery import Delivery
from probemon.monitor.result import Result
from probemon.monitor.rules import ACTIONS, Event, Rule
from probemon.sinks import Sink
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report, ScoreTokens
from probemon.tracking.generate_call import GenerateCall
from probemon.tracking.generation import Generation, States
from probemon.tracking.hand_loop import HandLoop, described
from probemon.tracking.held_streamer import HeldStreamer
from probemon.tracking.recording import Recording, Tokens
from probemon.tracking.run_recordings import find_recording, keep_newest
from probemon.tracking.watcher import Watcher

Listener = Callable[[PlacedTokens, Scores], None]
LOG = logging.getLogger("probemon")
_KEPT = 1000  # gaps and failures, where one may come with every token


# Calls a callback of the user's, and keeps what it raises for the end: what it is, the function, its arguments.
Guard = Callable[..., None]


class Companion(Protocol):
    """What reads more of the forwards that a run watches: the outputs at `sites`, beside the probes."""

    @property
    def sites(self) -> Sequence[Any]:
        """Of what else the outputs are read."""

    def beside(self, score: ScoreTokens) -> ScoreTokens:
        """`score`, which takes the tokens' other states along."""

    def ended(self, recording: Recording) -> None:
        """A generation has ended."""

    def close(self) -> Sequence[Exception]:
        """The run has ended; what went wrong in the background."""


class MonitorRun:
    """One attachment. Everything is resolved in the constructor, so a bad pack or host leaves nothing behind.

    `on_gap`: what to do where the host ran a forward that our hooks did not see: "raise" `AlignmentError`, or call it
    with the `Gap` and leave the tokens unseen. `callback_errors`: "raise" what actions, listeners and sinks raised as
    `CallbackFailed` when the block ends, or only "report" it (`run.failures`, the log). `keep_tokens`: how many tokens
    keep their scores at least, the oldest are forgotten first (None: all). `companion(model, guard)` makes what is
    recorded of the same forwards beside probes (`run.routing`). Raises `HostMismatch` (hidden size, layer count; with
    `strict` also another model's weights, which otherwise warn), `NotSupportedHost`, `ConfigError`.
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
        companion: Callable[[Any, Guard], Companion] | None = None,
    ) -> None:
        if on_gap != "raise" and not callable(on_gap):
            raise ConfigError(f'on_gap is {on_gap!r}: give "raise" or a callable that takes the gap')
        if callback_errors not in ("raise", "report"):
            raise ConfigError(f'callback_errors is {callback_errors!r}: give "raise" or "report"')
        if keep_tokens is not None:
            keep_tokens = check_count(
                "keep_tokens", keep_tokens, least=1, remedy="it counts tokens, so give 1 or more, or None for all"
            )
        model = unwrap(model)
        check_host(manager.pack, model, strict=check_bool("strict", strict))
        self.manager, self.model, self.tokenizer = manager, model, tokenizer
        self.gaps: deque[Gap] = deque(maxlen=_KEPT)
        self.failures: list[Exception] = []  # the first 1,000
        self.n_failures = 0
        self.audit_seed = secrets.randbits(62)  # drawn anew, so that runs together are a random sample too
        self._on_gap, self._raise_failures, self._keep_tokens = on_gap, callback_errors == "raise", keep_tokens
        self.routing: Any = None  # the companion: what else is recorded of the same forwards
        sites: list[str | Site] = list(manager.pack.sites)
        score: ScoreTokens = self._score
        on_end: Callable[[Recording], None] | None = None
        if companion is not None:
            self.routing = companion(model, self._call)
            sites, score, on_end = [*sites, *self.routing.sites], self.routing.beside(score), self.routing.ended
        self._watcher = Watcher(
            model,
            sites,
            manager.pack.n_probes,
            score,
            check=self._check,
            on_gap=None if on_gap == "raise" else self._gap,
            on_end=on_end,
            acts=lambda: bool(self._rules or self._sinks),
        )
        self._plan = manager.plan
        self._n_generated, self._unjudged = 0, Counter[str]()  # generated tokens, and why some of them have no scores
        self._rules: list[Rule] = []
        self._listeners: list[Listener] = []
        self._sinks: list[Sink] = []
        self._deliveries: list[Delivery] = []
        self._keeping = threading.Lock()  # recordings are added to and cut by every thread that generates
        self._stack = ExitStack()
        self._entered = False

    # -- the face --------------------------------------------------------------------------------

    def on(
        self,
        concept: Wanted,
        *,
        above: float | None = None,
        for_tokens: int = 1,
        aggregate: str | Aggregator | None = None,
        action: str | Callable[[Event], object] = "stop",
    ) -> None:
        """Act when a concept scores over `above` at `for_tokens` generated tokens in a row.

        `concept`: a name, an id, a number, a list of these, or a pattern over names and ids (`re.compile(...)`, or text
        with `*`): a rule for each. `aggregate` compares a running score instead of each token's own: "mean", "max",
        "attention", "ema:0.3", ... or one of `probemon.aggregate`. `action`: "stop" ends that row of the generation
        (the token sampled meanwhile is still in the output), "raise" ends `generate` with `ConceptRaised`, a callable
        gets the `Event`. `above` defaults to the pack's alert threshold, with an aggregate to the one calibrated for
        it. The concepts are evaluated at every token from now on. Raises `UnknownConcept`, `ConfigError`.
        """
        if self._watcher.generating:
            raise ConfigError("run.on cannot change what is watched while generate() runs: call it before")
        pack, aggregator = self.manager.pack, named(aggregate)
        probes = pack.find_all(concept)
        levels = pack.thresholds_for(aggregator)[probes].tolist() if above is None else [above] * len(probes)
        for probe, level in zip(probes, levels, strict=True):
            if above is None and not level < 1:  # NaN: not calibrated; 1: the rate asked for is met by no lower one
                raise ConfigError(
                    f"{pack.concepts[probe]['id']} has no alert threshold in {pack.name} for {aggregator} that a score"
                    f" can exceed ({level}): give above="
                )
            remedy = "scores lie between 0 and 1 and must exceed it, so give 0 or more, and less than 1"
            check_number("above", level, low=0, high=1, open_high=True, remedy=remedy)
        for_tokens = check_count(
            "for_tokens", for_tokens, least=1, remedy="it counts tokens in a row, so give 1 or more"
        )
        if action not in ACTIONS and not callable(action):
            raise ConfigError(
                f"action is {action!r}: give 'stop', 'raise' or a callable that takes the event (run.hold wraps a"
                " streamer)"
            )
        plan = self.manager.plan_with([*(rule.probe for rule in self._rules), *probes])
        self.manager.engine.check_room(plan, ", ".join(pack.concepts[probe]["id"] for probe in probes))
        if self._watcher.open:
            self.manager.arena.pin(np.flatnonzero(plan.always))
            self.manager.arena.unpin(np.flatnonzero(self._plan.always))
        self._plan = plan
        self._rules += [
            Rule(probe, float(level), int(for_tokens), aggregator, action)
            for probe, level in zip(probes, levels, strict=True)
        ]

    def hold(self, streamer: Any, *, show_last: bool = False) -> HeldStreamer:
        """`generate(streamer=run.hold(streamer))`: shows a token only once its own score is known and no rule stopped
        at it.

        The last token generated has no score and stays hidden, unless `show_last`: see `HeldStreamer`.
        """
        return HeldStreamer(streamer, self._watcher.current, show_last)

    def add_sink(self, sink: Sink, *, max_batches: int = 1024) -> Delivery:
        """Send every batch of tokens to a sink, in a thread of its own, until the block ends.

        At most `max_batches` wait; what comes while so many wait is dropped and counted in `.stats()`.
        """
        if not self._watcher.open:
            raise ConfigError("a sink is added inside the with block, whose end closes it")
        if not all(callable(getattr(sink, name, None)) for name in ("open", "write", "close")):
            raise ConfigError(f"a sink has open, write and close, {sink!r} has not: see probemon.sinks")
        if any(known is sink for known in self._sinks):
            raise ConfigError(f"this {type(sink).__name__} was added before: a sink receives one run, once")
        self._sinks.append(sink)
        delivery = Delivery(sink, [concept["id"] for concept in self.manager.pack.concepts], max_batches=max_batches)
        self._deliveries.append(delivery)
        return delivery

    @property
    def stopping_criteria(self) -> StoppingCriteriaList:
        """For `generate(stopping_criteria=...)`: rows that an action stopped. Beside your own criteria, if you have
        any.

        A stop takes effect without it too (the run sees every step of `generate`): passing it states the intent.
        """
        return StoppingCriteriaList([_Stopped(self._watcher)])

    def listen(self, listener: Listener) -> None:
        """Call `listener(placed, scores)` with every batch of tokens as soon as it is scored, in the thread that
        generates.
        """
        self._listeners.append(listener)

    def generating(self, from_column: int) -> AbstractContextManager[HandLoop]:
        """Follow a decode loop of your own as `generate()` is followed: phases, rules, stops, held streamers and
        results.

            with run.generating(from_column=ids.shape[1]) as loop:
                out = model(ids, past_key_values=cache)
                ...
                if loop.sampled(ids, ended=token[:, 0] == eos).all(): break

        Forwards of the calling thread are one generation while the block is open: columns before `from_column` are its
        prompt (those of a cache count), one generated column comes with each forward after it. `loop.sampled` is told
        of every column that is sampled and says which rows are to end; `probemon.tracking.hand_loop` has a whole loop.
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
        """From a callback: end the generation that calls it, every row, and no other thread's. Raises `ConfigError`
        elsewhere.
        """
        generation = self._watcher.current()
        if generation is None:
            raise ConfigError(
                "run.stop_mine() is for what is called in the thread that generates (an action, a listener): from"
                " elsewhere call run.stop()"
            )
        generation.stop_all_rows()

    @property
    def recordings(self) -> list[Recording]:
        """What was recorded, one entry a `generate()` (or a document of plain forwards), oldest first."""
        return self._watcher.recordings

    @property
    def forward_seconds(self) -> deque[float]:
        """Seconds spent in our hooks, one entry a forward of the host, of the newest 10,000."""
        return self._watcher.forward_seconds

    def result(self, out: Any, *, generation: int | None = None) -> Result:
        """The scores of one `generate()` of this run, given its output (ids `[B, L]` or the output object).

        The ids of plain forwards `model(ids)` may be given as well, and what `generate_batch` returned, or one of its
        outputs: row i is then its i-th request (`result.requests`). Every token that was recorded or returned is
        compared with what stands in `out`, the last one included. A copy of an output is enough where one generation of
        the run has its ids; where several have, `generation` says which is meant, by its number in the run (as in
        `Event.generation`). Raises `AlignmentError` where nothing recorded belongs to `out`, or more than one thing
        does.
        """
        ranks = self._watcher.ranks
        if ranks is not None and not ranks.scores:
            raise ConfigError(
                f"this is rank {ranks.rank} of {ranks.n_ranks}, which run one model: its scores are on rank 0"
            )
        if not hasattr(out, "sequences") and (isinstance(out, Mapping) or hasattr(out, "request_id")):
            return self._result_of_requests(dict(out) if isinstance(out, Mapping) else {out.request_id: out})
        sequences = getattr(out, "sequences", out)
        if (
            not isinstance(sequences, Tensor)
            or sequences.dim() != 2
            or sequences.dtype not in (torch.int64, torch.int32)
            or sequences.device.type == "meta"
        ):
            raise ConfigError(f"out is {described(sequences)}: give what generate() returned, ids [B, L]")
        ids = sequences.detach().cpu().numpy().astype(np.int64)
        recording = find_recording(
            self._watcher.recordings, ids, sequences, generation=generation, keep_tokens=self._keep_tokens
        )
        return Result(
            self.manager.pack,
            self.tokenizer,
            recording.tokens(ids),
            recording.host,
            host_changed=recording.host_changed,
        )

    def _result_of_requests(self, outputs: dict[str, Any]) -> Result:
        """Row i is the i-th request of continuous batching, its positions those of its prompt and what was
        generated.
        """
        parts, recordings = [], []
        for request, output in outputs.items():
            if getattr(output, "error", None) is not None:
                raise AlignmentError(
                    f"request {request!r} failed in the host, so its tokens cannot be told: {output.error}"
                )
            ids = np.asarray([[*output.prompt_ids, *output.generated_tokens]], dtype=np.int64)
            recordings.append(
                find_recording(self._watcher.recordings, ids, output, request, keep_tokens=self._keep_tokens)
            )
            parts.append(recordings[-1].tokens(ids))
        if not parts:
            raise ConfigError("out has no requests: give what generate_batch() returned, or one of its outputs")
        tokens = Tokens.join(parts, self.manager.pack.n_probes)
        return Result(
            self.manager.pack,
            self.tokenizer,
            tokens,
            recordings[0].host,
            host_changed=any(recording.host != recordings[0].host for recording in recordings),
            requests=tuple(outputs),
        )

    # -- attaching -------------------------------------------------------------------------------

    def __enter__(self) -> MonitorRun:
        if self._entered:
            raise ConfigError("a run is entered once: call manager.attach again")
        with ExitStack() as stack:
            arena, always = self.manager.arena, lambda: np.flatnonzero(self._plan.always)
            arena.pin(always())
            stack.callback(lambda: arena.unpin(always()))
            stack.enter_context(self._watcher)
            self._stack = stack.pop_all()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        n_generating = self._watcher.n_generating
        self._stack.close()
        if error is None and n_generating and (self._rules or self._sinks):
            warnings.warn(
                f"{n_generating} generations of other threads were under way when this run ended: what they generate"
                " from now on is not watched, rules are not asked of it and sinks hear nothing. End them, or wait for"
                " them, inside the with block",
                UserWarning,
                stacklevel=2,
            )
        for delivery in self._deliveries:
            delivery.close()
            stats = delivery.stats()
            if stats.error is not None:
                self._failed(
                    "a sink", stats.error if isinstance(stats.error, Exception) else RuntimeError(repr(stats.error))
                )
            elif stats.n_dropped:
                LOG.warning(
                    "a sink was too slow: %d of %d tokens were dropped",
                    stats.n_dropped,
                    stats.n_written + stats.n_dropped,
                )
        for not_recorded in self.routing.close() if self.routing is not None else ():
            self._failed("a sink of routing", not_recorded)
        for failed in self.manager.engine.background_errors():
            self._failed("loading in the background", failed)
        for error_in_batch in self._watcher.batch_errors:  # of a manager that the user runs: nobody else would tell
            self._failed(
                "continuous batching",
                error_in_batch if isinstance(error_in_batch, Exception) else RuntimeError(repr(error_in_batch)),
            )
        if self._rules and error is None and self._watcher.n_documents:
            raise ConfigError(
                f"{len(self._rules)} rules were set and could not fire in {self._watcher.n_documents} documents: plain"
                " forwards, from which no generation went on. Rules are asked of generated tokens: use"
                " model.generate(), put a loop of your own into `with run.generating(from_column=...)`, or read"
                " documents in a run without rules"
            )
        if error is None:
            self._warn_of_silence()
        if self.failures and self._raise_failures and error is None:
            first = self.failures[0]
            raise CallbackFailed(
                f"{self.n_failures} callbacks or sinks failed while the generation went on, the first with"
                f' {type(first).__name__}: {first}. callback_errors="report" only reports them',
                self.failures,
            ) from first

    def _warn_of_silence(self) -> None:
        """Warn where rules and sinks were quiet for another reason than that nothing was wrong."""
        n_unjudged, what = self._unjudged.total(), f"{len(self._rules)} rules and {len(self._sinks)} sinks"
        if (self._rules or self._sinks) and not self._watcher.called:
            warnings.warn(
                f"{what} were set, and this {type(self.model).__name__} ran nothing while it was watched: is it the"
                " very model that generated, and not a copy?",
                UserWarning,
                stacklevel=3,
            )
        elif self._rules and n_unjudged:
            [(reason, n)] = self._unjudged.most_common(1)
            told = (
                f"{n_unjudged} of {self._n_generated} generated tokens have no scores, so {len(self._rules)} rules were"
                f" not asked of them ({reason}: {n})"
            )
            warnings.warn(told, UserWarning, stacklevel=3)

    # -- scoring ---------------------------------------------------------------------------------

    def _score(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> Report | None:
        if not len(placed):
            return None
        rows = placed.rows
        origin = (
            rows
            if generation is None or generation.origin is None or placed.phase == PROMPT
            else generation.origin[rows]
        )
        if isinstance(states, str):
            scores = Scores.nothing(len(placed), self.manager.pack.n_probes, states, self.manager.report_top_k)
            recording.retain(rows, recording.retained_of(origin))
            self._publish(generation, recording, placed, scores)
            return None
        audit = sample(self.manager.audit_rate, self.audit_seed, recording.number, rows, placed.columns)
        if placed.phase == PROMPT:
            return lambda report: self._prompt_ended(generation, recording, placed, states, audit) if report else None
        begun = self.manager.begin(self._plan, states, recording.retained_of(origin), audit)

        def step_ended(report: bool) -> None:
            scores, kept = begun() if callable(begun) else begun
            if report:
                recording.retain(rows, kept)
                self._publish(generation, recording, placed, scores)

        return step_ended

    def _prompt_ended(
        self,
        generation: Generation | None,
        recording: Recording,
        placed: PlacedTokens,
        states: States,
        audit: Mask | None,
    ) -> None:
        # np.unique of the reversed rows finds each row's last token: its retained set starts the generation.
        found, last = np.unique(placed.rows[::-1], return_index=True)
        kept, parts = self.manager.score_prompt(self._plan, states, (len(placed) - 1 - last).tolist(), audit=audit)
        recording.retain(found, kept)
        self._publish(
            generation, recording, placed, Scores.join(parts, self.manager.pack.n_probes, self.manager.report_top_k)
        )

    def _publish(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, scores: Scores
    ) -> None:
        with self._keeping:
            recording.add(placed, scores)
            if self._keep_tokens is not None:
                keep_newest(self._watcher.recordings, self._keep_tokens)
        if generation is not None:
            seen = scores.coverage.seen
            generation.mark_scored(placed, seen)
            if placed.phase == GENERATED:
                self._n_generated += len(placed)
                if not seen.all():
                    self._unjudged.update(scores.coverage.unseen[i] for i in np.flatnonzero(~seen))
            if placed.phase == GENERATED and self._rules:
                generation.run_actions(self._act, generation, placed, scores)
        for listener in self._listeners:
            self._call("a listener", listener, placed, scores)
        if self._deliveries:
            batch = TokenBatch(
                recording.number,
                placed.rows,
                placed.columns - recording.offset,
                placed.ids,
                placed.phase,
                placed.provisional,
                scores,
                recording.request,
            )
            for delivery in self._deliveries:
                delivery.put(batch)

    def _check(self, prompt: GenerateCall) -> None:
        if prompt.n_beams > 1 and any(rule.action == "stop" for rule in self._rules):
            raise NotSupportedDecoding(
                "a stop cannot end one beam: what it would have continued comes from the others. Use a callable action"
            )

    def _act(self, generation: Generation, placed: PlacedTokens, scores: Scores) -> None:
        pack = self.manager.pack
        for number, rule in enumerate(self._rules):
            for i, score, value in rule.observe(placed, scores, generation.states_of_rule(number)):
                row, column = int(placed.rows[i]), int(placed.columns[i])
                concept = pack.concepts[rule.probe]
                event = Event(
                    concept["id"],
                    concept["name"],
                    tuple(pack.path(rule.probe)),
                    row,
                    column,
                    int(placed.ids[i]),
                    score,
                    rule.above,
                    rule.for_tokens,
                    placed.provisional,
                    str(rule.aggregator),
                    value,
                    generation.recording.number,
                    generation.recording.request,
                )
                if callable(rule.action):
                    self._call("an action", rule.action, event)
                    if generation.row_stops(row):  # it stopped what it saw: a held streamer hides that too
                        generation.hide_from(column)
                elif rule.action == "stop":
                    generation.stop_row(row, column)
                else:
                    error = ConceptRaised(
                        f"{event.name} ({event.concept}) was over {rule.above} at {rule.for_tokens} tokens in a row,"
                        f" the last at row {row}, column {column}",
                        event,
                    )
                    generation.raise_later(error, column)

    def _gap(self, gap: Gap) -> None:
        self.gaps.append(gap)
        assert callable(self._on_gap)
        self._call("on_gap", self._on_gap, gap)

    def _call(self, what: str, function: Callable[..., object], *arguments: Any) -> None:
        """A callback of the user's must not spoil the generation: what it raises is kept for the end."""
        try:
            function(*arguments)
        except Exception as error:
            self._failed(what, error)

    def _failed(self, what: str, error: Exception) -> None:
        self.n_failures += 1
        if len(self.failures) < _KEPT:
            self.failures.append(error)
        LOG.error("%s failed, the generation went on: %s: %s", what, type(error).__name__, error)


class _Stopped(StoppingCriteria):
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        if self._watcher.current() is None:
            raise NotSupportedDecoding(
                "run.stopping_criteria is of a run that does not watch this generate(): its rules would never stop it."
                " Call the model that is attached, inside the with block"
            )
        return self._watcher.stopped(torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device))
