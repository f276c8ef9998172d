"""The commands of vLLM.

probemon vllm serve MODEL --deployment watch.yaml -- --max-model-len 4096
probemon vllm serve MODEL --pack my-pack --stops abort
probemon vllm check --deployment watch.yaml --json
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from probemon.cli import options as opt
from probemon.cli.terminal import answer, say
from probemon.errors import ConfigError
from probemon.ops.cli.api_keys import ApiKey, ApiKeyFile, api_key_of
from probemon.ops.cli.serve import AllowHost, AllowRemote, Host, NoToken

if TYPE_CHECKING:
    from probemon.ops.deployment.deployment import Deployment

vllm = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Watch a model inside vLLM.")

File = Annotated[
    Path | None,
    typer.Option("--deployment", metavar="FILE", help="What is watched, and what follows (probemon deploy check)."),
]
Packs = Annotated[
    list[str] | None,
    typer.Option("--pack", metavar="PACK", help="A pack to watch, without rules; may be repeated. Instead of a file."),
]
Stops = Annotated[
    str,
    typer.Option(
        metavar="WAY",
        help="Rules that stop: in_step ends a sequence with the token that met the rule; abort aborts it, some tokens"
        " later, also with speculation; told only reports.",
    ),
]
Canary = Annotated[
    str,
    typer.Option(
        metavar="WAY",
        help="What is compared before the first answer: weights (states of transformers with the same weights), layers"
        " (states are finite and differ), off; auto: weights where a copy of them fits the memory.",
    ),
]

Untried = Annotated[
    bool,
    typer.Option(
        "--untried-version",
        help="Take a vLLM that was not tested. Scores are compared with those of transformers before the first answer.",
    ),
]


@vllm.callback()
def callback() -> None:
    """Watch a model inside vLLM, which has a separate environment (scripts/vllm_env.sh)."""


@vllm.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder, a hub name, or 'demo'.")],
    deployment: File = None,
    more: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGUMENTS", help="Arguments of `vllm serve`, after two dashes.")
    ] = None,
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.")] = 8000,
    pack: Packs = None,
    stops: Stops = "in_step",
    canary: Canary = "auto",
    untried_version: Untried = False,
    api_key: ApiKey = "",
    api_key_file: ApiKeyFile = None,
    no_token: NoToken = False,
    allow_remote: AllowRemote = False,
    allow_host: AllowHost = None,
    keep_requests: Annotated[int, typer.Option(help="Ended requests whose scores are kept, the newest.", min=1)] = 100,
) -> None:
    """Serve MODEL by vLLM, watched: OpenAI's API, and below /probemon/ scores, events, metrics and health.

    Give a deployment file, or packs.
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
    token, is_drawn = api_key_of(api_key, api_key_file, no_token=no_token)
    check_more(more or ())
    check_vllm(untried=untried_version)
    check_extra()
    from probemon.ops.server.limits import Limits
    from probemon.ops.server.served import check_serves, served_name
    from probemon.ops.vllm.client import VllmClient
    from probemon.ops.vllm.engine_run import process_metrics
    from probemon.ops.vllm.routes import SERVED, ServedEngine

    checked_deployment = _deployment_of(deployment, pack)
    if checked_deployment is not None:
        check_serves(checked_deployment)
    folder = _folder_of(model)
    from transformers import AutoTokenizer

    with VllmClient(
        checked_deployment,
        packs=pack or (),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        stops=stops,
        canary=canary,
        untried_version=untried_version,
        keep_requests=keep_requests,
    ) as client:
        metrics = process_metrics(checked_deployment, client.manager.pack)
        if metrics is not None:
            client.run.follow(metrics)
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        key_note = "" if token is None else f" with the API key {token}" if is_drawn else " with your API key"
        ready = partial(say, f"probemon: vLLM serves at {address}v1{key_note}; health at {address}probemon/readyz")
        SERVED.append(
            ServedEngine(client, metrics, token, names, served_name(model), Limits(kept_requests=keep_requests), ready)
        )
        run_server(client, server_arguments(folder, served_name(model), host, port, token, more or ()))


@vllm.command()
def check(
    deployment: File = None,
    pack: Packs = None,
    stops: Stops = "in_step",
    untried_version: Untried = False,
    as_json: opt.AsJson = False,
) -> None:
    """Check that FILE, or packs, can be watched inside the vLLM that is installed here, without starting it."""
    from probemon.ops.vllm.client import VllmClient
    from probemon.ops.vllm.installed import check_vllm

    version = check_vllm(untried=untried_version)
    from probemon.ops.vllm.internals import expected_runner

    runner, why = expected_runner()
    with VllmClient(_deployment_of(deployment, pack), packs=pack or (), stops=stops) as client:
        summary = {
            "vllm": version,
            "runner": runner,
            "pack": client.manager.pack.name,
            "sites": list(client.settings.sites),
            "n_rules": len(client.rules),
            "stops_inside_the_step": client.settings.stop,
        }
    if as_json:
        answer(summary)
        return
    says = "end their rows inside the step" if client.settings.stop else "there are none that stop inside the step"
    say(
        f"vLLM {version} can watch {summary['pack']} at {', '.join(client.settings.sites)};"
        f" {len(client.rules)} rules: {says}",
        f"model runner {runner}: {why}",
    )


def _deployment_of(file: Path | None, packs: list[str] | None) -> Deployment | None:
    from probemon.ops.cli.deployments import open_deployment

    if (file is None) == (not packs):
        raise ConfigError("give what is watched: --deployment FILE, or --pack PACK, not both")
    return None if file is None else open_deployment(file)[0]


def _folder_of(model: str) -> str:
    if model != "demo":
        return model
    from probemon.bundled import bundled_path

    return str(bundled_path(partial(say, error=True)))
