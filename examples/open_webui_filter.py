"""
title: probemon
description: Shows the concepts of an answer below it, from a model that `probemon serve` answers for.
required_open_webui_version: 0.5.17
"""

# A filter function of Open WebUI: paste it under Admin Panel > Functions, and turn it on for the models of a
# `probemon serve` that is set up as an OpenAI connection. It asks for concepts, says in the status line above the
# answer what is leading and which rules were met, and ends with a table. Messages are not changed while they come.

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from pydantic import BaseModel, Field

Emitter = Callable[[dict[str, Any]], Awaitable[None]]
N_ANSWERS = 256  # whose concepts are kept until their table is asked for


class Filter:
    """What Open WebUI makes of the file; it calls `inlet`, `stream` and `outlet`."""

    class Valves(BaseModel):
        """Settings, which Open WebUI shows as a form."""

        concepts: str = Field("", description="Only these, and what lies below them; separated by commas. Empty: all.")
        stop_on: str = Field("", description="Concepts at which the answer ends; separated by commas.")
        hold: bool = Field(False, description="Show text only once its score is known, so that a stop hides it.")
        n_leading: int = Field(5, ge=1, le=20, description="Rows of the table below an answer.")

    def __init__(self) -> None:
        self.valves = self.Valves()
        self._summaries: dict[str, dict[str, Any]] = {}

    def inlet(self, body: dict[str, Any]) -> dict[str, Any]:
        """Ask for concepts with every request."""
        asked: dict[str, Any] = {"hold": self.valves.hold}
        if concepts := _names(self.valves.concepts):
            asked["concepts"] = concepts
        asked["rules"] = [{"concept": concept, "action": "stop"} for concept in _names(self.valves.stop_on)]
        return {**body, "probemon": asked}

    async def stream(
        self,
        event: dict[str, Any],
        __event_emitter__: Emitter | None = None,
        __metadata__: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Read the concepts of a chunk; the chunk goes on without them."""
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            told, summary = delta.pop("probemon", None) or {}, delta.pop("probemon_summary", None)
            for met in told.get("events", ()):
                await _say(__event_emitter__, rule_said(met), False)
            if summary is not None:
                self._summaries[(__metadata__ or {}).get("message_id", "")] = summary
                while len(self._summaries) > N_ANSWERS:
                    del self._summaries[next(iter(self._summaries))]
                await _say(__event_emitter__, line(summary), True)
        return event

    def outlet(self, body: dict[str, Any], __metadata__: dict[str, Any] | None = None) -> dict[str, Any]:
        """Put the table below the answer."""
        summary = self._summaries.pop((__metadata__ or {}).get("message_id", body.get("id", "")), None)
        if summary is not None and body.get("messages"):
            body["messages"][-1]["content"] += "\n\n" + table(summary, self.valves.n_leading)
        return body


def rule_said(event: dict[str, Any]) -> str:
    """Return an event in words: the score over its threshold, or why there is none, where `blind` says so."""
    if event.get("blind"):
        return f"{event['name']} not known: {event['blind']}"
    return f"{event['name']} {event['score']:.2f} > {event['threshold']:.2f}"


def line(summary: dict[str, Any]) -> str:
    """Return a summary in one line: what was leading, what stopped the answer, and how far it can be relied on."""
    names = ", ".join(concept["name"] for concept in summary["leading"][:3]) or "no concept over its threshold"
    names += f" and {summary['n_leading'] - 3} more" if summary["n_leading"] > 3 else ""
    by = summary["stopped_by"]
    stopped = "" if not by else f"; stopped: {rule_said(by)}" if by.get("blind") else f"; stopped by {by['name']}"
    seen = f"{summary['coverage']['unseen']} of {summary['coverage']['tokens']} tokens unseen"
    withheld = f"{summary['n_withheld']} withheld" if summary["n_withheld"] else ""
    return "; ".join(filter(None, [f"{names}{stopped}", seen, withheld, summary["unlike"]]))


def table(summary: dict[str, Any], n_rows: int) -> str:
    """Return the leading concepts as a table in Markdown."""
    rows = ["| concept | score | strength | right |", "|---|---|---|---|"]
    for concept in summary["leading"][:n_rows]:
        strength = "" if concept["strength"] is None else f"{concept['strength']:.1f}"
        right = "" if concept["precision"] is None else f"{concept['precision']:.0%}"
        rows.append(f"| {_cell(' > '.join(concept['path']))} | {concept['score']:.2f} | {strength} | {right} |")
    return "\n".join([*rows, "", line(summary)])


async def _say(emit: Emitter | None, text: str, done: bool) -> None:
    if emit is not None:
        await emit({"type": "status", "data": {"description": f"probemon: {text}", "done": done}})


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _cell(text: str) -> str:
    """Return a name from a pack, somebody else's, as text that Markdown does not read."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<()#+-!|&~" else " " if c in "\r\n" else c for c in text)
