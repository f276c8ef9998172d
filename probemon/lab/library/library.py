"""The library of concepts: what they are, and texts with and without them.

    library = Library.open()                       # the one of the package, or a folder
    library.concepts["threat"].definition
    rows = library.rows(["threat", "insult"])      # as `read_examples` takes them
    library.tests(["threat"])                      # by second authors, for evaluation alone

A folder holds `library.yaml` (name, version, licence, authors, hashes of its files), `concepts.yaml`, `texts/` and
`tests/` with a `CONCEPT.jsonl` for each concept, `ordinary.jsonl` (which concepts stand in which ordinary texts) and
`reviews/`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from probemon.errors import ConfigError, TrainingError
from probemon.util.files import sha256

LIBRARY, CONCEPTS, ORDINARY = "library.yaml", "concepts.yaml", "ordinary.jsonl"
TEXTS, TESTS = "texts", "tests"
_BY_SOURCE = ("topic", "kind", "language", "code")
Row = dict[str, Any]


@dataclass(frozen=True)
class LibraryConcept:
    """A concept of the library.

    - `id`, `path`: "threat", and its family, "safety/violence"
    - `definition`: the test that two readers apply; `counts_not`: near cases without it
    - `read`: the turns that may show it: "user", "assistant", "tool" or "any"
    - `reading`: "span" if it stands in a sentence or less, "text" if in all of a text
    - `never`: patterns of genres and languages (`genre:story`, `lang:de`) whose texts are without it
    """

    id: str
    path: str
    name: str
    definition: str
    counts_not: str
    read: Sequence[str] = ("any",)
    reading: str = "span"
    never: Sequence[str] = ()

    @property
    def domain(self) -> str:
        return self.path.split("/")[0]

    @property
    def by_source(self) -> bool:
        """Whether its texts are labelled by what they are, so that words may tell it."""
        return self.domain in _BY_SOURCE

    @property
    def full(self) -> str:
        """Its path and id."""
        return f"{self.path}/{self.id}"


_CODE = 2  # letters of a code of a human language; rows of source code name theirs, as "python"


@dataclass(frozen=True)
class Library:
    """A library in a folder. See the module."""

    folder: Path
    about: Mapping[str, Any] = field(repr=False)
    concepts: Mapping[str, LibraryConcept] = field(repr=False)

    @classmethod
    def open(cls, folder: str | os.PathLike[str] | None = None) -> Library:
        """Open a library, by default that of the package. Raises `ConfigError` if it is none, or files were changed."""
        path = _own_folder() if folder is None else Path(folder)
        try:
            about = yaml.safe_load((path / LIBRARY).read_text(encoding="utf-8"))
            lines = yaml.safe_load((path / CONCEPTS).read_text(encoding="utf-8"))
            concepts = {line["id"]: LibraryConcept(**line) for line in lines}
        except (OSError, yaml.YAMLError, TypeError, KeyError) as error:
            raise ConfigError(f"{path} is not a library of concepts ({type(error).__name__}: {error})") from error
        library = cls(path, about, concepts)
        library._check_hashes()
        return library

    def _check_hashes(self) -> None:
        for name, expected in self.about["sha256"].items():
            try:
                found = sha256(self.folder / name)
            except OSError as error:
                raise ConfigError(f"the library {self.folder} has no {name}: fetch it again") from error
            if found != expected:
                raise ConfigError(f"{self.folder / name} is not the file that {LIBRARY} names: fetch it again")

    def chosen(self, patterns: Sequence[str] = ()) -> list[str]:
        """Return the ids of concepts whose id, family or domain one of the patterns names; all of them without one.

        Raises `ConfigError` for a pattern that names none.
        """
        if not patterns:
            return list(self.concepts)
        chosen = set[str]()
        for pattern in patterns:
            found = {id for id, concept in self.concepts.items() if _names(pattern, concept)}
            if not found:
                domains = ", ".join(dict.fromkeys(concept.domain for concept in self.concepts.values()))
                raise ConfigError(
                    f"no concept of the library is called {pattern!r}: give an id, a family such as safety/violence, or"
                    f" one of {domains} (probemon library list)"
                )
            chosen |= found
        return [id for id in self.concepts if id in chosen]

    def rows(self, ids: Sequence[str], languages: Sequence[str] = (), *, pairs: int = 0) -> list[Row]:
        """Return the rows that train these concepts, in these languages or in all, labelled for all of them.

        `pairs`: at most so many of each author and concept; 0 for all
        """
        return self._labelled(TEXTS, ids, languages, pairs)

    def tests(self, ids: Sequence[str], languages: Sequence[str] = ()) -> list[Row]:
        """Return the rows of second authors that only test: they must not train or choose anything."""
        return self._labelled(TESTS, ids, languages, 0)

    def has_texts(self, id: str, languages: Sequence[str]) -> bool:
        """Whether a text with the concept is in one of these languages, or is source code."""
        return any(
            row["present"] and (len(row["lang"]) != _CODE or row["lang"] in languages) for row in self.raw(TEXTS, id)
        )

    def raw(self, part: str, id: str) -> Iterator[Row]:
        """Yield the rows of a concept's file as they are; `part` is `TEXTS`, or `TESTS`, of which there may be none.

        Raises `ConfigError` without texts.
        """
        path = self.folder / part / f"{id}.jsonl"
        if not path.is_file():
            if part == TESTS:
                return
            raise ConfigError(f"the library {self.folder} has no texts of {id!r}: {path} is missing")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                row: Row = json.loads(line)
            except ValueError as error:
                raise TrainingError(f"{path}, line {number} is not JSON ({error})") from error
            yield row

    def _labelled(self, part: str, ids: Sequence[str], languages: Sequence[str], pairs: int) -> list[Row]:
        rows = []
        for id in ids:
            groups: dict[str, dict[str, None]] = {}
            for row in self.raw(part, id):
                if languages and len(row["lang"]) == _CODE and row["lang"] not in languages:  # source code passes
                    continue
                of_author = groups.setdefault(row["author"], {})
                if pairs and len(of_author) >= pairs and row["group"] not in of_author:
                    continue
                of_author[row["group"]] = None
                rows.append(self.labels_of(row, ids))
        return [row for row in rows if row.get("spans") or row["absent"]]

    def labels_of(self, row: Row, ids: Sequence[str]) -> Row:
        """Return a row with its labels of these concepts only.

        What readers found besides the row's own concept is no example of it, as nobody marked where it stands: it is
        unknown. What is in neither `present`, `absent` nor `unsure` is absent where the concept says `never`.
        """
        wanted = set(ids)
        labelled = {key: value for key, value in row.items() if key not in ("present", "absent", "unsure", "spans")}
        spans = {concept: where for concept, where in row.get("spans", {}).items() if concept in wanted}
        told = {*row["present"], *row["unsure"]}
        absent = [id for id in row["absent"] if id in wanted]
        absent += [id for id in self._never(row["genre"], row["lang"]) if id in wanted and id not in told]
        unknown = [id for id in [*row["present"], *row["unsure"]] if id in wanted and id not in spans]
        if spans:
            labelled["spans"] = spans
        labelled["absent"] = [id for id in dict.fromkeys(absent) if id not in spans]
        labelled["unsure"] = [id for id in unknown if id not in labelled["absent"]]
        return labelled

    def _never(self, genre: str, language: str) -> Sequence[str]:
        key = (genre, language)
        if key not in self._nevers:
            self._nevers[key] = [
                id
                for id, concept in self.concepts.items()
                if any(
                    fnmatch(f"genre:{genre}", pattern) or fnmatch(f"lang:{language}", pattern)
                    for pattern in concept.never
                )
            ]
        return self._nevers[key]

    @cached_property
    def _nevers(self) -> dict[tuple[str, str], list[str]]:
        return {}

    @cached_property
    def of_ordinary(self) -> Mapping[tuple[str, int], tuple[Sequence[str], Sequence[str]]]:
        """Return the concepts that stand in ordinary texts that were read, surely and perhaps, by kind and number."""
        path = self.folder / ORDINARY
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        rows = [json.loads(line) for line in lines]
        return {(row["kind"], row["number"]): (row["present"], row["unsure"]) for row in rows}


def _names(pattern: str, concept: LibraryConcept) -> bool:
    return pattern in (concept.id, concept.full) or f"{concept.path}/".startswith(f"{pattern.rstrip('/')}/")


def _own_folder() -> Path:
    """Return the library's folder: in the package, or, if it is installed from its sources, beside it."""
    package = Path(str(files("probemon")))
    inside = package / "probes" / "library"
    return inside if inside.is_dir() else package.parent / "probes" / "library"
