"""Channel: the messages of a worker on their way to its client, never waited for.

channel = Channel("ipc:///tmp/scores", high_water_mark=10_000)
channel.send(lambda sequence: Ended(sequence, ...))
channel.n_sent, channel.n_dropped
channel.close()
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from probemon.errors import MissingExtra
from probemon.ops.vllm.messages import Message, pack

_LINGER_MILLISECONDS = 500  # that the end of a worker waits for what is queued


class Channel:
    """Messages are numbered in the order in which they are made; one that finds the queue full is dropped and counted.

    Any thread may send: verdicts of judges come in their own.
    """

    def __init__(self, address: str, high_water_mark: int) -> None:
        try:
            import msgpack  # noqa: F401  (by `pack`)
            import zmq
        except ImportError as error:
            raise MissingExtra("a worker inside vLLM needs pyzmq and msgpack: pip install pyzmq msgpack") from error
        self.n_sent = self.n_dropped = 0
        self._again, self._no_wait = zmq.Again, zmq.NOBLOCK
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, high_water_mark)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        self._socket.connect(address)

    def send(self, make: Callable[[int], Message]) -> None:
        """Send `make(sequence)`, or drop it."""
        with self._lock:
            data = pack(make(self.n_sent + self.n_dropped))
            try:
                self._socket.send(data, self._no_wait)
            except self._again:
                self.n_dropped += 1
            else:
                self.n_sent += 1

    def close(self) -> None:
        """Send what is queued, for half a second at most."""
        with self._lock:
            self._socket.close()
            self._context.term()
