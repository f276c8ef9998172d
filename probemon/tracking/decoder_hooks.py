"""DecoderHooks: the hooks on one host's decoder, which recording each forward belongs to, and that none escapes.

    hooks = DecoderHooks(model, sites, n_probes, score)  # score(generation, recording, placed, states): called in order
    with ExitStack() as stack:
        hooks.attach(stack)
        model(input_ids)                                    # hooks.recordings grows

Before the decoder runs, the tokens of the forward are placed; at each tapped layer their hidden states are copied out,
and handed on at the last one; after the decoder, a forward that escaped a tap is an error. State is kept per thread.
"""

from __future__ import annotations

import inspect
import logging
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

from probemon.core.scores import Gap
from probemon.errors import AlignmentError, NotSupportedDecoding, NotSupportedHost
from probemon.host.abilities import Abilities
from probemon.host.adapters import rehearsal
from probemon.host.compiled import Bracket
from probemon.host.model import compiled_parts, find_layers, forget_compiled, hidden_size, host_state
from probemon.host.tap import Site, Tap, check_states, ran_again
from probemon.tracking.align import Forward, Ints, PlacedTokens, SequenceColumns
from probemon.tracking.continuous_batching import ContinuousBatches
from probemon.tracking.copied_caches import same_columns
from probemon.tracking.forward_call import read_forward
from probemon.tracking.generation import FOLLOWING, ORDER, Generation, PendingTokens, States, ThreadState
from probemon.tracking.hand_loop import generate_around
from probemon.tracking.recording import GAP, Recording

LOG = logging.getLogger("probemon")

# Takes tokens in order, with their hidden states, or with the reason why these were not seen. Returns what reports
# their scores, to be called at the end of the forward: with False where they turned out not to be the tokens' and are
# to be thrown away.
Report = Callable[[bool], None]
ScoreTokens = Callable[[Generation | None, Recording, PlacedTokens, States | str], Report | None]


class DecoderHooks:
    """Resolves everything when made. `open` while it is attached. Raises `NotSupportedHost`, `ConfigError`.

    `acts()`: whether something waits for generated tokens (rules, sinks), so that a loop that is not followed is an
    error.
    """

    def __init__(
        self,
        model: Any,
        sites: Sequence[str | Site],
        n_probes: int,
        score: ScoreTokens,
        *,
        scores: bool = True,
        on_gap: Callable[[Gap], None] | None = None,
        take_stop: Callable[[], bool] = lambda: False,
        acts: Callable[[], bool] = lambda: False,
    ) -> None:
        self.model, self.scores, self.open = model, scores, False  # scores: of several ranks only one does
        self.recordings: list[Recording] = []
        self.seconds: deque[float] = deque(maxlen=10_000)  # spent in our hooks, one entry a forward of the host
        self.decoder, _ = find_layers(model)
        self._signature = list(inspect.signature(self.decoder.forward).parameters)
        self._sites, self._n_probes, self._score, self._on_gap = [str(site) for site in sites], n_probes, score, on_gap
        self._acts = acts
        self._tap = Tap(model, sites, self._tapped)
        self._rehearses = rehearsal(model)
        self.abilities = Abilities(model)
        self.abilities.check_streams(sites)
        self._bracket = Bracket(self._before, self._after, self._tap.buffers.abandon)
        self._width, self._in_parts = hidden_size(model), False
        self.by_cache: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
        self.thread = ThreadState()
        self.batches = ContinuousBatches(model, self.new_recording, self.seen_up_to, take_stop)
        self._n_recordings = 0
        self.documents: set[int] = set()  # numbers of those that no generation went on from
        self._shown: deque[Ints] = deque(maxlen=8)  # ids of the newest plain forwards
        self._attached_at = 0
        self._told_outside, self.called = False, False  # called: a forward, or generate(), of this very model
        self._lock = threading.Lock()

    def attach(self, stack: ExitStack) -> None:
        """Put the hooks on until `stack` closes."""
        if (
            torch._dynamo.config.skip_nnmodule_hook_guards
        ):  # then it would run a graph again that was made without our hooks
            torch._dynamo.config.skip_nnmodule_hook_guards = False
            torch._dynamo.reset()
        forget_compiled(self.model)
        self._in_parts = bool(compiled_parts(self.model))
        self._attached_at = next(ORDER)
        self.open = True  # before its shadows are there: another run that leaves takes away those of closed ones
        stack.callback(setattr, self, "open", False)
        stack.callback(forget_compiled, self.model)
        if self.scores:
            # What opens a forward comes last: another thread may be in one meanwhile.
            self._closing = self.decoder.register_forward_hook(self._bracket.unless(self._after))
            stack.callback(self._closing.remove)
            stack.enter_context(self._tap)
            if self.model is not self.decoder and self.abilities.drops_mask():
                stack.callback(self.model.register_forward_pre_hook(_refuse_padding, with_kwargs=True).remove)
            stack.callback(
                self.decoder.register_forward_pre_hook(self._bracket.unless(self._before), with_kwargs=True).remove
            )
            self._bracket.shadow(stack, self, self.model, self.decoder)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotSupportedHost(
            "a watched model holds our hooks, so it cannot be copied, pickled or saved whole: do that outside the with"
            " block"
        )

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
            raise AlignmentError(
                f"a forward begins at column {end}, the taps saw {call.frontier}, and which tokens came between is"
                " unknown"
            )
        self.begin(generation, generation.prompt.cached, len(given))
        whose = f"request {recording.request}" if recording.request else "generate()"
        self._blind(
            recording,
            call.frontier,
            end - 1,
            f"{whose} is at column {end}, the taps saw {call.frontier}: the host ran forwards past our hooks "
            "(was it compiled before probemon was attached?), so nothing is reported",
            possible=recording.beams is None,
        )
        for placed in call.missed(given, ids_begin, end, generation.mask):
            self.hand(generation, recording, placed, GAP)

    def _blind(self, recording: Recording, first: int, last: int, reason: str, possible: bool = True) -> None:
        if self._on_gap is None or not possible:
            raise AlignmentError(reason)
        self._on_gap(Gap(recording.number, first, last, reason))

    def new_recording(self, call: SequenceColumns, offset: int = 0, **attributes: Any) -> Recording:
        """Make the next recording of the run; `attributes`: others of a `Recording` that are known by now."""
        host = host_state(self.model)
        with self._lock:
            recording = Recording(call, offset, self._n_probes, host=host, number=self._n_recordings, **attributes)
            self._n_recordings += 1
            self.recordings.append(recording)
        return recording

    # -- one forward -----------------------------------------------------------------------------

    def _before(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        begin = time.perf_counter()
        mine = self.thread
        mine.inside = self.called = True
        self.finish()
        if mine.generation is not None:
            self.ended()  # of the forward before this one
            self.finish()
        mine.open_recording, mine.waiting, mine.shape, mine.ran = None, [], (), set()
        early, mine.early = mine.early, {}
        if self._rehearses():
            return
        generation, foreign, mine.foreign = mine.generation, mine.foreign, False
        # Without kwargs, torch has half registered this hook, in another thread. What only another run follows is not a
        # document.
        if kwargs is None or foreign or (generation is not None and generation.drafting):
            return
        if generation is None and FOLLOWING.models[id(self.model)]:
            if self._acts() and FOLLOWING.begun[id(self.model)] > self._attached_at:
                raise NotSupportedDecoding(
                    "another run follows this generation, and this one does not, so its rules would never fire and its"
                    " sinks hear nothing: look generate() up after both are attached, and open run.generating of both"
                    " for a loop by hand"
                )
            return
        given = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        if given.get("cu_seq_lens_q") is not None:
            with self.batches.reporting():
                packed = self.batches.place(given)
            mine.waiting = [PendingTokens(generation, generation.recording, placed) for generation, placed in packed]
            mine.shape = tuple(given["input_ids"].shape)
            mine.seconds = time.perf_counter() - begin
            if self._closing.id not in self.decoder._forward_hooks:
                self.ended()
            return
        forward, cache = read_forward(given, generation)
        if generation is None and self._of_another_head(forward, cache):
            return
        if generation is None or generation.by_hand:
            n_tokens, mask = forward.ids.shape[1], "" if given.get("attention_mask") is None else "masked"
            if (
                forward.mask is not None
                and (np.diff(forward.mask[:, : forward.start + n_tokens].astype(np.int8), axis=1) > 0).any()
            ):
                mask = "padded"
            self.abilities.check_forward(
                used=forward.start > 0,
                several=n_tokens > 1,
                positions=given.get("position_ids") is not None,
                mask=mask,
                length=forward.start + n_tokens,
            )
        if generation is None:
            recording = self._document(forward, cache)
        else:
            if generation.by_hand and generation.recording.call.first_column < 0:
                generation.begin_on(cache, forward.start)
            recording = self.begin(generation, min(generation.prompt.cached, forward.start), len(forward.ids))
            generation.check_ids(forward)
            if forward.start > recording.call.frontier:
                self.seen_up_to(recording, generation.ids, generation.begin, forward.start, generation)
        placed = recording.call.place(forward)
        if generation is not None and recording.beams is not None:
            placed = [generation.beam_tokens(part) for part in placed]
        mine.waiting = [PendingTokens(generation, recording, part) for part in placed]
        mine.open_recording, mine.shape = recording, forward.ids.shape
        if self._in_parts or self._bracket.is_open:
            self._tap.buffers.make_room(mine.shape, self._width)
        if cache is not None:
            self.by_cache[cache] = recording
        mine.seconds = time.perf_counter() - begin
        for site, states in early.items():
            self._tapped(site, states)
        if self._closing.id not in self.decoder._forward_hooks:  # nothing would tell us that this forward ended
            self.ended()

    def begin(self, generation: Generation, column: int, n_rows: int) -> Recording:
        """Before the first thing that is known of a generation, whose columns before `column` are of earlier turns."""
        recording = generation.recording
        if recording.call.first_column < 0:
            earlier = self._known(generation.prompt.cache, n_rows, column)
            recording.begin(column, n_rows, earlier)
            while earlier is not None:  # a prefix that was read for this generation
                self.documents.discard(earlier.number)
                earlier = earlier.earlier
        return recording

    def _document(self, forward: Forward, cache: Any) -> Recording:
        """The recording a plain forward goes on with: that of its cache if it continues exactly there, else a
        new one.
        """
        known = self._known(cache, len(forward.ids), forward.start)
        if self._acts() and self._decodes(forward):
            raise NotSupportedDecoding(
                "a plain forward runs one more token of a sequence, as a decode loop by hand does, and nothing says"
                " that it was generated: rules would never fire and sinks be told of a prompt. Put the loop into `with"
                " run.generating(from_column=...) as loop:` and tell it what was sampled"
            )
        if known is not None and known.call.prompt_columns is None and known.call.frontier == forward.start > 0:
            if not any(recording is known for recording in self.recordings):  # all of it had been forgotten
                self.recordings.append(known)
            return known
        # done, for all that is known: another forward may go on with it
        document = self.new_recording(SequenceColumns(None), earlier=known, done=True)
        self.documents.add(document.number)
        return document

    def _of_another_head(self, forward: Forward, cache: Any) -> bool:
        """Whether a plain forward is of a `generate()` that was under way when we came. Of any other that cannot be
        followed it is an error.
        """
        mine, around = self.thread, generate_around(self.decoder)
        if around is None:
            mine.under_way = None
            return False
        frame, owner = around
        if frame is not mine.under_way:
            # One that begins shows its prompt first; what is first seen at a later token of a cache that we do not know
            # had begun.
            if (
                forward.start == 0
                or forward.ids.shape[1] > 1
                or self._known(cache, len(forward.ids), forward.start) is not None
            ):
                raise NotSupportedDecoding(
                    f"generate() of {type(owner).__name__} runs the decoder that is watched, but this run is attached"
                    f" to {type(self.model).__name__}: which tokens are generated, and where rows end, is unknown here,"
                    " and rules would never fire. Attach to the very model whose generate() is called"
                )
            LOG.warning(
                "a generate() of %s began before probemon was attached to its decoder, and is not watched",
                type(owner).__name__,
            )
            mine.under_way = frame
        return True

    def _decodes(self, forward: Forward) -> bool:
        """Whether a plain forward looks like a step of a decode loop: one column after those of a cache, or of a
        forward not long before it.
        """
        if forward.start > 0:
            return forward.ids.shape[1] == 1
        decodes = any(_goes_on(forward.ids, before) for before in self._shown)
        self._shown.append(forward.ids)
        return decodes

    def _known(self, cache: Any, n_rows: int, n_columns: int) -> Recording | None:
        """The recording that a cache of so many columns, all or some of which it may have seen being run, is of."""
        if cache is None or n_columns == 0:
            return None
        known = self.by_cache.get(cache)
        if known is None:
            seen = (
                reference() for reference in reversed(self.by_cache.keyrefs())
            )  # a list: other threads may add to it meanwhile
            known = next(
                (
                    self.by_cache.get(other)
                    for other in seen
                    if other is not None and same_columns(cache, other, n_columns)
                ),
                None,
            )
        return known if known is not None and known.call.n_rows == n_rows else None

    def _tapped(self, site: str, hidden: Tensor) -> None:
        mine = self.thread
        own = self._tap.own.get(site)
        if not mine.shape:
            if own is not None and own.early:
                mine.early[site] = hidden
            elif own is None and not mine.inside:
                self._ran_outside(site)
            return
        begin = time.perf_counter()
        with self.batches.reporting() if mine.open_recording is None else nullcontext():
            if site in mine.ran:
                self._forget_forward()
                raise AlignmentError(ran_again(site))
            mine.ran.add(site)
            if own is not None and own.flat and hidden.shape[:2] == (1, mine.shape[0] * mine.shape[1]):
                hidden = hidden.reshape(*mine.shape, -1)
            try:
                check_states(site, hidden, mine.shape, self._width if own is None else own.width, floats=own is None)
            except NotSupportedHost:
                self._forget_forward()
                raise
            for one in mine.waiting:
                if hidden.shape[1] == 1 and len(one.placed) == len(hidden):  # a token of every row
                    one.states[site] = hidden[:, 0].clone()  # a copy: the host may reuse its memory
                    continue
                rows, offsets = (torch.from_numpy(x).to(hidden.device) for x in (one.placed.rows, one.placed.offsets))
                one.states[site] = hidden[rows, offsets]
            # A device may begin now, beside the layers that are left. What it finds is reported once the forward has
            # ended, since only then it is known that each site ran once; several batches of tokens begin with one
            # another's retained sets.
            if mine.open_recording is not None and len(mine.waiting) == 1 and self._complete():
                self._hand_on()
        mine.seconds += time.perf_counter() - begin

    def _ran_outside(self, site: str) -> None:
        """A layer ran, and no forward of the decoder is open."""
        if self.thread.generation is not None or self.batches.open:  # what they sample says which tokens were not seen
            return
        if (
            torch._C._current_graph_task_id() != -1
        ):  # a backward pass, in which gradient checkpointing runs layers again: no new token
            return
        what = (
            f"the layer of {site} ran outside of a forward of {type(self.decoder).__name__}, and its tokens are not"
            " watched: something calls .forward() of the decoder, or another model has the same layers. Call the model"
            " itself, and attach to the one that is called"
        )
        if self._acts():
            raise NotSupportedDecoding(f"{what}. Rules would never fire and sinks hear nothing")
        if not self._told_outside:
            self._told_outside = True
            LOG.warning(what)

    def _complete(self) -> bool:
        """Whether the tokens that wait have been seen at every site."""
        return all(len(one.states) == len(self._sites) for one in self.thread.waiting)

    def _forget_forward(self) -> None:
        """Of the open forward nothing is reported."""
        mine = self.thread
        mine.shape, mine.waiting = (), []
        self.finish(report=False)

    def _hand_on(self, unseen: str = "") -> None:
        """The tokens of this forward with their states, or why there are none, to be scored; drafts wait."""
        mine = self.thread
        for one in mine.waiting:
            if one.placed.draft and one.generation is not None:
                one.generation.drafts.append((one.placed, unseen or one.states))
            else:
                self.hand(one.generation, one.recording, one.placed, unseen or one.states)
            if (
                one.generation is not None and one.generation.end is not None
            ):  # continuous batching has no criteria to stop at
                self.finish()
                one.generation.end_request()
        mine.waiting = []

    def hand(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> None:
        self.finish()  # its retained sets are what this one begins with
        self.thread.unfinished = self._score(generation, recording, placed, states)

    def finish(self, report: bool = True) -> None:
        """Wait for the scores that are under way, if there are any, and report them."""
        unfinished, self.thread.unfinished = self.thread.unfinished, None
        if unfinished is not None:
            unfinished(report)

    def leave(self) -> None:
        """The calling thread's generation has ended, however it did."""
        mine = self.thread
        mine.generation, mine.shape, mine.waiting, mine.ran = None, (), [], set()
        self._tap.buffers.abandon()

    def ended(self) -> None:
        """The forward that was open has ended, or will end unnoticed: its tokens are handed on, or were not seen at
        every site.
        """
        mine = self.thread
        if not self.open:  # detached meanwhile, by another thread
            mine.waiting = []
        if not mine.waiting:
            return
        mine.shape = ()
        with self.batches.reporting() if mine.open_recording is None else nullcontext():
            if self._complete():
                self._hand_on()
                return
            waiting, missing = mine.waiting, [site for site in self._sites if site not in mine.waiting[0].states]
            mine.waiting = []  # told once, also where that raises
            for one in waiting:
                columns = one.placed.columns
                if not len(columns):  # padding alone
                    continue
                self._blind(
                    one.recording,
                    int(columns.min()),
                    int(columns.max()),
                    f"a forward of the host ended without reaching {missing}: our hook was removed, or the layer was"
                    " skipped or compiled",
                )
        mine.waiting = waiting
        self._hand_on(f"the host did not run through {', '.join(missing)}")

    def _after(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        mine = self.thread
        mine.inside = False
        if not mine.shape:
            return
        for site, hidden in self._tap.buffers.written():
            self._tapped(site, hidden)
        begin = time.perf_counter()
        self.ended()
        self.finish()
        mine.seconds += time.perf_counter() - begin
        cache = getattr(output, "past_key_values", None)
        if cache is not None and mine.open_recording is not None:
            self.by_cache[cache] = mine.open_recording
        mine.open_recording, mine.shape = None, ()
        self.seconds.append(mine.seconds)


def _refuse_padding(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Before a host whose decoder is not told of a mask: what it hides would be read, and scored, as tokens."""
    given = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and not bool((mask != 0).all()):
        raise NotSupportedDecoding(
            f"{type(model).__name__} does not give an attention mask on to its decoder, which would read padding as"
            " tokens: its own answer is wrong, and so would be ours. Give rows of one length, or one by one"
        )


def _goes_on(ids: Ints, before: Ints) -> bool:
    """Whether ids `[B, T]` are others and one column more, or the same number of columns, moved on by one."""
    if len(ids) != len(before) or ids.shape[1] < 2:
        return False
    if ids.shape[1] == before.shape[1] + 1:
        return np.array_equal(ids[:, :-1], before)
    moved_on = ids.shape == before.shape and np.array_equal(ids[:, :-1], before[:, 1:])
    return moved_on and not np.array_equal(ids, before)  # a document of one token repeated, read twice
