"""DecoderHooks: hooks on a decoder that assign forwards to recordings.

    hooks = DecoderHooks(model, sites, n_probes, score)  # score(generation, recording, placed, states)
    with ExitStack() as stack:
        hooks.attach(stack)
        model(input_ids)                                    # hooks.recordings.kept grows

A forward that bypasses a tap is an error. State is per thread.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.scores import PROMPT, Gap
from probemon.errors import AlignmentError, UnsupportedDecoding, UnsupportedModel
from probemon.host.abilities import Abilities
from probemon.host.adapters import rehearsal
from probemon.host.cache import filled_cache
from probemon.host.compiled import Bracket
from probemon.host.internals import cache_among, forget_hook_free_graphs
from probemon.host.model import compiled_parts, find_layers, forget_compiled, hidden_size
from probemon.host.placed_hooks import PlacedHook
from probemon.host.site import Site
from probemon.host.tap import Tap, check_states, ran_again
from probemon.tracking.align import DecoderForward, PlacedTokens
from probemon.tracking.continuous_batching import ContinuousBatches
from probemon.tracking.forward_call import read_forward
from probemon.tracking.generation import FOLLOWING, ORDER, Generation, OpenForward, PendingTokens, States, ThreadState
from probemon.tracking.hook_faults import HookFaults, find_faults
from probemon.tracking.plain_forwards import PlainForwards, refuse_padding
from probemon.tracking.recording import GAP, Recording
from probemon.tracking.run_recordings import RunRecordings
from probemon.tracking.source_reports import ForwardTime, SourceReports
from probemon.tracking.watched_threads import WatchedThreads

# Takes tokens in order, with hidden states or why there are none. The result reports scores after the forward, or
# discards them if called with False.
Report = Callable[[bool], None]
ScoreTokens = Callable[[Generation | None, Recording, PlacedTokens, States | str], Report | None]


class DecoderHooks:
    """Installs the hooks. Raises `UnsupportedModel`, `ConfigError`.

    - `score`: a `ScoreTokens`
    - `scores`: True if this process scores
    - `report_gaps`: report unseen columns without raising
    - `take_stop()`: True if a stop was requested while nothing ran
    - `acts()`: True if rules or sinks need generated tokens; an untracked decode loop is then an error
    """

    def __init__(
        self,
        model: Any,
        sites: Sequence[str | Site],
        n_probes: int,
        score: ScoreTokens,
        *,
        scores: bool = True,
        report_gaps: bool = False,
        take_stop: Callable[[], bool] = lambda: False,
        acts: Callable[[], bool] = lambda: False,
        reports: SourceReports,
        threads: WatchedThreads,
    ) -> None:
        self.model, self.scores, self.open, self._threads, self._reports = model, scores, False, threads, reports
        self.recordings = RunRecordings(model, n_probes)
        self.seconds: deque[float] = deque(maxlen=10_000)  # per forward, in our hooks
        self.decoder, _ = find_layers(model)
        self._signature = list(inspect.signature(self.decoder.forward).parameters)
        self._sites, self._score, self._acts = [str(site) for site in sites], score, acts
        self._report_gaps = report_gaps
        self.plain = PlainForwards(model, self.decoder, self.recordings, acts)
        self._tap = Tap(model, sites, self._take_states)
        self._rehearses = rehearsal(model)
        self.abilities = Abilities(model)
        self.abilities.check_streams(sites)
        self._bracket = Bracket(self._before_forward, self._after_forward, self._forward_failed)
        self._width, self._in_parts = hidden_size(model), False
        self.thread = ThreadState()
        self.batches = ContinuousBatches(model, self.recordings, self.check_seen, take_stop, reports)
        self._attached_at = 0
        self.called = False  # the model or its generate() ran
        self.n_gaps = 0  # reported or raised
        self._placed: list[PlacedHook] = []

    def attach(self, stack: ExitStack) -> None:
        """Install until `stack` closes."""
        forget_hook_free_graphs()
        forget_compiled(self.model)
        self._in_parts = bool(compiled_parts(self.model))
        self._attached_at = next(ORDER)
        self.open = True  # before the patches: detaching runs remove those of closed runs
        stack.callback(setattr, self, "open", False)
        stack.callback(forget_compiled, self.model)
        if self.scores:
            # The opening hook last: another thread may be in a forward.
            self._closing = self.decoder.register_forward_hook(self._bracket.unless(self._after_forward))
            stack.callback(self._closing.remove)
            failing = self.decoder.register_forward_hook(self._bracket.unless(self._after_any), always_call=True)
            stack.callback(failing.remove)
            stack.enter_context(self._tap)
            if self.model is not self.decoder and self.abilities.drops_mask():
                stack.callback(self.model.register_forward_pre_hook(self._refuse_padding, with_kwargs=True).remove)
            opening = self.decoder.register_forward_pre_hook(
                self._bracket.unless(self._before_forward), with_kwargs=True
            )
            stack.callback(opening.remove)
            name = type(self.decoder).__name__
            self._placed = [
                PlacedHook.of(f"{when} {name}", self.decoder, handle)
                for when, handle in {
                    "the begin of": opening,
                    "the end of": self._closing,
                    "the failing of": failing,
                }.items()
            ]
            self._bracket.shadow(stack, self, self.model, self.decoder)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedModel(
            "a watched model holds our hooks, so it cannot be copied, pickled or saved whole: do that outside the with"
            " block"
        )

    def faults(self) -> HookFaults:
        """Return the hooks' faults; runs nothing."""
        return find_faults(self, self.model, self.decoder, [*self._placed, *self._tap.placed])

    def check_seen(self, recording: Recording, ids: Any, ids_begin: int, end: int, generation: Generation) -> None:
        """Raise, or report a `Gap`, if columns before `end` bypassed the taps; ids `[B, L]` begin at `ids_begin`."""
        call = recording.call
        # After detaching, only our result is incomplete, and run.result says so.
        if not self.open or not self.scores or (call.frontier >= end and call.first_column >= 0):
            return
        sequences = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else ids
        if sequences is None:
            raise AlignmentError(
                f"a forward begins at column {end}, the taps saw {call.frontier}, and which tokens came between is"
                " unknown"
            )
        self.recordings.begin(generation, generation.prompt.cached, len(sequences))
        whose = f"request {recording.request}" if recording.request else "generate()"
        self._report_unseen(
            recording,
            call.frontier,
            end - 1,
            f"{whose} is at column {end}, the taps saw {call.frontier}: the model ran forwards past our hooks "
            "(was it compiled before probemon was attached?), so nothing is reported",
            possible=recording.beams is None,
        )
        for placed in call.missed(sequences, ids_begin, end, generation.mask):
            self.score_tokens(generation, recording, placed, GAP)

    def _report_unseen(self, recording: Recording, first: int, last: int, reason: str, possible: bool = True) -> None:
        self.n_gaps += 1
        gap = Gap(recording.number, first, last, reason)
        self._reports.gap(gap)
        if not self._report_gaps or not possible:
            raise AlignmentError(reason)

    # -- one forward -----------------------------------------------------------------------------

    def _before_forward(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
        if self._in_parts or self._bracket.is_open:
            self._begin_compiled(args, kwargs)
        if self._threads.one_thread and self._threads.in_other:
            self._threads.ran_in_other = True
            return
        begin = time.perf_counter()
        thread = self.thread
        thread.inside = thread.has_run = self.called = True
        self.wait_for_step()
        if thread.generation is not None:
            self.close_forward()  # the previous one
            self.wait_for_step()
        early_states = thread.reset_forward()
        if self._rehearses is not None and self._rehearses():
            return
        generation, foreign, thread.foreign = thread.generation, thread.foreign, False
        if foreign:
            self._threads.n_unwatched += 1
            self.plain.report_unwatched(thread)
            return
        # Without kwargs, another thread is still registering the hook.
        if kwargs is None or not self._is_ours(generation):
            return
        arguments = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        if arguments.get("cu_seq_lens_q") is not None:
            self._open_packed(arguments)
            early_states = {}
        elif not self._open_forward(arguments, generation):
            return
        if (forward := thread.forward) is not None:
            for pending in forward.pending:
                forward.n_tokens[pending.placed.phase != PROMPT] += len(pending.placed)
            forward.seconds, forward.began = time.perf_counter() - begin, begin
        for site, states in early_states.items():
            self._take_states(site, states)
        if self._closing.id not in self.decoder._forward_hooks:  # its end would go unnoticed
            self.close_forward()

    def _refuse_padding(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not self._threads.in_other:
            refuse_padding(model, args, kwargs)

    def _begin_compiled(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> None:
        arguments = {**dict(zip(self._signature, args, strict=False)), **(kwargs or {})}
        ids = arguments.get("input_ids")
        shape = getattr(arguments.get("inputs_embeds") if ids is None else ids, "shape", ())[:2]
        if len(shape) == 2 and arguments.get("cu_seq_lens_q") is None:
            self._tap.buffers.make_room(tuple(shape), self._width)
        else:
            self._tap.buffers.begin()

    def _is_ours(self, generation: Generation | None) -> bool:
        """True if watched: not a draft, and not only followed by another run."""
        if generation is not None:
            return not generation.drafting
        if not FOLLOWING.models[id(self.model)]:
            return True
        if self._acts() and FOLLOWING.begun[id(self.model)] > self._attached_at:
            raise UnsupportedDecoding(
                "another run follows this generation, and this one does not, so its rules would never fire and its"
                " sinks hear nothing: look generate() up after both are attached, and open run.generating of both"
                " for a loop by hand"
            )
        return False

    def _open_packed(self, arguments: Mapping[str, Any]) -> None:
        with self.batches.reporting():
            packed = self.batches.place(arguments)
        pending = [PendingTokens(generation, generation.recording, placed) for generation, placed in packed]
        for tokens in pending:
            tokens.recording.note_adapters()
        self.thread.forward = OpenForward(tuple(arguments["input_ids"].shape), pending)

    def _open_forward(self, arguments: Mapping[str, Any], generation: Generation | None) -> bool:
        """Place the tokens; False if their `generate()` began before this run."""
        thread = self.thread
        forward, cache = read_forward(arguments, generation, self.decoder)
        if generation is None and self.plain.is_of_another_head(thread, forward, cache):
            self._threads.n_unwatched += 1
            return False
        used_cache = cache_among(arguments)
        if generation is None or generation.by_hand:
            self._check_abilities(forward, arguments)
        if generation is None:
            recording = self.plain.document(forward, cache)
        else:
            if generation.by_hand and generation.recording.call.first_column < 0:
                generation.begin_on(cache, forward.start)
            column, begins = min(generation.prompt.cached, forward.start), generation.recording.call.first_column < 0
            if generation.by_hand and not begins and used_cache is not None:
                self.recordings.check_same_rows(used_cache, generation.recording, forward.start)
            recording = self.recordings.begin(generation, column, len(forward.ids))
            if begins and forward.mask is not None:
                recording.check_rows(forward.mask)
            generation.check_ids(forward)
            if forward.start > recording.call.frontier:
                self.check_seen(recording, generation.ids, generation.begin, forward.start, generation)
        placed = recording.call.place(forward)
        recording.note_adapters()
        if generation is not None and recording.beams is not None:
            placed = [generation.beam_tokens(part) for part in placed]
        pending = [PendingTokens(generation, recording, part) for part in placed]
        thread.forward = OpenForward(forward.ids.shape, pending, recording, used_cache)
        if used_cache is not None:
            self.recordings.claim_cache(used_cache, recording)
        return True

    def _check_abilities(self, forward: DecoderForward, arguments: Mapping[str, Any]) -> None:
        """Raise if the model is wrong on this plain forward."""
        end = forward.start + forward.ids.shape[1]
        mask = "" if arguments.get("attention_mask") is None else "masked"
        if forward.mask is not None:
            columns = forward.mask[:, :end].astype(np.int8)
            follows = np.diff(columns, axis=1) > 0  # a token after padding
            if follows.any():
                mask = "gapped" if (columns[:, :-1].cumsum(axis=1)[follows] > 0).any() else "padded"
        self.abilities.check_forward(
            used=forward.start > 0,
            several=forward.ids.shape[1] > 1,
            positions=arguments.get("position_ids") is not None,
            mask=mask,
            length=end,
        )

    def _take_states(self, site: str, hidden: Tensor) -> None:
        """Copy the open forward's hidden states at a site."""
        if self._threads.one_thread and self._threads.in_other:
            return
        thread = self.thread
        custom = self._tap.own.get(site)
        forward = thread.forward
        if forward is None:
            if custom is not None and custom.early:
                thread.early_states[site] = hidden
            elif custom is None and not thread.inside:
                self._report_layer_alone(site)
            return
        if not self._tap.stands(site):  # reported at the forward's end
            return
        begin = time.perf_counter()
        shape = forward.shape
        with self.batches.reporting() if forward.recording is None else nullcontext():
            if site in forward.seen_sites:
                self._forget_forward()
                raise AlignmentError(ran_again(site))
            forward.seen_sites.add(site)
            if custom is not None and custom.flat and hidden.shape[:2] == (1, shape[0] * shape[1]):
                hidden = hidden.reshape(*shape, -1)
            try:
                check_states(
                    site, hidden, shape, self._width if custom is None else custom.width, floats=custom is None
                )
            except UnsupportedModel:
                self._forget_forward()
                raise
            for pending in forward.pending:
                if hidden.shape[1] == 1 and pending.placed.rows.size == len(hidden):  # all rows
                    pending.states[site] = hidden[:, 0].clone()  # the model may reuse its memory
                    continue
                rows, offsets = (
                    torch.from_numpy(x).to(hidden.device) for x in (pending.placed.rows, pending.placed.offsets)
                )
                pending.states[site] = hidden[rows, offsets]
            # A device may start now. Results wait until each site is known to have run once; several batches depend on
            # each other.
            if forward.recording is not None and len(forward.pending) == 1 and self._complete(forward):
                self._score_pending(forward)
        forward.seconds += time.perf_counter() - begin

    def _report_layer_alone(self, site: str) -> None:
        thread = self.thread
        if self._threads.was_there and not thread.has_run and site not in thread.alone:
            thread.alone.add(site)  # may have been inside a forward at attach time
            return
        # Generations and batches report unseen tokens when sampling.
        if thread.generation is None and not self.batches.open and self.plain.report_layer_alone(site):
            self._threads.layers_alone[site] += 1

    def _complete(self, forward: OpenForward) -> bool:
        return all(len(pending.states) == len(self._sites) for pending in forward.pending)

    def _forget_forward(self) -> None:
        self.thread.forward = self.thread.ended = None
        self.wait_for_step(report=False)

    def _score_pending(self, forward: OpenForward, unseen: str = "") -> None:
        """Score or record a forward's tokens; drafts wait."""
        for pending in forward.pending:
            if pending.placed.draft and pending.generation is not None:
                pending.generation.drafts.append((pending.placed, unseen or pending.states))
            else:
                self.score_tokens(pending.generation, pending.recording, pending.placed, unseen or pending.states)
            # Continuous batching has no stopping criteria.
            if pending.generation is not None and pending.generation.end is not None:
                self.wait_for_step()
                pending.generation.end_request()
        forward.pending = []

    def score_tokens(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> None:
        """Score tokens, or record why they have no hidden states."""
        self.wait_for_step()  # its retained sets are what this one begins with
        self.thread.step = self._score(generation, recording, placed, states)

    def wait_for_step(self, report: bool = True) -> None:
        """Wait for current scores and report them."""
        step, self.thread.step = self.thread.step, None
        if step is not None:
            step(report)

    def forget_thread(self) -> None:
        """Forget this thread's generation."""
        self.thread.generation = None
        self._forward_failed()

    def close_forward(self) -> None:
        """Score the open forward's tokens, or report them as unseen."""
        thread = self.thread
        forward = thread.forward or thread.ended
        if forward is None:
            return
        if not self.open:  # by another thread
            forward.pending = []
        if not forward.pending:
            return
        thread.forward, thread.ended = None, forward
        with self.batches.reporting() if forward.recording is None else nullcontext():
            if self._complete(forward):
                self._score_pending(forward)
                return
            unscored, missing = forward.pending, [site for site in self._sites if site not in forward.pending[0].states]
            forward.pending = []  # report once, even if that raises
            for pending in unscored:
                columns = pending.placed.columns
                if not len(columns):  # padding
                    continue
                self._report_unseen(
                    pending.recording,
                    int(columns.min()),
                    int(columns.max()),
                    f"a forward of the model ended without reaching {missing}: our hook was removed, the layer was"
                    " skipped or compiled, or another one was put in its place",
                )
        forward.pending = unscored
        self._score_pending(forward, f"the host did not run through {', '.join(missing)}")

    def _after_any(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        if self._threads.one_thread and self._threads.in_other:
            self._tap.buffers.abandon()
        elif self.thread.inside:  # it raised
            self._forward_failed()

    def _forward_failed(self) -> None:
        thread = self.thread
        thread.ended = thread.forward or thread.ended
        thread.inside, thread.forward, thread.early_states = False, None, {}
        self._tap.buffers.abandon()
        if thread.generation is None:  # else the next forward reports gaps
            thread.ended = None
            self.wait_for_step(report=False)

    def _after_forward(self, decoder: Any, args: tuple[Any, ...], output: Any) -> None:
        thread = self.thread
        thread.inside = False
        forward = thread.forward
        if forward is None:
            self._tap.buffers.abandon()
            return
        for site, hidden in self._tap.buffers.written():
            self._take_states(site, hidden)
        begin = time.perf_counter()
        self.close_forward()
        self.wait_for_step()
        now = time.perf_counter()
        forward.seconds += now - begin
        cache = filled_cache(output, forward.cache)
        if cache is not None and forward.recording is not None:
            self.recordings.remember_cache(cache, forward.recording)
        thread.forward = thread.ended = None
        self.seconds.append(forward.seconds)
        self._reports.forward(ForwardTime(forward.seconds, now - forward.began, *forward.n_tokens))
