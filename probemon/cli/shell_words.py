"""Translates errors into shell options, and suggests commands.

in_shell("overwrite it (overwrite=True)")            # "overwrite it (--overwrite)"
meant("No such command 'find'.", "probemon")         # "did you mean 'probemon concepts'?"
"""

from __future__ import annotations

import re

_ARGUMENT = re.compile(r"\b(overwrite|strict|generate)=(True|N|False)\b")
_FORMS = {"True": "--{}", "False": "--no-{}", "N": "--{} N"}
_COMMAND = re.compile(r"No such command '([^']*)'")
_OPTION = re.compile(r"No such option:? '?(--[\w-]+)")
_COMMANDS = {
    "compare": "diff",
    "convert": "import",
    "evaluate": "analyze",
    "find": "concepts",
    "generate": "watch",
    "info": "inspect",
    "list": "concepts",
    "run": "watch",
    "score": "analyze",
    "search": "concepts",
    "show": "inspect",
}
_OPTIONS = {("quantize", "--out"): "OUT is the second argument: probemon quantize PACK OUT"}


def in_shell(message: str) -> str:
    """Replace Python arguments in a message by options."""
    return _ARGUMENT.sub(lambda match: _FORMS[match[2]].format(match[1]), message)


def meant(message: str, command: str) -> str:
    """Return a suggestion for an unknown command or option, or ""."""
    if (wrong := _COMMAND.search(message)) and command == "probemon" and wrong[1] in _COMMANDS:
        return f"did you mean 'probemon {_COMMANDS[wrong[1]]}'?"
    wrong = _OPTION.search(message)
    return _OPTIONS.get((command.rpartition(" ")[2], wrong[1]), "") if wrong else ""
