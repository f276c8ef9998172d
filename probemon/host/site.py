"""Site: a place in a host that none of its names stand for, and what is read there.

Site("router.3", gate, read, width=8, layer=3)  # read(output of gate) is a tensor [B, T, 8]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """A place that is none of the host's layers: `read` makes a tensor of the output of `module`, `[B, T, K]`.

    - `flat`: `[1, B * T, K]`, of a module that is given its tokens without rows
    - `early`: it runs just before the forward that its output is of
    - `width`: K, without which a compiled host leaves its graph here
    - `layer`: the host's layer that `module` is in, and is to stay in; None where it is in none
    - `attach`: puts on what else `read` needs, until a stack closes
    """

    name: str
    module: nn.Module
    read: Callable[[Any], Tensor]
    width: int | None = None
    flat: bool = False
    early: bool = False
    layer: int | None = None
    attach: Callable[[ExitStack], None] | None = None

    def __str__(self) -> str:
        return self.name
