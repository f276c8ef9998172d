"""Scorer scores hidden states with packs, for runs and corpora.

scorer = Scorer("demo", keep_top_k=30)
state, scores = scorer.step(None, hidden)             # one token of B sequences, hidden [B, D]
scores = scorer.score_tokens(hidden)                  # one document, hidden [T, D]
everything = scorer.score_all(hidden)                 # fp32 [T, P]
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from probemon.core.concept_names import Wanted
from probemon.core.hierarchy import Ints, Mask
from probemon.core.inputs import FEW, NO_SCORE, NOT_FINITE, NOT_PREPARED, SEEN, Inputs, PreparedInputs, check_states
from probemon.core.plan import CascadePlan
from probemon.core.probes import InputSpec
from probemon.core.scores import AUDITED, Coverage, RowState, Scores
from probemon.core.settings import CascadeConfig, CascadeSettings
from probemon.engine.audit import check_rate, compare
from probemon.engine.build import choose_for, engines_of
from probemon.engine.choice import Choice
from probemon.engine.engine import Engine, Evaluator, StepUnderWay
from probemon.engine.far_states import FarStates
from probemon.engine.joint import JointArena, JointEngine, JointInputs, JointPlan
from probemon.engine.kernels import check_device
from probemon.engine.memory.arena import Arena
from probemon.engine.outcome import Outcome
from probemon.errors import ConfigError
from probemon.packs.configured import ConfiguredPack, configure_group, found
from probemon.packs.group import AnyPack, PackGroup, Packs, never_fires, one_or_several, told_of_never
from probemon.packs.pack import ProbePack
from probemon.util.checks import check_count

LOG = logging.getLogger(__name__)

Hidden = Tensor | Mapping[str, Tensor]
Plan = CascadePlan | JointPlan


class Scorer:
    """Scores hidden states with packs. Settings: see `probemon.manager.DynamicProbeManager`."""

    def __init__(
        self,
        pack: Packs,
        *,
        device: str | torch.device = "cpu",
        impl: str | None = None,
        arena_bytes: int | None = None,
        cache_bytes: int = 256 << 20,
        late: bool = False,
        prefetch: float = 0.0,
        strategy: str = "auto",
        audit_rate: float = 0.0,
        alert_set: str | None = None,
        **settings: Unpack[CascadeSettings],
    ) -> None:
        self.pack = one_or_several(pack)
        if alert_set is not None:
            self.pack = self.pack.with_alert_set(alert_set)
        if 2 * len(never_fires(self.pack)) >= self.pack.n_probes and (told := told_of_never(self.pack)):
            LOG.warning("%s: %s", self.pack.name, told)
        group = self.pack if isinstance(self.pack, PackGroup) else None
        self._parts = (
            [ConfiguredPack.of(self.pack, settings)]
            if isinstance(self.pack, ProbePack)
            else configure_group(self.pack, settings)
        )
        configs = [part.config for part in self._parts]
        self.config: CascadeConfig | dict[str, CascadeConfig] = (
            configs[0] if group is None else dict(zip(group.packs, configs, strict=True))
        )
        self.report_top_k = max(config.report_top_k for config in configs)
        self.audit_rate = check_rate(audit_rate)
        memory = {"arena_bytes": arena_bytes, "cache_bytes": cache_bytes, "late": late, "prefetch": prefetch}
        self._arguments: dict[str, Any] = {**memory, "audit_rate": self.audit_rate, **settings}
        self.device = check_device(device)
        self.impl, self.impl_why = choose_for([part.pack for part in self._parts], impl, self.device)
        self._alert = self.pack.alert_threshold.numpy()
        dtypes = sorted({str(part.pack.input_dtype).removeprefix("torch.") for part in self._parts})
        self._reasons = {
            SEEN: "",
            NOT_FINITE: "hidden state is not finite",
            NOT_PREPARED: f"hidden state is finite, but not once normalised and rounded to {' and '.join(dtypes)}",
            NO_SCORE: "its score is not a number: with a state this large, sums of an active probe overflow float32",
        }
        self._hidden_size = self._parts[0].pack.architecture.hidden_size
        self._thresholds = [
            (tensor, tensor._version)
            for one in (self.pack, *(part.pack for part in self._parts))
            for tensor in (one.alert_threshold, one.expand_threshold)
            if not tensor.is_inference()  # these have no version
        ]
        self._familiar = _familiar_inputs([part.pack for part in self._parts], self.device, self.impl)
        self.plan = self.plan_with(())
        engines = engines_of(
            self._parts,
            self.device,
            self.impl,
            arena_bytes=arena_bytes,
            cache_bytes=cache_bytes,
            late=late,
            prefetch=prefetch,
        )
        self._maker = engines[0].scorer.inputs
        self._makes_few = len(self._familiar) == 1 and self.device.type == "cpu"  # inputs and far states in one call
        self.arena: Arena | JointArena = engines[0].arena if group is None else JointArena(group, engines)
        self.engine = self._evaluator(engines)
        self.strategy = self.engine.choose(self.plan, strategy)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy or unpickle with the same kernel and strategy."""
        arguments = {**self._arguments, "device": str(self.device), "impl": self.impl}
        choices = self.strategy, [engine.choice for engine in _engines_in(self.engine)]
        return _rebuilt, (type(self), self.pack, arguments, self.impl_why, choices)

    def __repr__(self) -> str:
        thresholds = "" if self.pack.alert_set is None else f", thresholds {self.pack.alert_set!r}"
        return (
            f"{type(self).__name__}({self.pack.name!r}, {self.pack.n_probes} probes{thresholds}, {self.impl} on"
            f" {self.device}, {self.strategy.step} for a token, {self.strategy.batch} for a prompt)"
        )

    @property
    def not_numbers(self) -> frozenset[str]:
        """Reasons why a state or a score is not a number."""
        return frozenset(self._reasons.values()) - {""}

    def plan_with(
        self, extra: Sequence[str | int], exclude: Wanted | None = None, always_on: Sequence[str | int] | None = None
    ) -> Plan:
        """Return the plan with `extra` concepts always on; `exclude`, `always_on` replace the settings.

        Raises `UnknownConcept`, `ConfigError`.
        """
        if not isinstance(self.pack, PackGroup):
            return self._parts[0].plan_with(extra, exclude, always_on)
        group = self.pack
        probe_lists: list[list[int] | None] = [[group.find(concept) for concept in extra], None, None]
        if exclude is not None:
            probe_lists[1] = found(group, exclude)
        if always_on is not None:
            probe_lists[2] = [group.find(concept) for concept in always_on]
        lists_of_packs = [None if probes is None else group.split(probes) for probes in probe_lists]
        plans = []
        for at, part in enumerate(self._parts):
            added, excluded, always = (None if parts is None else parts[at].tolist() for parts in lists_of_packs)
            plans.append(part.plan_with(added or (), excluded, always))
        return JointPlan.of(group, plans)

    def step(self, state: RowState | None, hidden: Hidden) -> tuple[RowState, Scores]:
        """Score one token of B sequences, hidden [B, D]; `state=None` begins with empty retained sets.

        A token is unseen if its hidden state or a score is not a number; its retained set stays. Raises `ConfigError`.
        """
        sites = self._sites(hidden)
        inputs, far = self._inputs(sites)
        n, shape = len(inputs), (len(inputs), self.pack.n_probes)
        if state is not None and not isinstance(state, RowState):
            raise ConfigError(
                f"state is {type(state).__name__}: give None to begin, or the RowState that the last step returned"
            )
        retained = np.zeros(shape, dtype=bool) if state is None else state.retained
        if not isinstance(retained, np.ndarray):
            raise ConfigError(f"state holds {type(retained).__name__}: give a state of bool {list(shape)}")
        if retained.shape != shape or retained.dtype != np.bool_:
            raise ConfigError(
                f"state holds {retained.dtype} {list(retained.shape)}, hidden {n} rows: give a state of"
                f" bool {list(shape)}"
            )
        if state is not None:
            self._check_fits(retained)
        scores, kept = self.evaluate(self.plan, inputs, retained, np.arange(n), far=far)
        return RowState(kept), scores

    def score_tokens(self, hidden: Hidden, prompt_len: int | None = None) -> Scores:
        """Score one document, hidden [T, D]: `prompt_len` tokens (default all) memorylessly, then step by step."""
        sites = self._sites(hidden)
        n_tokens = len(next(iter(sites.values())))
        if prompt_len is None:
            prompt_len = n_tokens
        remedy = f"give a number of the document's {n_tokens} tokens"
        n_prompt = check_count("prompt_len", prompt_len, most=n_tokens, remedy=remedy)
        state, parts = self.score_prompt(self.plan, {site: x[:n_prompt] for site, x in sites.items()}, [n_prompt - 1])
        kept = state if n_prompt else np.zeros((1, self.pack.n_probes), dtype=bool)
        row = RowState(kept)
        for t in range(n_prompt, n_tokens):
            row, scores = self.step(row, {site: x[t : t + 1] for site, x in sites.items()})
            parts.append(scores)
        return Scores.join(parts, self.pack.n_probes, self.report_top_k)

    def score_all(self, hidden: Hidden) -> Tensor:
        """Return all scores, fp32 [T, P]; NaN if there is none."""
        sites = self._sites(hidden)
        n_tokens, size = len(next(iter(sites.values()))), self.engine.batch_size()
        parts = [torch.empty(0, self.pack.n_probes, dtype=torch.float32, device="cpu")]
        for at in range(0, n_tokens, size):
            inputs = self.engine.inputs({site: x[at : at + size] for site, x in sites.items()})
            scores = self.engine.everything(inputs)
            scores[inputs.unseen != SEEN] = np.nan
            parts.append(torch.from_numpy(scores))
        return torch.cat(parts)

    # -- for runs --------------------------------------------------------------------------------

    def score_prompt(
        self,
        plan: Plan,
        sites: Mapping[str, Tensor],
        last: Sequence[int],
        *,
        audit: Mask | None = None,
        strategy: str | None = None,
    ) -> tuple[Mask, list[Scores]]:
        """Score tokens `[N, D]` memorylessly; return the retained sets `[len(last), P]` of the tokens `last`.

        `audit [N]`: tokens to audit.
        """
        n_tokens, size = len(next(iter(sites.values()))), self.engine.batch_size()
        kept = np.zeros((len(last), self.pack.n_probes), dtype=bool)
        keep, parts = np.asarray(last, dtype=np.int64), []
        for at in range(0, n_tokens, size):
            batch = {site: x[at : at + size] for site, x in sites.items()}
            inputs, far = self._inputs(batch)
            in_batch = np.flatnonzero((keep >= at) & (keep < at + size))
            batch_audit = None if audit is None else audit[at : at + size]
            scores, kept[in_batch] = self.evaluate(
                plan, inputs, None, keep[in_batch] - at, batch_audit, strategy, far=far
            )
            parts.append(scores)
        return kept, parts

    def evaluate(
        self,
        plan: Plan,
        inputs: Inputs | JointInputs,
        retained: Mask | None,
        keep: Ints,
        audit: Mask | None = None,
        strategy: str | None = None,
        far: Ints | Tensor | None = None,
    ) -> tuple[Scores, Mask]:
        """Score N states from `retained` (None: memoryless); return scores and the retained sets of the states `keep`.

        `far [N]`: states unlike the calibration's.
        """
        outcome = self.engine.evaluate(plan, inputs, retained, keep, strategy)
        audited = None if audit is None else self._audited(plan, inputs, outcome, audit)
        return self.scores_of(plan, outcome, audited, far)

    def begin(self, plan: Plan, hidden: Mapping[str, Tensor], retained: Mask, audit: Mask | None = None) -> BegunStep:
        """Begin a step of states `[N, D]`, alongside the model."""
        prepared = PreparedInputs()
        keep, far = np.arange(len(retained)), self._far(hidden, prepared)
        if audit is None:
            return BegunStep(self, plan, self.engine.begin(plan, hidden, retained, keep, prepared), far=far)
        inputs = self.engine.inputs(hidden, prepared)
        outcome = self.engine.evaluate(plan, inputs, retained, keep)
        return BegunStep(self, plan, outcome, self._audited(plan, inputs, outcome, audit), far)

    def _inputs(self, hidden: Mapping[str, Tensor]) -> tuple[Any, Ints | Tensor | None]:
        prepared = PreparedInputs()
        far = self._far(hidden, prepared)
        return self.engine.inputs(hidden, prepared), far

    def _far(self, hidden: Mapping[str, Tensor], prepared: PreparedInputs) -> Ints | Tensor | None:
        """Return which states `[N, D]` are unlike the calibration, `[N]`; None if unknown. Adds to `prepared`."""
        if self._makes_few and len(hidden[self._familiar[0][0].site]) <= FEW:
            spec, far_states = self._familiar[0]
            few_far = self._maker.prepare_few(hidden, spec, far_states.terms, prepared)
            if few_far is not None:
                return few_far
        in_autocast = torch.is_autocast_enabled(self.device.type)  # would round products
        far = []
        with torch.autocast(self.device.type, enabled=False) if in_autocast else nullcontext():
            for spec, far_states in self._familiar:
                key = spec, torch.float32
                if key not in prepared:
                    prepared[key] = self._maker.exact(hidden[spec.site], spec)
                far.append(far_states(prepared[key]))
        return None if not far else far[0] if len(far) == 1 else torch.stack(far).amax(0)

    def _audited(self, plan: Plan, inputs: Inputs | JointInputs, outcome: Outcome, audit: Mask) -> dict[str, Ints]:
        """Count what active sets missed, `[N]` each."""
        at = np.flatnonzero(audit & (outcome.unseen == SEEN))
        counts = {name: np.zeros(len(inputs), dtype=np.int64) for name in AUDITED}
        for chunk in np.array_split(at, -(-len(at) // self.engine.batch_size())) if len(at) else ():
            active = np.zeros((len(chunk), self.pack.n_probes), dtype=bool)
            for i, state in enumerate(chunk):
                active[i, outcome.probes[outcome.ptr[state] : outcome.ptr[state + 1]]] = True
            everything, alert = self.engine.everything(inputs.take(chunk)), self._alert
            if plan.watched is not None:
                everything, alert, active = everything[:, plan.watched], alert[plan.watched], active[:, plan.watched]
            for name, values in compare(everything, alert, active).items():
                counts[name][chunk] = values
        counts["audited"][at] = 1
        return counts

    def scores_of(
        self, plan: Plan, outcome: Outcome, audited: Mapping[str, Ints] | None = None, far: Ints | Tensor | None = None
    ) -> tuple[Scores, Mask]:
        """Return an outcome's scores and the next retained sets.

        Raises `ConfigError` if thresholds were modified: plans still use the old ones.
        """
        if any(tensor._version != version for tensor, version in self._thresholds):
            raise ConfigError(
                f"thresholds of {self.pack.name} were modified after the manager was made, and it still opens concepts"
                " by the old ones: make another manager"
            )
        n, p = len(outcome.unseen), self.pack.n_probes
        not_reached, unseen = p - outcome.n_active - outcome.n_dropped, ("",) * n
        none = np.zeros(n, dtype=np.int64)
        excluded = none + plan.n_excluded if plan.n_excluded else none
        shed = none + plan.n_shed if plan.n_shed else none
        is_far = none if far is None else far if isinstance(far, np.ndarray) else far.cpu().numpy()
        if outcome.unseen[0] if n == 1 else outcome.unseen.any():
            seen = outcome.unseen == SEEN
            not_reached, excluded, shed, is_far = (
                np.where(seen, counts, 0) for counts in (not_reached, excluded, shed, is_far)
            )
            unseen = tuple(self._reasons[reason] for reason in outcome.unseen.tolist())
        coverage = Coverage(
            n_probes=p,
            active=outcome.n_active,
            dropped=outcome.n_dropped,
            not_reached=not_reached,
            evaluated=outcome.n_evaluated,
            released=outcome.n_released,
            late=outcome.n_late,
            excluded=excluded,
            shed=shed,
            unseen=unseen,
            far=is_far,
            from_cache=none,
            **(audited or dict.fromkeys(AUDITED, none)),
        )
        scores = Scores(
            ptr=outcome.ptr,
            probes=outcome.probes,
            values=outcome.values,
            fired_mask=outcome.fired,
            coverage=coverage,
            report_top_k=self.report_top_k,
        )
        return scores, outcome.kept

    # -- private ---------------------------------------------------------------------------------

    def _evaluator(self, engines: Sequence[Engine]) -> Evaluator:
        return JointEngine(self.pack, engines) if isinstance(self.pack, PackGroup) else engines[0]

    def _check_fits(self, retained: Mask) -> None:
        """Raise `ConfigError` for retained sets of other settings."""
        remedy = "give a state that a step of this manager returned, or None to begin"
        if self.plan.watched is not None:
            left_out = np.flatnonzero((retained & ~self.plan.watched).any(axis=0))
            if len(left_out):
                concept = self.pack.concepts[int(left_out[0])]["id"]
                raise ConfigError(f"state retains {concept!r}, which this manager leaves out: {remedy}")
        numbers: list[Any] = self.pack.numbers if isinstance(self.pack, PackGroup) else [slice(None)]
        for part, number in zip(self._parts, numbers, strict=True):
            most = part.config.max_loaded_probes
            if part.pack.n_probes <= most:
                continue
            n = int(np.count_nonzero(retained[:, number], axis=1).max(initial=0))
            if n > most:
                raise ConfigError(f"state retains {n} probes of a row, max_loaded_probes is {most}: {remedy}")

    def _sites(self, hidden: Hidden) -> dict[str, Tensor]:
        if isinstance(hidden, Tensor):
            if len(self.pack.sites) != 1:
                raise ConfigError(f"the pack reads {self.pack.sites}: give hidden as a dict of these")
            hidden = {self.pack.sites[0]: hidden}
        elif not isinstance(hidden, Mapping):
            raise ConfigError(
                f"hidden is {type(hidden).__name__}: give a tensor [N, {self._hidden_size}] (torch.from_numpy makes one"
                " of an array), or a dict of one for each site"
            )
        lengths = {}
        for site in self.pack.sites:
            if site not in hidden:
                raise ConfigError(f"hidden has no site {site!r}, which the pack reads; it has {list(hidden)}")
            if not isinstance(hidden[site], Tensor):
                raise ConfigError(
                    f"hidden at {site} is {type(hidden[site]).__name__}: give a tensor [N, {self._hidden_size}]"
                )
            check_states(hidden[site], self._hidden_size, f"hidden at {site}")
            lengths[site] = hidden[site].shape[0]
        if len(set(lengths.values())) != 1:
            raise ConfigError(f"hidden states of the sites have different lengths {lengths}: give as many at each")
        return {site: hidden[site].detach() for site in self.pack.sites}


class BegunStep:
    """A step begun by `Scorer.begin`."""

    def __init__(
        self,
        scorer: Scorer,
        plan: Plan,
        step: Outcome | StepUnderWay,
        audited: Mapping[str, Ints] | None = None,
        far: Ints | Tensor | None = None,
    ) -> None:
        self._scorer, self._plan, self._step, self._audited, self._far = scorer, plan, step, audited, far

    def wait(self) -> tuple[Scores, Mask]:
        """Return scores and the next retained sets `[N, P]` when ready; call it once."""
        outcome = self._step if isinstance(self._step, Outcome) else self._step.wait()
        return self._scorer.scores_of(self._plan, outcome, self._audited, self._far)


def _rebuilt(
    kind: type[Scorer], pack: AnyPack, arguments: Mapping[str, Any], impl_why: str, choices: tuple[Choice, list[Choice]]
) -> Scorer:
    manager = kind(pack, strategy="descent", **arguments)
    manager.impl_why = impl_why
    manager.strategy, engine_choices = choices
    manager.engine.choice = manager.strategy
    for engine, choice in zip(_engines_in(manager.engine), engine_choices, strict=True):
        engine.choice = choice
    return manager


def _familiar_inputs(packs: Sequence[ProbePack], device: torch.device, impl: str) -> list[tuple[InputSpec, FarStates]]:
    few: Any = None
    if impl == "numba":
        from probemon.engine.kernels.numba_inputs import far_few

        few = far_few
    distinct = {
        (spec, id(familiar)): (spec, FarStates(familiar, device, few))
        for pack in packs
        for spec, familiar in zip(pack.inputs, pack.familiar, strict=True)
        if familiar is not None
    }
    return list(distinct.values())


def _engines_in(evaluator: Evaluator) -> Sequence[Evaluator]:
    return evaluator.engines if isinstance(evaluator, JointEngine) else [evaluator]
