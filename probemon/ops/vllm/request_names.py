"""Which request an id of vLLM's own is of: it adds eight characters at random to the one that it was given.

name_of("chatcmpl-1-0a1b2c3d")            # "chatcmpl-1"
name_of("1_chatcmpl-1-0a1b2c3d")          # "1_chatcmpl-1": the second of several answers to one request
names_of_output("chatcmpl-1", 1, 2)       # what the second of two answers may be called, likeliest first
names_of_choices("cmpl-1", "text_completion", 2)        # what the choices of a reply of the server may be, together
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_RANDOM = re.compile(r"-[0-9a-f]{8}\Z")


def name_of(request: str) -> str:
    """Return an id without what vLLM added to it."""
    return _RANDOM.sub("", request)


def names_of_output(request: str, index: int, n_outputs: int) -> tuple[str, ...]:
    """Return the names that an answer of a request may have."""
    own = f"{index}_{request}"
    return (own,) if n_outputs > 1 else (request, own)


def names_of_choices(reply: str, kind: str, n_choices: int) -> Iterator[list[str]]:
    """Yield the names that the choices of a reply may have, likeliest first. `kind`: its `object`.

    A completion may have several prompts, and several answers (`n`) to each: a reply does not say how many of either.
    """
    indices = range(n_choices)
    if kind != "text_completion":
        yield [reply] if n_choices == 1 else [f"{i}_{reply}" for i in indices]
        return
    yield [f"{reply}-{i}" for i in indices]
    for n in range(n_choices, 1, -1):
        if n_choices % n == 0:
            yield [f"{i % n}_{reply}-{i // n}" for i in indices]
