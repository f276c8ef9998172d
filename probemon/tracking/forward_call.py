"""Reads a decoder forward's ids, columns and padding from its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from probemon.errors import UnsupportedDecoding
from probemon.host.cache import check_layers, n_cached
from probemon.host.internals import cache_among, recurrent_state_among
from probemon.host.packed_rows import sequence_starts
from probemon.tracking.align import DecoderForward, Ints
from probemon.tracking.generation import Generation


def read_forward(given: Mapping[str, Any], generation: Generation | None, decoder: Any) -> tuple[DecoderForward, Any]:
    """Return the forward with arguments `given`, and its cache; `generation` is None for a plain forward.

    Raises `UnsupportedDecoding`, or `AlignmentError` for the cache of an interrupted forward.
    """
    ids, state = given.get("input_ids"), recurrent_state_among(given)
    cache = cache_among(given) if state is None else None
    if cache is not None and (generation is None or generation.by_hand):  # generate() was checked earlier
        check_layers(cache, decoder)
    start = 0 if cache is None else n_cached(cache, given)
    if ids is None:
        if generation is None or (generation.by_hand and generation.ids is None):
            raise UnsupportedDecoding(
                "a plain forward with inputs_embeds has no token ids to place: give input_ids (models with images make"
                " embeddings of them by itself: use generate()), or detach"
            )
        ids = generation.ids_of_embeds(given["inputs_embeds"], start)
    if state is not None:  # does not count its tokens
        if generation is None or (generation.ids is None and not generation.by_hand):
            raise UnsupportedDecoding(
                "a plain forward on a recurrent state does not say which tokens went before: use generate(), or no"
                " cache"
            )
        if generation.prompt.n_beams > 1 and not hasattr(state, "reorder_cache"):
            raise UnsupportedDecoding(
                "beam search on a recurrent state is not supported with this version of transformers: it does not"
                " reorder the state with its beams, so the model's own answer is wrong too. Upgrade transformers, or"
                " use_cache=False"
            )
        # Before its first token, the state holds what the loop has shown.
        if generation.ids is None:
            start = max(0, generation.recording.call.frontier)
        else:
            start = generation.ids.shape[1] + generation.prompt.offset - ids.shape[1]
    if generation is None or generation.by_hand:
        mask = _plain_mask(given.get("attention_mask"))
    if generation is not None and generation.by_hand:
        mask = generation.extend_mask(mask, start + ids.shape[1])
    elif generation is not None:
        mask = generation.mask
    starts = None if generation is not None else sequence_starts(decoder, given)
    return DecoderForward(
        start, ids.detach().cpu().numpy(), mask, None if starts is None else starts.cpu().numpy()
    ), cache


def _plain_mask(mask: Any) -> Ints | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        raise UnsupportedDecoding("an attention mask that is not 2D hides which columns are padding: give a 2D one")
    return np.asarray(mask.detach().cpu().numpy())
