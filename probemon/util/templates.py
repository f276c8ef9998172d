"""HTML from templates: macros in files `*.html.j2`, which lie beside the module that calls them.

    page = macros("packs/pack.html.j2")
    page.levels(rows)                       # safe HTML, which another macro may be given

Every value is escaped, and a text made harmless first, but for line ends and tabs (`harmless("\\n")`: but for line
ends). A template knows `clip` and `fmt`, which is Python's `format`; a name that nobody gave it is an error.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from probemon.util.harmless_text import clip, harmless


@cache
def macros(path: str) -> Any:
    """Return the macros of a template as functions; `path` begins below `probemon/`."""
    return template_environment().get_template(path).module


@cache
def template_environment() -> Any:
    """Return what all templates share. Jinja2 is imported here: it takes longer than most modules of ours."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> Any:
        return harmless(value, keep="\n\t") if isinstance(value, str) and not isinstance(value, Markup) else value

    made = Environment(
        loader=PackageLoader("probemon", ""), autoescape=True, undefined=StrictUndefined, finalize=shown,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters.update(clip=clip, harmless=harmless, fmt=format)
    return made
