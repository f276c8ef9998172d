"""Imports control vectors of repeng 0.4 (`ControlVector.export_gguf`) as probes.

    pack = import_control_vector("happy.gguf", "my-pack", layers=[12, 16], sharpness=0.1, model="org/host")

A score is sigmoid(sharpness * projection), the projection on the direction as repeng's `project_onto_direction` has it.
It has no bias and no threshold: only the order of scores has a meaning, until `probemon calibrate` sets thresholds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers.flat import Classifier, ImportOptions, check_factor, check_options, linear, write_flat
from probemon.lab.importers.foreign_files import hashes, named_files, tensor_of
from probemon.lab.importers.gguf_tensors import read_gguf
from probemon.packs.pack import ProbePack

_ARCHITECTURE = "controlvector"


def import_control_vector(
    source: str | Path | Mapping[str, str | Path],
    target: str | Path,
    *,
    layers: Iterable[int],
    sharpness: float = 1.0,
    **about: Unpack[ImportOptions],
) -> ProbePack:
    """Write directions of control vectors as a pack; `direction.N` is read at the output of block N, `resid_post.N`.

    - `source`: a file, a folder of `.gguf`, or files by concept; a probe is called concept/N, or concept if there is
      one layer
    - `layers`: which, counted from 0; not the model's last, which repeng fits to states after the final norm
    - `sharpness`: multiplies the projections, by 0.001 to 1,000: residual streams are long, and beyond 17 a score is 1
    - `about`: `ImportOptions` of `probemon.lab.importers.flat`; without `n_layers`, a file of every layer from 0 or 1
      tells which is the last

    Raises `ImportRefused`, `UnknownSetting`.
    """
    check_options(import_control_vector, about, without=("eps", "notes"))
    check_factor("sharpness", sharpness)
    wanted = _layers(layers)
    files = named_files(source, ".gguf")
    probes: list[Classifier] = []
    stated: dict[str, Any] = {}
    for name, path in files.items():
        directions, stated[name] = _read(path, about.get("n_layers"))
        for layer in wanted:
            probes.append(_probe(name if len(wanted) == 1 else f"{name}/{layer}", layer, directions, path, sharpness))
    notes = ["Directions have no bias: scores rank, and are not probabilities; nothing fires until it is calibrated."]
    return write_flat(
        target,
        probes,
        source="repeng",
        normalize="none",
        notes=notes,
        stated={"sharpness": sharpness, "vectors": stated},
        files=hashes(files),
        **about,
    )


def _layers(layers: Any) -> list[int]:
    given = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else []
    if not given or not all(type(layer) is int and layer >= 0 for layer in given) or len(set(given)) < len(given):
        raise ImportRefused(f"layers is {layers!r:.80}: give numbers of layers, counted from 0, each once")
    return given


def _read(path: Path, n_layers: int | None) -> tuple[dict[int, Tensor], dict[str, Any]]:
    """Return directions by layer, without the model's last where the file or the caller says which that is."""
    settings, tensors = read_gguf(path)
    kind = settings.get("general.architecture")
    if kind != _ARCHITECTURE:
        raise ImportRefused(
            f"{path} is a GGUF file of {kind!r:.40}, not a control vector: give one of ControlVector.export_gguf"
        )
    directions: dict[int, Tensor] = {}
    for name in tensors:
        word, _, number = name.partition(".")
        if word != "direction" or not (number.isascii() and number.isdigit() and len(number) < 6):
            raise ImportRefused(f"{path} holds {name!r:.80}: a control vector of repeng holds direction.N alone")
        directions[int(number)] = tensor_of(tensors, name, path)
    if not directions:
        raise ImportRefused(f"{path} holds no direction.N: it is not a control vector of repeng")
    # repeng's default is every layer but the first.
    is_whole = sorted(directions) in ([*range(1, len(directions) + 1)], [*range(len(directions))])
    if (len(directions) > 1 and is_whole) or n_layers is not None:
        directions.pop(max(directions) if n_layers is None else n_layers - 1, None)
    return directions, {"model_hint": str(settings.get(f"{_ARCHITECTURE}.model_hint", ""))}


def _probe(name: str, layer: int, directions: dict[int, Tensor], path: Path, sharpness: float) -> Classifier:
    if layer not in directions:
        raise ImportRefused(
            f"{path} has no direction for layer {layer}: it has {', '.join(map(str, sorted(directions)))[:200]}, the"
            " last layer's left out, which repeng fits to states after the final norm; give n_layers if the model has"
            " more layers than the file"
        )
    direction = directions[layer].double()
    length = float(direction.norm())
    if direction.dim() != 1 or not length > 0:
        raise ImportRefused(f"{path}: direction.{layer} has shape {tuple(direction.shape)} and length {length:.3g}")
    return linear(name, sharpness / length * direction, 0.0, site=f"resid_post.{layer}", fields={"layer": layer})
