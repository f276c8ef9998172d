"""What probes learn from: means of the states of a stretch, and of windows in it.

    rows = WindowRows.of(states, data, "resid_post.15", width=16)
    rows.x, rows.part, rows.is_window                # [R, D] fp32, [R], [R] bool

A linear probe of a mean state is the mean of the logits of its tokens, so a probe that learns from windows of 16 tokens
is right for a running mean of 16 logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from probemon.lab.training.dataset import ORDINARY, OUTSIDE, TEMPLATE, Dataset
from probemon.lab.training.states import States

_ORDINARY_STRIDE = 40  # tokens; at least the width


@dataclass(frozen=True)
class WindowRows:
    """Mean states `x [R, D]` of windows, and of whole parts (not of ordinary text); `part [R]`."""

    x: Tensor
    part: Tensor
    is_window: Tensor

    @classmethod
    def of(cls, states: States, data: Dataset, site: str, width: int) -> WindowRows:
        """Return the rows of all parts that may train; windows overlap by half."""
        trains = (data.fold != OUTSIDE) & states.kept
        ordinary = data.is_of(ORDINARY, TEMPLATE)
        x, parts, is_window = [], list[np.ndarray](), list[np.ndarray]()
        for block in states.blocks(site, trains):
            part = data.part_of(block.document, block.position)
            order = np.argsort(part, kind="stable")
            total = torch.cat(
                [torch.zeros(1, block.x.shape[1], dtype=torch.float64), block.x[order].double().cumsum(0)]
            )
            numbers, first, sizes = np.unique(part[order], return_index=True, return_counts=True)
            begins, ends, of, windows = list[int](), list[int](), list[int](), list[bool]()
            for number, start, size in zip(numbers.tolist(), first.tolist(), sizes.tolist(), strict=True):
                is_plain = bool(ordinary[data.document[number]])
                if not is_plain:
                    begins.append(start)
                    ends.append(start + size)
                    of.append(number)
                    windows.append(False)
                for begin in starts(size, width, max(_ORDINARY_STRIDE, width) if is_plain else max(1, width // 2)):
                    begins.append(start + begin)
                    ends.append(start + min(begin + width, size))
                    of.append(number)
                    windows.append(True)
            lengths = torch.tensor(ends) - torch.tensor(begins)
            x.append(((total[ends] - total[begins]) / lengths[:, None]).float())
            parts.append(np.asarray(of))
            is_window.append(np.asarray(windows))
        return cls(torch.cat(x), torch.from_numpy(np.concatenate(parts)), torch.from_numpy(np.concatenate(is_window)))


def starts(size: int, width: int, stride: int) -> list[int]:
    """Return where windows of `width` begin in `size` tokens; the last one ends with them."""
    if size <= width:
        return [0]
    begins = list(range(0, size - width + 1, stride))
    return begins if begins[-1] == size - width else [*begins, size - width]
