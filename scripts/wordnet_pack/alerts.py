"""Alert thresholds to a stated precision of what fires on running text.

    fires = Fires.of(scores, any_sense, word)               # every pair that scores over a floor, right or wrong
    thresholds, own = precision_thresholds(fires, level, 0.9)
    precision = precisions(fires, thresholds, level, own)
    of_sentences = Fires.of_sentences(scores, any_sense, word, sentence)

What fires at a token is right where some noun sense of its word lies under the concept, and wrong at every other token.
Fires count as running text has them, in its natural mix. There is one threshold for a level, since most concepts fire
too seldom to be judged alone; the deep levels are one. A concept that fires often enough, and is less right than its
level, has a higher one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOOR = 0.05  # a score under which nothing is looked at as a candidate
DEEP = 3  # levels from here on are one
ENOUGH = 20  # fires over its threshold from which a concept's own precision is believed


@dataclass(frozen=True)
class Fires:
    """Pairs of a token and a concept that might fire: F of them."""

    probe: torch.Tensor  # [F] int64
    score: torch.Tensor  # [F] fp32
    right: torch.Tensor  # [F] bool

    @classmethod
    def of(cls, scores: torch.Tensor, any_sense: torch.Tensor, word: torch.Tensor) -> Fires:
        """From path scores [N, P]; `any_sense` [W + 1, P]; `word` [N], -1 for none."""
        row, probe = (scores > FLOOR).nonzero(as_tuple=True)
        return cls(probe, scores[row, probe], any_sense[word[row], probe])

    @classmethod
    def of_sentences(
        cls, scores: torch.Tensor, any_sense: torch.Tensor, word: torch.Tensor, sentence: torch.Tensor
    ) -> Fires:
        """The highest score in each sentence, right where some word of it lies under the concept. `sentence` [N]."""
        numbers, index = sentence.unique(return_inverse=True)
        where = index.unsqueeze(1).expand_as(scores)
        best, right = (
            torch.zeros(len(numbers), scores.shape[1]).scatter_reduce_(0, where, values, "amax")
            for values in (scores, any_sense[word].float())
        )
        row, probe = (best > FLOOR).nonzero(as_tuple=True)
        return cls(probe, best[row, probe], right[row, probe] > 0)


def precision_thresholds(fires: Fires, level: torch.Tensor, target: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(thresholds [P] fp32, whether a concept has one of its own [P] bool)."""
    level = level.clamp(max=DEEP)
    thresholds, own = torch.ones(len(level)), torch.zeros(len(level), dtype=torch.bool)
    for number in level.unique().tolist():
        of_level = level[fires.probe] == number
        thresholds[level == number] = lowest(fires.score[of_level], fires.right[of_level], target)
    for probe in range(len(level)):
        of_probe = (fires.probe == probe) & (fires.score > thresholds[probe])
        own[probe] = int(of_probe.sum()) >= ENOUGH
        if own[probe] and fires.right[of_probe].double().mean() < target:
            thresholds[probe] = lowest(fires.score[of_probe], fires.right[of_probe], target)
    return thresholds, own


def precisions(fires: Fires, thresholds: torch.Tensor, level: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[P] fp64: the share right of what fires, of the concept's own fires or of its level's; NaN without any."""
    level, over = level.clamp(max=DEEP), fires.score > thresholds[fires.probe]
    result = torch.full((len(level),), float("nan"), dtype=torch.float64)
    for probe in range(len(level)):
        chosen = over & ((fires.probe == probe) if own[probe] else (level[fires.probe] == level[probe]))
        if chosen.any():
            result[probe] = fires.right[chosen].double().mean()
    return result


def lowest(score: torch.Tensor, right: torch.Tensor, target: float) -> float:
    """The lowest threshold over which at least `target` of the fires are right; 1, which nothing exceeds, where none
    is.
    """
    if not len(score):
        return 1.0
    values, order = score.sort(descending=True, stable=True)
    share = right[order].double().cumsum(0) / torch.arange(1, len(order) + 1)
    # Over a threshold are all that score more: a cut falls between two values only.
    is_cut = torch.cat([values[1:] < values[:-1], torch.tensor([True])])
    good = ((share >= target) & is_cut).nonzero()
    if not len(good):
        return 1.0
    last = int(good[-1])
    return float(values[last + 1]) if last + 1 < len(values) else FLOOR
