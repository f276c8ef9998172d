"""DynamicProbeManager: the main entry point.

manager = DynamicProbeManager("demo", keep_top_k=30)
with manager.attach(model, tokenizer) as run:         # every token of generate()
    out = model.generate(**inputs)
state, scores = manager.step(None, hidden)            # one token of B sequences, hidden [B, D]
scores = manager.score_tokens(hidden)                 # one document, hidden [T, D]
everything = manager.score_all(hidden)                # fp32 [T, P]
manager.analyze(model, tokenizer, documents, out="scores/", resume=True)
both = DynamicProbeManager([pack_a, pack_b])          # concepts are "name of pack:id"
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import torch

from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError, UnknownSetting, closest
from probemon.monitor.breaker import Breaker, Circuit
from probemon.monitor.change import DeploymentFile
from probemon.monitor.run import MonitorRun, RunOptions
from probemon.monitor.stream import TokenEvent, stream, stream_async

if TYPE_CHECKING:
    from probemon.lab.corpora.analysis_folder import Analysis
    from probemon.lab.corpora.documents import Documents, Source
    from probemon.lab.training.collect import Collected


class MachineSettings(TypedDict, total=False):
    """Settings of a manager that a deployment file leaves to its machine."""

    device: str | torch.device
    impl: str | None
    arena_bytes: int | None
    cache_bytes: int
    prefetch: float
    strategy: str
    late: bool


class DynamicProbeManager(Scorer):
    """Scores hidden states with one or several packs, descending their hierarchies.

    The pack: a `ProbePack`, its folder, or its name on the Hugging Face hub.
    `device`: of weights and scores.
    `impl`: the kernel; None chooses by device (`manager.impl_why`).
    Settings of `CascadeConfig`, by default as the pack recommends (`core.settings.CascadeSettings` has their types).
    `arena_bytes`: limit of the weights on the device (None: the whole pack).
    `cache_bytes`: limit of a paged arena's copies in RAM.
    `prefetch`: margin below the expand threshold within which a paged arena loads children early.
    `strategy`: "descent", "exhaustive", or "auto", which measures both.
    `late`: generation skips probes that are not resident yet (`coverage.late`); this changes scores.
    `audit_rate`: share of tokens on which every probe is evaluated (`probemon.engine.audit`).
    `alert_set`: a set of alert thresholds; None takes the recommended one.

    Several packs (a list, or a mapping from names) share one model and result; each scores as it does alone.
    `manager.pack` is a `PackGroup`: concepts are "name of pack:id", or an unambiguous id or name. Settings apply to
    each pack, except `always_on`, which names concepts of any. `arena_bytes` and `cache_bytes` are totals.

    Raises `ConfigError` (`UnknownSetting` for a typo).
    """

    deployment: DeploymentFile | None = None

    @classmethod
    def from_deployment(cls, path: str | os.PathLike[str], **settings: Unpack[MachineSettings]) -> DynamicProbeManager:
        """Make a manager from a deployment file; its rules and sinks apply to every run.

            manager = DynamicProbeManager.from_deployment("watch.yaml")
            with manager.attach(model, tokenizer) as run: ...
            run.events, run.result(out).deployment

        `settings`: of `MachineSettings`, the others are in the file.
        Also serves the file's metrics. Raises `DeploymentError` with the line, `PackError`.
        """
        from probemon.ops.deployment.deployment import Deployment

        deployment = Deployment.read(os.fspath(path))
        for name in settings:
            if name not in MachineSettings.__annotations__:
                names = ", ".join(sorted(MachineSettings.__annotations__))
                raise ConfigError(f"{name} belongs in the deployment file: settings allowed here are {names}")
        pack = deployment.open_packs()
        with deployment.errors_of_settings():
            manager = cls(pack, **deployment.settings, **settings)
        manager.hold_to(deployment)
        return manager

    def hold_to(self, deployment: DeploymentFile) -> None:
        """Apply a deployment's rules, sinks and metrics to every run. Raises `DeploymentError`, `ConfigError`."""
        deployment.rules(self.pack)  # raises if they are invalid
        deployment.show(self)  # or if a package is missing
        self.deployment = deployment

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or unpickle with the deployment; its metrics are served from the first run on."""
        return *super().__reduce__(), {"deployment": self.deployment}

    def attach(
        self,
        model: Any,
        tokenizer: Any = None,
        followers: Sequence[Any] = (),
        *,
        strict: bool = False,
        on_gap: str | None = None,
        callback_errors: str = "raise",
        keep_tokens: int | None = None,
        one_thread: bool = False,
        breaker: Breaker | Circuit | None = None,
    ) -> MonitorRun:
        """Return a context manager that watches an unchanged Hugging Face model.

        `followers`: called in order: budget, drift, routing, metrics, sinks, your own `Follower`
        (`probemon.monitor.followers`), or a callable that takes `(placed, scores)` of each batch of tokens.

        Other options: see `RunOptions`. `on_gap`: None is "report" if a deployment handles gaps, else "raise".
        """
        if on_gap is None:
            on_gap = "report" if self.deployment is not None and self.deployment.says_what_follows else "raise"
        options = RunOptions(strict, on_gap, callback_errors, keep_tokens, one_thread, breaker)
        return MonitorRun(self, model, tokenizer, followers, options, self.deployment)

    def stream(
        self,
        model: Any,
        tokenizer: Any,
        messages: str | Sequence[Mapping[str, str]],
        *,
        include_prompt: bool = False,
        max_waiting: int = 64,
        prepare: Callable[[MonitorRun], object] | None = None,
        **options: Any,
    ) -> Iterator[TokenEvent]:
        """Yield tokens with their scores while `model` generates: see `probemon.monitor.stream`.

        In a notebook, `probemon.monitor.notebook.show(manager.stream(...))` displays them live.

        - `options`: of `attach` and `model.generate`. The stream watches only its own thread (`one_thread`).
        - `include_prompt`: first yield the prompt's tokens, except those in `past_key_values`.
        - `max_waiting`: batches that may wait for the reader before the model waits. Leaving the loop stops it.
        - `prepare(run)`: called first in the generating thread, to add rules and sinks.
        """
        run, generate = self._streaming(model, tokenizer, options)
        return stream(
            run, model, messages, include_prompt=include_prompt, max_waiting=max_waiting, prepare=prepare, **generate
        )

    def stream_async(
        self,
        model: Any,
        tokenizer: Any,
        messages: str | Sequence[Mapping[str, str]],
        *,
        include_prompt: bool = False,
        max_waiting: int = 64,
        prepare: Callable[[MonitorRun], object] | None = None,
        **options: Any,
    ) -> AsyncIterator[TokenEvent]:
        """As `stream`, for `async for`."""
        run, generate = self._streaming(model, tokenizer, options)
        return stream_async(
            run, model, messages, include_prompt=include_prompt, max_waiting=max_waiting, prepare=prepare, **generate
        )

    def _streaming(self, model: Any, tokenizer: Any, options: Mapping[str, Any]) -> tuple[MonitorRun, dict[str, Any]]:
        if tokenizer is None:
            raise ConfigError("stream needs the model's tokenizer to encode the messages")
        attach_names, stream_names = (
            list(inspect.signature(self.attach).parameters)[2:],
            list(inspect.signature(self.stream).parameters),
        )
        methods = [getattr(model, name, None) for name in ("generate", "forward", "prepare_inputs_for_generation")]
        model_names = {name for method in methods if callable(method) for name in inspect.signature(method).parameters}
        config = getattr(model, "generation_config", None)
        model_names |= set() if config is None else set(config.to_dict())
        for name in options:
            if name not in attach_names and name not in model_names:
                meant = closest(name, [*attach_names, *stream_names[3:-1], *sorted(model_names)])
                raise UnknownSetting(f"neither a stream nor generate() takes {name!r}{meant}")
        attach = {name: value for name, value in options.items() if name in attach_names}
        generate = {name: value for name, value in options.items() if name not in attach_names}
        return self.attach(model, tokenizer, **{"one_thread": True, **attach}), generate

    def analyze(
        self,
        model: Any,
        tokenizer: Any,
        documents: Source | Documents,
        out: str | os.PathLike[str],
        *,
        resume: bool = False,
        **settings: Any,
    ) -> Analysis:
        """Score a corpus into parquet shards in the folder `out`. Needs the extra `corpus`.

        `settings`: see `probemon.lab.corpora.analyze.analyze`.
        """
        from probemon.lab.corpora.analyze import analyze

        return analyze(self, model, tokenizer, documents, out, resume=resume, **settings)

    def collect(
        self,
        model: Any,
        tokenizer: Any,
        data: Any,
        out: str | os.PathLike[str],
        *,
        sites: Sequence[str] | None = None,
        **settings: Any,
    ) -> Collected:
        """Write the hidden states at `sites`, by default those that the pack reads.

        `data`, `settings`: see `probemon.lab.training.collect.collect`.
        """
        from probemon.lab.training.collect import collect

        return collect(model, tokenizer, data, out, sites=self.pack.sites if sites is None else sites, **settings)
