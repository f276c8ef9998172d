"""Scores the tokens of documents, shard by shard, in the order of the input.

    for scored in score_documents(manager, model, tokenizer, read_documents("mails.jsonl")):
        scored.document.id, scored.tokens.ids, scored.scores.fired(3)

Documents are scored as prompts. Tokenising and scoring have one thread each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import norms_of
from probemon.core.scores import Scores
from probemon.engine.audit import sample
from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError
from probemon.host.chat_dates import CHAT_DATE, may_read_date
from probemon.host.compatibility import check_host
from probemon.lab.corpora.documents import Document
from probemon.lab.corpora.state_reader import ShardPlan, StateReader
from probemon.lab.corpora.windows import DocumentShard, Reading, WindowPiece, WindowTokens, shards
from probemon.packs.group import AnyPack, stated_chat_dates
from probemon.packs.manifest import SO_FAR

_IN_FLIGHT = 3  # batches; bounds memory
_Part = tuple[list[WindowPiece], Scores, tuple[Tensor, Tensor] | None]


@dataclass(frozen=True)
class ScoredDocument:
    """A document with scores of its T tokens (None with a reason), `everything` fp32 `[T, P]`, `norms [T, S]`."""

    document: Document
    tokens: WindowTokens | None
    scores: Scores | None
    everything: Tensor | None = None
    norms: Tensor | None = None


@dataclass(frozen=True)
class ScoredShard:
    """Scores of a shard: document i has `ptr[i]` to `ptr[i + 1]`.

    `counted [N]`: tokens of the parts of `Reading.on`. Iterating gives only these.
    """

    shard: DocumentShard
    documents: tuple[Document, ...]
    tokens: tuple[WindowTokens | None, ...]
    ptr: Ints
    scores: Scores
    everything: Tensor | None
    norms: Tensor | None
    counted: Mask

    def __iter__(self) -> Iterator[ScoredDocument]:
        for i, (document, tokens) in enumerate(zip(self.documents, self.tokens, strict=True)):
            at = np.arange(self.ptr[i], self.ptr[i + 1])
            if tokens is not None and not self.counted[at].all():
                tokens = tokens.only(self.counted[at])
                at = at[self.counted[at]]
            if tokens is None:
                yield ScoredDocument(document, None, None)
            else:
                full = (None if values is None else values[at] for values in (self.everything, self.norms))
                yield ScoredDocument(document, tokens, self.scores.take(at), *full)


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
    """Score documents, in order; `exhaustive` adds scores of every probe and norms. Raises like `CorpusScorer`."""
    scorer = CorpusScorer(manager, model, tokenizer, reading or Reading(), strict=strict)
    for scored in scorer.score(shards(documents), exhaustive=exhaustive, progress=progress):
        yield from scored


class CorpusScorer:
    """Scores shards of documents with a model in eval mode.

    `floor`: under the path rule the descent also reaches every score above it. Raises `ModelMismatch` if pack or
    deployment are for another model, `UnsupportedModel` for a model with an encoder, `ConfigError` for one in training
    mode.
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
        so_far = manager.pack.scope == SO_FAR
        if reading.chat_date is None:
            reading = replace(reading, chat_date=_chat_date(manager.pack, tokenizer))
        self.reader = StateReader(model, tokenizer, manager.pack.sites, reading, so_far=so_far)
        check_host(manager.pack, self.reader.host, strict=strict)
        deployment: Any = getattr(manager, "deployment", None)
        if deployment is not None:
            deployment.check_host(manager.pack, model)
        self.manager = manager
        self.strategy = manager.strategy.batch
        self._plan = manager.plan if floor is None else manager.plan.with_floor(floor)

    def score(
        self,
        shards: Iterable[DocumentShard],
        *,
        exhaustive: bool = False,
        progress: Callable[[float, int], object] | None = None,
    ) -> Iterator[ScoredShard]:
        """Score shards, in order. `progress` gets increments of documents (fractions) and tokens."""
        source = iter(shards)
        tokenising, scoring = ThreadPoolExecutor(1, "probemon-tokenise"), ThreadPoolExecutor(1, "probemon-score")
        under_way: deque[tuple[bool, Future[Any]]] = deque()  # (ends a shard, result)
        try:
            with self.reader.tap():
                upcoming = self._begin(tokenising, source)
                while upcoming is not None:
                    planned = upcoming.result()
                    upcoming = self._begin(tokenising, source)
                    parts: list[_Part] = []
                    for rows in planned.batches:
                        states = self.reader.run(rows, planned.tokens)
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
                    under_way.append((True, scoring.submit(self._assembled, planned, parts)))
                yield from _finished_shards(under_way, 0)
        finally:
            for executor in (tokenising, scoring):
                executor.shutdown(wait=True, cancel_futures=True)

    def _begin(self, tokenising: ThreadPoolExecutor, source: Iterator[DocumentShard]) -> Future[ShardPlan] | None:
        shard = next(source, None)  # in the caller's thread
        return None if shard is None else tokenising.submit(self.reader.plan, shard)

    def _sampled(self, planned: ShardPlan, rows: Sequence[WindowPiece]) -> Mask | None:
        """Draw audited tokens, reproducibly by document and position."""
        if not self.manager.audit_rate:
            return None
        document = np.repeat(
            [planned.documents[piece.place].index for piece in rows], [piece.stop - piece.scored for piece in rows]
        )
        return sample(
            self.manager.audit_rate, document, np.concatenate([np.arange(piece.scored, piece.stop) for piece in rows])
        )

    def _assembled(self, planned: ShardPlan, parts: list[_Part]) -> ScoredShard:
        return _assemble(planned, parts, self.manager.pack.n_probes, self.reader.reading.on)

    def _score(
        self,
        parts: list[_Part],
        rows: list[WindowPiece],
        states: Mapping[str, Tensor],
        audit: Mask | None,
        exhaustive: bool,
    ) -> None:
        with torch.inference_mode():
            _, scored = self.manager.score_prompt(self._plan, states, [], audit=audit, strategy=self.strategy)
            full = None
            if exhaustive:
                full = self.manager.score_all(states), norms_of(states, self.manager.pack.sites).cpu()
        parts.append((rows, Scores.join(scored, self.manager.pack.n_probes, self.manager.report_top_k), full))


def _counted(planned: ShardPlan, on: Sequence[str]) -> Mask:
    masks = [encoded.counted(on) for encoded in planned.tokens if encoded is not None]
    return np.concatenate([np.zeros(0, dtype=bool), *masks])


def _chat_date(pack: AnyPack, tokenizer: Any) -> str | None:
    """Raises `ConfigError` if packs disagree."""
    if not may_read_date(str(getattr(tokenizer, "chat_template", None))):
        return None
    dates = stated_chat_dates(pack)
    if len(dates) > 1:
        raise ConfigError(
            f"the packs were made of chats of different days, {' and '.join(dates)}: choose the day for rendering chats"
            " with Reading(chat_date=...)"
        )
    return dates[0] if dates else CHAT_DATE


def _finished_shards(under_way: deque[tuple[bool, Future[Any]]], most: int) -> Iterator[ScoredShard]:
    """Yield finished shards until at most `most` are under way."""
    while len(under_way) > most or (under_way and under_way[0][1].done()):
        last, future = under_way.popleft()
        scored = future.result()
        if last:
            yield scored


def _assemble(planned: ShardPlan, parts: list[_Part], n_probes: int, on: Sequence[str]) -> ScoredShard:
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
    full = zip(*(values for *_, values in parts if values is not None), strict=True)
    everything, norms = [torch.cat(values)[order] for values in full] or (None, None)
    counted = _counted(planned, on)
    return ScoredShard(planned.shard, planned.documents, planned.tokens, ptr, scores, everything, norms, counted)
