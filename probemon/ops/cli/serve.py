"""The command serve.

probemon serve demo
probemon serve MODEL PACK --port 0 --no-token
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from probemon.cli import options as opt
from probemon.cli.common import load_aloud, make_manager, pack_for, use_threads
from probemon.cli.signals import ending_at_once
from probemon.cli.terminal import say
from probemon.errors import ConfigError, ProbemonError
from probemon.ops.cli.api_keys import ApiKey, ApiKeyFile, api_keys_of
from probemon.ops.cli.deployments import open_deployment
from probemon.ops.server.logs import Form, Level, set_up_log
from probemon.util.counted import counted

if TYPE_CHECKING:
    from probemon.ops.server.served import Served

Host = Annotated[str, typer.Option(help="Address to listen at; others than those of this machine need --allow-remote.")]
Port = Annotated[int, typer.Option(help="Port to listen at; 0: any that is free.")]
NoToken = Annotated[
    bool, typer.Option("--no-token", help="Ask for no token: for an address of this machine alone, which others share.")
]
AllowRemote = Annotated[bool, typer.Option("--allow-remote", help="Let other machines ask; a token is asked for.")]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME", help="A name by which clients call this server, in addition to its address; may be repeated."
    ),
]
ControlTokens = Annotated[
    bool,
    typer.Option(
        "--allow-control-tokens", help="Let messages have special tokens, by which a client can begin a system turn."
    ),
]
MaxTokens = Annotated[int, typer.Option(help="Most tokens of an answer.")]
AtOnce = Annotated[int, typer.Option(help="Requests that are answered at the same time, each in a separate thread.")]
Queue = Annotated[int, typer.Option(help="Requests that may wait; more are answered 429.")]
NoRecords = Annotated[
    bool,
    typer.Option("--no-records", help="Keep no request once it has ended, and no event for a page that comes later."),
]
KeepRequests = Annotated[int, typer.Option(help="Ended requests that are kept in memory, the newest.", min=1)]
KeepMinutes = Annotated[
    int,
    typer.Option(help="Minutes for which requests and events are kept; 0: never dropped for their age.", min=0),
]
KeepMetadata = Annotated[
    bool, typer.Option("--keep-metadata", help="Keep user and metadata of a request in its record; readers see them.")
]
LogLevel = Annotated[Level, typer.Option(help="Least level of what is written to stderr; info has a line per request.")]
LogFormat = Annotated[Form, typer.Option(help="Form of the log: lines of text, or a JSON object per line.")]
DrainSeconds = Annotated[
    int,
    typer.Option(
        help="How long the end waits for the answers to requests that have come; then they end with an error.", min=0
    ),
]


def serve(
    model: opt.Model,
    pack: opt.PackOfModel = None,
    more_packs: opt.MorePacks = None,
    host: Host = "127.0.0.1",
    port: Port = 8321,
    api_key: ApiKey = "",
    api_key_file: ApiKeyFile = None,
    no_token: NoToken = False,
    allow_remote: AllowRemote = False,
    allow_host: AllowHost = None,
    allow_control_tokens: ControlTokens = False,
    max_tokens: MaxTokens = 1024,
    at_once: AtOnce = 2,
    queue: Queue = 32,
    drain_seconds: DrainSeconds = 60,
    no_records: NoRecords = False,
    keep_requests: KeepRequests = 100,
    keep_minutes: KeepMinutes = 0,
    keep_metadata: KeepMetadata = False,
    log_level: LogLevel = "warning",
    log_format: LogFormat = "text",
    alert_set: opt.AlertSet = None,
    dtype: opt.Dtype = "auto",
    device: opt.Device = "cpu",
    threads: opt.Threads = 0,
    strict: opt.Strict = False,
    deployment: opt.DeploymentFile = None,
) -> None:
    """Serve MODEL watched by PACK: OpenAI's API with the concepts of every token, and a page that shows them.

    When it is ready it prints its address, with the token that clients give as their API key, unless you gave a key.
    Ctrl-C or SIGTERM ends it after the requests that have come, a second signal at once. SIGHUP reads the deployment
    file again.
    """
    from probemon.ops.server.server import address_of, all_names, check_extra, is_loopback, make_server, open_socket

    check_extra()
    if not is_loopback(host) and (no_token or not allow_remote):
        raise ConfigError(
            f"--host {host} lets other machines ask: "
            + ("--no-token is for this machine alone" if no_token else "say --allow-remote if that is meant")
        )
    names = all_names(host, allow_host or ())
    keys, is_drawn = api_keys_of(api_key, api_key_file, no_token=no_token)
    from probemon.engine.kernels import check_device
    from probemon.ops.server.limits import Limits
    from probemon.packs.group import open_packs

    limits = Limits(
        max_tokens=max_tokens,
        at_once=at_once,
        queue=queue,
        kept_requests=0 if no_records else keep_requests,
        kept_minutes=keep_minutes,
    )
    check_device(device)
    use_threads(threads)
    checked_deployment = None
    if deployment is not None:
        from probemon.ops.server.served import check_serves

        checked_deployment, opened = open_deployment(deployment, pack or more_packs, alert_set)
        check_serves(checked_deployment)
    else:
        opened = open_packs([pack_for(model, pack), *(more_packs or ())], alert_set)
    with open_socket(host, port) as sock:
        set_up_log(log_level, log_format)
        loaded, tokenizer = load_aloud(model, device, dtype)
        from probemon.host.compatibility import check_readable
        from probemon.host.model import unwrap
        from probemon.ops.server.app import make_app
        from probemon.ops.server.served import Served, served_name

        manager = make_manager(
            opened, device=device, **({} if checked_deployment is None else checked_deployment.settings)
        )
        check_readable(manager.pack, unwrap(loaded), strict=strict)
        served = Served(
            served_name(model),
            loaded,
            tokenizer,
            manager,
            limits,
            checked_deployment,
            control_tokens=allow_control_tokens,
            keep_metadata=keep_metadata,
        )
        app = make_app(served, limits, keys=keys, hosts=names)
        way_in = f"#token={keys[0].secret}" if is_drawn else " with your API key" if keys else ""
        ready = partial(say, f"probemon serving at {address_of(sock)}{way_in}")
        reload = None if checked_deployment is None else partial(_reload, served)
        with ending_at_once():
            make_server(app, ready, drain_seconds=drain_seconds, reload=reload).run(sockets=[sock])


def _reload(served: Served) -> None:
    try:
        reloaded = served.holding.reload()
    except (ProbemonError, OSError) as error:
        say(f"probemon serve: not reloaded, the previous file still applies: {error}")
        return
    deployed = served.holding.now.deployment
    assert deployed is not None
    notes = ""
    if n := reloaded.to_rules:
        notes += f"; {counted(n, 'answer')} under way: only its rules apply, because of the request's rules"
    if n := reloaded.to_nothing:
        notes += (
            f"; {counted(n, 'answer')} under way: NOTHING of it applies, because of the request's rules; the"
            " previous file applies until they end"
        )
    say(f"probemon serve: {deployed.path.name} was read again, sha256 {deployed.sha256}{notes}")
