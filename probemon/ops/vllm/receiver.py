"""Reads a worker's messages in a thread, and counts lost ones.

A message that cannot be read is kept as `failure`.
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
    """`n_messages`: read; `n_lost`: missing in their sequence."""

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
        """Read what has come, and end the thread."""
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
            except Exception as error:  # shown by VllmClient.health
                self.failure = self.failure or error

    def _read(self, data: bytes) -> None:
        message = unpack(data)
        self.n_messages += 1
        if isinstance(message, Hello):
            self._next_sequence = message.sequence
        self.n_lost += max(0, message.sequence - self._next_sequence)
        self._next_sequence = message.sequence + 1
        self._take(message)
