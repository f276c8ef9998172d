"""Which folder the name of a pack means: one that is here, or that of a pack that comes with probemon.

find_folder("probes/mine")        # itself
find_folder("demo")               # the default pack's, from any folder; so does its bare name
find_folder("org/name")           # None: ask the hub
find_folder("probes/mien")        # PackError: no such folder; did you mean 'probes/mine'?

The repository has one copy of each pack, in `probes/`. `setup.py` puts the default one into wheels.
"""

from __future__ import annotations

import os
from pathlib import Path

from probemon.errors import PackError
from probemon.packs.manifest import CONCEPTS, MANIFEST
from probemon.util.checks import shown
from probemon.util.near_folders import folders_with, is_path, near_folders

DEFAULT = "wordnet-smollm2-135m"
DEMO = "demo"  # the default pack by the name of the model that it was made for
_PACKAGE = Path(__file__).parents[1]


def shipped_packs() -> dict[str, Path]:
    """Return the folders of the packs that come with probemon, by name: one in a wheel, all in a checkout."""
    above = _PACKAGE / "probes"  # of a wheel
    if not above.is_dir():
        above = _PACKAGE.parent / "probes"
        if not (_PACKAGE.parent / "setup.py").is_file():  # no checkout, but somebody else's folder
            return {}
    return {name: above / name for name in folders_with(above, CONCEPTS)}


def find_folder(name: str | os.PathLike[str]) -> Path | None:
    """Return the folder of a pack, None for a name that only the hub can have. Raises `PackError`."""
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
    """Whether a name is that of a folder with a pack in it, or of a pack that comes with probemon."""
    folder = Path(name)
    if not folder.is_dir():
        return name in shipped_packs()
    return (folder / MANIFEST).is_file() and (folder / CONCEPTS).is_file()


def hint(name: str) -> str:
    """Return which packs have a name like this one, as the end of a message; "" where none has."""
    near = near_folders(name, CONCEPTS, shipped_packs())
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
