"""Suggests concepts near a name that a pack does not have: first by meaning, then by spelling.

    near = NearNames(concepts, path)                 # path(probe): names from the root down
    near.suggestion("whael")                         # ", did you mean 'whale'?"

Meaning comes from names, `lemmas`, `words` (of what is under a concept) and `definition`.
"""

from __future__ import annotations

import difflib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

_MOST = 3
_ALIKE = 0.8  # one letter in five differs
_TELLING = 4  # letters of a word to search in definitions
_LETTERS = re.compile(r"\w+(?:['-]\w+)*")
_SINGULARS = (("ies", "y"), ("sses", "ss"), ("ches", "ch"), ("shes", "sh"), ("xes", "x"), ("ves", "f"), ("s", ""))


class NearNames:
    """Names and meanings of a pack's concepts."""

    def __init__(self, concepts: Sequence[Mapping[str, Any]], path: Callable[[int], list[str]]) -> None:
        self._concepts, self._path = concepts, path

    def suggestion(self, wanted: str) -> str:
        """Return the end of an error message that suggests concepts."""
        _, _, bare = wanted.rpartition(":")  # a group's names are "pack:name"
        names = {name for concept in self._concepts for name in (concept["id"], concept["name"])}
        if same := [self._concepts[probe]["name"] for form in _forms(bare) for probe in self._by_name.get(form, ())]:
            return f", did you mean {same[0]!r}?"
        spelt = [name for text in (wanted, bare) for name in _alike(text, names)][:1]
        if probes := self.by_meaning(bare)[:_MOST]:
            nearest = f": the nearest in meaning {'is' if len(probes) == 1 else 'are'} "
            in_spelling = "".join(f", and in spelling {name!r}" for name in spelt)
            return nearest + "; ".join(map(self._placed, probes)) + in_spelling
        if spelt:
            return f", did you mean {spelt[0]!r}?"
        if words := _alike(_folded(bare), self._by_word):
            return f", did you mean {words[0]!r}, which is something under {self._placed(self._by_word[words[0]][0])}?"
        return ": no concept has a similar name; probemon concepts lists all of them"

    def by_meaning(self, wanted: str) -> list[int]:
        """Return the probes near a name in meaning, the nearest first.

        Searches names, synonyms, words, parts of names; then the same for the last word; then definitions.
        """
        for text in dict.fromkeys([_folded(wanted), *_folded(wanted).split()[-1:]]):
            forms = _forms(text)
            for index in (self._by_name, self._by_synonym, self._by_word, self._by_part):
                if probes := list(dict.fromkeys(probe for form in forms for probe in index.get(form, ()))):
                    return probes
        forms = _forms(wanted)
        phrases = [f" {form} " for form in forms if len(form) >= _TELLING]
        matches = [
            (len(definition), probe)
            for probe, definition in self._definitions
            if any(phrase in definition for phrase in phrases)
        ]
        return [probe for _, probe in sorted(matches)]

    def _placed(self, probe: int) -> str:
        return f"{self._concepts[probe]['name']!r} ({' > '.join(self._path(probe))})"

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        return _index([_folded(concept["name"].rpartition(":")[2])] for concept in self._concepts)

    @cached_property
    def _by_synonym(self) -> dict[str, list[int]]:
        return _index([_folded(text) for text in texts_of(concept.get("lemmas"))] for concept in self._concepts)

    @cached_property
    def _by_word(self) -> dict[str, list[int]]:
        return _index([_folded(text) for text in texts_of(concept.get("words"))] for concept in self._concepts)

    @cached_property
    def _by_part(self) -> dict[str, list[int]]:
        return _index(_folded(concept["name"]).split() for concept in self._concepts)

    @cached_property
    def _definitions(self) -> list[tuple[int, str]]:
        """Probe and definition, its words between spaces."""
        return [
            (probe, f" {_folded(definition)} ")
            for probe, concept in enumerate(self._concepts)
            if isinstance(definition := concept.get("definition"), str)
        ]


def _alike(text: str, names: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(text, names, n=1, cutoff=_ALIKE)


def _index(texts: Iterable[Iterable[str]]) -> dict[str, list[int]]:
    index = defaultdict[str, list[int]](list)
    for number, several in enumerate(texts):
        for text in dict.fromkeys(several):
            index[text].append(number)
    return dict(index)


def texts_of(value: Any) -> list[str]:
    """Return the texts of a list, which may be malformed."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _folded(text: str) -> str:
    """Normalise a text: "War-Crime (act)" is "war crime"."""
    return " ".join(_LETTERS.findall(re.sub(r"\(.*?\)", " ", text.casefold()).replace("_", " ").replace("-", " ")))


def _forms(text: str) -> tuple[str, ...]:
    folded = _folded(text)
    singulars = [folded.removesuffix(end) + last for end, last in _SINGULARS if folded.endswith(end)]
    return tuple(dict.fromkeys([folded, *(singular for singular in singulars if len(singular) > 2)]))
