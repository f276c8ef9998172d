"""The errors that probemon raises.

    try:
        pack = ProbePack.open(path)
    except PackError as error:
        print(error)                      # one line with the remedy

Errors about arguments are also `ValueError` or `TypeError`, errors about lookups `KeyError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class ProbemonError(Exception):
    """Base class of probemon's errors."""

    def __str__(self) -> str:  # KeyError would quote the message
        return str(self.args[0]) if self.args else ""


class ConfigError(ProbemonError, ValueError):
    """A setting has a value that cannot work."""


class RuleError(ConfigError):
    """A rule has an invalid field, named by `.field`."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.field)


class DeploymentError(ConfigError):
    """A deployment file is invalid at line `.line`."""

    def __init__(self, message: str, line: int = 1) -> None:
        super().__init__(message)
        self.line = line


class CalibrationError(ProbemonError, ValueError):
    """The data are too few for the requested rate or recall."""


class TrainingError(ProbemonError, ValueError):
    """Training data are invalid or too few."""


class UnknownSetting(ConfigError, TypeError):
    """A setting does not exist."""


class UnknownConcept(ProbemonError, KeyError):
    """No probe of the pack, or several, have this id or name."""


class HierarchyError(ProbemonError, ValueError):
    """The hierarchy has a cycle, a missing concept, or probes before their parents."""


class PackError(ProbemonError, ValueError):
    """A pack cannot be read, or differs from its manifest."""


class PackVersionError(PackError):
    """The pack's format version is unknown."""


class PackCorrupt(PackError):
    """A file of the pack is damaged."""


class PackChanged(PackError):
    """A file of an open pack was modified."""


class ImportRefused(PackError):
    """A file to import is unsafe, too large, or not a probe."""


class ModelMismatch(ProbemonError, ValueError):
    """The pack was made for another model."""


class ProbeLoadError(ProbemonError, RuntimeError):
    """A probe's weights cannot be loaded or are not finite."""


class ArenaFull(ProbemonError, RuntimeError):
    """All slots are pinned."""


class UnsupportedDecoding(ProbemonError, NotImplementedError):
    """In this decoding mode a hidden state's token is unknown."""


class UnsupportedModel(ProbemonError, NotImplementedError):
    """The model, or a site, cannot be watched."""


class KernelUnavailable(ProbemonError, RuntimeError):
    """The requested kernel cannot run here."""


class AlignmentError(ProbemonError, RuntimeError):
    """Hidden states and tokens do not match."""


class ConceptRaised(ProbemonError, RuntimeError):
    """A rule with action="raise" fired; `.event` has the concept and the token."""

    def __init__(self, message: str, event: object) -> None:
        super().__init__(message)
        self.event = event


class JudgeFailed(ProbemonError, RuntimeError):
    """A judge gave no verdict."""


class CallbackFailed(ProbemonError, RuntimeError):
    """Callbacks or sinks raised during a run; `.failures` has their errors."""

    def __init__(self, message: str, failures: list[Exception]) -> None:
        super().__init__(message)
        self.failures = failures


class SinkFailed(ProbemonError, RuntimeError):
    """A sink is stuck, misused, or cannot move its file into place."""


class BemError(ProbemonError, RuntimeError):
    """A routed adapter cannot work as promised here."""


class BemStateError(BemError):
    """The controller has not read a whole cache."""


class BemFileError(BemError, ValueError):
    """A folder is not a saved adapter, or is damaged."""


class ChatRefused(ProbemonError, ValueError):
    """A chat cannot be rendered for a model. `.at`: the message's number (None: all); `.part`: its field."""

    def __init__(self, message: str, at: int | None = None, part: str = "") -> None:
        super().__init__(message)
        self.at, self.part = at, part

    @property
    def param(self) -> str:
        """The invalid parameter, by OpenAI's names."""
        if self.at is None:
            return self.part or "messages"
        return f"messages[{self.at}]" + (f".{self.part}" if self.part not in ("", "content") else "")


class RequestRefused(ProbemonError, ValueError):
    """The server refuses a request: HTTP `.status`, invalid `.param` (or None), `.code`, `.retry_after_seconds`."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        retry_after_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.retry_after_seconds = param, status, code, retry_after_seconds


class Blind(ProbemonError, RuntimeError):
    """The hooks do not see the model's forwards."""


class MissingExtra(ProbemonError, ImportError):
    """An optional dependency is missing."""


def closest(name: str, names: Iterable[str]) -> str:
    """Return `", did you mean 'x'?"` for the nearest of `names`, or ""."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""
