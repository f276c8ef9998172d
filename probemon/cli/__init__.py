"""The command line, one file per command."""

from __future__ import annotations


def main() -> None:
    """Run the command line; Ctrl-C ends its imports silently."""
    import os
    import signal

    is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_ours:
        # At once: an interrupted import would report the exception.
        try:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))
        except ValueError:  # only the main thread is interrupted
            is_ours = False
    try:
        from probemon.cli.app import main as run
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    run()
