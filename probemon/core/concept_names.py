"""Names: finds probes by names, ids, numbers and patterns.

names = Names("my-pack", concepts, path)          # path(probe): names from the root
names.find_all(["whale", "ship*", re.compile("n0[12].*")])
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from probemon.errors import ConfigError, PackCorrupt, UnknownConcept
from probemon.util.harmless_text import clip
from probemon.util.near_names import NearNames

MOST_NAMED = 100  # metric series by concept name
_MOST = 5  # candidates shown
_MOST_CHARS = 120  # of a shown definition
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
Wanted = str | int | re.Pattern[str] | Sequence[str | int | re.Pattern[str]]


class Names:
    """Names of a pack's concepts: ids are unique, names may repeat.

    `also`: further names of each probe.
    """

    def __init__(
        self,
        pack: str,
        concepts: Sequence[Mapping[str, Any]],
        path: Callable[[int], list[str]],
        also: Sequence[tuple[str, ...]] | None = None,
    ) -> None:
        self._pack, self._concepts, self._path = pack, concepts, path
        self._also, self._near = also, NearNames(concepts, path)

    # Built on first use: large packs read concept lines on demand.
    @cached_property
    def _ids(self) -> dict[str, int]:
        ids = {concept["id"]: i for i, concept in enumerate(self._concepts)}
        if len(ids) < len(self._concepts):
            raise PackCorrupt(f"an id of {self._pack} occurs twice: fetch the pack again")
        return ids

    @cached_property
    def _texts(self) -> list[tuple[str, ...]]:
        also = self._also or itertools.repeat(())
        return [
            (concept["id"], concept["name"], *extra_names)
            for concept, extra_names in zip(self._concepts, also, strict=False)
        ]

    @cached_property
    def _by_name(self) -> dict[str, list[int]]:
        by_name: dict[str, list[int]] = {}
        for i, texts in enumerate(self._texts):
            for name in set(texts):
                by_name.setdefault(name, []).append(i)
        return by_name

    def find(self, concept: object) -> int:
        """Return the probe of an id, an unambiguous name or a number.

        Raises `UnknownConcept`, with the nearest or ambiguous concepts.
        """
        if isinstance(concept, bool) or not isinstance(concept, (str, int, np.integer)):
            raise UnknownConcept(f"a concept is named by its id, its name or its number, not {concept!r}")
        if not isinstance(concept, str):
            if not 0 <= concept < len(self._concepts):
                raise UnknownConcept(f"probe {concept} is not in {self._pack}: it has 0..{len(self._concepts) - 1}")
            return int(concept)
        if concept in self._ids:
            return self._ids[concept]
        probes = self._by_name.get(concept, [])
        if len(probes) == 1:
            return probes[0]
        if len(several := self._with_suffix(concept)) > 1:
            raise UnknownConcept(self._choice(concept, several))
        if not probes:
            raise UnknownConcept(f"{self._pack} has no concept {concept!r}{self._near.suggestion(concept)}")
        choices = "; ".join(f"{self._concepts[i]['id']} ({' > '.join(self._path(i))})" for i in probes)
        raise UnknownConcept(f"{len(probes)} concepts are named {concept!r}: give one of the ids: {choices}")

    def _with_suffix(self, wanted: str) -> list[int]:
        """Probes named `wanted` plus a suffix in brackets."""
        begin = f"{wanted.casefold()} ("
        return [
            probe
            for probe, texts in enumerate(self._texts)
            if any(text.casefold().startswith(begin) and text.endswith(")") for text in texts)
        ]

    def _choice(self, wanted: str, probes: Sequence[int]) -> str:
        n = _NUMBERS[len(probes)] if len(probes) < len(_NUMBERS) else f"{len(probes):,}"
        shown = ", ".join(f"{self._concepts[probe]['name']!r} ({self._meaning(probe)})" for probe in probes[:_MOST])
        rest = "" if len(probes) <= _MOST else f" and {len(probes) - _MOST:,} more"
        return f"{wanted!r} is {n} concepts of {self._pack}: {shown}{rest}: give one of them"

    def _meaning(self, probe: int) -> str:
        definition = self._concepts[probe].get("definition")
        return clip(definition, _MOST_CHARS) if isinstance(definition, str) else " > ".join(self._path(probe))

    def find_all(self, concept: object) -> list[int]:
        """Return the probes of a name, id, number, pattern, or list of these, each once.

        A pattern is compiled or a text with `*`; it must match a whole name or id. Raises `UnknownConcept`.
        """
        if isinstance(concept, (list, tuple, set, frozenset)):
            if not concept:
                raise ConfigError("an empty list names no concept: give at least one")
            return list(dict.fromkeys(probe for one in concept for probe in self.find_all(one)))
        if isinstance(concept, str) and "*" in concept and concept not in self._ids and concept not in self._by_name:
            pattern = re.compile(".*".join(map(re.escape, concept.split("*"))))
        elif isinstance(concept, re.Pattern):
            pattern = concept
        else:
            return [self.find(concept)]
        matches = [i for i, texts in enumerate(self._texts) if any(map(pattern.fullmatch, texts))]
        if not matches:
            shown = concept if isinstance(concept, str) else pattern.pattern
            near = self._near.suggestion(shown.replace("*", "")) if isinstance(concept, str) else ""
            raise UnknownConcept(
                f"no concept of {self._pack} matches {shown!r}, which is held against whole names and whole ids{near}"
            )
        return matches
