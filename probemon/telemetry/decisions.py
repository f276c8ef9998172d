"""Decisions: what routers decided about tokens, whatever kind of router it was.

    decisions = source.decisions(states)            # of S streams about n tokens
    decisions.weights, decisions.top_idx            # [S, n, E], [S, n, k]
    history = History(n_rows, n_streams)
    told = history.tell(rows, decisions)            # Told: flips and changed codes, against what these rows had before

A stream is one router: that of a layer of a mixture of experts, one level of a BEM controller, an X-LoRA classifier.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from probemon.bem.config import MAX_NORM
from probemon.core.hierarchy import Ints, Mask

Numbers = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]

MOE, XLORA, BEM = "moe", "xlora", "bem"
LARGEST = MAX_NORM * (1 + 1e-5)  # norm of a code, rounded: beyond it its products would leave no room in 64 bits
SAME = 1e-4  # codes that differ by less, relative to their size, are one: a prompt's and a step's sums differ in order


@dataclass(frozen=True)
class Stream:
    """One router: its `source` ("moe", "xlora", "bem"), the site it is read at, the host layer (-1: none in
    particular), the level of a BEM code ("" elsewhere).
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

    `raw [S, n, E]` fp32: as the router gave it (logits, scalings, a code); `weights [S, n, E]` fp64: its distribution,
    each sums to 1; None of codes, which are none. `top_idx`, `top_w` `[S, n, k]`: what was chosen and how much of it,
    most first. `decided [S, n]`: False where the decision of a token before it was used again. `steering [S, n]`: of
    codes, False where no site takes that level there, and in a row's first chunk, whose code is a learned constant
    (None: True for all). `chunk [n]`: of codes, which chunk the token is in. `confidence`, `sigma1`, `delta_rel_norm`
    `[n]` (NaN: not told), `fallback [n]`.
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
    steering: Mask | None = None

    @classmethod
    def of(cls, raw: Singles, weights: Numbers | None, top_idx: Ints, top_w: Singles, **more: object) -> Decisions:
        """With what a router without chunks, confidence and updates does not tell."""
        n_streams, n = raw.shape[:2]
        unknown = np.full(n, np.nan, dtype=np.float32)
        told = {
            "confidence": unknown,
            "sigma1": unknown,
            "delta_rel_norm": unknown,
            "decided": np.ones((n_streams, n), bool),
            "fallback": np.zeros(n, bool),
        }
        return cls(raw, weights, top_idx, top_w, **{**told, **more})  # type: ignore[arg-type]

    def __len__(self) -> int:
        return self.raw.shape[1]

    @property
    def n_streams(self) -> int:
        """S."""
        return self.raw.shape[0]

    def take(self, which: Ints) -> Decisions:
        """Those about some of the tokens."""
        by_stream = {name: getattr(self, name)[:, which] for name in ("raw", "top_idx", "top_w", "decided")}
        by_token = {name: getattr(self, name)[which] for name in ("confidence", "sigma1", "delta_rel_norm", "fallback")}
        weights, chunk = (
            None if self.weights is None else self.weights[:, which],
            None if self.chunk is None else self.chunk[which],
        )
        steering = None if self.steering is None else self.steering[:, which]
        return dataclasses.replace(self, **by_stream, **by_token, weights=weights, chunk=chunk, steering=steering)

    @staticmethod
    def join(parts: list[Decisions]) -> Decisions:
        """Several of the same streams, one after another."""
        if len(parts) == 1:
            return parts[0]

        def together(name: str, axis: int) -> object:
            values = [getattr(part, name) for part in parts]
            return None if values[0] is None else np.concatenate(values, axis=axis)

        axes = {
            "raw": 1,
            "weights": 1,
            "top_idx": 1,
            "top_w": 1,
            "decided": 1,
            "confidence": 0,
            "sigma1": 0,
            "delta_rel_norm": 0,
            "fallback": 0,
            "chunk": 0,
            "steering": 1,
        }
        return Decisions(**{name: together(name, axis) for name, axis in axes.items()})  # type: ignore[arg-type]

    @cached_property
    def finite(self) -> Mask:
        """`[S, n]`: False where a router gave what is no number, or a code of a norm beyond what limits allow."""
        if self.weights is not None:
            return np.asarray(np.isfinite(self.raw).all(axis=-1))
        with np.errstate(invalid="ignore"):
            return np.asarray(norms(self.raw) <= LARGEST)


@dataclass(frozen=True)
class Told:
    """Beside decisions, against the token before each: `flips [S, n]`: 1 where another expert comes first now, 0 where
    not, -1 where no token went before, or what was decided about it or this one is not finite.

    `changed [S, n]`: the code is another one though nothing was decided, so that keys and values before it were
    computed with an older one.
    """

    flips: npt.NDArray[np.int8]
    changed: Mask

    def take(self, which: Ints | slice) -> Told:
        """Of some of the tokens."""
        return Told(self.flips[:, which], self.changed[:, which])


class History:
    """What each row's newest token had: `tell` compares and goes on. Tokens of a row stand together, in order."""

    def __init__(self, n_rows: int, n_streams: int) -> None:
        self._top: Ints = np.full((n_rows, n_streams), -1, dtype=np.int64)
        self._chunk: Ints = np.full(n_rows, -1, dtype=np.int64)
        self._code: Singles | None = None

    def forget(self, rows: Ints) -> None:
        """Tokens of these rows went by unseen: what comes next has no neighbour."""
        self._top[rows] = -1
        self._chunk[rows] = -1

    def tell(self, rows: Ints, decisions: Decisions) -> Told:
        """Of tokens that stand in `rows [n]`."""
        first = np.where(
            decisions.finite, decisions.top_idx[:, :, 0], -1
        )  # what comes first of no numbers says nothing
        before = np.empty_like(first)
        before[:, :1] = self._top[rows[:1]].T
        new_row = rows[1:] != rows[:-1]
        before[:, 1:] = np.where(new_row, self._top[rows[1:]].T, first[:, :-1])
        flips = np.where((before < 0) | (first < 0), -1, before != first).astype(np.int8)
        self._top[rows] = first.T  # of a row that occurs more than once, the last
        return Told(flips, self._changed(rows, new_row, decisions))

    def _changed(self, rows: Ints, new_row: Mask, decisions: Decisions) -> Mask:
        if decisions.chunk is None:
            return np.zeros(decisions.raw.shape[:2], dtype=bool)
        chunk, code = decisions.chunk, decisions.raw
        if self._code is None:
            self._code = np.zeros((len(self._chunk), *code[:, 0].shape), dtype=np.float32)
        chunk_before, code_before = self._chunk[rows], np.moveaxis(self._code[rows], 0, 1)
        chunk_before[1:][~new_row] = chunk[:-1][~new_row]
        code_before[:, 1:][:, ~new_row] = code[:, :-1][:, ~new_row]
        apart = np.abs(code - code_before).max(axis=-1) > SAME * np.maximum(1, np.abs(code).max(axis=-1))
        self._chunk[rows] = chunk
        self._code[rows] = np.moveaxis(code, 1, 0)
        return apart & ~decisions.decided & (chunk == chunk_before)


def entropy(shares: Numbers) -> Numbers:
    """In nats, of distributions along the last axis; NaN of what is no number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Numbers = 0.0 - np.where(shares == 0, 0.0, shares * np.log(shares)).sum(
            axis=-1
        )  # not -0.0 where one is sure
    return found


def norms(raw: Singles) -> Numbers:
    """`[...]` of what is `[..., E]`, in fp64."""
    wide = raw.astype(np.float64)
    found: Numbers = np.sqrt((wide * wide).sum(axis=-1))
    return found


def largest(values: npt.NDArray[np.floating], k: int) -> Ints:
    """Indices `[..., k]` of the largest, largest first; ties to the lower index."""
    return np.argsort(-values, axis=-1, kind="stable")[..., :k].astype(np.int64)
