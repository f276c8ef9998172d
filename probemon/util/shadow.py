"""Patches a method of a model instance until a stack closes.

with ExitStack() as stack:
    shadow(stack, owner, model, "generate", around)        # model.generate(...) is around(original, ...)
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol


class Owner(Protocol):
    """Owner of a patch, which after `open` only calls the original."""

    open: bool


_CHANGING = threading.RLock()  # runs of several threads patch one model; calls of its methods need no lock
# Each patch's owner, and the method below. A patch keeps its owner; held here, it would live for ever, with all it has.
_SHADOWS: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Owner], Any]] = weakref.WeakKeyDictionary()


def unshadowed(method: Any) -> Any:
    """Return the method below all patches; None if it is the class's."""
    while method is not None and method in _SHADOWS:
        method = _SHADOWS[method][1]
    return method


def is_shadowed_by(owner: Owner, target: Any, name: str) -> bool:
    """True if `owner` patched a method of `target`."""
    method = vars(target).get(name)
    while method is not None:
        if method in _SHADOWS and _SHADOWS[method][0]() is owner:
            return True
        method = _SHADOWS[method][1] if method in _SHADOWS else getattr(method, "__wrapped__", None)
    return False


def shadow(stack: ExitStack, owner: Owner, target: Any, name: str, around: Callable[..., Any]) -> None:
    """Patch a method of `target` with `around(original, ...)` until `stack` closes. Owners may close in any order."""
    with _CHANGING:
        stack.callback(_patch(owner, target, name, around))


def _patch(owner: Owner, target: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    attributes = vars(target)
    original, previous = getattr(target, name), attributes.get(name)

    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        # A later patch may outlive this one.
        return around(original, *args, **kwargs) if owner.open else original(*args, **kwargs)

    def restore() -> None:
        with _CHANGING:
            if attributes.get(name) is not method:
                return
            below = previous
            while below is not None and below in _SHADOWS and _is_closed(_SHADOWS[below][0]()):
                below = _SHADOWS[below][1]  # a closed owner could not remove it
            if below is None:
                del attributes[name]
            else:  # no deletion first: a generating thread would miss it
                attributes[name] = below

    _SHADOWS[method] = (weakref.ref(owner), previous)
    attributes[name] = method
    return restore


def _is_closed(owner: Owner | None) -> bool:
    return owner is None or not owner.open
