"""Writes files atomically, and hashes them.

write_text_atomically(path, text)
replace_file(new, path)
save_tensors(path, {"w1": ...})
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write a safetensors file with mode 0644. Raises `OSError`."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file  # imported here: hashing must not load torch

    try:
        save_file(tensors, path, metadata)
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error
    path.chmod(0o644)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file under a temporary name, then rename it."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
        temporary.chmod(0o644)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file next to `path`, which takes its place at the end. An error removes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    try:
        yield Path(name)
        replace_file(name, path)
    except BaseException:
        os.unlink(name)
        raise


def replace_file(new: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename `new` to `target`. Raises `OSError`, also for a device or a pipe: root would replace /dev/null."""
    try:
        mode = os.stat(target).st_mode
    except OSError:  # nothing is there, or the rename fails
        mode = stat.S_IFREG
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EEXIST, "It is a device or a pipe, which is not replaced", os.fspath(target))
    os.replace(new, target)


def why_not_writable(path: Path) -> str:
    """Return why nothing can be made at `path`, or "". Tries it: permissions are not enough."""
    above = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    if not os.path.exists(above):
        return f"{above} is a link that leads nowhere"
    if not above.is_dir():
        return f"{above} is a file"
    try:
        with tempfile.TemporaryFile(dir=above):
            return ""
    except OSError as error:
        return f"nothing can be written in {above} ({error.strerror})"
