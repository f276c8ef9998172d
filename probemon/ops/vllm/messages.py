"""What a worker is told at its start, and what it says to its client.

    settings = WorkerSettings(deployment="watch.yaml", sites=("resid_post.15",), sha256="...", channel="ipc:///tmp/a")
    LLM(..., worker_cls=WORKER, additional_config={CONFIG_KEY: settings.as_config()})
    message = unpack(socket.recv())             # Hello, StepTokens, RuleMet or Ended; RequestScores over HTTP
    data = pack(message)

The client binds a PULL socket to the address before the engine starts; the worker connects a PUSH socket to it and
never waits: what finds the queue full is dropped. `sequence` counts every message from 0, the dropped ones too, so a
hole in it says how many were lost. Messages are maps of msgpack, arrays in them a dtype and bytes; both environments
need `msgpack` and `pyzmq`.
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
VERSION = 2  # of these messages
CANARIES = ("weights", "layers")
_DTYPES = ("|b1", "|i1", "<i4", "<i8", "<f4")
_COVERAGE = (*COUNTS, *AUDITED, "far")
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class WorkerSettings:
    """What `additional_config["probemon"]` holds. vLLM hashes all of it into the name of its compiled graphs, so
    `sites` and `sha256` keep it from using a graph that was compiled for other layers.

    Give `deployment`, a file, or `packs`, folders or names of them, with `cascade`, settings of a manager by name.
    `sha256`: of what is watched; the worker compares (`probemon.ops.vllm.watched.watched_sha256`).
    `sites`: what the packs read, in their order.
    `channel`: the address of the client, "" for that in the variable `PROBEMON_VLLM_CHANNEL`: an address that is new
    at every start belongs there, for in here it would have the graphs compiled anew.
    `stop`: a rule's stop ends its row inside the step, by `probemon.ops.vllm.stop`; without it stops are only told.
    `canary`: "weights" compares the states of a first forward with those of transformers on the same weights,
    "layers" only asks that they are there, finite and differ.
    `high_water_mark`: how many messages may wait for the client.
    """

    deployment: str = ""
    packs: tuple[str, ...] = ()
    cascade: Mapping[str, Any] = field(default_factory=dict)
    sha256: str = ""
    sites: tuple[str, ...] = ()
    channel: str = ""
    stop: bool = False
    canary: str = "weights"
    high_water_mark: int = 10_000

    def __post_init__(self) -> None:
        if bool(self.deployment) == bool(self.packs):
            raise ConfigError("the worker is given a deployment, or packs: give one of the two")
        if self.canary not in CANARIES:
            raise ConfigError(f"canary is {self.canary!r}: give one of {', '.join(CANARIES)}")
        if self.high_water_mark < 1:
            raise ConfigError(f"high_water_mark is {self.high_water_mark}: give 1 or more messages")

    def as_config(self) -> dict[str, Any]:
        """Return it as the JSON that `additional_config` takes."""
        return {**dataclasses.asdict(self), "packs": list(self.packs), "sites": list(self.sites)}

    @classmethod
    def of_config(cls, additional_config: Any) -> WorkerSettings:
        """Read it from `additional_config`. Raises `ConfigError`."""
        given = additional_config.get(CONFIG_KEY) if isinstance(additional_config, Mapping) else None
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"additional_config has no {CONFIG_KEY!r}: start the engine by `probemon vllm serve`, or give"
                " WorkerSettings(...).as_config()"
            )
        known = [one.name for one in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ConfigError(f"additional_config[{CONFIG_KEY!r}] has {name!r}: its keys are {', '.join(known)}")
        lists = {name: tuple(given[name]) for name in ("packs", "sites") if name in given}
        return cls(**{**given, **lists})


@dataclass(frozen=True)
class Hello:
    """The worker begins, and its canary held.

    `way`: "auxiliary" or "hooks", how states are read. `runner`: "v1" or "v2", the model runner of vLLM. `canary`:
    figures by name. `host`: fields of a `HostState`. `n_drafts`: how many tokens are drafted a step, 0 without
    speculation.
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
    n_drafts: int = 0
    version: int = VERSION


@dataclass(frozen=True)
class RequestHead:
    """A request of which a step has tokens: vLLM's own id of it, its number in the run, the length of its prompt, and
    the first column that was run: those before it came from the prefix cache.
    """

    request: str
    number: int
    n_prompt: int
    first_column: int


@dataclass(frozen=True)
class StepTokens:
    """Tokens of one step of the engine, scored before the next ones are sampled; `scores` has one state a token.

    Entry i is the token `ids[i]` at column `columns[i]` of `requests[of_request[i]]`, of phase `phases[i]` (`PROMPT`,
    `GENERATED`), scored by state `watches[i]` of what is watched; `deployments` names the file of each such state.
    Tokens of a request come in the order of their columns. `began_seconds`: when the step began, by `time.time()`;
    `seconds`: what placing and scoring took of it.
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
    """A rule was met, or a verdict came of it. `event`: the fields of a `probemon.monitor.rules.Event` as JSON, its
    `request` being vLLM's own id; `action`: by name; `stopping`: its row ends by the stop inside the step.
    """

    kind: ClassVar[str] = "event"
    sequence: int
    event: Mapping[str, Any]
    action: str
    stopping: bool


@dataclass(frozen=True)
class Ended:
    """A request left the engine, finished or aborted: no token of it comes after this.

    `n_columns`: how many were run or came from the cache, from the first on; `n_cached` of them came from the cache and
    `n_again` rows showed columns that had their scores (run again after preemption, or drafts that were rejected).
    `stop_column`: at which a rule stopped it, -1 for none.
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
    """All that a client keeps of a request: its `tokens`, and its end, None while it is under way.

    `lost`: messages were dropped while it ran. `n_drafts`: as in `Hello`.
    """

    kind: ClassVar[str] = "request"
    sequence: int
    tokens: StepTokens
    ended: Ended | None
    lost: bool
    n_drafts: int


Message = Hello | StepTokens | RuleMet | Ended | RequestScores
_KINDS: dict[str, Any] = {one.kind: one for one in (Hello, StepTokens, RuleMet, Ended, RequestScores)}


def pack(message: Message) -> bytes:
    """Return a message as msgpack."""
    import msgpack

    data: bytes = msgpack.packb(_plain(message))
    return data


def unpack(data: bytes) -> Message:
    """Return the message that these bytes are. Raises `ConfigError` for others."""
    import msgpack

    try:
        return _message(msgpack.unpackb(data, strict_map_key=False))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"these {len(data)} bytes are no message of a probemon worker: {error}") from error


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
        return [value.request, value.number, value.n_prompt, value.first_column]
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
        # most of the counts are 0 at every token
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
