"""What the evidence on vLLM is of: the modules of the adapter, by a hash of what they mean.

adapter_sha256()              # the same after formatting, comments, docstrings and other words of errors
"""

from __future__ import annotations

import hashlib
import json

from staleness import ROOT, definitions

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
    """Return a hash of the syntax trees of these modules."""
    trees = {name: sorted(definitions((ROOT / name).read_text(encoding="utf-8"))) for name in MODULES}
    return hashlib.sha256(json.dumps(trees, sort_keys=True).encode()).hexdigest()
