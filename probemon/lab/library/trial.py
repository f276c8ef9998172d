"""Which concepts stand in a text, by the running scores that a pack was trained for.

found = shown_in("I will not help with that.", pack, model, tokenizer)
found[0].concept, found[0].fires, found[0].at
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from probemon.core.aggregate import Aggregator, RollingLogit, over
from probemon.errors import ConfigError, TrainingError
from probemon.lab.training.examples import Example
from probemon.lab.training.state_store import TextReader, shards_of
from probemon.lab.training.texts import Text, render
from probemon.manager import DynamicProbeManager
from probemon.packs.group import trained_score
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


def shown_in(text: str, pack: ProbePack, model: Any, tokenizer: Any, *, prompt: str = "") -> list[Shown]:
    """Return the concepts of a trained pack that have a threshold, those that are furthest over it first.

    `prompt`: the text is an assistant's answer to it. Without it, the text stands alone.

    Concepts whose running score begins after the text's end are left out.

    Raises `ConfigError`, also for a model without a chat template, or a text that is too short for any score.
    """
    reads = [trained_score(pack, probe) for probe in range(pack.n_probes)]
    if not any(reads):
        raise ConfigError(
            f"the pack {pack.name} names no running scores: give one of `probemon library fit` or `train`"
        )
    rendered = _rendered(text, prompt, tokenizer)
    manager, reader = DynamicProbeManager(pack), TextReader(model, tokenizer, pack.sites)
    [(states_of, places)] = reader.kinds([rendered])
    _, tokens, states = next(iter(states_of.states(shards_of([rendered], places))), (None, None, None))
    if tokens is None or states is None:
        raise ConfigError("the model reads no tokens of the text: give another one")
    counts, begin = rendered.counts(tokens), rendered.counted[0][0] if rendered.counted else 0
    scores, ends = manager.score_all(states).cpu().numpy()[counts], tokens.end[counts]
    found = []
    for p, (concept, aggregator) in enumerate(zip(pack.concepts, reads, strict=True)):
        if aggregator is None or _begins(aggregator) > len(scores):
            continue
        threshold = float(pack.thresholds_for(aggregator)[p])
        if np.isnan(threshold):  # no text set one
            continue
        running = over(aggregator, scores[:, p : p + 1])[:, 0]
        at = int(np.argmax(running))
        around = rendered.text[max(begin, int(ends[at]) - _AROUND) : int(ends[at])]
        found.append(Shown(concept["id"], float(running[at]), threshold, bool(running[at] > threshold), around))
    if not found and len(scores) < (least := min(_begins(one) for one in reads if one is not None)):
        raise ConfigError(
            f"the text has {len(scores)} tokens, and no score of {pack.name} begins before {least}: say more"
        )
    return sorted(found, key=lambda one: (not one.fires, one.threshold - one.score))


def _begins(aggregator: Aggregator) -> int:
    """Return the number of tokens from which there is a running score."""
    return aggregator.least if isinstance(aggregator, RollingLogit) else 1


def _rendered(text: str, prompt: str, tokenizer: Any) -> Text:
    if not text.strip():
        raise ConfigError("the text is empty: say something")
    messages = ({"role": "user", "content": prompt}, {"role": "assistant", "content": text}) if prompt else ()
    try:
        [rendered] = render([Example("the answer", text, messages=messages)], tokenizer, roles=("assistant",))
    except TrainingError as error:
        raise ConfigError(str(error)) from error
    return rendered
