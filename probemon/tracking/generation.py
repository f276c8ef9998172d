"""Generation: a followed `generate()`, from prompt to last token.

generation.check_ids(forward)
placed = generation.beam_tokens(placed)             # with beams
generation.drafts.append((placed, states))          # proposed tokens wait ...
for placed, states in generation.accepted(ids): ... # ... until they are accepted
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
    """A followed `generate()` or hand loop. Only its methods assign attributes.

    - `ids`, `mask`: up to the end of the next forward; `ids` from column `begin` on
    - `stop [B]` (maybe empty), `stop_all`, `raising`: requested ends
    - `stop_column`: first column that met a "stop" or "raise"
    - `scored_columns`, `blind_column`: end of the columns reached; first unscored one
    - `on_failure`: called if `generate` raises
    - `rule_states`: immutable, by rule and row
    - `origin`: with beams, the row of each row's history
    - `drafts`: proposed tokens, with hidden states or why there are none
    - `drafting`: above 0 while tokens are proposed
    - `prepared`: a forward was prepared since the last criteria
    - `end`: ends a continuous batching request
    - `by_hand`: a user's loop
    - `prompt_checked`: the prompt ran as given
    - `sampled`: a token was sampled, its ends are unknown
    - `asked_of_prompt`: prompt rules ran
    - `beside`: this generation in all runs
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
    rule_states: dict[int | str, dict[int, Any]] = field(default_factory=dict)
    drafts: list[tuple[PlacedTokens, States | str]] = field(default_factory=list)
    origin: Ints | None = None
    end: Callable[[], None] | None = None
    by_hand: bool = False
    prompt_checked: bool = False
    sampled: bool = False
    asked_of_prompt: bool = False
    beside: Sequence[Generation] = ()

    def asks_of_prompt(self) -> bool:
        """True once: when rules are first asked of the prompt."""
        is_first, self.asked_of_prompt = not self.asked_of_prompt, True
        return is_first

    def join(self, followed: list[Generation]) -> None:
        """Register with the other runs that follow this generation."""
        self.beside = followed
        followed.append(self)

    def prepare_forward(self, ids: Any, mask: Any) -> None:
        """Take the sequence or prompt chunk that runs next, and its mask."""
        self.prepared = True
        before, new_ids = self.ids, ids.detach().cpu().numpy() if isinstance(ids, Tensor) else None
        self.ids, self.begin = new_ids, self.prompt.offset
        if self.prompt.chunked and new_ids is not None and new_ids.shape[1] + self.begin <= self.prompt.columns:
            self.begin = max(self.prompt.cached, self.begin)
            if before is not None:
                self.ids = np.concatenate([before, new_ids], axis=1)
        self.mask = mask.detach().cpu().numpy() if isinstance(mask, Tensor) else None

    def take_sampled(self, ids: Ints) -> None:
        """Take a hand loop's sequence `ids [B, L]`."""
        self.ids, self.begin = ids, 0

    def begin_on(self, cache: Any, n_columns: int) -> None:
        """Begin a hand loop on a cache."""
        self.prompt = dataclasses.replace(self.prompt, cached=n_columns, cache=cache)

    def extend_mask(self, mask: Ints | None, n_columns: int) -> Ints | None:
        """Keep a hand loop's mask; without one, extend the last by ones."""
        if mask is None and self.mask is not None:
            n_new = max(0, n_columns - self.mask.shape[1])
            mask = np.pad(self.mask, ((0, 0), (0, n_new)), constant_values=1)
        self.mask = mask
        return mask

    @contextmanager
    def proposing(self) -> Iterator[None]:
        """Context manager: forwards inside are drafts."""
        self.drafting += 1
        try:
            yield
        finally:
            self.drafting -= 1
            self.prepared = False

    def ids_before(self, row: int, column: int, n: int) -> tuple[int, ...]:
        """Return the last `n` known ids of a row before a column of the padded sequence."""
        if self.ids is None or row >= len(self.ids):
            return ()
        stop = max(0, column - self.begin)
        return tuple(int(id) for id in self.ids[row, max(0, stop - n) : stop])

    def states_of_rule(self, number: int | str) -> dict[int, Any]:
        """Return a rule's state by row; a text for rules of a function."""
        return self.rule_states.setdefault(number, {})

    def ids_of_embeds(self, embeds: Tensor, start: int) -> Tensor:
        """Return the ids of embeddings `[B, T, D]` after `start` columns; -1 if unknown."""
        if self.ids is not None and start + embeds.shape[1] == self.ids.shape[1] + self.begin:
            tail = self.ids[:, max(0, start - self.begin) :]
            if tail.shape[1] == embeds.shape[1]:
                return torch.from_numpy(tail)
        return torch.full(embeds.shape[:2], NO_ID, dtype=torch.int64, device="cpu")

    def check_prompt(self, n_columns: int) -> None:
        """Raise if another prompt ran; `n_columns` includes the first sample."""
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
        """Note that `placed` were scored, if `all_seen`."""
        if placed.phase == GENERATED:
            first = int(placed.columns[0] if len(placed) == 1 else placed.columns.min())
            if not all_seen or first > max(self.scored_columns, self.prompt.columns):
                self.blind_column = first if self.blind_column is None else min(first, self.blind_column)
        self.scored_columns = int(placed.columns[0] if len(placed) == 1 else placed.columns.max()) + 1

    def showable_columns(self) -> int:
        """Return the end of the columns that may be shown."""
        return min(
            column for column in (self.scored_columns, self.blind_column, self.stop_column) if column is not None
        )

    def check_ids(self, forward: DecoderForward) -> None:
        """Raise if tokens are not at their own columns.

        transformers does that with drafts on a used cache.
        """
        ids, begin = self.ids, self.begin
        if ids is None:
            return
        end = forward.start + forward.ids.shape[1]
        # Lists, because numpy is slow for one number.
        if (
            ids.shape[1] + begin != end
            or ids[:, max(0, forward.start - begin) :].tolist()
            != forward.ids[:, max(0, begin - forward.start) :].tolist()
        ):
            raise AlignmentError(
                f"the model runs {forward.ids.shape[1]} tokens after {forward.start} cached ones, for a sequence of"
                f" {ids.shape[1] + begin}: these are not the sequence's tokens at their own places. Either something"
                " runs the model inside generate() (a logits processor, a criterion, a callback): leave it out; or the"
                " cache holds other columns than the sequence, so that the model's own answer is wrong too: start with"
                " an empty one"
            )

    def beam_tokens(self, placed: PlacedTokens) -> PlacedTokens:
        """Return the tokens to score, provisional: a prompt once, in its first beam."""
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
        """Yield the accepted drafts of `ids [1, L]`, token by token."""
        call, offset = self.recording.call, self.recording.offset
        output_ids = ids.detach().cpu().numpy()
        last = offset + output_ids.shape[1] - 1  # the newest token was not run
        drafts, self.drafts, self.prepared = self.drafts, [], False
        for placed, states in drafts:
            for i in range(len(placed)):
                column = int(placed.columns[i])
                if column >= last:
                    break
                if output_ids[0, column - offset] != placed.ids[i]:
                    raise AlignmentError(
                        f"column {column}: a draft had token {placed.ids[i]}, the sequence has"
                        f" {output_ids[0, column - offset]}, yet it was kept"
                    )
                token = dataclasses.replace(placed.take(np.array([i])), draft=False)
                yield token, states if isinstance(states, str) else {site: h[i : i + 1] for site, h in states.items()}
        call.take_back(last)

    def mark_sampled(self) -> None:
        """Note a sampled token."""
        self.sampled = True

    def ended(self, ids: Tensor, done: Tensor, pads: bool) -> None:
        """Record the criteria's result for `ids [B, L]`; `pads`: ended rows are padded."""
        if not self.sampled:
            return
        self.sampled = False
        call, beams = self.recording.call, self.recording.beams
        ends: list[bool] = done.tolist()
        if beams is not None:
            beams.ended(ids.detach().cpu().numpy(), np.array(ends), call.n_rows // beams.n_beams)
            ends = []
        call.ended(ends if pads else [])

    def stop_all_rows(self) -> None:
        """End all rows at the next token."""
        self.stop_all = True

    def stop_row(self, row: int, column: int) -> None:
        """End a row at its next token, because of `column`."""
        self.hide_from(column)
        if not len(self.stop):
            self.stop = np.zeros(self.recording.call.n_rows, dtype=bool)
        self.stop[row] = True

    def raise_later(self, error: BaseException, column: int) -> None:
        """Raise the first such error at the next token."""
        self.hide_from(column)
        if self.raising is None:
            self.raising = error

    def hide_from(self, column: int) -> None:
        """Hide columns from `column` on in all runs' held streamers."""
        for generation in (self, *self.beside):
            generation.hide_here_from(column)

    def hide_here_from(self, column: int) -> None:
        """Hide them in this run's held streamers."""
        self.stop_column = column if self.stop_column is None else min(column, self.stop_column)

    def row_stops(self, row: int) -> bool:
        """True if the row ends next."""
        return self.stop_all or bool(len(self.stop) and self.stop[row])

    def end_by(self, end: Callable[[], None]) -> None:
        """Set how to end a continuous batching request."""
        self.end = end
        if self.stopping:
            end()

    def end_request(self) -> None:
        """Raise a pending error, or end the request."""
        if self.raising is not None:
            raise self.raising
        if self.end is not None and self.stopping:
            self.end()

    @property
    def stopping(self) -> bool:
        """True if any row ends next."""
        return self.stop_all or len(self.stop) > 0  # created for the first stopped row

    def stopped(self, like: Tensor) -> Tensor:
        """Return stopped rows as a mask like `like [B]`."""
        if self.stop_all:
            return torch.ones_like(like)
        return torch.from_numpy(self.stop).to(like.device) if len(self.stop) == len(like) else torch.zeros_like(like)


@dataclass
class PendingTokens:
    """Tokens of the open forward, with hidden states so far."""

    generation: Generation | None
    recording: Recording
    placed: PlacedTokens
    states: States = field(default_factory=dict)


class FollowedGenerations(threading.local):
    """By model: number of runs, generations, and the newest begin."""

    def __init__(self) -> None:
        self.models: Counter[int] = Counter()
        self.generations: defaultdict[int, list[Generation]] = defaultdict(list)
        self.begun: dict[int, int] = {}


FOLLOWING = FollowedGenerations()
ORDER = itertools.count()  # of runs and generations in this process


@dataclass(slots=True)
class OpenForward:
    """A watched decoder forward of `shape` (rows, tokens) that runs.

    - `recording`: None in continuous batching
    - `pending`: tokens not reported yet
    - `seen_sites`: sites that ran
    - `seconds`, `began`: in our hooks; start time
    - `n_tokens`: prompt, generated
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
    """A thread's generation and open forward."""

    def __init__(self) -> None:
        self.generation: Generation | None = None
        self.foreign = False  # the next forward is from before attaching
        self.unwatched: FrameType | None = None  # from before attaching, already reported
        self.forward: OpenForward | None = None
        self.ended: OpenForward | None = None  # ended, not reported yet
        self.early_states: States = {}  # of sites that run before their forward
        self.inside = self.has_run = False  # in any forward; one has begun
        self.alone: set[str] = set()  # sites that ran before any forward
        self.step: Callable[[bool], None] | None = None  # reports or discards scores

    def reset_forward(self) -> States:
        """Forget the open forward; return the early states."""
        self.forward = self.ended = None
        early_states, self.early_states = self.early_states, {}
        return early_states


class FollowedCriteria(StoppingCriteriaList):
    """Stopping criteria that report to the runs that follow.

    `sampled(ids, done)` gets the ended rows and may end more; `ended(ids, done, pads)` gets the result. Later runs wrap
    earlier ones; a row that one ends has ended for all.
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
        # generate pads only if a criterion knows the end-of-sequence token.
        pads = any(hasattr(criterion, "eos_token_id") for criterion in self)
        criteria: Any = self
        while isinstance(criteria, FollowedCriteria):
            criteria._ended(input_ids, done, pads)
            criteria = criteria._inner
        return done

    def _ask(self, ids: Tensor, scores: Any, options: dict[str, Any]) -> Tensor:
        inner = self._inner
        done: Tensor = (
            inner._ask(ids, scores, options) if isinstance(inner, FollowedCriteria) else inner(ids, scores, **options)
        )
        return self._sampled(ids, done)
