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
from dataclasses import dataclass
from typing import Any, Protocol


class Owner(Protocol):
    """Owner of a patch, which after `open` only calls the original."""

    open: bool


_ATTRIBUTE = "_probemon_patch"
_CHANGING = threading.RLock()  # runs of several threads patch one model; calls of its methods need no lock


@dataclass(eq=False)
class _Patch:
    """What a patch lies on: `below`, the instance's method before it, None for the class's; `original` calls it.

    `of()` is its method, whose attribute it is: a table of all would keep owners alive, with all they have.
    """

    owner: Owner
    below: Any
    original: Any
    of: Callable[[], Any] = lambda: None


def _patch_of(method: Any) -> _Patch | None:
    """Return the patch that a method is. Another library's wrapper may have copied the attribute."""
    patch = getattr(method, _ATTRIBUTE, None)
    return patch if isinstance(patch, _Patch) and patch.of() is method else None


def unshadowed(method: Any) -> Any:
    """Return the method below all patches; None if it is the class's."""
    while patch := _patch_of(method):
        method = patch.below
    return method


def is_shadowed_by(owner: Owner, target: Any, name: str) -> bool:
    """True if `owner` patched a method of `target`."""
    method = vars(target).get(name)
    while method is not None:
        patch = _patch_of(method)
        if patch is not None and patch.owner is owner:
            return True
        method = getattr(method, "__wrapped__", None) if patch is None else patch.below
    return False


def shadow(stack: ExitStack, owner: Owner, target: Any, name: str, around: Callable[..., Any]) -> None:
    """Patch a method of `target` with `around(original, ...)` until `stack` closes. Owners may close in any order."""
    with _CHANGING:
        stack.callback(_patch(owner, target, name, around))


def _patch(owner: Owner, target: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    attributes = vars(target)
    patch = _Patch(owner, attributes.get(name), getattr(target, name))

    @functools.wraps(patch.original)
    def method(*args: Any, **kwargs: Any) -> Any:
        # A later patch may outlive this one.
        return around(patch.original, *args, **kwargs) if owner.open else patch.original(*args, **kwargs)

    def restore() -> None:
        with _CHANGING:
            if attributes.get(name) is method:
                below = patch.below
                while (closed := _patch_of(below)) and not closed.owner.open:
                    below = closed.below  # a closed owner could not remove it
                if below is None:
                    del attributes[name]
                else:  # no deletion first: a generating thread would miss it
                    attributes[name] = below
                return
            above = _patch_of(attributes.get(name))
            while above is not None and above.below is not method:
                above = _patch_of(above.below)
            if above is not None:  # else another library's patch lies on it
                above.below, above.original = patch.below, patch.original
                above.of().__wrapped__ = patch.original

    setattr(method, _ATTRIBUTE, patch)
    patch.of = weakref.ref(method)
    attributes[name] = method
    return restore
