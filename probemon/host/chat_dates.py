"""The date that a chat template writes: today's, or one that is stated, so that files made on two days are the same.

    source = with_stated_date(template)                       # its strftime_now() writes the parts of a date
    tokenizer.apply_chat_template(chat, chat_template=source, **date_parts(parse_date("2025-01-01")))

transformers gives templates a function of today's date and replaces every other function by a text. So the stated date
is written by a macro of the same name.
"""

from __future__ import annotations

import string
from datetime import date, datetime
from typing import Any

from probemon.errors import ConfigError

CHAT_DATE = "2025-01-01"  # of files whose maker states none
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
    "{% endmacro %}\n"  # Jinja leaves out this line break, and the template begins on a line of its own
)


def parse_date(text: str) -> date:
    """Return the day of a text such as "2025-01-01". Raises `ConfigError`."""
    try:
        return date.fromisoformat(text)
    except (TypeError, ValueError):
        raise ConfigError(f"chat_date is {text!r:.60}: give a day as YYYY-MM-DD, such as {CHAT_DATE}") from None


def may_read_date(source: str) -> bool:
    """Return whether a template's source names the function of today's date."""
    return _READS in source


def with_stated_date(source: str) -> str:
    """Return a template that takes the parts of a date in place of today's."""
    return _MACRO + source


def date_parts(day: date) -> dict[str, Any]:
    """Return the variable that a template `with_stated_date` reads: each directive of strftime and what it writes."""
    at = datetime(day.year, day.month, day.day)
    directives = [f"%{flag}{letter}" for flag in ("-", "") for letter in string.ascii_letters]
    return {_PARTS: {directive: said for directive in directives if "%" not in (said := at.strftime(directive))}}
