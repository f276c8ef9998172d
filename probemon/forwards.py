"""Forwards: the hooks on one host's decoder, which recording each forward belongs to, and that none escapes.

    forwards = Forwards(model, sites, n_probes, score)      # score(generation, recording, placed, states): called in order
    with ExitStack() as stack:
        forwards.attach(stack)
        model(input_ids)                                    # forwards.recordings grows

Before the decoder runs, the tokens of the forward are placed; at each tapped layer their hidden states are copied out, and
handed on at the last one; after the decoder, a forward that escaped a tap is an error. State is kept per thread.
"""

from __future__ import annotations

import inspect
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.abilities import Abilities
from probemon.align import Call, Forward, Placed
from probemon.batching import Batches
from probemon.errors import AlignmentError, NotSupportedHost
from probemon.graphs import Bracket
from probemon.host import compiled_parts, find_layers, forget_compiled, hidden_size, host_state, rehearsal
from probemon.reading import read_forward
from probemon.record import GAP, Recording
from probemon.running import INSIDE, Generation, States, Thread, Waiting
from probemon.tap import Site, Tap
from probemon.types import Gap

# Takes tokens in order, with their hidden states, or with the reason why these were not seen. Returns what is left to be called
# at the end of the forward, where a device scores them meanwhile.
ScoreTokens = Callable[[Generation | None, Recording, Placed, States | str], Callable[[], None] | None]


class Forwards:
    """Resolves everything when made. `open` while it is attached. Raises `NotSupportedHost`, `ConfigError`."""

    def __init__(
        self, model: Any, sites: Sequence[str | Site], n_probes: int, score: ScoreTokens, *,
        scores: bool = True, on_gap: Callable[[Gap], None] | None = None, take_stop: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.model, self.scores, self.open = model, scores, False  # scores: of several ranks only one does
        self.recordings: list[Recording] = []
        self.seconds: deque[float] = deque(maxlen=10_000)  # spent in our hooks, one entry a forward of the host
        self.decoder, _ = find_layers(model)
        self._signature = list(inspect.signature(self.decoder.forward).parameters)
        self._sites, self._n_probes, self._score, self._on_gap = [str(site) for site in sites], n_probes, score, on_gap
        self._tap = Tap(model, sites, self._tapped)
        self._rehearses = rehearsal(model)
        self.abilities = Abilities(model)
        self.abilities.check_streams(sites)
        self._bracket = Bracket(self._before, self._after, self._tap.buffers.abandon)
        self._width, self._in_parts = hidden_size(model), False
        self.by_cache: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
        self.thread = Thread()
        self.batches = Batches(model, lambda call: self.new_recording(call, 0), self.seen_up_to, take_stop)
        self._n_recordings = 0
        self._lock = threading.Lock()

    def attach(self, stack: ExitStack) -> None:
        """Put the hooks on until `stack` closes."""
        if torch._dynamo.config.skip_nnmodule_hook_guards:  # then it would run a graph again that was made without our hooks
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            torch._dynamo.reset()
        forget_compiled(self.model)
        self._in_parts = bool(compiled_parts(self.model))
        self.open = True  # before its shadows are there: another run that leaves takes away those of closed ones
        stack.callback(setattr, self, "open", False)
        stack.callback(forget_compiled, self.model)
        if self.scores:
            # What opens a forward comes last: another thread may be in one meanwhile.
            self._closing = self.decoder.register_forward_hook(self._bracket.unless(self._after))
            stack.callback(self._closing.remove)
            stack.enter_context(self._tap)
            stack.callback(self.decoder.register_forward_pre_hook(self._bracket.unless(self._before), with_kwargs=True).remove)
            self._bracket.shadow(stack, self, self.model, self.decoder)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupportedHost("a watched model holds our hooks, so it cannot be copied, pickled or saved whole: do that outside the with block")

    def seen_up_to(self, recording: Recording, ids: Any, ids_begin: int, end: int, generation: Generation) -> None:
        """Blindness is loud: columns before `end` have passed the taps, or an error (by choice a `Gap`) says not.

        ids `[B, L]` begin at column `ids_begin`.
        """
        call = recording.call
        # Detached meanwhile, by another thread: the host's answer is whole, only ours is not, and run.result says so.
        if not self.open or not self.scores or (call.frontier >= end and call.first_column >= 0):
            return
        given = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids
        if given is None:
            raise AlignmentError(f"a forward begins at column {end}, the taps saw {call.frontier}, and which tokens came between is unknown")
        self.begin(generation, generation.prompt.cached, len(given))
        whose = f"request {recording.request}" if recording.request else "generate()"
        self._blind(
            recording, call.frontier, end - 1,
            f"{whose} is at column {end}, the taps saw {call.frontier}: the host ran forwards past our hooks "
            "(was it compiled before probemon was attached?), so nothing is reported",
            possible=recording.beams is None,
        )  # fmt: skip
        for placed in call.missed(given, ids_begin, end, generation.mask):
            self.hand(generation, self._ready(recording, generation), placed, GAP)

    def _blind(self, recording: Recording, first: int, last: int, reason: str, possible: bool = True) -> None:
        if self._on_gap is None or not possible:
            raise AlignmentError(reason)
        self._on_gap(Gap(recording.number, first, last, reason))

    def new_recording(self, call: Call, offset: int) -> Recording:
        recording = Recording(call, offset, self._n_probes, host=host_state(self.model))
        with self._lock:
            recording.number, self._n_recordings = self._n_recordings, self._n_recordings + 1
            self.recordings.append(recording)
        return recording

    # -- one forward -----------------------------------------------------------------------------

    def _before(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        begin = time.perf_counter()
        mine = self.thread
        self.finish()
        if mine.generation is not None:
            self.lost()  # of the forward before this one
        mine.recording, mine.waiting, mine.shape = None, [], ()
        early, mine.early = mine.early, {}
        if self._rehearses():
            return
        generation, foreign, mine.foreign = mine.generation, mine.foreign, False
        # Without kwargs, torch has half registered this hook, in another thread. What only another run follows is not a document.
        if kwargs is None or foreign or (generation is None and INSIDE.models[id(self.model)]) or (generation is not None and generation.drafting):
            return
        given = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        if given.get("cu_seq_lens_q") is not None:
            with self.batches.reporting():
                packed = self.batches.place(given)
            mine.waiting = [Waiting(generation, self._ready(generation.recording, generation), placed) for generation, placed in packed]
            mine.shape = tuple(given["input_ids"].shape)
            mine.seconds = time.perf_counter() - begin
            if self._closing.id not in self.decoder._forward_hooks:
                self.lost()
            return
        forward, cache = read_forward(given, generation)
        if generation is None and forward.start > 0:
            self.abilities.check_forward(several=forward.ids.shape[1] > 1, positions=given.get("position_ids") is not None, length=forward.start + forward.ids.shape[1])
        if generation is None:
            recording = self._document(forward, cache)
        else:
            recording = self.begin(generation, min(generation.prompt.cached, forward.start), len(forward.ids))
            generation.check_ids(forward)
            if forward.start > recording.call.frontier:
                self.seen_up_to(recording, generation.ids, generation.begin, forward.start, generation)
        placed = recording.call.place(forward)
        self._ready(recording, generation)
        if generation is not None and recording.beams is not None:
            placed = [generation.beam_tokens(part) for part in placed]
        mine.waiting = [Waiting(generation, recording, part) for part in placed]
        mine.recording, mine.shape = recording, forward.ids.shape
        if self._in_parts or self._bracket.is_open:
            self._tap.buffers.make_room(mine.shape, self._width)
        if cache is not None:
            self.by_cache[cache] = recording
        mine.seconds = time.perf_counter() - begin
        for site, states in early.items():
            self._tapped(site, states)
        if self._closing.id not in self.decoder._forward_hooks:  # nothing would tell us that this forward ended
            self.lost()

    def begin(self, generation: Generation, column: int, n_rows: int) -> Recording:
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
        document = self.new_recording(Call(None), 0)
        document.done = True  # for all that is known: another forward may go on with it
        document.earlier = known if forward.start > 0 else None
        return document

    def _known(self, cache: Any, n_rows: int) -> Recording | None:
        known = None if cache is None else self.by_cache.get(cache)
        return known if known is not None and known.call.n_rows == n_rows else None

    def _tapped(self, site: str, hidden: Tensor) -> None:
        mine = self.thread
        own = self._tap.own.get(site)
        # No forward is open when a layer runs by itself (gradient checkpointing runs it again): not a new token.
        if not mine.shape:
            if own is not None and own.early:
                mine.early[site] = hidden
            return
        begin = time.perf_counter()
        with self.batches.reporting() if mine.recording is None else nullcontext():
            if own is not None and own.flat and hidden.shape[:2] == (1, mine.shape[0] * mine.shape[1]):
                hidden = hidden.reshape(*mine.shape, -1)
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
        mine = self.thread
        for one in mine.waiting:
            if one.placed.draft and one.generation is not None:
                one.generation.drafts.append((one.placed, unseen or one.states))
            else:
                self.hand(one.generation, one.recording, one.placed, unseen or one.states)
            if one.generation is not None and one.generation.end is not None:  # continuous batching has no criteria to stop at
                self.finish()
                if one.generation.raising is not None:
                    raise one.generation.raising
                if one.generation.stopping:
                    one.generation.end()
        mine.waiting = []

    def hand(self, generation: Generation | None, recording: Recording, placed: Placed, states: States | str) -> None:
        self.finish()  # its retained sets are what this one begins with
        self.thread.unfinished = self._score(generation, recording, placed, states)

    def finish(self) -> None:
        """Wait for the step that is under way, if there is one."""
        unfinished, self.thread.unfinished = self.thread.unfinished, None
        if unfinished is not None:
            unfinished()

    def leave(self) -> None:
        """The calling thread's generation has ended, however it did."""
        mine = self.thread
        mine.generation, mine.shape, mine.waiting = None, (), []
        self._tap.buffers.abandon()

    def lost(self) -> None:
        """The forward that was open has ended, or will end unnoticed, and some of its tokens were not seen at every site."""
        mine = self.thread
        if not self.open:  # detached meanwhile, by another thread
            mine.waiting = []
        if not mine.waiting:
            return
        waiting, missing = mine.waiting, [site for site in self._sites if site not in mine.waiting[0].states]
        mine.shape = ()
        with self.batches.reporting() if mine.recording is None else nullcontext():
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
        mine = self.thread
        if not mine.shape:
            return
        for site, hidden in self._tap.buffers.written():
            self._tapped(site, hidden)
        self.lost()
        begin = time.perf_counter()
        self.finish()
        mine.seconds += time.perf_counter() - begin
        cache = getattr(output, "past_key_values", None)
        if cache is not None and mine.recording is not None:
            self.by_cache[cache] = mine.recording
        mine.recording, mine.shape = None, ()
        self.seconds.append(mine.seconds)
