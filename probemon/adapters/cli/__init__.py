"""Commands for models that route."""

from probemon.cli.registry import Command

COMMANDS = (
    Command(
        "routing", "probemon.adapters.cli.routing:routing", "Generate from MODEL and show where routers send tokens."
    ),
    Command("bem", "probemon.adapters.cli.bem:bem"),
)
