"""Which request an id of vLLM's own is of: it adds eight characters at random to the one that it was given.

name_of("chatcmpl-1-0a1b2c3d")            # "chatcmpl-1"
name_of("1_chatcmpl-1-0a1b2c3d")          # "1_chatcmpl-1": the second of several answers to one request
names_of_output("chatcmpl-1", 1, 2)       # what the second of two answers may be called, likeliest first
"""

from __future__ import annotations

import re

_RANDOM = re.compile(r"-[0-9a-f]{8}\Z")


def name_of(request: str) -> str:
    """Return an id without what vLLM added to it."""
    return _RANDOM.sub("", request)


def names_of_output(request: str, index: int, n_outputs: int) -> tuple[str, ...]:
    """Return the names that an answer of a request may have."""
    own = f"{index}_{request}"
    return (own,) if n_outputs > 1 else (request, own)
