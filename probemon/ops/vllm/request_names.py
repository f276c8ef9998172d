"""Names of requests: vLLM adds eight random characters to an id.

name_of("1_chatcmpl-1-0a1b2c3d")          # "1_chatcmpl-1": the second of several answers
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_RANDOM = re.compile(r"-[0-9a-f]{8}\Z")


def name_of(request: str) -> str:
    """Return an id without vLLM's characters."""
    return _RANDOM.sub("", request)


def names_of_output(request: str, index: int, n_outputs: int) -> tuple[str, ...]:
    """Return the names that an answer may have, likeliest first."""
    indexed_name = f"{index}_{request}"
    return (indexed_name,) if n_outputs > 1 else (request, indexed_name)


def names_of_request(reply: str, *, chat: bool, n_prompts: int, n: int) -> list[str]:
    """Return the names of the choices of a request whose prompts and answers to each, `n`, are known."""
    names = [reply] if chat else [f"{reply}-{prompt}" for prompt in range(n_prompts)]
    return names if n == 1 else [f"{i}_{name}" for name in names for i in range(n)]


def place_of(reply: str, name: str) -> tuple[int, int] | None:
    """Return the prompt and the answer to it that a name is of, in a reply; None if it is of another reply."""
    found = re.fullmatch(rf"(?:(\d+)_)?{re.escape(reply)}(?:-(\d+))?", name)
    return None if found is None else (int(found[2] or 0), int(found[1] or 0))


def names_of_choices(reply: str, kind: str, n_choices: int) -> Iterator[list[str]]:
    """Yield the names that a reply's choices may have, likeliest first. `kind`: its `object`.

    A completion does not say how many prompts and answers to each it has.
    """
    indices = range(n_choices)
    if kind != "text_completion":
        yield [reply] if n_choices == 1 else [f"{i}_{reply}" for i in indices]
        return
    yield [f"{reply}-{i}" for i in indices]
    for n in range(n_choices, 1, -1):
        if n_choices % n == 0:
            yield [f"{i % n}_{reply}-{i // n}" for i in indices]
