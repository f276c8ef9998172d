"""Watcher: attaches to a model and follows each `generate()`.

    watcher = Watcher(model, sites, score)          # score(generation, recording, placed, states)
    with watcher:
        model.generate(...)                         # `watcher.recordings` grows

Patches `generate` (prompt), `prepare_inputs_for_generation` (padding) and `_get_stopping_criteria` (ends, accepted
drafts) of the instance. State is per thread.
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

from probemon.errors import ConceptRaised, ConfigError, UnsupportedDecoding, UnsupportedModel
from probemon.host.cache import filled_cache
from probemon.host.changes import ModelMark
from probemon.host.image_offsets import ImageOffsets
from probemon.host.internals import patch_prepared_inputs, patch_stopping_criteria, proposes_tokens
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
RAISE = 2  # sent by rank 0
_OPEN: weakref.WeakSet[Watcher] = weakref.WeakSet()  # attached now
# torch's hook numbers are not thread-safe, and garbage collection may detach a run in any thread.
_ATTACHING = threading.RLock()


class Watcher:
    """Attaches in `with`. Raises `UnsupportedModel`, `ConfigError`.

    - `score`: see `DecoderHooks`
    - `check`: may refuse a `generate()` call
    - `report_gaps`: unseen columns do not raise
    - `one_thread`: watch only the thread that enters
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
        self._n_beside = 0  # in unwatched threads
        self._told_of_others = False
        self._acts = acts
        self._stop_next = False  # the next generate() ends at once
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._faults_at_end = HookFaults()

    @property
    def open(self) -> bool:
        """True while attached."""
        return self._hooks.open

    def model_mark(self) -> ModelMark:
        """Return the model's mark."""
        return self._hooks.recordings.marks.now()

    @property
    def recordings(self) -> list[Recording]:
        """Recordings of generations and documents."""
        return self._hooks.recordings.kept

    @property
    def n_documents(self) -> int:
        """Plain documents that no generation continued."""
        return len(self._hooks.recordings.documents)

    @property
    def forward_seconds(self) -> deque[float]:
        """Seconds in our hooks, per forward."""
        return self._hooks.seconds

    @property
    def called(self) -> bool:
        """True if the model or its generate() ran."""
        return self._hooks.called

    @property
    def n_gaps(self) -> int:
        """Gaps, reported or raised."""
        return self._hooks.n_gaps

    def hook_faults(self) -> HookFaults:
        """Return the hooks' faults, now or at detaching; runs nothing."""
        return self._hooks.faults() if self.open else self._faults_at_end

    @property
    def n_generating(self) -> int:
        """Running `generate()` calls."""
        return len(self._running)

    @property
    def running_beams(self) -> bool:
        """True if one of them has beams."""
        return any(generation.prompt.n_beams > 1 for generation in list(self._running))

    @property
    def generating(self) -> bool:
        """True if any thread generates."""
        return bool(self._running) or self._hooks.batches.n_calls > 0

    def stop(self) -> None:
        """End all generations, or the next one."""
        with self._lock:
            running = list(self._running)
            for generation in running:
                generation.stop_all_rows()
            n_requests = self._hooks.batches.stop()
            self._stop_next = not running and not n_requests and not self._hooks.batches.n_calls

    def _take_stop(self) -> bool:
        """Return and clear a pending stop."""
        with self._lock:
            taken, self._stop_next = self._stop_next, False
        return taken

    @property
    def batch_errors(self) -> list[BaseException]:
        """Errors in a batching manager's thread."""
        return self._hooks.batches.errors

    def __enter__(self) -> Watcher:
        with _ATTACHING, ExitStack() as stack:
            if any(not one.attached_here for one in _OPEN if one.model is self.model) and is_compiled(self.model):
                raise UnsupportedModel(
                    "another thread watches this compiled model: watching it here, too, would recompile its graphs,"
                    " which torch does not survive while that thread runs them. Watch all threads with one run, attach"
                    " one after the other, or leave the model uncompiled"
                )
            self.threads.attach()
            self._hooks.attach(stack)
            if hasattr(self.model, "generate"):
                shadow(stack, self._hooks, self.model, "generate", self._follow_generate)
                patch_prepared_inputs(stack, self._hooks, self.model, self._prepare_inputs)
                patch_stopping_criteria(stack, self._hooks, self.model, self._follow_criteria)
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
            if not self.open:  # detached before
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
                raise UnsupportedDecoding(
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
        self._offsets.note(filled_cache(out, None) if prompt.cache is None else prompt.cache)
        self._keep_output(recording, sequences)
        self._reports.ended(recording, None)
        return out

    @contextmanager
    def by_hand(self, from_column: int) -> Iterator[HandLoop]:
        """Follow a loop in this thread as one generation."""
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
            frontier = generation.recording.call.frontier
            if loop.ids is None and 0 < frontier < from_column and self._acts():
                raise ConfigError(
                    f"run.generating ended at column {frontier}, before from_column={from_column}, and loop.sampled was"
                    " never called: nothing was said to be generated, so rules and sinks were asked of nothing."
                    " from_column is the prompt's length"
                )
            if loop.ids is not None:
                self._hooks.check_seen(generation.recording, loop.ids, 0, loop.ids.shape[1] - 1, generation)
        if loop.ids is not None:
            self._keep_output(generation.recording, loop.ids)
        self._reports.ended(generation.recording, None)

    def _ways_beside(self) -> frozenset[str]:
        return frozenset({"beside"} if self._running or self._n_beside else ())

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Count an unwatched thread's generation."""
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
        """Warn once if rules act on a thread that has its own run."""
        if self._told_of_others or self.threads.attached_here or not self._acts():
            return
        with _ATTACHING:
            others = [one for one in _OPEN if one is not self and one.model is self.model]
        if any(one.attached_here for one in others):
            self._told_of_others = True
            LOG.warning(
                "a run watches what every thread generates, with rules or sinks, and one of the threads has attached a"
                " run, too: the rules of the first act on its generation, too. If each is to watch its own"
                " thread, give attach(..., one_thread=True)"
            )

    @property
    def attached_here(self) -> bool:
        """True in the attaching thread."""
        return self.threads.attached_here

    @contextmanager
    def _following(self, generation: Generation) -> Iterator[None]:
        """Assign this thread's forwards to a generation."""
        self._hooks.thread.generation = generation
        self._hooks.thread.unwatched = None  # its frame keeps a cache alive
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
            self._hooks.wait_for_step(report=False)  # failed forwards report nothing
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
                followed.pop()  # the newest: blocks are nested
                self._hooks.forget_thread()
                generation.recording.close()

    def _keep_output(self, recording: Recording, sequences: Tensor) -> None:
        ids = sequences.detach().cpu().numpy().astype(np.int64)
        recording.keep_output(sequences, ids, self._hooks.recordings.marks.now())

    def _refuse_batches(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.threads.in_other:
            return original(*args, **kwargs)
        raise UnsupportedDecoding(
            "continuous batching generates in its own thread, and this run was attached with one_thread, to watch"
            " the calling thread alone: attach without it"
        )

    def _prepare_inputs(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.threads.one_thread and self.threads.in_other:
            return original(*args, **kwargs)
        generation = self._hooks.thread.generation
        # A generate() from before attaching is not watched. Outside of one, this is a hand loop.
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
        # Unless another run followed it first.
        if generation is None and not FOLLOWING.models[id(self.model)]:
            # It may have begun in another thread.
            if not self.threads.attached_here and not self._acts():
                self._hooks.plain.report_unwatched(self._hooks.thread)
                return criteria
            raise UnsupportedDecoding(
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
        if generation.prepared and not generation.by_hand:  # not only drafted
            generation.check_prompt(ids.shape[1] + recording.offset)
        self._hooks.close_forward()
        self._hooks.wait_for_step()
        if generation.prompt.speculative:
            if not generation.prepared:  # transformers 5.0 also shows drafts before running them
                return done
            for placed, states in generation.accepted(ids):
                self._hooks.score_tokens(generation, recording, placed, states)
            self._hooks.wait_for_step()
        # All but the last column must have passed the taps.
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
        """Return stopped rows of this thread's generation, like `like [B]`."""
        generation = self._hooks.thread.generation
        return torch.zeros_like(like) if generation is None else generation.stopped(like)

    def current(self) -> Generation | None:
        """Return this thread's generation."""
        return self._hooks.thread.generation
