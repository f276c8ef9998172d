"""A stated date for chat templates instead of today's, for reproducible files.

    source = with_stated_date(template)
    tokenizer.apply_chat_template(chat, chat_template=source, **date_parts(parse_date("2025-01-01")))

transformers passes templates only its own function of the date, so a macro of that name replaces it.
"""

from __future__ import annotations

import string
from datetime import date, datetime
from typing import Any

from probemon.errors import ConfigError

CHAT_DATE = "2025-01-01"  # the default for files
_READS = "strftime_now"
_PARTS = "probemon_date_parts"
_MACRO = (
    "{% macro " + _READS + "(format) %}"
    "{% set written = namespace(parts=[]) %}"
    "{% for piece in format.split('%%') %}"
    "{% set now = namespace(text=piece) %}"
    "{% for directive, value in " + _PARTS + ".items() if directive in piece %}"
    "{% set now.text = now.text.replace(directive, value) %}"
    "{% endfor %}"
    "{% set written.parts = written.parts + [now.text] %}"
    "{% endfor %}"
    "{{ written.parts | join('%') }}"
    "{% endmacro %}\n"  # Jinja drops this line break
)


def parse_date(text: str) -> date:
    """Parse YYYY-MM-DD. Raises `ConfigError`."""
    try:
        return date.fromisoformat(text)
    except (TypeError, ValueError):
        raise ConfigError(f"chat_date is {text!r:.60}: give a day as YYYY-MM-DD, such as {CHAT_DATE}") from None


def may_read_date(source: str) -> bool:
    """True if a template's source mentions today's date."""
    return _READS in source


def with_stated_date(source: str) -> str:
    """Return a template that writes a stated date."""
    return _MACRO + source


def date_parts(day: date) -> dict[str, Any]:
    """Return the variable that such a template reads: strftime directives and their values."""
    at = datetime(day.year, day.month, day.day)
    directives = [f"%{flag}{letter}" for flag in ("-", "") for letter in string.ascii_letters]
    return {_PARTS: {directive: written for directive in directives if "%" not in (written := at.strftime(directive))}}
