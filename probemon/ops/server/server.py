"""The server's socket, host names and signals.

with open_socket("127.0.0.1", 8321) as sock:
    app = make_app(served, limits, keys=[Key("...")], hosts=all_names("127.0.0.1", []))
    make_server(app, ready=lambda: print(address_of(sock))).run(sockets=[sock])
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import signal
import socket
import threading
from collections.abc import Callable, Collection
from typing import Any

from probemon.errors import ConfigError, MissingExtra

DRAIN_SECONDS = 60  # enough for the longest answer by default, at 58 ms a token
_LAST_SECONDS = 2  # for the last words of answers that are cut
_NAME = re.compile(r"\[[0-9a-f:.]+\]|[a-z0-9._-]+")


def check_extra() -> None:
    """Raise `MissingExtra` without starlette, uvicorn or pydantic."""
    try:
        import pydantic
        import starlette
        import uvicorn  # noqa: F401
    except ImportError as error:
        needed = "starlette, uvicorn and pydantic"
        raise MissingExtra(f"probemon serve needs {needed}: pip install 'probemon[serve]'") from error
    del pydantic, starlette


def is_loopback(host: str) -> bool:
    """True if only this machine can reach it. Raises `ConfigError` if it is not an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        raise ConfigError(f"--host is {host!r}: give an address, such as 127.0.0.1 or ::1") from None


def names_of(host: str) -> set[str]:
    """Return the names of a server at an address."""
    names = {f"[{host}]" if ":" in host else host}
    return names | {"localhost", "127.0.0.1", "[::1]"} if is_loopback(host) else names


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one. Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"cannot listen at {host} port {port}: {error}; give another --port, or 0 for any") from error
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def make_server(
    app: Any,
    ready: Callable[[], None],
    *,
    drain_seconds: int = DRAIN_SECONDS,
    patience_seconds: float = 30.0,
    reload: Callable[[], None] | None = None,
) -> Any:
    """Return a `uvicorn.Server`; run it with `run(sockets=[sock])`.

    - `ready()`: called once requests are answered
    - `drain_seconds`: how long shutdown waits for answers; then they end with an error
    - `reload()`: called in a thread on SIGHUP, if the server runs in the main thread
    - `patience_seconds`: after which idle connections are cut off
    """
    import uvicorn

    from probemon.ops.server.connections import impatient_protocol

    class Server(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            app.stop()  # open pages read for ever
            cutting = asyncio.get_running_loop().call_later(drain_seconds, app.cut)
            try:
                await super().shutdown(sockets)
            finally:
                cutting.cancel()

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if reload is not None and threading.current_thread() is threading.main_thread():
                loop = asyncio.get_running_loop()
                loop.add_signal_handler(signal.SIGHUP, loop.run_in_executor, None, reload)
            if self.started:
                ready()

    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,  # requests are private
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=drain_seconds + _LAST_SECONDS,
        ws="none",
        http=impatient_protocol(patience_seconds),
    )
    return Server(config)


def all_names(host: str, more: Collection[str]) -> set[str]:
    """Return `names_of(host)` and `more`. Raises `ConfigError`."""
    for name in more:
        if not _NAME.fullmatch(name.lower()):
            raise ConfigError(
                f"--allow-host is {name!r}: give a name without scheme and port, or an address; one of IPv6 as [::1]"
            )
    return names_of(host) | {name.lower() for name in more}
