"""Messages of a worker arrive as they were sent, and anything else is refused."""

from __future__ import annotations

import dataclasses
import threading
import time

import msgpack
import numpy as np
import pytest
import zmq

from probemon.core.scores import Scores
from probemon.errors import ConfigError
from probemon.ops.vllm.channel import Channel
from probemon.ops.vllm.messages import (
    CONFIG_KEY,
    VERSION,
    Ended,
    Hello,
    RequestHead,
    RuleMet,
    StepTokens,
    WorkerSettings,
    pack,
    unpack,
)

HELLO = Hello(0, 7, "0.32.0", "auxiliary", "v1", True, "p", 3, ("resid_post.1",), "ab", {"devices": ["cpu"]}, {})
ENDED = Ended(4, "a-0", 2, 12, 4, 1, -1)
MET = RuleMet(3, {"concept": "c", "path": ["a", "b"], "score": 0.5}, "stop", True)


def scores():
    seen = Scores.join([], 5)
    seen = dataclasses.replace(
        seen,
        ptr=np.array([0, 2]),
        probes=np.array([1, 4], dtype=np.int32),
        values=np.array([0.25, 0.75], dtype=np.float32),
        fired_mask=np.array([False, True]),
        coverage=dataclasses.replace(
            Scores.nothing(1, 5, "").coverage, active=np.array([2]), not_reached=np.array([3]), evaluated=np.array([5])
        ),
    )
    return Scores.join([seen, Scores.nothing(1, 5, "not seen: è")], 5)


def tokens():
    return StepTokens(
        2, 1, 1.5, 0.25, (RequestHead("a-0", 2, 3, 0),),
        *(np.zeros(2, dtype=t) for t in ("i4", "i8", "i8", "i1", "i4")),
        {0: "sha"}, scores(),
    )  # fmt: skip


def equal(one, other):
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tolist() == other.tolist()
    if dataclasses.is_dataclass(one):
        return type(one) is type(other) and all(
            equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one)
        )
    return one == other


@pytest.mark.parametrize("message", [HELLO, ENDED, MET, tokens()], ids=lambda m: m.kind)
def test_message_arrives_as_it_was_sent(message):
    assert equal(unpack(pack(message)), message)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        msgpack.packb({"kind": "nothing"}),
        msgpack.packb({"kind": "ended", "sequence": 1}),
        msgpack.packb(["ended"]),
        pack(tokens()).replace(b"<f4", b"|O8"),
    ],
)
def test_data_that_is_not_a_message_is_refused(data):
    with pytest.raises(ConfigError):
        unpack(data)


def test_worker_with_another_message_version_is_refused():
    with pytest.raises(ConfigError, match=f"version {VERSION + 1} of the messages, this client {VERSION}"):
        unpack(pack(dataclasses.replace(HELLO, version=VERSION + 1)))


def test_worker_settings_survive_the_engine_config():
    settings = WorkerSettings(packs=("a", "b"), cascade={"keep_top_k": 3}, sites=("resid_post.1",), stop=True)
    assert WorkerSettings.of_config({CONFIG_KEY: settings.as_config(), "other": 1}) == settings


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (None, "has no 'probemon'"),
        ({}, "has no 'probemon'"),
        ({CONFIG_KEY: {"packs": ["a"], "chanel": "x"}}, "has 'chanel'"),
        ({CONFIG_KEY: {}}, "one of the two"),
        ({CONFIG_KEY: {"packs": ["a"], "deployment": "b"}}, "one of the two"),
        ({CONFIG_KEY: {"packs": ["a"], "canary": "none"}}, "weights, layers"),
        ({CONFIG_KEY: {"packs": ["a"], "high_water_mark": 0}}, "1 or more"),
    ],
)
def test_invalid_worker_settings_are_refused(config, says):
    with pytest.raises(ConfigError, match=says):
        WorkerSettings.of_config(config)


@pytest.fixture
def address(tmp_path):
    return f"ipc://{tmp_path}/scores"


def test_channel_without_a_reader_never_blocks_and_counts_dropped_messages(address):
    channel = Channel(address, 3)
    for _ in range(10):
        channel.send(lambda sequence: dataclasses.replace(ENDED, sequence=sequence))
    assert channel.n_sent + channel.n_dropped == 10
    assert channel.n_dropped >= 4
    context = zmq.Context()
    reader = context.socket(zmq.PULL)
    reader.setsockopt(zmq.RCVTIMEO, 60_000)
    reader.bind(address)
    got = [unpack(reader.recv()).sequence for _ in range(channel.n_sent)]
    assert got == list(range(channel.n_sent))
    # Its side hears of the room that was made a little later.
    for _ in range(10_000):
        channel.send(lambda sequence: dataclasses.replace(ENDED, sequence=sequence))
        if channel.n_sent > len(got):
            break
        time.sleep(0.001)
    assert unpack(reader.recv()).sequence == channel.n_sent + channel.n_dropped - 1  # the hole says how many were lost
    channel.close()
    reader.close()
    context.term()


def test_concurrent_senders_number_every_message_once(address):
    context = zmq.Context()
    reader = context.socket(zmq.PULL)
    reader.setsockopt(zmq.RCVTIMEO, 60_000)
    reader.bind(address)
    channel = Channel(address, 1000)
    send = [
        threading.Thread(
            target=lambda: [channel.send(lambda n: dataclasses.replace(ENDED, sequence=n)) for _ in range(50)]
        )
        for _ in range(4)
    ]
    for thread in send:
        thread.start()
    got = [unpack(reader.recv()).sequence for _ in range(200)]
    for thread in send:
        thread.join()
    assert got == list(range(200))
    channel.close()
    reader.close()
    context.term()
