"""Says what a file is that an importer does not read, and which command reads it.

check_kind(path, SAFETENSORS)      # "x.gguf is tensors of llama.cpp (GGUF): probemon import repeng reads ..."
"""

from __future__ import annotations

from pathlib import Path

from probemon.errors import ImportRefused
from probemon.util.file_kinds import (
    BEGIN_BYTES,
    GGUF,
    LFS,
    NPY,
    NPZ,
    PACKED,
    PICKLE,
    SAFETENSORS,
    TORCH,
    kind_of,
    remedy_of,
    without_mark,
)

INDEX, JSON, EMPTY = "the index of weights in several files", "a JSON file", "empty"
_PICKLED = (".pkl", ".pickle", ".joblib", ".dill", ".cloudpickle")
_INDEX_NAME = ".safetensors.index.json"
_RUNS = "a pickle, and loading one runs what is in it"
_MAPPED = "probemon import safetensors reads it, with a mapping"
_SAVE = "save its tensors by safetensors.torch.save_file"
_READ_BY = {
    SAFETENSORS: "probemon import steerkit reads its own, probemon import safetensors any, with a mapping",
    INDEX: _MAPPED,
    NPZ: _MAPPED,
    NPY: "save it by numpy.savez with a name, which probemon import safetensors reads",
    TORCH: (f"probemon import probelab and probemon import lie-detectors read their own; of another, {_SAVE}"),
    GGUF: "probemon import repeng reads it, if it is a control vector",
    JSON: "probemon import probekit reads one of its to_dict()",
    _RUNS: (
        "load it yourself where you trust it, and hand over the objects (probemon.lab.importers.sklearn, .generic)"
    ),
    EMPTY: "fetch it again",
    LFS: remedy_of(LFS),
}
_FOLDERS = {
    "saelens": ("cfg.json", "sae_weights.safetensors"),
    "hallucination": ("probe_config.json",),
    "lie-detectors": ("sweep.json", "probe.pt"),
}
_LISTED = 64  # files of a folder that are looked at


def check_kind(path: Path, *wanted: str) -> None:
    """Raise `ImportRefused` for a file of a known kind that is none of `wanted`."""
    kind = file_kind(path)
    if kind and kind not in wanted:
        raise ImportRefused(f"{path} is {kind}: {read_by(kind)}")


def file_kind(path: Path) -> str:
    """Return the kind of a file, by its name and its first bytes, or ""."""
    if path.suffix.lower() in _PICKLED:
        return _RUNS
    if path.name.endswith(_INDEX_NAME):
        return INDEX
    try:
        if path.is_file() and not path.stat().st_size:
            return EMPTY
        if kind := kind_of(path):
            return kind
        with path.open("rb") as stream:
            begin = without_mark(stream.read(BEGIN_BYTES))
    except (OSError, ValueError):
        return ""
    return JSON if begin[:1] in (b"{", b"[") and b"\0" not in begin else ""


def read_by(kind: str) -> str:
    """Return what reads a kind, or what to do with it."""
    if kind.startswith(PACKED):
        return remedy_of(kind)
    return _READ_BY.get(_RUNS if kind == PICKLE else kind, f"no importer reads it: {_SAVE}")


def in_folder(folder: Path) -> str:
    """Return what reads a folder, or the first file in it that is known; else ""."""
    try:
        files = sorted(entry for entry in folder.iterdir() if entry.is_file())[:_LISTED]
    except OSError:
        return ""
    names = {path.name for path in files}
    for command, needed in _FOLDERS.items():
        if names.issuperset(needed):
            return f"probemon import {command} reads this folder"
    for path in files:
        if (kind := file_kind(path)) and kind != JSON:  # settings, more often than probes
            return f"it holds {path.name}, {kind}: {read_by(kind)}"
    return ""


def instead(folder: Path) -> str:
    """Return `in_folder` as the beginning of a remedy, or ""."""
    other = in_folder(folder)
    return f"{other}; or " if other else ""
