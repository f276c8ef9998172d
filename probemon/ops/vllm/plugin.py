"""What vLLM calls where probemon is installed: its engines are watched if a variable names a deployment file.

    PROBEMON_DEPLOYMENT=watch.yaml VLLM_PLUGINS=probemon vllm serve MODEL --api-key KEY

`watch_engines` is the entry point of vLLM's general plugins, `Endpoints` that of its endpoint plugins, which vLLM only
loads by `VLLM_PLUGINS`. Without `PROBEMON_DEPLOYMENT` neither does anything. Nothing of vLLM is imported before.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING, Any

from probemon.errors import ConfigError

if TYPE_CHECKING:
    from probemon.ops.vllm.client import VllmClient

LOG = logging.getLogger("probemon")
NAME = "probemon"
DEPLOYMENT, STOPS, CANARY = "PROBEMON_DEPLOYMENT", "PROBEMON_STOPS", "PROBEMON_CANARY"
KEEP_REQUESTS, ALLOW_HOST = "PROBEMON_KEEP_REQUESTS", "PROBEMON_ALLOW_HOST"
_clients: list[VllmClient] = []  # this process's, made with its first engine


def watch_engines(given: VllmClient | None = None) -> None:
    """Have every engine of this process watched, by `given` or by what the variables say. May be called again."""
    if given is not None:
        _clients[:] = [given]
    if not _clients and not os.environ.get(DEPLOYMENT):
        return
    from vllm.engine.arg_utils import EngineArgs

    original = EngineArgs.create_engine_config
    if hasattr(original, "__wrapped__") and getattr(original, "of_probemon", False):
        return

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        _watch(self)
        return original(self, *args, **kwargs)

    create_engine_config.of_probemon = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def client() -> VllmClient:
    """Return the client of this process; made at the first call. Raises `ConfigError` and errors of the deployment."""
    if not _clients:
        from probemon.ops.vllm.client import ABORT, VllmClient
        from probemon.ops.vllm.installed import check_vllm

        check_vllm()
        file, stops = os.environ.get(DEPLOYMENT, ""), os.environ.get(STOPS, "in_step")
        if not file:
            raise ConfigError(f"{DEPLOYMENT} is not set: give the deployment file that says what is watched")
        if stops == ABORT and NAME not in os.environ.get("VLLM_PLUGINS", "").split(","):
            raise ConfigError(
                f"{STOPS} is {ABORT!r}, and answers are aborted by the routes: set VLLM_PLUGINS={NAME}, or leave it out"
            )
        _clients.append(
            VllmClient(
                os.path.abspath(file),
                stops=stops,
                canary=os.environ.get(CANARY, "auto"),
                keep_requests=_count(KEEP_REQUESTS, 100),
            )
        )
    return _clients[0]


def _count(variable: str, default: int) -> int:
    text = os.environ.get(variable, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{variable} is {text!r:.40}: give a number")
    return int(text or default)


def _watch(engine: Any) -> None:
    """Set the arguments of an engine that is watched."""
    from probemon.ops.vllm.messages import CONFIG_KEY, WORKER

    if CONFIG_KEY in (engine.additional_config or {}) and engine.worker_cls == WORKER:
        return  # by its own client's engine_arguments()
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        raise ConfigError(
            "VLLM_USE_RUST_FRONTEND is set: vLLM's other front end receives nothing of probemon, unset it"
        )
    if engine._api_process_count > 1:
        raise ConfigError(
            "several API servers share this engine, and one process receives what its worker says: give"
            " --api-server-count 1, or start a server for each replica behind your balancer"
        )
    if engine.worker_cls != "auto":
        raise ConfigError(f"worker_cls is {engine.worker_cls!r}: probemon's worker is one itself, so leave it out")
    watched = client().engine_arguments(
        additional_config=engine.additional_config or {}, logits_processors=list(engine.logits_processors or ())
    )
    for name, value in watched.items():
        setattr(engine, name, value)


class Endpoints:
    """vLLM's endpoint plugin: the routes below /probemon/, and concepts in replies."""

    name = NAME
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        """Add the routes to vLLM's application. Raises `ConfigError` if strangers could read them."""
        if not _clients and not os.environ.get(DEPLOYMENT):
            return
        from probemon.ops.vllm.routes import SERVED, Routes

        if not SERVED:
            SERVED.append(_served(app.state.args))
            app.add_middleware(Routes)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Take the state of vLLM's server, of which the routes need nothing."""


def _served(args: Any) -> Any:
    from transformers import AutoTokenizer

    from probemon.ops.server.limits import Limits
    from probemon.ops.server.server import all_names, check_extra, is_loopback
    from probemon.ops.vllm.engine_run import process_metrics
    from probemon.ops.vllm.routes import ServedEngine

    check_extra()
    keys = [key for key in (args.api_key or [os.environ.get("VLLM_API_KEY", "")]) if key]
    host = args.host or "0.0.0.0"
    if not keys and not is_loopback(host):
        raise ConfigError(
            f"other machines can ask at {host}, and /probemon/ shows what clients ask: give --api-key, or --host"
            " 127.0.0.1"
        )
    own = client()
    if own.tokenizer is None:
        own.tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or args.model)
    metrics = process_metrics(own.deployment, own.manager.pack)
    if metrics is not None:
        own.run.follow(metrics)
    names = all_names(host, [name for name in os.environ.get(ALLOW_HOST, "").split(",") if name])
    model = (args.served_model_name or [args.model])[0]
    return ServedEngine(own, metrics, keys, names, model, Limits(kept_requests=_count(KEEP_REQUESTS, 100)), _said)


def _said() -> None:
    LOG.warning("probemon: %s is watched; health at /probemon/readyz", client().manager.pack.name)
