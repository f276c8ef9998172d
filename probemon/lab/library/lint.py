"""Checks texts of a concept before they train: pairs, marks, lengths, and what gives a side away.

    findings = lint(rows, "threat")        # rows as in the library's files
    [finding for finding in findings if not finding.holds]
    problems(library)                      # of a whole library: what must not be

A pair should differ in the concept alone. What tells its sides apart without it (words, characters, punctuation,
length) is what a probe would learn instead.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from probemon.errors import TrainingError
from probemon.lab.library.library import TESTS, TEXTS, Library
from probemon.lab.training.groups import group_texts, split_groups
from probemon.lab.training.logistic import Targets, fit_logistic, logits
from probemon.lab.training.metrics import auroc_of
from probemon.lab.training.words import Vocabulary, words_in

_FOLDS, _PENALTY = 5, 0.01
_LEAST = 6  # texts with a word that gives a side away
_SHORT = 20  # characters, of which two texts may have the same
_SPREAD = 0.25  # of the words of the longer side
_REAL = re.compile(r"(?:https?://|www\.|(?<=[\w.])@)((?:[A-Za-z0-9-]+\.)+[A-Za-z]{2,})")  # a domain
_CARD = re.compile(r"(?<![\d-])[3-6](?:[ -]?\d){12,18}(?![\d-])")
_FIELDS = ("id", "group", "present", "absent", "unsure", "genre", "lang", "author", "author_kind")
_ID = re.compile(r"[a-z0-9_]+-[a-z0-9]+-[0-9]{3}[pn]")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Finding:
    """What a check found, and the bar that it is held to."""

    check: str
    found: str
    bar: str
    holds: bool


def lint(rows: Sequence[Row], concept: str, *, by_words: bool = False) -> list[Finding]:
    """Check rows of a concept; of one that words may tell, such as a language (`by_words`), only form and labels.

    Raises `TrainingError` for rows without the fields of the library, or a file without both sides.
    """
    for number, row in enumerate(rows, 1):
        if lacks := [key for key in _FIELDS if key not in row] or ([] if {"text", "messages"} & set(row) else ["text"]):
            raise TrainingError(f"row {number} has no {lacks[0]!r}: give {', '.join(_FIELDS)} and text or messages")
    labelled = [row for row in rows if concept in (*row["present"], *row["absent"])]
    side = np.asarray([concept in row["present"] for row in labelled], dtype=bool)
    if side.all() or not side.any():
        has = "texts with it alone" if len(side) and side.all() else "no text with it"
        raise TrainingError(
            f"of {concept!r} there is {has}: give rows of both sides, and the concept's name (--concept)"
        )
    texts = [said(row) for row in labelled]
    groups = np.unique([row["group"] for row in labelled], return_inverse=True)[1].astype(np.int64)
    pairs = _pairs(groups, side)
    words = [words_in(text, marks=False) for text in texts]
    findings = [_of_marks(labelled, concept), _of_labels(rows)]
    copies = [text for text, n in Counter(" ".join(own) for own in words).items() if n > 1 and len(text) > _SHORT]
    findings.append(Finding("copies", str(len(copies)), "none", not copies))
    if by_words:
        return findings
    for name, bar, units in (
        ("words", 0.7, words),
        ("runs of characters", 0.7, [_runs(text) for text in texts]),
        ("punctuation", 0.65, [re.findall(r"[^\w\s]", text) for text in texts]),
    ):
        area = _leak(units, side, groups)
        findings.append(Finding(f"{name} tell the sides apart", f"AUROC {area:.2f}", f"at most {bar:.2f}", area <= bar))
    length = auroc_of(np.asarray([len(one) for one in words], dtype=np.float64), side)
    findings.append(Finding("length", f"AUROC {length:.2f}", ".40 to .60", 0.4 <= length <= 0.6))
    unequal = [pair for pair in pairs if _unequal(*(len(words[i]) for i in pair))]
    share = len(unequal) / max(1, len(pairs))
    findings.append(Finding("pairs of unequal length", f"{len(unequal)} of {len(pairs)}", "under 15 %", share < 0.15))
    one_sided = _one_sided(words, side)
    findings.append(Finding("words of one side", ", ".join(one_sided) or "none", "none", not one_sided))
    return findings


def problems(library: Library) -> list[str]:
    """Return what is wrong with a library: sentences.

    Marks and labels of every row, tests that are near copies of what trains, domains that may be real, card numbers
    that are valid.
    """
    found, contents, parts = list[str](), list[str](), list[str]()
    for part in (TEXTS, TESTS):
        for id in library.concepts:
            rows = list(library.raw(part, id))
            for finding in (_of_marks(rows, id), _of_labels(rows)):
                if not finding.holds:
                    found.append(f"{part}/{id}: {finding.check}: {finding.found}")
            for row in rows:
                text = said(row)
                unknown = {*row["present"], *row["absent"], *row["unsure"]} - set(library.concepts)
                found += [f"{row['id']}: {name} is not in the library" for name in sorted(unknown)]
                found += [f"{row['id']}: {name} may be real" for name in _REAL.findall(text) if not _invented(name)]
                found += [f"{row['id']}: {number} is a valid card number" for number in _valid_cards(text)]
                contents.append(text)
                parts.append(f"{part} {row['id']}")
    numbers = group_texts(contents, [None] * len(contents))
    trains = {number: name for number, name in zip(numbers.tolist(), parts, strict=True) if name.startswith(TEXTS)}
    for number, name in zip(numbers.tolist(), parts, strict=True):
        if name.startswith(TESTS) and number in trains:
            found.append(f"{name.split()[1]}, which tests, is a near copy of {trains[number].split()[1]}, which trains")
    return found


def _invented(domain: str) -> bool:
    return domain.lower().rsplit(".", 1)[-1] in ("example", "invalid", "test", "localhost")


def _valid_cards(text: str) -> list[str]:
    """Return card numbers whose check digit is right (Luhn)."""
    found = []
    for match in _CARD.findall(text):
        digits = [int(digit) for digit in re.sub(r"\D", "", match)][::-1]
        doubled = [2 * digit - 9 * (digit > 4) for digit in digits[1::2]]
        if (sum(digits[::2]) + sum(doubled)) % 10 == 0:
            found.append(match)
    return found


def said(row: Row) -> str:
    """Return what a row says: its text, or its turns."""
    return str(row["text"]) if "text" in row else "\n".join(turn["content"] for turn in row["messages"])


def _pairs(groups: np.ndarray, side: np.ndarray) -> list[tuple[int, int]]:
    by_group: dict[int, dict[bool, int]] = defaultdict(dict)
    for i, (group, present) in enumerate(zip(groups.tolist(), side.tolist(), strict=True)):
        by_group[group][present] = i
    return [(sides[True], sides[False]) for sides in by_group.values() if len(sides) == 2]


def _of_marks(rows: Sequence[Row], concept: str) -> Finding:
    wrong = []
    for row in rows:
        spans = row.get("spans", {}).get(concept, [])
        if bool(spans) != (concept in row["present"]) or any(span["start"] >= span["end"] for span in spans):
            wrong.append(row["id"])
    return Finding("marks on texts with it, and on no others", _some(wrong), "all", not wrong)


def _of_labels(rows: Sequence[Row]) -> Finding:
    wrong = []
    for row in rows:
        told = [*row["present"], *row["absent"], *row["unsure"]]
        whole = all(row.get(key) for key in ("genre", "lang", "author", "author_kind", "group"))
        if len(set(told)) < len(told) or not whole or not _ID.fullmatch(row["id"]):
            wrong.append(row["id"])
    return Finding("genre, language, author; every label once", _some(wrong), "all", not wrong)


def _some(ids: Sequence[str]) -> str:
    return f"not {', '.join(ids[:3])}" + (f" and {len(ids) - 3} more" if len(ids) > 3 else "") if ids else "all"


def _runs(text: str) -> list[str]:
    padded = f" {' '.join(words_in(text))} "
    return [padded[i : i + n] for n in (3, 4) for i in range(len(padded) - n + 1)]


def _leak(units: Sequence[Sequence[str]], side: np.ndarray, groups: np.ndarray) -> float:
    """Return the AUROC of a regression on TF-IDF, out of fold; pairs share a fold."""
    vocabulary = Vocabulary.of_units(units)
    features = vocabulary.features_of(units)
    labels = side[:, None].astype(np.int8)
    folds = split_groups(groups, labels, {str(k): 1.0 for k in range(_FOLDS)}, seed=0)
    scores = np.zeros(len(side))
    for held in folds.values():
        rows = features.rows(torch.from_numpy(~held))
        targets = Targets(torch.arange(int((~held).sum())), torch.from_numpy(labels[~held]))
        w, b = fit_logistic(rows, targets, torch.tensor([_PENALTY]), tolerance=1e-4, most_steps=60)
        scores[held] = logits(features.rows(torch.from_numpy(held)), w, b)[:, 0].double().numpy()
    return auroc_of(scores, side)


def _unequal(a: int, b: int) -> bool:
    return abs(a - b) > max(3, _SPREAD * max(a, b))


def _one_sided(words: Sequence[Sequence[str]], side: np.ndarray) -> list[str]:
    """Return words in many texts of one side, and in under a third as many of the other."""
    own = [np.flatnonzero(side == present).tolist() for present in (1, 0)]
    counts = [Counter(word for i in of_side for word in set(words[i])) for of_side in own]
    found = []
    for word in sorted(set(counts[0]) | set(counts[1])):
        n = [of[word] for of in counts]
        if max(n) >= _LEAST and 3 * min(n) < max(n):
            found.append(f"{word} {n[0]}/{n[1]}")
    return found
