"""MonitorRun: what `manager.attach(...)` yields; watches one host model while its `with` block is open.

    with manager.attach(model, tokenizer) as run:
        run.on("weapon", above=0.9, for_tokens=3, action="stop")
        out = model.generate(**inputs, max_new_tokens=50, stopping_criteria=run.stopping_criteria)
    result = run.result(out)

Three hooks and a wrapper: before the decoder runs, the tokens of the forward are placed; at each tapped layer
their hidden states are copied out, and scored at the last one; after the decoder, a forward that escaped a tap
is an error. `model.generate` is wrapped on the instance to know where the prompt ends and which rows have ended.
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from probemon.align import Call, Forward, Placed
from probemon.errors import AlignmentError, ConfigError, HostMismatch, NotSupportedDecoding
from probemon.events import Event, Rule
from probemon.generation import batched_entries, read_call, refuse_batched
from probemon.hierarchy import Mask
from probemon.host import find_layers, fingerprint, hidden_size
from probemon.pack import ProbePack
from probemon.record import Recording
from probemon.result import Result
from probemon.tap import Tap
from probemon.types import GENERATED, PROMPT, Scores

if TYPE_CHECKING:
    from probemon.manager import DynamicProbeManager

# Methods put before a model's own: whose they are, and what they shadow.
_SHADOWS: weakref.WeakKeyDictionary[Any, tuple[MonitorRun, Any]] = weakref.WeakKeyDictionary()
Listener = Callable[[Placed, Scores], None]


class MonitorRun:
    """One attachment. Everything is resolved in the constructor, so a bad pack or host leaves nothing behind.

    Raises `HostMismatch` (hidden size, layer count; with `strict` also another model's weights, which
    otherwise warn), `NotSupportedHost`.
    """

    def __init__(self, manager: DynamicProbeManager, model: Any, tokenizer: Any = None, *, strict: bool = False) -> None:
        check_host(manager.pack, model, strict=strict)
        self.manager, self.model, self.tokenizer = manager, model, tokenizer
        self._decoder, _ = find_layers(model)
        self._signature = list(inspect.signature(self._decoder.forward).parameters)
        self._tap = Tap(model, manager.pack.sites, self._tapped)
        self._plan = manager.plan
        self._rules: list[Rule] = []
        self._listeners: list[Listener] = []
        self._recordings: list[Recording] = []
        self._by_cache: weakref.WeakKeyDictionary[Any, Recording] = weakref.WeakKeyDictionary()
        self._current: Recording | None = None  # of the generate() that is running
        self._active: Recording | None = None  # of the forward that is running
        self._waiting: list[Placed] = []
        self._states: list[dict[str, Tensor]] = []
        self._stop: Mask = np.zeros(0, dtype=bool)
        self._stop_all = False
        self._busy = threading.Lock()
        self._stack = ExitStack()
        self._entered = self._open = False
        self._seconds = 0.0
        self.forward_seconds: list[float] = []  # spent in our hooks, one entry a forward of the host

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
        if self._current is not None:
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
        if self._open:
            self.manager.arena.pin(np.flatnonzero(plan.always))
            self.manager.arena.unpin(np.flatnonzero(self._plan.always))
        self._plan = plan
        self._rules.append(Rule(probe, float(above), for_tokens, action))

    @property
    def stopping_criteria(self) -> StoppingCriteriaList:
        """For `generate(stopping_criteria=...)`: rows that an action stopped. Beside your own criteria, if you have any.

        A stop takes effect without it too (the run sees every step of `generate`): passing it states the intent.
        """
        return StoppingCriteriaList([_Stopped(self)])

    def listen(self, listener: Listener) -> None:
        """Call `listener(placed, scores)` with every batch of tokens as soon as it is scored."""
        self._listeners.append(listener)

    def stop(self) -> None:
        """End every row of the running generation at its next token; may be called from another thread."""
        self._stop_all = True

    def result(self, out: Any) -> Result:
        """The scores of one `generate()` of this run, given its output (ids `[B, L]` or the output object).

        The ids of plain forwards `model(ids)` may be given as well. Every recorded token is compared with what
        stands in `out`. Raises `AlignmentError` where they differ or nothing recorded belongs to `out`.
        """
        sequences = getattr(out, "sequences", out)
        if not isinstance(sequences, Tensor) or sequences.dim() != 2:
            raise ConfigError(f"out is {type(out).__name__}: give what generate() returned, ids [B, L]")
        ids = sequences.detach().cpu().numpy().astype(np.int64)
        if not self._recordings:
            raise AlignmentError("nothing was watched: call model.generate() inside the with block")
        newest_first = self._recordings[::-1]
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
            before = self._decoder.register_forward_pre_hook(self._before, with_kwargs=True)
            stack.callback(before.remove)
            stack.enter_context(self._tap)
            after = self._decoder.register_forward_hook(self._after, with_kwargs=True)
            stack.callback(after.remove)
            if hasattr(self.model, "generate"):
                self._shadow(stack, "generate", self._generate)
                self._shadow(stack, "_get_stopping_criteria", self._watched_criteria)
                for name in batched_entries(self.model):
                    self._shadow(stack, name, lambda original, *args, name=name, **kwargs: refuse_batched(name))
            self._stack = stack.pop_all()
        self._entered = self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open = False
        self._stack.close()

    def _shadow(self, stack: ExitStack, name: str, around: Callable[..., Any]) -> None:
        """Put `around(original, ...)` before a method, on the instance; undone, what was there before shows again."""
        attributes = vars(self.model)
        original, previous = getattr(self.model, name), attributes.get(name)

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            # Another run may have shadowed this one and outlived it: then it only passes through.
            return around(original, *args, **kwargs) if self._open else original(*args, **kwargs)

        def restore() -> None:
            if attributes.get(name) is not method:
                return
            below = previous
            while below is not None and below in _SHADOWS and not _SHADOWS[below][0]._open:
                below = _SHADOWS[below][1]  # its run closed first and could not take it away
            del attributes[name]
            if below is not None:
                attributes[name] = below

        _SHADOWS[method] = (self, previous)
        attributes[name] = method
        stack.callback(restore)

    # -- one generate() --------------------------------------------------------------------------

    def _generate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        prompt = read_call(self.model, args, kwargs)
        if not self._busy.acquire(blocking=False):
            raise NotSupportedDecoding(
                "two generate() at once on one model: whose tokens a forward shows would be a guess. Run one after the other"
            )
        try:
            recording = self._new_recording(Call(prompt.columns), prompt.offset)
            self._current, self._stop = recording, np.zeros(0, dtype=bool)
            for rule in self._rules:
                rule.streaks.clear()
            out = original(*args, **kwargs)
        finally:
            # Reset here, not at the start: a stop that came before the first token is still meant.
            self._current, self._active, self._stop_all = None, None, False
            self._busy.release()
        sequences = getattr(out, "sequences", out)
        recording.output = sequences
        if recording.call.frontier < sequences.shape[1] + recording.offset - 1:
            raise AlignmentError(
                f"generate() returned {sequences.shape[1]} columns, the taps saw {max(recording.call.frontier, 0)}: the host ran "
                "forwards past our hooks (was it compiled before probemon was attached?), so nothing is reported"
            )
        return out

    def _new_recording(self, call: Call, offset: int) -> Recording:
        recording = Recording(call, offset, self.manager.pack.n_probes)
        self._recordings.append(recording)
        return recording

    def _watched_criteria(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> StoppingCriteriaList:
        criteria: StoppingCriteriaList = original(*args, **kwargs)
        return criteria if self._current is None else _Watched(criteria, self)

    def _sampled(self, done: Tensor, pads: bool) -> Tensor:
        """The stopping criteria have looked at the tokens just sampled; `pads`: a row that ended is fed padding from now on."""
        done = done | self._stopped(done)
        if self._current is not None and pads:
            self._current.call.ended(done.cpu().numpy())
        elif self._current is not None:
            self._current.call.ended(np.zeros(len(done), dtype=bool))
        return done

    def _stopped(self, like: Tensor) -> Tensor:
        if self._stop_all:
            return torch.ones_like(like)
        if len(self._stop) != len(like):
            return torch.zeros_like(like)
        return torch.from_numpy(self._stop).to(like.device)

    # -- one forward -----------------------------------------------------------------------------

    def _before(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        begin = time.perf_counter()
        given = {**dict(zip(self._signature, args, strict=False)), **kwargs}
        self._active, self._waiting, self._states = None, [], []
        if given.get("cu_seq_lens_q") is not None:
            raise NotSupportedDecoding("continuous batching: the rows of a packed forward cannot be told apart. Detach, or use generate()")
        ids, cache, mask = given.get("input_ids"), given.get("past_key_values"), given.get("attention_mask")
        if ids is None:
            raise NotSupportedDecoding("a forward with inputs_embeds has no token ids to place: give input_ids, or detach")
        if isinstance(mask, Tensor) and mask.dim() != 2:
            raise NotSupportedDecoding(f"an attention mask of {mask.dim()} dimensions hides which columns are padding: give a 2D one")
        start = 0 if cache is None else int(cache.get_seq_length())
        forward = Forward(
            start, ids.detach().cpu().numpy().astype(np.int64),
            mask.detach().cpu().numpy().astype(np.int64) if isinstance(mask, Tensor) else None,
        )  # fmt: skip
        recording = self._current or self._document(forward, cache)
        if recording.call.first_column < 0 and start > 0 and recording.earlier is None:
            recording.earlier = self._known(cache, len(forward.ids))
        self._waiting = recording.call.place(forward)
        if recording.retained is None:
            recording.retained = np.zeros((recording.call.n_rows, self.manager.pack.n_probes), dtype=bool)
            self._stop = np.zeros(recording.call.n_rows, dtype=bool)
        self._states = [{} for _ in self._waiting]
        self._active = recording
        if cache is not None:
            self._by_cache[cache] = recording
        self._seconds = time.perf_counter() - begin

    def _document(self, forward: Forward, cache: Any) -> Recording:
        """The recording a plain forward goes on with: that of its cache if it continues exactly there, else a new one."""
        known = self._known(cache, len(forward.ids))
        if known is not None and known.call.prompt_columns is None and known.call.frontier == forward.start > 0:
            return known
        return self._new_recording(Call(None), 0)

    def _known(self, cache: Any, n_rows: int) -> Recording | None:
        known = None if cache is None else self._by_cache.get(cache)
        return known if known is not None and known.call.n_rows == n_rows else None

    def _tapped(self, site: str, hidden: Tensor) -> None:
        # No forward is open when a layer runs by itself (gradient checkpointing runs it again): not a new token.
        if self._active is None:
            return
        begin = time.perf_counter()
        for placed, states in zip(self._waiting, self._states, strict=True):
            rows, offsets = (torch.from_numpy(x).to(hidden.device) for x in (placed.rows, placed.offsets))
            states[site] = hidden[rows, offsets]  # a copy: the host may reuse its memory
        if all(len(states) == len(self.manager.pack.sites) for states in self._states):
            for placed, states in zip(self._waiting, self._states, strict=True):
                self._score(self._active, placed, states)
            self._waiting, self._states = [], []
        self._seconds += time.perf_counter() - begin

    def _after(self, decoder: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if self._waiting:
            seen = set(self._states[0])
            missing = [site for site in self.manager.pack.sites if site not in seen]
            raise AlignmentError(
                f"a forward of the host ended without reaching {missing}: our hook was removed, or the layer was skipped or compiled"
            )
        cache = getattr(output, "past_key_values", None)
        if cache is not None and self._active is not None:
            self._by_cache[cache] = self._active
        self._active = None
        self.forward_seconds.append(self._seconds)

    def _score(self, recording: Recording, placed: Placed, states: dict[str, Tensor]) -> None:
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
            scores, kept = self.manager.evaluate(
                self._plan, self.manager.engine.inputs(states), recording.retained[rows], np.arange(len(rows))
            )
            recording.retained[rows] = kept
        recording.add(placed, scores)
        self._act(placed, scores)
        for listener in self._listeners:
            listener(placed, scores)

    def _act(self, placed: Placed, scores: Scores) -> None:
        if placed.phase != GENERATED:
            return
        pack = self.manager.pack
        for rule in self._rules:
            for i, score in rule.observe(placed, scores):
                row = int(placed.rows[i])
                if rule.action == "stop":
                    self._stop[row] = True
                    continue
                assert callable(rule.action)
                concept = pack.concepts[rule.probe]
                rule.action(
                    Event(
                        concept["id"], concept["name"], tuple(pack.path(rule.probe)), row, int(placed.columns[i]),
                        int(placed.ids[i]), score, rule.above, rule.for_tokens,
                    )
                )  # fmt: skip


class _Watched(StoppingCriteriaList):
    """generate's own criteria; tells the run which rows have ended, and ends those that an action stopped."""

    def __init__(self, criteria: StoppingCriteriaList, run: MonitorRun) -> None:
        super().__init__(criteria)
        self._inner, self._run = criteria, run

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        done = self._inner(input_ids, scores, **kwargs)
        # generate pads rows that ended exactly where one of its criteria knows the end-of-sequence token.
        return self._run._sampled(done, any(hasattr(criterion, "eos_token_id") for criterion in self))


class _Stopped(StoppingCriteria):
    def __init__(self, run: MonitorRun) -> None:
        self._run = run

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return self._run._stopped(torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device))


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

