"""FunctionScores: numbers that a user's function gave to hidden states, beside the scores of probes.

scores.values, scores.fired, scores.unseen          # [N], and why a state has no number
beside(scores, [loudness])                          # as further concepts, for sinks and tables
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from probemon.core.hierarchy import Ints, Mask
from probemon.core.scores import Coverage, Floats, Scores

NOT_ASKED = "the function did not follow yet"


@dataclass(frozen=True)
class FunctionScores:
    """Of N states: `values [N]` fp32 from 0 to 1, NaN without one; `unseen`: why, else ""; `threshold`, NaN without."""

    values: Floats
    unseen: tuple[str, ...]
    threshold: float = math.nan

    def __len__(self) -> int:
        return len(self.values)

    @property
    def fired(self) -> Mask:
        """Return which exceed the threshold `[N]`."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.values > np.float32(self.threshold))

    @classmethod
    def nothing(cls, n: int, reason: str, threshold: float = math.nan) -> FunctionScores:
        """Return `n` states without a number."""
        return cls(np.full(n, np.nan, dtype=np.float32), (reason,) * n, threshold)

    def take(self, which: Ints, unseen: Mapping[int, str] | None = None) -> FunctionScores:
        """Return states by index; -1 gives one without a number, with the reason `unseen[place]`."""
        reasons = unseen or {}
        values = np.array([math.nan if at < 0 else self.values[at] for at in which.tolist()], dtype=np.float32)
        texts = tuple(reasons.get(i, "") if at < 0 else self.unseen[at] for i, at in enumerate(which.tolist()))
        return replace(self, values=values, unseen=texts)

    def as_scores(self) -> Scores:
        """Return them as the scores of one probe."""
        has = ~np.isnan(self.values)
        counts = has.astype(np.int64)
        coverage = replace(Coverage.nothing(len(self), 1, ""), active=counts, evaluated=counts, unseen=self.unseen)
        return Scores(
            ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            probes=np.zeros(int(counts.sum()), dtype=np.int32),
            values=self.values[has],
            fired_mask=self.fired[has],
            coverage=coverage,
        )


def join_functions(parts: Sequence[Mapping[str, FunctionScores]], sizes: Sequence[int]) -> dict[str, FunctionScores]:
    """Concatenate batches of `sizes` states by the functions' names; a batch may lack a function."""
    joined = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        threshold = next(part[name].threshold for part in parts if name in part)
        each = [
            part[name] if name in part else FunctionScores.nothing(n, NOT_ASKED)
            for part, n in zip(parts, sizes, strict=True)
        ]
        texts = tuple(text for one in each for text in one.unseen)
        joined[name] = FunctionScores(np.concatenate([one.values for one in each]), texts, threshold)
    return joined


def beside(scores: Scores, functions: Sequence[FunctionScores]) -> Scores:
    """Return scores with functions as further probes, numbered from P on."""
    if not functions:
        return scores
    coverage, n_probes = scores.coverage, scores.coverage.n_probes
    table, over = (np.stack(each, axis=1) for each in zip(*((one.values, one.fired) for one in functions), strict=True))
    state, number = np.nonzero(~np.isnan(table))
    states = np.concatenate([scores.state_of, state])
    probes = np.concatenate([scores.probes, (n_probes + number).astype(np.int32)])
    order = np.lexsort((probes, states))
    has = np.bincount(state, minlength=len(scores))
    return replace(
        scores,
        ptr=np.concatenate([[0], np.cumsum(np.bincount(states, minlength=len(scores)))]).astype(np.int64),
        probes=probes[order],
        values=np.concatenate([scores.values, table[state, number]])[order],
        fired_mask=np.concatenate([scores.fired_mask, over[state, number]])[order],
        coverage=replace(
            coverage,
            n_probes=n_probes + len(functions),
            active=coverage.active + has,
            evaluated=coverage.evaluated + has,
            not_reached=coverage.not_reached + len(functions) - has,
        ),
    )
