"""DynamicProbeManager: the main entry point.

manager = DynamicProbeManager("demo", keep_top_k=30)
with manager.attach(model, tokenizer) as run:         # every token of generate()
    out = model.generate(**inputs)
state, scores = manager.step(None, hidden)            # one token of each of B rows, hidden [B, D]
scores = manager.score_tokens(hidden)                 # one document, hidden [T, D]
everything = manager.score_all(hidden)                # fp32 [T, P]
manager.analyze(model, tokenizer, documents, out="scores/", resume=True)
both = DynamicProbeManager([pack_a, pack_b])          # one attach, one result; concepts are "name of pack:id"
"""

from __future__ import annotations

import inspect
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from probemon.engine.scorer import Scorer
from probemon.errors import ConfigError, closest
from probemon.monitor.breaker import Breaker, Circuit
from probemon.monitor.change import DeploymentFile
from probemon.monitor.run import MonitorRun, RunOptions
from probemon.monitor.stream import TokenEvent, stream, stream_async

if TYPE_CHECKING:
    from probemon.lab.corpora.analysis_folder import Analysis
    from probemon.lab.corpora.documents import Source
    from probemon.lab.training.collect import Collected

_OF_THE_MACHINE = {"device", "impl", "arena_bytes", "cache_bytes", "prefetch", "strategy", "late"}


class DynamicProbeManager(Scorer):
    """Scores hidden states with a pack, or several, descending their hierarchies.

    The pack: a `ProbePack`, or its folder or its name on the Hugging Face hub, which `ProbePack.from_pretrained` opens.
    `device`: where weights and scores are.
    `impl`: the kernel; None picks one by the device (see `manager.impl_why`).
    Settings of `CascadeConfig` by name: base_layers, load_threshold, keep_top_k, aggressive_pruning, max_loaded_probes,
    unload_threshold, always_on, include, exclude, depth, report_top_k, max_rounds. Where one is not given, the pack's
    recommendation holds.
    `arena_bytes`: bounds the weights held on the device (None: the whole pack stays there).
    `cache_bytes`: bounds the copies that a paged arena keeps in RAM.
    `prefetch`: a paged arena loads, in the background, the children of probes so much under their expand threshold.
    `strategy`: how states are evaluated: "descent", "exhaustive", or "auto", measured now (see `manager.strategy`).
    `late`: a step of generation leaves out probes whose weights are not on the device, and counts them
    (`coverage.late`, within `dropped`); they arrive in the background.
    `audit_rate`: on so many of the tokens of a run or a corpus every probe is evaluated too, and what was missed is
    counted (`probemon.engine.audit`).
    `alert_set`: which of the pack's sets of alert thresholds says what fires; None takes the one it recommends
    (`pack.alert_sets`).
    Of `arena_bytes`, `cache_bytes`, `prefetch`, `strategy` and `late` only the last changes a score.

    Several packs for one host, a list or a mapping of names to them, give one result, and each the scores that it gives
    alone. `manager.pack` is then a `PackGroup`: concepts go by "name of pack:id", or by the bare id or name where only
    one has it. Every pack keeps its own thresholds, recommendations and limits (`manager.config` is by name of pack). A
    setting given by name holds for each of them: `max_loaded_probes=100` is 100 of each, but `always_on` names concepts
    of any. `arena_bytes` and `cache_bytes` are of all together: each architecture has room for what is always active,
    and its share by size of the rest. Raises `ConfigError` (`UnknownSetting` for a typo).
    """

    deployment: DeploymentFile | None = None

    @classmethod
    def from_deployment(cls, path: str | os.PathLike[str], **settings: Any) -> DynamicProbeManager:
        """Make a manager of a deployment file: its packs and settings; its rules and sinks hold in every run.

            manager = DynamicProbeManager.from_deployment("watch.yaml")
            with manager.attach(model, tokenizer) as run: ...        # nothing more is to be said
            run.events, run.result(out).deployment                   # what was met, by which file

        `settings`: of this machine, which no file states: `device`, `impl`, `arena_bytes`, `cache_bytes`, `prefetch`,
        `strategy`, `late`. What the file says of metrics is shown from now on. Where the file has rules, a forward that
        our hooks did not see is no error: each rule's `on_blind` says what follows. Raises `DeploymentError` with the
        line of what is wrong, `PackError`.
        """
        from probemon.ops.deployment.deployment import Deployment

        deployment = Deployment.read(os.fspath(path))
        for name in settings:
            if name not in _OF_THE_MACHINE:
                known = ", ".join(sorted(_OF_THE_MACHINE))
                raise ConfigError(f"{name} is for the deployment file to say: settings beside it are {known}")
        pack = deployment.open_packs()
        with deployment.errors_of_settings():
            manager = cls(pack, **deployment.settings, **settings)
        manager.hold_to(deployment)
        return manager

    def hold_to(self, deployment: DeploymentFile) -> None:
        """Let the rules, sinks and metrics of a deployment, whose packs and settings these are, hold in every run.

        Raises `DeploymentError`; `ConfigError` where its metrics cannot be shown.
        """
        deployment.rules(self.pack)  # what is wrong with them shows now
        deployment.show(self.pack)  # and what is not installed
        self.deployment = deployment

    def __reduce__(self) -> tuple[Any, ...]:
        """Make a copied or unpickled manager anew, with the deployment whose rules hold. Its metrics are shown from its
        first run on: a worker that scores corpora listens at no port.
        """
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

        `followers`: what hears the run, in order: budget, drift, routing, metrics, sinks, your own `Follower`
        (`probemon.monitor.followers`), or a callable that takes `(placed, scores)` of each batch of tokens.

        The other options are those of `RunOptions`. `on_gap`: None is "raise", but "report" for a manager
        `from_deployment` whose rules say what follows.
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

        In a notebook `probemon.monitor.notebook.show(manager.stream(...))` shows them as they come.

        - `options`: those of `attach`, and arguments of `model.generate`. A stream has a thread of its own and watches
          no other (`one_thread`). With a `Routing` among the followers, what memories read is `event.reading`.
        - `include_prompt`: the prompt's tokens come first, but for those in a cache that is given, `past_key_values`.
        - `max_waiting`: so many batches of tokens wait for the reader at most, then the model waits. Leaving the loop
          stops it.
        - `prepare(run)`: called before it begins, in the thread that generates: for rules and sinks.
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
        """Yield the same as `stream`, for `async for`."""
        run, generate = self._streaming(model, tokenizer, options)
        return stream_async(
            run, model, messages, include_prompt=include_prompt, max_waiting=max_waiting, prepare=prepare, **generate
        )

    def _streaming(self, model: Any, tokenizer: Any, options: Mapping[str, Any]) -> tuple[MonitorRun, dict[str, Any]]:
        """Return the run of a stream, and the arguments of `generate` among its options."""
        if tokenizer is None:
            raise ConfigError("stream needs the model's tokenizer to encode the messages")
        ours, more = (
            list(inspect.signature(self.attach).parameters)[2:],
            list(inspect.signature(self.stream).parameters),
        )
        methods = [getattr(model, name, None) for name in ("generate", "forward")]
        known = {name for method in methods if callable(method) for name in inspect.signature(method).parameters}
        for name in options:
            is_known = name in ours or name in known or hasattr(getattr(model, "generation_config", None), name)
            if not is_known and (meant := closest(name, [*ours, *more[3:-1]])):
                raise ConfigError(f"neither a stream nor generate() takes {name!r}{meant}")
        attach = {name: value for name, value in options.items() if name in ours}
        generate = {name: value for name, value in options.items() if name not in ours}
        return self.attach(model, tokenizer, **{"one_thread": True, **attach}), generate

    def analyze(
        self,
        model: Any,
        tokenizer: Any,
        documents: Source,
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
        """Write the hidden states that the pack's probes read, or those at `sites`, for a trainer of your own.

        `data`, `settings`: see `probemon.lab.training.collect.collect`.
        """
        from probemon.lab.training.collect import collect

        return collect(model, tokenizer, data, out, sites=self.pack.sites if sites is None else sites, **settings)
