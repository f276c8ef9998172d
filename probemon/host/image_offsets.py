"""ImageOffsets: what a host keeps on the model, beside the cache, of where tokens after images stand (M-RoPE).

offsets = ImageOffsets(model)
offsets.check(cache)               # before a turn that goes on from a cache: are they those of its conversation?
offsets.note(cache)                # after a turn: they belong to this cache

There is one place for them on the model, and every generate() overwrites it: the next turn of an earlier conversation
would put its tokens where those of another stand.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from probemon.errors import NotSupportedDecoding

_NOTE = "_probemon_image_offsets"  # on the cache itself, so that a copy of it has it, too


class ImageOffsets:
    """Of a host without such offsets nothing is noted, and nothing asked."""

    def __init__(self, model: nn.Module) -> None:
        self._keeper: Any = next((module for module in model.modules() if "rope_deltas" in vars(module)), None)

    def note(self, cache: Any) -> None:
        """Say that the offsets kept now belong to a cache, None for one that nobody else has."""
        if self._keeper is not None and cache is not None:
            setattr(cache, _NOTE, self._kept())

    def check(self, cache: Any) -> None:
        """Raise `NotSupportedDecoding` where the host keeps others than those of a cache, as far as they are known."""
        if self._keeper is None or not hasattr(cache, _NOTE):
            return
        if getattr(cache, _NOTE) != self._kept():
            raise NotSupportedDecoding(
                f"{type(self._keeper).__name__} keeps on the model, not in the cache, where tokens after images stand,"
                " and it read something else since it filled this cache: its own answer would be wrong. Generate all"
                " turns of a conversation before another begins, or give the whole conversation without"
                " past_key_values"
            )

    def _kept(self) -> tuple[int, ...]:
        """The offset of each row, or of all of them; 0 where nothing is kept."""
        kept = self._keeper.rope_deltas
        offsets = (0,) if kept is None else tuple(kept.flatten().tolist())
        return offsets[:1] if len(set(offsets)) == 1 else offsets
