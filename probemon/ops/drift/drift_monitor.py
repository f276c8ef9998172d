"""Detects drift of a model, its probes or its requests from a frozen reference.

    drift = DriftMonitor(manager)                           # the pack's reference, if any
    with manager.attach(model, tokenizer, followers=[drift]) as run: ...
    drift.alarms, drift.report()
    drift.freeze("reference.json")

A request is a sequence of a generation, or a document. It is compared only if every token was seen and no probe
dropped. Requests of other models are reported, not compared.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from probemon.core.drift_reference import DriftReference
from probemon.core.hierarchy import Ints
from probemon.core.request_counts import RequestCounts, RequestTraits, norm_of_bin, score_of_bin
from probemon.engine.joint import JointPlan
from probemon.engine.scorer import Plan, Scorer
from probemon.errors import CalibrationError, ConfigError
from probemon.host.changes import ModelMark
from probemon.host.identity import ModelIdentities, changed
from probemon.monitor.check import OK, WARNING, Check
from probemon.monitor.followers import Follower
from probemon.ops.drift.drift_requests import RunRequests
from probemon.ops.drift.drift_tests import BLOCK, KINDS, Difference, DriftTests
from probemon.packs.group import AnyPack, PackGroup
from probemon.packs.manifest import PROBES
from probemon.packs.opened import rewritten_weights
from probemon.util.checks import check_callable

if TYPE_CHECKING:
    from probemon.monitor.run import MonitorRun

LOG = logging.getLogger("probemon")
HOST = "host"
ALARM_KINDS = (*KINDS, HOST)
LEAST_REQUESTS = 100  # of a reference
_LEFT_OUT_SHARE = 0.05  # of requests; above it, a check warns
_TEXTS = 3


@dataclass(frozen=True)
class DriftAlarm:
    """A difference from the reference. `str()` is a sentence.

    - `concept`: an id, a site (`norms`) or "" (`host`)
    - `reference`, `observed`: shares of requests, or medians (`scores`, `norms`)
    - `n`: newest requests that were looked at
    - `p`: probability by chance, of this comparison alone
    """

    kind: str
    concept: str
    reference: float
    observed: float
    n: int
    p: float
    sentence: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.sentence}"


class DriftMonitor(Follower):
    """Compares the requests of a manager's runs. Threads and runs may share it, unless open runs have the same
    requests.

    `reference`: None for the pack's; without any, it only counts. Raises `ConfigError` if it has other probes or
    thresholds, or too few requests.
    """

    def __init__(self, manager: Scorer, reference: DriftReference | str | Path | None = None) -> None:
        pack, plan = manager.pack, manager.plan
        if isinstance(reference, (str, Path)):
            reference = DriftReference.read(reference)
        elif reference is None:
            reference = getattr(pack, "drift_reference", None)
        if reference is not None:
            check_reference(reference, pack)
        self.reference = reference
        # all concepts if the descent finds all that fires, else those always evaluated
        self._finds_all = _finds_all(pack, plan)
        comparable = np.ones(pack.n_probes, dtype=bool) if self._finds_all else plan.always.copy()
        wanted = np.asarray([not concept.get("bounding") for concept in pack.concepts], dtype=bool)
        if plan.watched is not None:
            wanted &= plan.watched
        comparable &= wanted
        self._n_concepts = int(wanted.sum())
        self.probes: Ints = np.flatnonzero(comparable)
        self.scored_probes: Ints = np.flatnonzero(plan.always)
        self.sites: tuple[str, ...] = tuple(pack.sites)
        self._plan = plan
        self.alert = pack.alert_threshold.numpy().copy()
        self._pack, self._concepts, self._n_probes = pack, pack.concepts, pack.n_probes
        self._model_alarm: DriftAlarm | None = None
        self._identities = ModelIdentities()
        self._on_alarm: list[Callable[[DriftAlarm], object]] = []
        self.n_alarms = self.n_requests = self.n_incomplete = self.n_of_other_models = 0
        self._host: Mapping[str, str] = {}
        self._lock = threading.RLock()
        self._runs: weakref.WeakSet[RunRequests] = weakref.WeakSet()
        self._select()
        self._total: RequestCounts
        self._uncounted: list[RequestTraits] = []  # not yet in the total
        self._uncompared: list[RequestTraits] = []  # of the reference's model, since the last look
        self._tests = None if self._compared is None else DriftTests(self._compared)
        self._begin_counts()

    # -- public --------------------------------------------------------------------------------------

    @property
    def alarms(self) -> tuple[DriftAlarm, ...]:
        """Present alarms. One ends when no look at 1,000 consecutive requests shows it."""
        with self._lock:
            model_alarms = () if self._model_alarm is None else (self._model_alarm,)
            return model_alarms if self._tests is None else (*model_alarms, *map(self._alarm, self._tests.held))

    def counts(self) -> dict[str, int]:
        """Return the number of present alarms by kind."""
        alarms = self.alarms
        return {kind: sum(alarm.kind == kind for alarm in alarms) for kind in ALARM_KINDS}

    def on_alarm(self, action: Callable[[DriftAlarm], object]) -> None:
        """Call `action(alarm)` for new alarms, in a request's thread."""
        check_callable("on_alarm", action)
        self._on_alarm.append(action)

    def report(self) -> dict[str, Any]:
        """Return the state for JSON.

        - `n_requests`: compared, or only counted
        - `n_incomplete`, `n_of_other_models`: left out
        - `n_concepts`, `n_scored`: concepts compared by fires, and by scores
        - `alarms`, `n_alarms`: present ones, and how many were raised
        """
        with self._lock:
            return {
                "n_requests": self.n_requests,
                "n_incomplete": self.n_incomplete,
                "n_of_other_models": self.n_of_other_models,
                "n_reference": 0 if self.reference is None else self.reference.counts.n,
                "n_concepts": len(self._judged),
                "n_scored": len(self._judged_scored),
                "alarms": [asdict(alarm) for alarm in self.alarms],
                "n_alarms": self.n_alarms,
            }

    def check(self) -> Check:
        """Return the drift check of `run.health()`."""
        name = "drift"
        with self._lock:
            alarms, n, n_uncompared = self.alarms, self.n_requests, len(self._uncompared)
            n_incomplete, n_of_others = self.n_incomplete, self.n_of_other_models
        others = f"{n_of_others:,} of {n + n_of_others:,} requests were not compared: of other models"
        note = f"; {others}" if n_of_others else ""
        if alarms:
            rest = f"; and {len(alarms) - _TEXTS} more" if len(alarms) > _TEXTS else ""
            what = "; ".join(map(str, alarms[:_TEXTS])) + rest + note
            return Check(name, WARNING, what, "See what changed: traffic, model or probes (docs/drift.md).")
        if self.reference is None:
            what = f"{n:,} requests were counted, and there is no reference to compare them with"
            return Check(name, WARNING, what, "Calibrate the pack, or freeze these and give the file to DriftMonitor.")
        if n_incomplete > _LEFT_OUT_SHARE * (n + n_incomplete):
            cannot = f"{n_incomplete:,} of {n + n_incomplete:,} requests cannot be compared"
            what = f"{cannot}: tokens unseen, or probes dropped{note}"
            return Check(name, WARNING, what, "See coverage: raise max_loaded_probes, and look at the other checks.")
        if n_of_others > _LEFT_OUT_SHARE * (n + n_of_others):
            remedy = "Give each model a separate DriftMonitor and reference (docs/drift.md)."
            return Check(name, WARNING, f"{others} than the reference's", remedy)
        if n < BLOCK:
            return Check(name, OK, f"{n:,} requests were counted, and the first look is at {BLOCK}{note}")
        compared = f"{n - n_uncompared:,} requests are like the {self.reference.counts.n:,} of the reference"
        n_judged, n_concepts = len(self._judged), self._n_concepts
        if n_judged < n_concepts:
            compared += f" in {n_judged:,} of {n_concepts:,} concepts, and nothing is known of the others"
        if not n_judged:
            remedy = "Watch with load_threshold='exact', or freeze a reference of this manager (docs/drift.md)."
            return Check(name, WARNING, compared + note, remedy)
        return Check(name, OK, compared + note)

    def freeze(self, path: str | Path | None = None) -> DriftReference:
        """Return a reference of all requests since the model last changed; write it to `path`.

        Raises `CalibrationError` for fewer than 100, `ConfigError` for a file that cannot be written.
        """
        with self._lock:
            counts = self._total + RequestCounts.of(self._uncounted) if self._uncounted else self._total
            identity = dict(self._host)
        if counts.n < LEAST_REQUESTS:
            raise CalibrationError(
                f"{counts.n} whole requests were counted of this model, a reference needs {LEAST_REQUESTS} or more:"
                " with 1,000 a doubled rate of one in five is found, with 10,000 one of one in ten"
            )
        places = {probe: place for place, probe in enumerate(self.probes.tolist())}
        scored = [at for at, probe in enumerate(self.scored_probes.tolist()) if probe in places]
        frozen = DriftReference(
            tuple(self._concepts[probe]["id"] for probe in self.probes.tolist()),
            np.asarray([places[int(self.scored_probes[at])] for at in scored], dtype=np.int64),
            self.sites,
            counts.take(self.probes, np.asarray(scored, dtype=np.int64), np.arange(len(self.sites))),
            identity,
            _packs(self._pack),
            self._pack.alert_set,
            self.alert[self.probes],
        )
        if path is not None:
            frozen.write(path)
        return frozen

    def attaching(self, run: MonitorRun) -> Sequence[str]:
        """Raise `ConfigError` if a run has other probes or thresholds than the manager."""
        pack = run.manager.pack
        if _packs(pack) != _packs(self._pack) or not np.array_equal(
            pack.alert_threshold.numpy(), self.alert, equal_nan=True
        ):
            raise ConfigError(
                f"this DriftMonitor counts by the probes and alert thresholds of {self._pack.name}, and those of this"
                f" run ({pack.name}{f', alert set {pack.alert_set}' if pack.alert_set else ''}) are others: make one of"
                " its manager"
            )
        return ()

    def began(self, run: MonitorRun) -> None:
        """Follow a run. Raises `ConfigError` if its requests would be counted twice."""
        only = threading.current_thread() if run.options.one_thread else None
        run.follow(RunRequests(self, run.model, run.tokenizer, only))

    def begin(self, run: RunRequests) -> None:
        """Register a run."""
        with self._lock:
            if any(run.shares_with(other) for other in self._runs):
                raise ConfigError(
                    "this DriftMonitor counts the requests of an open run of this model, and this run watches the same"
                    " ones: each would count twice, and chance would look like drift. Give attach(..., one_thread=True)"
                    " if each thread has a separate run, or the second run a separate DriftMonitor"
                )
            self._runs.add(run)

    def end(self, run: RunRequests) -> None:
        """Forget a run."""
        with self._lock:
            self._runs.discard(run)

    # -- requests, as they end -----------------------------------------------------------------------

    def compares(self, plan: Plan) -> bool:
        """True if a plan scores at least what the manager's plan does."""
        if self._finds_all and not _finds_all(self._pack, plan):
            return False
        masks = [
            np.ones(self._n_probes, dtype=bool) if one.watched is None else one.watched for one in (plan, self._plan)
        ]
        return bool(plan.always[self.scored_probes].all()) and bool((masks[0] == masks[1]).all())

    def leave_out(self) -> None:
        """Count a request that cannot be compared."""
        with self._lock:
            self.n_incomplete += 1

    def add(self, traits: RequestTraits, host: Mapping[str, str]) -> None:
        """Add an ended request; `host`: the model's identity."""
        raised: list[DriftAlarm] = []
        with self._lock:
            if host != self._host:
                raised += self._change_model(host)
            self._uncounted.append(traits)
            if len(self._uncounted) == BLOCK:
                self._total, self._uncounted = self._total + RequestCounts.of(self._uncounted), []
            if self._model_alarm is None:
                self.n_requests += 1
                raised += self._compare(traits)
            else:
                self.n_of_other_models += 1
        for alarm in raised:
            LOG.warning("drift: %s", alarm)
            for action in self._on_alarm:
                try:
                    action(alarm)
                except Exception as error:
                    LOG.error("on_alarm failed: %s: %s", type(error).__name__, error)

    def identity(self, model: Any, tokenizer: Any, mark: ModelMark | None) -> Mapping[str, str]:
        """Return the identity of a model with this `mark`."""
        with self._lock:
            return self._identities.of(model, tokenizer, mark)

    # -- inside --------------------------------------------------------------------------------------

    def _select(self) -> None:
        reference, none = self.reference, np.zeros(0, dtype=np.int64)
        self._judged = self._judged_scored = self._judged_sites = none
        self._compared: RequestCounts | None = None
        if reference is None:
            return
        place = {concept: at for at, concept in enumerate(reference.ids)}
        scored = {reference.ids[at]: number for number, at in enumerate(reference.scored.tolist())}
        ids = [concept["id"] for concept in self._concepts]
        self._judged = np.asarray([probe for probe in self.probes.tolist() if ids[probe] in place], dtype=np.int64)
        scored_probes = self.scored_probes.tolist()
        in_both = [(at, scored[ids[probe]]) for at, probe in enumerate(scored_probes) if ids[probe] in scored]
        self._judged_scored = np.asarray([at for at, _ in in_both], dtype=np.int64)
        sites = [(at, reference.sites.index(site)) for at, site in enumerate(self.sites) if site in reference.sites]
        self._judged_sites = np.asarray([at for at, _ in sites], dtype=np.int64)
        self._compared = reference.counts.take(
            np.asarray([place[ids[probe]] for probe in self._judged.tolist()], dtype=np.int64),
            np.asarray([number for _, number in in_both], dtype=np.int64),
            np.asarray([number for _, number in sites], dtype=np.int64),
        )

    def _begin_counts(self) -> None:
        self._uncounted = []
        self._total = RequestCounts.none(self._n_probes, len(self.scored_probes), len(self.sites))

    def _compare(self, traits: RequestTraits) -> list[DriftAlarm]:
        if self._tests is None:
            return []
        self._uncompared.append(traits)
        if len(self._uncompared) < BLOCK:
            return []
        counts, self._uncompared = RequestCounts.of(self._uncompared), []
        compared = counts.take(self._judged, self._judged_scored, self._judged_sites)
        raised = [self._alarm(difference) for difference in self._tests.add(compared)]
        self.n_alarms += len(raised)
        return raised

    def _change_model(self, identity: Mapping[str, str]) -> list[DriftAlarm]:
        self._host, self._model_alarm = identity, None
        self._begin_counts()
        differences = [] if self.reference is None else changed(self.reference.host, identity)
        if not differences:
            return []
        sentence = (
            f"the model is not the reference's: {'; '.join(differences)}. That is a change of configuration, so its"
            " requests are not compared"
        )
        self._model_alarm = DriftAlarm(HOST, "", 0.0, 0.0, 0, 0.0, sentence)
        self.n_alarms += 1
        return [self._model_alarm]

    def _alarm(self, difference: Difference) -> DriftAlarm:
        kind, then, now = difference.kind, difference.reference, difference.observed
        assert self.reference is not None
        newest, whole = f"the newest {difference.n:,} requests", f"the reference's {self.reference.counts.n:,}"
        chance = f"(p = {difference.p:.1g})"
        if kind == "norms":
            concept = self.sites[self._judged_sites[difference.place]]
            then, now = norm_of_bin(int(then)), norm_of_bin(int(now))
            sentence = (
                f"hidden states at {concept} have other norms in {difference.distance:.0%} or more of {newest}: their"
                f" median is {now:.3g}, in {whole} {then:.3g} {chance}"
            )
            return DriftAlarm(kind, concept, then, now, difference.n, difference.p, sentence)
        judged = self._judged if kind == "base_rate" else self.scored_probes[self._judged_scored]
        concept, name = (self._concepts[int(judged[difference.place])][key] for key in ("id", "name"))
        label = name if name == concept else f"{name} ({concept})"
        if kind == "base_rate":
            sentence = f"{label} fires in {now:.2%} of {newest}, in {then:.2%} of {whole} {chance}"
        elif kind == "scores":
            then, now = score_of_bin(int(then)), score_of_bin(int(now))
            sentence = (
                f"{label} has other highest scores in {difference.distance:.0%} or more of {newest}: their median is"
                f" {now:.3g}, in {whole} {then:.3g} {chance}"
            )
        else:
            what = f"{difference.what} at nearly all tokens" if kind == "saturated" else difference.what
            sentence = f"the score of {label} is {what} of {now:.1%} of {newest}, of {then:.1%} of {whole} {chance}"
        return DriftAlarm(kind, concept, then, now, difference.n, difference.p, sentence)


def _finds_all(pack: AnyPack, plan: Plan) -> bool:
    """True if all that fires is found: by the path rule, with no expand_threshold above an alert threshold below."""
    plans = plan.plans if isinstance(plan, JointPlan) else (plan,)
    packs = list(pack.packs.values()) if isinstance(pack, PackGroup) else [pack]
    for member, member_plan in zip(packs, plans, strict=True):
        alert = np.where(np.isnan(member.alert_threshold.numpy()), np.float32(np.inf), member.alert_threshold.numpy())
        below = member_plan.tree.min_over_descendants(alert)
        if (
            not member_plan.path_rule
            or member_plan.config.max_rounds is not None
            or (member_plan.expand_threshold > below).any()
        ):
            return False
    return True


def _packs(pack: AnyPack) -> dict[str, str]:
    packs = pack.packs if isinstance(pack, PackGroup) else {pack.name: pack}
    return {name: rewritten_weights(one) or one.manifest["files"][PROBES]["sha256"] for name, one in packs.items()}


def check_reference(reference: DriftReference, pack: AnyPack) -> None:
    """Raise `ConfigError` for a reference of other probes or thresholds, or of too few requests."""
    if reference.packs and dict(reference.packs) != _packs(pack):
        raise ConfigError(
            f"the reference is of other probes ({', '.join(reference.packs)}, and the hash of their weights) than"
            f" {pack.name}: freeze one of this manager's requests"
        )
    if reference.alert_set != pack.alert_set:
        raise ConfigError(
            f"the reference is of the alert set {reference.alert_set!r}, and {pack.alert_set!r} is in force: concepts"
            " fire by other thresholds. Use that set, or freeze a reference of this one"
        )
    if reference.alert is not None:
        probe_of = {concept["id"]: probe for probe, concept in enumerate(pack.concepts)}
        for concept, then in zip(reference.ids, reference.alert.tolist(), strict=True):
            now = float(pack.alert_threshold[probe_of[concept]]) if concept in probe_of else then
            if now != then and not (math.isnan(now) and math.isnan(then)):
                raise ConfigError(
                    f"the reference's alert threshold of {concept} is {then:g}, and {now:g} is in force: concepts fire"
                    " by other thresholds. Use the same ones, or freeze a reference of these"
                )
    if reference.counts.n < LEAST_REQUESTS:
        raise ConfigError(
            f"the reference is of {reference.counts.n} requests, and fewer than {LEAST_REQUESTS} give no reliable"
            " rates: calibrate on more documents, or freeze one of more requests"
        )
