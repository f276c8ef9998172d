"""What fires on running text, and how much of it is right: the curve over strengths, by kind of text and by level.

    seen = Seen.of(scores, thresholds, running, truth, rows)       # tokens of one kind of text, scored
    seen.at(0.0)                  # fires and shares at a strength; 0 is the alert threshold itself
    seen.right_at(0.7)            # share right where .7 concepts fire a noun token, on words that trained nothing

A fire at the last token of a word that can be a noun is right where some noun sense of the word lies under the concept.
"Strictly right" leaves out what the word's usual sense does not say.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .running import Running, Truth

STRENGTHS = (0.0, 0.5, 1.0, 2.0)


def strengths(scores: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Log-odds of path scores [N, P] over those of the thresholds [P]."""
    return torch.logit(scores.double(), eps=1e-12) - torch.logit(thresholds.double(), eps=1e-12)


@dataclass(frozen=True)
class Seen:
    """Strengths [N, P] at N tokens, and what is known of each token."""

    strength: torch.Tensor
    any_sense: torch.Tensor  # [N, P] bool
    strict: torch.Tensor  # [N, P] int8
    noun: torch.Tensor  # [N] bool: the last token of a word that can be a noun
    held_out: torch.Tensor  # [N] bool: of those, words that trained nothing and calibrated nothing
    other: torch.Tensor  # [N] bool: of no such word

    @classmethod
    def of(cls, strength: torch.Tensor, running: Running, truth: Truth, rows: torch.Tensor) -> Seen:
        word, last = running.word[rows], running.is_last[rows]
        test_words = running.words_of_split("test")[rows]
        return cls(strength, truth.any_sense[word], truth.strict[word], last, last & test_words, word < 0)

    def at(self, cut: float) -> dict[str, Any]:
        """Fires a token and shares that are right, over a strength."""
        fires = self.strength > cut
        return {
            "strength": cut,
            "fires_per_noun": rate(fires, self.noun),
            "right": share_right(fires & self.any_sense, fires, self.noun),
            "fires_per_held_out_noun": rate(fires, self.held_out),
            "right_held_out": share_right(fires & self.any_sense, fires, self.held_out),
            "strictly_right_held_out": share_right(
                fires & (self.strict == 1), fires & (self.strict >= 0), self.held_out
            ),
            "recall_held_out": share_right(fires & (self.strict == 1), self.strict == 1, self.held_out),
            "fires_per_other": rate(fires, self.other),
            "fires_per_token": rate(fires, torch.ones_like(self.other)),
        }

    def right_at(self, per_noun: float) -> dict[str, Any]:
        """The share right on held-out words where `per_noun` concepts fire at each; None where fewer ever do."""
        values, order = self.strength[self.held_out].flatten().sort(descending=True)
        n = round(per_noun * int(self.held_out.sum()))
        if not 0 < n <= len(values):
            return {"fires_per_held_out_noun": per_noun, "right": None, "n": 0, "strength": None}
        right = self.any_sense[self.held_out].flatten()[order[:n]].double().mean()
        return {
            "fires_per_held_out_noun": per_noun,
            "right": round(float(right), 4),
            "n": n,
            "strength": round(float(values[n - 1]), 3),
        }

    def by_level(self, level: torch.Tensor, cut: float = 0.0) -> dict[str, Any]:
        """Fires and shares right on held-out words, by the concepts' level."""
        fires = self.strength > cut
        return {
            str(number): {
                "fires_per_held_out_noun": rate(fires[:, level == number], self.held_out),
                "right": share_right(
                    (fires & self.any_sense)[:, level == number], fires[:, level == number], self.held_out
                ),
            }
            for number in level.unique().tolist()
        }


def rate(fires: torch.Tensor, tokens: torch.Tensor) -> float | None:
    """Fires [N, P] a token, over some tokens [N]."""
    n = int(tokens.sum())
    return round(int(fires[tokens].sum()) / n, 4) if n else None


def share_right(right: torch.Tensor, fires: torch.Tensor, tokens: torch.Tensor) -> float | None:
    n = int(fires[tokens].sum())
    return round(int(right[tokens].sum()) / n, 4) if n else None
