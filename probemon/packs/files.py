"""Sizes and hashes of pack files; atomic replacement of directories.

check_size(path, entry["size"])
replace_directory(new, target)
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

from probemon.errors import PackCorrupt, PackError
from probemon.packs.held_file import HeldFolder, inside, read_whole
from probemon.packs.manifest import CARD, MANIFEST, MAX_MANIFEST_BYTES, parse_manifest
from probemon.util.checks import check_bool, check_path
from probemon.util.files import sha256, why_not_writable

MAX_CARD_BYTES = 16 << 20
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
# glibc 2.28 or later
_rename: Any = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
_CURRENT, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_OF_THE_HUB = (".gitattributes", ".cache")  # left in a folder by hub downloads


def check_size(path: Path, size: int) -> None:
    """Raise `PackCorrupt` unless the file is in the pack and has `size` bytes."""
    if path.is_symlink():
        inside(path)
    if not path.is_file():
        raise PackCorrupt(f"{path} is missing: fetch the pack again")
    check_stated_size(path, path.stat().st_size, size)


def check_stated_size(path: Path, actual: int, size: int) -> None:
    """Raise `PackCorrupt` unless the sizes match."""
    if actual != size:
        what = "truncated" if actual < size else "longer than it was"
        raise PackCorrupt(f"{path} is {what}: {actual} bytes, the manifest says {size}: fetch the pack again")


def check_hash(path: Path, expected: str) -> None:
    """Raise `PackCorrupt` unless the file has this hash."""
    check_stated_hash(path, sha256(path), expected)


def check_stated_hash(path: Path, digest: str, expected: str) -> None:
    """Raise `PackCorrupt` unless the hashes match."""
    if digest != expected:
        raise PackCorrupt(
            f"{path} was changed: sha256 {digest[:12]}..., the manifest says {expected[:12]}...: fetch the pack again"
        )


def check_pin(path: Path, digest: str, pin: str) -> None:
    """Raise `PackCorrupt` unless a manifest has the pinned hash."""
    if digest != pin.lower():
        raise PackCorrupt(
            f"{path} has sha256 {digest}, not the {pin.lower()} that was asked for: it is another version of the pack,"
            " or was changed"
        )


def check_target(path: str | Path, overwrite: bool) -> Path:
    """Return the path if a pack can be written there. Raises `PackError`, also if more than a pack would be
    overwritten.
    """
    target = check_path("path", path)
    overwrite = check_bool("overwrite", overwrite)
    if os.path.lexists(target):
        if not overwrite:
            raise PackError(f"{target} exists: choose another path, or overwrite it (overwrite=True)")
        check_replaceable(target)
    if why := why_not_writable(target):
        raise PackError(f"{target} cannot be written: {why}; choose another path")
    return target


def check_replaceable(target: Path) -> None:
    """Raise `PackError` unless `target` is missing, empty or just a pack: other files would be lost."""
    advice = "choose another path, or move it away"
    try:
        mode = target.lstat().st_mode  # read once: other writers may replace it
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(mode):
        raise PackError(
            f"{target} is a {'link' if stat.S_ISLNK(mode) else 'file'}, not a pack that could be overwritten: {advice}"
        )
    if Path.cwd().resolve().is_relative_to(target.resolve()):
        raise PackError(f"{target} is the folder that this is run in: {advice}")
    try:
        whole, foreign = read_whole(target, _foreign)
    except (FileNotFoundError, NotADirectoryError):  # another writer moved it
        return
    except (OSError, PackError) as error:
        raise PackError(f"{target} is not a whole pack ({error}), so it is not overwritten: {advice}") from None
    if not whole or foreign:
        raise PackError(
            f"{target} holds {foreign[0] if foreign else 'no pack'}, which is not part of a pack and would be lost:"
            f" {advice}"
        )


def _foreign(folder: HeldFolder) -> tuple[bool, list[str]]:
    """Return whether a folder is a pack or empty, and other files in it."""
    names = sorted(folder.names())
    manifest = (
        parse_manifest(folder.hold(MANIFEST).read(MAX_MANIFEST_BYTES), folder.path / MANIFEST)
        if MANIFEST in names
        else {"files": {}}
    )
    pack_files = {MANIFEST, CARD, *manifest["files"], *_OF_THE_HUB} if manifest["files"] else set()
    return bool(manifest["files"]) or not names, [
        name for name in names if name not in pack_files or folder.is_folder(name) != (name == ".cache")
    ]


def replace_directory(new: Path, target: Path) -> None:
    """Move a finished directory to its place and remove the old one. Raises as `check_replaceable`, and `OSError`.

    Atomic if the file system can exchange names. The last of several writers stays.
    """
    while True:
        try:
            new.rename(target)  # missing, or an empty folder
            return
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
        check_replaceable(target)
        older = new if _exchange(new, target) else _moved_aside(new, target)
        if older is not None:
            shutil.rmtree(older)
            return


def _moved_aside(new: Path, target: Path) -> Path | None:
    """Put `new` in the place of `target`; return the old folder's path, or None to retry."""
    aside = target.parent / f".{target.name}-old-{secrets.token_hex(8)}"
    try:
        target.rename(aside)
    except FileNotFoundError:
        return None
    try:
        new.rename(target)
    except OSError as error:
        if error.errno in _TAKEN:  # another writer's newer pack is there
            shutil.rmtree(aside)
            return None
        try:
            aside.rename(target)
        except OSError:  # again another writer; the first error is raised
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically, if possible; return whether."""
    return _rename is not None and _rename(_CURRENT, os.fsencode(one), _CURRENT, os.fsencode(other), _EXCHANGE) == 0
