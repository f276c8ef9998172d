"""Ends rows inside a step.

Such a row samples the end of its sequence. No other row's logits change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from probemon.errors import ConfigError


def force_end(logits: Tensor, rows: Sequence[int], eos: Mapping[int, int | None]) -> None:
    """Leave only the end of the sequence in some rows of `logits [N, V]`, in place. Raises `ConfigError`."""
    for row in rows:
        end = eos.get(row)
        if not 0 <= row < len(logits) or end is None:
            raise ConfigError(
                f"row {row} has to end, and {len(logits)} rows are sampled, of which {len(eos)} have an end of"
                " sequence: a stop could not be made, so this engine ends. Leave out what changes the rows"
                " (speculation), or give rules the action record"
            )
        logits[row] = float("-inf")
        logits[row, end] = 0.0


def check_stoppable(params: Any) -> None:
    """Raise `ConfigError` for sampling parameters that prevent a stop."""
    if getattr(params, "ignore_eos", False):
        raise ConfigError(
            "ignore_eos is set, and rules stop a row by the end of its sequence: leave it out, or serve without rules"
            " that stop"
        )
    if getattr(params, "min_tokens", 0):
        raise ConfigError(
            f"min_tokens is {params.min_tokens}, and a row that a rule stops has to be able to end before: leave it"
            " out, or serve without rules that stop"
        )
    if getattr(params, "structured_outputs", None) is not None:
        raise ConfigError(
            "structured outputs end where their grammar says so, and a rule that stops could not end them before: leave"
            " one of the two out"
        )
