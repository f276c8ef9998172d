"""Finds texts that are given twice, with a concept and without it.

    for found in contradictions(data):
        found.concept, found.there, found.absent     # "spam", "mails.csv, row 3", "mails.csv, row 9"

Labels of real texts disagree, so this is no error: both are learnt, and copies are never parted. But nothing that reads
the text can be right on both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from probemon.lab.training.dataset import Dataset
from probemon.lab.training.labels import Known


@dataclass(frozen=True)
class Contradiction:
    """A text of which two rows say unlike things of a concept: where it is `there`, and where `absent`."""

    concept: str
    there: str
    absent: str


def contradictions(data: Dataset) -> Iterator[Contradiction]:
    """Yield one for each concept of each text that is given twice and unlike; spaces make no other text."""
    copies: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for document in np.unique(data.document).tolist():
        copies[tuple(data.texts[document].text.split())].append(document)
    for documents in copies.values():
        if len(documents) > 1:
            known = [_of_tokens(data, document) for document in documents]
            if len({len(own) for own in known}) > 1:  # other spaces, other tokens
                known = [_of_text(own) for own in known]
            yield from _between(data, documents, np.stack(known))


def _of_tokens(data: Dataset, document: int) -> Known:
    """What is known of each token of a text `[T, P]`."""
    known = np.full((len(data.tokens[document]), len(data.concepts)), -1, dtype=np.int8)
    for part in np.flatnonzero(data.document == document):
        known[data.positions[part]] = data.known[part]
    return known


def _of_text(known: Known) -> Known:
    """What is known of a text `[1, P]`: a concept is in it where it is at one token, and absent where it is at none."""
    return np.where((known == 1).any(axis=0), 1, np.where((known == 0).all(axis=0), 0, -1)).astype(np.int8)[None]


def _between(data: Dataset, documents: Sequence[int], known: Known) -> Iterator[Contradiction]:
    """Those of the copies of one text, of which `known [N, T, P]`."""
    unlike = (known == 1).any(axis=0) & (known == 0).any(axis=0)
    for p in np.flatnonzero(unlike.any(axis=0)):
        token = int(np.argmax(unlike[:, p]))
        there, absent = (documents[int(np.argmax(known[:, token, p] == side))] for side in (1, 0))
        yield Contradiction(data.concepts[p].id, data.texts[there].where, data.texts[absent].where)
