"""TokenSource: the source of a run's tokens: a model's hooks, or an engine's requests.

class Requests(TokenSource): ...
MonitorRun(manager, model, source=Requests)        # instead of a Watcher
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
    """Yields tokens with hidden states, in order, inside its block; see `Watcher`."""

    model: Any
    ranks: Ranks | None

    @property
    def open(self) -> bool:
        """True while attached."""

    @property
    def recordings(self) -> list[Recording]:
        """Kept recordings, oldest first."""

    @property
    def n_documents(self) -> int:
        """Recordings without a generation."""

    @property
    def forward_seconds(self) -> deque[float]:
        """Seconds per forward."""

    @property
    def called(self) -> bool:
        """True if the model ran."""

    @property
    def n_gaps(self) -> int:
        """Number of gaps."""

    def hook_faults(self) -> HookFaults:
        """Faults of the hooks."""

    @property
    def n_generating(self) -> int:
        """Running generations."""

    @property
    def running_beams(self) -> bool:
        """True if one has beams."""

    @property
    def generating(self) -> bool:
        """True if one runs."""

    @property
    def batch_errors(self) -> list[BaseException]:
        """Errors that no caller would see."""

    def stop(self) -> None:
        """End all generations."""

    def by_hand(self, from_column: int) -> AbstractContextManager[HandLoop]:
        """Follow a hand-written loop."""

    def current(self) -> Generation | None:
        """This thread's generation."""

    def stopped(self, like: Tensor) -> Tensor:
        """Rows to end, as a mask like `like`."""

    def __enter__(self) -> Any: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
