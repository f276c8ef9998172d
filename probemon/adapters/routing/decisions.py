"""Decisions of routers of any kind.

A stream is one router: a mixture-of-experts layer, a level of a BEM controller, an X-LoRA classifier, a memory.
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
SSM = "ssm"  # recurrent layers, in alerts only
LARGEST = MAX_NORM * (1 + 1e-5)  # norm of a code; a batch's products must fit 64 bits
SAME = 1e-4  # relative; prompts and steps sum in different orders
# Fields [S, n, ...]; the others are [n].
_BY_STREAM = ("raw", "weights", "top_idx", "top_w", "top_position", "top_token", "decided", "steering")


@dataclass(frozen=True)
class Stream:
    """One router; `layer` -1 or `level` "" for none.

    `source` is "moe", "xlora", "bem" or "memory"; in alerts also "ssm".
    """

    source: str
    site: str
    layer: int
    level: str = ""

    def __str__(self) -> str:
        return f"{self.site} {self.level}".strip()


@dataclass(frozen=True)
class Decisions:
    """What S streams decided about n tokens, over E experts or as codes of E dimensions.

    - `raw [S, n, E]` fp32: logits, scalings or a code.
    - `weights [S, n, E]` fp64: distributions; None for codes.
    - `top_idx`, `top_w` `[S, n, k]`: what was chosen and its weight, largest first.
    - `decided [S, n]`: False if an earlier decision was reused.
    - `confidence`, `sigma1`, `delta_rel_norm` `[n]`: NaN if not given.
    - `fallback [n]`: a fallback was in force.
    - `chunk [n]`, `level [n]`: of codes, the token's chunk, and the stream whose code most sites take.
    - `steering [S, n]`: of codes, False for a level that no site takes, and in a row's first chunk (its code is
      constant); None means True.
    - `top_position`, `top_token` `[S, n, k]`: of memory slots, the token that each was written at: its place among the
      row's real tokens and its id, or -1.
    - `measured [n, K]`: see `probemon.adapters.bem.measures`.
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
        """Fill in defaults for what a router does not give."""
        n_streams, n = raw.shape[:2]
        unknown = np.full(n, np.nan, dtype=np.float32)
        defaults = {
            **dict.fromkeys(("confidence", "sigma1", "delta_rel_norm"), unknown),
            "decided": np.ones((n_streams, n), bool),
            "fallback": np.zeros(n, bool),
        }
        return cls(raw, weights, top_idx, top_w, **{**defaults, **more})  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.raw.shape[1]

    @property
    def n_streams(self) -> int:
        """Number of streams."""
        return self.raw.shape[0]

    def take(self, tokens: Ints) -> Decisions:
        """Return the decisions about some tokens, by index."""

        def taken(name: str) -> Any:
            values = getattr(self, name)
            return values if values is None else values[:, tokens] if name in _BY_STREAM else values[tokens]

        return Decisions(**{field.name: taken(field.name) for field in fields(self)})

    @staticmethod
    def join(parts: list[Decisions]) -> Decisions:
        """Join batches of the same streams."""
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
        """Mask `[S, n]`: decisions that are finite, codes within `LARGEST`."""
        if self.weights is not None:
            return np.asarray(np.isfinite(self.raw).all(axis=-1))
        with np.errstate(invalid="ignore"):
            return np.asarray(norms(self.raw) <= LARGEST)


@dataclass(frozen=True)
class Changes:
    """How decisions about n tokens differ from those about the previous token.

    - `flips [S, n]`: 1 if the top expert differs, 0 if not, -1 if unknown.
    - `invalidated [S, n]`: the code changed without a decision, so cached keys and values are outdated.
    """

    flips: npt.NDArray[np.int8]
    invalidated: Mask

    def take(self, tokens: Ints | slice) -> Changes:
        """Return the changes at some tokens, by index."""
        return Changes(self.flips[:, tokens], self.invalidated[:, tokens])


class History:
    """Each row's newest decision."""

    def __init__(self, n_rows: int, n_streams: int) -> None:
        self._top: Ints = np.full((n_rows, n_streams), -1, dtype=np.int64)
        self._chunk: Ints = np.full(n_rows, -1, dtype=np.int64)
        self._code: Singles | None = None

    def forget(self, rows: Ints) -> None:
        """Forget the newest tokens of rows in which tokens were unseen: the next ones have no previous token."""
        self._top[rows] = -1
        self._chunk[rows] = -1

    def compare(self, rows: Ints, decisions: Decisions, begins: Mask | None = None) -> Changes:
        """Return the changes at tokens in `rows [n]`, grouped by row, and keep the newest.

        `begins [n]`: True for the first token of a packed sequence.
        """
        first = np.where(decisions.finite, decisions.top_idx[:, :, 0], -1)
        before = np.empty_like(first)
        before[:, :1] = self._top[rows[:1]].T
        new_row = rows[1:] != rows[:-1]
        before[:, 1:] = np.where(new_row, self._top[rows[1:]].T, first[:, :-1])
        if begins is not None:
            before[:, begins] = -1
        flips = np.where((before < 0) | (first < 0), -1, before != first).astype(np.int8)
        self._top[rows] = first.T  # the last of a row wins
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
    """Entropy in nats along the last axis; NaN if not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        sums: Numbers = np.where(shares == 0, 0.0, shares * np.log(shares)).sum(axis=-1)
    return 0.0 - sums  # no -0.0


def norms(raw: Singles) -> Numbers:
    """Norms `[...]` fp64 of vectors `[..., E]`."""
    wide = raw.astype(np.float64)
    squares: Numbers = (wide * wide).sum(axis=-1)
    return np.sqrt(squares)


def largest(values: npt.NDArray[np.floating], k: int) -> Ints:
    """Return the indices `[..., k]` of the largest values, largest first; of equal ones the lower index first."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k].astype(np.int64)
