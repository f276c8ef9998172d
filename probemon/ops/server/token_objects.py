"""Tokens, events, summaries and packs as JSON objects, with keys that clients rely on."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from probemon.core.aggregate import Doubles
from probemon.core.hierarchy import Mask
from probemon.core.scores import Scores
from probemon.monitor.result import ConceptScore, Result
from probemon.monitor.rule_spec import RuleSpec
from probemon.monitor.rules import Event
from probemon.monitor.summary import summarise
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.strength import shortest, strength_of

_MOST_STRENGTH = 100.0  # infinite for a score of 1
_N_LEADING = 10


class Told:
    """Makes the objects of an answer. `shown [P]`: mask of reported probes; None for all."""

    def __init__(self, pack: AnyPack, top_k: int, shown: Mask | None) -> None:
        self._pack, self._top_k, self._shown = pack, top_k, shown
        self._threshold = pack.alert_threshold.numpy()  # [P], NaN without a threshold

    def token(
        self,
        scores: Scores,
        i: int,
        *,
        choice: int,
        position: int,
        token_id: int,
        text: str,
        span: tuple[int, int] | None,
        phase: str,
        part: str | None = None,
    ) -> dict[str, Any]:
        """Return the TOKEN of state `i`.

        - `span`: (start, end) in the text of its part; None for a prompt token
        - `part`: "reasoning", or None
        """
        probes, values = scores.active(i), scores.active_scores(i)
        fired = scores.fired(i)
        if self._shown is not None:
            mask = self._shown[probes]
            probes, values, fired = probes[mask], values[mask], fired[self._shown[fired]]
        strengths = strength_of(values, self._threshold[probes])
        return {
            "choice": choice,
            "position": position,
            "token_id": token_id,
            "text": text,
            "start": None if span is None else span[0],
            "end": None if span is None else span[1],
            "phase": phase,
            **({} if part is None else {"part": part}),
            "top": self._top(probes, values, strengths),
            "fired": fired.tolist(),
            "strengths": [_strength(value) for value in strengths[np.searchsorted(probes, fired)].tolist()],
            "n_active": int(scores.coverage.active[i]),
            **{f"n_{name}": int(getattr(scores.coverage, name)[i]) for name in ("dropped", "excluded", "shed")},
            "unseen": scores.coverage.unseen[i] or None,
            **({"from_cache": True} if scores.coverage.from_cache[i] else {}),
        }

    def event(self, event: Event, choice: int, action: str) -> dict[str, Any]:
        """Return the EVENT of a met rule."""
        return {
            "choice": choice,
            "concept": event.concept,
            "name": event.name,
            "position": event.column,
            "score": shortest(event.value),
            "threshold": shortest(event.above),
            "action": action,
            "for_tokens": event.for_tokens,
            "aggregate": None if event.aggregate == "each" else event.aggregate,
            **({"blind": event.blind} if event.blind else {}),
            **({} if event.verdict is None else {"verdict": asdict(event.verdict)}),
        }

    def summary(self, result: Result, stopped_by: Any, n_withheld: int) -> dict[str, Any]:
        """Return the summary of an answer."""
        about = summarise(result, above=self._above())
        generated = result.scores.take(result.tokens_of(0, "generated"))
        return {
            "coverage": generated.coverage.totals(),
            "leading": [_concept(concept) for concept in about.answer.concepts[:_N_LEADING]],
            "n_leading": len(about.answer.concepts),
            "thresholds": about.thresholds,
            "stopped_by": stopped_by,
            "n_withheld": n_withheld,
            "unlike": about.unlike,
        }

    # -- inside ----------------------------------------------------------------------------------

    def _above(self) -> Doubles | None:
        return None if self._shown is None else np.where(self._shown, -math.inf, math.inf)

    def _top(self, probes: Any, values: Any, strength: Doubles) -> list[list[Any]]:
        """Rank by strength, then those without a threshold by score, like `Result.top`."""
        bare = np.isnan(strength)
        order = np.lexsort((probes, -np.where(bare, values.astype(np.float64), strength), bare))[: self._top_k]
        return [[int(probes[at]), shortest(values[at]), _strength(strength[at])] for at in order]


def about_pack(pack: AnyPack, model: str) -> dict[str, Any]:
    """Return a pack for the page. TOKENs refer to concepts by index."""
    packs = [pack] if not isinstance(pack, PackGroup) else list(pack.packs.values())
    return {
        "model": model,
        "pack": pack.name,
        "alert_set": pack.alert_set,
        "score_rule": sorted({one.score_rule for one in packs}),
        "rule": RuleSpec.schema(without=("rate", "alert_set", "on_blind")),
        "concepts": [
            {
                "id": concept["id"],
                "name": concept["name"],
                "level": int(pack.tree.level[probe]),
                "parents": [int(parent) for parent in pack.tree.parents(probe)],
                "threshold": _number(float(pack.alert_threshold[probe])),
                "precision": _number(pack.precision(probe)),
            }
            for probe, concept in enumerate(pack.concepts)
        ],
    }


def _concept(concept: ConceptScore) -> dict[str, Any]:
    return {
        "index": concept.probe,
        "concept": concept.concept,
        "name": concept.name,
        "path": list(concept.path),
        "position": concept.position,
        "score": shortest(concept.score),
        "threshold": _number(concept.threshold),
        "strength": _strength(concept.strength),
        "precision": _number(concept.precision),
    }


def _strength(value: float) -> float | None:
    return None if math.isnan(value) else round(max(-_MOST_STRENGTH, min(_MOST_STRENGTH, float(value))), 4)


def _number(value: float) -> float | None:
    return shortest(value) if math.isfinite(value) else None
