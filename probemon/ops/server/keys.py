"""API keys of a server: what each may do, and how much.

alice    kJ3v...  ask           per_minute=60 places=4
reviewer 9dQe...  ask,read
scraper  x0Lm...  metrics
"""

from __future__ import annotations

import hmac
import re
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from probemon.errors import ConfigError, RequestRefused

ROLES = ("ask", "read", "metrics", "admin")
_LEAST_CHARACTERS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LIMIT = re.compile(r"(per_minute|places)=([1-9][0-9]{0,5})")
_MINUTE = 60.0


@dataclass(frozen=True)
class Key:
    """A key that clients give.

    - `roles`: `"ask"`: ask, and read the answers of this key; `"read"`: read those of all; `"metrics"`; `"admin"`: all
      of these, reload the deployment file and delete requests
    - `per_minute`: answers asked for in 60 seconds; `places`: requests that run or wait, and streams of events, at a
      time; None: no limit
    """

    secret: str = field(repr=False)
    name: str = ""
    roles: frozenset[str] = frozenset(ROLES)
    per_minute: int | None = None
    places: int | None = None

    def may(self, *roles: str) -> bool:
        """True if the key has one of the roles."""
        return "admin" in self.roles or not self.roles.isdisjoint(roles)

    @property
    def reads(self) -> str | None:
        """Name of the key whose requests this one may read; None: those of all."""
        return None if self.may("read") else self.name


NOBODY = Key("")  # of requests to a server without keys
STRANGER = Key("", roles=frozenset())  # of requests without a key to open routes of a server with keys


def check_secret(secret: str) -> str:
    """Return the key. Raises `ConfigError` if it is short, or a header cannot hold it."""
    if len(secret) < _LEAST_CHARACTERS or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise ConfigError(
            f"the API key has {len(secret)} characters, or some that a header cannot hold: give {_LEAST_CHARACTERS} or"
            " more, letters, digits and marks, without spaces"
        )
    return secret


def key_of(keys: Collection[Key], credentials: str) -> Key | None:
    """Return the key with these credentials; the time that it takes does not tell how much of them is right."""
    given = credentials.encode()
    found = [key for key in keys if hmac.compare_digest(given, key.secret.encode())]
    return found[0] if found else None


def read_keys(text: str, source: str) -> tuple[Key, ...]:
    """Return the keys of a file: one key alone, or a line `NAME KEY ROLE,ROLE [per_minute=N] [places=N]` for each.

    Empty lines and those that begin with # are ignored. Raises `ConfigError`, with the line and without the key.
    """
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    lines = [(number, words) for number, words in lines if words and not words[0].startswith("#")]
    if len(lines) == 1 and len(lines[0][1]) == 1:
        return (Key(check_secret(lines[0][1][0])),)
    keys: list[Key] = []
    for number, words in lines:
        try:
            key = _key_of_line(words)
            if any(other.name == key.name or other.secret == key.secret for other in keys):
                raise ConfigError("the name or the key stands above already: give each once")
        except ConfigError as error:
            raise ConfigError(f"{source}, line {number}: {error}") from None
        keys.append(key)
    if not keys:
        raise ConfigError(f"{source} has no key: give a line NAME KEY ROLE,ROLE for each, or one key alone")
    return tuple(keys)


def _key_of_line(words: list[str]) -> Key:
    if len(words) < 3:
        raise ConfigError("give NAME KEY ROLE,ROLE, with spaces between them")
    name, secret, roles, *limits = words
    if not _NAME.fullmatch(name):
        raise ConfigError("the name may have letters, digits, dots, - and _, at most 64")
    given = roles.split(",")
    if not {*given} <= {*ROLES}:  # what stands there may be a key, and is not shown
        raise ConfigError(f"the third word has a role that is none: roles are {', '.join(ROLES)}")
    numbers: dict[str, int] = {}
    for limit in limits:
        matched = _LIMIT.fullmatch(limit)
        if matched is None or matched[1] in numbers:
            raise ConfigError(
                "a word after the roles is no limit: give per_minute=N or places=N, each once, from 1 to 999999"
            )
        numbers[matched[1]] = int(matched[2])
    return Key(check_secret(secret), name, frozenset(given), **numbers)


class Quotas:
    """Counts what each key uses. Not thread-safe."""

    def __init__(self) -> None:
        self._asked: dict[str, deque[float]] = {}

    def take(self, key: Key, n_answers: int) -> None:
        """Count answers that `key` asks for. Raises `RequestRefused` beyond its rate."""
        if key.per_minute is None:
            return
        if n_answers > key.per_minute:
            raise RequestRefused(f"key {key.name} may ask for {key.per_minute} answers a minute: ask for fewer at once")
        now, asked = time.monotonic(), self._asked.setdefault(key.name, deque())
        while asked and asked[0] <= now - _MINUTE:
            asked.popleft()
        if len(asked) + n_answers > key.per_minute:
            raise RequestRefused(
                f"key {key.name} asked for {len(asked)} answers in a minute, and may for {key.per_minute}: try later",
                status=429,
                code="key_rate_limited",
                retry_after_seconds=asked[len(asked) + n_answers - key.per_minute - 1] + _MINUTE - now,
            )
        asked.extend([now] * n_answers)


def check_places(key: Key, names_in_use: Iterable[str], what: str) -> None:
    """Raise `RequestRefused` if the keys in use are of `key` as often as it may."""
    if key.places is not None and (n := Counter(names_in_use)[key.name]) >= key.places:
        raise RequestRefused(
            f"{n} {what} of key {key.name} are open, as many as may: try again later",
            status=429,
            code="key_places_full",
        )
