"""Opens small files of other projects, and checks their fields.

    files = named_files("probes/", ".pt")                           # {concept: path}

Nothing that is read is run, and sizes are bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from probemon.errors import ImportRefused
from probemon.lab.importers import weights
from probemon.lab.importers.kinds import JSON, check_kind, instead
from probemon.util.file_kinds import GGUF, PICKLE, SAFETENSORS, TORCH, ZIP
from probemon.util.files import sha256
from probemon.util.strict_json import RepeatedKey, loads, no_constant

MAX_BYTES = 8 << 30
_LARGEST = 1e300  # JSON integers can be larger than any float
_KINDS = {".pt": (TORCH, PICKLE, ZIP), ".safetensors": (SAFETENSORS,), ".gguf": (GGUF,)}  # of files by suffix


def named_files(source: str | Path | Mapping[str, str | Path], suffix: str) -> dict[str, Path]:
    """Return files by concept, of a mapping, a file or a folder. Raises `ImportRefused`."""
    if isinstance(source, Mapping):
        files = {name: as_path(path, f"the file of {name!r}") for name, path in source.items()}
        if not files:
            raise ImportRefused("there is no probe to import: the dict of files is empty")
    elif as_path(source, "the source, a file, a folder or a dict of files by concept,").is_dir():
        files = {path.stem: path for path in weights.Folder(source).files(suffix=suffix)}
        if not files:
            raise ImportRefused(
                f"{source} holds no {suffix} file: {instead(Path(source))}give the folder that the probes were saved to"
            )
    else:
        files = {Path(source).stem: Path(source)}
    for path in files.values():
        _check_file(path, MAX_BYTES, *_KINDS[suffix])
    return files


def hashes(files: Mapping[str, Path]) -> dict[str, str]:
    """Return sha256 by file name, with the concept if names repeat."""
    names = [path.name for path in files.values()]
    return {
        path.name if names.count(path.name) == 1 else f"{concept}: {path.name}": sha256(path)
        for concept, path in files.items()
    }


def _check_file(path: Path, max_bytes: int, *kinds: str) -> None:
    weights.check_file(path, max_bytes)
    check_kind(path, *kinds)


def read_json(path: Path, kind: str = JSON) -> Any:
    """Read a JSON file, of a `kind`. Raises `ImportRefused`."""
    _check_file(path, weights.MAX_JSON_BYTES, kind)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ImportRefused(f"{path} cannot be read ({str(error)[:100]})") from None
    return parse_json(text, str(path))


def parse_json(text: str, what: str) -> Any:
    """Read a JSON text. Raises `ImportRefused` naming `what`."""
    try:
        return loads(text, constant=no_constant)
    except RepeatedKey as error:
        raise ImportRefused(f"{what}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ImportRefused(f"{what} is not valid JSON ({type(error).__name__}: {str(error)[:100]})") from None


def read_safetensors(
    path: Path, wanted: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read the wanted tensors, and the metadata. Raises `ImportRefused`."""
    _check_file(path, MAX_BYTES, SAFETENSORS)
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys() if wanted(name)}, dict(file.metadata() or {})  # noqa: SIM118 (not a dict)
    except (safetensors.SafetensorError, OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        raise ImportRefused(
            f"{path} cannot be read as safetensors ({str(error)[:150]}): give a file that safetensors.torch.save_file"
            " wrote"
        ) from None


def as_path(path: object, what: str) -> Path:
    """Return a `Path`. Raises `ImportRefused` naming `what`."""
    if not isinstance(path, (str, os.PathLike)):
        raise ImportRefused(f"{what} is given as a {type(path).__name__}: give a path")
    return Path(path)


def only_tensors(tensors: Collection[str], known: Collection[str], where: object) -> None:
    """Raise `ImportRefused` for unknown tensors."""
    others = [str(name) for name in tensors if name not in known]
    if others:
        raise ImportRefused(
            f"{where} holds {', '.join(others[:8])} in addition to {', '.join(known)}: its effect on a score is"
            " unknown. If it does nothing, give the weights to probemon.lab.importers.generic"
        )


def tensor_of(tensors: Mapping[str, Any], name: str, where: object) -> Tensor:
    """Return a tensor of floats by name. Raises `ImportRefused`."""
    tensor = tensors.get(name)
    if not isinstance(tensor, Tensor):
        names = ", ".join(map(str, list(tensors)[:8])) or "nothing"
        raise ImportRefused(f"{where} holds no tensor {name!r}; it holds {names}")
    if not tensor.is_floating_point() or tensor.layout is not torch.strided:
        raise ImportRefused(f"{where}: {name!r} is {tensor.dtype}, {tensor.layout}: expected a plain tensor of floats")
    return tensor


def field(mapping: Any, name: str, kind: type[Any], where: object, default: Any = ...) -> Any:
    """Return a field. Raises `ImportRefused` if it is of another kind, or missing without a default."""
    if not isinstance(mapping, dict):
        raise ImportRefused(f"{where}: expected an object, found {type(mapping).__name__}")
    value: Any = mapping.get(name, default)
    if value is ...:
        raise ImportRefused(f"{where} has no {name!r}")
    if value is default:
        return value
    if isinstance(value, bool) is not (kind is bool) or not isinstance(value, (int, float) if kind is float else kind):
        raise ImportRefused(f"{where}: {name!r} is {value!r}, expected {kind.__name__}")
    if kind is float and not abs(value) < _LARGEST:
        raise ImportRefused(f"{where}: {name!r} is not a finite number")
    return float(value) if kind is float else value


def site_of(stated: str | None, site: str | None, where: object) -> str:
    """Return the file's site, else the user's. Raises `ImportRefused` if they differ or both are missing."""
    if stated is None and site is None:
        raise ImportRefused(
            f"{where} does not say at which site of the model the state is read: give site=, such as 'resid_post.15'"
            " (the output of block 15, counted from 0)"
        )
    if stated is not None and site not in (None, stated):
        raise ImportRefused(
            f"{where} says that the state is read at {stated}, and site={site!r} was given: leave it out, or import the"
            " weights with probemon.lab.importers.generic"
        )
    return stated if stated is not None else str(site)
