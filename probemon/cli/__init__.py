"""The shell's face: `probemon COMMAND`, one file a command."""

from __future__ import annotations


def main() -> None:
    """Run the command line. What it needs is imported here, since its parts import this package, too."""
    from probemon.cli.app import main as run

    run()
