"""Where a HatCat pack keeps its probes: every generation of its folders.

    source = Source(Folder("lens_packs/mine"), notes)
    source.model, source.hidden_dim                    # of pack_info.json, lens_pack.json or pack.json, where they say it
    source.place(graph, notes)                         # {node: Stored}: the file of every probe, and its name in a bank

Layered: `layer{L}/Name.pt` or `Name_classifier.pt`, L the level. Banked: `banks/layer{L}/Parent.bank.pt`, a state dict for each child, and `individual/layer{L}/`.
Flat: `probes/activation/`, `activation_lenses/` or what the pack's JSON names, and the folder itself; a flat file says no level.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probemon.errors import ImportRefused
from probemon.importers.hatcat_tree import MAX_LEVEL, Graph, Node, key_of, node_of
from probemon.importers.report import Notes
from probemon.importers.weights import MAX_BYTES, Folder, load_bank

_LAYER = re.compile(r"layer(\d{1,4})")
_INFO = ("pack_info.json", "lens_pack.json", "pack.json")
_FLAT = ("probes/activation", "activation_lenses")
_SUFFIX = "_classifier"


@dataclass(frozen=True)
class Stored:
    """A probe's file, and its name in it where that is a bank."""

    path: Path
    key: str | None = None


class Source:
    """A folder of probes, looked through but not read. Raises `ImportRefused` for JSON of another kind and for a path that leaves the folder."""

    def __init__(self, folder: Folder, notes: Notes, max_bytes: int = MAX_BYTES) -> None:
        self.folder, self._max_bytes = folder, max_bytes
        self.info = self._read_info()
        model = self._of_model("model_name") or self._of_model("model_id") or self.info.get("model")
        self.model = model if isinstance(model, str) else None
        size = self.info.get("hidden_dim", self._of_model("hidden_dim"))
        self.hidden_dim = size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None
        self._layered: list[tuple[Node, Path]] = []
        self._flat: list[tuple[str, Path]] = []
        self._banks: list[tuple[Node | None, int, Path]] = []  # parent, level where nobody says another, file
        for parts in ((), ("individual",)):
            for level, name in self._levels(*parts):
                self._layered += [((_name(path), level), path) for path in self._probes(notes, *parts, name)]
        self._find_banks()
        for place in dict.fromkeys((*self._stated_places(), *_FLAT)):
            self._flat += [(_name(path), path) for path in self._probes(notes, place)]
        self._flat += [(_name(path), path) for path in self.folder.files(suffix=".pt")]

    def _read_info(self) -> dict[str, Any]:
        """What the pack says of itself: its JSON files together, the newest first."""
        whole: dict[str, Any] = {}
        for name in _INFO:
            found = self.folder.json(name)
            if found is not None and not isinstance(found, dict):
                raise ImportRefused(f"{self.folder.path / name} is no object: fetch it again")
            whole = {**(found or {}), **whole}
        return whole

    def _of_model(self, key: str) -> Any:
        about = self.info.get("model_info")
        return about.get(key) if isinstance(about, dict) else None

    def _stated_places(self) -> Iterator[str]:
        for key, names in (("lens_paths", ("activation_lenses", "activation")), ("probe_paths", ("activation_probes",))):
            places = self.info.get(key)
            if not isinstance(places, dict):
                continue
            for name in names:
                if places.get(name) is None:
                    continue
                if not isinstance(places[name], str):
                    raise ImportRefused(f"{self.folder.path}: {key}.{name} is {places[name]!r:.80}, expected the name of a folder")
                self.folder.inside(places[name])
                yield places[name].strip("/")

    def _levels(self, *parts: str) -> list[tuple[int, str]]:
        """Its folders of one level, ascending."""
        base = self.folder.inside(*parts) if parts else self.folder.path
        names = [entry.name for entry in base.iterdir() if entry.is_dir()] if base.is_dir() else []
        return sorted((int(found[1]), name) for name in names if (found := _LAYER.fullmatch(name)) and int(found[1]) <= MAX_LEVEL)

    def _probes(self, notes: Notes, *parts: str) -> list[Path]:
        """Files of one folder: `Name.pt` before `Name_classifier.pt`. What else lies there is told."""
        found = self.folder.files(*parts, suffix="")
        for path in found:
            if path.suffix not in (".pt", ".json") and path.is_file():
                notes.add("unread", path.relative_to(self.folder.path).as_posix())
        return sorted((path for path in found if path.suffix == ".pt"), key=lambda path: (path.stem.endswith(_SUFFIX), path.name))

    def _find_banks(self) -> None:
        index = self.folder.json("bank_index.json")
        if index is not None and not isinstance(index, dict):
            raise ImportRefused(f"{self.folder.path / 'bank_index.json'} is no object: fetch it again")
        known = set()
        for key, entry in sorted((index or {}).items()):
            parent = node_of(key)
            place = entry.get("bank_path") if isinstance(entry, dict) else None
            if parent is None or not isinstance(place, str):
                raise ImportRefused(f"{self.folder.path / 'bank_index.json'}: {key!r:.80}: expected \"Parent:level\" with its bank_path")
            path = self.folder.inside(place)
            self._banks.append((parent, parent[1] + 1, path))
            known.add(path.resolve())
        for level, name in self._levels("banks"):
            for path in self.folder.files("banks", name, suffix=".bank.pt"):
                if path.resolve() not in known:  # of no index: its name is the parent's
                    self._banks.append(((path.name.removesuffix(".bank.pt"), level - 1), level, path))

    def place(self, graph: Graph, notes: Notes) -> dict[Node, Stored]:
        """The file of every probe. What is there twice is counted, and the first is taken: a file of its own, then a bank, then a flat file."""
        stored: dict[Node, Stored] = {}

        def put(node: Node, found: Stored) -> None:
            if node in stored:
                notes.add("twice", f"{key_of(node)} in {stored[node].path.relative_to(self.folder.path)} and {found.path.relative_to(self.folder.path)}")
            else:
                stored[node] = found

        for node, path in self._layered:
            put(node, Stored(path))
        levels, children = graph.levels_of(), graph.children()
        for parent, level, path in self._banks:
            below = {} if parent is None else {name: at for name, at in reversed(children.get(parent, []))}
            for name in load_bank(path, self._max_bytes):
                # A bank's folder is a level below its parent, whatever the child's own is: the hierarchy knows better.
                put((name, below.get(name, level)), Stored(path, name))
        taken = {name for name, _ in stored}
        for name, path in self._flat:
            free = [level for level in levels.get(name, []) if (name, level) not in stored]
            if not free and name in taken:
                put((name, next(level for level in (*levels.get(name, []), *range(MAX_LEVEL + 1)) if (name, level) in stored)), Stored(path))
                continue
            if len(levels.get(name, [])) > 1:
                notes.add("ambiguous", f"{path.relative_to(self.folder.path)} for {key_of((name, free[0]))}, of levels {', '.join(map(str, levels[name]))}")
            put((name, free[0] if free else 0), Stored(path))
            taken.add(name)
        if not stored:
            raise ImportRefused(f"{self.folder.path} holds no probes: expected layer0/Name.pt and so on, banks/, probes/activation/ or activation_lenses/ in it")
        return stored


def _name(path: Path) -> str:
    """The concept of a file."""
    return path.stem.removesuffix(_SUFFIX) or path.stem
