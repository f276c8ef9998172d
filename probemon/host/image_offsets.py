"""ImageOffsets: position offsets after images (M-RoPE).

offsets = ImageOffsets(model)
offsets.check(cache)               # before a turn that continues a cache
offsets.note(cache)                # after a turn

The model keeps them on itself, not in the cache, and every generate() overwrites them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from probemon.errors import UnsupportedDecoding

_NOTE = "_probemon_image_offsets"  # on the cache itself, for its copies


class ImageOffsets:
    """Does nothing for a model without such offsets."""

    def __init__(self, model: nn.Module) -> None:
        self._keeper: Any = next((module for module in model.modules() if "rope_deltas" in vars(module)), None)

    def note(self, cache: Any) -> None:
        """Record the current offsets on a cache, if any."""
        if self._keeper is not None and cache is not None:
            setattr(cache, _NOTE, self._kept())

    def check(self, cache: Any) -> None:
        """Raise `UnsupportedDecoding` if the model's offsets are not those recorded on the cache."""
        if self._keeper is None or not hasattr(cache, _NOTE):
            return
        if getattr(cache, _NOTE) != self._kept():
            raise UnsupportedDecoding(
                f"{type(self._keeper).__name__} keeps the positions after images on the model, not in the cache,"
                " and it read something else since it filled this cache: its own answer would be wrong. Generate all"
                " turns of a conversation before another begins, or give the whole conversation without"
                " past_key_values"
            )

    def _kept(self) -> tuple[int, ...]:
        """The offset of each row, or one for all."""
        deltas = self._keeper.rope_deltas
        offsets = (0,) if deltas is None else tuple(deltas.flatten().tolist())
        return offsets[:1] if len(set(offsets)) == 1 else offsets
