"""Reports of imports: counts, and examples of each kind of trouble.

notes.add("width", "Deception:3", listed=True)
print(ImportReport("hatcat", "lens_packs/mine", counts={"probes": 7946}, notes=notes.all()))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

EXAMPLES = 5
_LONG = 120  # characters of an example in a line


@dataclass(frozen=True)
class Note:
    """One kind of trouble, with `EXAMPLES` examples, or all that are `listed`."""

    kind: str
    what: str
    count: int
    examples: tuple[str, ...]

    def __str__(self) -> str:
        shown = ", ".join(
            example if len(example) <= _LONG else f"{example[: _LONG - 3]}..." for example in self.examples[:EXAMPLES]
        )
        return (
            f"{self.count:,} {self.what} ({shown}{', ...' if self.count > min(EXAMPLES, len(self.examples)) else ''})"
        )


class Notes:
    """Collects notes. `what`: the words of each kind, in order."""

    def __init__(self, what: Mapping[str, str]) -> None:
        self._what = dict(what)
        self._counts = dict.fromkeys(what, 0)
        self._examples: dict[str, list[str]] = {kind: [] for kind in what}

    def add(self, kind: str, example: str, *, listed: bool = False) -> None:
        """Count one, and keep the first `EXAMPLES`, or all that are `listed`. Raises `KeyError` for an unknown kind."""
        self._counts[kind] += 1
        if listed or len(self._examples[kind]) < EXAMPLES:
            self._examples[kind].append(example)

    def copy(self) -> Notes:
        """Return an independent copy."""
        other = Notes(self._what)
        other._counts = dict(self._counts)
        other._examples = {kind: list(examples) for kind, examples in self._examples.items()}
        return other

    def all(self) -> tuple[Note, ...]:
        """Return a note for each kind that occurred."""
        return tuple(
            Note(kind, self._what[kind], count, tuple(self._examples[kind]))
            for kind, count in self._counts.items()
            if count
        )


@dataclass(frozen=True)
class ImportReport:
    """The result of an import.

    - `stated`: by the user
    - `counts`: of imported parts
    - `warning`: to read first, with a remedy; or ""
    """

    format: str
    source: str
    stated: Mapping[str, Any] = field(default_factory=dict)
    counts: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[Note, ...] = ()
    warning: str = ""

    def note(self, kind: str) -> Note | None:
        """Return the note of a kind, or None."""
        return next((note for note in self.notes if note.kind == kind), None)

    def as_dict(self) -> dict[str, Any]:
        """Return JSON for a manifest."""
        notes = {
            note.kind: {"what": note.what, "count": note.count, "examples": list(note.examples)} for note in self.notes
        }
        warning = {"warning": self.warning} if self.warning else {}
        return {
            **warning,
            "format": self.format,
            "source": self.source,
            "stated": dict(self.stated),
            "counts": dict(self.counts),
            "notes": notes,
        }

    def __str__(self) -> str:
        return "\n".join([*([_printable(f"warning: {self.warning}")] if self.warning else []), *self.lines()])

    def lines(self) -> list[str]:
        """Return lines of counts, user settings and trouble."""
        counts = ", ".join(
            f"{value:,} {name}" if isinstance(value, int) else f"{name} {value}" for name, value in self.counts.items()
        )
        user_settings = ", ".join(f"{name} {value}" for name, value in self.stated.items())
        lines = [
            f"{self.format} {self.source}: {counts or 'nothing'}",
            *([f"not in its files, said at import: {user_settings}"] if user_settings else []),
        ]
        return [_printable(line) for line in [*lines, *(str(note) for note in self.notes)]]

    def section(self) -> str:
        """Return a section of a pack's card, in Markdown."""
        first, *others = self.lines()
        warning = [f"**{_printable(self.warning)}**", ""] if self.warning else []
        listed = [f"- {line}" for line in others]
        return "\n".join(["", "## Where it is from", "", *warning, f"Imported from {first}.", "", *listed, ""])


def _printable(line: str) -> str:
    """Escape control characters: names are untrusted."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)
