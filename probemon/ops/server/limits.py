"""Limits of a server: how much one request may ask for, and how many there may be.

limits = Limits(max_tokens=512, queue=8)
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from probemon.util.checks import check_count


@dataclass(frozen=True)
class Limits:
    """Every limit is a whole number, 1 or more. Raises `ConfigError`.

    - `body_bytes`: of a request
    - `max_tokens`: of an answer; also what it gets where it asks for no number
    - `choices`: answers of one request, over all its prompts
    - `messages`: of a chat
    - `stops`: stop strings of a request
    - `names`: concepts that a request names, and rules, each
    - `top_k`: concepts told of a token
    - `at_once`: requests that are answered at the same time
    - `queue`: requests that wait; what comes then is answered 429
    - `subscribers`: of the stream of events
    - `kept_events`, `kept_events_bytes`: for subscribers; who is further behind loses the oldest
    - `kept_requests`, `kept_requests_bytes`: for permanent links
    - `waiting_bytes`: of an answer whose client does not read, before its generation waits
    - `stalled_seconds`: that it then waits before it ends
    """

    body_bytes: int = 1 << 20
    max_tokens: int = 1024
    choices: int = 16
    messages: int = 1000
    stops: int = 16
    names: int = 64
    top_k: int = 50
    at_once: int = 2
    queue: int = 32
    subscribers: int = 64
    kept_events: int = 4096
    kept_events_bytes: int = 8 << 20
    kept_requests: int = 100
    kept_requests_bytes: int = 64 << 20
    waiting_bytes: int = 1 << 20
    stalled_seconds: int = 30

    def __post_init__(self) -> None:
        for field in fields(self):
            check_count(field.name, getattr(self, field.name), least=1)
