"""Options of chat templates, such as `enable_thinking`.

check_options({"enable_thinking": False}, template_source, taken=["tools"])
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from probemon.errors import ChatRefused, closest

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser

TEMPLATE_OPTIONS = "chat_template_kwargs"  # in OpenAI-like requests
_FUNCTIONS = ("raise_exception", "strftime_now")  # that transformers gives to templates


def check_options(options: Mapping[str, Any], source: str, taken: Collection[str]) -> None:
    """Raise `ChatRefused` for an option of a `taken` name, or that the template of this source never reads."""
    if not options:
        return
    read = _variables(source) - {*taken}
    for name in options:
        part = f"{TEMPLATE_OPTIONS}.{name:.60}"
        if name in taken or name in _FUNCTIONS:
            raise ChatRefused(f"{part} is set by the server itself: leave it out", None, part)
        if name not in read:
            known = f"it reads {', '.join(sorted(read))}" if read else "it reads none"
            raise ChatRefused(
                f"the chat template never reads {part}{closest(name, read)}: leave it out ({known})", None, part
            )


@lru_cache(maxsize=32)
def _variables(source: str) -> frozenset[str]:
    """Return the variables that a template reads from outside."""
    from jinja2 import Environment, TemplateSyntaxError, meta
    from jinja2.ext import Extension

    class GenerationBlock(Extension):
        """The block that transformers knows besides."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> Node | list[Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = Environment(extensions=[GenerationBlock, "jinja2.ext.loopcontrols"])
    try:
        found = meta.find_undeclared_variables(environment.parse(source))
    except TemplateSyntaxError as error:
        raise ChatRefused(f"the chat template is not valid: {error}") from error
    return frozenset(found - {*environment.globals, *_FUNCTIONS})
