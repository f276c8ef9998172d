"""Counts of a server since it began."""

from __future__ import annotations

import threading
from collections import Counter

from probemon.ops.server.answering import Ending


class Counts:
    """`requests`: by outcome; `answers`: by finish reason; `tokens`: prompt, generated, unseen."""

    def __init__(self) -> None:
        self.requests, self.answers, self.tokens = Counter[str](), Counter[str](), Counter[str]()
        self.seconds = 0.0  # of answered requests
        self._lock = threading.Lock()

    @property
    def mean_seconds(self) -> float:
        """Return the mean duration of a request."""
        return self.seconds / max(1, self.requests["answered"])

    def told(self, n_prompt_tokens: int, ending: Ending) -> None:
        """Count an answer."""
        with self._lock:
            self.answers[ending.finish_reason] += 1
            self.tokens.update(prompt=n_prompt_tokens, generated=ending.n_tokens, unseen=ending.n_unseen)

    def failed(self) -> None:
        """Count an answer that ended in an error."""
        with self._lock:
            self.answers["error"] += 1

    def ended(self, outcome: str, seconds: float) -> None:
        """Count an ended request."""
        with self._lock:
            self.requests[outcome] += 1
            self.seconds += seconds if outcome == "answered" else 0.0
