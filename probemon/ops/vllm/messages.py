"""A worker's settings, and its messages to the client.

    LLM(..., worker_cls=WORKER, additional_config={CONFIG_KEY: settings.as_config()})
    message = unpack(socket.recv())             # Hello, StepTokens, RuleMet, Ended or RequestScores

The client binds a PULL socket before the engine starts; the worker connects a PUSH socket. `sequence` counts all
messages, also dropped ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from probemon.core.scores import AUDITED, COUNTS, Coverage, Floats, Scores
from probemon.errors import ConfigError

WORKER = "probemon.ops.vllm.worker.ProbeWorker"
CONFIG_KEY = "probemon"
CHANNEL_VARIABLE = "PROBEMON_VLLM_CHANNEL"
VERSION = 4
CANARIES = ("auto", "weights", "layers", "off")
_DTYPES = ("|b1", "|i1", "<i4", "<i8", "<f4")
_COVERAGE = (*COUNTS, *AUDITED, "far", "from_cache")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class WorkerSettings:
    """`additional_config["probemon"]`, which vLLM hashes into the names of compiled graphs.

    - `deployment`: a file; or `packs` with `cascade`, settings of their manager
    - `sha256`: of what is watched (`watched_sha256`); the worker compares
    - `sites`: of the packs, in order
    - `channel`: the client's address; "": the variable `PROBEMON_VLLM_CHANNEL`, so that a new address recompiles
      nothing
    - `stop`: rules stop inside the step; else stops are only reported
    - `canary`: "weights" compares states with transformers, "layers" checks that they are finite and differ, "auto" is
      "weights" where transformers can load them beside the engine, "off" checks nothing
    - `untried_version`: take a version of vLLM that was not tested, if the canary's scores are right
    - `high_water_mark`: messages that may wait
    """

    deployment: str = ""
    packs: tuple[str, ...] = ()
    cascade: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""
    sites: tuple[str, ...] = ()
    channel: str = ""
    stop: bool = False
    canary: str = "auto"
    untried_version: bool = False
    high_water_mark: int = 10_000

    def __post_init__(self) -> None:
        if bool(self.deployment) == bool(self.packs):
            raise ConfigError("the worker is given a deployment, or packs: give one of the two")
        if self.canary not in CANARIES:
            raise ConfigError(f"canary is {self.canary!r}: give one of {', '.join(CANARIES)}")
        if self.high_water_mark < 1:
            raise ConfigError(f"high_water_mark is {self.high_water_mark}: give 1 or more messages")

    def as_config(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**dataclasses.asdict(self), "packs": list(self.packs), "sites": list(self.sites)}

    @classmethod
    def of_config(cls, additional_config: Any) -> WorkerSettings:
        """Read `additional_config`. Raises `ConfigError`."""
        settings = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
        if not isinstance(settings, Mapping):
            raise ConfigError(
                f"additional_config has no {CONFIG_KEY!r}: start the engine by `probemon vllm serve`, or give"
                " WorkerSettings(...).as_config()"
            )
        field_names = [one.name for one in dataclasses.fields(cls)]
        for name in settings:
            if name not in field_names:
                raise ConfigError(
                    f"additional_config[{CONFIG_KEY!r}] has {name!r}: its keys are {', '.join(field_names)}"
                )
        lists = {name: tuple(settings[name]) for name in ("packs", "sites") if name in settings}
        return cls(**{**settings, **lists})


@dataclass(frozen=True)
class Hello:
    """A worker begins, after its canary.

    - `way`: of reading states, "auxiliary" or "hooks"
    - `runner`: of vLLM, "v1" or "v2"
    - `host`: fields of a `ModelState`
    - `canary`: figures by site; `canary_way`: what it compared, and why no more
    - `n_ahead`: tokens that may be run past the end of an answer, by drafts or asynchronous scheduling
    """

    kind: ClassVar[str] = "hello"
    sequence: int
    pid: int
    vllm: str
    way: str
    runner: str
    compiled: bool
    pack: str
    n_probes: int
    sites: tuple[str, ...]
    sha256: str
    host: Mapping[str, Any]
    canary: Mapping[str, Any]
    canary_way: str = "weights"
    n_ahead: int = 0
    version: int = VERSION


@dataclass(frozen=True)
class RequestHead:
    """A request in a step: vLLM's id, number in the run, prompt length, columns from the prefix cache."""

    request: str
    number: int
    n_prompt: int
    n_cached: int


@dataclass(frozen=True)
class StepTokens:
    """Scored tokens of one step, in the order of columns for each request.

    - `of_request[i]`: index of token i's request
    - `phases[i]`: `PROMPT` or `GENERATED`
    - `watches[i]`: number of the watch; `deployments`: file of each
    - `began_seconds`: by `time.time()`
    - `seconds`: for placing and scoring
    """

    kind: ClassVar[str] = "tokens"
    sequence: int
    step: int
    began_seconds: float
    seconds: float
    requests: tuple[RequestHead, ...]
    of_request: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    phases: npt.NDArray[np.int8]
    watches: npt.NDArray[np.int32]
    deployments: Mapping[int, str]
    scores: Scores


@dataclass(frozen=True)
class RuleMet:
    """A rule was met, or has a verdict. `event`: fields of an `Event`; `stopping`: its sequence ends inside the
    step.
    """

    kind: ClassVar[str] = "event"
    sequence: int
    event: Mapping[str, Any]
    action: str
    stopping: bool


@dataclass(frozen=True)
class Ended:
    """A request left the engine: its last message.

    - `n_columns`: run or cached
    - `n_cached`: from the cache
    - `n_again`: rows of columns with scores (preemption, rejected drafts)
    - `stop_column`: of a rule's stop, or -1
    """

    kind: ClassVar[str] = "ended"
    sequence: int
    request: str
    number: int
    n_columns: int
    n_cached: int
    n_again: int
    stop_column: int


@dataclass(frozen=True)
class RequestScores:
    """A client's tokens of a request; `ended` None: under way. `lost`: messages were dropped meanwhile."""

    kind: ClassVar[str] = "request"
    sequence: int
    tokens: StepTokens
    ended: Ended | None
    lost: bool
    n_ahead: int


Message = Hello | StepTokens | RuleMet | Ended | RequestScores
_KINDS: dict[str, Any] = {one.kind: one for one in (Hello, StepTokens, RuleMet, Ended, RequestScores)}


def pack(message: Message) -> bytes:
    """Return a message as msgpack."""
    import msgpack

    data: bytes = msgpack.packb(_plain(message))
    return data


def unpack(data: bytes) -> Message:
    """Return the message. Raises `ConfigError` for other bytes."""
    import msgpack

    try:
        return _message(msgpack.unpackb(data, strict_map_key=False))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"these {len(data)} bytes are not a message of a probemon worker: {error}") from error


def _message(fields: Any) -> Message:
    kind = _KINDS[fields.pop("kind")]
    if kind is Hello:
        if fields["version"] != VERSION:
            raise ConfigError(
                f"the worker speaks version {fields['version']} of the messages, this client {VERSION}: run both"
                " with the same probemon"
            )
        fields["sites"] = tuple(fields["sites"])
    elif kind is StepTokens:
        fields["requests"] = tuple(RequestHead(*head) for head in fields["requests"])
        fields["scores"] = _scores(fields["scores"])
        for name in ("of_request", "columns", "ids", "phases", "watches"):
            fields[name] = _array(fields[name])
    elif kind is RequestScores:
        fields["tokens"] = _message(fields["tokens"])
        fields["ended"] = None if fields["ended"] is None else _message(fields["ended"])
    message: Message = kind(**fields)
    return message


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [value.dtype.str, value.tobytes()]
    if isinstance(value, Scores):
        return _plain_scores(value)
    if isinstance(value, Message):
        names = [one.name for one in dataclasses.fields(value)]
        return {"kind": value.kind} | {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, RequestHead):
        return [value.request, value.number, value.n_prompt, value.n_cached]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    return value


def _array(entry: Any) -> Array:
    dtype, data = entry
    if dtype not in _DTYPES:
        raise ConfigError(f"an array of {dtype!r}: messages have {', '.join(_DTYPES)}")
    return np.frombuffer(data, dtype=np.dtype(dtype)).copy()


def _plain_scores(scores: Scores) -> dict[str, Any]:
    coverage = scores.coverage
    reasons = sorted(set(coverage.unseen))
    counts = {name: getattr(coverage, name) for name in _COVERAGE}
    return {
        "ptr": _plain(scores.ptr),
        "probes": _plain(scores.probes),
        "values": _plain(scores.values),
        "fired": _plain(scores.fired_mask),
        "top_k": scores.report_top_k,
        "n_probes": coverage.n_probes,
        "reasons": reasons,
        "unseen": _plain(np.array([reasons.index(reason) for reason in coverage.unseen], dtype=np.int32)),
        "counts": {name: _plain(np.asarray(count, dtype=np.int64)) for name, count in counts.items() if count.any()},
    }


def _scores(entry: Mapping[str, Any]) -> Scores:
    ptr, unseen = _array(entry["ptr"]), _array(entry["unseen"])
    none = np.zeros(len(ptr) - 1, dtype=np.int64)
    counts = {name: _array(entry["counts"][name]) if name in entry["counts"] else none for name in _COVERAGE}
    values: Floats = _array(entry["values"])
    return Scores(
        ptr=ptr,
        probes=_array(entry["probes"]),
        values=values,
        fired_mask=_array(entry["fired"]),
        coverage=Coverage(
            n_probes=entry["n_probes"], unseen=tuple(entry["reasons"][i] for i in unseen.tolist()), **counts
        ),
        report_top_k=entry["top_k"],
    )
