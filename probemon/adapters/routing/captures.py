"""Router outputs: reading with timing, sequences of beams, and copies to host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.adapters.routing.decisions import Singles
from probemon.core.hierarchy import Ints, Mask
from probemon.host.site import Site
from probemon.tracking.align import PlacedTokens
from probemon.tracking.recording import Recording


def timed(site: Site, reading: Any) -> Site:
    """Return a site that adds its reading time to `reading.seconds`."""

    def read(output: Any) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            return site.read(output)
        begin = time.perf_counter()
        state = site.read(output)
        reading.seconds = getattr(reading, "seconds", 0.0) + time.perf_counter() - begin
        return state

    return replace(site, read=read)


def returned(
    recording: Recording, batches: Sequence[PlacedTokens], entries: Sequence[Ints]
) -> Iterator[tuple[int, Ints, bool, Mask]]:
    """Yield for each sequence that beams returned: row, indices into the joined batches, whether they are complete,
    and which of them no earlier row has.

    `entries`: numbers in the recording, by batch.
    """
    beams, sequences = recording.beams, recording.ids
    assert beams is not None and sequences is not None
    seen = np.zeros(sum(map(len, batches)), dtype=bool)
    for row, (path, complete) in enumerate(beams.paths(sequences, recording.call.n_rows, batches, entries)):
        yield row, path, complete, ~seen[path]
        seen[path] = True


def to_host(states: Mapping[str, Tensor]) -> Callable[[], dict[str, Singles]]:
    """Begin to copy states; return a function that waits for the arrays."""
    device = next((x.device for x in states.values() if x.is_cuda), None)
    if device is None:
        arrays = {site: x.detach().float().cpu().numpy() for site, x in states.items()}
        return lambda: arrays
    joined = torch.cat([x.detach().float().to(device) for x in states.values()], dim=1)
    pinned = torch.empty(joined.shape, dtype=torch.float32, device="cpu", pin_memory=True)
    copy = pinned.copy_(joined, non_blocking=True)
    arrived = torch.cuda.current_stream(device).record_event()

    def wait() -> dict[str, Singles]:
        arrived.synchronize()
        parts = copy.split([x.shape[1] for x in states.values()], dim=1)
        return {site: part.numpy() for site, part in zip(states, parts, strict=True)}

    return wait
