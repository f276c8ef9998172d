"""Measure what the server adds to watching, how soon a page hears of a token, and what many pages cost.

    python scripts/benchmarks/serving_load.py --out docs/benchmarks/serving_load.json

The server is a process of its own, on the demo model with one thread; its clients are others. What it adds to a token
is the CPU time of all that is not a watched `generate()`: what it does between forwards, and all other threads, as if
every moment of those were taken from the generation. Rounds without and with pages alternate; each figure is a median.

Bars: the first event 20 ms after the forward of its token; 2 % added to a token; with 50 pages of which 5 never read,
3 % more than without, and 20 MB of memory; the events that those lose are counted. Ends with status 1 where a bar is
missed; the file is written all the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from probemon.util.files import write_text_atomically
from provenance import about

PROMPT = "Tell me about whales and the ships that hunted them."
BARS = {"first_event_seconds": 0.02, "added_share": 0.02, "slowdown_share": 0.03, "growth_bytes": 20 << 20}
PAGES, DEAF = 45, 5
KEPT_EVENTS, SEND_BUFFER = 64, 4096  # small, so that pages that do not read fall behind within the measurement


def serve() -> None:
    """Run the server, and print when each forward of its host ended; a process of its own."""
    import torch

    from probemon import DynamicProbeManager, ProbePack
    from probemon.bundled import load_bundled
    from probemon.ops.server.answering import Answering
    from probemon.ops.server.app import make_app
    from probemon.ops.server.limits import Limits
    from probemon.ops.server.served import Served
    from probemon.ops.server.server import all_names, make_server, open_socket

    torch.set_num_threads(1)
    model, tokenizer = load_bundled(torch.bfloat16)
    limits = Limits(kept_events=KEPT_EVENTS, stalled_seconds=3600, subscribers=100)
    manager = DynamicProbeManager(ProbePack.open("probes/wordnet-smollm2-135m"))
    served = Served("demo", model, tokenizer, manager, limits)
    with open_socket("127.0.0.1", 0) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        app = make_app(served, limits, keys=[], hosts=all_names("127.0.0.1", []))
        ends = lambda *_: print("forward", time.monotonic(), flush=True)  # noqa: E731
        model.model.register_forward_hook(ends)
        time_answers(Answering)
        port = sock.getsockname()[1]
        make_server(app, lambda: print("ready", port, flush=True)).run(sockets=[sock])


def time_answers(answering: Any) -> None:
    """Have every answer say what CPU time it took: between forwards, in its thread, in all threads."""
    own = {"seconds": 0.0}

    def timed(function: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                own["seconds"] += time.thread_time() - begin

        return call

    for name in ("__call__", "_scored", "_end"):
        setattr(answering, name, timed(getattr(answering, name)))
    run = answering.run

    def measured(self: Any) -> Any:
        own["seconds"], thread, process = 0.0, time.thread_time(), time.process_time()
        ending = run(self)
        spent = own["seconds"], time.thread_time() - thread, time.process_time() - process
        print("answer", *spent, flush=True)
        return ending

    answering.run = measured


class Server:
    """The server's process: when its forwards ended, what its answers took, its memory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline().split()[1])
        self.forwards, self.answers = list[float](), list[list[float]]()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            kind, *numbers = line.split()
            if kind == "forward":
                self.forwards.append(float(numbers[0]))
            else:
                self.answers.append([float(number) for number in numbers])

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def answer(self, n_tokens: int, **probemon: Any) -> dict[str, float]:
        """Have one streamed answer; seconds a token: of the watched `generate()`, of all else and where that
        is spent, by the clock.
        """
        ask = {"model": "demo", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": n_tokens}
        ask |= {"temperature": 0, "stream": True, "probemon": probemon}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        begin, n_before = time.monotonic(), len(self.answers)
        connection.request("POST", "/v1/chat/completions", json.dumps(ask), {"Content-Type": "application/json"})
        assert connection.getresponse().read().endswith(b"[DONE]\n\n")
        wall = time.monotonic() - begin
        connection.close()
        while len(self.answers) == n_before:  # what the process says of it comes another way
            time.sleep(0.01)
        between, thread, process = self.answers[-1]
        generating = thread - between
        return {
            name: seconds / n_tokens
            for name, seconds in {
                "generating": generating,
                "added": process - generating,
                "added_between_forwards": between,
                "added_in_other_threads": process - thread,
                "wall": wall,
            }.items()
        }

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return float(next(line for line in lines if line.startswith(name)).split()[-1])


def subscribe(port: int, *, deaf: bool = False) -> socket.socket:
    """Open a page's stream of events; one that is deaf will never read it."""
    page = socket.socket()
    if deaf:
        page.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    page.connect(("127.0.0.1", port))
    page.sendall(f"GET /v1/probemon/events HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
    return page


def read_all(page: socket.socket) -> None:
    """Read until the other side closes."""
    while page.recv(65536):
        pass


def read_pages(port: int) -> None:
    """Read as many pages as are asked for until the input ends; a process of its own."""
    pages = [subscribe(port) for _ in range(PAGES)]
    for page in pages:
        threading.Thread(target=read_all, args=(page,), daemon=True).start()
    print("open", flush=True)
    sys.stdin.read()


def first_events(server: Server, n_tokens: int) -> list[float]:
    """Return how long after the end of a token's forward its event came, for each token of an answer."""
    heard: list[float] = []
    page = subscribe(server.port)

    def listen() -> None:
        for line in page.makefile("rb"):
            if line.startswith(b"event: token"):
                heard.append(time.monotonic())

    threading.Thread(target=listen, daemon=True).start()
    time.sleep(0.5)
    server.forwards.clear()
    server.answer(n_tokens)
    time.sleep(0.5)
    page.close()
    forwards = server.forwards[1:]  # the first is the prompt's
    # The last token has no forward; its event comes with that of the end.
    return [at - end for end, at in zip(forwards, heard, strict=False)][: n_tokens - 1]


def many_pages(server: Server) -> ExitStack:
    """Open the pages, those that read in a process of their own; closed with the stack."""
    stack = ExitStack()
    readers = subprocess.Popen(
        [sys.executable, __file__, "--pages", str(server.port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(readers.communicate)
    assert readers.stdout is not None and readers.stdout.readline() == "open\n"
    for _ in range(DEAF):
        stack.enter_context(subscribe(server.port, deaf=True))
    time.sleep(1)
    for _ in range(2):  # enough to fill what lies between the server and a deaf page
        server.answer(KEPT_EVENTS, top_k=50, prompt=True)
    return stack


def measure(rounds: int, n_tokens: int) -> dict[str, Any]:
    """Measure every arm, alternating."""
    server, alone, crowded = Server(), list[dict[str, float]](), list[dict[str, float]]()
    try:
        server.answer(n_tokens)  # what is done once
        latencies = first_events(server, n_tokens)
        before, growth = server.resident_bytes(), 0
        for _ in range(rounds):
            alone.append(server.answer(n_tokens))
            with many_pages(server):
                crowded.append(server.answer(n_tokens))
                dropped = server.metric("probemon_subscriber_events_dropped_total")
                growth = max(growth, server.resident_bytes() - before)
    finally:
        server.process.kill()
        server.process.wait()
    found = {
        "first_event_seconds": statistics.median(latencies),
        "added_share": statistics.median(one["added"] / one["generating"] for one in alone),
        "slowdown_share": statistics.median(
            (more["added"] - one["added"]) / one["generating"] for one, more in zip(alone, crowded, strict=True)
        ),
        "growth_bytes": growth,
    }
    return {
        **about(),
        "rounds": rounds,
        "tokens": n_tokens,
        "pages": {"reading": PAGES, "never_reading": DEAF, "kept_events": KEPT_EVENTS, "send_buffer": SEND_BUFFER},
        "seconds_a_token": {"alone": alone, "with pages": crowded},
        "first_event": {"median": statistics.median(latencies), "p95": sorted(latencies)[int(0.95 * len(latencies))]},
        "events_dropped": dropped,
        "bars": {name: {"bar": bar, "found": found[name], "met": found[name] <= bar} for name, bar in BARS.items()},
    }


def main() -> int:
    """Measure, write the file, and say which bars are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--serve", action="store_true", help="run the server alone")
    parser.add_argument("--pages", type=int, metavar="PORT", help="run the pages that read alone")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return 0
    if arguments.pages:
        read_pages(arguments.pages)
        return 0
    result = measure(arguments.rounds, arguments.tokens)
    if arguments.out:
        write_text_atomically(arguments.out, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["bars"], indent=1), "events dropped:", result["events_dropped"])
    return 0 if all(bar["met"] for bar in result["bars"].values()) and result["events_dropped"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
