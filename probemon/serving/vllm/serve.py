"""vLLM's OpenAI server, watched: its arguments, and its run in this process.

arguments = server_arguments(client, "model", "127.0.0.1", 8000, token, more=["--max-model-len", "1024"])
run_server(arguments)                       # until a signal ends it
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from probemon.errors import ConfigError
from probemon.serving.vllm.client import VllmClient

ROUTES = "probemon.serving.vllm.routes.Routes"
_OURS = {  # what vLLM is told by the command itself, and why it cannot be told otherwise
    "--worker-cls": "probemon's worker is one itself",
    "--additional-config": "it holds what is watched",
    "--host": "give it before the two dashes",
    "--port": "give it before the two dashes",
    "--api-key": "the command makes one, or give --no-token before the two dashes",
    "--api-server-count": "one process receives what the worker says",
    "--headless": "the server is what is started",
    "--uds": "it listens at an address",
}


def check_more(more: Sequence[str]) -> None:
    """Raise `ConfigError` for arguments of vLLM that are not the user's to give."""
    for argument in more:
        name = argument.partition("=")[0].replace("_", "-")
        if name in _OURS:
            raise ConfigError(f"{name} is given to vLLM: {_OURS[name]}, so leave it out")


def server_arguments(
    client: VllmClient, model: str, host: str, port: int, token: str | None, more: Sequence[str]
) -> list[str]:
    """Return the command line of `vllm serve`, without its name. `more`: what the user adds."""
    engine = client.engine_arguments()
    arguments = [model, "--host", host, "--port", str(port), "--middleware", ROUTES]
    arguments += ["--worker-cls", engine["worker_cls"], "--additional-config", json.dumps(engine["additional_config"])]
    for processor in engine.get("logits_processors", ()):
        arguments += ["--logits-processors", processor]
    if not engine["async_scheduling"]:
        arguments.append("--no-async-scheduling")
    if token is not None:
        arguments += ["--api-key", token]
    return [*arguments, *more]


def run_server(arguments: Sequence[str]) -> None:
    """Run vLLM's server until a signal ends it. Raises `ConfigError` for arguments that it does not take."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import uvloop
    from vllm.entrypoints.openai.api_server import run_server as run
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="probemon vllm serve MODEL --deployment FILE --"))
    try:
        parsed: Any = parser.parse_args(list(arguments))
    except SystemExit as ended:
        raise ConfigError("vLLM does not take the arguments behind the two dashes: it says above which") from ended
    parsed.model = parsed.model_tag if getattr(parsed, "model_tag", None) else parsed.model
    validate_parsed_serve_args(parsed)
    uvloop.run(run(parsed))
