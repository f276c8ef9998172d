"""The errors probemon raises. Each message gives the invariant, the values and the next move.

    try:
        pack = ProbePack.open(path)
    except PackError as error:
        print(error)                      # one line: which file, what is wrong, what to do

Errors about arguments are also `ValueError` (or `TypeError` for an unknown name), errors about
lookups also `KeyError`, so code that does not know probemon still catches what it expects.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class ProbemonError(Exception):
    """The base of all errors that probemon raises on purpose."""

    def __str__(self) -> str:  # KeyError would print its message in quotes
        return str(self.args[0]) if self.args else ""


class ConfigError(ProbemonError, ValueError):
    """A setting has a value that cannot work."""


class RuleError(ConfigError):
    """A rule has a field that cannot be; the message begins with its name, and `.field` has it."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.field)


class DeploymentError(ConfigError):
    """A deployment file cannot be taken as it is; the message names its line, and `.line` has it."""

    def __init__(self, message: str, line: int = 1) -> None:
        super().__init__(message)
        self.line = line


class CalibrationError(ProbemonError, ValueError):
    """The data are too few for the rate or recall asked for, or cannot show it; the message says how many it takes."""


class TrainingError(ProbemonError, ValueError):
    """What probes are to be trained on is wrong or too little; the message names the row and the remedy."""


class UnknownSetting(ConfigError, TypeError):
    """A setting does not exist (usually a typo)."""


class UnknownConcept(ProbemonError, KeyError):
    """No probe of the pack has this id or name, or several have it."""


class HierarchyError(ProbemonError, ValueError):
    """The concept hierarchy has a cycle, an edge to nowhere, or probes that are not numbered after their parents."""


class PackError(ProbemonError, ValueError):
    """A probe pack cannot be read, or is not what its manifest says."""


class PackVersionError(PackError):
    """The pack's format version is not one this probemon reads."""


class PackCorrupt(PackError):
    """A file of the pack is missing, truncated or edited."""


class PackChanged(PackError):
    """A file of a pack was written to while the pack was opened or in use; the pack has to be opened again."""


class ImportRefused(PackError):
    """A file of another project is not read: it holds code, leaves its folder, is too large, or is no probe."""


class HostMismatch(ProbemonError, ValueError):
    """The pack was made for another host model."""


class ProbeLoadError(ProbemonError, RuntimeError):
    """A probe's weights cannot be loaded or are not finite; the message names the concept."""


class ArenaFull(ProbemonError, RuntimeError):
    """No slot can be freed: everything is pinned."""


class NotSupportedDecoding(ProbemonError, NotImplementedError):
    """In this decoding mode probemon cannot say which token a hidden state belongs to."""


class NotSupportedHost(ProbemonError, NotImplementedError):
    """The host model, or a site in it, cannot be tapped."""


class KernelUnavailable(ProbemonError, RuntimeError):
    """The requested kernel implementation cannot run here."""


class AlignmentError(ProbemonError, RuntimeError):
    """Hidden states and tokens do not match up; nothing is reported rather than something wrong."""


class ConceptRaised(ProbemonError, RuntimeError):
    """A rule with action="raise" was met; `.event` has the concept and the token."""

    def __init__(self, message: str, event: object) -> None:
        super().__init__(message)
        self.event = event


class JudgeFailed(ProbemonError, RuntimeError):
    """A judge gave no verdict: it answered something else, or not at all; the message says what."""


class CallbackFailed(ProbemonError, RuntimeError):
    """Callbacks or sinks raised while a run watched; the generation went on. `.failures` has their errors."""

    def __init__(self, message: str, failures: list[Exception]) -> None:
        super().__init__(message)
        self.failures = failures


class SinkFailed(ProbemonError, RuntimeError):
    """A sink is stuck, used out of turn, or cannot put its file in place; the message says where its data are."""


class BemError(ProbemonError, RuntimeError):
    """A routed adapter cannot do here what it promises, so it steers nothing rather than something wrong."""


class BemStateError(BemError):
    """The controller has not read what a cache holds, so the codes that follow from it are unknown."""


class BemFileError(BemError, ValueError):
    """A folder is not a saved adapter, or a file of it is missing, truncated or edited."""


class ChatRefused(ProbemonError, ValueError):
    """A chat cannot be given to a model as it was said: `.at` is the number of the message (None: not of one alone),
    `.part` what of it.
    """

    def __init__(self, message: str, at: int | None = None, part: str = "") -> None:
        super().__init__(message)
        self.at, self.part = at, part

    @property
    def param(self) -> str:
        """The parameter at fault, by OpenAI's names."""
        if self.at is None:
            return self.part or "messages"
        return f"messages[{self.at}]" + (f".{self.part}" if self.part not in ("", "content") else "")


class RequestRefused(ProbemonError, ValueError):
    """A request to the server is not answered: `.status` of HTTP, the `.param` at fault, if one is, and a `.code`."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class Blind(ProbemonError, RuntimeError):
    """Taps do not see what the host runs: scores would be missing, or somebody else's."""


class MissingExtra(ProbemonError, ImportError):
    """An optional dependency is needed; the message names the extra to install."""


def closest(name: str, names: Iterable[str]) -> str:
    """Return `", did you mean 'x'?"` for the nearest of `names`, or an empty string."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f", did you mean {matches[0]!r}?" if matches else ""
