"""HTML from templates: macros in files `*.html.j2` next to the module that calls them.

    page = macros("packs/pack.html.j2")
    page.levels(rows)                       # safe HTML, also for another macro

Values are escaped and made harmless, except line ends and tabs. Filters: `clip`, `harmless`, `fmt` (Python's `format`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

from probemon.util.harmless_text import clip, harmless


@cache
def macros(path: str) -> Any:
    """Return a template's macros; `path` is relative to `probemon/`."""
    return template_environment().get_template(path).module


@cache
def template_environment() -> Any:
    """Return the shared environment. Jinja2 is slow to import."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return harmless(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value

    environment = Environment(
        loader=PackageLoader("probemon", ""), autoescape=True, undefined=StrictUndefined, finalize=shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(clip=clip, harmless=harmless, fmt=format)
    return environment
