"""What took long is kept: a file for each call, written when it is done, so that a study that was stopped goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from probemon.core.files import write_text_atomically


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
