"""Labels of tokens: parts of a text whose tokens have the same labels.

    parts = parts_of(example, text, tokens, place={"whale": 0})
    parts[0].tokens, parts[0].known         # positions [n], and [P] int8: 1 present, 0 absent, -1 unknown

A part counts as one unit, regardless of its number of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from probemon.core.hierarchy import Ints
from probemon.errors import TrainingError
from probemon.host.text_tokens import in_ranges
from probemon.lab.corpora.windows import WindowTokens
from probemon.lab.training.examples import Example, Span
from probemon.lab.training.texts import Text

Known = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Part:
    """Tokens of one text, by position, and their labels `[P]`."""

    tokens: Ints
    known: Known


def parts_of(example: Example, text: Text, tokens: WindowTokens, place: Mapping[str, int]) -> list[Part]:
    """Return the labelled parts of a text; `place` has the column of each concept.

    Raises `TrainingError` for spans without token offsets or tokens, or with contradictory labels.
    """
    text_labels = np.full(len(place), -1, dtype=np.int8)
    for id, there in example.labels.items():
        text_labels[place[id]] = there
    counted = np.flatnonzero(text.counts(tokens))
    if not example.spans:
        return [Part(counted, text_labels)] if len(counted) and (text_labels >= 0).any() else []
    if len(tokens) and tokens.start.min() < 0:
        raise TrainingError(
            f"{example.where} has spans of characters, and this model's tokenizer has no character offsets:"
            " give whole texts with labels"
        )
    for span in example.spans:
        if span.turn is not None and text.place_of(span.turn, span.start) is None:
            raise TrainingError(
                f"{example.where}: the span {example.said_in(span)!r} is in turn {span.turn}, of"
                f" {example.messages[span.turn]['role']}, which does not count: choose other parts by --on"
            )
    known = np.repeat(text_labels[None], len(tokens), axis=0)
    for id, absent in example.outside.items():
        spans = [_range(span, text) for span in example.spans if span.positive and span.concept == id]
        others = ~in_ranges(tokens.start, tokens.end, spans)
        for other in absent:
            if other not in example.labels:
                known[others, place[other]] = 0
    by_span = np.full(known.shape, -1, dtype=np.int8)
    for there in (False, True):
        for span in example.spans:
            if span.positive == there:
                inside = in_ranges(tokens.start, tokens.end, [_range(span, text)])
                if not inside.any():
                    raise TrainingError(
                        f"{example.where}: no token is at characters {span.start} to {span.end}"
                        f" ({example.said_in(span)!r})"
                    )
                column = place[span.concept]
                if (by_span[inside, column] == (not there)).any() or example.labels.get(span.concept, there) != there:
                    raise TrainingError(
                        f"{example.where}: characters {span.start} to {span.end}"
                        f" ({example.said_in(span)!r}) are of {span.concept!r} and not of it"
                    )
                by_span[inside, column] = known[inside, column] = there
    for id in example.unsure:
        known[:, place[id]] = -1
    rows, inverse = np.unique(known[counted], axis=0, return_inverse=True)
    parts = [Part(counted[inverse.reshape(-1) == i], row) for i, row in enumerate(rows) if (row >= 0).any()]
    return sorted(parts, key=lambda part: int(part.tokens[0]))


def _range(span: Span, text: Text) -> tuple[int, int]:
    """Return the characters of a span in a text as the model reads it."""
    start = text.place_of(span.turn, span.start)
    assert start is not None
    return start, start + span.end - span.start
