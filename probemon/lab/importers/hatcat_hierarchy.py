"""Chooses the hierarchy of a HatCat pack's probes."""

from __future__ import annotations

from pathlib import Path

from probemon.errors import ImportRefused
from probemon.lab.importers.hatcat_files import ProbeFolder, Stored
from probemon.lab.importers.hatcat_tree import Graph, Node, hierarchies, key_of, read_graph
from probemon.lab.importers.report import Notes
from probemon.lab.importers.weights import Folder

_MOST_UNLISTED = 0.2  # of the probes


def choose_hierarchy(
    probe_folder: ProbeFolder, hierarchy: str | Path | None, notes: Notes, *, flat: bool, allow_unlisted: bool
) -> tuple[Graph, dict[Node, Stored], Notes]:
    """Return hierarchy, files of probes, and notes; options as in `import_pack`.

    Raises `ImportRefused` with a remedy if none fits.
    """
    path = probe_folder.folder.path if hierarchy is None else Path(hierarchy)
    if hierarchy is not None and not path.exists():
        raise ImportRefused(f"{path} is not there: give hierarchy.json, or the folder that holds it or the layer files")
    if path.is_file() and path.suffix != ".json":
        raise ImportRefused(
            f"{path} is not a .json file: give hierarchy.json, or the folder that holds it or the layer files"
        )
    folder = probe_folder.folder if hierarchy is None else Folder(path.parent if path.is_file() else path)
    files = [path.name] if path.is_file() else hierarchies(folder)
    candidates: list[tuple[str, Graph, dict[Node, Stored], Notes, list[Node]]] = []
    for file in files or ["hierarchy.json"]:
        file_notes = notes.copy()
        graph = read_graph(folder, file_notes, file)
        if hierarchy is not None and not graph.parents:
            raise ImportRefused(
                f"{path} holds no concepts: give the folder of hierarchy.json, or of layer0.json and so on"
            )
        is_stated = bool(graph.parents)
        stored = probe_folder.place(graph, file_notes)
        unlisted = [node for node in stored if node not in graph.parents] if is_stated else []
        candidates.append((file, graph, stored, file_notes, unlisted))
        if len(unlisted) <= _MOST_UNLISTED * len(stored):
            break
    file, graph, stored, file_notes, unlisted = min(candidates, key=lambda one: len(one[4]) / len(one[2]))
    for other, _, other_stored, _, other_unlisted in candidates:
        if other != file:
            file_notes.add(
                "unfit",
                f"{other} names {len(other_stored) - len(other_unlisted):,} of {len(other_stored):,} probes, {file}"
                f" {len(stored) - len(unlisted):,}",
                listed=True,
            )
    if flat:
        graph.flatten(file_notes)
        return graph, stored, file_notes
    has_levels = len({level for _, level in stored}) > 1
    if has_levels and not any(graph.parents.values()):
        why = (
            f"its {len(stored):,} probes are on several levels, and"
            f" {'nothing says' if not files else f'{file} does not say'} what is above what, so that only the lowest"
            " level would ever be scored"
        )
    elif len(unlisted) > _MOST_UNLISTED * len(stored):
        names = ", ".join(key_of(node) for node in sorted(unlisted, key=lambda node: (node[1], node[0]))[:3])
        why = (
            f"{folder.path / file} does not name {len(unlisted):,} of the {len(stored):,} probes ({names}, ...): it is"
            " the hierarchy of other probes"
        )
    else:
        return graph, stored, file_notes
    if allow_unlisted:
        return graph, stored, file_notes
    sibling = probe_folder.folder.path.absolute().parent / "hierarchy.json"
    concept_pack = probe_folder.info.get("concept_pack")
    pack = probe_folder.info.get("source_pack") or (
        concept_pack.get("pack_id") if isinstance(concept_pack, dict) else None
    )
    place = f"HatCat keeps it in the concept pack{f' {pack!r:.80}' if isinstance(pack, str) else ''}"
    if sibling.is_file() and hierarchy is None:
        place += f"; {sibling} may be it"
    raise ImportRefused(
        f"{probe_folder.folder.path}: {why}. Give the hierarchy that these probes were trained with: --hierarchy FILE"
        f" (hierarchy=); {place}. Or have every probe scored at every token: --flat (flat=True). Or take it as it is:"
        " --allow-unlisted (allow_unlisted=True)"
    )
