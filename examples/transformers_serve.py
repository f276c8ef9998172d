"""Concept probes beside `transformers serve`: the server as it is, and each rule that is met as one line of JSON.

    python examples/transformers_serve.py MODEL PACK --rule animal --rule weapon:0.9 --port 8000

MODEL is the folder of a model, PACK of probes for it. The server keeps its own routes, texts and defaults; requests may
ask for any of them. `probemon serve` is a server of our own, whose answers hold the scores of every token.

What `transformers serve` keeps its model in is not public and has moved between minor versions, so only the versions in
TESTED are watched. It needs probemon and `transformers[serving]`.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import transformers

from probemon import DynamicProbeManager
from probemon.errors import NotSupportedHost

TESTED = ("5.23.0",)
KEPT_TOKENS = 10_000  # a server runs for weeks: scores of older tokens are forgotten


@contextmanager
def watched_server(
    model: str, pack: str, rules: Sequence[str], tell: Callable[[dict[str, Any]], None], **options: Any
) -> Iterator[Any]:
    """Yield transformers' server for one model, watched while the block is open.

    `rules`: concepts, each alone or as `concept:score`; else the pack's alert threshold holds.
    `tell`: called with each event, in the thread that generates.
    `options`: of `transformers serve`, such as host and port.
    Raises `NotSupportedHost` for a version of transformers that was not tried.
    """
    if transformers.__version__ not in TESTED:
        raise NotSupportedHost(
            f"transformers {transformers.__version__}: its server was tried in {', '.join(TESTED)} alone, and keeps its"
            " model where it may have moved. Install one of these, or use `probemon serve`"
        )
    from transformers.cli.serve import Serve

    manager = DynamicProbeManager(pack)
    server = Serve(model, non_blocking=True, **options)
    try:
        models = server._model_manager
        host, processor = models.load_model_and_processor(models.process_model_name(model))
        with manager.attach(host, processor, callback_errors="report", keep_tokens=KEPT_TOKENS) as run:
            for rule in rules:
                concept, _, above = rule.partition(":")
                run.on(concept, above=float(above) if above else None, action=lambda event: tell(described(event)))
            yield server
            wait_for_answers(run)
    finally:
        server.kill_server()


def wait_for_answers(run: Any, seconds: float = 30) -> None:
    """Wait until no answer is generated: the server sends the last token before `generate()` has returned."""
    end = time.monotonic() + seconds
    while any(not recording.done for recording in run.recordings) and time.monotonic() < end:
        time.sleep(0.01)


def described(event: Any) -> dict[str, Any]:
    """Return what is told of an event; where `blind` says why its token has no score, there is none."""
    return {
        "concept": event.concept,
        "name": event.name,
        "column": event.column,
        "score": None if event.blind else round(event.score, 4),
        "above": round(event.above, 4),
        "generation": event.generation,
        "request": event.request,
        **({"blind": event.blind} if event.blind else {}),
    }


def main() -> None:
    """Serve a model and print the events until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("pack")
    parser.add_argument("--rule", action="append", default=[], metavar="CONCEPT[:SCORE]")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="auto")
    arguments = parser.parse_args()

    def tell(event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)

    where = {"host": arguments.host, "port": arguments.port, "device": arguments.device}
    with watched_server(arguments.model, arguments.pack, arguments.rule, tell, **where):
        print(f"watched by {arguments.pack}: http://{arguments.host}:{arguments.port}/v1", file=sys.stderr, flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("ended", file=sys.stderr)


if __name__ == "__main__":
    main()
