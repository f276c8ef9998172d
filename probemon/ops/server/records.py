"""The newest requests with their answers."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import OrderedDict
from typing import Any

from probemon.ops.server.limits import Limits

_BEGINNING = 200  # characters


class Record:
    """One request of a key, its size in bytes, and whether it is running.

    Once ended it is kept as JSON bytes: objects would take several times as much. `ended_at`: of the monotonic clock.
    """

    def __init__(self, content: dict[str, Any], owner: str) -> None:
        self.content, self.owner = content, owner
        self.n_bytes, self.running, self._ended = len(json.dumps(content)), True, b""
        self.ended_at = 0.0

    def end(self) -> None:
        self._ended, shortened = json.dumps(self.content).encode(), self.shortened()
        self.content, self.n_bytes, self.running = shortened, len(self._ended), False
        self.ended_at = time.monotonic()

    def whole(self) -> bytes:
        return json.dumps(self.content).encode() if self.running else self._ended

    def shortened(self) -> dict[str, Any]:
        """Return an entry for a list."""
        if not self.running:
            return self.content
        return {
            **{name: self.content[name] for name in ("created", "kind", "key") if name in self.content},
            "beginning": _beginning(self.content),
            "finish_reasons": [choice["finish_reason"] for choice in self.content["choices"]],
            "n_events": sum(len(choice["events"]) for choice in self.content["choices"]),
            "stopped_by": next(filter(None, map(_stopped_by, self.content["choices"])), None),
        }


class Records:
    """Drops the oldest ended requests beyond the limits in number, bytes and minutes.

    `reads` of a method: the key whose requests may be read; None: all.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._lock = limits, threading.Lock()
        self._records: OrderedDict[str, Record] = OrderedDict()

    def begin(self, request_id: str, content: dict[str, Any], owner: str = "") -> Record:
        """Keep a new request."""
        record = Record(content, owner)
        with self._lock:
            self._records[request_id] = record
            self._forget()
        return record

    def add(self, record: Record, to: list[Any], entry: Any, n_bytes: int) -> None:
        """Append to a list of a record."""
        with self._lock:
            to.append(entry)
            record.n_bytes += n_bytes

    def add_text(self, record: Record, choice: dict[str, Any], name: str, text: str) -> None:
        """Append to a text of `choice`."""
        with self._lock:
            choice[name] += text
            record.n_bytes += len(text)

    def set(self, record: Record, of: dict[str, Any], values: dict[str, Any]) -> None:
        """Update an object of a record."""
        with self._lock:
            of.update(values)
            record.n_bytes += len(json.dumps(values))

    def end(self, record: Record) -> None:
        """Mark a request as ended."""
        with self._lock:
            record.end()
            self._forget()

    def get(self, request_id: str, reads: str | None = None) -> bytes | None:
        """Return a record as JSON."""
        with self._lock:
            self._forget()
            record = self._records.get(request_id)
            return None if record is None or reads not in (None, record.owner) else record.whole()

    def is_running(self, request_id: str) -> bool:
        """True if a request runs or waits."""
        with self._lock:
            record = self._records.get(request_id)
            return record is not None and record.running

    def delete(self, request_id: str | None) -> list[str]:
        """Drop an ended request, or all of them (None). Returns the names of those dropped."""
        with self._lock:
            names = [name for name, one in self._records.items() if not one.running and request_id in (None, name)]
            for name in names:
                del self._records[name]
        return names

    def list(self, reads: str | None = None) -> list[dict[str, Any]]:
        """Return shortened records, newest first."""
        with self._lock:
            self._forget()
            return [
                {"request": name, "running": record.running, **record.shortened()}
                for name, record in reversed(self._records.items())
                if reads in (None, record.owner)
            ]

    def forget_old(self) -> None:
        """Drop what is older than `kept_minutes`."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        limits, n_bytes = self._limits, sum(record.n_bytes for record in self._records.values())
        oldest = time.monotonic() - 60 * limits.kept_minutes if limits.kept_minutes else -math.inf
        ended = [(name, record) for name, record in self._records.items() if not record.running]
        for name, record in ended:
            is_over = len(self._records) > limits.kept_requests or n_bytes > limits.kept_requests_bytes
            if is_over or record.ended_at <= oldest:
                n_bytes -= self._records.pop(name).n_bytes


def _stopped_by(choice: dict[str, Any]) -> str | None:
    """Return the concept of the rule that stopped an answer, by name."""
    event = (choice["summary"] or {}).get("stopped_by")
    return event and (event["name"] or event["concept"])


def _beginning(content: dict[str, Any]) -> str:
    if content["kind"] == "completion":
        prompt = content["prompt"]
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    else:
        users = [message for message in content["messages"] if message["role"] == "user"]
        text = (users or content["messages"])[-1]["content"]
    return str(text)[:_BEGINNING]
