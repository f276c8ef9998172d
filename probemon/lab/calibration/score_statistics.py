"""Counts how concepts score on ordinary text.

statistics = ScoreStatistics.of(documents, probes=[17, 20], aggregator=Ema(0.3))    # scores [T, 2] of each document
statistics.beside(pack)              # for PackWriter(score_counts=...)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.core.aggregate import Aggregator, Each, over
from probemon.core.baselines import refuse_baseline
from probemon.core.score_counts import N_BINS, ScoreCounts
from probemon.core.scores import Floats
from probemon.errors import CalibrationError, ConfigError
from probemon.packs.pack import ProbePack


@dataclass(frozen=True)
class ScoreStatistics:
    """Score counts of some probes, by `str()` of the aggregator."""

    probes: tuple[int, ...]
    counts: Mapping[str, ScoreCounts]
    n_documents: int

    @classmethod
    def of(
        cls, documents: Iterable[Floats], probes: Sequence[int], aggregator: Aggregator | None = None
    ) -> ScoreStatistics:
        """Count scores `[T, K]` and running scores of `aggregator`. Rows of NaN are left out.

        Raises `ConfigError`, or `CalibrationError` if there are no tokens.
        """
        aggregators: list[Aggregator] = [Each()]
        if aggregator is not None and aggregator != Each():
            refuse_baseline(aggregator, "statistics of")
            aggregators.append(aggregator)
        zeros = ScoreCounts(np.zeros((len(probes), N_BINS), dtype=np.int64))
        counts, n_documents = {str(each): zeros for each in aggregators}, 0
        for scores in documents:
            if np.ndim(scores) != 2 or scores.shape[1] != len(probes):
                raise ConfigError(
                    f"scores have shape {np.shape(scores)}: give [T, {len(probes)}], a column for each probe"
                )
            seen = scores[~np.isnan(scores).all(axis=1)]
            n_documents += len(seen) > 0
            for each in aggregators:
                counts[str(each)] += ScoreCounts.of(over(each, seen))
        if not n_documents:
            raise CalibrationError("there are no tokens to count scores of: give documents that can be scored")
        return cls(tuple(probes), counts, n_documents)

    def beside(self, pack: ProbePack) -> dict[str, Tensor]:
        """Return the pack's counts, `[P, N_BINS]` int32 by aggregator, updated with these."""
        counts = {name: pack.score_counts(name).clone() for name in pack.counted}
        for name, new_counts in self.counts.items():
            pack_counts = counts.setdefault(name, torch.zeros(pack.n_probes, N_BINS, dtype=torch.int32, device="cpu"))
            pack_counts[list(self.probes)] = torch.from_numpy(new_counts.counts.astype(np.int32))
        return counts

    def stated(self) -> dict[str, Any]:
        """Return the amounts, as JSON."""
        return {
            "aggregators": list(self.counts),
            "n_concepts": len(self.probes),
            "n_documents": self.n_documents,
            "n_tokens": int(self.counts[str(Each())].n.max(initial=0)),
        }

    def sentence(self) -> str:
        """Return them as a sentence."""
        summary = self.stated()
        return (
            f"Scores of {summary['n_concepts']} concepts were counted at {summary['n_tokens']} tokens of"
            f" {summary['n_documents']} documents, by {', '.join(f'`{name}`' for name in self.counts)}: rules compare"
            " with them by `z:pack` and `rank:pack`."
        )
