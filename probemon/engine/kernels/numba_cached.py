"""Compiles with numba, and keeps the code from one start to the next if there is a folder for it.

@compiled()                     # nogil; compiled at the first call for each kind of arguments
def total(x): ...

callback = compiled_callback(signature, function)       # compiled at once, with an address
n_compiled()                    # how often code was compiled in this process that was not kept

numba looks for a folder in NUMBA_CACHE_DIR, beside the source, and in the user's cache. It raises if none of them can
be written, and if one is full: here the code goes into probemon's cache folder then, or is not kept.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import FunctionCache, NullCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from probemon.errors import ConfigError
from probemon.util.cache_folders import REMEDY, cache_dir, why_not_usable

_config: Any = numba.config  # untyped names
LOG = logging.getLogger("probemon")
_n_compiled = 0


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return numba's `njit(nogil=True, **options)` whose code is kept."""
    compile_function = njit(nogil=True, **options)

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = compile_function(function)
        dispatcher._cache = _cache_of(function)
        return dispatcher

    return decorate


def compiled_callback(signature: Any, function: Callable[..., Any]) -> Any:
    """Return numba's `cfunc(signature)(function)` whose code is kept."""
    callback: Any = CFunc(function, normalize_signature(signature), locals={}, options={})
    callback._cache = _cache_of(function)
    callback.compile()
    return callback


def n_compiled() -> int:
    """Return how many functions were compiled in this process, for want of kept code."""
    return _n_compiled


class _Cache(FunctionCache):  # type: ignore[misc,unused-ignore]
    """numba's cache of a function, in which a file that cannot be read or written is a missing one."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            code = super().load_overload(sig, target_context)
        except Exception:  # a damaged file fails in as many ways as pickle does
            code = None
            with suppress(OSError):
                self.flush()  # else it could not be replaced
        return _counted(code)

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            _say_once(f"compiled code cannot be kept in {self.cache_path} ({error.strerror}): {REMEDY}")


class _NoCache(NullCache):  # type: ignore[misc,unused-ignore]
    def load_overload(self, sig: Any, target_context: Any) -> Any:
        return _counted(None)


def _cache_of(function: Callable[..., Any]) -> Any:
    """Return a cache in one of numba's folders, else in probemon's, else one that keeps nothing."""
    if _numba_may_look():
        with suppress(RuntimeError):  # it found no folder
            return _Cache(function)
    before = _config.CACHE_DIR
    try:
        _config.CACHE_DIR = str(cache_dir() / "numba")
        return _Cache(function)
    except (ConfigError, RuntimeError) as error:
        _say_once(str(error))
        return _NoCache()
    finally:
        _config.CACHE_DIR = before  # others' functions are not ours to place


@functools.cache
def _numba_may_look() -> bool:
    """Return whether numba finds a folder before the one in the home folder, or there is one: without a home it would
    make a folder "~" in the current one.
    """
    places = [place for place in (_config.CACHE_DIR, Path(__file__).parent / "__pycache__") if place]
    return os.path.expanduser("~") != "~" or any(not why_not_usable(Path(place)) for place in places)


def _counted(code: Any) -> Any:
    """Return `code`; without it the function is compiled now."""
    global _n_compiled
    _n_compiled += code is None
    return code


@functools.cache
def _say_once(what: str) -> None:
    LOG.warning("%s; until then every start compiles anew", what)
