"""Decisions: what routers of any kind decided about tokens.

    decisions = source.decisions(states)            # of S streams about n tokens
    decisions.weights, decisions.top_idx            # [S, n, E], [S, n, k]
    history = History(n_rows, n_streams)
    changes = history.compare(rows, decisions)      # against the token before each, of the same row

A stream is one router: that of a layer of a mixture of experts, one level of a BEM controller, an X-LoRA classifier,
the reads of one memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.adapters.bem.config import MAX_NORM
from probemon.core.hierarchy import Ints, Mask

Numbers = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

MOE, XLORA, BEM, SLOTS = "moe", "xlora", "bem", "memory"
SSM = "ssm"  # no router, and nothing is decided: a layer that keeps a state
LARGEST = MAX_NORM * (1 + 1e-5)  # norm of a code, rounded: beyond it a batch's products would leave 64 bits
SAME = 1e-4  # codes that differ by less, relative to their size, are one: a prompt's and a step's sums differ in order
# Fields [S, n, ...]; the others are [n].
_BY_STREAM = ("raw", "weights", "top_idx", "top_w", "top_position", "top_token", "decided", "steering")


@dataclass(frozen=True)
class Stream:
    """One router: its `source`, the site where it is read, its host layer, its BEM level.

    `source` is "moe", "xlora", "bem" or "memory"; of a recurrent layer, in alerts alone, "ssm". `layer` is -1 where it
    is of no layer in particular, `level` "" where it gives no BEM code.
    """

    source: str
    site: str
    layer: int
    level: str = ""

    def __str__(self) -> str:
        return f"{self.site} {self.level}".strip()


@dataclass(frozen=True)
class Decisions:
    """What S streams decided about n tokens, over E experts, or as codes of E dimensions.

    - `raw [S, n, E]` fp32: what the router gave (logits, scalings, a code).
    - `weights [S, n, E]` fp64: its distributions, each of which sums to 1; None for codes, which are none.
    - `top_idx`, `top_w` `[S, n, k]`: what was chosen and how much of it, most first.
    - `decided [S, n]`: False where the decision of an earlier token was used again.
    - `confidence`, `sigma1`, `delta_rel_norm` `[n]`: NaN where the router does not give them.
    - `fallback [n]`: whether a fallback was in force.
    - `chunk [n]`: of codes, the chunk that the token is in.
    - `level [n]`: of codes, the number of the stream whose code most sites take; None where the router does not say.
    - `steering [S, n]`: of codes, False where no site takes that level, and in a row's first chunk, whose code is a
      learned constant. None means True for all.
    - `top_position`, `top_token` `[S, n, k]`: of memory slots, which token each was written at: its place among the
      real tokens of its row, and its id; -1 for none. None for other routers.
    - `measured [n, K]`: sizes of an adapter's updates, as `probemon.adapters.bem.measures` names them; None where
      nobody asked.
    """

    raw: Singles
    weights: Numbers | None
    top_idx: Ints
    top_w: Singles
    decided: Mask
    confidence: Singles
    sigma1: Singles
    delta_rel_norm: Singles
    fallback: Mask
    chunk: Ints | None = None
    level: Ints | None = None
    steering: Mask | None = None
    top_position: Ints | None = None
    top_token: Ints | None = None
    measured: Singles | None = None

    @classmethod
    def of(cls, raw: Singles, weights: Numbers | None, top_idx: Ints, top_w: Singles, **more: object) -> Decisions:
        """Fill in what a router does not give that has no chunks, confidence or updates."""
        n_streams, n = raw.shape[:2]
        unknown = np.full(n, np.nan, dtype=np.float32)
        defaults = {
            "confidence": unknown,
            "sigma1": unknown,
            "delta_rel_norm": unknown,
            "decided": np.ones((n_streams, n), bool),
            "fallback": np.zeros(n, bool),
        }
        return cls(raw, weights, top_idx, top_w, **{**defaults, **more})  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.raw.shape[1]

    @property
    def n_streams(self) -> int:
        """The number of streams, S."""
        return self.raw.shape[0]

    def take(self, tokens: Ints) -> Decisions:
        """Return the decisions about the tokens of these numbers."""

        def taken(name: str) -> Any:
            values = getattr(self, name)
            return values if values is None else values[:, tokens] if name in _BY_STREAM else values[tokens]

        return Decisions(**{field.name: taken(field.name) for field in fields(self)})

    @staticmethod
    def join(parts: list[Decisions]) -> Decisions:
        """Return the decisions of several batches of the same streams, one batch after another."""
        if len(parts) == 1:
            return parts[0]

        def joined(name: str) -> Any:
            values = [getattr(part, name) for part in parts]
            return (
                None if any(value is None for value in values) else np.concatenate(values, axis=int(name in _BY_STREAM))
            )

        return Decisions(**{field.name: joined(field.name) for field in fields(Decisions)})

    @cached_property
    def finite(self) -> Mask:
        """`[S, n]`: False where a router gave no finite number, or a code whose norm is beyond the limits."""
        if self.weights is not None:
            return np.asarray(np.isfinite(self.raw).all(axis=-1))
        with np.errstate(invalid="ignore"):
            return np.asarray(norms(self.raw) <= LARGEST)


@dataclass(frozen=True)
class Changes:
    """How decisions about n tokens differ from those about the token before each.

    - `flips [S, n]`: 1 where another expert comes first, 0 where the same does, -1 where no token went before, or
      one of the two decisions is not finite.
    - `invalidated [S, n]`: the code is another one though nothing was decided, so that keys and values before it were
      computed with an older one.
    """

    flips: npt.NDArray[np.int8]
    invalidated: Mask

    def take(self, tokens: Ints | slice) -> Changes:
        """Return the changes at the tokens of these numbers."""
        return Changes(self.flips[:, tokens], self.invalidated[:, tokens])


class History:
    """The decisions about each row's newest token, with which `compare` compares the next ones."""

    def __init__(self, n_rows: int, n_streams: int) -> None:
        self._top: Ints = np.full((n_rows, n_streams), -1, dtype=np.int64)
        self._chunk: Ints = np.full(n_rows, -1, dtype=np.int64)
        self._code: Singles | None = None

    def forget(self, rows: Ints) -> None:
        """Forget the newest tokens of rows in which tokens went by unseen: the next ones have no neighbour."""
        self._top[rows] = -1
        self._chunk[rows] = -1

    def compare(self, rows: Ints, decisions: Decisions, begins: Mask | None = None) -> Changes:
        """Return what changed at tokens in `rows [n]`, in which those of a row stand together, and keep the newest.

        `begins [n]`: a token that has no neighbour before it, since it is the first of a sequence packed in its row.
        """
        first = np.where(decisions.finite, decisions.top_idx[:, :, 0], -1)
        before = np.empty_like(first)
        before[:, :1] = self._top[rows[:1]].T
        new_row = rows[1:] != rows[:-1]
        before[:, 1:] = np.where(new_row, self._top[rows[1:]].T, first[:, :-1])
        if begins is not None:
            before[:, begins] = -1
        flips = np.where((before < 0) | (first < 0), -1, before != first).astype(np.int8)
        self._top[rows] = first.T  # of a row that occurs more than once, the last
        return Changes(flips, self._invalidated(rows, new_row, decisions, begins))

    def _invalidated(self, rows: Ints, new_row: Mask, decisions: Decisions, begins: Mask | None) -> Mask:
        if decisions.chunk is None:
            return np.zeros(decisions.raw.shape[:2], dtype=bool)
        chunk, code = decisions.chunk, decisions.raw
        if self._code is None:
            self._code = np.zeros((len(self._chunk), *code[:, 0].shape), dtype=np.float32)
        chunk_before, code_before = self._chunk[rows], np.moveaxis(self._code[rows], 0, 1)
        chunk_before[1:][~new_row] = chunk[:-1][~new_row]
        if begins is not None:
            chunk_before[begins] = -1
        code_before[:, 1:][:, ~new_row] = code[:, :-1][:, ~new_row]
        differs = np.abs(code - code_before).max(axis=-1) > SAME * np.maximum(1, np.abs(code).max(axis=-1))
        self._chunk[rows] = chunk
        self._code[rows] = np.moveaxis(code, 1, 0)
        return differs & ~decisions.decided & (chunk == chunk_before)


def entropy(shares: Numbers) -> Numbers:
    """Return the entropy in nats of distributions along the last axis, NaN where one has no finite number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        sums: Numbers = np.where(shares == 0, 0.0, shares * np.log(shares)).sum(axis=-1)
    return 0.0 - sums  # unlike -sums, no -0.0 where one share is 1


def norms(raw: Singles) -> Numbers:
    """Return the norms `[...]` of vectors `[..., E]`, in fp64."""
    wide = raw.astype(np.float64)
    squares: Numbers = (wide * wide).sum(axis=-1)
    return np.sqrt(squares)


def largest(values: npt.NDArray[np.floating], k: int) -> Ints:
    """Return the indices `[..., k]` of the largest values, largest first; of equal ones the lower index."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k].astype(np.int64)
