"""KeptScores: scores of the tokens whose keys and values are in vLLM's prefix cache.

    kept = KeptScores(block_size=16, n_blocks=5000)
    kept.add("1-0a1b", column=0, ids=ids, scores=scores)    # tokens as they are scored
    kept.find("2-9c8d", column=0, ids=ids[:32], n_probes=P, reason=CACHED)      # 32 cached tokens of another request
    kept.release("1-0a1b")                                  # the request has ended

A block is known by the hash of all tokens up to its end, as in vLLM. Blocks of running requests stay, of others the
newest: as many in all as the engine has, so that what is evicted here is evicted there.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints
from probemon.core.scores import Coverage, Floats, Scores

# Of a forward that ran for another request these counts are not this request's.
_COUNTS = ("active", "dropped", "not_reached", "released", "late", "excluded", "shed", "far")


class _Block(NamedTuple):
    """The scores of a block's tokens: sizes `[N]`, pairs `[E]`, counts `[N, C]`."""

    sizes: Ints
    probes: npt.NDArray[np.int32]
    values: Floats
    fired: npt.NDArray[np.bool_]
    counts: npt.NDArray[np.int32]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self)


@dataclass
class _Chain:
    """A request's blocks so far, and its tokens after the last of them from `column` on."""

    keys: list[bytes] = field(default_factory=list)
    used: list[bytes] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    pieces: list[Scores] = field(default_factory=list)
    whole: bool = True  # every column so far is known, scored or not


class KeptScores:
    """`block_size`: tokens; `n_blocks`: kept at most; none with 0."""

    def __init__(self, block_size: int, n_blocks: int) -> None:
        self.block_size, self.n_blocks = block_size, n_blocks
        self._running: dict[bytes, list[Any]] = {}  # key: [block or None, number of requests]
        self._over: OrderedDict[bytes, _Block] = OrderedDict()  # of ended requests, oldest first
        self._chains: dict[str, _Chain] = {}
        self._top_k = 10

    def __len__(self) -> int:
        return len(self._running) + len(self._over)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks."""
        blocks = [*(block for block, _ in self._running.values()), *self._over.values()]
        return sum(block.nbytes for block in blocks if block is not None)

    def add(self, request: str, column: int, ids: Sequence[int], scores: Scores) -> None:
        """Take the next tokens of a request, from `column` on. Blocks with an unseen token are not kept."""
        chain = self._chains.setdefault(request, _Chain())
        if not self.n_blocks or not chain.whole:
            return
        if column != len(chain.keys) * self.block_size + len(chain.ids):
            chain.whole = False  # a hole: what comes after it has no hash
            return
        chain.ids += ids
        chain.pieces.append(scores)
        n = len(chain.ids) // self.block_size
        if not n:
            return
        joined = scores if len(chain.pieces) == 1 else Scores.join(chain.pieces, scores.coverage.n_probes)
        self._top_k = scores.report_top_k
        seen = joined.coverage.seen
        counts = np.stack([getattr(joined.coverage, name) for name in _COUNTS], axis=1).astype(np.int32)
        for at in range(0, n * self.block_size, self.block_size):
            key = self._grow(chain, chain.ids[at : at + self.block_size])
            if seen[at : at + self.block_size].all():
                self._put(chain, key, _block(joined, counts, at, at + self.block_size))
            else:
                self._drop(key)
        chain.ids = chain.ids[n * self.block_size :]
        chain.pieces = [joined.take(np.arange(n * self.block_size, len(joined)))] if chain.ids else []

    def n_unknown(self, request: str, ids: Sequence[int]) -> int:
        """Return how many blocks of a request's next tokens, which come from the cache, `find` would not find now."""
        chain, key, n = self._chains.get(request, _Chain()), b"", 0
        key = chain.keys[-1] if chain.keys else b""
        for at in range(0, len(ids) - self.block_size + 1, self.block_size):
            key = _key(key, ids[at : at + self.block_size])
            entry = self._running.get(key)
            n += (key not in self._over) if entry is None else entry[0] is None
        return n

    def find(self, request: str, column: int, ids: Sequence[int], n_probes: int, reason: str) -> Scores:
        """Return the scores of the next tokens of a request, which came from the cache; `reason` if not kept."""
        chain = self._chains.setdefault(request, _Chain())
        chain.whole &= column == len(chain.keys) * self.block_size and not chain.ids
        blocks: list[tuple[int, _Block | None]] = []  # number of tokens, and their block
        for at in range(0, len(ids) if chain.whole else 0, self.block_size):
            if at + self.block_size > len(ids):
                chain.whole = False
                break
            key = self._grow(chain, ids[at : at + self.block_size])
            block = self._running[key][0] if key in self._running else self._over.get(key)
            blocks.append((self.block_size, block))
            if block is not None:
                self._use(chain, key, block)
        n_rest = len(ids) - len(blocks) * self.block_size
        return _joined([*blocks, (n_rest, None)], n_probes, reason, self._top_k)

    def release(self, request: str) -> None:
        """Forget a request. Its blocks are now the newest, the first of them last to go."""
        chain = self._chains.pop(request, None)
        for key in reversed(chain.used if chain is not None else ()):
            entry = self._running[key]
            entry[1] -= 1
            if not entry[1]:
                del self._running[key]
                if entry[0] is not None:
                    self._over[key] = entry[0]
        self._evict()

    # -- inside ----------------------------------------------------------------------------------

    def _grow(self, chain: _Chain, ids: Sequence[int]) -> bytes:
        key = _key(chain.keys[-1] if chain.keys else b"", ids)
        chain.keys.append(key)
        return key

    def _put(self, chain: _Chain, key: bytes, block: _Block) -> None:
        """Keep a block as it ran last."""
        if key in self._running:
            self._running[key][0] = block
        self._use(chain, key, block)

    def _drop(self, key: bytes) -> None:
        """Forget a block that ran last without scores: what was kept may be of other weights."""
        self._over.pop(key, None)
        if key in self._running:
            self._running[key][0] = None

    def _use(self, chain: _Chain, key: bytes, block: _Block) -> None:
        self._over.pop(key, None)
        self._running.setdefault(key, [block, 0])[1] += 1
        chain.used.append(key)
        self._evict()

    def _evict(self) -> None:
        while self._over and len(self) > self.n_blocks:
            self._over.popitem(last=False)


def _key(before: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + np.asarray(ids, dtype=np.int64).tobytes(), digest_size=16).digest()


def _block(scores: Scores, counts: npt.NDArray[np.int32], begin: int, end: int) -> _Block:
    first, last = int(scores.ptr[begin]), int(scores.ptr[end])
    return _Block(  # copies: views would keep the whole step
        np.diff(scores.ptr[begin : end + 1]),
        scores.probes[first:last].copy(),
        scores.values[first:last].copy(),
        scores.fired_mask[first:last].copy(),
        counts[begin:end].copy(),
    )


def _joined(blocks: Sequence[tuple[int, _Block | None]], n_probes: int, reason: str, top_k: int) -> Scores:
    """Return the scores of tokens, which are unseen where there is no block."""
    known = [block for _, block in blocks if block is not None]
    lengths = [n for n, _ in blocks]
    seen = np.repeat([block is not None for _, block in blocks], lengths)
    sizes = np.zeros(len(seen), dtype=np.int64)
    counts = np.zeros((len(seen), len(_COUNTS)), dtype=np.int64)
    if known:
        sizes[seen] = np.concatenate([block.sizes for block in known])
        counts[seen] = np.concatenate([block.counts for block in known])
    of_each: dict[str, Any] = {name: counts[:, i] for i, name in enumerate(_COUNTS)}
    nothing = Coverage.nothing(len(seen), n_probes, reason)
    unseen = tuple("" if one else reason for one in seen.tolist())
    return Scores(
        ptr=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        probes=np.concatenate([np.zeros(0, np.int32), *(block.probes for block in known)]),
        values=np.concatenate([np.zeros(0, np.float32), *(block.values for block in known)]),
        fired_mask=np.concatenate([np.zeros(0, bool), *(block.fired for block in known)]),
        coverage=dataclasses.replace(nothing, unseen=unseen, from_cache=seen.astype(np.int64), **of_each),
        report_top_k=top_k,
    )
