"""Finds texts that are given both with and without a concept. Both are learnt, since labels of real texts disagree.

for found in contradictions(data):
    found.concept, found.there, found.absent     # "spam", "mails.csv, row 3", "mails.csv, row 9"
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from probemon.lab.training.dataset import ELSEWHERE, OWN, Dataset
from probemon.lab.training.labels import Known


@dataclass(frozen=True)
class Contradiction:
    """A text with two rows: the concept is present in `there`, missing in `absent`."""

    concept: str
    there: str
    absent: str


def contradictions(data: Dataset) -> Iterator[Contradiction]:
    """Yield one for each concept and contradictory text; whitespace is ignored."""
    copies: dict[tuple[str, ...], list[int]] = defaultdict(list)
    own = data.is_of(OWN, ELSEWHERE)
    for document in np.unique(data.document[own[data.document]]).tolist():
        copies[tuple(data.texts[document].text.split())].append(document)
    for documents in copies.values():
        if len(documents) > 1:
            known = [_of_tokens(data, document) for document in documents]
            if len({len(labels) for labels in known}) > 1:  # other whitespace, other tokens
                known = [_of_text(labels) for labels in known]
            yield from _between(data, documents, np.stack(known))


def _of_tokens(data: Dataset, document: int) -> Known:
    """Labels `[T, P]`."""
    known = np.full((len(data.tokens[document]), len(data.concepts)), -1, dtype=np.int8)
    for part in np.flatnonzero(data.document == document).tolist():
        known[data.positions[part]] = data.known[part]
    return known


def _of_text(known: Known) -> Known:
    """Labels `[1, P]`: present if at any token, absent if at none."""
    return np.where((known == 1).any(axis=0), 1, np.where((known == 0).all(axis=0), 0, -1)).astype(np.int8)[None]


def _between(data: Dataset, documents: Sequence[int], known: Known) -> Iterator[Contradiction]:
    disagrees = (known == 1).any(axis=0) & (known == 0).any(axis=0)
    for p in np.flatnonzero(disagrees.any(axis=0)):
        token = int(np.argmax(disagrees[:, p]))
        present, absent = (documents[int(np.argmax(known[:, token, p] == side))] for side in (1, 0))
        yield Contradiction(data.concepts[p].id, data.texts[present].where, data.texts[absent].where)
