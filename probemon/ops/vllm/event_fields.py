"""Events from a worker's JSON fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probemon.monitor.rules import Event
from probemon.ops.judges.judge_desk import Verdict


def event_of(fields: Mapping[str, Any]) -> Event:
    """Return the event. Models with memories are not watched in vLLM."""
    verdict = fields.get("verdict")
    return Event(
        **{
            **fields,
            "path": tuple(fields["path"]),
            "reading": (),
            "verdict": None if verdict is None else Verdict(**verdict),
        }
    )
