"""Forward: one forward of a steered decoder, and checks of its inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from probemon.adapters.bem.controller import Codes
from probemon.adapters.bem.measures import Measures
from probemon.adapters.bem.sites import Site
from probemon.adapters.bem.state import ControllerState
from probemon.errors import AlignmentError, UnsupportedDecoding
from probemon.host.internals import recurrent_state_among


@dataclass(eq=False)
class Forward:
    """State of one forward of the decoder.

    `off`: it runs without the adapter.
    `applied`: codes `[B * T, r]` by site key, after the controller.
    `sparse`: codes of zeros mark skipped updates.
    `measures`: pending measurements.
    `values`: a layer's values of the tokens `[B * T, ..]`, for gates that read them.
    """

    cache: Any = None
    state: ControllerState | None = None
    real: Tensor | None = None
    off: bool = False
    applied: dict[str, Tensor] | None = None
    sparse: bool = False
    reached: set[Site] = field(default_factory=set)
    measures: Measures | None = None
    values: dict[int, Tensor] = field(default_factory=dict)


class Steered(nn.Module):
    """Passes codes and sizes of updates to its hooks, if any."""

    def forward(self, codes: Codes, sizes: tuple[Tensor, Tensor]) -> Codes:
        sigma1, relative = (size.view(codes.level.shape) for size in sizes)
        return codes.replace(sigma1=sigma1, delta_rel_norm=relative)


@contextmanager
def frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """In the block, make no gradient for these parameters."""
    changed = [parameter for parameter in parameters if parameter.requires_grad]
    for parameter in changed:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in changed:
            parameter.requires_grad_(True)


def check_no_recurrent_state(inputs: Mapping[str, Any]) -> None:
    """Raises `UnsupportedDecoding` for a recurrent state: where sequences begin is unknown."""
    if recurrent_state_among(inputs) is not None:
        raise UnsupportedDecoding(
            "a recurrent state in place of a cache is not supported under an adapter: it does not"
            " say where each sequence begins. Give one sequence per row, or detach"
        )


def real_columns(mask: Any, n_rows: int, start: int, n_tokens: int) -> Tensor:
    """Return which columns from `start` are tokens, `[B, T]` bool.

    Raises `UnsupportedDecoding` for masks that are not 2D, `AlignmentError` if too small.
    """
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UnsupportedDecoding("an attention mask that is not 2D hides which columns are padding: give a 2D one")
    if mask.shape[0] != n_rows or mask.shape[1] < start + n_tokens:
        raise AlignmentError(
            f"attention mask of shape {tuple(mask.shape)} for {n_rows} rows that end at column {start + n_tokens}:"
            " padding cannot be identified"
        )
    return mask[:, start : start + n_tokens] != 0
