"""Puts examples into ordinary text, so that probes learn to find them there.

    carried = in_carriers(examples, texts, carriers, seed=0)      # [(index of the example, Example, first character)]

A model reads from left to right, so only what stands before an example matters: the beginning of an ordinary text, the
same for all texts of a group, so that twins differ in themselves alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.host.chat_forms import reasons
from probemon.lab.training.examples import Example, Span

SHORT = 1_200  # characters; longer texts bring context already
MOST = 4_000  # texts
_FROM, _TO = 150, 400  # characters of a carrier
_BETWEEN = "\n\n"


@dataclass(frozen=True)
class Carried:
    """The example `of`, after `n_before` characters of ordinary text: of its text, or of the turn `turn`."""

    of: int
    example: Example
    n_before: int
    turn: int | None = None


def in_carriers(
    examples: Sequence[Example],
    group: Ints,
    carriers: Sequence[str],
    roles: Sequence[str],
    *,
    seed: int,
    most: int = MOST,
) -> list[Carried]:
    """Return each short example once more, in a carrier; at most `most`, whole groups, evenly drawn."""
    if not carriers or not most:
        return []
    short = [i for i, example in enumerate(examples) if 0 < len(example.content) <= SHORT]
    groups = np.unique(group[short]) if short else np.zeros(0, dtype=np.int64)
    if len(short) > most:
        share = most / len(short)
        groups = np.random.default_rng([seed, 3]).permutation(groups)[: max(1, int(share * len(groups)))]
    prefix_of = {g: _prefix(carriers, np.random.default_rng([seed, 4, g])) for g in groups.tolist()}
    carried = []
    for i in short:
        prefix = prefix_of.get(int(group[i]))
        if prefix is not None and (found := _carry(i, examples[i], prefix, roles)) is not None:
            carried.append(found)
    return carried


def _prefix(carriers: Sequence[str], generator: np.random.Generator) -> str:
    text = carriers[int(generator.integers(len(carriers)))]
    length = int(generator.integers(_FROM, _TO))
    cut = text[:length]
    return (cut[: cut.rfind(" ")] if len(text) > length and " " in cut else cut).strip() + _BETWEEN


def _carry(i: int, example: Example, prefix: str, roles: Sequence[str]) -> Carried | None:
    n, where = len(prefix), f"{example.where}, after other text"

    def moved(span: Span, turn: int | None) -> Span:
        return replace(span, start=span.start + n, end=span.end + n) if span.turn == turn else span

    if not example.messages:
        spans = tuple(moved(span, None) for span in example.spans)
        return Carried(i, replace(example, where=where, text=prefix + example.text, spans=spans), n)
    turns = [at for at, turn in enumerate(example.messages) if turn["role"] in roles and turn["content"].strip()]
    # Which of several turns has the concept is not known; reasoning stands before an answer.
    if len(turns) != 1 or any(map(reasons, example.messages)):
        return None
    at = turns[0]
    messages = [dict(turn) for turn in example.messages]
    messages[at]["content"] = prefix + messages[at]["content"]
    spans = tuple(moved(span, at) for span in example.spans)
    return Carried(i, replace(example, where=where, messages=tuple(messages), spans=spans), n, at)
