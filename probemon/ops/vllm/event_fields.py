"""Events as the worker tells them: fields of JSON into an `Event`.

event = event_of(message.event)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from probemon.monitor.rules import Event
from probemon.ops.judges.judge_desk import Verdict


def event_of(fields: Mapping[str, Any]) -> Event:
    """Return an event of its fields. What memories read is not told: such hosts are not watched in vLLM."""
    verdict = fields.get("verdict")
    return Event(
        **{
            **fields,
            "path": tuple(fields["path"]),
            "reading": (),
            "verdict": None if verdict is None else Verdict(**verdict),
        }
    )
