"""Limits of a server."""

from __future__ import annotations

from dataclasses import dataclass, fields

from probemon.util.checks import check_count

_MAY_BE_0 = ("kept_requests", "kept_minutes")


@dataclass(frozen=True)
class Limits:
    """Every limit is an integer of at least 1, some of at least 0. Raises `ConfigError`.

    - `max_tokens`: of an answer; also its default
    - `choices`: answers of one request
    - `messages`: of a chat
    - `stops`: stop strings
    - `names`: concepts; also rules
    - `top_k`: concepts per token
    - `at_once`: requests answered at the same time
    - `queue`: waiting requests; further ones get 429
    - `kept_events`, `kept_events_bytes`: for subscribers
    - `kept_requests`, `kept_requests_bytes`: for permanent links; 0: none once it has ended, and no event for a reader
      that comes later
    - `kept_minutes`: after which requests and events are dropped; 0: never for their age
    - `waiting_bytes`: unread, before generation waits
    - `stalled_seconds`: of that wait
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
    kept_minutes: int = 0
    waiting_bytes: int = 1 << 20
    stalled_seconds: int = 30

    def __post_init__(self) -> None:
        for field in fields(self):
            check_count(field.name, getattr(self, field.name), least=0 if field.name in _MAY_BE_0 else 1)
