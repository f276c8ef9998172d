"""The files of the web page."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".json": "application/json",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True)
class PageFile:
    """A file as it is sent."""

    content: bytes
    content_type: str


def page_files() -> dict[str, PageFile]:
    """Return the files by name; no others are served. Names are unique over both folders."""
    folders = files("probemon.util") / "page_code", files("probemon.ops.server") / "page"
    return {
        entry.name: PageFile(entry.read_bytes(), _TYPES[entry.name[entry.name.rindex(".") :]])
        for folder in folders
        for entry in folder.iterdir()
        if entry.is_file() and not entry.name.startswith(".")
    }
