"""hears(event=events.append): a follower that calls one function for each of the methods that are named."""

from collections.abc import Callable

from probemon.monitor.followers import Follower


def hears(**methods: Callable[..., object]) -> Follower:
    """Return a follower whose methods are these functions."""
    return type("Hears", (Follower,), {name: staticmethod(method) for name, method in methods.items()})()
