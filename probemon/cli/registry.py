"""Commands: the core's here, and each wing's in its own `cli` package.

    COMMANDS = (Command("analyze", "probemon.lab.cli.analyze:analyze", "Score every token of a corpus."),)

The app imports no wing: it asks each for its table `COMMANDS` by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

WINGS = ("lab", "ops", "adapters")


class Command(NamedTuple):
    """A command by its name in the shell.

    - `target`: `module:attribute` of its function, or of a `typer.Typer` that holds several.
    - `summary`: one line of at most 60 characters in the list of commands; a Typer has its own.
    """

    name: str
    target: str
    summary: str = ""

    def load(self) -> Any:
        """Import and return the function or Typer."""
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
    """Yield every command in the order of the help: the core's, then each wing's."""
    yield from COMMANDS
    for wing in WINGS:
        yield from import_module(f"probemon.{wing}.cli").COMMANDS


def followers_of_view(model: Any) -> list[Any]:
    """Return what the wings show of a model alongside concepts, as followers of its run: their `followers_of_view`."""
    modules = [import_module(f"probemon.{wing}.cli") for wing in WINGS]
    of_view = [module.followers_of_view for module in modules if hasattr(module, "followers_of_view")]
    return [follower for followers in of_view for follower in followers(model)]
