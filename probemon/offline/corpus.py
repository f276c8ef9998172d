"""Scores the tokens of documents, shard by shard, in the order of the input.

    for scored in score_documents(manager, model, tokenizer, read_documents("mails.jsonl")):
        scored.document.id, scored.tokens.ids, scored.scores.fired(3)

Every document is all prompt: its tokens are scored memorylessly, as a prompt's are online. The host runs in the calling
thread; tokenising and scoring have one thread each, so that the next batch runs while one is scored. The documents
alone fix the order of everything. A forward ends after the last layer that the pack reads.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.scores import Scores
from probemon.engine.audit import sample
from probemon.engine.scorer import Scorer
from probemon.errors import AlignmentError, ConfigError, NotSupportedHost
from probemon.host.abilities import Abilities
from probemon.host.adapters import needs_its_wrapper, rehearsal
from probemon.host.compatibility import check_host
from probemon.host.internals import has_accelerate_hook
from probemon.host.model import (
    compiled_parts,
    drops_at_random,
    find_layers,
    hidden_size,
    is_encoder_decoder,
    longest_input,
    unwrap,
)
from probemon.host.tap import Tap, check_states, ran_again
from probemon.offline.documents import Document
from probemon.offline.windows import Piece, Reading, Shard, Tokens, batches, cut, encode, shards

_IN_FLIGHT = 3  # batches run by the host and not yet scored: bounds what is held


@dataclass(frozen=True)
class ScoredDocument:
    """A document with the scores of its T tokens, and `everything` fp32 `[T, P]` if asked for.

    `tokens` and `scores` are None where the document has a reason.
    """

    document: Document
    tokens: Tokens | None
    scores: Scores | None
    everything: Tensor | None = None


@dataclass(frozen=True)
class ScoredShard:
    """A shard's scores: document i has `ptr[i]` to `ptr[i + 1]`, and its tokens are None if it has a reason."""

    shard: Shard
    documents: tuple[Document, ...]
    tokens: tuple[Tokens | None, ...]
    ptr: Ints
    scores: Scores
    everything: Tensor | None

    def __iter__(self) -> Iterator[ScoredDocument]:
        for i, (document, tokens) in enumerate(zip(self.documents, self.tokens, strict=True)):
            at = np.arange(self.ptr[i], self.ptr[i + 1])
            if tokens is None:
                yield ScoredDocument(document, None, None)
            else:
                yield ScoredDocument(
                    document, tokens, self.scores.take(at), None if self.everything is None else self.everything[at]
                )


@dataclass(frozen=True)
class _ShardPlan:
    """A shard ready for the host; its documents have the tokenizer's reasons too."""

    shard: Shard
    documents: tuple[Document, ...]
    tokens: tuple[Tokens | None, ...]
    batches: list[list[Piece]]
    n_tokens: int


class _ForwardEnd(BaseException):
    """Ends a forward that has shown all it has to; no `Exception`, so that nothing on its way out catches it."""


class _OwnForward(threading.local):
    """What this thread's own forward has shown, by site; None while there is none."""

    seen: dict[str, list[Tensor]] | None = None


def score_documents(
    manager: Scorer,
    model: Any,
    tokenizer: Any,
    documents: Iterable[Document],
    *,
    reading: Reading | None = None,
    exhaustive: bool = False,
    strict: bool = False,
    progress: Callable[[float, int], object] | None = None,
) -> Iterator[ScoredDocument]:
    """Score documents, in order; `exhaustive`: also by every probe. Raises as `CorpusScorer`."""
    scorer = CorpusScorer(manager, model, tokenizer, reading or Reading(), strict=strict)
    for scored in scorer.score(shards(documents), exhaustive=exhaustive, progress=progress):
        yield from scored


class CorpusScorer:
    """Scores shards of documents by a manager, a host in eval mode and its tokenizer.

        scorer = CorpusScorer(manager, model, tokenizer, Reading())
        for scored in scorer.score(shards(documents)): scored.ptr, scored.scores

    `floor`: under the path rule the descent reaches every score above it, too. Raises `HostMismatch` where the pack is
    for another host, `NotSupportedHost` where the host has an encoder, `ConfigError` where it is training.
    """

    def __init__(
        self,
        manager: Scorer,
        model: Any,
        tokenizer: Any,
        reading: Reading,
        *,
        strict: bool = False,
        floor: float | None = None,
    ) -> None:
        host = unwrap(model)
        if is_encoder_decoder(host):
            raise NotSupportedHost(
                f"{type(host).__name__} has an encoder: what its decoder would read a document as is unknown. Give a"
                " decoder alone"
            )
        dropping = "the whole" if host.training else drops_at_random(model)
        if dropping is not None:
            raise ConfigError(
                f"{dropping} of {type(host).__name__} is training, and drops at random: call model.eval()"
            )
        check_host(manager.pack, host, strict=strict)
        self.manager, self.tokenizer, self.reading = manager, tokenizer, reading
        self.strategy = manager.strategy.batch  # may be set to another before anything is scored
        self._plan = manager.plan if floor is None else manager.plan.with_floor(floor)
        self.window = reading.window_for(type(host).__name__, longest_input(host))
        self.model, self.host = model, host
        # Where padding gets into a row, or its length into others, only rows of one length share a batch.
        abilities = Abilities(host)
        self._padded, self._looks_ahead = (
            abilities.takes_padding(self.window.n_tokens),
            abilities.looks_ahead(self.window.n_tokens),
        )
        wrapped = needs_its_wrapper(model, host)
        self._runs = model if wrapped else find_layers(host)[0]
        self._may_stop = may_be_left(host) and not wrapped  # PEFT's wrapper would leave its hooks on
        self._rehearses = rehearsal(host)
        self._width = hidden_size(host)  # the pack's, as check_host has seen
        self._known = False  # that a forward shows each site once
        self._open = _OwnForward()
        self._stop = False

    def around(self) -> dict[str, list[int]]:
        """Return the special tokens before and after every window."""
        tokens = self._encoded("a")
        return {"before": list(tokens.prefix), "after": list(tokens.suffix)}

    def score(
        self,
        shards: Iterable[Shard],
        *,
        exhaustive: bool = False,
        progress: Callable[[float, int], object] | None = None,
    ) -> Iterator[ScoredShard]:
        """Score shards, in order. `progress` is called with how many more documents (in parts) and tokens ran."""
        source = iter(shards)
        tap = Tap(self.host, self.manager.pack.sites, self._tapped)
        tokenising, scoring = ThreadPoolExecutor(1, "probemon-tokenise"), ThreadPoolExecutor(1, "probemon-score")
        under_way: deque[tuple[bool, Future[Any]]] = deque()  # whether it ends a shard, and its result
        try:
            with tap:
                following = self._begin(tokenising, source)
                while following is not None:
                    planned = following.result()
                    following = self._begin(tokenising, source)
                    parts: list[tuple[list[Piece], Scores, Tensor | None]] = []
                    for rows in planned.batches:
                        states = self._run(rows, planned.tokens)
                        under_way.append(
                            (
                                False,
                                scoring.submit(
                                    self._score, parts, rows, states, self._sampled(planned, rows), exhaustive
                                ),
                            )
                        )
                        if progress is not None:
                            n_tokens = sum(piece.stop - piece.scored for piece in rows)
                            progress(len(planned.documents) * n_tokens / planned.n_tokens, n_tokens)
                        yield from _finished_shards(under_way, _IN_FLIGHT)
                    if progress is not None and not planned.batches:
                        progress(len(planned.documents), 0)
                    under_way.append((True, scoring.submit(_assemble, planned, parts, self.manager.pack.n_probes)))
                yield from _finished_shards(under_way, 0)
        finally:
            for executor in (tokenising, scoring):
                executor.shutdown(wait=True, cancel_futures=True)

    def states(self, shards: Iterable[Shard]) -> Iterator[tuple[Document, Tokens, dict[str, Tensor]]]:
        """Return the documents that can be read, with their tokens and hidden states `[T, D]` at the pack's sites."""
        for shard in shards:
            planned = self.plan(shard)
            lengths = [0 if encoded is None else len(encoded) for encoded in planned.tokens]
            room: list[dict[str, Tensor]] = [{} for _ in lengths]
            with Tap(self.host, self.manager.pack.sites, self._tapped):
                for rows in planned.batches:
                    sizes = [piece.stop - piece.scored for piece in rows]
                    for site, hidden in self._run(rows, planned.tokens).items():
                        for piece, part in zip(rows, hidden.split(sizes), strict=True):
                            whole = room[piece.place].setdefault(
                                site, hidden.new_empty(lengths[piece.place], hidden.shape[1])
                            )
                            whole[piece.scored : piece.stop] = part
            for document, tokens, encoded in zip(planned.documents, planned.tokens, room, strict=True):
                if tokens is not None:
                    yield document, tokens, encoded

    def _begin(self, tokenising: ThreadPoolExecutor, source: Iterator[Shard]) -> Future[_ShardPlan] | None:
        shard = next(source, None)  # in the caller's thread, as their iterable may need
        return None if shard is None else tokenising.submit(self.plan, shard)

    def plan(self, shard: Shard) -> _ShardPlan:
        """Tokenise a shard, and plan its batches."""
        documents, tokens, pieces = list(shard.documents), [], []
        for place, document in enumerate(documents):
            encoded, reason = (None, document.reason) if document.reason else self._tokens(document.text)
            if reason:
                documents[place] = Document(document.index, document.id, document.text, reason, document.fields)
            tokens.append(encoded)
            pieces += [] if encoded is None else cut(encoded, place, self.window)
        grouped = batches(
            pieces, max_tokens=self.reading.batch_tokens, max_rows=self.reading.batch_rows, padded=self._padded
        )
        return _ShardPlan(
            shard,
            tuple(documents),
            tuple(tokens),
            grouped,
            sum(len(encoded) for encoded in tokens if encoded is not None),
        )

    def _encoded(self, text: str) -> Tokens:
        reading = self.reading
        return encode(
            self.tokenizer,
            text,
            special_tokens=reading.special_tokens,
            parse_special=reading.parse_special,
            after=self._looks_ahead,
        )

    def _tokens(self, text: str) -> tuple[Tokens | None, str]:
        try:
            encoded = self._encoded(text)
        except Exception as error:  # one text must not cost the others
            return None, f"cannot be tokenised ({type(error).__name__}: {error})"
        return (encoded, "") if len(encoded) else (None, "no tokens")

    def arrays(self, rows: Sequence[Piece], tokens: Sequence[Tokens | None]) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids and mask `[B, L]` of a batch, on the host's device, and which of `[B * L]` are scored in it."""
        longest = max(map(len, rows))
        ids, mask = np.zeros((len(rows), longest), dtype=np.int64), np.zeros((len(rows), longest), dtype=np.int64)
        at: list[Ints] = []
        for row, piece in enumerate(rows):
            encoded = tokens[piece.place]
            assert encoded is not None
            ids[row, : len(piece)] = [*encoded.prefix, *encoded.ids[piece.begin : piece.stop], *encoded.suffix]
            mask[row, : len(piece)] = 1  # padding follows the text, where no state of it can see it: see _padded
            first = row * longest + piece.n_prefix - piece.begin
            at.append(np.arange(first + piece.scored, first + piece.stop))
        ids_at, mask_at = (torch.from_numpy(array).to(self.host.device) for array in (ids, mask))
        return ids_at, mask_at, torch.from_numpy(np.concatenate(at))

    def _run(self, rows: Sequence[Piece], tokens: Sequence[Tokens | None]) -> dict[str, Tensor]:
        """Run the host over a batch; return the states `[N, D]` of the tokens scored in it, row by row, by site."""
        ids, mask, where = self.arrays(rows, tokens)
        seen: dict[str, list[Tensor]] = {site: [] for site in self.manager.pack.sites}
        self._stop = self._may_stop and self._known
        with torch.inference_mode():
            self._open.seen = seen  # of this thread: others may run the same model
            try:
                with suppress(_ForwardEnd):
                    self._runs(input_ids=ids, attention_mask=mask, use_cache=False)
            finally:
                self._open.seen = None
            for site, hidden in seen.items():
                if len(hidden) != 1:
                    raise AlignmentError(
                        ran_again(site) if hidden else f"a forward of the host ended without reaching {site}"
                    )
                check_states(site, hidden[0], ids.shape, self._width)
            self._known = True
            return {
                site: hidden[0].reshape(-1, hidden[0].shape[-1]).index_select(0, where.to(hidden[0].device))
                for site, hidden in seen.items()
            }

    def _tapped(self, site: str, hidden: Tensor) -> None:
        seen = self._open.seen
        if seen is not None and not self._rehearses():  # else a forward of somebody else's
            seen[site].append(hidden)
            if self._stop and all(seen.values()):
                raise _ForwardEnd

    def _sampled(self, planned: _ShardPlan, rows: Sequence[Piece]) -> Mask | None:
        """Draw the tokens that are audited, by document and position, so that a run that goes on draws the same."""
        if not self.manager.audit_rate:
            return None
        document = np.repeat(
            [planned.documents[piece.place].index for piece in rows], [piece.stop - piece.scored for piece in rows]
        )
        return sample(
            self.manager.audit_rate, document, np.concatenate([np.arange(piece.scored, piece.stop) for piece in rows])
        )

    def _score(
        self,
        parts: list[tuple[list[Piece], Scores, Tensor | None]],
        rows: list[Piece],
        states: Mapping[str, Tensor],
        audit: Mask | None,
        exhaustive: bool,
    ) -> None:
        with torch.inference_mode():
            _, scored = self.manager.score_prompt(self._plan, states, [], audit=audit, strategy=self.strategy)
            everything = self.manager.score_all(states) if exhaustive else None
        parts.append((rows, Scores.join(scored, self.manager.pack.n_probes, self.manager.report_top_k), everything))


def may_be_left(host: Any) -> bool:
    """Return whether a forward may be ended half-way: not where accelerate's hooks put weights back after a layer, nor
    where a compiled layer is one piece.
    """
    moved = any(has_accelerate_hook(module) for module in host.modules())
    return not moved and not compiled_parts(host)


def _finished_shards(under_way: deque[tuple[bool, Future[Any]]], most: int) -> Iterator[ScoredShard]:
    """Wait until at most `most` are under way; return the shards that are finished."""
    while len(under_way) > most or (under_way and under_way[0][1].done()):
        last, future = under_way.popleft()
        scored = future.result()
        if last:
            yield scored


def _assemble(
    planned: _ShardPlan, parts: list[tuple[list[Piece], Scores, Tensor | None]], n_probes: int
) -> ScoredShard:
    """Put the scores of a shard's batches into the order of its documents and their tokens."""
    lengths = [0 if encoded is None else len(encoded) for encoded in planned.tokens]
    ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ranges = [
        np.arange(ptr[piece.place] + piece.scored, ptr[piece.place] + piece.stop)
        for rows, *_ in parts
        for piece in rows
    ]
    order = np.argsort(np.concatenate([np.zeros(0, dtype=np.int64), *ranges]), kind="stable")
    assert len(order) == ptr[-1]
    top_k = parts[0][1].report_top_k if parts else 10
    scores = Scores.join([scored for _, scored, _ in parts], n_probes, top_k).take(order)
    full = [everything for *_, everything in parts if everything is not None]
    return ScoredShard(
        planned.shard, planned.documents, planned.tokens, ptr, scores, torch.cat(full)[order] if full else None
    )
