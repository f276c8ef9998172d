"""Counts a client's messages with `ProcessMetrics`, like a local run.

EngineRun(client).follow_with(metrics)
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
    """Return metrics in a separate registry, with a deployment's concepts; None without the extra.

    Raises `MissingExtra` if the deployment asks for metrics.
    """
    from probemon.ops.telemetry.metrics import ProcessMetrics

    section = deployment.metrics(pack)
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        return None if section is None else ProcessMetrics()  # raises MissingExtra
    return ProcessMetrics(concepts=[] if section is None else section["concepts"], registry=CollectorRegistry())


class EngineRun:
    """A run, as metrics need it. Budgets, breakers and sinks are the worker's."""

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
        """How often the client's listeners raised."""
        return self._client.failures.n_errors

    def follower(self, kind: type) -> None:
        """Return None: followers are the worker's."""

    def follow_with(self, metrics: ProcessMetrics) -> None:
        """Count from now on."""
        metrics.began(self)  # type: ignore[arg-type]

    def follow(self, follower: Follower) -> None:
        """Add a follower of scores, events and times."""
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
                batch: Any = SimpleNamespace(placed=SimpleNamespace(phase=phase), watch=SimpleNamespace(degradation=0))
                follower.scored(batch, message.scores.take(which))
        whole = max(message.seconds, time.time() - message.began_seconds)
        follower.forward(ForwardTime(message.seconds, whole, *counts))
