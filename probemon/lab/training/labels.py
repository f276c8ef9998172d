"""Says of tokens which concepts they are of: parts of a text whose tokens have the same labels.

    parts = parts_of(example, text, tokens, place={"whale": 0})
    parts[0].tokens, parts[0].known         # positions [n], and [P] int8: 1 there, 0 absent, -1 unknown

A part is what one label was given for: a text, or the tokens of its spans, or all others. It counts as one, however
many tokens it has.
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
from probemon.lab.training.examples import Example
from probemon.lab.training.texts import Text

Known = npt.NDArray[np.int8]


@dataclass(frozen=True)
class Part:
    """Tokens of one text, by position, and what is known of them `[P]`."""

    tokens: Ints
    known: Known


def parts_of(example: Example, text: Text, tokens: WindowTokens, place: Mapping[str, int]) -> list[Part]:
    """Return the parts of a text of which something is known; `place` has the column of each concept.

    Raises `TrainingError` where spans are given and the tokenizer does not say where its tokens stand, or none of them
    is in a span, and where a token is of a concept and not of it.
    """
    whole = np.full(len(place), -1, dtype=np.int8)
    for id, there in example.labels.items():
        whole[place[id]] = there
    counted = np.flatnonzero(text.counts(tokens))
    if not example.spans:
        return [Part(counted, whole)] if len(counted) and (whole >= 0).any() else []
    if len(tokens) and tokens.start.min() < 0:
        raise TrainingError(
            f"{example.where} has spans of characters, and this model's tokenizer does not say where its tokens stand:"
            " give whole texts with labels"
        )
    known = np.repeat(whole[None], len(tokens), axis=0)
    for id, absent in example.outside.items():
        spans = [(span.start, span.end) for span in example.spans if span.positive and span.concept == id]
        others = ~in_ranges(tokens.start, tokens.end, spans)
        for other in absent:
            if other not in example.labels:
                known[others, place[other]] = 0
    said = np.full(known.shape, -1, dtype=np.int8)  # by spans
    for there in (False, True):
        for span in example.spans:
            if span.positive == there:
                inside = in_ranges(tokens.start, tokens.end, [(span.start, span.end)])
                if not inside.any():
                    raise TrainingError(
                        f"{example.where}: no token stands at characters {span.start} to {span.end}"
                        f" ({example.text[span.start : span.end]!r})"
                    )
                column = place[span.concept]
                if (said[inside, column] == (not there)).any() or example.labels.get(span.concept, there) != there:
                    raise TrainingError(
                        f"{example.where}: characters {span.start} to {span.end}"
                        f" ({example.text[span.start : span.end]!r}) are of {span.concept!r} and not of it"
                    )
                said[inside, column] = known[inside, column] = there
    rows, inverse = np.unique(known[counted], axis=0, return_inverse=True)
    parts = [Part(counted[inverse.reshape(-1) == i], row) for i, row in enumerate(rows) if (row >= 0).any()]
    return sorted(parts, key=lambda part: int(part.tokens[0]))
