"""Watcher: the hooks on one host model, and which generation each forward belongs to.

    watcher = Watcher(model, sites, score)          # score(generation, recording, placed, states): called in order
    with watcher:
        model.generate(...)                         # `watcher.recordings` grows

Before the decoder runs, the tokens of the forward are placed; at each tapped layer their hidden states are copied
out, and handed on at the last one; after the decoder, a forward that escaped a tap is an error. Three methods are
shadowed on the instance: `generate` tells where the prompt ends, `prepare_inputs_for_generation` what is padding, and
`_get_stopping_criteria` which rows have ended and which drafts were accepted. State is kept per thread, so
threads may generate on one model at once.
"""

from __future__ import annotations

import inspect
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from probemon.align import Call, Forward, Placed
from probemon.batching import Batches
from probemon.beams import Beams
from probemon.errors import AlignmentError, ConceptRaised, NotSupportedDecoding, NotSupportedHost
from probemon.generation import Prompt, read_call
from probemon.graphs import Bracket
from probemon.hold import HeldStreamer
from probemon.host import compiled_parts, find_layers, forget_compiled, hidden_size, host_state, is_encoder_decoder
from probemon.ranks import Ranks
from probemon.reading import read_forward
from probemon.record import GAP, Recording
from probemon.running import INSIDE, Generation, States, Thread, Waiting, Watched
from probemon.shadow import shadow
from probemon.tap import Tap
from probemon.types import Gap

# Takes tokens in order, with their hidden states, or with the reason why these were not seen. Returns what is left to be called
# at the end of the forward, where a device scores them meanwhile.
ScoreTokens = Callable[[Generation | None, Recording, Placed, States | str], Callable[[], None] | None]

LOG = logging.getLogger("probemon")
RAISE = 2  # what rank 0 tells the others to do


_ATTACHING = threading.Lock()  # torch numbers hooks without one: two of one number would replace each other


class Watcher:
    """Resolves everything when made, attaches in `with`, leaves nothing behind. Raises `NotSupportedHost`, `ConfigError`."""

    def __init__(
        self, model: Any, sites: list[str], n_probes: int, score: ScoreTokens, *,
        check: Callable[[Prompt], None] = lambda prompt: None, on_gap: Callable[[Gap], None] | None = None,
    ) -> None:  # fmt: skip
        self.model, self.ranks = model, Ranks.of(model)
        self.recordings: list[Recording] = []
        self.forward_seconds: deque[float] = deque(maxlen=10_000)  # spent in our hooks, one entry a forward of the host
        self.open = False
        self._decoder, _ = find_layers(model)
        self._signature = list(inspect.signature(self._decoder.forward).parameters)
        self._sites, self._n_probes, self._score, self._check, self._on_gap = sites, n_probes, score, check, on_gap
        self._scores = self.ranks is None or self.ranks.scores
        self._tap = Tap(model, sites, self._tapped)
        self._bracket = Bracket(self._before, self._after)
        self._width, self._in_parts = hidden_size(model), False
        self._by_cache: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
        self._thread = Thread()
        self._running: list[Generation] = []
        self._stop_next = False  # the next generate() is to end at its first token
        self._n_recordings = self._attaching_thread = 0
        self._batches = Batches(model, lambda call: self._new_recording(call, 0), self._seen_up_to, self._take_stop)
        self._lock = threading.Lock()
        self._stack = ExitStack()

    @property
    def generating(self) -> bool:
        """Whether some thread is inside `generate()`."""
        return bool(self._running) or self._batches.n_calls > 0

    def stop(self) -> None:
        """End every generation that runs, or the next one if none does."""
        with self._lock:
            running = list(self._running)
            for generation in running:
                generation.stop_all = True
            n_requests = self._batches.stop()
            self._stop_next = not running and not n_requests and not self._batches.n_calls

    def _take_stop(self) -> bool:
        """Whether a stop came while nothing ran: it is meant for what begins now."""
        with self._lock:
            taken, self._stop_next = self._stop_next, False
        return taken

    @property
    def batch_errors(self) -> list[BaseException]:
        """Of forwards of a batching manager that the user runs, in a thread where nobody would see them."""
        return self._batches.errors

    def __enter__(self) -> Watcher:
        with _ATTACHING, ExitStack() as stack:
            forget_compiled(self.model)
            self._in_parts = bool(compiled_parts(self.model))
            self._attaching_thread = threading.get_ident()
            self.open = True  # before its shadows are there: another run that leaves takes away those of closed ones
            stack.callback(setattr, self, "open", False)
            stack.callback(forget_compiled, self.model)
            if self._scores:
                # What opens a forward comes last: another thread may be in one meanwhile.
                self._closing = self._decoder.register_forward_hook(self._bracket.unless(self._after))
                stack.callback(self._closing.remove)
                stack.enter_context(self._tap)
                stack.callback(self._decoder.register_forward_pre_hook(self._bracket.unless(self._before), with_kwargs=True).remove)
                self._bracket.shadow(stack, self, self.model, self._decoder)
            if hasattr(self.model, "generate"):
                shadow(stack, self, self.model, "generate", self._generate)
                shadow(stack, self, self.model, "prepare_inputs_for_generation", self._prepare)
                shadow(stack, self, self.model, "_get_stopping_criteria", self._criteria)
                self._batches.shadow(stack, self)
            self._stack = stack.pop_all()
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupportedHost("a watched model holds our hooks, so it cannot be copied, pickled or saved whole: do that outside the with block")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _ATTACHING:
            self.open = False
            self._stack.close()

    # -- one generate() --------------------------------------------------------------------------

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        outer = self._thread.generation
        if outer is not None:
            if not outer.prompt.speculative or outer.acting:
                raise NotSupportedDecoding(
                    "generate() inside generate(), from an action or a criterion: whose tokens a forward shows would be a guess. "
                    "Generate after the first has returned"
                )
            outer.drafting += 1  # the model proposes tokens to itself: nothing of that is in the output
            try:
                return original(*args, **kwargs)
            finally:
                outer.drafting -= 1
                outer.prepared = False
        try:
            prompt = read_call(self.model, args, kwargs)
            self._check(prompt)
        except BaseException:
            if isinstance(kwargs.get("streamer"), HeldStreamer):
                kwargs["streamer"].failed()
            raise
        recording = self._new_recording(Call(prompt.columns, speculative=prompt.speculative), prompt.offset)
        if prompt.n_beams > 1:
            recording.beams = Beams(prompt.n_beams, prompt.columns - prompt.offset)
        generation = self._thread.generation = Generation(recording, prompt)
        INSIDE.models[id(self.model)] += 1
        self._running.append(generation)
        generation.stop_all |= self._take_stop()
        try:
            out = original(*args, **kwargs)
            sequences = getattr(out, "sequences", out)
            self._seen_up_to(recording, sequences, recording.offset, recording.offset + sequences.shape[1] - 1, generation)
        except BaseException:
            for failed in generation.on_failure:
                failed()
            raise
        finally:
            self._finish()
            self._running.remove(generation)
            INSIDE.models[id(self.model)] -= 1
            self._thread.generation, self._thread.shape, self._thread.waiting = None, (), []
            recording.done = True
        recording.output = sequences
        recording.host_after = host_state(self.model)
        return out

    def _prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generation = self._thread.generation
        # A generate() that was running when this run attached: where its prompt ended is unknown, so it is not watched.
        self._thread.foreign = generation is None
        if generation is not None and not generation.drafting:
            mask = "decoder_attention_mask" if is_encoder_decoder(self.model) else "attention_mask"
            generation.prepared = True
            generation.sequence(args[0] if args else kwargs.get("input_ids"), kwargs.get(mask))
        return original(*args, **kwargs)

    def _criteria(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria: StoppingCriteriaList = original(*args, **kwargs)
        generation = self._thread.generation
        if generation is None and not INSIDE.models[id(self.model)]:  # else another run follows it, which was there first
            if threading.get_ident() != self._attaching_thread:  # most likely it was running when this run attached
                LOG.warning("a generate() of another thread began before probemon was attached, and is not watched")
                return criteria
            raise NotSupportedDecoding(
                "this generate() was looked up before probemon was attached, or called on the class, and cannot be followed: "
                "call model.generate(...) inside the with block"
            )
        if generation is None or generation.drafting:
            return criteria
        return Watched(criteria, lambda ids, done, pads: self._sampled(generation, ids, done, pads))

    def _sampled(self, generation: Generation, ids: Tensor, done: Tensor, pads: bool) -> Tensor:
        recording = generation.recording
        self._lost()
        if generation.prompt.speculative:
            if not generation.prepared:  # transformers 5.0 shows the criteria what was drafted before it is run, too
                return done
            generation.prepared = False
            for placed, states in generation.accepted(ids):
                self._hand(generation, recording, placed, states)
            self._finish()
        # Every column but the one just sampled has been run: each forward of the host is counted against the taps.
        self._seen_up_to(recording, ids, recording.offset, recording.offset + ids.shape[1] - 1, generation)
        stopped = self.stopped(done)
        if self.ranks is not None:
            verdict = self.ranks.agree(stopped.to(torch.int32) if generation.raising is None else torch.full_like(stopped, RAISE, dtype=torch.int32))
            stopped = verdict != 0
            if generation.raising is None and bool((verdict == RAISE).any()):
                raise ConceptRaised("an action raised on rank 0, which scores", None)
        if generation.raising is not None:
            raise generation.raising
        done = done | stopped
        if self._scores:
            generation.ended(ids, done, pads)
        return done

    def stopped(self, like: Tensor) -> Tensor:
        """Rows of the calling thread's generation that an action stopped, as a mask like `like [B]`."""
        generation = self._thread.generation
        return torch.zeros_like(like) if generation is None else generation.stopped(like)

    def current(self) -> Generation | None:
        """The generation of the calling thread."""
        return self._thread.generation

    def _seen_up_to(self, recording: Recording, ids: Any, ids_begin: int, end: int, generation: Generation) -> None:
        """Blindness is loud: columns before `end` have passed the taps, or an error (by choice a `Gap`) says not.

        ids `[B, L]` begin at column `ids_begin`.
        """
        call = recording.call
        # Detached meanwhile, by another thread: the host's answer is whole, only ours is not, and run.result says so.
        if not self.open or not self._scores or (call.frontier >= end and call.first_column >= 0):
            return
        given = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids
        if given is None:
            raise AlignmentError(f"a forward begins at column {end}, the taps saw {call.frontier}, and which tokens came between is unknown")
        self._begin(generation, generation.prompt.cached, len(given))
        whose = f"request {recording.request}" if recording.request else "generate()"
        self._blind(
            recording, call.frontier, end - 1,
            f"{whose} is at column {end}, the taps saw {call.frontier}: the host ran forwards past our hooks "
            "(was it compiled before probemon was attached?), so nothing is reported",
            possible=recording.beams is None,
        )  # fmt: skip
        for placed in call.missed(given, ids_begin, end, generation.mask):
            self._hand(generation, self._ready(recording, generation), placed, GAP)

    def _blind(self, recording: Recording, first: int, last: int, reason: str, possible: bool = True) -> None:
        if self._on_gap is None or not possible:
            raise AlignmentError(reason)
        self._on_gap(Gap(recording.number, first, last, reason))

    def _new_recording(self, call: Call, offset: int) -> Recording:
        recording = Recording(call, offset, self._n_probes, host=host_state(self.model))
        with self._lock:
            recording.number, self._n_recordings = self._n_recordings, self._n_recordings + 1
            self.recordings.append(recording)
        return recording

    # -- one forward -----------------------------------------------------------------------------

    def _before(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        begin = time.perf_counter()
        mine = self._thread
        self._finish()
        if mine.generation is not None:
            self._lost()  # of the forward before this one
        mine.recording, mine.waiting, mine.shape = None, [], ()
        generation, foreign, mine.foreign = mine.generation, mine.foreign, False
        # Without kwargs, torch has half registered this hook, in another thread. What only another run follows is not a document.
        if kwargs is None or foreign or (generation is None and INSIDE.models[id(self.model)]) or (generation is not None and generation.drafting):
            return
        given = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        if given.get("cu_seq_lens_q") is not None:
            with self._batches.reporting():
                packed = self._batches.place(given)
            mine.waiting = [Waiting(generation, self._ready(generation.recording, generation), placed) for generation, placed in packed]
            mine.shape = tuple(given["input_ids"].shape)
            mine.seconds = time.perf_counter() - begin
            if self._closing.id not in self._decoder._forward_hooks:
                self._lost()
            return
        forward, cache = read_forward(given, generation)
        if generation is None:
            recording = self._document(forward, cache)
        else:
            recording = self._begin(generation, min(generation.prompt.cached, forward.start), len(forward.ids))
            generation.check_ids(forward)
            if forward.start > recording.call.frontier:
                self._seen_up_to(recording, generation.ids, generation.begin, forward.start, generation)
        placed = recording.call.place(forward)
        self._ready(recording, generation)
        if generation is not None and recording.beams is not None:
            placed = [generation.beam_tokens(part) for part in placed]
        mine.waiting = [Waiting(generation, recording, part) for part in placed]
        mine.recording, mine.shape = recording, forward.ids.shape
        if self._in_parts or self._bracket.is_open:
            self._tap.buffers.make_room(mine.shape, self._width)
        if cache is not None:
            self._by_cache[cache] = recording
        mine.seconds = time.perf_counter() - begin
        if self._closing.id not in self._decoder._forward_hooks:  # nothing would tell us that this forward ended
            self._lost()

    def _begin(self, generation: Generation, column: int, n_rows: int) -> Recording:
        """Before the first thing that is known of a generation, whose columns before `column` are of earlier turns."""
        recording = generation.recording
        if recording.call.first_column < 0:
            recording.call.begin(column, n_rows)
            if column > 0:
                recording.earlier = self._known(generation.prompt.cache, n_rows)
        return recording

    def _ready(self, recording: Recording, generation: Generation | None) -> Recording:
        if recording.retained is None:
            recording.retained = np.zeros((recording.call.n_rows, self._n_probes), dtype=bool)
        if generation is not None and not len(generation.stop):
            generation.stop = np.zeros(recording.call.n_rows, dtype=bool)
        return recording

    def _document(self, forward: Forward, cache: Any) -> Recording:
        """The recording a plain forward goes on with: that of its cache if it continues exactly there, else a new one."""
        known = self._known(cache, len(forward.ids))
        if known is not None and known.call.prompt_columns is None and known.call.frontier == forward.start > 0:
            if not any(recording is known for recording in self.recordings):  # all of it had been forgotten
                self.recordings.append(known)
            return known
        document = self._new_recording(Call(None), 0)
        document.done = True  # for all that is known: another forward may go on with it
        document.earlier = known if forward.start > 0 else None
        return document

    def _known(self, cache: Any, n_rows: int) -> Recording | None:
        known = None if cache is None else self._by_cache.get(cache)
        return known if known is not None and known.call.n_rows == n_rows else None

    def _tapped(self, site: str, hidden: Tensor) -> None:
        mine = self._thread
        # No forward is open when a layer runs by itself (gradient checkpointing runs it again): not a new token.
        if not mine.shape:
            return
        begin = time.perf_counter()
        with self._batches.reporting() if mine.recording is None else nullcontext():
            if hidden.dim() != 3 or tuple(hidden.shape[:2]) != mine.shape:
                raise NotSupportedHost(
                    f"{site} gives {tuple(hidden.shape)} for a forward of {mine.shape[0]} rows and {mine.shape[1]} tokens, expected "
                    "[rows, tokens, hidden size]: which state is whose is unknown"
                )
            for one in mine.waiting:
                if hidden.shape[1] == 1 and len(one.placed) == len(hidden):  # a token of every row
                    one.states[site] = hidden[:, 0].clone()  # a copy: the host may reuse its memory
                    continue
                rows, offsets = (torch.from_numpy(x).to(hidden.device) for x in (one.placed.rows, one.placed.offsets))
                one.states[site] = hidden[rows, offsets]
            if all(len(one.states) == len(self._sites) for one in mine.waiting):
                self._hand_on()
        mine.seconds += time.perf_counter() - begin

    def _hand_on(self, unseen: str = "") -> None:
        """The tokens of this forward with their states, or why there are none, to be scored; drafts wait."""
        mine = self._thread
        for one in mine.waiting:
            if one.placed.draft and one.generation is not None:
                one.generation.drafts.append((one.placed, unseen or one.states))
            else:
                self._hand(one.generation, one.recording, one.placed, unseen or one.states)
            if one.generation is not None and one.generation.end is not None:  # continuous batching has no criteria to stop at
                self._finish()
                if one.generation.raising is not None:
                    raise one.generation.raising
                if one.generation.stopping:
                    one.generation.end()
        mine.waiting = []

    def _hand(self, generation: Generation | None, recording: Recording, placed: Placed, states: States | str) -> None:
        self._finish()  # its retained sets are what this one begins with
        self._thread.unfinished = self._score(generation, recording, placed, states)

    def _finish(self) -> None:
        """Wait for the step that is under way, if there is one."""
        unfinished, self._thread.unfinished = self._thread.unfinished, None
        if unfinished is not None:
            unfinished()

    def _lost(self) -> None:
        """The forward that was open has ended, or will end unnoticed, and some of its tokens were not seen at every site."""
        mine = self._thread
        if not self.open:  # detached meanwhile, by another thread
            mine.waiting = []
        if not mine.waiting:
            return
        waiting, missing = mine.waiting, [site for site in self._sites if site not in mine.waiting[0].states]
        mine.shape = ()
        with self._batches.reporting() if mine.recording is None else nullcontext():
            mine.waiting = []  # told once, also where that raises
            for one in waiting:
                columns = one.placed.columns
                if not len(columns):  # padding alone
                    continue
                self._blind(
                    one.recording, int(columns.min()), int(columns.max()),
                    f"a forward of the host ended without reaching {missing}: our hook was removed, or the layer was skipped or compiled",
                )  # fmt: skip
        mine.waiting = waiting
        self._hand_on(f"the host did not run through {', '.join(missing)}")

    def _after(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        mine = self._thread
        if not mine.shape:
            return
        for site, hidden in self._tap.buffers.written():
            self._tapped(site, hidden)
        self._lost()
        begin = time.perf_counter()
        self._finish()
        mine.seconds += time.perf_counter() - begin
        cache = getattr(output, "past_key_values", None)
        if cache is not None and mine.recording is not None:
            self._by_cache[cache] = mine.recording
        mine.recording, mine.shape = None, ()
        self.forward_seconds.append(mine.seconds)
