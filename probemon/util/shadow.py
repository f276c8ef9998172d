"""Shadow: put a method before a model's own, on the instance, and take it away again without trace.

    with ExitStack() as stack:
        shadow(stack, owner, model, "generate", around)        # model.generate(...) is around(original, ...)

Owners that shadow one object may leave in any order: who left first is skipped when the others do.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol


class Owner(Protocol):
    """Who put a shadow there; once the owner is no longer `open`, its shadows only pass through."""

    open: bool


# The owner of each shadow, and what it shadows.
_SHADOWS: weakref.WeakKeyDictionary[Any, tuple[Owner, Any]] = weakref.WeakKeyDictionary()


def unshadowed(method: Any) -> Any:
    """Return what lies under all shadows; None where it is the class's own."""
    while method is not None and method in _SHADOWS:
        method = _SHADOWS[method][1]
    return method


def is_shadowed_by(owner: Owner, target: Any, name: str) -> bool:
    """Whether a shadow of `owner` is before a method of `target`, under those of others or not."""
    method = vars(target).get(name)
    while method is not None:
        if method in _SHADOWS and _SHADOWS[method][0] is owner:
            return True
        method = _SHADOWS[method][1] if method in _SHADOWS else getattr(method, "__wrapped__", None)
    return False


def shadow(stack: ExitStack, owner: Owner, target: Any, name: str, around: Callable[..., Any]) -> None:
    """Put `around(original, ...)` before a method of `target`, until `stack` closes."""
    attributes = vars(target)
    original, previous = getattr(target, name), attributes.get(name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        # Another run may have shadowed this one and outlived it: then it only passes through.
        return around(original, *args, **kwargs) if owner.open else original(*args, **kwargs)

    def restore() -> None:
        if attributes.get(name) is not method:
            return
        below = previous
        while below is not None and below in _SHADOWS and not _SHADOWS[below][0].open:
            below = _SHADOWS[below][1]  # its run closed first and could not take it away
        if below is None:
            del attributes[name]
        else:  # not deleted first: a thread that generates meanwhile would miss it
            attributes[name] = below

    _SHADOWS[method] = (owner, previous)
    attributes[name] = method
    stack.callback(restore)
