"""Run the server for an hour under clients and pages, end it again and again, and compare every answer.

    python scripts/benchmarks/serving_soak.py --seconds 600 --kills 6 --kill-seconds 500

`probemon serve demo` is started as a user starts it. Each kind of request is asked alone first. Then 16 clients ask
them at random, streamed and not, and now and then leave in the middle; 50 pages are subscribed, of which 5 never read.
At the end the server is told to end (SIGTERM) while it answers, and has to answer what it began.

Then it is started on one port, asked, and ended within answers, by SIGTERM with a drain limit that they exceed and by
SIGKILL in turn; clients and a page come back each time.

Bars: no answer differs, before and after an end; every event that a page did not get is counted in a gap; at most 20 MB
of memory more than after a fifth of the first part; what ran at SIGTERM is answered whole, or told that it is cut once
the limit is over, within 5 seconds of which the process is gone, without a traceback. Ends with status 1 where one is
missed; the file is written all the same.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from probemon.util.files import write_text_atomically
from provenance import about
from serving_load import subscribe

N_CLIENTS, N_PAGES, N_DEAF = 16, 50, 5
MOST_GROWTH_BYTES = 20 << 20
SHARE_LEAVING = 0.05
RULE = {"concept": "animal.n.01", "action": "stop"}
KINDS: list[dict[str, Any]] = [
    {"messages": "Tell me about whales.", "temperature": 0},
    {"messages": "Tell me about whales.", "temperature": 0, "probemon": {"rules": [RULE]}},
    {"messages": "Tell me about whales.", "temperature": 0, "probemon": {"rules": [RULE], "hold": True}},
    {"messages": "Name three tools.", "temperature": 0.9, "seed": 4, "probemon": {"top_k": 5, "prompt": True}},
    {"messages": "Name three tools.", "temperature": 0.9, "seed": 5, "n": 2},
    {"messages": "What is 17 times 3?", "temperature": 0, "stop": [","], "probemon": {"concepts": ["whole*"]}},
    {"messages": "😀 鯨とは何ですか", "temperature": 0, "max_tokens": 9, "probemon": {"hold": True}},
    {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 12},
]


def body_of(kind: dict[str, Any], *, stream: bool) -> tuple[str, dict[str, Any]]:
    """Return the route of a kind of request, and its body."""
    body = {"model": "demo", "max_tokens": 16, "probemon": {}, **kind, "stream": stream}
    if "prompt" in body:
        return "/v1/completions", body
    return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": body["messages"]}]}


class Server:
    """`probemon serve demo`, and what clients do with it."""

    def __init__(self, port: int = 0, drain_seconds: int = 120) -> None:  # beside other work an answer takes long
        command = [sys.executable, "-m", "probemon", "serve", "demo", "--port", str(port), "--no-token"]
        command += ["--threads", "1", "--drain-seconds", str(drain_seconds)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self.errors, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.port = int(line.rsplit(":", 1)[1].strip().rstrip("/"))

    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)

    def ask(self, kind: dict[str, Any], *, stream: bool, leave: bool = False) -> list[Any] | None:
        """Return what the choices of an answer hold; None where the client left in the middle."""
        path, body = body_of(kind, stream=stream or leave)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status == 503:
                raise Cut("503")
            if leave:
                answer.read(1)
                return None
            content = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {content[:300]!r}")
        return joined(content) if stream else [whole(choice) for choice in json.loads(content)["choices"]]


def whole(choice: dict[str, Any]) -> dict[str, Any]:
    """Return what one choice of an answer in one piece holds, in the shape of `joined`."""
    message = choice.get("message", choice)
    told = message["probemon"]
    return {
        "text": message.get("content", message.get("text")),
        "finish_reason": choice["finish_reason"],
        "tokens": told["tokens"],
        "events": told["events"],
        "summary": told["summary"],
    }


def joined(content: bytes) -> list[Any]:
    """Return the choices of a stream, its chunks put together."""
    lines = [line[6:] for line in content.decode().splitlines() if line.startswith("data: ")]
    if lines[-1] != "[DONE]":
        raise RuntimeError(f"the stream ended with {lines[-1]:.200}")
    choices: dict[int, dict[str, Any]] = {}
    if any("error" in json.loads(line) for line in lines[:-1]):
        reasons = [choice["finish_reason"] for line in lines[:-1] for choice in json.loads(line).get("choices", ())]
        raise Cut("error") if "error" in reasons else RuntimeError("an error without a finish_reason")
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            held = choices.setdefault(
                choice["index"], {"text": "", "finish_reason": None, "tokens": [], "events": [], "summary": None}
            )
            delta = choice.get("delta", choice)
            held["text"] += delta.get("content") or delta.get("text") or ""
            held["tokens"] += delta.get("probemon", {}).get("tokens", [])
            held["events"] += delta.get("probemon", {}).get("events", [])
            held["summary"] = delta.get("probemon_summary", held["summary"])
            held["finish_reason"] = choice["finish_reason"] or held["finish_reason"]
    return [choices[index] for index in sorted(choices)]


class Cut(Exception):
    """The server told that it has ended before the answer, as it should."""


class Clients:
    """Ask at random until the time is up; every answer is compared."""

    def __init__(self, server: Server, alone: list[list[Any]]) -> None:
        self.server, self.alone = server, alone
        self.n_equal = self.n_left = self.n_cut = self.n_unreachable = 0
        self.wrong: list[str] = []
        self.killed = threading.Event()  # set: connections may break
        self.ending = threading.Event()  # set: new ones may be refused
        self._lock = threading.Lock()

    def run(self, number: int, until: float) -> None:
        chance = random.Random(number)
        while time.monotonic() < until and not self.ending.is_set():
            self.one(chance.randrange(len(KINDS)), chance.random() < 0.5, chance.random() < SHARE_LEAVING)

    def one(self, at: int, stream: bool, leave: bool = False) -> None:
        try:
            answer = self.server.ask(KINDS[at], stream=stream, leave=leave)
        except Exception as error:
            refused = isinstance(error, ConnectionRefusedError)
            with self._lock:
                if isinstance(error, Cut) and self.ending.is_set():
                    self.n_cut += 1
                elif (refused and self.ending.is_set()) or self.killed.is_set():
                    self.n_unreachable += 1
                else:
                    self.wrong.append(f"kind {at}: {type(error).__name__}: {error}")
            return
        with self._lock:
            if leave:
                self.n_left += 1
            elif answer == self.alone[at]:
                self.n_equal += 1
            else:
                self.wrong.append(f"kind {at}, {'streamed' if stream else 'whole'}: another answer than alone")


class Page:
    """A subscriber that reads, and counts: ids have to follow each other, but for what a gap names."""

    def __init__(self, port: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self.connection.request("GET", "/v1/probemon/events")
        self.stream = self.connection.getresponse()
        self.n_events = self.n_dropped = self.first_id = self.last_id = 0
        self.problem = ""
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def _read(self) -> None:
        event: dict[str, str] = {}
        for raw in self.stream:
            name, _, value = raw.decode().rstrip("\n").partition(": ")
            if name:
                event[name] = value
                continue
            if event.get("event") == "hello":
                self.first_id = self.last_id = json.loads(event["data"])["last_id"]
            elif event.get("event") == "gap":
                gap = json.loads(event["data"])
                if (gap["from_id"], gap["n_dropped"]) != (self.last_id + 1, gap["to_id"] - self.last_id):
                    self.problem = f"a gap {gap} after {self.last_id}"
                self.n_dropped += gap["n_dropped"]
                self.last_id = gap["to_id"]
            elif "id" in event:
                if int(event["id"]) != self.last_id + 1:
                    self.problem = f"event {event['id']} after {self.last_id}"
                self.n_events, self.last_id = self.n_events + 1, int(event["id"])
            event = {}


def drained(clients: Clients) -> dict[str, Any]:
    """Tell the server to end while it answers, and return how that went."""
    server, n_before, n_wrong = clients.server, clients.n_equal, len(clients.wrong)
    asking = [threading.Thread(target=clients.one, args=(at, at % 2 == 0)) for at in (0, 3, 4, 7)]
    for thread in asking:
        thread.start()
    time.sleep(0.5)  # two are answered now, and two wait
    begin = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(120)
    for thread in asking:
        thread.join()
    return {
        "asked": len(asking),
        "answered": clients.n_equal - n_before,
        "wrong": len(clients.wrong) - n_wrong,
        "seconds": round(time.monotonic() - begin, 2),
        "status": status,
    }


def killed(at: int, port: int, seconds: float, alone: list[list[Any]]) -> dict[str, Any]:
    """Start a server, have clients ask it for a while, and end it within their answers: how that went."""
    kind, drain_seconds = (signal.SIGTERM, 2) if at % 2 == 0 else (signal.SIGKILL, 120)
    begin = time.monotonic()
    server = Server(port, drain_seconds)
    begun_seconds = time.monotonic() - begin
    clients, page = Clients(server, alone), Page(server.port)
    until = time.monotonic() + seconds
    threads = [threading.Thread(target=clients.run, args=(100 * at + n, until + 600)) for n in range(N_CLIENTS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    n_before = clients.n_equal
    (clients.ending if kind == signal.SIGTERM else clients.killed).set()
    clients.ending.set()
    told = time.monotonic()
    server.process.send_signal(kind)
    status = server.process.wait(300)
    ended_seconds = time.monotonic() - told
    for thread in threads:
        thread.join()
    page.thread.join(30)
    server.errors.seek(0)
    return {
        "signal": kind.name,
        "port": server.port,
        "seconds_to_begin": round(begun_seconds, 2),
        "seconds_to_end": round(ended_seconds, 2),
        "drain_seconds": drain_seconds,
        "status": status,
        "answers_equal_to_alone": clients.n_equal,
        "answered_after_the_signal": clients.n_equal - n_before,
        "told_that_they_are_cut": clients.n_cut,
        "unreachable": clients.n_unreachable,
        "wrong": clients.wrong[:10],
        "page_problem": page.problem,
        "stderr": server.errors.read()[-2000:],
    }


def ended_well(one: dict[str, Any]) -> bool:
    """True if nothing was wrong about an end."""
    if one["wrong"] or one["page_problem"] or not one["answers_equal_to_alone"] or "Traceback" in one["stderr"]:
        return False
    if one["signal"] == "SIGKILL":
        return one["status"] == -signal.SIGKILL
    in_time = one["seconds_to_end"] <= one["drain_seconds"] + 5
    return one["status"] == 128 + signal.SIGTERM and in_time and one["told_that_they_are_cut"] > 0


def soak(seconds: float, n_kills: int, kill_seconds: float) -> dict[str, Any]:
    """Return what happened."""
    server = Server()
    alone = [answer for kind in KINDS if (answer := server.ask(kind, stream=False)) is not None]
    assert [server.ask(kind, stream=True) for kind in KINDS] == alone, "a stream holds what one piece holds"
    clients = Clients(server, alone)
    pages = [Page(server.port) for _ in range(N_PAGES - N_DEAF)]
    deaf = [subscribe(server.port, deaf=True) for _ in range(N_DEAF)]
    begin = time.monotonic()
    threads = [threading.Thread(target=clients.run, args=(number, begin + seconds)) for number in range(N_CLIENTS)]
    for thread in threads:
        thread.start()
    resident: list[tuple[float, int]] = []
    answered: list[int] = []
    while any(thread.is_alive() for thread in threads):
        resident.append((time.monotonic() - begin, server.resident_bytes()))
        answered.append(clients.n_equal)
        time.sleep(min(5.0, seconds / 20))
    settled = next(size for at, size in resident if at >= seconds / 5)
    end = drained(clients)
    for page in pages:
        page.thread.join(30)
    for one in deaf:
        one.close()
    kills, port = list[dict[str, Any]](), 0
    for at in range(n_kills):
        kills.append(killed(at, port, kill_seconds, alone))
        port = kills[-1]["port"]
        print(kills[-1], flush=True)
    problems = sorted({page.problem for page in pages if page.problem})
    last = {page.last_id for page in pages}
    return {
        "seconds": seconds,
        "answers_equal_to_alone": clients.n_equal,
        "answers_wrong": clients.wrong[:10],
        "n_wrong": len(clients.wrong),
        "clients_that_left": clients.n_left,
        "pages": {
            "n": N_PAGES,
            "never_read": N_DEAF,
            "events_read": sum(page.n_events for page in pages),
            "events_dropped": sum(page.n_dropped for page in pages),
            "not_accounted_for": sum(page.last_id - page.first_id - page.n_events - page.n_dropped for page in pages),
            "problems": problems,
            "ended_at_the_same_event": len(last) == 1,
        },
        "resident_bytes": {
            "after_a_fifth": settled,
            "most": max(size for _, size in resident),
            "last": resident[-1][1],
            "growth": resident[-1][1] - settled,
            # The server keeps requests and events up to its limits: what grows after they are full is not of them.
            "by_minute": [
                {"seconds": round(at), "answered": n, "bytes": size}
                for (at, size), n in list(zip(resident, answered, strict=True))[:: max(1, len(resident) // 20)]
            ],
        },
        "sigterm": end,
        "kills": kills,
    }


def main() -> None:
    """Soak the server and write what happened."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--kill-seconds", type=float, default=500, help="before each")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks/serving_soak.json"))
    arguments = parser.parse_args()
    found = soak(arguments.seconds, arguments.kills, arguments.kill_seconds)
    held = {
        "every answer is that of the request alone": not found["n_wrong"],
        "every event is read or counted": not found["pages"]["problems"] and not found["pages"]["not_accounted_for"],
        "memory is flat": found["resident_bytes"]["growth"] <= MOST_GROWTH_BYTES,
        "what ran at SIGTERM is answered": found["sigterm"]["answered"] == found["sigterm"]["asked"]
        and found["sigterm"]["status"] == 128 + signal.SIGTERM,
        "every end ends, and tells those whom it cuts": all(ended_well(one) for one in found["kills"]),
    }
    content = {**about(), "claims": held, "most_growth_bytes": MOST_GROWTH_BYTES, **found}
    write_text_atomically(arguments.out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    for claim, holds in held.items():
        print(f"{'held' if holds else 'MISSED'}: {claim}")
    print(json.dumps(found, indent=1, ensure_ascii=False))
    sys.exit(0 if all(held.values()) else 1)


if __name__ == "__main__":
    main()
