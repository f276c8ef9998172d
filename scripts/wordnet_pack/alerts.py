"""Alert thresholds to a stated precision of what fires on running text.

    fires = Fires.of(scores, any_sense, word, is_new)       # every pair that scores over a floor, right or wrong
    thresholds, own = precision_thresholds(fires, level, 0.9)
    precision = precisions(fires, thresholds, level, own)
    of_sentences = Fires.of_sentences(scores, any_sense, word, sentence)

What fires at a token is right where some noun sense of its word lies under the concept, and wrong at every other token.
There is one threshold for all, estimated on words that trained nothing, so that it holds for words that nobody thought
of; a level, and then a concept, has a higher one where what it fires at is less right than stated.
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
        every = torch.ones(len(row), dtype=torch.bool)
        return cls(probe, best[row, probe], right[row, probe] > 0, every, every, 1.0)

    def weight(self) -> torch.Tensor:
        """[F] fp64: how much each counts in a text whose every word is new, in the mix that this one has: a fire at a
        token of no noun counts as often as new words stand among the nouns.
        """
        others = torch.full((), self.new_share, dtype=torch.float64)
        return torch.where(self.is_noun, self.is_new.double(), others)


def precision_thresholds(fires: Fires, level: torch.Tensor, target: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(thresholds [P] fp32, whether a concept has one of its own [P] bool).

    One threshold for all, higher for a level that is less right than all, and for a concept that is less right than
    its level. `fires` count by `weight`, but for a concept's own, of which there are too few for that.
    """
    weight, every = fires.weight(), torch.ones(len(fires.score), dtype=torch.float64)
    for_all = lowest(fires.score, fires.right, weight, target)
    thresholds, own = torch.full((len(level),), for_all), torch.zeros(len(level), dtype=torch.bool)
    for number in level.unique().tolist():
        of_level = (level[fires.probe] == number) & (fires.score > for_all) & (weight > 0)
        if int(of_level.sum()) >= ENOUGH:
            raised = raised_threshold(fires, of_level, weight, target, for_all)
            thresholds[level == number] = raised
    for probe in range(len(level)):
        of_probe = (fires.probe == probe) & (fires.score > thresholds[probe])
        if int(of_probe.sum()) >= ENOUGH:
            thresholds[probe] = raised_threshold(fires, of_probe, every, target, float(thresholds[probe]))
            own[probe] = True
    return thresholds, own


def raised_threshold(fires: Fires, chosen: torch.Tensor, weight: torch.Tensor, target: float, least: float) -> float:
    """The lowest threshold from `least` on over which enough of the chosen fires are right."""
    share = (weight * fires.right)[chosen].sum() / weight[chosen].sum()
    return least if share >= target else lowest(fires.score[chosen], fires.right[chosen], weight[chosen], target)


def precisions(fires: Fires, thresholds: torch.Tensor, level: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """[P] fp64: the share right of what fires, of the concept's own fires or of its level's; NaN without any."""
    over, weight = fires.score > thresholds[fires.probe], fires.weight()
    result = torch.full((len(level),), float("nan"), dtype=torch.float64)
    for probe in range(len(level)):
        chosen = over & ((fires.probe == probe) if own[probe] else (level[fires.probe] == level[probe]))
        counts = torch.ones_like(weight) if own[probe] else weight
        if (counts * chosen).sum() > 0:
            result[probe] = (counts * chosen * fires.right).sum() / (counts * chosen).sum()
    return result


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
