"""What took long is kept: a file for each call, written when it is done, so that a study that was stopped goes on.

    found = kept(folder / code_mark("probemon/adapters/bem"), "lora-seed-0", learn)

The mark parts what other code learned from what this one would.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probemon.util.files import write_text_atomically
from provenance import ROOT


def code_mark(*measures: str) -> str:
    """Return twelve letters that change with these modules and folders of the repository."""
    hashed = hashlib.sha256()
    for measured in measures:
        path = ROOT / measured
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            hashed.update(file.read_bytes())
    return hashed.hexdigest()[:12]


def kept(folder: Path | None, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `make()` returned when this was called before, or call it now. A folder of None keeps nothing."""
    if folder is None:
        return make()
    file = folder / f"{name.replace(' ', '_').replace(',', '')}.json"
    if file.is_file():
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found
    found = make()
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(file, json.dumps(found, indent=1))
    return found
