"""Two generations in alternate steps, so that other load affects both alike.

    other = shared_copy(model)
    seconds = in_lockstep(generate_bare, generate_watched, n_tokens=12, first=0)    # [11, 2]

A side is called as `side(criteria, n_tokens)` in its own thread and must generate that many tokens with
`stopping_criteria=criteria`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from probemon.errors import ConfigError

Side = Callable[[StoppingCriteriaList, int], None]


def shared_copy(model: Any) -> Any:
    """Return a copy with the same parameters and buffers, without later hooks. Raises `ConfigError`."""
    try:
        return copy.deepcopy(model, {id(one): one for one in chain(model.parameters(), model.buffers())})
    except Exception as error:  # compiled or dispatched models
        raise ConfigError(
            f"the cost of watching cannot be measured against a bare model: {type(model).__name__} cannot be copied"
            f" ({type(error).__name__}: {str(error)[:200]}); measure it before it is compiled or dispatched"
        ) from error


def in_lockstep(one: Side, other: Side, n_tokens: int, first: int = 0) -> npt.NDArray[np.float64]:
    """Return the seconds of each decode step after the prompt's: `[n_tokens - 1, 2]`, fp64. `first`: the side that
    begins.
    """
    turns = [threading.Semaphore(0), threading.Semaphore(0)]
    clocks = [_Clock(turns[i], turns[1 - i], n_tokens) for i in range(2)]
    errors: list[BaseException] = []

    def work(i: int, side: Side) -> None:
        turns[i].acquire()
        try:
            if not errors:
                side(StoppingCriteriaList([clocks[i]]), n_tokens)
        except BaseException as error:
            errors.append(error)
            clocks[1 - i].ends = True
        finally:
            turns[1 - i].release()

    threads = [threading.Thread(target=work, args=(i, side)) for i, side in enumerate((one, other))]
    for thread in threads:
        thread.start()
    turns[first].release()
    try:
        for thread in threads:
            thread.join()
    except BaseException:  # interrupted: both end after their step
        for clock in clocks:
            clock.ends = True
        for thread in threads:
            thread.join()
        raise
    if errors:
        raise errors[0]
    return np.array([clock.seconds[1:] for clock in clocks]).T


class _Clock(StoppingCriteria):
    """Times each step, then lets the other side take one."""

    def __init__(self, mine: threading.Semaphore, others: threading.Semaphore, n_tokens: int) -> None:
        self.seconds: list[float] = []
        self.ends = False
        self._mine, self._others, self._n_tokens, self._begin = mine, others, n_tokens, 0.0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.seconds.append(time.perf_counter() - self._begin)
        if len(self.seconds) < self._n_tokens:  # after the last step the thread hands over at its end
            self._others.release()
            self._mine.acquire()
        self._begin = time.perf_counter()
        return torch.full((len(input_ids),), self.ends, dtype=torch.bool, device=input_ids.device)
