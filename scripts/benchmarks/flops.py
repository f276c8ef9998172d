"""Counts a call's operations: two for a multiply-add, one for each pointwise result.

flops(lambda: model(ids))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode


def flops(call: Callable[[], object]) -> int:
    """Return a call's operations."""
    pointwise = _Pointwise()
    with FlopCounterMode(display=False) as products, pointwise:
        call()
    return int(products.get_total_flops()) + pointwise.n


class _Pointwise(TorchDispatchMode):
    """Counts results of pointwise operations."""

    n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.pointwise in func.tags:
            self.n += sum(x.numel() for x in (made if isinstance(made, tuple) else (made,)))
        return made
