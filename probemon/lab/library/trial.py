"""Which concepts stand in a text, by the running scores that a pack was trained for.

found = shown_in("I will not help with that.", pack, model, tokenizer)
found[0].concept, found[0].fires, found[0].at
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from probemon.core.aggregate import named, over
from probemon.errors import ConfigError
from probemon.lab.corpora.documents import Document
from probemon.lab.corpora.state_reader import StateReader
from probemon.lab.corpora.windows import Reading, shards
from probemon.manager import DynamicProbeManager
from probemon.packs.pack import ProbePack

_AROUND = 40  # characters


@dataclass(frozen=True)
class Shown:
    """A concept's highest running score in a text, its threshold, and the text `at` it."""

    concept: str
    score: float
    threshold: float
    fires: bool
    at: str


def shown_in(text: str, pack: ProbePack, model: Any, tokenizer: Any) -> list[Shown]:
    """Return the concepts of a trained pack that have a threshold, those that are furthest over it first."""
    quality = (pack.manifest.get("quality") or {}).get("concepts") or {}
    if not quality or any("reads" not in one for one in quality.values()):
        raise ConfigError(
            f"the pack {pack.name} names no running scores: give one of `probemon library fit` or `train`"
        )
    manager, reader = DynamicProbeManager(pack), StateReader(model, tokenizer, pack.sites, Reading())
    document = Document(0, "text", text)
    _, tokens, states = next(iter(reader.states(shards([document]))), (None, None, None))
    if tokens is None or states is None:
        raise ConfigError("the text has no tokens: give a longer one")
    scores = manager.score_all(states).cpu().numpy()
    found = []
    for p, concept in enumerate(pack.concepts):
        one = quality[concept["id"]]
        running = over(named(one["reads"]), scores[:, p : p + 1])[:, 0]
        at = int(np.argmax(running))
        if one["alert_of_texts"]["threshold"] is None:  # no text set one
            continue
        threshold = float(one["alert_of_texts"]["threshold"])
        end = int(tokens.end[at])
        around = text[max(0, end - _AROUND) : end]
        found.append(Shown(concept["id"], float(running[at]), threshold, bool(running[at] > threshold), around))
    return sorted(found, key=lambda one: (not one.fires, one.threshold - one.score))
