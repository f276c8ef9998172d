"""Finds the probes in a HatCat pack's folder.

- layered: `layer{L}/Name.pt` or `Name_classifier.pt`, L the level
- banked: `banks/layer{L}/Parent.bank.pt`, a state dict per child, and `individual/layer{L}/`
- flat: `probes/activation/`, `activation_lenses/`, folders of the pack's JSON, and the folder itself; without level

Weights elsewhere are noted, not read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probemon.errors import ImportRefused
from probemon.lab.importers.hatcat_tree import MAX_LEVEL, Graph, Node, key_of, levels_by_name, node_of
from probemon.lab.importers.kinds import instead
from probemon.lab.importers.report import Notes
from probemon.lab.importers.weights import MAX_BYTES, Folder, load_bank

_LAYER = re.compile(r"layer(\d{1,4})")
_INFO = ("pack_info.json", "lens_pack.json", "pack.json")
_FLAT = ("probes/activation", "activation_lenses")
_SUFFIX = "_classifier"
_MAX_LOOKED = 1_000_000


@dataclass(frozen=True)
class Stored:
    """A probe's file, and its name if that is a bank."""

    path: Path
    key: str | None = None


@dataclass(frozen=True)
class _Bank:
    """A file of one parent's children, by default at `level`. `listed`: in an index, or None."""

    parent: Node
    level: int
    path: Path
    listed: tuple[str, ...] | None


class ProbeFolder:
    """Lists the probes of a folder, without reading weights.

    Raises `ImportRefused` for JSON of another kind and for paths outside the folder.
    """

    def __init__(self, folder: Folder, notes: Notes, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        self.info = self._read_info()
        model = self._of_model("model_name") or self._of_model("model_id") or self.info.get("model")
        self.model = model if isinstance(model, str) else None
        self.hidden_dim, self.n_layers = self._count("hidden_dim", notes), self._count("num_layers", notes)
        self._seen: set[Path] = set()
        self._layered: list[tuple[Node, Path]] = []
        self._flat: list[tuple[str, Path]] = []
        self._banks: list[_Bank] = []
        for parts in ((), ("individual",)):
            for level, name in self._levels(*parts):
                self._layered += [((_name(path), level), path) for path in self._probes(notes, *parts, name)]
        self._find_banks()
        for place in dict.fromkeys((*self._stated_places(), *_FLAT)):
            self._flat += [(_name(path), path) for path in self._probes(notes, place)]
        root_files = self.folder.files(suffix=".pt")
        self._flat += [(_name(path), path) for path in root_files]
        self._seen |= {*root_files, *(bank.path for bank in self._banks)}
        self._note_elsewhere(notes)

    def _read_info(self) -> dict[str, Any]:
        """Merge the JSON files; the newest wins."""
        merged: dict[str, Any] = {}
        for name in _INFO:
            content = self.folder.json(name)
            if content is not None and not isinstance(content, dict):
                raise ImportRefused(f"{self.folder.path / name} is not an object: fetch it again")
            merged = {**(content or {}), **merged}
        return merged

    def _of_model(self, key: str) -> Any:
        model_info = self.info.get("model_info")
        return model_info.get(key) if isinstance(model_info, dict) else None

    def _count(self, key: str, notes: Notes) -> int | None:
        """Return a count; an impossible one is noted."""
        count = self.info.get(key, self._of_model(key))
        if count is None or (isinstance(count, int) and not isinstance(count, bool) and 0 < count < 1 << 31):
            return count
        notes.add("unusable", f"{key} {count!r:.60}")
        return None

    def _stated_places(self) -> Iterator[str]:
        for key, names in (
            ("lens_paths", ("activation_lenses", "activation")),
            ("probe_paths", ("activation_probes",)),
        ):
            places = self.info.get(key)
            if not isinstance(places, dict):
                continue
            for name in names:
                if places.get(name) is None:
                    continue
                if not isinstance(places[name], str):
                    raise ImportRefused(
                        f"{self.folder.path}: {key}.{name} is {places[name]!r:.80}, expected the name of a folder"
                    )
                self.folder.inside(places[name])
                yield places[name].strip("/")

    def _levels(self, *parts: str) -> list[tuple[int, str]]:
        base = self.folder.inside(*parts) if parts else self.folder.path
        names = [entry.name for entry in base.iterdir() if entry.is_dir()] if base.is_dir() else []
        return sorted(
            (int(match[1]), name) for name in names if (match := _LAYER.fullmatch(name)) and int(match[1]) <= MAX_LEVEL
        )

    def _probes(self, notes: Notes, *parts: str) -> list[Path]:
        """List probes, `Name.pt` before `Name_classifier.pt`; other files are noted."""
        entries = self.folder.files(*parts, suffix="")
        self._seen |= set(entries)
        for path in entries:
            if path.suffix not in (".pt", ".json") and path.is_file():
                notes.add("unread", path.relative_to(self.folder.path).as_posix())
        return sorted(
            (path for path in entries if path.suffix == ".pt"),
            key=lambda path: (path.stem.endswith(_SUFFIX), path.name),
        )

    def _find_banks(self) -> None:
        index = self.folder.json("bank_index.json")
        if index is not None and not isinstance(index, dict):
            raise ImportRefused(f"{self.folder.path / 'bank_index.json'} is not an object: fetch it again")
        indexed = set()
        for key, entry in sorted((index or {}).items()):
            parent = node_of(key)
            place = entry.get("bank_path") if isinstance(entry, dict) else None
            if parent is None or not isinstance(place, str):
                raise ImportRefused(
                    f'{self.folder.path / "bank_index.json"}: {key!r:.80}: expected "Parent:level" with its bank_path'
                )
            path = self.folder.inside(place)
            names = entry.get("concepts")
            if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
                raise ImportRefused(
                    f"{self.folder.path / 'bank_index.json'}: {key!r:.80}: its concepts are {names!r:.80}, expected a"
                    " list of names"
                )
            self._banks.append(_Bank(parent, parent[1] + 1, path, None if names is None else tuple(names)))
            indexed.add(path.resolve())
        for level, name in self._levels("banks"):
            for path in self.folder.files("banks", name, suffix=".bank.pt"):
                if path.resolve() not in indexed:  # without an index, its name is the parent's
                    parent = (path.name.removesuffix(".bank.pt"), level - 1)
                    self._banks.append(_Bank(parent, level, path, None if index is None else ()))

    def _note_elsewhere(self, notes: Notes) -> None:
        """Note weights elsewhere, without following links and hidden folders."""
        real: set[str] | None = None
        n_looked = 0
        for folder, below, files in os.walk(
            self.folder.path,
            onerror=lambda error: notes.add("elsewhere", f"perhaps in a folder that cannot be read: {error}"),
        ):
            below[:] = sorted(name for name in below if not name.startswith("."))
            for name in sorted(files):
                n_looked += 1
                path = Path(folder, name)
                if path.suffix.lower() != ".pt" or name.startswith(".") or path in self._seen:
                    continue
                real = {os.path.realpath(seen) for seen in self._seen} if real is None else real
                if os.path.realpath(path) not in real:  # else a link leads to it
                    notes.add("elsewhere", path.relative_to(self.folder.path).as_posix())
            if n_looked > _MAX_LOOKED:
                notes.add("elsewhere", f"perhaps more, past the first {_MAX_LOOKED:,} files")
                return

    def place(self, graph: Graph, notes: Notes) -> dict[Node, Stored]:
        """Return the file of every probe; a graph without edges gets those of banks.

        If a probe is stored twice, a single file is taken, then a bank, then a flat file.
        """
        stored: dict[Node, Stored] = {}

        def put(node: Node, place: Stored) -> None:
            if node in stored:
                notes.add(
                    "twice",
                    f"{key_of(node)} in {stored[node].path.relative_to(self.folder.path)} and"
                    f" {place.path.relative_to(self.folder.path)}",
                )
            else:
                stored[node] = place

        for node, path in self._layered:
            put(node, Stored(path))
        levels, children = graph.levels_of(), graph.children()
        has_edges = any(graph.parents.values())
        for bank in self._banks:
            below = levels_by_name(children.get(bank.parent, []))
            bank_probes = load_bank(bank.path, self._max_bytes)
            where = f"of {bank.path.relative_to(self.folder.path).as_posix()}"
            listed_names = dict.fromkeys(bank.listed or ())
            for name in sorted(listed_names.keys() - bank_probes.keys()):
                notes.add("bank_lacks", f"{name} {where}")
            for name in bank_probes:
                if bank.listed is not None and name not in listed_names:
                    notes.add("bank_unlisted", f"{name} {where}")
                # A bank's folder is a level below its parent; the hierarchy knows better.
                if has_edges:
                    candidates = below.get(name, [])
                else:
                    candidates = [level for level in levels.get(name, []) if level > bank.parent[1]][:1]
                node = (name, _free_level(name, candidates, stored, notes, where, bank.level))
                put(node, Stored(bank.path, name))
                if not has_edges and bank.parent[1] >= 0:
                    graph.link(bank.parent, node)
                    notes.add("bank_edges", f"{key_of(bank.parent)} > {key_of(node)}")
                if has_edges and name not in below:
                    notes.add("bank_elsewhere", f"{name} {where}")
        stored_names = {name for name, _ in stored}
        for name, path in self._flat:
            free = [level for level in levels.get(name, []) if (name, level) not in stored]
            if not free and name in stored_names:
                known_first = (*levels.get(name, []), *range(MAX_LEVEL + 1))
                put((name, next(level for level in known_first if (name, level) in stored)), Stored(path))
                continue
            if len(levels.get(name, [])) > 1:
                notes.add(
                    "ambiguous",
                    f"{path.relative_to(self.folder.path)} for {key_of((name, free[0]))}, of levels"
                    f" {', '.join(map(str, levels[name]))}",
                )
            put((name, free[0] if free else 0), Stored(path))
            stored_names.add(name)
        if not stored:
            raise ImportRefused(
                f"{self.folder.path} holds no probes: {instead(self.folder.path)}expected layer0/Name.pt and so on,"
                " banks/, probes/activation/ or activation_lenses/ in it"
            )
        return stored


def _name(path: Path) -> str:
    return path.stem.removesuffix(_SUFFIX) or path.stem


def _free_level(
    name: str, levels: Sequence[int], stored: Container[Node], notes: Notes, where: str, otherwise: int
) -> int:
    """Return the first known level without a probe; note if there are several."""
    free = [level for level in levels if (name, level) not in stored]
    if len(free) > 1:
        notes.add("ambiguous", f"{name} {where} for {key_of((name, free[0]))}, of levels {', '.join(map(str, levels))}")
    return next(iter(free or levels), otherwise)
