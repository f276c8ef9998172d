"""EngineRun: what a client receives, counted by `ProcessMetrics` as a run in one process is.

metrics = ProcessMetrics(concepts=["weapon"], registry=CollectorRegistry())
EngineRun(client).follow_with(metrics)                  # from now on; metrics.text()
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.monitor.followers import Follower
from probemon.ops.vllm.event_fields import event_of
from probemon.ops.vllm.messages import Message, RuleMet, StepTokens
from probemon.tracking.source_reports import ForwardTime

if TYPE_CHECKING:
    from probemon.ops.deployment.deployment import Deployment
    from probemon.ops.telemetry.metrics import ProcessMetrics
    from probemon.ops.vllm.client import VllmClient
    from probemon.packs.group import AnyPack


def process_metrics(deployment: Deployment, pack: AnyPack) -> ProcessMetrics | None:
    """Return metrics in a registry of their own, with the concepts that a deployment names; None without the extra.

    Raises `MissingExtra` where the deployment asks for metrics.
    """
    from probemon.ops.telemetry.metrics import ProcessMetrics

    stated = deployment.metrics(pack)
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        return None if stated is None else ProcessMetrics()  # says what is missing
    return ProcessMetrics(concepts=[] if stated is None else stated["concepts"], registry=CollectorRegistry())


class EngineRun:
    """What metrics ask of a run. Budgets, breakers and sinks are the worker's, and not told here."""

    breaker = None
    followers: tuple[Follower, ...] = ()
    recordings: tuple[Any, ...] = ()
    sinks: tuple[Any, ...] = ()

    def __init__(self, client: VllmClient) -> None:
        self._client, self._followers = client, list[Follower]()
        self.manager, self.deployment = client.manager, client.deployment
        client.listen(self._hear)

    @property
    def n_failures(self) -> int:
        """Return how often listeners of the client raised."""
        return self._client.failures.n_errors

    def follower(self, kind: type) -> None:
        """Return None: whatever follows the run is the worker's."""

    def follow_with(self, metrics: ProcessMetrics) -> None:
        """Let metrics count what comes from now on."""
        metrics.began(self)  # type: ignore[arg-type]

    def follow(self, follower: Follower) -> None:
        """Let a follower hear of scores, events and times."""
        self._followers.append(follower)

    # -- inside ----------------------------------------------------------------------------------

    def _hear(self, message: Message) -> None:
        for follower in self._followers:
            if isinstance(message, StepTokens):
                self._step(follower, message)
            elif isinstance(message, RuleMet):
                event = event_of(message.event)
                if event.verdict is not None and event.verdict.ruling != "pending":
                    follower.verdict(event)
                else:
                    follower.event(event, message.action)

    def _step(self, follower: Follower, message: StepTokens) -> None:
        counts = []
        for phase in (0, 1):
            which = np.flatnonzero(message.phases == phase)
            counts.append(len(which))
            if len(which):
                batch: Any = SimpleNamespace(placed=SimpleNamespace(phase=phase), watch=SimpleNamespace(rung=0))
                follower.scored(batch, message.scores.take(which))
        whole = max(message.seconds, time.time() - message.began_seconds)
        follower.forward(ForwardTime(message.seconds, whole, *counts))
