"""Plain forwards, outside of a followed `generate()`.

plain = PlainForwards(model, decoder, recordings, acts)
plain.is_of_another_head(thread, forward, cache)    # another model's generate()
recording = plain.document(forward, cache)
plain.report_layer_alone("resid_post.3")            # a layer ran outside of a forward
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from probemon.errors import UnsupportedDecoding
from probemon.host.internals import in_backward
from probemon.tracking.align import DecoderForward, Ints
from probemon.tracking.generation import ThreadState
from probemon.tracking.hand_loop import generate_around
from probemon.tracking.recording import Recording
from probemon.tracking.run_recordings import Earlier, RunRecordings

LOG = logging.getLogger("probemon")


class _Shown(threading.local):
    """A thread's newest ids."""

    def __init__(self) -> None:
        self.newest: deque[Ints] = deque(maxlen=8)


class PlainForwards:
    """`acts()`: True if rules or sinks need generated tokens; an untracked decode loop is then an error."""

    def __init__(
        self, model: Any, decoder: torch.nn.Module, recordings: RunRecordings, acts: Callable[[], bool]
    ) -> None:
        self._model, self._decoder, self._recordings, self._acts = model, decoder, recordings, acts
        self._shown, self._warned = _Shown(), False

    def is_of_another_head(self, thread: ThreadState, forward: DecoderForward, cache: Any) -> bool:
        """True for a `generate()` from before attaching; raises for a later one."""
        around = generate_around(self._decoder)
        if around is None:
            thread.unwatched = None
            return False
        frame, owner = around
        # A new one shows its prompt first.
        if frame is not thread.unwatched and (
            forward.start == 0 or forward.ids.shape[1] > 1 or self._known(forward, cache) is not None
        ):
            raise UnsupportedDecoding(
                f"generate() of {type(owner).__name__} runs the decoder that is watched, but this run is attached"
                f" to {type(self._model).__name__}: which tokens are generated, and where rows end, is unknown"
                " here, and rules would never fire. Attach to the very model whose generate() is called"
            )
        self.report_unwatched(thread, around)
        return True

    def report_unwatched(self, thread: ThreadState, around: tuple[FrameType, Any] | None = None) -> None:
        """Warn once that the surrounding `generate()` is not watched."""
        around = around or generate_around(self._decoder)
        if around is None or around[0] is thread.unwatched:
            return
        thread.unwatched, owner = around
        LOG.warning(
            "a generate() of %s began before probemon was attached, was looked up before, or called on the class: what"
            " it generates is not watched",
            type(owner).__name__,
        )

    def document(self, forward: DecoderForward, cache: Any) -> Recording:
        """Return the recording that a plain forward continues.

        Raises `UnsupportedDecoding` for an untracked decode step, if `acts()`.
        """
        if self._acts() and self._decodes(forward):
            raise UnsupportedDecoding(
                "a plain forward runs one more token of a sequence, as a decode loop by hand does, and nothing says"
                " that it was generated: rules would never fire and sinks would get a prompt. Put the loop into `with"
                " run.generating(from_column=...) as loop:` and pass it what was sampled"
            )
        return self._recordings.document(self._known(forward, cache), forward.start, len(forward.ids))

    def _known(self, forward: DecoderForward, cache: Any) -> Earlier | None:
        return self._recordings.of_cache(cache, forward.start)

    def _decodes(self, forward: DecoderForward) -> bool:
        """True for one more column than a cache or a recent forward."""
        if forward.start > 0:
            return forward.ids.shape[1] == 1
        decodes = any(_continues(forward.ids, before) for before in self._shown.newest)
        self._shown.newest.append(forward.ids)
        return decodes

    def report_layer_alone(self, site: str) -> bool:
        """Warn, or raise if `acts()`, about a lone layer; return True if it ran tokens."""
        if in_backward():  # gradient checkpointing
            return False
        message = (
            f"the layer of {site} ran outside of a forward of {type(self._decoder).__name__}, and its tokens are not"
            " watched: something calls .forward() of the decoder, or another model has the same layers. Call the model"
            " itself, and attach to the one that is called"
        )
        if self._acts():
            raise UnsupportedDecoding(f"{message}. Rules would never fire and sinks hear nothing")
        if not self._warned:
            self._warned = True
            LOG.warning(message)
        return True


def refuse_padding(model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise for padding, which the decoder would read."""
    arguments = {**dict(zip(inspect.signature(model.forward).parameters, args, strict=False)), **kwargs}
    mask = arguments.get("attention_mask")
    if isinstance(mask, Tensor) and not bool((mask != 0).all()):
        raise UnsupportedDecoding(
            f"{type(model).__name__} does not give an attention mask on to its decoder, which would read padding as"
            " tokens: its own answer is wrong, and so would be ours. Give rows of one length, or one by one"
        )


def _continues(ids: Ints, before: Ints) -> bool:
    """True if `ids` extend the previous ids by one position, or shift them."""
    if len(ids) != len(before) or ids.shape[1] < 2:
        return False
    if ids.shape[1] == before.shape[1] + 1:
        return np.array_equal(ids[:, :-1], before)
    moved_on = ids.shape == before.shape and np.array_equal(ids[:, :-1], before[:, 1:])
    return moved_on and not np.array_equal(ids, before)  # else a constant document, read twice
