"""The shell's face: `probemon COMMAND`, one file a command."""

from __future__ import annotations


def main() -> None:
    """Run the command line. What it needs is imported here, since its parts import this package, too; Ctrl-C during
    that ends it without a word.
    """
    import os
    import signal

    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        # At once: an import that an exception ends tells of it in its own way, and nothing is half written yet.
        try:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        except ValueError:  # not on the main thread, which alone is interrupted
            is_ours = False
    try:
        from probemon.cli.app import main as run
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
