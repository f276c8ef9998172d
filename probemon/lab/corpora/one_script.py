"""Joins JavaScript modules into one script: a page opened from a disk cannot load modules.

    script = one_script(folder / "page.js", shared)      # imports are in `shared`, flat

Accepts only `import { a, b } from "./words.js";` on a separate line, and `export` before a declaration. Modules share
one scope.
"""

from __future__ import annotations

import re
from importlib.resources.abc import Traversable

from probemon.errors import ConfigError

_IMPORT = re.compile(r'^import \{ [\w$, ]+ \} from "\./([\w.-]+\.js)";\n', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.M)
_OTHER = re.compile(r"^\s*(?:import|export)\b.*", re.M)


def one_script(entry: Traversable, shared: Traversable) -> str:
    """Return a module's text after all modules that it imports. Raises `ConfigError`."""
    pieces = dict[str, str]()

    def add(module: Traversable) -> None:
        text = module.read_text(encoding="utf-8")
        pieces[module.name] = ""  # in cycles, the first module comes last
        for name in _IMPORT.findall(text):
            if name not in pieces:
                add(shared / name)
        del pieces[module.name]
        text = _EXPORT.sub("", _IMPORT.sub("", text))
        if other := _OTHER.search(text):
            raise ConfigError(f"{module.name}: {other[0].strip()!r} cannot go into one script: see one_script")
        pieces[module.name] = text

    add(entry)
    return '"use strict";\n' + "\n".join(pieces.values())
