"""What people say at a shell: errors in its words, and the commands and options that were meant.

in_shell("overwrite it (overwrite=True)")            # "overwrite it (--overwrite)"
in_shell("leave it out (background=False)")          # "leave it out (--no-background)"
meant("No such command 'find'.", "probemon")         # "did you mean 'probemon concepts'?"
"""

from __future__ import annotations

import re

# Arguments in Python that are options of the same name here.
_ARGUMENT = re.compile(r"\b(overwrite|strict|generate|background)=(True|N|False)\b")
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
    """Return the message of an error with the options of a command in the place of arguments in Python."""
    return _ARGUMENT.sub(lambda match: _FORMS[match[2]].format(match[1]), message)


def meant(message: str, command: str) -> str:
    """Return what may have been meant by a command or an option that is not there, as a question; "" if unknown."""
    if (wrong := _COMMAND.search(message)) and command == "probemon" and wrong[1] in _COMMANDS:
        return f"did you mean 'probemon {_COMMANDS[wrong[1]]}'?"
    wrong = _OPTION.search(message)
    return _OPTIONS.get((command.rpartition(" ")[2], wrong[1]), "") if wrong else ""
