"""HatCat lens and probe packs into a probe pack: thousands of files, streamed one by one.

    pack, report = import_pack("lens_packs/mine", "packs/mine", site="resid_post.15", normalize="layernorm")
    print(report)  # counts, and every kind of trouble with examples

Every generation of that format: flat, layered and banked folders; perceptrons with and without a LayerNorm of their
own, linear probes; fp32 and bf16; with `hierarchy.json` or with layer files alone. Three-way "tripole" heads are listed
and left out: they are no sigmoid of one logit. The files record neither the host's layer nor whether states were
standardised: `site` and `normalize` say it, and are kept. Nothing in a file is executed; what is read of one is bounded
(`importers.weights`). In memory is one file at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probemon.core.probes import parse_site
from probemon.core.settings import CascadeConfig
from probemon.errors import ConfigError, ImportRefused
from probemon.importers.hatcat_files import ProbeFolder, Stored
from probemon.importers.hatcat_probe import NORM_EPS, Inputs, Kind, Unusable, check_finite, embed, evaluate, widest
from probemon.importers.hatcat_tree import Graph, Node, PlacedNode, hierarchies, key_of, read_graph
from probemon.importers.report import ImportReport, Notes
from probemon.importers.weights import MAX_BYTES, Folder, load_bank, load_state_dict
from probemon.packs.files import check_target
from probemon.packs.pack import ProbePack
from probemon.packs.writer import PackWriter

Progress = Callable[[int, int], None]
NORMALIZE = ("none", "layernorm")
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}
_MOST_UNLISTED = 0.2  # of the probes: a hierarchy that does not name more is another one's
_STATES = 2  # random ones, on which what was written is compared with what was read
KINDS = {
    "unreachable": "concepts that no descent from the base level comes to",
    "unfit": "hierarchy files that are not the one of these probes: another was taken",
    "flattened": "edges left out, as asked: every level is a base level, and every probe is scored at every token",
    "tripole": "three-way heads, no sigmoid of one logit: not imported",
    "unknown": "files whose tensors are no probe of this format: not imported",
    "dtype": "probes of a dtype that packs do not have: not imported; save them again in float32 (module.float())",
    "not_finite": "probes with weights that are not finite: not imported",
    "width": "probes that read states of another size than the others: not imported",
    "missing": "concepts of the hierarchy without a probe",
    "bridged": "concepts whose parent has no probe: put under the nearest concept above that has one",
    "unlisted": "probes of concepts that the hierarchy does not name: roots on their level",
    "cycle": "edges of a cycle left out, as asked",
    "several_parents": "concepts with several parents, all kept",
    "not_down": "edges that do not go down a level: kept, and the levels too",
    "repeated": "names on several levels, each a concept of its own",
    "ambiguous": "flat files of a name on several levels: taken for the first without a probe",
    "stale": "concepts that hierarchy.json and the layer files do not agree on: hierarchy.json counts",
    "stale_edges": "edges that hierarchy.json and the layer files do not agree on: hierarchy.json counts",
    "contradicted": "concepts that root_concepts or leaf_concepts list otherwise than the edges: the edges count",
    "one_sided": "edges of child_to_parent that parent_to_children lacks, kept",
    "dangling": "edges to names that no layer file has: left out",
    "malformed": 'keys that are no "Name:level": left out',
    "bank_edges": "edges that only banks and their index state: taken",
    "bank_elsewhere": "probes of banks that the hierarchy does not put under the bank's parent: the hierarchy counts",
    "bank_lacks": "concepts that bank_index.json lists and their bank lacks",
    "bank_unlisted": "probes of banks that bank_index.json does not list: taken",
    "twice": "probes stored twice: the first is taken",
    "rounded": "probes of a wider dtype than was asked for: rounded to it",
    "widened": "probes of a narrower dtype than the pack's: kept exactly, in more bytes",
    "concatenated": (
        "probes that read several layers side by side: no host gives such a state at one site, give it to"
        " score_tokens by hand"
    ),
    "uncalibrated": "probes that calibration.json does not name",
    "calibration_unknown": "entries of calibration.json for no imported probe",
    "unusable": "numbers of the pack's JSON that cannot be: not used",
    "unread": "files that are no .pt (text probes, centroids): not read",
    "elsewhere": (
        "files of weights where this format keeps no probes: not read; move them, or import their folder by itself"
    ),
}


@contextmanager
def _one_thread() -> Iterator[None]:
    """One thread of torch: a probe is too small to share, and on a busy machine threads that wait for one another take
    many times as long.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@_one_thread()
def import_pack(
    source: str | Path,
    target: str | Path,
    *,
    site: str,
    normalize: str,
    eps: float = NORM_EPS,
    hierarchy: str | Path | None = None,
    flat: bool = False,
    allow_unlisted: bool = False,
    break_cycles: bool = False,
    dtype: str = "auto",
    name: str | None = None,
    licence: str = "not stated",
    model: str | None = None,
    overwrite: bool = False,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> tuple[ProbePack, ImportReport]:
    """Write the probes of a folder as a pack; return the opened pack and a report.

    The report, which lists every kind of trouble, is in the pack's manifest and card too.

    - `site`: where states are read, `resid_post.N`, N the host's layer counted from 0.
    - `normalize`: what is done to a state before anything else, "layernorm" (without affine part, with `eps`) or
      "none".
    - `hierarchy`: hierarchy.json or one of the layer files, or the folder that holds them, where that is another.
    - `flat`: leave all edges out. Levels stay, all of them are base levels, and every probe is scored at every token.
    - `allow_unlisted`: take a hierarchy that does not name more than a fifth of the probes, or has no edge between
      levels.
    - `break_cycles`: leave out the edges that lead back instead of raising.
    - `dtype`: of the pack's weights, "float32" or "bfloat16"; "auto": the widest of the files. States are rounded to
      it.
    - `model`: the host's hub name (default: what the files say).
    - `max_bytes`: of one file.
    - `progress(done, total)`: probes read, each twice: once to look, once to write.

    A concept's id is "Name:level", and its level is kept. Of hierarchy.json and the layer files in one folder, the
    first is taken, unless it does not fit the probes and the others do. Alert thresholds are not set: the fire rates of
    calibration.json (kept in concepts.jsonl) state neither their texts nor their threshold. Raises `ImportRefused`,
    `HierarchyError` for a cycle, `ConfigError`, `PackError`.
    """
    _check_kinds(
        source=source,
        target=target,
        hierarchy=hierarchy,
        flat=flat,
        allow_unlisted=allow_unlisted,
        break_cycles=break_cycles,
        name=name,
        licence=licence,
        model=model,
        max_bytes=max_bytes,
        progress=progress,
    )
    _, layer = parse_site(site)
    inputs = _check_inputs(site, normalize, eps)
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype is {dtype!r:.80}: give {', '.join(_DTYPES)}")
    if flat and hierarchy is not None:
        raise ConfigError("flat leaves every hierarchy out: give either flat or hierarchy")
    target = check_target(target, overwrite)
    notes = Notes(KINDS)
    folder = Folder(source)
    probe_folder = ProbeFolder(folder, notes, max_bytes)
    if probe_folder.n_layers is not None and layer >= probe_folder.n_layers:
        raise ImportRefused(
            f"{folder.path}: the pack says that its host has {probe_folder.n_layers} layers (num_layers), 0 to"
            f" {probe_folder.n_layers - 1}: none is read at site {site!r}"
        )
    graph, stored, notes = _fit_hierarchy(probe_folder, hierarchy, notes, flat=flat, allow_unlisted=allow_unlisted)
    n_edges = sum(map(len, graph.parents.values()))
    counter = _Progress(progress, 2 * len(stored))
    kinds = _look(stored, folder, probe_folder, notes, max_bytes, counter)
    base = sorted({level for _, level in kinds})[: None if flat else 1]
    placed = graph.over(kinds, notes, break_cycles=break_cycles, base=base)
    calibration = _calibration(folder, placed, notes)
    architecture, widest_dtype = widest(list(kinds.values()))
    kept = _DTYPES[dtype] or widest_dtype
    _note_conversions({node: kinds[node] for node in placed}, kept, notes)
    nodes = sorted(placed, key=lambda node: (node[1], node))
    specs = {normed: inputs.spec(normed) for normed in sorted({kind.normed for kind in kinds.values()})}
    counts = _count(nodes, stored, kinds, n_edges, len(calibration))
    stated = {"site": site, "normalize": normalize, **({"eps": eps} if normalize != "none" else {})}
    report = ImportReport("hatcat", folder.path.name, stated, counts, notes.all(), _unreached(placed, base))
    model = model or probe_folder.model
    host = {
        "model_id": model,
        "hidden_size": architecture.hidden_size,
        **({"n_layers": probe_folder.n_layers} if probe_folder.n_layers else {}),
    }
    name = name or target.name
    writer = PackWriter(
        target,
        name=name,
        concepts=[_concept(node, placed[node], graph, calibration) for node in nodes],
        architecture=architecture,
        dtype=kept,
        score_rule="independent",
        inputs=[spec.as_dict() for spec in specs.values()],
        input_index=torch.tensor([list(specs).index(kinds[node].normed) for node in nodes], device="cpu"),
        host=host,
        licence=licence,
        card="",
        recommended=_recommended(placed, base),
        overwrite=overwrite,
        golden_hidden=torch.randn(
            _STATES,
            1,
            architecture.hidden_size,
            generator=torch.Generator().manual_seed(0),
            dtype=torch.float32,
            device="cpu",
        ),
        provenance={
            "import": report.as_dict(),
            "versions": {"probemon": version("probemon"), "torch": torch.__version__},
            "source": _about(probe_folder.info),
        },
    )
    at = {node: i for i, node in enumerate(nodes)}
    worst = 0.0
    states = torch.randn(
        _STATES,
        1,
        architecture.hidden_size,
        generator=torch.Generator().manual_seed(0),
        dtype=torch.float32,
        device="cpu",
    )[:, 0]
    with writer:
        for node, state in _read({node: stored[node] for node in nodes}, max_bytes):
            kind = kinds[node]
            if Kind.of(state) != kind:
                raise ImportRefused(
                    f"{stored[node].path} changed while it was read: import again when nobody writes to it"
                )
            written = writer.put(at[node], embed(state, kind, architecture, kept, inputs))
            assert written is not None
            worst = max(worst, float((written[:, 0] - evaluate(state, kind, states, inputs)).abs().max()))
            counter.count_one()
        writer.quality = {"import": {"max_score_error": worst, "states": "random", "n_states": _STATES}}
        writer.card = _card(name, report, placed, worst, model, licence)
    return ProbePack.of(writer.opened), report


def _check_inputs(site: str, normalize: str, eps: float) -> Inputs:
    if normalize not in NORMALIZE:
        raise ConfigError(
            f"normalize is {normalize!r}: no file records it, so say whether states are standardised first: 'layernorm'"
            " or 'none'"
        )
    inputs = Inputs(site, normalize, eps)
    inputs.spec(False)  # checks eps
    return inputs


def _note_conversions(kinds: Mapping[Node, Kind], dtype: torch.dtype, notes: Notes) -> None:
    """Note each probe whose weights are rounded or widened to the pack's dtype."""
    for node, kind in kinds.items():
        if kind.dtype != dtype:
            narrower = torch.promote_types(kind.dtype, dtype) == dtype
            notes.add(
                "widened" if narrower else "rounded",
                f"{key_of(node)} ({kind.dtype} to {dtype})".replace("torch.", ""),
            )


def _count(
    nodes: Sequence[Node],
    stored: Mapping[Node, Stored],
    kinds: Mapping[Node, Kind],
    n_edges: int,
    n_calibrated: int,
) -> dict[str, Any]:
    """Count the probes by variant and dtype, their files and edges, for the report."""
    variants = Counter(kind.variant for kind in kinds.values())
    dtypes = Counter(kind.dtype for kind in kinds.values())
    return {
        "probes": len(nodes),
        "files": len({place.path for place in stored.values()}),
        "edges": n_edges,
        **{f"{variant} probes": n for variant, n in variants.items()},
        **{f"in {str(dtype).removeprefix('torch.')}": n for dtype, n in dtypes.items()},
        **({"calibrated": n_calibrated} if n_calibrated else {}),
    }


def _check_kinds(**arguments: Any) -> None:
    """Raise `ConfigError` for an argument of another kind."""
    path: tuple[Any, str] = (str | PathLike, "a path")
    kinds = {
        "source": path,
        "target": path,
        "hierarchy": (path[0] | None, "a path, or None"),
        "name": (str | None, "text, or None"),
        "licence": (str, "text"),
        "model": (str | None, "text, or None"),
        **dict.fromkeys(("flat", "allow_unlisted", "break_cycles"), (bool, "True or False")),
        "max_bytes": (int, "a number of bytes"),
        "progress": (Callable | None, "a function of two numbers, or None"),
    }
    for name, value in arguments.items():
        kind, words = kinds[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ConfigError(f"{name} is {value!r:.80}: expected {words}")


def _read(stored: Mapping[Node, Stored], max_bytes: int) -> Iterator[tuple[Node, dict[str, Tensor]]]:
    """State dicts in the order of their files, each file read once."""
    by_file: dict[Path, list[tuple[Node, str | None]]] = {}
    for node, place in stored.items():
        by_file.setdefault(place.path, []).append((node, place.key))
    for path, entries in by_file.items():
        if entries[0][1] is None:
            yield from ((node, load_state_dict(path, max_bytes)) for node, _ in entries)
        else:
            bank = load_bank(path, max_bytes)
            for node, key in entries:
                if key not in bank:
                    raise ImportRefused(f"{path} changed while it was read: import again when nobody writes to it")
                yield node, bank[key]


def _look(
    stored: Mapping[Node, Stored],
    folder: Folder,
    probe_folder: ProbeFolder,
    notes: Notes,
    max_bytes: int,
    counter: _Progress,
) -> dict[Node, Kind]:
    """What each probe is, of those that can be imported; the others are noted, all by name."""
    kinds: dict[Node, Kind] = {}
    for node, state in _read(stored, max_bytes):
        try:
            kind = Kind.of(state)
            check_finite(state)
            kinds[node] = kind
        except Unusable as why:
            notes.add(
                why.reason, f"{key_of(node)}" if why.reason == "tripole" else f"{key_of(node)} ({why})", listed=True
            )
            counter.count_one()
        counter.count_one()
    sizes = Counter(kind.hidden_size for kind in kinds.values())
    if not sizes:
        raise ImportRefused(
            f"{folder.path}: none of its {len(stored)} probes can be imported: {'; '.join(map(str, notes.all()))}"
        )
    size = max(sizes, key=lambda d: (sizes[d], -d))
    for node, kind in list(kinds.items()):
        if kind.hidden_size != size:
            notes.add("width", f"{key_of(node)} ({kind.hidden_size} values, {size} in the others)", listed=True)
            del kinds[node]
            counter.count_one()
        elif probe_folder.hidden_dim is not None and size != probe_folder.hidden_dim:
            if size % probe_folder.hidden_dim:
                raise ImportRefused(
                    f"{folder.path}: probes read {size} values, the pack says hidden_dim"
                    f" {probe_folder.hidden_dim}: mend its pack_info.json or pack.json"
                )
            notes.add(
                "concatenated", f"{key_of(node)} ({size // probe_folder.hidden_dim} of {probe_folder.hidden_dim})"
            )
    return kinds


def _concept(node: Node, place: PlacedNode, graph: Graph, calibration: Mapping[Node, dict[str, Any]]) -> dict[str, Any]:
    """A line of concepts.jsonl. `reachable: false` marks what no descent from the base level comes to."""
    concept = {
        "id": key_of(node),
        "name": node[0],
        "level": node[1],
        "parents": [key_of(parent) for parent in place.parents],
        **graph.about.get(node, {}),
    }
    return {
        **concept,
        **({"calibration": calibration[node]} if node in calibration else {}),
        **({} if place.reachable else {"reachable": False}),
    }


def _calibration(folder: Folder, placed: Mapping[Node, PlacedNode], notes: Notes) -> dict[Node, dict[str, Any]]:
    """What calibration.json says of each imported probe; a number that is not finite becomes null in the pack, where
    JSON has none.
    """
    content = folder.json("calibration.json")
    if content is None:
        return {}
    entries = content.get("calibration") if isinstance(content, dict) else None
    if not isinstance(entries, dict):
        raise ImportRefused(f'{folder.path / "calibration.json"}: expected an object with calibration, of "Name_L3"')
    by_key = {f"{node[0]}_L{node[1]}": node for node in placed}
    by_node = {}
    for key, entry in entries.items():
        if key in by_key and isinstance(entry, dict):
            by_node[by_key[key]] = entry
        else:
            notes.add("calibration_unknown", key)
    for node in placed:
        if node not in by_node:
            notes.add("uncalibrated", key_of(node))
    return by_node


def _recommended(placed: Mapping[Node, PlacedNode], base: Sequence[int]) -> dict[str, Any]:
    """Settings without which a manager would have nothing to begin with, or no room to descend."""
    n_base = sum(level in base for _, level in placed)
    n_children = sum(
        node[1] not in base and any(up[1] in base for up in place.parents) for node, place in placed.items()
    )
    recommended: dict[str, Any] = {} if base == [0] else {"base_layers": list(base)}
    usual = CascadeConfig().max_loaded_probes
    if n_base + n_children > usual:  # all children of the base fit, or as many as usual
        recommended["max_loaded_probes"] = min(len(placed), n_base + max(usual, n_children))
    return recommended


def _unreached(placed: Mapping[Node, PlacedNode], base: Sequence[int]) -> str:
    """What to read first of a pack some of whose probes are never come to, or ""."""
    lost = [node for node, place in placed.items() if not place.reachable]
    if not lost:
        return ""
    example = ", ".join(key_of(node) for node in sorted(lost, key=lambda node: (node[1], node[0]))[:3])
    return (
        f"{len(lost):,} of {len(placed):,} probes are never scored ({example}{', ...' if len(lost) > 3 else ''}): no"
        f" edge leads to them from level {base[0]}. To have them scored, name their levels in base_layers, make them"
        " always on (the pack's card has the lines), or import again with the hierarchy that has them (--hierarchy"
        " FILE) or with --flat"
    )


def _fit_hierarchy(
    probe_folder: ProbeFolder, hierarchy: str | Path | None, notes: Notes, *, flat: bool, allow_unlisted: bool
) -> tuple[Graph, dict[Node, Stored], Notes]:
    """Return the hierarchy that names the probes, the probes by it, and the notes.

    Raises `ImportRefused` with what to do where none fits.
    """
    path = probe_folder.folder.path if hierarchy is None else Path(hierarchy)
    if hierarchy is not None and not path.exists():
        raise ImportRefused(f"{path} is not there: give hierarchy.json, or the folder that holds it or the layer files")
    if path.is_file() and path.suffix != ".json":
        raise ImportRefused(
            f"{path} is no .json file: give hierarchy.json, or the folder that holds it or the layer files"
        )
    folder = probe_folder.folder if hierarchy is None else Folder(path.parent if path.is_file() else path)
    files = [path.name] if path.is_file() else hierarchies(folder)
    tried: list[tuple[str, Graph, dict[Node, Stored], Notes, list[Node]]] = []
    for file in files or ["hierarchy.json"]:
        noted = notes.copy()
        graph = read_graph(folder, noted, file)
        if hierarchy is not None and not graph.parents:
            raise ImportRefused(
                f"{path} holds no concepts: give the folder of hierarchy.json, or of layer0.json and so on"
            )
        is_stated = bool(graph.parents)
        stored = probe_folder.place(graph, noted)
        unlisted = [node for node in stored if node not in graph.parents] if is_stated else []
        tried.append((file, graph, stored, noted, unlisted))
        if len(unlisted) <= _MOST_UNLISTED * len(stored):
            break
    file, graph, stored, noted, unlisted = min(tried, key=lambda one: len(one[4]) / len(one[2]))
    for other, _, other_stored, _, other_unlisted in tried:
        if other != file:
            noted.add(
                "unfit",
                f"{other} names {len(other_stored) - len(other_unlisted):,} of {len(other_stored):,} probes, {file}"
                f" {len(stored) - len(unlisted):,}",
                listed=True,
            )
    if flat:
        graph.flatten(noted)
        return graph, stored, noted
    has_levels = len({level for _, level in stored}) > 1
    if has_levels and not any(graph.parents.values()):
        why = (
            f"its {len(stored):,} probes are on several levels, and"
            f" {'nothing says' if not files else f'{file} does not say'} what is above what, so that only the lowest"
            " level would ever be scored"
        )
    elif len(unlisted) > _MOST_UNLISTED * len(stored):
        shown = ", ".join(key_of(node) for node in sorted(unlisted, key=lambda node: (node[1], node[0]))[:3])
        why = (
            f"{folder.path / file} does not name {len(unlisted):,} of the {len(stored):,} probes ({shown}, ...): it is"
            " the hierarchy of others"
        )
    else:
        return graph, stored, noted
    if allow_unlisted:
        return graph, stored, noted
    beside = probe_folder.folder.path.absolute().parent / "hierarchy.json"
    known = probe_folder.info.get("concept_pack")
    pack = probe_folder.info.get("source_pack") or (known.get("pack_id") if isinstance(known, dict) else None)
    place = f"HatCat keeps it in the concept pack{f' {pack!r:.80}' if isinstance(pack, str) else ''}"
    if beside.is_file() and hierarchy is None:
        place += f"; {beside} may be it"
    raise ImportRefused(
        f"{probe_folder.folder.path}: {why}. Give the hierarchy that these probes were trained with: --hierarchy FILE"
        f" (hierarchy=); {place}. Or have every probe scored at every token: --flat (flat=True). Or take it as it is:"
        " --allow-unlisted (allow_unlisted=True)"
    )


def _about(info: Mapping[str, Any]) -> dict[str, Any]:
    """What the source says of its origin."""
    known = (
        "source_pack",
        "pack_version",
        "probe_pack_id",
        "lens_pack_id",
        "version",
        "model",
        "model_info",
        "concept_pack",
        "trained_layers",
        "training_config",
        "training_info",
    )
    return {key: info[key] for key in known if key in info}


def _card(
    name: str, report: ImportReport, placed: Mapping[Node, PlacedNode], worst: float, model: str | None, licence: str
) -> str:
    lost = sum(not place.reachable for place in placed.values())
    lines = [
        f"# {name}",
        "",
        f"{len(placed):,} concept probes, imported. Host: {model or 'not stated'}. Licence: {licence}.",
        "",
        (
            f"On {_STATES} random states the scores are within {worst:.2g} of those of the state dicts as they were"
            " saved, evaluated in fp32."
        ),
        "",
        (
            "No alert thresholds are set: what the source records of its calibration (kept in `concepts.jsonl`) does"
            " not say which threshold gives which rate of false alarms."
        ),
        "`probemon calibrate` sets them. Quality was not measured.",
    ]
    if lost:
        lines += [
            "",
            "## Not reached",
            "",
            (
                f"{lost:,} of the concepts have no path from the base level, so a descent never comes to them and a"
                " token's silence says nothing of them; its coverage counts them as `not_reached`. Those that are"
                " roots can be made always on, at their cost, and bring what is below them:"
            ),
            "",
            "```python",
            'orphans = [c["id"] for c in pack.concepts if c.get("reachable") is False and not c["parents"]]',
            (
                "manager = DynamicProbeManager(pack, always_on=orphans,"
                ' max_loaded_probes=pack.recommended.get("max_loaded_probes", 500) + len(orphans))'
            ),
            "```",
        ]
    return "\n".join(lines) + "\n" + report.section()


class _Progress:
    """Calls `progress` as probes are done."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def count_one(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
