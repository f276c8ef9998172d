"""What a path that does not exist may have meant: folders beside it of a like name.

near_folders("probes/wordnet-smollm", "manifest.json")         # ["probes/wordnet-smollm2-135m"]
near_folders("dme", "config.json", ["demo"])                   # ["demo"]
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_MOST_LOOKED_AT = 1000  # a name beyond them is not offered


def folders_with(above: Path, marker: str) -> list[str]:
    """Return the names of the folders in `above` that hold a file `marker`; none where it cannot be read."""
    names: list[str] = []
    try:
        for folder in above.iterdir():
            if len(names) == _MOST_LOOKED_AT:
                break
            if (folder / marker).is_file():
                names.append(folder.name)
    except (OSError, ValueError):
        return []
    return sorted(names)


def near_folders(path: str, marker: str, names: Iterable[str] = ()) -> list[str]:
    """Return at most three folders that hold a file `marker` beside `path`, or of `names`, the nearest first."""
    wanted = Path(path)
    beside = folders_with(wanted.parent, marker)
    near = difflib.get_close_matches(wanted.name, {*beside, *names}, n=3, cutoff=0.6)
    return [str(wanted.parent / name) if name in beside else name for name in near]


def is_path(text: str) -> bool:
    """Whether a text that is no folder can only have been meant as a path, since the hub has no such names."""
    return text.startswith((".", "~", "/", "\\")) or text.endswith("/") or text.count("/") > 1 or "\\" in text
