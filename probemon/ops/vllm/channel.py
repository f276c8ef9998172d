"""Sends a worker's messages to its client without waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable

from probemon.errors import MissingExtra
from probemon.ops.vllm.messages import Message, pack

_LINGER_MILLISECONDS = 500  # for queued messages, when a worker ends


class Channel:
    """Numbers messages in order; drops and counts those that find the queue full. Any thread may send."""

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
        """Send or drop `make(sequence)`."""
        with self._lock:
            data = pack(make(self.n_sent + self.n_dropped))
            try:
                self._socket.send(data, self._no_wait)
            except self._again:
                self.n_dropped += 1
            else:
                self.n_sent += 1

    def close(self) -> None:
        """Send the queue, within half a second."""
        with self._lock:
            self._socket.close()
            self._context.term()
