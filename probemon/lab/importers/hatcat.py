"""Imports HatCat's lens and probe packs, file by file.

    pack, report = import_pack("lens_packs/mine", "packs/mine", site="resid_post.15", normalize="layernorm")

Three-way heads ("tripole") become three exclusive concepts. The files record neither layer nor standardisation: `site`
and `normalize` do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probemon.core.probes import parse_site
from probemon.core.score_rules import INDEPENDENT
from probemon.core.settings import CascadeConfig
from probemon.errors import ConfigError, ImportRefused
from probemon.lab.importers.hatcat_files import ProbeFolder, Stored
from probemon.lab.importers.hatcat_hierarchy import choose_hierarchy
from probemon.lab.importers.hatcat_probe import (
    NORM_EPS,
    POLES,
    HatcatInputs,
    Kind,
    Unusable,
    check_finite,
    embed,
    evaluate,
    poles,
    widest,
)
from probemon.lab.importers.hatcat_report import (
    KINDS,
    N_STATES,
    card_text,
    count_probes,
    note_conversions,
    origin_of,
    unreached,
)
from probemon.lab.importers.hatcat_tree import Graph, Node, PlacedNode, key_of
from probemon.lab.importers.report import ImportReport, Notes
from probemon.lab.importers.weights import MAX_BYTES, Folder, load_bank, load_state_dict
from probemon.packs.files import check_target
from probemon.packs.pack import ProbePack
from probemon.packs.writer import PackWriter

Progress = Callable[[int, int], None]
NORMALIZE = ("none", "layernorm")
_DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


@contextmanager
def _one_thread() -> Iterator[None]:
    # A probe is too small to share between threads.
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
    """Write a folder's probes as a pack; return it with a report.

    - `site`: where states are read, `resid_post.N`, N counted from 0
    - `normalize`: of states: "layernorm" (without affine part, with `eps`) or "none"
    - `hierarchy`: hierarchy.json, a layer file, or their folder
    - `flat`: leave all edges out, and score every probe at every token
    - `allow_unlisted`: accept a hierarchy that lacks over a fifth of the probes, or edges between levels
    - `break_cycles`: leave out edges that lead back
    - `dtype`: of weights and states, "float32", "bfloat16" or "auto": the widest of the files
    - `model`: its hub name (default: the files')
    - `max_bytes`: of one file
    - `progress(done, total)`: called twice per probe, to check and to write

    A concept's id is "Name:level", a pole's "Name/negative:level". Alert thresholds are not set. Raises
    `ImportRefused`, `HierarchyError` for a cycle, `ConfigError`, `PackError`.
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
            f"{folder.path}: the pack says that its model has {probe_folder.n_layers} layers (num_layers), 0 to"
            f" {probe_folder.n_layers - 1}: none is read at site {site!r}"
        )
    graph, stored, notes = choose_hierarchy(probe_folder, hierarchy, notes, flat=flat, allow_unlisted=allow_unlisted)
    n_edges = sum(map(len, graph.parents.values()))
    counter = _Progress(progress, 2 * len(stored))
    kinds = _check_probes(stored, folder, probe_folder, notes, max_bytes, counter)
    base = sorted({level for _, level in kinds})[: None if flat else 1]
    heads = [node for node, kind in kinds.items() if kind.is_tripole]
    placed = graph.over(kinds, notes, break_cycles=break_cycles, base=base, heads=heads)
    calibration = _calibration(folder, placed, notes)
    architecture, widest_dtype = widest(list(kinds.values()))
    pack_dtype = _DTYPES[dtype] or widest_dtype
    note_conversions({node: kinds[node] for node in placed}, pack_dtype, notes)
    nodes = sorted(placed, key=lambda node: (node[1], node))
    specs = {normed: inputs.spec(normed) for normed in sorted({kind.normed for kind in kinds.values()})}
    entries = [(node, pole) for node in nodes for pole in (POLES if kinds[node].is_tripole else ("",))]
    counts = count_probes(len(entries), stored, kinds, n_edges, len(calibration))
    settings = {"site": site, "normalize": normalize, **({"eps": eps} if normalize != "none" else {})}
    report = ImportReport("hatcat", folder.path.name, settings, counts, notes.all(), unreached(placed, base))
    model = model or probe_folder.model
    model_info = {
        "model_id": model,
        "hidden_size": architecture.hidden_size,
        **({"n_layers": probe_folder.n_layers} if probe_folder.n_layers else {}),
    }
    name = name or target.name
    random = torch.Generator().manual_seed(0)
    states = torch.randn(N_STATES, 1, architecture.hidden_size, generator=random, dtype=torch.float32, device="cpu")
    writer = PackWriter(
        target,
        name=name,
        concepts=[_concept(node, pole, placed[node], graph, calibration) for node, pole in entries],
        architecture=architecture,
        dtype=pack_dtype,
        score_rule=INDEPENDENT,
        inputs=[spec.as_dict() for spec in specs.values()],
        input_index=torch.tensor([list(specs).index(kinds[node].normed) for node, _ in entries], device="cpu"),
        softmax_group=torch.tensor([heads.index(node) if pole else -1 for node, pole in entries], device="cpu"),
        host=model_info,
        licence=licence,
        card="",
        recommended=_recommended(placed, base, heads),
        overwrite=overwrite,
        golden_hidden=states,
        provenance={
            "import": report.as_dict(),
            "versions": {"probemon": version("probemon"), "torch": torch.__version__},
            "source": origin_of(probe_folder.info),
        },
    )
    at = {node: i for i, (node, pole) in enumerate(entries) if pole in ("", POLES[0])}
    worst = 0.0
    with writer:
        for node, state in _read({node: stored[node] for node in nodes}, max_bytes):
            kind = kinds[node]
            if Kind.of(state) != kind:
                raise ImportRefused(
                    f"{stored[node].path} changed while it was read: import again when nobody writes to it"
                )
            written = [
                writer.put(at[node] + i, embed(pole, kind, architecture, pack_dtype, inputs))
                for i, pole in enumerate(poles(state, kind))
            ]
            scores = torch.cat([part for part in written if part is not None], dim=1)
            scores = scores.softmax(dim=1) if kind.is_tripole else scores  # poles have logits so far
            worst = max(worst, float((scores - evaluate(state, kind, states[:, 0], inputs)).abs().max()))
            counter.count_one()
        writer.quality = {"import": {"max_score_error": worst, "states": "random", "n_states": N_STATES}}
        writer.card = card_text(name, report, placed, worst, model, licence)
    return ProbePack.of(writer.opened), report


def _check_inputs(site: str, normalize: str, eps: float) -> HatcatInputs:
    if normalize not in NORMALIZE:
        raise ConfigError(
            f"normalize is {normalize!r}: no file records it, so say whether states are standardised first: 'layernorm'"
            " or 'none'"
        )
    inputs = HatcatInputs(site, normalize, eps)
    inputs.spec(False)
    return inputs


def _check_kinds(**arguments: Any) -> None:
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
    """Read state dicts, each file once."""
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


def _check_probes(
    stored: Mapping[Node, Stored],
    folder: Folder,
    probe_folder: ProbeFolder,
    notes: Notes,
    max_bytes: int,
    counter: _Progress,
) -> dict[Node, Kind]:
    kinds: dict[Node, Kind] = {}
    for node, state in _read(stored, max_bytes):
        try:
            kind = Kind.of(state)
            check_finite(state)
            kinds[node] = kind
        except Unusable as why:
            notes.add(why.reason, f"{key_of(node)} ({why})", listed=True)
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
    for node in sorted(kinds, key=lambda node: (node[1], node)):
        if kinds[node].is_tripole:
            notes.add("tripole", key_of(node), listed=True)
    return kinds


def _concept(
    node: Node, pole: str, place: PlacedNode, graph: Graph, calibration: Mapping[Node, dict[str, Any]]
) -> dict[str, Any]:
    """Make a line of concepts.jsonl. `reachable: false`: not below the base level."""
    name = f"{node[0]}/{pole}" if pole else node[0]
    concept = {
        "id": key_of((name, node[1])),
        "name": name,
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


def _recommended(placed: Mapping[Node, PlacedNode], base: Sequence[int], heads: Collection[Node]) -> dict[str, Any]:
    n_probes = {node: len(POLES) if node in heads else 1 for node in placed}
    n_base = sum(n for node, n in n_probes.items() if node[1] in base)
    n_children = sum(
        n_probes[node]
        for node, place in placed.items()
        if node[1] not in base and any(up[1] in base for up in place.parents)
    )
    recommended: dict[str, Any] = {} if base == [0] else {"base_layers": list(base)}
    usual = CascadeConfig().max_loaded_probes
    if n_base + n_children > usual:  # room for all children of the base
        recommended["max_loaded_probes"] = min(sum(n_probes.values()), n_base + max(usual, n_children))
    return recommended


class _Progress:
    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress, self._done, self._total = progress, 0, total

    def count_one(self) -> None:
        self._done += 1
        if self._progress is not None:
            self._progress(self._done, self._total)
