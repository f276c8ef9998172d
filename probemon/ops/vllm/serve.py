"""vLLM's OpenAI server, watched, in this process."""

from __future__ import annotations

import os
from collections.abc import Sequence

from probemon.errors import ConfigError
from probemon.ops.vllm.client import VllmClient
from probemon.ops.vllm.plugin import watch_engines

ROUTES = "probemon.ops.vllm.routes.Routes"
_OURS = {  # set by the command, and why
    "--worker-cls": "probemon's worker is one itself",
    "--additional-config": "it holds what is watched",
    "--host": "give it before the two dashes",
    "--port": "give it before the two dashes",
    "--api-key": "give it, or --no-token, before the two dashes",
    "--api-server-count": "one process receives what the worker says",
    "--headless": "the server is what is started",
    "--uds": "it listens at an address",
}


def check_more(more: Sequence[str]) -> None:
    """Raise `ConfigError` for arguments that the command sets."""
    for argument in more:
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")  # --additional-config.probemon.stop=...
        # vLLM's parser accepts beginnings of names.
        for ours, why in _OURS.items():
            if name == ours or (name == "-asc" and ours == "--api-server-count") or _begins(name, ours):
                raise ConfigError(
                    f"{argument.partition('=')[0]} is given to vLLM, which is {ours}: {why}, so leave it out"
                )


def _begins(name: str, option: str) -> bool:
    return len(name) > len("--") and name.startswith("--") and option.startswith(name)


def server_arguments(model: str, name: str, host: str, port: int, token: str | None, more: Sequence[str]) -> list[str]:
    """Return the arguments of `vllm serve`. `name`: for clients; `more`: the user's."""
    arguments = [model, "--served-model-name", name, "--host", host, "--port", str(port), "--middleware", ROUTES]
    if token is not None:
        arguments += ["--api-key", token]
    return [*arguments, *more]


def run_server(client: VllmClient, arguments: Sequence[str]) -> None:
    """Run vLLM's server, its engine watched, until a signal ends it. Raises `ConfigError` for unknown arguments."""
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigError("VLLM_USE_RUST_FRONTEND is set: vLLM's other front end has no place for routes, so unset it")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    from probemon.ops.vllm.internals import serve_command

    parser, command, set_up = serve_command()
    set_up()
    watch_engines(client)
    try:
        parsed = parser.parse_args(["serve", *arguments])
    except SystemExit as ended:
        raise ConfigError("vLLM does not take the arguments behind the two dashes: it says above which") from ended
    command.validate(parsed)
    command.cmd(parsed)
