"""Alert thresholds to a stated precision of what fires on running text.

    fires = Fires.of(scores, running, truth, rows)          # every pair that scores over a floor, right or wrong
    thresholds, own = precision_thresholds(fires, level, 0.9)

What fires at a token is right where some noun sense of its word lies under the concept, and wrong at every other token.
A concept's threshold is its level's, or a higher one of its own where its own fires are less right than stated. A
level's is estimated on words that trained nothing, so that it holds for words that nobody thought of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOOR = 0.05  # a score under which nothing is looked at as a candidate
ENOUGH = 20  # fires over its threshold from which a concept's own precision is believed


@dataclass(frozen=True)
class Fires:
    """Pairs of a token and a concept that might fire: F of them."""

    probe: torch.Tensor  # [F] int64
    score: torch.Tensor  # [F] fp32
    right: torch.Tensor  # [F] bool
    is_noun: torch.Tensor  # [F] bool: at a token of a word that can be a noun
    is_new: torch.Tensor  # [F] bool: at a word of the split whose words trained nothing
    new_share: float  # of the noun tokens, those of such words

    @classmethod
    def of(
        cls,
        scores: torch.Tensor,
        any_sense: torch.Tensor,
        word: torch.Tensor,
        is_new: torch.Tensor,
        *,
        floor: float = FLOOR,
    ) -> Fires:
        """From path scores [N, P]; `any_sense` [W + 1, P]; `word` [N], -1 for none; `is_new` [N]."""
        row, probe = (scores > floor).nonzero(as_tuple=True)
        noun = word >= 0
        share = float((noun & is_new).sum()) / max(1, int(noun.sum()))
        return cls(probe, scores[row, probe], any_sense[word[row], probe], noun[row], is_new[row], share)


def precision_thresholds(fires: Fires, level: torch.Tensor, target: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(thresholds [P] fp32, whether a concept has one of its own [P] bool).

    In a level's precision a fire at a token of no noun counts as often as new words stand among the nouns: the text
    is then one whose every word is new, in the mix that it has.
    """
    pooled = torch.full((int(level.max()) + 1,), 1.0)
    weight = torch.where(fires.is_noun, fires.is_new.double(), torch.full((), fires.new_share, dtype=torch.float64))
    for number in range(len(pooled)):
        of_level = (level[fires.probe] == number) & (weight > 0)
        pooled[number] = lowest(fires.score[of_level], fires.right[of_level], weight[of_level], target)
    # A deeper level that has too few fires to reach the target by itself has the threshold of the one above.
    for number in range(1, len(pooled)):
        if pooled[number] >= 1:
            pooled[number] = pooled[number - 1]
    thresholds, own = pooled[level].clone(), torch.zeros(len(level), dtype=torch.bool)
    for probe in range(len(level)):
        of_probe = (fires.probe == probe) & (fires.score > thresholds[probe])
        score, right = fires.score[of_probe], fires.right[of_probe]
        if len(score) < ENOUGH:
            continue
        if right.double().mean() < target:
            thresholds[probe] = lowest(score, right, torch.ones(len(score), dtype=torch.float64), target)
        own[probe] = True
    return thresholds, own


def lowest(score: torch.Tensor, right: torch.Tensor, weight: torch.Tensor, target: float) -> float:
    """The lowest threshold over which at least `target` of the weight is right; 1, which nothing exceeds, where none
    is.
    """
    if not len(score):
        return 1.0
    values, order = score.sort(descending=True, stable=True)
    total = weight[order].cumsum(0)
    share = (weight * right)[order].cumsum(0) / total
    # Over a threshold are all that score more: a cut falls between two values only.
    is_cut = torch.cat([values[1:] < values[:-1], torch.tensor([True])])
    good = ((share >= target) & is_cut).nonzero()
    if not len(good):
        return 1.0
    last = int(good[-1])
    below = float(values[last + 1]) if last + 1 < len(values) else FLOOR
    return below
