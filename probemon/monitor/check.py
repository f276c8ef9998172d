"""Check: one line of a run's health."""

from __future__ import annotations

from dataclasses import dataclass

from probemon.util.checks import check_choice

OK, WARNING, FAILED = STATES = ("ok", "warning", "failed")


@dataclass(frozen=True)
class Check:
    """One check.

    `what`: the finding
    `state`: "ok", "warning" or "failed"
    `remedy`: what to do, or ""
    """

    name: str
    state: str
    what: str
    remedy: str = ""

    def __post_init__(self) -> None:
        check_choice("state", self.state, STATES)

    def __str__(self) -> str:
        return f"{self.state}, {self.name}: {self.what}{f'. {self.remedy}' if self.remedy else ''}"
