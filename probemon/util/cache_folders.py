"""Cache folders, for the converted demo model, compiled code and hidden states.

cache_dir()                            # ~/.cache/probemon, else a private temporary folder
kept("smollm2-135m-instruct")          # a path in it
give_triton_a_folder()                 # TRITON_CACHE_DIR, if Triton's own folder is not writable
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
    """Return a writable folder: `$XDG_CACHE_HOME/probemon`, default `~/.cache/probemon`, else a temporary one.

    Logs the latter once. Raises `ConfigError` if none is writable.
    """
    wanted = _wanted()
    why = NO_HOME if wanted is None else why_not_usable(wanted)
    if wanted is not None and not why:
        return wanted
    return _temporary(why)


def kept(name: str) -> Path:
    """Return the path of a cached file, which may be read-only, or the place for it."""
    wanted = _wanted()
    if wanted is not None and os.path.exists(wanted / name):
        return wanted / name
    return cache_dir() / name


def why_not_usable(folder: Path) -> str:
    """Return why files cannot be made in a folder (created if missing), or "".

    Writes a file: permissions do not show a full file system. Libraries name a missing home "~".
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
    """True if a folder is in this process's temporary cache."""
    return any(folder.is_relative_to(one) for one in _TAKEN)


def give_triton_a_folder() -> None:
    """Set TRITON_CACHE_DIR if Triton's folder is not writable. Raises `ConfigError`."""
    from triton import knobs

    if not knobs.runtime.interpret and why_not_usable(Path(knobs.cache.dir)):
        os.environ["TRITON_CACHE_DIR"] = str(cache_dir() / "triton")


def check_import_folders() -> None:
    """Raise `ConfigError` if a folder that importing torch needs is not writable."""
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
    """Raise `ConfigError` if huggingface_hub has no cache folder."""
    from huggingface_hub import constants

    if Path(constants.HF_HUB_CACHE).parts[:1] == ("~",):
        raise ConfigError(f"{NO_HOME} for what is fetched from the hub: {HUB_REMEDY}")


def hub_cache_problem(error: BaseException | None) -> str:
    """Return a message with remedy if a download failed because its cache folder cannot be written, else ""."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NOT_WRITTEN:
            place = f"{error.filename}: " if error.filename else ""
            return f"what the hub sends cannot be written ({place}{error.strerror}): {HUB_REMEDY}"
        error = error.__cause__ or error.__context__
    return ""


def _wanted() -> Path | None:
    root = os.environ.get(VARIABLE)
    try:
        return (Path(root).expanduser() if root else Path.home() / ".cache") / "probemon"
    except RuntimeError:  # no home, as in many containers
        return None


@functools.cache  # logs once; mkdtemp's folder is reused
def _temporary(why: str) -> Path:
    """Return a temporary folder that only this user can write."""
    try:
        folder = Path(tempfile.gettempdir()) / f"probemon-{os.geteuid()}"
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not _is_private(folder):  # another user's, maybe with code in it
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
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
