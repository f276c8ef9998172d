"""Files of a pack: sizes, hashes, and directories that appear whole or not at all.

check_size(path, stated["size"])
replace_directory(new, target)  # at every moment there is one of the two, whole; of several writers one is the last
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
# since glibc 2.28
_rename: Any = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
_CURRENT, _EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
_OF_THE_HUB = (".gitattributes", ".cache")  # what a download to a folder leaves beside the pack


def check_size(path: Path, size: int) -> None:
    """Raise `PackCorrupt` unless the file is there, in the pack's own folder, and has `size` bytes."""
    if path.is_symlink():
        inside(path)
    if not path.is_file():
        raise PackCorrupt(f"{path} is missing: fetch the pack again")
    check_stated_size(path, path.stat().st_size, size)


def check_stated_size(path: Path, actual: int, size: int) -> None:
    """Raise `PackCorrupt` unless a file has the size that the manifest states."""
    if actual != size:
        what = "truncated" if actual < size else "longer than it was"
        raise PackCorrupt(f"{path} is {what}: {actual} bytes, the manifest says {size}: fetch the pack again")


def check_hash(path: Path, expected: str) -> None:
    """Raise `PackCorrupt` unless the file has the hash the manifest states."""
    check_stated_hash(path, sha256(path), expected)


def check_stated_hash(path: Path, digest: str, expected: str) -> None:
    """Raise `PackCorrupt` unless a hash is the one that the manifest states."""
    if digest != expected:
        raise PackCorrupt(
            f"{path} was changed: sha256 {digest[:12]}..., the manifest says {expected[:12]}...: fetch the pack again"
        )


def check_pin(path: Path, digest: str, pin: str) -> None:
    """Raise `PackCorrupt` unless a manifest has the hash that was asked for."""
    if digest != pin.lower():
        raise PackCorrupt(
            f"{path} has sha256 {digest}, not the {pin.lower()} that was asked for: it is another version of the pack,"
            " or was changed"
        )


def check_target(path: str | Path, overwrite: bool) -> Path:
    """Return the path, where a pack may be written to it. Raises `PackError` where nothing can be made there, where
    something is there already, and with `overwrite` where it is more than a pack.
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
    """Raise `PackError` unless what is at `target` is an empty folder or a pack and nothing else, or is gone: what is
    replaced is gone, and may be all that somebody has.
    """
    another = "choose another path, or move it away"
    try:
        mode = target.lstat().st_mode  # asked once: another writer may move it away and put its own there meanwhile
    except (FileNotFoundError, NotADirectoryError):
        return
    if not stat.S_ISDIR(mode):
        raise PackError(
            f"{target} is a {'link' if stat.S_ISLNK(mode) else 'file'}, no pack that could be overwritten: {another}"
        )
    if Path.cwd().resolve().is_relative_to(target.resolve()):
        raise PackError(f"{target} is the folder that this is run in: {another}")
    try:
        whole, foreign = read_whole(target, _foreign)
    except (FileNotFoundError, NotADirectoryError):  # another writer moved it away just now
        return
    except (OSError, PackError) as error:
        raise PackError(f"{target} is no whole pack ({error}), so it is not overwritten: {another}") from None
    if not whole or foreign:
        raise PackError(
            f"{target} holds {foreign[0] if foreign else 'no pack'}, which is no part of a pack and would be lost:"
            f" {another}"
        )


def _foreign(folder: HeldFolder) -> tuple[bool, list[str]]:
    """Return whether a folder is empty or lists its files, and what else is in it."""
    names = sorted(folder.names())
    manifest = (
        parse_manifest(folder.hold(MANIFEST).read(MAX_MANIFEST_BYTES), folder.path / MANIFEST)
        if MANIFEST in names
        else {"files": {}}
    )
    known = {MANIFEST, CARD, *manifest["files"], *_OF_THE_HUB} if manifest["files"] else set()
    return bool(manifest["files"]) or not names, [
        name for name in names if name not in known or folder.is_folder(name) != (name == ".cache")
    ]


def replace_directory(new: Path, target: Path) -> None:
    """Move a finished directory to its place; what was there is removed, and stays where that fails. Raises as
    `check_replaceable`, and `OSError`.

    Where the file system can exchange two names there is no moment without a whole pack at `target`; elsewhere there is
    a short one. Of several writers each puts its own there whole, and the last one stays.
    """
    while True:
        try:
            new.rename(target)  # to a free name, or in the place of an empty folder
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
    """Put `new` in the place of `target`; return where the older folder is now, or None where another writer came
    between, and all is to be tried again.
    """
    aside = target.parent / f".{target.name}-old-{secrets.token_hex(8)}"
    try:
        target.rename(aside)
    except FileNotFoundError:
        return None
    try:
        new.rename(target)
    except OSError as error:
        if error.errno in _TAKEN:  # another writer's pack is there: whole, and later than what was moved aside
            shutil.rmtree(aside)
            return None
        try:
            aside.rename(target)
        except OSError:  # the same, and what is told is the first error
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return aside


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False where this system or file system cannot, or one of them is gone."""
    return _rename is not None and _rename(_CURRENT, os.fsencode(one), _CURRENT, os.fsencode(other), _EXCHANGE) == 0
