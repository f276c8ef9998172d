"""MonitorRun: what `manager.attach(...)` yields; watches one host model while its `with` block is open.

    with manager.attach(model, tokenizer) as run:
        run.on("weapon", above=0.9, for_tokens=3, action="stop")
        out = model.generate(**inputs, max_new_tokens=50, stopping_criteria=run.stopping_criteria)
    result = run.result(out)

The watcher hands over tokens with their hidden states in order; the run has them scored, carries what each row
retains, asks the rules, and keeps the recordings that `result` reads.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from probemon.align import Placed
from probemon.arena import PagedArena
from probemon.errors import AlignmentError, ArenaFull, ConfigError, HostMismatch, NotSupportedDecoding
from probemon.events import Event, Rule
from probemon.generation import Prompt
from probemon.host import find_layers, fingerprint, hidden_size
from probemon.pack import ProbePack
from probemon.record import Recording
from probemon.result import Result
from probemon.types import GENERATED, PROMPT, Scores
from probemon.watcher import Generation, States, Watcher

if TYPE_CHECKING:
    from probemon.manager import DynamicProbeManager

Listener = Callable[[Placed, Scores], None]


class MonitorRun:
    """One attachment. Everything is resolved in the constructor, so a bad pack or host leaves nothing behind.

    Raises `HostMismatch` (hidden size, layer count; with `strict` also another model's weights, which
    otherwise warn), `NotSupportedHost`.
    """

    def __init__(self, manager: DynamicProbeManager, model: Any, tokenizer: Any = None, *, strict: bool = False) -> None:
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps a model; generate() runs the one inside
        check_host(manager.pack, model, strict=strict)
        self.manager, self.model, self.tokenizer = manager, model, tokenizer
        self._watcher = Watcher(model, manager.pack.sites, manager.pack.n_probes, self._score, self._check)
        self._plan = manager.plan
        self._rules: list[Rule] = []
        self._listeners: list[Listener] = []
        self._stack = ExitStack()
        self._entered = False

    # -- the face --------------------------------------------------------------------------------

    def on(
        self, concept: str | int, *, above: float | None = None, for_tokens: int = 1,
        action: str | Callable[[Event], object] = "stop",
    ) -> None:  # fmt: skip
        """Act when a concept scores over `above` at `for_tokens` generated tokens in a row.

        `action`: "stop" ends that row of the generation (the token sampled meanwhile is still in the output), a
        callable gets the `Event`. `above` defaults to the alert threshold. The concept is evaluated at every
        token from now on. Raises `UnknownConcept`, `ConfigError`.
        """
        if self._watcher.generating:
            raise ConfigError("run.on cannot change what is watched while generate() runs: call it before")
        pack = self.manager.pack
        probe = pack.find(concept)
        if above is None:
            above = float(pack.alert_threshold[probe])
            if np.isnan(above):
                raise ConfigError(f"{pack.concepts[probe]['id']} has no alert threshold in {pack.name}: give above=")
        if not isinstance(above, (int, float)) or isinstance(above, bool) or np.isnan(above):
            raise ConfigError(f"above is {above!r}: give a score between 0 and 1")
        if not isinstance(for_tokens, int) or isinstance(for_tokens, bool) or for_tokens < 1:
            raise ConfigError(f"for_tokens is {for_tokens!r}: it counts tokens in a row, so give 1 or more")
        if action != "stop" and not callable(action):
            raise ConfigError(f"action is {action!r}: give 'stop' or a callable that takes the event")
        probes = [rule.probe for rule in self._rules] + [probe]
        plan = self.manager.plan_with(probes)
        arena = self.manager.arena
        if isinstance(arena, PagedArena) and int(plan.always.sum()) >= arena.stats().n_slots:
            raise ArenaFull(
                f"with {pack.concepts[probe]['id']} (and its ancestors) {int(plan.always.sum())} probes are always active, the arena has "
                f"{arena.stats().n_slots} slots and needs one more: raise arena_bytes"
            )
        if self._watcher.open:
            self.manager.arena.pin(np.flatnonzero(plan.always))
            self.manager.arena.unpin(np.flatnonzero(self._plan.always))
        self._plan = plan
        self._rules.append(Rule(probe, float(above), for_tokens, action))

    @property
    def stopping_criteria(self) -> StoppingCriteriaList:
        """For `generate(stopping_criteria=...)`: rows that an action stopped. Beside your own criteria, if you have any.

        A stop takes effect without it too (the run sees every step of `generate`): passing it states the intent.
        """
        return StoppingCriteriaList([_Stopped(self._watcher)])

    def listen(self, listener: Listener) -> None:
        """Call `listener(placed, scores)` with every batch of tokens as soon as it is scored."""
        self._listeners.append(listener)

    def stop(self) -> None:
        """End every row of the running generation at its next token, or of the next one if none runs; from any thread."""
        self._watcher.stop_all = True

    @property
    def recordings(self) -> list[Recording]:
        """What was recorded, one entry a `generate()` (or a document of plain forwards), oldest first."""
        return self._watcher.recordings

    @property
    def forward_seconds(self) -> list[float]:
        """Seconds spent in our hooks, one entry a forward of the host."""
        return self._watcher.forward_seconds

    def result(self, out: Any) -> Result:
        """The scores of one `generate()` of this run, given its output (ids `[B, L]` or the output object).

        The ids of plain forwards `model(ids)` may be given as well. Every recorded token is compared with what
        stands in `out`. Raises `AlignmentError` where they differ or nothing recorded belongs to `out`.
        """
        sequences = getattr(out, "sequences", out)
        if not isinstance(sequences, Tensor) or sequences.dim() != 2:
            raise ConfigError(f"out is {type(out).__name__}: give what generate() returned, ids [B, L]")
        ids = sequences.detach().cpu().numpy().astype(np.int64)
        if not self._watcher.recordings:
            raise AlignmentError("nothing was watched: call model.generate() inside the with block")
        newest_first = self._watcher.recordings[::-1]
        recording = next((r for r in newest_first if r.output is sequences), None)
        recording = recording or next((r for r in newest_first if r.matches(ids)), newest_first[0])
        return Result(self.manager.pack, self.tokenizer, recording.tokens(ids))

    # -- attaching -------------------------------------------------------------------------------

    def __enter__(self) -> MonitorRun:
        if self._entered:
            raise ConfigError("a run is entered once: call manager.attach again")
        with ExitStack() as stack:
            arena, always = self.manager.arena, lambda: np.flatnonzero(self._plan.always)
            arena.pin(always())
            stack.callback(lambda: arena.unpin(always()))
            stack.enter_context(self._watcher)
            self._stack = stack.pop_all()
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    # -- scoring ---------------------------------------------------------------------------------

    def _score(self, generation: Generation | None, recording: Recording, placed: Placed, states: States) -> None:
        if not len(placed):
            return
        assert recording.retained is not None
        if placed.phase == PROMPT:
            # np.unique of the reversed rows finds each row's last token: its retained set starts the generation.
            rows, last = np.unique(placed.rows[::-1], return_index=True)
            kept, parts = self.manager.score_prompt(self._plan, states, (len(placed) - 1 - last).tolist())
            scores = Scores.join(parts, self.manager.pack.n_probes, self.manager.config.report_top_k)
            recording.retained[rows] = kept
        else:
            rows = placed.rows
            origin = rows if generation is None or generation.origin is None else generation.origin[rows]
            scores, kept = self.manager.evaluate(
                self._plan, self.manager.engine.inputs(states), recording.retained[origin], np.arange(len(rows))
            )
            recording.retained[rows] = kept
        recording.add(placed, scores)
        if generation is not None and placed.phase == GENERATED:
            generation.acting = True
            try:
                self._act(generation, placed, scores)
            finally:
                generation.acting = False
        for listener in self._listeners:
            listener(placed, scores)

    def _check(self, prompt: Prompt) -> None:
        if prompt.n_beams > 1 and any(rule.action == "stop" for rule in self._rules):
            raise NotSupportedDecoding("a stop cannot end one beam: what it would have continued comes from the others. Use a callable action")

    def _act(self, generation: Generation, placed: Placed, scores: Scores) -> None:
        pack = self.manager.pack
        for number, rule in enumerate(self._rules):
            for i, score in rule.observe(placed, scores, generation.streaks.setdefault(number, {})):
                row = int(placed.rows[i])
                if rule.action == "stop":
                    generation.stop[row] = True
                    continue
                assert callable(rule.action)
                concept = pack.concepts[rule.probe]
                rule.action(
                    Event(
                        concept["id"], concept["name"], tuple(pack.path(rule.probe)), row, int(placed.columns[i]),
                        int(placed.ids[i]), score, rule.above, rule.for_tokens, placed.provisional,
                    )
                )  # fmt: skip


class _Stopped(StoppingCriteria):
    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        like = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return self._watcher.stopped(self._watcher.current(), like)


def check_host(pack: ProbePack, model: Any, *, strict: bool) -> None:
    """Raise `HostMismatch` where the pack cannot read this host; another checkpoint warns, or raises if `strict`."""
    _, layers = find_layers(model)
    stated = pack.manifest["host"]
    size, expected = hidden_size(model), pack.architecture.hidden_size
    name = type(model).__name__
    if size != expected:
        raise HostMismatch(f"{pack.name} reads hidden states of {expected} values, {name} has {size}: the pack is for {stated.get('model_id')}")
    if stated.get("n_layers") not in (None, len(layers)):
        raise HostMismatch(
            f"{pack.name} was made for {stated['n_layers']} layers, {name} has {len(layers)}: the pack is for {stated.get('model_id')}"
        )
    known = stated.get("fingerprint")
    found = None if known is None else fingerprint(model)
    if known == found and known is not None:
        return
    if known is None:
        problem = f"{pack.name} records no fingerprint of its host, so nobody can tell whether {name} is it"
    else:
        problem = f"{pack.name} was made for {stated.get('model_id')} ({known}), this model's weights are others ({found}): scores may mean nothing"
    if strict:
        raise HostMismatch(f"{problem}. Load the model the pack was made for, or attach without strict=True")
    if known is not None:
        warnings.warn(problem, UserWarning, stacklevel=4)

