"""numba compilation with a cache on disk.

@compiled()                     # nogil; compiled at first call
def total(x): ...

callback = compiled_callback(signature, function)       # compiled at once, with an address

If numba's cache folders are not writable or full, where numba would raise, code goes into probemon's, or is not cached.
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

_config: Any = numba.config
LOG = logging.getLogger("probemon")
_n_compiled = 0


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's `njit(nogil=True, **options)`, cached."""
    compile_function = njit(nogil=True, **options)

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = compile_function(function)
        dispatcher._cache = _cache_of(function)
        return dispatcher

    return decorate


def compiled_callback(signature: Any, function: Callable[..., Any]) -> Any:
    """numba's `cfunc(signature)(function)`, cached."""
    callback: Any = CFunc(function, normalize_signature(signature), locals={}, options={})
    callback._cache = _cache_of(function)
    callback.compile()
    return callback


def n_compiled() -> int:
    """Number of functions compiled in this process."""
    return _n_compiled


class _Cache(FunctionCache):  # type: ignore[misc,unused-ignore]
    """numba's cache; an unreadable or unwritable file counts as missing."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            code = super().load_overload(sig, target_context)
        except Exception:  # damaged files fail in any way
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
    if _numba_may_look():
        with suppress(RuntimeError):
            return _Cache(function)
    before = _config.CACHE_DIR
    try:
        _config.CACHE_DIR = str(cache_dir() / "numba")
        return _Cache(function)
    except (ConfigError, RuntimeError) as error:
        _say_once(str(error))
        return _NoCache()
    finally:
        _config.CACHE_DIR = before  # only for our functions


@functools.cache
def _numba_may_look() -> bool:
    """False if numba would make a folder "~", as it may without a home."""
    places = [place for place in (_config.CACHE_DIR, Path(__file__).parent / "__pycache__") if place]
    return os.path.expanduser("~") != "~" or any(not why_not_usable(Path(place)) for place in places)


def _counted(code: Any) -> Any:
    global _n_compiled
    _n_compiled += code is None
    return code


@functools.cache
def _say_once(what: str) -> None:
    LOG.warning("%s; until then every start compiles again", what)
