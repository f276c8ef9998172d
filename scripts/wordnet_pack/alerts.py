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
OFTEN = 5  # uses of a new word
ENOUGH = 20  # fires over its threshold from which a concept's own precision is believed


@dataclass(frozen=True)
class Fires:
    """Pairs of a token and a concept that might fire: F of them."""

    probe: torch.Tensor  # [F] int64
    score: torch.Tensor  # [F] fp32
    right: torch.Tensor  # [F] bool
    weight: torch.Tensor  # [F] fp64: how much each says of a text whose every word is new

    @classmethod
    def of(cls, scores: torch.Tensor, any_sense: torch.Tensor, word: torch.Tensor, is_new: torch.Tensor) -> Fires:
        """From path scores [N, P]; `any_sense` [W + 1, P]; `word` [N], -1 for none; `is_new` [N]: of the words that
        trained nothing.

        A new word says how new words do, once: from `OFTEN` uses on they count less, so that together they count no
        more. Tokens of no noun count as often as these words stand among the nouns, in the mix that the text has.
        """
        noun = word >= 0
        uses = torch.bincount(word[noun & is_new], minlength=len(any_sense)).double()
        of_token = torch.where(noun & is_new, (OFTEN / uses.clamp(min=OFTEN))[word], 0.0)
        of_token[~noun] = of_token.sum() / max(1, int(noun.sum()))
        row, probe = (scores > FLOOR).nonzero(as_tuple=True)
        return cls(probe, scores[row, probe], any_sense[word[row], probe], of_token[row])

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
        return cls(probe, best[row, probe], right[row, probe] > 0, torch.ones(len(row), dtype=torch.float64))


def precision_thresholds(fires: Fires, level: torch.Tensor, target: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(thresholds [P] fp32, whether a concept has one of its own [P] bool).

    One threshold for all, higher for a level that is less right than all, and for a concept that is less right than
    its level. `fires` count by `weight`, but for a concept's own, of which there are too few for that.
    """
    weight, every = fires.weight, torch.ones(len(fires.score), dtype=torch.float64)
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
    over, weight = fires.score > thresholds[fires.probe], fires.weight
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
