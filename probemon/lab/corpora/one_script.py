"""Modules of JavaScript as one script, for a page that is one file: opened from a disk, it may load no module.

    script = one_script(folder / "page.js", shared)      # what page.js imports lies in `shared`, flat

Only one form of import and export is known, and any other is refused: `import { a, b } from "./words.js";` on a line of
its own, and `export` before a declaration at the beginning of a line. All modules share one scope then, so that a name
declared in two of them is an error in the browser, and tests open the page in one.
"""

from __future__ import annotations

import re
from importlib.resources.abc import Traversable

from probemon.errors import ConfigError

_IMPORT = re.compile(r'^import \{ [\w$, ]+ \} from "\./([\w.-]+\.js)";\n', re.M)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.M)
_OTHER = re.compile(r"^\s*(?:import|export)\b.*", re.M)


def one_script(entry: Traversable, shared: Traversable) -> str:
    """Return the text of a module after those of all modules that it imports, each once. Raises `ConfigError`."""
    pieces = dict[str, str]()

    def add(module: Traversable) -> None:
        text = module.read_text(encoding="utf-8")
        pieces[module.name] = ""  # of modules that import each other, the one entered first comes last
        for name in _IMPORT.findall(text):
            if name not in pieces:
                add(shared / name)
        del pieces[module.name]
        text = _EXPORT.sub("", _IMPORT.sub("", text))
        if other := _OTHER.search(text):
            raise ConfigError(
                f"{module.name}: {other[0].strip()!r} cannot go into one script: write it as one_script says"
            )
        pieces[module.name] = text

    add(entry)
    return '"use strict";\n' + "\n".join(pieces.values())
