"""Finds the folder of a pack by name.

find_folder("probes/mine")        # itself
find_folder("demo")               # the bundled default pack
find_folder("org/name")           # None: ask the hub
find_folder("probes/mien")        # PackError: no such folder; did you mean 'probes/mine'?
"""

from __future__ import annotations

import os
from pathlib import Path

from probemon.errors import PackError
from probemon.packs.manifest import CONCEPTS, MANIFEST
from probemon.util.checks import shown
from probemon.util.near_folders import folders_with, is_path, near_folders

DEFAULT = "wordnet-smollm2-135m"
DEMO = "demo"  # alias of the default pack
DEMO_CONCEPTS = "concepts-smollm2-135m"  # the library, fitted to the same model
_PACKAGE = Path(__file__).parents[1]


def shipped_packs() -> dict[str, Path]:
    """Return the folders of bundled packs by name: the demo's in a wheel, all in a checkout."""
    above = _PACKAGE / "probes"  # in a wheel
    if not above.is_dir():
        above = _PACKAGE.parent / "probes"
        if not (_PACKAGE.parent / "setup.py").is_file():  # not a checkout
            return {}
    return {name: above / name for name in folders_with(above, CONCEPTS)}


def find_folder(name: str | os.PathLike[str]) -> Path | None:
    """Return a pack's folder, None for a hub name. Raises `PackError`."""
    if not isinstance(name, str | os.PathLike):
        raise PackError(f"the pack is {shown(name)}: give a folder, a name on the hub such as 'org/name', or 'demo'")
    name = os.fspath(name)
    shipped = shipped_packs()
    if name == DEMO:
        if DEFAULT not in shipped:
            raise PackError(f"the pack {DEFAULT} is not in this installation of probemon: install probemon again")
        return shipped[DEFAULT]
    if os.path.isdir(name):
        return Path(name)
    if name in shipped:
        return shipped[name]
    if not name:
        raise PackError("the name of the pack is empty: give a folder, a name on the hub such as 'org/name', or 'demo'")
    if os.path.isfile(name):
        above = Path(name).parent
        pack = f"the pack, {above}" if (above / CONCEPTS).is_file() else "a pack"
        raise PackError(f"{name} is a file: give the folder of {pack}")
    if "/" not in name or is_path(name) or folders_with(Path(name).parent, CONCEPTS):
        raise PackError(
            f"no such folder: {name[:300]!r}{hint(name) or '; give a folder, or a name on the hub: org/name'}"
        )
    return None


def is_pack(name: str) -> bool:
    """True if a name is a pack's folder or a bundled pack."""
    folder = Path(name)
    if not folder.is_dir():
        return name in shipped_packs()
    return (folder / MANIFEST).is_file() and (folder / CONCEPTS).is_file()


def hint(name: str) -> str:
    """Return "; did you mean ...?" for similar names, or ""."""
    near = near_folders(name, CONCEPTS, shipped_packs())
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
