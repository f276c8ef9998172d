"""Generation: one `generate()` that is being followed, from its prompt to its last token.

generation = Generation(recording, prompt)
generation.check_ids(forward)                       # the host runs the sequence's tokens at their own columns
placed = generation.beam_tokens(placed)             # with beams: which row each one's history ran in
generation.drafts.append((placed, states))          # proposed tokens wait ...
for placed, states in generation.accepted(ids): ... # ... until the stopping criteria are shown the sequence
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from probemon.core.hierarchy import Mask
from probemon.core.scores import GENERATED, PROMPT
from probemon.errors import AlignmentError
from probemon.tracking.align import NO_ID, DecoderForward, Ints, PlacedTokens
from probemon.tracking.generate_call import GenerateCall
from probemon.tracking.recording import Recording

States = dict[str, Tensor]


@dataclass(eq=False)
class Generation:
    """One `generate()`, or one loop by hand, that is followed. It alone assigns its attributes.

    `ids`, `mask`: of the sequence up to the end of the next forward, `ids` from column `begin` on.

    What is to end is said to `stop_all_rows`, `stop_row` and `raise_later`, and kept
    in `stop [B]` (rows that an action stopped; empty before the first), `stop_all` and `raising`.

    `stop_column`: the first column at which a "stop" or "raise" was met.
    `scored_columns`, `blind_column`: columns before the first were scored, from the second on not all.
    `on_failure`: called when `generate` raises.
    `rule_states`: of each rule, by row, immutable values.
    `origin`: with beams, the row that each row's history ran in before the newest forward.
    `drafts`: hidden states (or why there are none) of tokens that were proposed and may be rejected.
    `drafting`: the model is proposing tokens.
    `prepared`: a forward was, since the criteria looked last.
    `end`: of continuous batching, ends the request with the token that is sampled now.
    `by_hand`: a loop of the user's.
    `prompt_checked`: the first token was sampled, and what was run before is the prompt that was given.
    `sampled`: a token was just now, and which rows it ended is not known yet.
    `asked_of_prompt`: rules on the prompt were.
    `beside`: what other runs, and this one, know of it.
    """

    recording: Recording
    prompt: GenerateCall
    ids: Ints | None = None
    begin: int = 0
    mask: Ints | None = None
    drafting: int = 0
    prepared: bool = False
    raising: BaseException | None = None
    stop_all: bool = False
    stop_column: int | None = None
    scored_columns: int = 0
    blind_column: int | None = None
    on_failure: list[Callable[[], None]] = field(default_factory=list)
    stop: Mask = field(default_factory=lambda: np.zeros(0, dtype=bool))
    rule_states: dict[int, dict[int, Any]] = field(default_factory=dict)
    drafts: list[tuple[PlacedTokens, States | str]] = field(default_factory=list)
    origin: Ints | None = None
    end: Callable[[], None] | None = None
    by_hand: bool = False
    prompt_checked: bool = False
    sampled: bool = False
    asked_of_prompt: bool = False
    beside: Sequence[Generation] = ()

    def join(self, followed: list[Generation]) -> None:
        """Join what other runs know of the generation that the calling thread is in."""
        self.beside = followed
        followed.append(self)

    def prepare_forward(self, ids: Any, mask: Any) -> None:
        """Take what `generate` is about to run: the sequence, or the next chunk of its prompt, and its mask, if any."""
        self.prepared = True
        before, new_ids = self.ids, ids.detach().cpu().numpy() if isinstance(ids, Tensor) else None
        self.ids, self.begin = new_ids, self.prompt.offset
        if self.prompt.chunked and new_ids is not None and new_ids.shape[1] + self.begin <= self.prompt.columns:
            self.begin = max(self.prompt.cached, self.begin)
            if before is not None:
                self.ids = np.concatenate([before, new_ids], axis=1)
        self.mask = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else None

    def take_sampled(self, ids: Ints) -> None:
        """Take the whole sequence `ids [B, L]` of a loop by hand, which has sampled a column."""
        self.ids, self.begin = ids, 0

    def begin_on(self, cache: Any, n_columns: int) -> None:
        """Begin a loop by hand on a cache of so many columns."""
        self.prompt = dataclasses.replace(self.prompt, cached=n_columns, cache=cache)

    def extend_mask(self, mask: Ints | None, n_columns: int) -> Ints | None:
        """Keep the mask of a forward of a loop by hand; where it has none, what was padding stays padding."""
        if mask is None and self.mask is not None:
            n_new = max(0, n_columns - self.mask.shape[1])
            mask = np.pad(self.mask, ((0, 0), (0, n_new)), constant_values=1)
        self.mask = mask
        return mask

    @contextmanager
    def proposing(self) -> Iterator[None]:
        """While the block runs, the model proposes tokens to itself: nothing of that is in the output."""
        self.drafting += 1
        try:
            yield
        finally:
            self.drafting -= 1
            self.prepared = False

    def states_of_rule(self, number: int) -> dict[int, Any]:
        """Return what a rule knows of each row; `Rule.observe` replaces the values."""
        return self.rule_states.setdefault(number, {})

    def ids_of_embeds(self, embeds: Tensor, start: int) -> Tensor:
        """Return the ids of embeddings `[B, T, D]` after `start` columns; -1 where `generate` does not know them."""
        if self.ids is not None and start + embeds.shape[1] == self.ids.shape[1] + self.begin:
            known = self.ids[:, max(0, start - self.begin) :]
            if known.shape[1] == embeds.shape[1]:
                return torch.from_numpy(known)
        return torch.full(embeds.shape[:2], NO_ID, dtype=torch.int64, device="cpu")

    def check_prompt(self, n_columns: int) -> None:
        """Raise where another prompt was run than `generate` was given; `n_columns`: those there are after a sample."""
        expected = self.prompt.columns + 1
        if not self.prompt_checked and (n_columns < expected if self.prompt.speculative else n_columns != expected):
            raise AlignmentError(
                f"generate() was given a prompt of {self.prompt.columns} columns, and ran one of {n_columns - 1}:"
                " something around it changes the prompt (a generate() patched on the instance?), so which tokens are"
                " generated would be a guess. Change the prompt before generate() is called, or attach first and patch"
                " then"
            )
        self.prompt_checked = True

    def mark_scored(self, placed: PlacedTokens, *, all_seen: bool) -> None:
        """Note that `placed` have their scores, if they were `all_seen`."""
        if placed.phase == GENERATED:
            first = int(placed.columns[0] if len(placed) == 1 else placed.columns.min())
            if not all_seen or first > max(self.scored_columns, self.prompt.columns):
                self.blind_column = first if self.blind_column is None else min(first, self.blind_column)
        self.scored_columns = int(placed.columns[0] if len(placed) == 1 else placed.columns.max()) + 1

    def showable_columns(self) -> int:
        """Return the first column without a score, or at which a rule stopped: those before it may be shown."""
        return min(
            column for column in (self.scored_columns, self.blind_column, self.stop_column) if column is not None
        )

    def check_ids(self, forward: DecoderForward) -> None:
        """Raise where the host runs other tokens than those of the sequence at their own columns.

        With drafts on a used cache transformers does.
        """
        ids, begin = self.ids, self.begin
        if ids is None:
            return
        end = forward.start + forward.ids.shape[1]
        # As lists: at every token one number is compared, for which numpy takes long.
        if (
            ids.shape[1] + begin != end
            or ids[:, max(0, forward.start - begin) :].tolist()
            != forward.ids[:, max(0, begin - forward.start) :].tolist()
        ):
            raise AlignmentError(
                f"the host runs {forward.ids.shape[1]} tokens after {forward.start} cached ones, for a sequence of"
                f" {ids.shape[1] + begin}: these are not the sequence's tokens at their own places. Either something"
                " runs the model inside generate() (a logits processor, a criterion, a callback): leave it out; or the"
                " cache holds other columns than the sequence, so that the host's own answer is wrong too: start with"
                " an empty one"
            )

    def beam_tokens(self, placed: PlacedTokens) -> PlacedTokens:
        """Return what is scored: a prompt once, in the first of its beams, a generated token for every beam. All is
        provisional, since no row of beams is one of the output.
        """
        beams = self.recording.beams
        assert beams is not None and self.ids is not None
        placed = dataclasses.replace(placed, provisional=True)
        if placed.phase == PROMPT:
            return placed.take(np.flatnonzero(placed.rows % beams.n_beams == 0))
        self.origin = beams.advance(self.ids, self.recording.n_entries)
        for number, before in self.rule_states.items():
            self.rule_states[number] = {
                row: before[origin] for row, origin in enumerate(self.origin.tolist()) if origin in before
            }
        return placed

    def accepted(self, ids: Tensor) -> Iterator[tuple[PlacedTokens, States | str]]:
        """Yield the drafts in the accepted sequence `ids [1, L]`, token by token; the others are forgotten."""
        call, offset = self.recording.call, self.recording.offset
        kept = ids.detach().cpu().numpy()
        last = offset + kept.shape[1] - 1  # the newest token comes from the logits: it was not run
        drafts, self.drafts, self.prepared = self.drafts, [], False
        for placed, states in drafts:
            for i in range(len(placed)):
                column = int(placed.columns[i])
                if column >= last:
                    break
                if kept[0, column - offset] != placed.ids[i]:
                    raise AlignmentError(
                        f"column {column}: a draft had token {placed.ids[i]}, the sequence has"
                        f" {kept[0, column - offset]}, yet it was kept"
                    )
                token = dataclasses.replace(placed.take(np.array([i])), draft=False)
                yield token, states if isinstance(states, str) else {site: h[i : i + 1] for site, h in states.items()}
        call.take_back(last)

    def mark_sampled(self) -> None:
        """Note that a token was sampled; `ended` says next which rows end with it."""
        self.sampled = True

    def ended(self, ids: Tensor, done: Tensor, pads: bool) -> None:
        """Note what the stopping criteria said of `ids [B, L]`; `pads`: a row that ended is fed padding from now on."""
        if not self.sampled:
            return
        self.sampled = False
        call, beams = self.recording.call, self.recording.beams
        ends: list[bool] = done.tolist()
        if beams is not None:
            beams.ended(ids.detach().cpu().numpy(), np.array(ends), call.n_rows // beams.n_beams)
            ends = []
        call.ended(ends if pads else [])

    # -- what is to end --------------------------------------------------------------------------

    def stop_all_rows(self) -> None:
        """End every row with the token that is sampled next."""
        self.stop_all = True

    def stop_row(self, row: int, column: int) -> None:
        """End a row at its next token, for what was scored at `column`."""
        self.hide_from(column)
        if not len(self.stop):
            self.stop = np.zeros(self.recording.call.n_rows, dtype=bool)
        self.stop[row] = True

    def raise_later(self, error: BaseException, column: int) -> None:
        """End the generation at its next token with `error`, the first one, for what was scored at `column`."""
        self.hide_from(column)
        if self.raising is None:
            self.raising = error

    def hide_from(self, column: int) -> None:
        """Let no held streamer show anything from `column` on, of any run that follows the same generation."""
        for one in (self, *self.beside):
            one.hide_here_from(column)

    def hide_here_from(self, column: int) -> None:
        """Let no held streamer of this run show anything from `column` on."""
        self.stop_column = column if self.stop_column is None else min(column, self.stop_column)

    def row_stops(self, row: int) -> bool:
        """Whether this row is to end at its next token."""
        return self.stop_all or bool(len(self.stop) and self.stop[row])

    def end_by(self, end: Callable[[], None]) -> None:
        """Let `end` end the request with its next token: continuous batching has no criteria to stop at."""
        self.end = end
        if self.stopping:
            end()

    def end_request(self) -> None:
        """End the request of continuous batching if it is to end, and raise what an action raises."""
        if self.raising is not None:
            raise self.raising
        if self.end is not None and self.stopping:
            self.end()

    @property
    def stopping(self) -> bool:
        """Whether some row is to end at its next token."""
        return self.stop_all or len(self.stop) > 0  # it is made for a row that stops

    def stopped(self, like: Tensor) -> Tensor:
        """Return the rows that an action stopped, or `run.stop()`, as a mask like `like [B]`."""
        if self.stop_all:
            return torch.ones_like(like)
        return torch.from_numpy(self.stop).to(like.device) if len(self.stop) == len(like) else torch.zeros_like(like)


@dataclass
class PendingTokens:
    """Tokens of the open forward, and their hidden states so far, by site."""

    generation: Generation | None
    recording: Recording
    placed: PlacedTokens
    states: States = field(default_factory=dict)


class FollowedGenerations(threading.local):
    """By model, how many runs follow the generation that this thread is in, what each knows of it, and when the newest
    of them began.
    """

    def __init__(self) -> None:
        self.models: Counter[int] = Counter()
        self.generations: defaultdict[int, list[Generation]] = defaultdict(list)
        self.begun: dict[int, int] = {}


FOLLOWING = FollowedGenerations()
ORDER = itertools.count()  # of what begins in this process: runs that attach, generations


@dataclass(slots=True)
class OpenForward:
    """A forward of the decoder that is watched, while it runs: its `shape`, rows by tokens, and what waits for it.

    `recording`: that it goes on with; None in continuous batching, where each request has its own.
    `cache`: that it is given.
    `pending`: its tokens, until they are reported.
    `seen_sites`: those that it has run through.
    `seconds`, `began`: how long it spent in our hooks, and when it began.
    `n_tokens`: how many it runs of prompts, and generated ones.
    """

    shape: tuple[int, ...]
    pending: list[PendingTokens]
    recording: Recording | None = None
    cache: Any = None
    seen_sites: set[str] = field(default_factory=set)
    seconds: float = 0.0
    began: float = 0.0
    n_tokens: list[int] = field(default_factory=lambda: [0, 0])


class ThreadState(threading.local):
    """What one thread is doing: its `generate()`, and the forward of the decoder that is open."""

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.foreign = False  # the next forward is of a generate() that began before this run attached
        self.unwatched: FrameType | None = None  # of a generate() that began before this run attached, once it is told
        self.forward: OpenForward | None = None  # that is open and watched
        self.ended: OpenForward | None = None  # that ended before its tokens were reported: they are, with the next one
        self.early_states: States = {}  # of sites that run before the forward their output is of
        self.inside = self.has_run = False  # whether a forward of the decoder is open, watched or not; has begun before
        self.alone: set[str] = set()  # sites that ran before any forward began
        self.step: Callable[[bool], None] | None = None  # reports scores that are under way, or throws them away

    def reset_forward(self) -> States:
        """Forget the forward that was open; return the states of sites that ran before the one that opens now."""
        self.forward = self.ended = None
        early_states, self.early_states = self.early_states, {}
        return early_states


class FollowedCriteria(StoppingCriteriaList):
    """Ask generate's own criteria, and say what they answer to those who follow it.

    `sampled(ids, done)` is given the rows that have ended, and may end more. `ended(ids, done, pads)` is given those
    that have in the end. The criteria of a run are around those of the runs that were attached before it, and what one
    of them ends has ended for all.
    """

    def __init__(
        self,
        criteria: StoppingCriteriaList,
        sampled: Callable[[Tensor, Tensor], Tensor],
        ended: Callable[[Tensor, Tensor, bool], None],
    ) -> None:
        super().__init__(criteria)
        self._inner, self._sampled, self._ended = criteria, sampled, ended

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = self._ask(input_ids, scores, kwargs)
        # generate pads rows that ended exactly where one of its criteria knows the end-of-sequence token.
        pads = any(hasattr(criterion, "eos_token_id") for criterion in self)
        criteria: Any = self
        while isinstance(criteria, FollowedCriteria):
            criteria._ended(input_ids, done, pads)
            criteria = criteria._inner
        return done

    def _ask(self, ids: Tensor, scores: Any, more: dict[str, Any]) -> Tensor:
        inner = self._inner
        done: Tensor = (
            inner._ask(ids, scores, more) if isinstance(inner, FollowedCriteria) else inner(ids, scores, **more)
        )
        return self._sampled(ids, done)
