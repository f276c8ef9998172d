"""Counts: what a server did since it began.

counts = Counts()
counts.told(n_prompt_tokens, ending)
counts.ended("answered", seconds=1.5)
"""

from __future__ import annotations

import threading
from collections import Counter

from probemon.ops.server.answering import Ending


class Counts:
    """`requests`: by what became of them; `answers`: by finish reason; `tokens`: prompt, generated, unseen."""

    def __init__(self) -> None:
        self.requests, self.answers, self.tokens = Counter[str](), Counter[str](), Counter[str]()
        self.seconds = 0.0  # that requests took, over all that ended
        self._lock = threading.Lock()

    @property
    def mean_seconds(self) -> float:
        """Return how long a request took."""
        return self.seconds / max(1, self.requests["answered"])

    def told(self, n_prompt_tokens: int, ending: Ending) -> None:
        """Count an answer."""
        with self._lock:
            self.answers[ending.finish_reason] += 1
            self.tokens.update(prompt=n_prompt_tokens, generated=ending.n_tokens, unseen=ending.n_unseen)

    def failed(self) -> None:
        """Count an answer that an error ended; what it had generated is not counted."""
        with self._lock:
            self.answers["error"] += 1

    def ended(self, outcome: str, seconds: float) -> None:
        """Count a request."""
        with self._lock:
            self.requests[outcome] += 1
            self.seconds += seconds if outcome == "answered" else 0.0
