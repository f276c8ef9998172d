"""Calibrates expand thresholds so that a descent reaches a given share (recall) of the firing probes.

    reach = Reach(pack.tree, pack.score_rule, pack.alert_threshold.numpy())
    expansion = calibrate_expansion(reach, documents, recall=0.99)      # scores of every probe [T, P], a document each
    measured = measure_expansion(reach, expansion.expand_threshold, held_out)

Some documents shape a family of thresholds with one parameter, the slack. The others select the largest slack by
conformal risk control (Angelopoulos et al. 2022, arXiv:2208.02814): an exchangeable new document then has a mean recall
of at least `recall`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import ConceptTree, Ints, Mask
from probemon.core.intervals import mean_interval
from probemon.core.plan import CascadePlan
from probemon.core.score_rules import follows_path
from probemon.core.scores import Floats
from probemon.core.settings import CascadeConfig
from probemon.engine.cascade import apply_rule
from probemon.errors import CalibrationError
from probemon.util.checks import check_count, check_share

_FEW = 5  # fewer scores show nothing
# Denser near 0, because losses add up along a path.
SLACKS: tuple[float | None, ...] = (
    None,
    *(-i / 128 for i in range(128, 0, -1)),
    *((i / 1024) ** 2 for i in range(1025)),
)
_CELLS = 1 << 22  # (token, probe) pairs; bounds memory
_NORMAL = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Missed:
    """Counts of D documents, `[D]` each: firing (token, probe) pairs, missed ones, tokens, active pairs."""

    fired: Ints
    missed: Ints
    tokens: Ints
    active: Ints
    n_probes: int

    @property
    def losses(self) -> npt.NDArray[np.float64]:
        """Missed share of each document with a firing probe."""
        units = self.fired > 0
        return self.missed[units] / self.fired[units]

    @property
    def share_evaluated(self) -> float:
        """Active share of all (token, probe) pairs."""
        return float(self.active.sum() / max(1, self.tokens.sum() * self.n_probes))


@dataclass(frozen=True)
class Reach:
    """The probes that a descent reaches for alert thresholds `alert [P]`, without retained sets, round limit or cap."""

    tree: ConceptTree
    score_rule: str
    alert: Floats
    base_layers: tuple[int, ...] = (0,)
    always_on: tuple[int, ...] = ()

    def missed(self, expand_threshold: Floats, documents: Sequence[Floats]) -> Missed:
        """Count missed firing probes for thresholds `[P]`, given scores `[T, P]` of each document."""
        config = CascadeConfig(base_layers=self.base_layers, max_loaded_probes=max(1, self.tree.n))
        plan = CascadePlan.of(self.tree, self.score_rule, config, expand_threshold, self.always_on)
        counts = np.zeros((4, len(documents)), dtype=np.int64)
        for at, stop in _batches([len(scores) for scores in documents], max(1, _CELLS // max(1, self.tree.n))):
            scores = np.concatenate(documents[at:stop])
            active, fired = apply_rule(plan, scores, None).active, scores > self.alert
            document = np.repeat(np.arange(at, stop), [len(part) for part in documents[at:stop]])
            for i, mask in enumerate((fired, fired & ~active, np.ones((len(scores), 1)), active)):
                counts[i] += np.bincount(document, weights=mask.sum(axis=1), minlength=len(documents)).astype(np.int64)
        return Missed(counts[0], counts[1], counts[2], counts[3], self.tree.n)

    def exact(self) -> Floats:
        """Return the smallest alert threshold below each probe, `[P]`; +inf if none below can fire."""
        return self.tree.min_over_descendants(np.where(np.isnan(self.alert), np.float32(np.inf), self.alert))

    def below(self, scores: Floats) -> Mask:
        """Return whether a probe strictly below fires, `[T, P]`."""
        fires_below = np.zeros(scores.shape, dtype=bool)
        inner = self.tree.has_children
        if inner.any():
            closed = self.tree.close(scores > self.alert)
            fires_below[:, inner] = np.logical_or.reduceat(
                closed[:, self.tree.child_idx], self.tree.child_ptr[:-1][inner], axis=1
            )
        return fires_below


class ThresholdFamily:
    """Expand thresholds `[P]` fp32 by slack, NaN for leaves.

    At slack s, at most a share s of a probe's scores at tokens where a probe below fires is under its threshold. Below
    0 the threshold of slack 0 is multiplied by (1 + s)^8. At None, or with fewer than 5 such scores, all pass: the
    threshold is -1, or under the path rule the smallest alert threshold below.
    """

    def __init__(self, reach: Reach, documents: Sequence[Floats]) -> None:
        exact, inner = reach.exact(), reach.tree.has_children
        path = follows_path(reach.score_rule)
        self._lowest = np.where(np.isfinite(exact) if path else False, exact, np.float32(-1)).astype(np.float32)
        self._lowest[~inner] = np.nan
        columns, values = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.float32)]
        for scores in documents:
            rows, probes = np.nonzero(reach.below(scores))
            columns.append(probes)
            values.append(scores[rows, probes])
        probe, score = np.concatenate(columns), np.concatenate(values)
        self._sorted = score[np.lexsort((score, probe))]
        counts = np.bincount(probe, minlength=reach.tree.n)
        self._known: Ints = np.flatnonzero(counts >= _FEW)
        self._counts = counts[self._known]
        self._first = (np.cumsum(counts) - counts)[self._known]
        self.n_unknown = int(inner.sum()) - len(self._known)

    def at(self, slack: float | None) -> Floats:
        """Return thresholds for a slack in [-1, 1] or None."""
        thresholds = self._lowest.copy()
        if slack is not None:
            # Just under the next score: equal scores pass together.
            failing = np.clip(np.floor(slack * self._counts).astype(np.int64), 0, self._counts - 1)
            under = np.nextafter(self._sorted[self._first + failing], np.float32(-np.inf)) * np.float32(
                (1 + min(slack, 0)) ** 8
            )
            under = np.where(under < _NORMAL, np.float32(-1), under)  # some devices flush subnormals to 0
            thresholds[self._known] = np.maximum(under, self._lowest[self._known])
        return thresholds


@dataclass(frozen=True)
class Expansion:
    """Expand thresholds `[P]` fp32 (NaN for leaves) and how they were chosen.

    - `slack`: -1 to 1, or None.
    - `loss`, `share_evaluated`: mean missed share, and active share of probes, in the `n_units` calibration documents
      with a firing probe.
    - `n_unknown`: inner probes with too few scores, always expanded.
    """

    expand_threshold: Floats
    recall: float
    slack: float | None
    n_shaping: int
    n_calibration: int
    n_units: int
    loss: float
    share_evaluated: float
    n_unknown: int
    base_layers: tuple[int, ...]

    def stated(self) -> dict[str, Any]:
        names = ("recall", "slack", "n_shaping", "n_calibration", "n_units", "loss", "share_evaluated", "n_unknown")
        return {
            "method": "conformal risk control",
            **{name: getattr(self, name) for name in names},
            "base_layers": list(self.base_layers),
        }

    def sentence(self) -> str:
        """Return a summary for a card."""
        return (
            'Expand thresholds (`load_threshold="calibrated"`): a document\'s firing probes are reached to'
            f" {self.recall:g} on average at least, by conformal risk control on {self.n_units} documents; there"
            f" {1 - self.loss:.4f} were, with {self.share_evaluated:.3f} of the probes active."
        )


def split(n: int, *, share: float = 0.5, seed: int = 0) -> tuple[Ints, Ints]:
    """Draw which of n documents shape and which calibrate."""
    share = check_share("share", share, "the part of the documents that shapes, more than 0 and less than 1")
    seed = check_count("seed", seed)
    order = np.random.default_rng(seed).permutation(n)
    at = int(n * share)
    return np.sort(order[:at]), np.sort(order[at:])


def documents_needed(recall: float) -> int:
    """Return the fewest documents that can show a recall: 1 / (n + 1) <= 1 - recall."""
    check_recall(recall)
    n = max(1, math.floor(1 / (1 - recall)) - 1)
    while not _within(0.0, n, recall):
        n += 1
    return n


def check_recall(recall: float) -> None:
    check_share("recall", recall, "give more than 0 and less than 1, such as 0.99 (1 cannot be shown from examples)")


def calibrate_expansion(
    reach: Reach, documents: Sequence[Floats], *, recall: float, share: float = 0.5, seed: int = 0
) -> Expansion:
    """Choose expand thresholds that reach `recall` of a new document's firing probes on average.

    - `documents`: scores of every probe, `[T, P]` each.
    - `share`: part of the documents that shapes, drawn by `seed`. Alert thresholds must not come from the rest.

    Raises `CalibrationError` if too few documents have a firing probe.
    """
    check_recall(recall)
    shaping, calibrating = split(len(documents), share=share, seed=seed)
    return calibrate_on(reach, [documents[i] for i in shaping], [documents[i] for i in calibrating], recall=recall)


def calibrate_on(reach: Reach, shaping: Sequence[Floats], calibrating: Sequence[Floats], *, recall: float) -> Expansion:
    """Like `calibrate_expansion`, for split documents."""
    check_recall(recall)
    if np.isnan(reach.alert).all():
        raise CalibrationError("no probe has an alert threshold, so nothing fires: calibrate alerts first")
    family = ThresholdFamily(reach, shaping)
    missed: dict[int, Missed] = {}

    def holds(step: int) -> bool:
        missed[step] = reach.missed(family.at(SLACKS[step]), calibrating)
        losses = missed[step].losses
        return _within(float(losses.sum()), len(losses), recall)

    lowest_holds = holds(0)
    n_units = len(missed[0].losses)
    if not _within(0.0, n_units, recall):
        raise CalibrationError(
            f"{n_units} documents with something firing are too few for a recall of {recall:g}:"
            f" {documents_needed(recall)} are needed to calibrate on, and as many again to shape the thresholds. Give"
            " more documents, or ask for less"
        )
    if not lowest_holds:
        raise CalibrationError(
            f"with every probe expanded {missed[0].losses.mean():.3g} of a document's firing probes are missed, more"
            f" than a recall of {recall:g} allows: some have no parents and are not at a base level. Add their level to"
            " base_layers"
        )
    step = _last(holds, 0, len(SLACKS))
    slack, result = SLACKS[step], missed[step]
    return Expansion(
        family.at(slack),
        recall,
        slack,
        len(shaping),
        len(calibrating),
        n_units,
        float(result.losses.mean()),
        result.share_evaluated,
        family.n_unknown,
        reach.base_layers,
    )


@dataclass(frozen=True)
class ExpansionMeasurement:
    """Recall of firing probes: mean over `n_documents`, and share of all `n_fired` pairs."""

    recall: float
    low: float
    high: float
    recall_of_all: float
    n_documents: int
    n_fired: int
    share_evaluated: float


def measure_expansion(
    reach: Reach, expand_threshold: Floats, documents: Sequence[Floats], *, confidence: float = 0.95
) -> ExpansionMeasurement:
    """Measure the recall of thresholds on held-out documents. Raises `CalibrationError` if nothing fires."""
    missed = reach.missed(expand_threshold, documents)
    losses, n_fired = missed.losses, int(missed.fired.sum())
    if not len(losses):
        raise CalibrationError(
            "nothing fires in these documents, so their recall cannot be measured: give others, or more"
        )
    recall = 1 - float(losses.mean())
    low, high = mean_interval(recall, len(losses), confidence)
    return ExpansionMeasurement(
        recall,
        float(low),
        float(high),
        1 - int(missed.missed.sum()) / n_fired,
        len(losses),
        n_fired,
        missed.share_evaluated,
    )


def _batches(lengths: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    at = n = 0
    for i, length in enumerate(lengths):
        if i > at and n + length > most:
            yield at, i
            at, n = i, 0
        n += length
    if lengths:
        yield at, len(lengths)


def _within(total: float, n: int, recall: float) -> bool:
    """Whether the mean of n losses and a loss of 1 is at most 1 - recall."""
    return total + 1 <= (1 - recall) * (n + 1) + 1e-9  # 1 - 0.9 is a little less than 0.1


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the last step for which `holds` is true."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
