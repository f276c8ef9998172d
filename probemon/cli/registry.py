"""The table of commands; each wing has its own, which the app imports by name."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

WINGS = ("lab", "ops", "adapters")


class Command(NamedTuple):
    """A command. `target`: `module:attribute` of a function or `typer.Typer`; `summary`: at most 60 characters."""

    name: str
    target: str
    summary: str = ""

    def load(self) -> Any:
        """Import the function or Typer."""
        module, _, attribute = self.target.partition(":")
        return getattr(import_module(module), attribute)


COMMANDS = (
    Command("watch", "probemon.cli.watch.command:watch", "Generate from MODEL and show concepts token by token."),
    Command("doctor", "probemon.cli.doctor.command:doctor", "Check that MODEL can be watched by PACK here."),
    Command(
        "concepts", "probemon.cli.concepts:concepts", "Show the concepts of PACK as a tree, with their thresholds."
    ),
    Command(
        "inspect", "probemon.cli.inspect_pack:inspect", "Show what is in PACK, how good it is, whether it is whole."
    ),
    Command("pack", "probemon.cli.packs:pack"),
    Command("hierarchy", "probemon.cli.packs:hierarchy", "Give a flat pack a hierarchy."),
    Command("quantize", "probemon.cli.packs:quantize", "Write an int8 copy of PACK."),
)


def registered() -> Iterator[Command]:
    """Yield all commands in the help's order."""
    yield from COMMANDS
    for wing in WINGS:
        yield from import_module(f"probemon.{wing}.cli").COMMANDS


def followers_of_view(model: Any) -> list[Any]:
    """Return the wings' followers that show more than concepts."""
    modules = [import_module(f"probemon.{wing}.cli") for wing in WINGS]
    of_view = [module.followers_of_view for module in modules if hasattr(module, "followers_of_view")]
    return [follower for followers in of_view for follower in followers(model)]
