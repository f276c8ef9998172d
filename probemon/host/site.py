"""Site: a custom place in a model.

Site("router.3", gate, read, width=8, layer=3)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Site:
    """A custom place: `read` turns the output of `module` into `[B, T, K]`.

    - `flat`: `read` gives `[1, B * T, K]`
    - `early`: `module` runs just before the forward that its output belongs to
    - `width`: K; without it a compiled model breaks its graph
    - `layer`: index of the layer around `module`, or None
    - `attach`: installs further hooks
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
