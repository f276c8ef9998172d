"""Commands for models that route."""

from __future__ import annotations

from typing import Any

from probemon.cli.registry import Command

COMMANDS = (
    Command(
        "routing", "probemon.adapters.cli.routing:routing", "Generate from MODEL and show where routers send tokens."
    ),
    Command("bem", "probemon.adapters.cli.bem:bem"),
)


def followers_of_view(model: Any) -> list[Any]:
    """Return the followers that show which tokens the model's memories read, if it has any."""
    from probemon.adapters.routing.recorder import Routing
    from probemon.adapters.routing.slot_memories import slot_memories
    from probemon.host.model import unwrap

    return [Routing()] if slot_memories(unwrap(model)) else []
