"""Files of a pack: mapped tensors, sizes, hashes, and directories that appear whole or not at all.

    tensors = map_tensors(path)        # read-only views of the file; nothing is read until touched
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from probemon.errors import PackCorrupt, PackError
from probemon.manifest import CARD, MANIFEST, read_manifest

MAX_CARD_BYTES = 16 << 20
_MAX_DIMS, _MAX_SIZE = 8, 1 << 31
_OF_THE_HUB = (".gitattributes", ".cache")  # what a download to a folder leaves beside the pack
_NUMPY = {"F32": np.float32, "F64": np.float64, "F16": np.float16, "I64": np.int64, "I32": np.int32, "U8": np.uint8, "I8": np.int8}


def check_inside(path: Path) -> None:
    """Raise `PackCorrupt` where a pack's file is a link that leads out of its folder: whoever made the pack would have another's file read, and copied on.

    In the hub's cache a snapshot's files are links to the blobs beside it, and these are the pack's own.
    """
    if path.is_symlink():
        real, folder = Path(os.path.realpath(path)), Path(os.path.realpath(path.parent))
        own = [folder, *([folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [])]
        if not any(real.is_relative_to(place) for place in own):
            raise PackCorrupt(f"{path} is a link that leads out of the pack: copy the pack with the files that it links to (cp -rL), if you trust it")


def check_size(path: Path, size: int) -> None:
    """Raise `PackCorrupt` unless the file is there, in the pack's own folder, and has `size` bytes."""
    check_inside(path)
    if not path.is_file():
        raise PackCorrupt(f"{path} is missing: fetch the pack again")
    found = path.stat().st_size
    if found != size:
        what = "truncated" if found < size else "longer than it was"
        raise PackCorrupt(f"{path} is {what}: {found} bytes, the manifest says {size}: fetch the pack again")


def check_card(path: Path) -> None:
    """Raise `PackCorrupt` where a pack's card, which the manifest need not list, is a link out of the pack or longer than any card."""
    check_inside(path)
    if path.is_file() and path.stat().st_size > MAX_CARD_BYTES:
        raise PackCorrupt(f"{path} has {path.stat().st_size:,} bytes, a card at most {MAX_CARD_BYTES:,}: fetch the pack again")


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_hash(path: Path, expected: str) -> None:
    """Raise `PackCorrupt` unless the file has the hash the manifest states."""
    found = sha256(path)
    if found != expected:
        raise PackCorrupt(f"{path} was changed: sha256 {found[:12]}..., the manifest says {expected[:12]}...: fetch the pack again")


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file as a read-only mapped view.

    safetensors validates the header; the bytes are mapped here, read-only, because a private
    writable mapping (what torch makes) is read two hundred times more slowly.
    """
    try:
        with safetensors.safe_open(path, framework="np") as file:
            layout = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            described = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in layout.items()}
            names = list(file.offset_keys())
    except (safetensors.SafetensorError, OSError) as error:
        raise PackCorrupt(f"{path} cannot be read as safetensors ({error}): fetch the pack again") from None
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    offset = 8 + int.from_bytes(raw[:8].tobytes(), "little")
    tensors: dict[str, Tensor] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        for name in names:
            kind, shape = described[name]
            bf16 = kind == "BF16"
            if not bf16 and kind not in _NUMPY:
                raise PackCorrupt(f"{path}: tensor {name} has dtype {kind}, which packs do not use")
            if len(shape) > _MAX_DIMS or any(size >= _MAX_SIZE for size in shape):  # of no values, a tensor can state any shape
                raise PackCorrupt(f"{path}: tensor {name} has shape {str(shape)[:80]}, those of a pack have at most {_MAX_DIMS} dimensions under {_MAX_SIZE:,}: fetch the pack again")
            dtype = np.dtype(np.int16 if bf16 else _NUMPY[kind])
            length = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            array = raw[offset : offset + length].view(dtype).reshape(shape)
            tensor = torch.from_numpy(array)
            tensors[name] = tensor.view(torch.bfloat16) if bf16 else tensor
            offset += length
    for needed in ("child_ptr", "child_idx", "level", "input", "alert_threshold", "expand_threshold", "w1", "b1"):
        if needed not in tensors:
            raise PackCorrupt(f"{path} holds no tensor {needed!r}: it is not a probe pack's")
    return tensors


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file, readable by all (safetensors makes it private)."""
    save_file(tensors, path)
    path.chmod(0o644)


def check_replaceable(target: Path) -> None:
    """Raise `PackError` unless what is at `target` is an empty folder or a pack and nothing else: what is replaced is gone, and may be all that somebody has."""
    another = "choose another path, or move it away"
    if target.is_symlink() or not target.is_dir():
        raise PackError(f"{target} is a {'link' if target.is_symlink() else 'file'}, no pack that could be overwritten: {another}")
    if Path.cwd().resolve().is_relative_to(target.resolve()):
        raise PackError(f"{target} is the folder that this is run in: {another}")
    there = sorted(entry.name for entry in target.iterdir())
    if not there:
        return
    try:
        listed = set(read_manifest(target / MANIFEST)["files"]) if MANIFEST in there else set()
    except (OSError, PackError) as error:
        raise PackError(f"{target} is no whole pack ({error}), so it is not overwritten: {another}") from None
    foreign = [name for name in there if name not in {MANIFEST, CARD, *listed, *_OF_THE_HUB} or (target / name).is_dir() != (name == ".cache")]
    if not listed or foreign:
        raise PackError(f"{target} holds {foreign[0] if foreign else 'no pack'}, which is no part of a pack and would be lost: {another}")


def replace_directory(made: Path, target: Path) -> None:
    """Move a finished directory to its place; an older pack there is put back if that fails. Raises as `check_replaceable`."""
    if not os.path.lexists(target):
        made.rename(target)
        return
    check_replaceable(target)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
    aside.rmdir()
    target.rename(aside)
    try:
        made.rename(target)
    except OSError:
        aside.rename(target)
        raise
    shutil.rmtree(aside)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
