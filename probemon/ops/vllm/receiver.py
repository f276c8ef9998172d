"""Receiver: reads what a worker sends, in a thread of its own, and counts what was lost.

receiver = Receiver(take, high_water_mark=10_000)       # take(message): called in that thread, in the order of sending
receiver.address                                         # ipc://..., in a folder that only this user can enter
receiver.n_lost, receiver.failure
receiver.close()

What is read is msgpack and never a pickle. The thread ends at `close`; a message that cannot be read ends nothing and
is kept as the `failure`.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

from probemon.errors import MissingExtra
from probemon.ops.vllm.messages import Hello, Message, unpack

_POLL_MILLISECONDS = 50


class Receiver:
    """`n_messages` were read; `n_lost` messages, by the holes in their sequence, were not."""

    def __init__(self, take: Callable[[Message], None], high_water_mark: int) -> None:
        try:
            import msgpack  # noqa: F401
            import zmq
        except ImportError as error:
            raise MissingExtra("a client of vLLM needs pyzmq and msgpack: pip install pyzmq msgpack") from error
        self._folder = tempfile.mkdtemp(prefix="probemon-vllm-")  # mkdtemp: mode 700
        self.address = f"ipc://{Path(self._folder) / 'scores'}"
        self.n_messages = self.n_lost = 0
        self.failure: Exception | None = None
        self._next_sequence, self._take, self._ending = 0, take, threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, high_water_mark)
        self._socket.bind(self.address)
        self._thread = threading.Thread(target=self._run, name="probemon-vllm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, once it has read what has come."""
        if not self._ending.is_set():
            self._ending.set()
            self._thread.join()
            self._socket.close(linger=0)
            self._context.term()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        while True:
            if not self._socket.poll(_POLL_MILLISECONDS):
                if self._ending.is_set():
                    return
                continue
            try:
                self._read(self._socket.recv())
            except Exception as error:  # whoever asks is told: see VllmClient.health
                self.failure = self.failure or error

    def _read(self, data: bytes) -> None:
        message = unpack(data)
        self.n_messages += 1
        if isinstance(message, Hello):  # an engine began, perhaps anew
            self._next_sequence = message.sequence
        self.n_lost += max(0, message.sequence - self._next_sequence)
        self._next_sequence = message.sequence + 1
        self._take(message)
