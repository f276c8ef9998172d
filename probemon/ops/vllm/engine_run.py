"""An engine's messages as a run for followers.

run = EngineRun(client, [metrics, sink])
run.hear(message)
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from probemon.core.hierarchy import Ints
from probemon.core.scores import GENERATED, PROMPT
from probemon.errors import ConfigError
from probemon.monitor.check import Check
from probemon.monitor.delivery import Delivery, as_follower
from probemon.monitor.followers import Batch, Follower, Followers
from probemon.monitor.function_probes import FunctionProbe
from probemon.monitor.kept_states import KeepStates
from probemon.monitor.rules import PENDING
from probemon.ops.vllm.event_fields import event_of
from probemon.ops.vllm.messages import Ended, Message, RequestHead, RuleMet, StepTokens
from probemon.tracking.align import PlacedTokens
from probemon.tracking.source_reports import ForwardTime

if TYPE_CHECKING:
    from probemon.ops.deployment.deployment import Deployment
    from probemon.ops.telemetry.metrics import ProcessMetrics
    from probemon.ops.vllm.client import VllmClient
    from probemon.packs.group import AnyPack


def process_metrics(deployment: Deployment | None, pack: AnyPack) -> ProcessMetrics | None:
    """Return metrics in a separate registry, with a deployment's concepts; None without the extra.

    Raises `MissingExtra` if the deployment asks for metrics.
    """
    from probemon.ops.telemetry.metrics import ProcessMetrics

    section = None if deployment is None else deployment.metrics(pack)
    try:
        from prometheus_client import CollectorRegistry
    except ImportError:
        return None if section is None else ProcessMetrics()  # raises MissingExtra
    return ProcessMetrics(concepts=[] if section is None else section["concepts"], registry=CollectorRegistry())


class EngineRecording(NamedTuple):
    """A request of an engine, as followers know a recording."""

    number: int
    request: str
    offset: int = 0


class EngineWatch(NamedTuple):
    """The deployment that a worker watches, as followers know it."""

    deployment: str
    degradation: int = 0


class EngineRun:
    """An engine, as its followers know a run. Budgets, breakers and a deployment's sinks are the worker's."""

    breaker = None
    recordings: tuple[Any, ...] = ()
    sinks: tuple[Any, ...] = ()
    function_names: tuple[str, ...] = ()

    def __init__(self, client: VllmClient, followers: Sequence[Any] = ()) -> None:
        self._client, self._followers = client, Followers(client.failures)
        self.manager, self.deployment = client.manager, client.deployment
        try:
            for follower in followers:
                self.follow(follower)
        except BaseException:
            self.close()  # those that began: sinks have files and threads
            raise

    @property
    def tokenizer(self) -> Any:
        """Return the client's tokenizer."""
        return self._client.tokenizer

    @property
    def n_failures(self) -> int:
        """How often followers raised."""
        return self._client.failures.n_errors

    @property
    def followers(self) -> list[Follower]:
        """Return the followers in calling order."""
        return list(self._followers)

    def follower(self, kind: type) -> Any:
        """Return the first follower of a class, or None."""
        return next((one for one in self._followers if isinstance(one, kind)), None)

    def follow(self, follower: Any) -> Follower:
        """Add a `Follower`, sink or callable `(placed, scores)`. Raises `ConfigError`, and errors of `began`."""
        added = as_follower(follower, self._followers)
        # Those two read states also at the sites of the packs.
        if isinstance(added, (FunctionProbe, KeepStates)) or list(added.attaching(self)):  # type: ignore[arg-type]
            raise ConfigError(f"{type(added).__name__} reads hidden states, which stay in the worker of an engine")
        added.began(self)  # type: ignore[arg-type]
        self._followers.add(added, sink=isinstance(added, Delivery))
        return added

    def checks(self) -> list[Check]:
        """Return the followers' lines of a client's health."""
        return self._followers.checks()

    def close(self) -> None:
        """End the followers."""
        self._followers.finish(False)
        self._followers.closed(self)  # type: ignore[arg-type]

    def hear(self, message: Message) -> None:
        """Pass a message on."""
        if not self.followers:
            return
        if isinstance(message, StepTokens):
            self._step(message)
        elif isinstance(message, RuleMet):
            event = event_of(message.event)
            if event.verdict is not None and event.verdict.ruling != PENDING.ruling:
                self._followers.verdict(event)
            else:
                self._followers.event(event, message.action)
            if ends_row(message):
                self._followers.stopped(event)
        elif isinstance(message, Ended):
            recording: Any = EngineRecording(message.number, message.request)
            self._followers.ended(recording, None)

    # -- inside ----------------------------------------------------------------------------------

    def _step(self, message: StepTokens) -> None:
        for at, head in enumerate(message.requests):
            for phase in (PROMPT, GENERATED):
                which = np.flatnonzero((message.of_request == at) & (message.phases == phase))
                if len(which):
                    self._followers.scored(self._batch(message, head, which, phase), message.scores.take(which))
        whole = max(message.seconds, time.time() - message.began_seconds)
        n_prompt = int((message.phases == PROMPT).sum())
        self._followers.forward(ForwardTime(message.seconds, whole, n_prompt, len(message.phases) - n_prompt))

    @staticmethod
    def _batch(message: StepTokens, head: RequestHead, which: Ints, phase: int) -> Batch:
        zeros = np.zeros(len(which), dtype=np.int64)
        placed = PlacedTokens(zeros, message.columns[which], zeros, message.ids[which], phase)
        watch: Any = EngineWatch(message.deployments.get(int(message.watches[which[0]]), ""))
        recording: Any = EngineRecording(head.number, head.request)
        return Batch(watch, None, recording, placed, zeros)


def ends_row(message: RuleMet) -> bool:
    """True if a rule or its judge ends the sequence."""
    verdict = message.event.get("verdict") or {}
    return message.action == "stop" or verdict.get("ruling") == "stop"
