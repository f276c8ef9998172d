"""One forward of a steered decoder: what its hooks know of it, and what its inputs say.

forward = Forward(cache, state, real)
forward.applied = governed_codes                  # by site, once the controller has run
real_columns(mask, n_rows, start, n_tokens)       # [B, T]: which of its columns are tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from probemon.adapters.bem.controller import Codes
from probemon.adapters.bem.measures import Measures
from probemon.adapters.bem.sites import Site
from probemon.adapters.bem.state import ControllerState
from probemon.errors import AlignmentError, NotSupportedDecoding


@dataclass(eq=False)
class Forward:
    """What is under way in one forward of the decoder.

    `off`: it runs without the adapter, whatever is on now.
    `applied`: codes `[B * T, r]` by site key, once the controller has run.
    `sparse`: whether codes of zeros mark updates that are left out.
    `leaves`: the same codes, in layers that the backward pass runs again by themselves; their gradients end here.
    `measures`: what is measured of its updates, until all is; None where nobody asked.
    """

    cache: Any = None
    state: ControllerState | None = None
    real: Tensor | None = None
    off: bool = False
    applied: dict[str, Tensor] | None = None
    sparse: bool = False
    reached: set[Site] = field(default_factory=set)
    leaves: dict[str, Tensor] = field(default_factory=dict)
    measures: Measures | None = None

    def leaf(self, key: str) -> Tensor:
        """Return the code of a site without its history, whose gradient `take_gradient` gives."""
        assert self.applied is not None
        if key not in self.leaves:
            code = self.applied[key]
            self.leaves[key] = code.detach().requires_grad_(code.requires_grad)
        return self.leaves[key]

    def take_gradient(self, key: str) -> Tensor | None:
        """Return the gradient that came to a leaf, and forget it."""
        leaf = self.leaves.pop(key, None)
        return None if leaf is None else leaf.grad


class Steered(nn.Module):
    """Passes on the codes of a forward, with the sizes of what is applied, to whoever puts a hook on it. Without a hook
    it is not called.
    """

    def forward(self, codes: Codes, sizes: tuple[Tensor, Tensor]) -> Codes:
        sigma1, relative = (size.view(codes.level.shape) for size in sizes)
        return codes.replace(sigma1=sigma1, delta_rel_norm=relative)


def check_no_recurrent_state(inputs: Mapping[str, Any]) -> None:
    """Refuse a forward that goes on from a recurrent state: where each sequence begins is unknown."""
    if inputs.get("cache_params") is not None:
        raise NotSupportedDecoding(
            "a recurrent state in place of a cache (cache_params) is not supported under an adapter: where each"
            " sequence begins is not said. Give one a row, or detach"
        )


def real_columns(mask: Any, n_rows: int, start: int, n_tokens: int) -> Tensor:
    """Return which of the columns from `start` on are tokens `[B, T]` bool, by a 2D mask. Raises `AlignmentError`,
    `NotSupportedDecoding`.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise NotSupportedDecoding("an attention mask that is not 2D hides which columns are padding: give a 2D one")
    if mask.shape[0] != n_rows or mask.shape[1] < start + n_tokens:
        raise AlignmentError(
            f"attention mask of shape {tuple(mask.shape)} for {n_rows} rows that end at column {start + n_tokens}:"
            " padding cannot be told apart"
        )
    return mask[:, start : start + n_tokens] != 0
