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
from probemon.errors import UnsupportedModel

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
    Raises `UnsupportedModel` for a version of transformers that was not tried.
    """
    if transformers.__version__ not in TESTED:
        raise UnsupportedModel(
            f"transformers {transformers.__version__}: its server was tried in {', '.join(TESTED)} alone, and keeps its"
            " model where it may have moved. Install one of these, or use `probemon serve`"
        )
    from transformers.cli.serve import Serve

    class Unstarted(Serve):
        _thread = None

        def start_server(self) -> None:
            """Do not listen yet: what is answered before it is watched, nobody hears of."""

    manager = DynamicProbeManager(pack)
    server = Unstarted(model, non_blocking=True, **options)
    try:
        host, processor = keep_loaded(server._model_manager, model)
        with manager.attach(host, processor, callback_errors="report", keep_tokens=KEPT_TOKENS) as run:
            for rule in rules:
                concept, _, above = rule.partition(":")
                run.on(concept, above=float(above) if above else None, action=lambda event: tell(described(event)))
            Serve.start_server(server)
            yield server
            wait_for_answers(run)
    finally:
        server.kill_server()


def keep_loaded(models: Any, model: str) -> tuple[Any, Any]:
    """Return the model of a server and its processor, and let the server answer with that very model alone: after
    `/reset` it would load another, and for speech any that is named, which nobody watches.
    """
    from transformers.cli.serving.utils import split_model_id

    repo, file = split_model_id(model)
    only = models.process_model_name(repo), file
    watched = models.load_model_and_processor(only[0], gguf_file=file)

    def load(
        name: str,
        progress_callback: Callable[[dict[str, Any]], None] | None = None,
        tqdm_class: Any = None,
        gguf_file: str | None = None,
    ) -> tuple[Any, Any]:
        if (name, gguf_file) != only:
            raise UnsupportedModel(f"this server answers with {model} alone, which is watched: {name} is not loaded")
        if progress_callback is not None:
            progress_callback({"status": "ready", "model": name, "cached": True})
        return watched

    models.load_model_and_processor = load
    return watched


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
