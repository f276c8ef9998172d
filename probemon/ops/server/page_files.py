"""The files of the page and of what it shares with others, which come with the package and hold nothing of anybody's.

files = page_files()                       # {"index.html": PageFile(content, content_type), ...}
"""

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
    """Return every file by its name: nothing else can be asked for. No name stands in both folders: a test looks."""
    folders = files("probemon.util") / "page_code", files("probemon.ops.server") / "page"
    return {
        entry.name: PageFile(entry.read_bytes(), _TYPES[entry.name[entry.name.rindex(".") :]])
        for folder in folders
        for entry in folder.iterdir()
        if entry.is_file() and not entry.name.startswith(".")
    }
