"""One concept of a pack as a JSON object: what it is, what it was trained on, how far to trust it.

about_concept(pack, 17)["false_alarms"]     # {"rate": 0.004, "n": 121519, "at_most": False}, or None
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from probemon.core.score_counts import EDGES, WIDTH, bins_of, log_odds
from probemon.errors import RequestRefused
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.pack import ProbePack
from probemon.packs.strength import shortest
from probemon.util.checks import is_number

_MOST_TEXTS = 60  # of a list
_MOST_CHARS = 2000  # of a text
_EACH = "each"  # scores of single tokens


def find_index(text: str, pack: AnyPack) -> int:
    """Return the concept's number that a path has. Raises `RequestRefused`."""
    if text.isascii() and text.isdigit() and len(text) < 10 and int(text) < pack.n_probes:
        return int(text)
    raise RequestRefused(
        f"there is no concept {text!r:.100}: give a number from 0 to {pack.n_probes - 1}",
        status=404,
        code="concept_not_found",
    )


def about_concept(pack: AnyPack, probe: int) -> dict[str, Any]:
    """Return what the pack says about a concept; None, or an empty list, for what it does not say.

    - `examples`: texts, if the concept's line in the pack has some
    - `n_train`: examples of the concept in training
    - `auroc`: share of pairs of a text with and one without it that its score orders rightly
    - `false_alarms`: share of `n` ordinary tokens over the threshold in force; `at_most`: a bound, as the counts of
      scores round the threshold down to a bin
    - `scores`: how many calibration tokens have a score in each bin of log odds, `width` wide, from `low` on
    """
    owner, number = _place(pack, probe)
    concept, stated = pack.concepts[probe], _stated(owner, number)
    return {
        "index": probe,
        "id": concept["id"],
        "name": concept["name"],
        "path": pack.path(probe),
        "pack": owner.name,
        "score_rule": owner.score_rule,
        "scope": owner.scope,
        "definition": _text(concept.get("definition")),
        "synonyms": _texts(concept.get("lemmas")),
        "words": _texts(concept.get("words")),
        "examples": _texts(concept.get("examples")),
        "n_train": _count(concept.get("n_train"), stated.get("n_positive")),
        "auroc": _share(concept.get("auroc_test"), concept.get("auroc_validation"), stated.get("auroc")),
        "threshold": _share(float(pack.alert_threshold[probe])),
        "precision": _share(pack.precision(probe)),
        "false_alarms": _false_alarms(owner, number, stated),
        "scores": _scores(owner, number),
    }


def _place(pack: AnyPack, probe: int) -> tuple[ProbePack, int]:
    if not isinstance(pack, PackGroup):
        return pack, probe
    return next(
        (member, int(own[0])) for member, own in zip(pack.packs.values(), pack.split([probe]), strict=True) if len(own)
    )


def _stated(pack: ProbePack, probe: int) -> dict[str, Any]:
    """Return the concept's entry in the pack's quality; {} if there is none."""
    return _inner(pack.manifest, "quality", "concepts", pack.concepts[probe]["id"])


def _inner(content: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        content = content.get(key) if isinstance(content, dict) else None
    return content if isinstance(content, dict) else {}


def _false_alarms(pack: ProbePack, probe: int, stated: dict[str, Any]) -> dict[str, Any] | None:
    """Return the rate that was measured at the threshold in force, else a bound on it from the counts of scores."""
    calibrated = _inner(pack.manifest, "quality", "alerts", _EACH, "concepts", pack.concepts[probe]["id"])
    trained = _inner(stated, "alert")
    for threshold, rate in ((calibrated, _inner(calibrated, "tokens")), (trained, trained)):
        at, share, n = threshold.get("threshold"), _share(rate.get("rate")), _count(rate.get("n"))
        if is_number(at) and np.float32(at) == pack.alert_threshold[probe].item() and share is not None and n:
            return {"rate": share, "n": n, "at_most": False}
    above, scores = float(pack.alert_threshold[probe]), _scores(pack, probe)
    if scores is None or math.isnan(above):
        return None
    counts, first = scores["counts"], int(bins_of(log_odds(above)))
    return {"rate": shortest(sum(counts[first:]) / sum(counts)), "n": sum(counts), "at_most": True}


def _scores(pack: ProbePack, probe: int) -> dict[str, Any] | None:
    if _EACH not in pack.counted:
        return None
    counts = pack.score_counts()[probe].tolist()
    return {"low": float(EDGES[0]), "width": WIDTH, "counts": counts} if any(counts) else None


def _text(value: Any) -> str | None:
    return value[:_MOST_CHARS] if isinstance(value, str) and value.strip() else None


def _texts(value: Any) -> list[str]:
    texts = value if isinstance(value, list) else []
    return [text for one in texts if (text := _text(one)) is not None][:_MOST_TEXTS]


def _share(*values: Any) -> float | None:
    """Return the first that is a number between 0 and 1."""
    return next((shortest(value) for value in values if is_number(value) and 0 <= value <= 1), None)


def _count(*values: Any) -> int | None:
    return next((int(value) for value in values if is_number(value) and math.isfinite(value) and value >= 0), None)
