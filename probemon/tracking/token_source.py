"""TokenSource: where the tokens of a run come from: the hooks on a model of transformers', or an engine's requests.

class Requests(TokenSource): ...
MonitorRun(manager, model, source=Requests)        # instead of a Watcher; run.source is the one that was made
"""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from probemon.host.ranks import Ranks
from probemon.tracking.generation import Generation
from probemon.tracking.hand_loop import HandLoop
from probemon.tracking.hook_faults import HookFaults
from probemon.tracking.recording import Recording


class TokenSource(Protocol):
    """Gives tokens with their hidden states, in order, to what scores them, while its block is open.

    `Watcher` says what each of these is; it is made with the same arguments.
    """

    model: Any
    ranks: Ranks | None

    @property
    def open(self) -> bool:
        """Whether tokens come."""

    @property
    def recordings(self) -> list[Recording]:
        """Return the recordings that are kept, oldest first."""

    @property
    def n_documents(self) -> int:
        """Return how many recordings are of no generation."""

    @property
    def forward_seconds(self) -> deque[float]:
        """Seconds that each forward spent here."""

    @property
    def called(self) -> bool:
        """Whether the host ran."""

    @property
    def n_gaps(self) -> int:
        """Return how often tokens were run and not seen."""

    def hook_faults(self) -> HookFaults:
        """Return what is wrong with what was put on the host."""

    @property
    def n_generating(self) -> int:
        """Return how many generations are under way."""

    @property
    def running_beams(self) -> bool:
        """Whether one of them has beams."""

    @property
    def generating(self) -> bool:
        """Whether one is under way."""

    @property
    def batch_errors(self) -> list[BaseException]:
        """Errors of forwards that nobody else would tell of."""

    def stop(self) -> None:
        """End every generation with its next token."""

    def by_hand(self, from_column: int) -> AbstractContextManager[HandLoop]:
        """Follow a loop by hand."""

    def current(self) -> Generation | None:
        """Return the generation of the calling thread."""

    def stopped(self, like: Tensor) -> Tensor:
        """Return the rows of it that are to end, as a mask like `like`."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
