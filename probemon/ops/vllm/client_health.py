"""The health of a vLLM client: its worker and its messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probemon.monitor.check import FAILED, OK, WARNING, Check
from probemon.monitor.health import Health, state_of
from probemon.ops.vllm.rows import CACHED

if TYPE_CHECKING:
    from probemon.ops.vllm.client import VllmClient


def client_health(client: VllmClient) -> Health:
    """Return it from the messages so far."""
    return Health((_worker(client), _channel(client), _tokens(client), _callbacks(client), *client.run.checks()))


def _worker(client: VllmClient) -> Check:
    hello = client.hello
    if hello is None:
        remedy = "Make the engine with client.engine_arguments(), after this client, in this process or a child of it."
        return Check("worker", FAILED, "no worker has said that it begins", remedy)
    if client.n_untold:
        what = f"{client.n_untold:,} requests ended without any readable token, and no other has had one since"
        return Check(
            "worker",
            FAILED,
            what,
            "Look at what the worker logged (it could not read a step's rows), then start again.",
        )
    how = "compiled" if hello.compiled else "eager"
    what = f"vLLM {hello.vllm}, runner {hello.runner}, {how}, reads {', '.join(hello.sites)} by {hello.way} states"
    if hello.canary_way == "off":
        return Check("worker", WARNING, f"{what}; nothing was compared before it served", "Leave canary='off' out.")
    return Check("worker", OK, f"{what}; its canary held ({hello.canary_way})")


def _channel(client: VllmClient) -> Check:
    receiver = client.receiver
    if receiver.failure is not None:
        what = f"a message could not be read ({type(receiver.failure).__name__}: {receiver.failure})"
        return Check("channel", FAILED, what, "Run engine and client with the same probemon, and create both again.")
    n_all = receiver.n_messages + receiver.n_lost
    if receiver.n_lost:
        what = f"{receiver.n_lost:,} of {n_all:,} messages were dropped before this client read them"
        remedy = "Give the process of the client time to read, or a higher high_water_mark."
        return Check("channel", state_of(receiver.n_lost, n_all), what, remedy)
    return Check("channel", OK, f"{n_all:,} messages came, none was lost")


def _tokens(client: VllmClient) -> Check:
    tokens = dict(client.tokens)
    tokens.pop(CACHED, None)  # run again after preemption
    n_all, n_seen = sum(tokens.values()), tokens.pop("", 0)
    if not tokens:
        return Check("tokens", OK, f"all {n_all:,} tokens that the engine ran have scores")
    reason = max(tokens, key=lambda reason: tokens[reason])
    what = f"{n_all - n_seen:,} of {n_all:,} tokens that the engine ran have no scores ({reason}: {tokens[reason]:,})"
    return Check("tokens", state_of(n_all - n_seen, n_all), what, "Look at what the reason names.")


def _callbacks(client: VllmClient) -> Check:
    failures = client.failures
    if not failures.n_errors:
        return Check("callbacks", OK, "no follower raised")
    first = failures.errors[0]
    what = f"{failures.n_errors:,} times a follower raised, first {type(first).__name__}: {first}"
    return Check("callbacks", FAILED, what, "Mend what raised; client.failures has the errors.")
