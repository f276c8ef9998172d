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

import dataclasses
import inspect
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from probemon.align import Call, Forward, Ints, Placed
from probemon.beams import Beams
from probemon.errors import AlignmentError, NotSupportedDecoding, NotSupportedHost
from probemon.generation import Prompt, batched_entries, read_call, refuse_batched
from probemon.hierarchy import Mask
from probemon.host import find_layers
from probemon.record import Recording
from probemon.shadow import shadow
from probemon.tap import Tap
from probemon.types import PROMPT

States = dict[str, Tensor]
NO_ID = -1


@dataclass
class Generation:
    """One `generate()` that is running. `ids`, `mask`: of the whole sequence, for the next forward. `stop [B]`: rows an action stopped; `streaks`: of each rule, by row.

    `origin`: with beams, the row that each row's history ran in before the newest forward.
    `drafts`: hidden states of tokens that were proposed and may be rejected; `drafting`: the model is proposing.
    """

    recording: Recording
    prompt: Prompt
    ids: Ints | None = None
    mask: Ints | None = None
    drafting: int = 0
    acting: bool = False
    stop: Mask = field(default_factory=lambda: np.zeros(0, dtype=bool))
    streaks: dict[int, dict[int, int]] = field(default_factory=dict)
    drafts: list[tuple[Placed, States]] = field(default_factory=list)
    origin: Ints | None = None


ScoreTokens = Callable[[Generation | None, Recording, Placed, States], None]


class _Inside(threading.local):
    """By model, how many runs are following the `generate()` that this thread is in."""

    def __init__(self) -> None:
        self.models: Counter[int] = Counter()


_INSIDE = _Inside()


class _Thread(threading.local):
    """What one thread is doing: its `generate()`, and the forward of the decoder that is open."""

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.foreign = False  # the next forward is of a generate() that began before this run attached
        self.shape: tuple[int, ...] = ()  # of the open forward: rows, tokens
        self.recording: Recording | None = None
        self.waiting: list[Placed] = []
        self.states: list[States] = []
        self.seconds = 0.0


class Watcher:
    """Resolves everything when made, attaches in `with`, leaves nothing behind. Raises `NotSupportedHost`, `ConfigError`."""

    def __init__(
        self, model: Any, sites: list[str], n_probes: int, score: ScoreTokens, check: Callable[[Prompt], None] = lambda prompt: None
    ) -> None:
        self.model = model
        self.recordings: list[Recording] = []
        self.forward_seconds: list[float] = []  # spent in our hooks, one entry a forward of the host
        self.stop_all = False
        self.open = False
        self._decoder, _ = find_layers(model)
        self._signature = list(inspect.signature(self._decoder.forward).parameters)
        self._sites, self._n_probes, self._score, self._check = sites, n_probes, score, check
        self._tap = Tap(model, sites, self._tapped)
        self._by_cache: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
        self._thread = _Thread()
        self._n_running = 0
        self._lock = threading.Lock()
        self._stack = ExitStack()

    @property
    def generating(self) -> bool:
        """Whether some thread is inside `generate()`."""
        return self._n_running > 0

    def __enter__(self) -> Watcher:
        forget_compiled(self.model)
        with ExitStack() as stack:
            stack.callback(forget_compiled, self.model)
            stack.callback(self._decoder.register_forward_pre_hook(self._before, with_kwargs=True).remove)
            stack.enter_context(self._tap)
            stack.callback(self._decoder.register_forward_hook(self._after, with_kwargs=True).remove)
            if hasattr(self.model, "generate"):
                shadow(stack, self, "generate", self._generate)
                shadow(stack, self, "prepare_inputs_for_generation", self._prepare)
                shadow(stack, self, "_get_stopping_criteria", self._criteria)
                for name in batched_entries(self.model):
                    shadow(stack, self, name, lambda original, *args, name=name, **kwargs: refuse_batched(name))
            self._stack = stack.pop_all()
        self.open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        prompt = read_call(self.model, args, kwargs)
        self._check(prompt)
        recording = self._new_recording(Call(prompt.columns, speculative=prompt.speculative), prompt.offset)
        if prompt.n_beams > 1:
            recording.beams = Beams(prompt.n_beams, prompt.columns - prompt.offset)
        self._thread.generation = Generation(recording, prompt)
        with self._lock:
            self._n_running += 1
        _INSIDE.models[id(self.model)] += 1
        try:
            out = original(*args, **kwargs)
        finally:
            _INSIDE.models[id(self.model)] -= 1
            self._thread.generation = self._thread.recording = None
            with self._lock:
                self._n_running -= 1
                # Reset here, not at the start: a stop that came before the first token is still meant.
                self.stop_all = self.stop_all and self._n_running > 0
        recording.output = sequences = getattr(out, "sequences", out)
        # Detached meanwhile, by another thread: the host's answer is whole, only ours is not, and run.result says so.
        if self.open and recording.call.frontier < sequences.shape[1] + recording.offset - 1:
            raise AlignmentError(
                f"generate() returned {sequences.shape[1]} columns, the taps saw {max(recording.call.frontier, 0)}: the host ran "
                "forwards past our hooks (was it compiled before probemon was attached?), so nothing is reported"
            )
        return out

    def _prepare(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        generation = self._thread.generation
        # A generate() that was running when this run attached: where its prompt ended is unknown, so it is not watched.
        self._thread.foreign = generation is None
        if generation is not None and not generation.drafting:
            mask, ids = kwargs.get("attention_mask"), args[0] if args else kwargs.get("input_ids")
            generation.ids = ids.detach().cpu().numpy() if isinstance(ids, Tensor) else None
            generation.mask = mask.detach().cpu().numpy().astype(np.int64) if isinstance(mask, Tensor) else None
        return original(*args, **kwargs)

    def _criteria(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria: StoppingCriteriaList = original(*args, **kwargs)
        generation = self._thread.generation
        if generation is None and not _INSIDE.models[id(self.model)]:  # else another run follows it, which was there first
            raise NotSupportedDecoding(
                "this generate() was looked up before probemon was attached, or called on the class, and cannot be followed: "
                "call model.generate(...) inside the with block"
            )
        return criteria if generation is None or generation.drafting else _Watched(criteria, self, generation)

    def sampled(self, generation: Generation, ids: Tensor, done: Tensor, pads: bool) -> Tensor:
        """The stopping criteria looked at ids `[B, L]`; `pads`: a row that ended is fed padding from now on."""
        if generation.prompt.speculative:
            self._commit(generation, ids)
        call, beams = generation.recording.call, generation.recording.beams
        done = done | self.stopped(generation, done)
        if beams is not None:
            beams.ended(ids.detach().cpu().numpy(), done.cpu().numpy(), call.n_rows // beams.n_beams)
            call.ended(np.zeros(call.n_rows, dtype=bool))
            return done
        ends = done.cpu().numpy() if pads else np.zeros(len(done), dtype=bool)
        call.ended(ends)
        return done

    def stopped(self, generation: Generation | None, like: Tensor) -> Tensor:
        """Rows that an action stopped, as a mask like `like [B]`."""
        if self.stop_all:
            return torch.ones_like(like)
        if generation is None or len(generation.stop) != len(like):
            return torch.zeros_like(like)
        return torch.from_numpy(generation.stop).to(like.device)

    def current(self) -> Generation | None:
        """The generation of the calling thread."""
        return self._thread.generation

    def _commit(self, generation: Generation, ids: Tensor) -> None:
        """Score the drafts that were accepted, one token after another; forget the others."""
        call, offset = generation.recording.call, generation.recording.offset
        accepted = ids.detach().cpu().numpy()
        last = offset + accepted.shape[1] - 1  # the newest token comes from the logits: it was not run
        drafts, generation.drafts = generation.drafts, []
        for placed, states in drafts:
            for i in range(len(placed)):
                column = int(placed.columns[i])
                if column >= last:
                    break
                if accepted[0, column - offset] != placed.ids[i]:
                    raise AlignmentError(
                        f"column {column}: a draft had token {placed.ids[i]}, the sequence has {accepted[0, column - offset]}, yet it was kept"
                    )
                one = dataclasses.replace(placed.take(np.array([i])), draft=False)
                self._score(generation, generation.recording, one, {site: h[i : i + 1] for site, h in states.items()})
        call.frontier = min(call.frontier, last)

    def _new_recording(self, call: Call, offset: int) -> Recording:
        recording = Recording(call, offset, self._n_probes)
        self.recordings.append(recording)
        return recording

    # -- one forward -----------------------------------------------------------------------------

    # Not traced: a compiled host leaves its graph for our hooks, at the cost of a break for each.
    @torch.compiler.disable
    def _before(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        begin = time.perf_counter()
        mine = self._thread
        mine.recording, mine.waiting, mine.states = None, [], []
        generation, foreign, mine.foreign = mine.generation, mine.foreign, False
        if foreign or (generation is not None and generation.drafting):
            return
        given = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        if given.get("cu_seq_lens_q") is not None:
            raise NotSupportedDecoding("continuous batching: the rows of a packed forward cannot be told apart. Detach, or use generate()")
        ids, cache = given.get("input_ids"), given.get("past_key_values")
        start = 0 if cache is None else int(cache.get_seq_length())
        if ids is None:
            if generation is None:
                raise NotSupportedDecoding("a plain forward with inputs_embeds has no token ids to place: give input_ids, or detach")
            ids = _ids_of_embeds(generation, given["inputs_embeds"])
        if given.get("cache_params") is not None:  # a recurrent state, which does not know how many tokens it has read
            if generation is None or generation.ids is None:
                raise NotSupportedDecoding("a plain forward on a recurrent state does not say which tokens went before: use generate(), or no cache")
            start = generation.ids.shape[1] + generation.prompt.offset - ids.shape[1]
        mask = self._plain_mask(given.get("attention_mask")) if generation is None else generation.mask
        forward = Forward(start, ids.detach().cpu().numpy().astype(np.int64), mask)
        recording = self._document(forward, cache) if generation is None else generation.recording
        if recording.call.first_column < 0 and start > 0 and recording.earlier is None:
            recording.earlier = self._known(cache, len(forward.ids))
        if generation is not None:
            _check_ids(generation, forward)
        mine.waiting = recording.call.place(forward)
        if recording.retained is None:
            recording.retained = np.zeros((recording.call.n_rows, self._n_probes), dtype=bool)
            if generation is not None:
                generation.stop = np.zeros(recording.call.n_rows, dtype=bool)
        if generation is not None and recording.beams is not None:
            mine.waiting = [self._beam_tokens(generation, placed) for placed in mine.waiting]
        mine.states = [{} for _ in mine.waiting]
        mine.recording, mine.shape = recording, forward.ids.shape
        if cache is not None:
            self._by_cache[cache] = recording
        mine.seconds = time.perf_counter() - begin

    def _beam_tokens(self, generation: Generation, placed: Placed) -> Placed:
        """A prompt is scored once, in the first of its beams; a generated token for every beam that has it."""
        beams = generation.recording.beams
        assert beams is not None and generation.ids is not None
        if placed.phase == PROMPT:
            return placed.take(np.flatnonzero(placed.rows % beams.n_beams == 0))
        generation.origin = beams.advance(generation.ids, generation.recording.n_entries)
        for streaks in generation.streaks.values():
            before = dict(streaks)
            streaks.update({row: before.get(int(origin), 0) for row, origin in enumerate(generation.origin)})
        return dataclasses.replace(placed, provisional=True)

    def _plain_mask(self, mask: Any) -> Ints | None:
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise NotSupportedDecoding("an attention mask that is not 2D hides which columns are padding: give a 2D one")
        found: Ints = mask.detach().cpu().numpy().astype(np.int64)
        return found

    def _document(self, forward: Forward, cache: Any) -> Recording:
        """The recording a plain forward goes on with: that of its cache if it continues exactly there, else a new one."""
        known = self._known(cache, len(forward.ids))
        if known is not None and known.call.prompt_columns is None and known.call.frontier == forward.start > 0:
            return known
        return self._new_recording(Call(None), 0)

    def _known(self, cache: Any, n_rows: int) -> Recording | None:
        known = None if cache is None else self._by_cache.get(cache)
        return known if known is not None and known.call.n_rows == n_rows else None

    def _tapped(self, site: str, hidden: Tensor) -> None:
        mine = self._thread
        # No forward is open when a layer runs by itself (gradient checkpointing runs it again): not a new token.
        if mine.recording is None:
            return
        begin = time.perf_counter()
        if hidden.dim() != 3 or tuple(hidden.shape[:2]) != mine.shape:
            raise NotSupportedHost(
                f"{site} gives {tuple(hidden.shape)} for a forward of {mine.shape[0]} rows and {mine.shape[1]} tokens, expected "
                "[rows, tokens, hidden size]: which state is whose is unknown"
            )
        for placed, states in zip(mine.waiting, mine.states, strict=True):
            rows, offsets = (torch.from_numpy(x).to(hidden.device) for x in (placed.rows, placed.offsets))
            states[site] = hidden[rows, offsets]  # a copy: the host may reuse its memory
        if all(len(states) == len(self._sites) for states in mine.states):
            generation = mine.generation
            for placed, states in zip(mine.waiting, mine.states, strict=True):
                if placed.draft and generation is not None:
                    generation.drafts.append((placed, states))
                else:
                    self._score(generation, mine.recording, placed, states)
            mine.waiting, mine.states = [], []
        mine.seconds += time.perf_counter() - begin

    @torch.compiler.disable
    def _after(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        mine = self._thread
        if mine.recording is None:
            return
        if mine.waiting:
            missing = [site for site in self._sites if site not in mine.states[0]]
            raise AlignmentError(
                f"a forward of the host ended without reaching {missing}: our hook was removed, or the layer was skipped or compiled"
            )
        cache = getattr(output, "past_key_values", None)
        if cache is not None:
            self._by_cache[cache] = mine.recording
        mine.recording = None
        self.forward_seconds.append(mine.seconds)


def forget_compiled(model: Any) -> None:
    """Make a compiled host compile again: a graph does not notice that hooks came or went."""
    by_generate = vars(model).pop("_compiled_call", None) is not None
    if by_generate or any(getattr(module, "_compiled_call_impl", None) is not None for module in model.modules()):
        torch._dynamo.reset()


def _ids_of_embeds(generation: Generation, embeds: Tensor) -> Tensor:
    """The ids a prompt of embeddings stands for, where `generate` was given them; -1 where it was not."""
    if generation.ids is not None and generation.ids.shape[1] == embeds.shape[1]:
        return torch.from_numpy(generation.ids)
    return torch.full(embeds.shape[:2], NO_ID)


def _check_ids(generation: Generation, forward: Forward) -> None:
    """The host must run the tokens of the sequence at their own columns (with drafts on a used cache transformers does not)."""
    ids, offset = generation.ids, generation.prompt.offset
    if ids is None or generation.prompt.chunked:
        return
    end = forward.start + forward.ids.shape[1]
    if ids.shape[1] + offset != end or not np.array_equal(ids[:, max(0, forward.start - offset) :], forward.ids[:, max(0, offset - forward.start) :]):
        raise AlignmentError(
            f"the host runs {forward.ids.shape[1]} tokens after {forward.start} cached ones, for a sequence of {ids.shape[1] + offset}: "
            "these are not the sequence's tokens at their own places, so the host's own answer is wrong too. Start with an empty cache"
        )


class _Watched(StoppingCriteriaList):
    """generate's own criteria; tells the watcher which rows have ended, and ends those that an action stopped."""

    def __init__(self, criteria: StoppingCriteriaList, watcher: Watcher, generation: Generation) -> None:
        super().__init__(criteria)
        self._inner, self._watcher, self._generation = criteria, watcher, generation

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = self._inner(input_ids, scores, **kwargs)
        # generate pads rows that ended exactly where one of its criteria knows the end-of-sequence token.
        pads = any(hasattr(criterion, "eos_token_id") for criterion in self)
        return self._watcher.sampled(self._generation, input_ids, done, pads)
