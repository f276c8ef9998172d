"""Suggests folders of similar names for a path that does not exist.

near_folders("probes/wordnet-smollm", "manifest.json")         # ["probes/wordnet-smollm2-135m"]
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

_MOST_LOOKED_AT = 1000


def folders_with(above: Path, marker: str) -> list[str]:
    """Return the sorted names of folders in `above` with a file `marker`."""
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
    """Return the three names nearest to `path`: siblings with a file `marker`, or of `names`."""
    wanted = Path(path)
    siblings = folders_with(wanted.parent, marker)
    near = difflib.get_close_matches(wanted.name, {*siblings, *names}, n=3, cutoff=0.6)
    return [str(wanted.parent / name) if name in siblings else name for name in near]


def is_path(text: str) -> bool:
    """True if a text must be a path, since hub names never look so."""
    return text.startswith((".", "~", "/", "\\")) or text.endswith("/") or text.count("/") > 1 or "\\" in text
