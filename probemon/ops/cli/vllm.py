"""The commands of vLLM.

probemon vllm serve MODEL --deployment watch.yaml -- --max-model-len 4096
probemon vllm check --deployment watch.yaml --json
"""

from __future__ import annotations

import secrets
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from probemon.cli import options as opt
from probemon.cli.terminal import answer, say
from probemon.errors import ConfigError
from probemon.ops.cli.serve import AllowHost, AllowRemote, Host, NoToken

vllm = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Watch a model inside vLLM.")
_TOKEN_BYTES = 32

File = Annotated[
    Path,
    typer.Option("--deployment", metavar="FILE", help="What is watched, and what follows (probemon deploy check)."),
]


@vllm.callback()
def callback() -> None:
    """Watch a model inside vLLM, which has a separate environment (scripts/vllm_env.sh)."""


@vllm.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a hub name, or 'demo'.")],
    deployment: File,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Arguments of `vllm serve`, after two dashes.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    no_token: NoToken = False,
    allow_remote: AllowRemote = False,
    allow_host: AllowHost = None,
    keep_requests: Annotated[int, typer.Option(help="Ended requests whose scores are kept, the newest.", min=1)] = 100,
) -> None:
    """Serve MODEL by vLLM, watched: OpenAI's API, and below /probemon/ scores, events, metrics and health.

    A sequence that a rule stops ends inside the step, after the token that met the rule.
    """
    from probemon.ops.server.server import all_names, check_extra, is_loopback
    from probemon.ops.vllm.installed import check_vllm
    from probemon.ops.vllm.serve import check_more, run_server, server_arguments

    if not is_loopback(host) and (no_token or not allow_remote):
        raise ConfigError(
            f"--host {host} lets other machines ask: "
            + ("--no-token is for this machine alone" if no_token else "say --allow-remote if that is meant")
        )
    names = all_names(host, allow_host or ())
    check_more(more or ())
    check_vllm()
    check_extra()
    from probemon.ops.cli.deployments import open_deployment
    from probemon.ops.server.limits import Limits
    from probemon.ops.server.served import check_serves, served_name
    from probemon.ops.vllm.client import VllmClient
    from probemon.ops.vllm.engine_run import process_metrics
    from probemon.ops.vllm.routes import SERVED, ServedEngine

    checked_deployment, _ = open_deployment(deployment)
    check_serves(checked_deployment)
    folder = _folder_of(model)
    from transformers import AutoTokenizer

    with VllmClient(
        checked_deployment, tokenizer=AutoTokenizer.from_pretrained(folder), keep_requests=keep_requests
    ) as client:
        token = None if no_token else secrets.token_urlsafe(_TOKEN_BYTES)
        metrics = process_metrics(checked_deployment, client.manager.pack)
        if metrics is not None:
            client.run.follow(metrics)
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        key_note = "" if token is None else f" with the API key {token}"
        ready = partial(say, f"probemon: vLLM serves at {address}v1{key_note}; health at {address}probemon/readyz")
        SERVED.append(
            ServedEngine(client, metrics, token, names, served_name(model), Limits(kept_requests=keep_requests), ready)
        )
        run_server(server_arguments(client, folder, served_name(model), host, port, token, more or ()))


@vllm.command()
def check(deployment: File, as_json: opt.AsJson = False) -> None:
    """Check that FILE can be watched inside the vLLM that is installed here, without starting it."""
    from probemon.ops.vllm.client import VllmClient
    from probemon.ops.vllm.installed import check_vllm

    version = check_vllm()
    with VllmClient(deployment) as client:
        summary = {
            "vllm": version,
            "pack": client.manager.pack.name,
            "sites": list(client.settings.sites),
            "n_rules": len(client.rules),
            "stops_inside_the_step": client.settings.stop,
        }
    if as_json:
        answer(summary)
        return
    stops = "end their rows inside the step" if client.settings.stop else "there are none that stop"
    say(
        f"vLLM {version} can watch {summary['pack']} at {', '.join(client.settings.sites)};"
        f" {len(client.rules)} rules: {stops}"
    )


def _folder_of(model: str) -> str:
    if model != "demo":
        return model
    from probemon.bundled import bundled_path

    return str(bundled_path(partial(say, error=True)))
