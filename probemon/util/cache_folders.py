"""Decides where everything is kept that can be made again: the converted demo model, compiled code, states.

cache_dir()                            # ~/.cache/probemon, else a private temporary folder, which one line names
kept("smollm2-135m-instruct")          # a path in it, or in a cache that can be read and not written
give_triton_a_folder()                 # TRITON_CACHE_DIR, if Triton's own folder cannot be written

Without a HOME, on a read-only file system or in an install that belongs to another user, the usual folder cannot be
written. `XDG_CACHE_HOME` names another one.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from probemon.errors import ConfigError

LOG = logging.getLogger("probemon")
VARIABLE = "XDG_CACHE_HOME"
NO_HOME = "there is no home folder"
REMEDY = f"set {VARIABLE} to a folder that can be written"
HUB_REMEDY = "set HF_HOME to a folder that can be written"
_NOT_WRITTEN = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR)
_TAKEN = set[Path]()


def cache_dir() -> Path:
    """Return a folder that can be written: `$XDG_CACHE_HOME/probemon`, default `~/.cache/probemon`.

    If that cannot be written, the folder is a temporary one of this user's, and the log says so once. Raises
    `ConfigError` if no temporary folder can be written either.
    """
    wanted = _wanted()
    why = NO_HOME if wanted is None else why_not_usable(wanted)
    if wanted is not None and not why:
        return wanted
    return _temporary(why)


def kept(name: str) -> Path:
    """Return the path of something kept: where it is, even if that can only be read, else where it may be written."""
    wanted = _wanted()
    if wanted is not None and os.path.exists(wanted / name):
        return wanted / name
    return cache_dir() / name


def why_not_usable(folder: Path) -> str:
    """Return why files cannot be made in a folder, which is created if it is missing; "" if they can.

    A file is written, since permissions do not tell of a read-only file system or of a full one. A folder "~" is none:
    libraries name it so if there is no home folder, and would make it in the current one.
    """
    if folder.parts[:1] == ("~",):
        return NO_HOME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return ""


def is_temporary(folder: Path) -> bool:
    """Return whether a folder is in the temporary one that this process took for want of another."""
    return any(folder.is_relative_to(one) for one in _TAKEN)


def give_triton_a_folder() -> None:
    """Set TRITON_CACHE_DIR if Triton's folder cannot be written. Raises `ConfigError` if there is none to give."""
    from triton import knobs

    if not knobs.runtime.interpret and why_not_usable(Path(knobs.cache.dir)):
        os.environ["TRITON_CACHE_DIR"] = str(cache_dir() / "triton")


def check_import_folders() -> None:
    """Raise `ConfigError` if a folder is missing without which torch cannot be imported, or others that it imports."""
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise ConfigError(
            f"no temporary folder can be written ({error.strerror}): set TMPDIR to a folder that can be written"
        ) from error
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if inductor and (why := why_not_usable(Path(inductor))):
        raise ConfigError(
            f"TORCHINDUCTOR_CACHE_DIR cannot be written ({why}): set it to a folder that can, or unset it"
        )


def check_hub_cache() -> None:
    """Raise `ConfigError` if huggingface_hub has no folder to fetch into."""
    from huggingface_hub import constants

    if Path(constants.HF_HUB_CACHE).parts[:1] == ("~",):
        raise ConfigError(f"{NO_HOME} for what is fetched from the hub: {HUB_REMEDY}")


def hub_cache_problem(error: BaseException | None) -> str:
    """Return what is wrong with the hub's cache if an error of fetching came of that, else ""."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
            where = f"{error.filename}: " if error.filename else ""
            return f"what the hub sends cannot be written ({where}{error.strerror}): {HUB_REMEDY}"
        error = error.__cause__ or error.__context__
    return ""


def _wanted() -> Path | None:
    """Return the folder that a user expects; None if there is no home to put it in."""
    root = os.environ.get(VARIABLE)
    try:
        return (Path(root).expanduser() if root else Path.home() / ".cache") / "probemon"
    except RuntimeError:  # neither HOME nor an entry in the table of users, as in many containers
        return None


@functools.cache  # says it once, and keeps a folder that only this process knows
def _temporary(why: str) -> Path:
    """Return a temporary folder that other users cannot write: the same one at the next start, if that is safe."""
    try:
        folder = Path(tempfile.gettempdir()) / f"probemon-{os.geteuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not _is_private(folder):  # another user made it, or may have put code into it
            folder = Path(tempfile.mkdtemp(prefix="probemon-"))
        unusable = why_not_usable(folder)
    except OSError as error:
        unusable = error.strerror or str(error)
    if unusable:
        raise ConfigError(f"no cache folder can be written ({why}; temporary folder: {unusable}): {REMEDY}")
    _TAKEN.add(folder)
    LOG.warning("the cache folder cannot be written (%s): %s is used instead; %s", why, folder, REMEDY)
    return folder


def _is_private(folder: Path) -> bool:
    """Return whether it is a folder, no link to one, that belongs to this user and that no one else can write."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
