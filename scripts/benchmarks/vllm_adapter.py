"""What the evidence on vLLM is of: the modules of the adapter.

adapter_sha256()
"""

from __future__ import annotations

import hashlib

from provenance import ROOT

FOLDER = "probemon/ops/vllm"
# What a worker does, what it says, and what a client makes of it; what serves that over HTTP is in tests of its own.
MODULES = tuple(
    f"{FOLDER}/{name}.py"
    for name in (
        "channel",
        "client",
        "engine_canary",
        "engine_watch",
        "held_answers",
        "layer_states",
        "messages",
        "receiver",
        "request_log",
        "request_names",
        "requests",
        "row_ends",
        "rows",
        "step_stops",
        "stop",
        "worker",
    )
)


def adapter_sha256() -> str:
    """Return a hash of these modules: parts of a check that were measured with the same are not measured again."""
    hashed = hashlib.sha256()
    for name in MODULES:
        hashed.update((ROOT / name).read_bytes())
    return hashed.hexdigest()
