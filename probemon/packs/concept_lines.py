"""The lines of concepts.jsonl, parsed and checked on access; line i is probe i.

    concepts = ConceptLines(data, directory / "concepts.jsonl")
    concepts.fit(tree)                 # lines must agree with the hierarchy
    concepts[3]["name"]                # PackCorrupt names a wrong line

A line takes 10 microseconds: only small packs are parsed on opening.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, overload

from probemon.core.hierarchy import ConceptTree
from probemon.errors import PackCorrupt
from probemon.packs.manifest import CONTROL, MAX_CONCEPTS_BYTES, PROBES, read_bounded
from probemon.util.strict_json import loads

MOST_AT_ONCE = 10_000  # lines parsed on opening
# About sixty bytes of memory each. Packs have about four a concept.
MAX_BRACKETS = 4_000_000
_KINDS = {"id": str, "name": str, "level": int, "parents": list}

Concept = dict[str, Any]


def read_concepts(path: Path) -> list[Concept]:
    """Return the concepts of a file. Raises `PackCorrupt` naming the line."""
    return list(ConceptLines(read_bounded(path, MAX_CONCEPTS_BYTES), path))


class ConceptLines(Sequence[Concept]):
    """The concepts in `data`. Raises `PackCorrupt`, also on access."""

    def __init__(self, data: bytes, path: Path) -> None:
        self._path = path
        try:
            text = data.decode()
        except UnicodeDecodeError as error:
            raise PackCorrupt(f"{path} is not UTF-8 ({error}): fetch the pack again") from None
        brackets = data.count(b"[") + data.count(b"{")
        if brackets > MAX_BRACKETS:
            raise PackCorrupt(
                f"{path} has {brackets:,} brackets, at most {MAX_BRACKETS:,} lists and objects are read: fetch the pack"
                " again"
            )
        # Not splitlines(): definitions may hold other Unicode line breaks.
        self._lines: list[str | Concept] = [*text.removesuffix("\n").split("\n")] if text else []
        self._links: tuple[list[int], list[int], list[int]] | None = None
        self._fits: set[int] = set()
        if len(self) <= MOST_AT_ONCE:
            for i in range(len(self)):
                self._line(i)

    def fit(self, tree: ConceptTree) -> None:
        """Require that lines agree with a hierarchy."""
        self._links = tree.level.tolist(), tree.parent_ptr.tolist(), tree.parent_idx.tolist()
        if len(self) <= MOST_AT_ONCE:
            self.check()

    def check(self) -> None:
        """Read every line. Raises `PackCorrupt`, also for a repeated id."""
        ids = [concept["id"] for concept in self]
        if len(set(ids)) != len(ids):
            duplicate = Counter(ids).most_common(1)[0][0]
            raise PackCorrupt(f"{self._path}: id {duplicate!r:.80} appears twice")

    def __len__(self) -> int:
        return len(self._lines)

    @overload
    def __getitem__(self, i: int) -> Concept: ...
    @overload
    def __getitem__(self, i: slice) -> list[Concept]: ...
    def __getitem__(self, i: int | slice) -> Concept | list[Concept]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        concept = self._line(i)
        if self._links is not None:
            i = i % len(self)
            if i not in self._fits:
                self._check_numbering(i, concept)
                self._fits.add(i)
        return concept

    def __iter__(self) -> Iterator[Concept]:
        return map(self.__getitem__, range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # like a list's

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} concepts of {str(self._path)!r})"

    def _line(self, i: int) -> Concept:
        line = self._lines[i]
        if isinstance(line, str):
            line = self._lines[i] = self._parsed(line, i % len(self) + 1)
        return line

    def _parsed(self, line: str, number: int) -> Concept:
        where = f"{self._path} line {number}"
        try:
            concept = loads(line)
        except (RecursionError, ValueError) as error:
            raise PackCorrupt(f"{where} is not valid JSON ({error}): fetch the pack again") from None
        if not isinstance(concept, dict) or not _KINDS.keys() <= concept.keys():
            raise PackCorrupt(f"{where} lacks id, name, level or parents: fetch the pack again")
        wrong = [key for key, kind in _KINDS.items() if type(concept[key]) is not kind]
        if wrong or not all(isinstance(parent, str) for parent in concept["parents"]):
            raise PackCorrupt(f"{where}: {(wrong or ['parents'])[0]} is not of the right kind: fetch the pack again")
        for key in ("id", "name"):
            if CONTROL.search(concept[key]):
                raise PackCorrupt(
                    f"{where}: {key} is {ascii(concept[key])[:100]}, and a terminal would act on its control"
                    " characters: name it otherwise"
                )
        return concept

    def _check_numbering(self, i: int, concept: Concept) -> None:
        """Raise if parents or level differ from the hierarchy's."""
        assert self._links is not None
        levels, ptr, above = self._links
        parents = [self._line(parent)["id"] for parent in above[ptr[i] : ptr[i + 1]]]
        if concept["level"] != levels[i] or sorted(concept["parents"]) != sorted(parents):
            raise PackCorrupt(
                f"{self._path} line {i + 1} ({concept['id']!r:.80}): level {str(concept['level'])[:20]} and parents"
                f" {concept['parents']!r:.200} differ from {PROBES} ({levels[i]}, {parents!r:.200}): fetch the pack"
                " again"
            )
