"""StateMonitor: watches the recurrent layers of one model while its `with` block is open.

with StateMonitor(model) as monitor:
    model.generate(**inputs, max_new_tokens=50)
monitor.report()                        # {"ssm.3": {"half_life_p50": ..., "resets": ...}, ...}
"""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Any

from probemon.adapters.routing.recurrent.recorder import StateRecorder
from probemon.core.scores import Gap
from probemon.host.model import unwrap
from probemon.monitor.failures import MAX_KEPT, Failures, as_exception, raise_first_of
from probemon.monitor.followers import Follower
from probemon.tracking.align import PlacedTokens
from probemon.tracking.decoder_hooks import Report
from probemon.tracking.generation import Generation, States
from probemon.tracking.recording import Recording
from probemon.tracking.run_recordings import keep_newest
from probemon.tracking.watcher import Watcher
from probemon.util.checks import check_choice


class StateMonitor(StateRecorder, Follower):
    """A recorder that watches a model by itself; alongside probes, use `Routing`.

    `on_gap`: "raise" or "report", as in `manager.attach`. Raises `UnsupportedModel`. Listener errors are raised as
    `CallbackFailed` when the block ends.
    """

    def __init__(self, model: Any, *, states: bool = False, on_gap: str = "raise") -> None:
        check_choice("on_gap", on_gap, ("raise", "report"))
        model, failures = unwrap(model), Failures()
        super().__init__(model, states=states, guard=failures.call)
        self.failures, self.gaps = failures.errors, deque[Gap](maxlen=MAX_KEPT)
        report_gaps = on_gap == "report"
        self._watcher = Watcher(model, self.sites, 0, self._count_tokens, report_gaps=report_gaps, reports=self)

    def gap(self, gap: Gap) -> None:
        """Keep a gap."""
        self.gaps.append(gap)

    def __enter__(self) -> StateMonitor:
        self._watcher.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.__exit__(kind, error, trace)
        self.failures += map(as_exception, self._watcher.batch_errors)
        if error is None:
            raise_first_of(self.failures, f"{len(self.failures)} callbacks failed while states were watched")

    @property
    def forward_seconds(self) -> list[float]:
        """Seconds spent in the hooks, per forward; the newest 10,000."""
        return list(self._watcher.forward_seconds)

    def _count_tokens(
        self, generation: Generation | None, recording: Recording, placed: PlacedTokens, states: States | str
    ) -> Report | None:
        count = self.take(recording, placed, states)
        with self._lock:  # number the tokens, keep nothing
            recording.add_forgotten(len(placed))
            keep_newest(self._watcher.recordings, 0)
        return None if count is None else lambda report: count() if report else None
