"""Watcher: everything that is put on one host model, and the life of each `generate()`.

    watcher = Watcher(model, sites, score)          # score(generation, recording, placed, states): called in order
    with watcher:
        model.generate(...)                         # `watcher.recordings` grows

The hooks on its decoder are `probemon.tracking.decoder_hooks`. Three methods are shadowed on the instance: `generate`
tells where the prompt ends, `prepare_inputs_for_generation` what is padding, and `_get_stopping_criteria` which rows
have ended and which drafts were accepted. State is kept per thread, so threads may generate on one model at once.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from probemon.errors import ConceptRaised, ConfigError, NotSupportedDecoding, NotSupportedHost
from probemon.host.changes import HostMark
from probemon.host.image_offsets import ImageOffsets
from probemon.host.internals import proposes_tokens, shadow_prepared_inputs, shadow_stopping_criteria
from probemon.host.model import is_compiled, is_encoder_decoder
from probemon.host.ranks import Ranks
from probemon.host.site import Site
from probemon.tracking.align import SequenceColumns
from probemon.tracking.beams import Beams
from probemon.tracking.decoder_hooks import DecoderHooks, ScoreTokens
from probemon.tracking.generate_call import GenerateCall, read_call
from probemon.tracking.generation import FOLLOWING, ORDER, FollowedCriteria, Generation
from probemon.tracking.hand_loop import HandLoop, generate_around
from probemon.tracking.held_streamer import HeldStreamer
from probemon.tracking.hook_faults import HookFaults
from probemon.tracking.recording import Recording
from probemon.tracking.source_reports import SourceReports
from probemon.tracking.watched_threads import WatchedThreads
from probemon.util.shadow import shadow

LOG = logging.getLogger("probemon")
RAISE = 2  # what rank 0 tells the others to do
_OPEN: weakref.WeakSet[Watcher] = weakref.WeakSet()  # those that watch now
# torch numbers hooks without one: two of one number would replace each other. A run that was dropped is taken off
# wherever Python collects it, also in a thread that is attaching another one.
_ATTACHING = threading.RLock()


class Watcher:
    """Resolves everything when made, attaches in `with`, and leaves nothing behind.

    `score`: see `DecoderHooks`. `check` may refuse a call of `generate()`. `reports` is told of forwards, gaps and
    ends. `report_gaps`: what was not seen is no error.
    `one_thread`: watch only what the thread generates that enters.
    Raises `NotSupportedHost`, `ConfigError`.
    """

    def __init__(
        self,
        model: Any,
        sites: Sequence[str | Site],
        n_probes: int,
        score: ScoreTokens,
        *,
        check: Callable[[GenerateCall], None] = lambda prompt: None,
        report_gaps: bool = False,
        acts: Callable[[], bool] = lambda: False,
        reports: SourceReports,
        one_thread: bool = False,
    ) -> None:
        self.model, self.ranks, self._check = model, Ranks.of(model), check
        self.threads, self._reports = WatchedThreads(one_thread), reports
        scores = self.ranks is None or self.ranks.scores
        self._hooks = DecoderHooks(
            model,
            sites,
            n_probes,
            score,
            scores=scores,
            report_gaps=report_gaps,
            take_stop=self._take_stop,
            acts=acts,
            reports=reports,
            threads=self.threads,
        )
        self._offsets = ImageOffsets(model)
        self._mask = "decoder_attention_mask" if is_encoder_decoder(model) else "attention_mask"
        self._running: list[Generation] = []
        self._n_beside = 0  # generations of threads that are not watched
        self._told_of_others = False
        self._acts = acts
        self._stop_next = False  # the next generate() is to end at its first token
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._faults_at_end = HookFaults()

    @property
    def open(self) -> bool:
        """Whether the host is watched."""
        return self._hooks.open

    def host_mark(self) -> HostMark:
        """Return what the host is now, to be compared with what it is when a generation begins."""
        return self._hooks.recordings.marks.now()

    @property
    def recordings(self) -> list[Recording]:
        """Return the recording of every generation and document so far."""
        return self._hooks.recordings.kept

    @property
    def n_documents(self) -> int:
        """Return how many documents there are of plain forwards that no generation went on from."""
        return len(self._hooks.recordings.documents)

    @property
    def forward_seconds(self) -> deque[float]:
        """Seconds spent in our hooks, one entry a forward of the host."""
        return self._hooks.seconds

    @property
    def called(self) -> bool:
        """Whether this very model ran, or was asked to."""
        return self._hooks.called

    @property
    def n_gaps(self) -> int:
        """How often forwards were found that the taps had not seen, reported or raised."""
        return self._hooks.n_gaps

    def hook_faults(self) -> HookFaults:
        """Return what is wrong with what was put on the host, or was when it was taken away; runs nothing."""
        return self._hooks.faults() if self.open else self._faults_at_end

    @property
    def n_generating(self) -> int:
        """How many calls of `generate()` are under way, in all threads."""
        return len(self._running)

    @property
    def running_beams(self) -> bool:
        """Whether some thread is inside a `generate()` with beams."""
        return any(generation.prompt.n_beams > 1 for generation in list(self._running))

    @property
    def generating(self) -> bool:
        """Whether some thread is inside `generate()`."""
        return bool(self._running) or self._hooks.batches.n_calls > 0

    def stop(self) -> None:
        """End every generation that runs, or the next one if none does."""
        with self._lock:
            running = list(self._running)
            for generation in running:
                generation.stop_all_rows()
            n_requests = self._hooks.batches.stop()
            self._stop_next = not running and not n_requests and not self._hooks.batches.n_calls

    def _take_stop(self) -> bool:
        """Whether a stop came while nothing ran: it is meant for what begins now."""
        with self._lock:
            taken, self._stop_next = self._stop_next, False
        return taken

    @property
    def batch_errors(self) -> list[BaseException]:
        """Errors in forwards of a batching manager that the user runs, in a thread where nobody would see them."""
        return self._hooks.batches.errors

    def __enter__(self) -> Watcher:
        with _ATTACHING, ExitStack() as stack:
            if any(not one.attached_here for one in _OPEN if one.model is self.model) and is_compiled(self.model):
                raise NotSupportedHost(
                    "another thread watches this compiled host, and to watch it here, too, its graphs are made anew,"
                    " which torch does not survive while that thread runs them. Watch all threads with one run, attach"
                    " one after the other, or leave the host as it is"
                )
            self.threads.attach()
            self._hooks.attach(stack)
            if hasattr(self.model, "generate"):
                shadow(stack, self._hooks, self.model, "generate", self._follow_generate)
                shadow_prepared_inputs(stack, self._hooks, self.model, self._prepare_inputs)
                shadow_stopping_criteria(stack, self._hooks, self.model, self._follow_criteria)
                if self.threads.one_thread:
                    shadow(stack, self._hooks, self.model, "init_continuous_batching", self._refuse_batches)
                else:
                    self._hooks.batches.shadow(stack, self._hooks)
            self._stack = stack.pop_all()
            _OPEN.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _ATTACHING:
            if not self.open:  # it was dropped, and taken off before
                return
            self._faults_at_end = self._hooks.faults()
            self._hooks.open = False
            _OPEN.discard(self)
            self._stack.close()

    # -- one generate() --------------------------------------------------------------------------

    def _follow_generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.threads.in_other:
            with self._beside():
                return original(*args, **kwargs)
        outer = self._hooks.thread.generation
        self._hooks.called = True
        if outer is not None:
            if not proposes_tokens():
                raise NotSupportedDecoding(
                    "generate() inside generate() (from an action or a criterion), or inside run.generating: whose"
                    " tokens a forward shows would be a guess. Generate after the first has ended"
                )
            with outer.proposing():
                return original(*args, **kwargs)
        self._tell_of_others()
        try:
            prompt = read_call(self.model, args, kwargs)
            self._hooks.abilities.check_generate(prompt.ways | self._ways_beside(), prompt.length)
            if prompt.cached:
                self._offsets.check(prompt.cache)
            self._check(prompt)
        except BaseException:
            if isinstance(kwargs.get("streamer"), HeldStreamer):
                kwargs["streamer"].failed()
            raise
        recording = self._hooks.recordings.new(
            SequenceColumns(prompt.columns, speculative=prompt.speculative),
            prompt.offset,
            beams=Beams(prompt.n_beams, prompt.columns - prompt.offset) if prompt.n_beams > 1 else None,
            prompt=None if prompt.ids is None else prompt.ids.detach().cpu().numpy(),
        )
        generation = Generation(recording, prompt)
        with self._following(generation):
            out = original(*args, **kwargs)
            sequences = getattr(out, "sequences", out)
            self._hooks.check_seen(
                recording, sequences, recording.offset, recording.offset + sequences.shape[1] - 1, generation
            )
        self._offsets.note(prompt.cache if prompt.cache is not None else getattr(out, "past_key_values", None))
        self._keep_output(recording, sequences)
        self._reports.ended(recording, None)
        return out

    @contextmanager
    def by_hand(self, from_column: int) -> Iterator[HandLoop]:
        """Follow a loop of forwards in the calling thread as one generation, generated from a column on."""
        if not self.open:
            raise ConfigError("run.generating is for the inside of the with block of attach()")
        if self.threads.in_other:
            raise ConfigError(
                "this run was attached with one_thread: only the thread that entered its block is watched"
            )
        if self._hooks.thread.generation is not None:
            raise ConfigError(
                "run.generating is not for the inside of a generate(), or of another run.generating: whose tokens a"
                " forward shows would be a guess"
            )
        prompt = GenerateCall(from_column, 0)
        self._check(prompt)
        self._hooks.abilities.check_generate(self._ways_beside(), from_column)
        generation = Generation(self._hooks.recordings.new(SequenceColumns(from_column)), prompt, by_hand=True)
        loop = HandLoop(generation, self._sample_by_hand, self.current)
        with self._following(generation):
            yield loop
            self._hooks.close_forward()
            self._hooks.wait_for_step()
            seen = generation.recording.call.frontier
            if loop.ids is None and 0 < seen < from_column and self._acts():
                raise ConfigError(
                    f"run.generating ended at column {seen}, before from_column={from_column}, and loop.sampled was"
                    " never called: nothing was said to be generated, so rules and sinks were asked of nothing."
                    " from_column is the prompt's length"
                )
            if loop.ids is not None:
                self._hooks.check_seen(generation.recording, loop.ids, 0, loop.ids.shape[1] - 1, generation)
        if loop.ids is not None:
            self._keep_output(generation.recording, loop.ids)
        self._reports.ended(generation.recording, None)

    def _ways_beside(self) -> frozenset[str]:
        """Return the way of generating beside others, where there are others."""
        return frozenset({"beside"} if self._running or self._n_beside else ())

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """While the block runs, a thread generates that is not watched."""
        if self._running:
            self._hooks.abilities.check_generate({"beside"})
        with self._lock:
            self._n_beside += 1
        try:
            yield
        finally:
            with self._lock:
                self._n_beside -= 1

    def _tell_of_others(self) -> None:
        """Warn where rules or sinks act on what another thread generates, which has attached a run for it."""
        if self._told_of_others or self.threads.attached_here or not self._acts():
            return
        with _ATTACHING:
            others = [one for one in _OPEN if one is not self and one.model is self.model]
        if any(one.attached_here for one in others):
            self._told_of_others = True
            LOG.warning(
                "a run watches what every thread generates, with rules or sinks, and one of the threads has attached a"
                " run of its own: the rules of the first act on its generation, too. If each is to watch its own"
                " thread, give attach(..., one_thread=True)"
            )

    @property
    def attached_here(self) -> bool:
        """Whether the calling thread is the one that attached."""
        return self.threads.attached_here

    @contextmanager
    def _following(self, generation: Generation) -> Iterator[None]:
        """While the block runs, forwards of the calling thread are of this generation."""
        self._hooks.thread.generation = generation
        self._hooks.thread.unwatched = None  # it has ended, and its frame holds its cache
        FOLLOWING.models[id(self.model)] += 1
        followed = FOLLOWING.generations[id(self.model)]
        generation.join(followed)
        FOLLOWING.begun[id(self.model)] = next(ORDER)
        self._running.append(generation)
        if self._take_stop():
            generation.stop_all_rows()
        try:
            yield
        except BaseException as error:
            self._hooks.wait_for_step(report=False)  # a forward that failed shows nothing
            for failed in generation.on_failure:
                failed()
            self._reports.ended(generation.recording, error)
            raise
        finally:
            try:
                self._hooks.wait_for_step()
            finally:
                self._running.remove(generation)
                FOLLOWING.models[id(self.model)] -= 1
                followed.pop()  # the newest: their blocks lie in one another
                self._hooks.forget_thread()
                generation.recording.close()

    def _keep_output(self, recording: Recording, sequences: Tensor) -> None:
        ids = sequences.detach().cpu().numpy().astype(np.int64)
        recording.keep_output(sequences, ids, self._hooks.recordings.marks.now())

    def _refuse_batches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.threads.in_other:
            return original(*args, **kwargs)
        raise NotSupportedDecoding(
            "continuous batching generates in a thread of its own, and this run was attached with one_thread, to watch"
            " the calling thread alone: attach without it"
        )

    def _prepare_inputs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.threads.one_thread and self.threads.in_other:
            return original(*args, **kwargs)
        generation = self._hooks.thread.generation
        # A generate() that was running when this run attached: where its prompt ended is unknown, so it is not watched.
        # Outside of a generate() somebody prepares the inputs of a loop by hand.
        self._hooks.thread.foreign = (
            generation is None
            and not FOLLOWING.models[id(self.model)]
            and generate_around(self._hooks.decoder) is not None
        )
        if generation is not None and not generation.drafting:
            generation.prepare_forward(args[0] if args else kwargs.get("input_ids"), kwargs.get(self._mask))
        return original(*args, **kwargs)

    def _follow_criteria(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria: StoppingCriteriaList = original(*args, **kwargs)
        if self.threads.one_thread and self.threads.in_other:
            return criteria
        generation = self._hooks.thread.generation
        self._hooks.called = True
        # Where another run follows it, that was there first.
        if generation is None and not FOLLOWING.models[id(self.model)]:
            # In another thread it may have been running when this run attached.
            if not self.threads.attached_here and not self._acts():
                self._hooks.plain.tell_unwatched(self._hooks.thread)
                return criteria
            raise NotSupportedDecoding(
                "this generate() was looked up before probemon was attached, or called on the class, and cannot be"
                " followed: call model.generate(...) inside the with block"
            )
        if generation is None or generation.drafting:
            return criteria
        return FollowedCriteria(criteria, partial(self._check_sampled, generation), partial(self._end_rows, generation))

    def _sample_by_hand(self, generation: Generation, ids: Tensor, done: Tensor, pads: bool) -> Tensor:
        done = self._check_sampled(generation, ids, done)
        self._end_rows(generation, ids, done, pads)
        return done

    def _end_rows(self, generation: Generation, ids: Tensor, done: Tensor, pads: bool) -> None:
        if self._hooks.scores:
            generation.ended(ids, done, pads)

    def _check_sampled(self, generation: Generation, ids: Tensor, done: Tensor) -> Tensor:
        recording = generation.recording
        if generation.prepared and not generation.by_hand:  # something was run, not only drafted
            generation.check_prompt(ids.shape[1] + recording.offset)
        self._hooks.close_forward()
        self._hooks.wait_for_step()
        if generation.prompt.speculative:
            if not generation.prepared:  # transformers 5.0 shows the criteria what was drafted before it is run, too
                return done
            for placed, states in generation.accepted(ids):
                self._hooks.score_tokens(generation, recording, placed, states)
            self._hooks.wait_for_step()
        # Every column but the one just sampled has been run: each forward of the host is counted against the taps.
        self._hooks.check_seen(recording, ids, recording.offset, recording.offset + ids.shape[1] - 1, generation)
        if self.ranks is None and generation.raising is None and not generation.stopping:
            generation.mark_sampled()
            return done
        stopped = self.stopped(done)
        if self.ranks is not None:
            verdict = self.ranks.agree(
                stopped.to(torch.int32)
                if generation.raising is None
                else torch.full_like(stopped, RAISE, dtype=torch.int32)
            )
            stopped = verdict != 0
            if generation.raising is None and bool((verdict == RAISE).any()):
                raise ConceptRaised("an action raised on rank 0, which scores", None)
        if generation.raising is not None:
            raise generation.raising
        generation.mark_sampled()
        return done | stopped

    def stopped(self, like: Tensor) -> Tensor:
        """Return the rows of the calling thread's generation that an action stopped, as a mask like `like [B]`."""
        generation = self._hooks.thread.generation
        return torch.zeros_like(like) if generation is None else generation.stopped(like)

    def current(self) -> Generation | None:
        """Return the generation of the calling thread."""
        return self._hooks.thread.generation
