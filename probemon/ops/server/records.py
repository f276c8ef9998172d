"""The newest requests with their answers."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import Any

from probemon.ops.server.limits import Limits

_BEGINNING = 200  # characters


class Record:
    """One request, its size in bytes, and whether it is running.

    Once ended it is kept as JSON bytes: objects would take several times as much.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        self.content: dict[str, Any] = content
        self.n_bytes, self.running, self._ended = len(json.dumps(content)), True, b""

    def end(self) -> None:
        self._ended, shortened = json.dumps(self.content).encode(), self.shortened()
        self.content, self.n_bytes, self.running = shortened, len(self._ended), False

    def whole(self) -> bytes:
        return json.dumps(self.content).encode() if self.running else self._ended

    def shortened(self) -> dict[str, Any]:
        """Return an entry for a list."""
        if not self.running:
            return self.content
        return {
            "created": self.content["created"],
            "kind": self.content["kind"],
            "beginning": _beginning(self.content),
            "finish_reasons": [choice["finish_reason"] for choice in self.content["choices"]],
        }


class Records:
    """Drops the oldest ended requests beyond `kept_requests` or `kept_requests_bytes`."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._lock = limits, threading.Lock()
        self._records: OrderedDict[str, Record] = OrderedDict()

    def begin(self, request_id: str, content: dict[str, Any]) -> Record:
        """Keep a new request."""
        record = Record(content)
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

    def get(self, request_id: str) -> bytes | None:
        """Return a record as JSON."""
        with self._lock:
            record = self._records.get(request_id)
            return None if record is None else record.whole()

    def list(self) -> list[dict[str, Any]]:
        """Return shortened records, newest first."""
        with self._lock:
            return [
                {"request": name, "running": record.running, **record.shortened()}
                for name, record in reversed(self._records.items())
            ]

    def _forget(self) -> None:
        n_bytes = sum(record.n_bytes for record in self._records.values())
        ended = [name for name, record in self._records.items() if not record.running]
        for name in ended:
            if len(self._records) <= self._limits.kept_requests and n_bytes <= self._limits.kept_requests_bytes:
                return
            n_bytes -= self._records.pop(name).n_bytes


def _beginning(content: dict[str, Any]) -> str:
    if content["kind"] == "completion":
        prompt = content["prompt"]
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    else:
        users = [message for message in content["messages"] if message["role"] == "user"]
        text = (users or content["messages"])[-1]["content"]
    return str(text)[:_BEGINNING]
