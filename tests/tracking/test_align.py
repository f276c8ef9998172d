"""Tokens are placed in sequences and positions as hand-worked cases say."""

import numpy as np
import pytest

from probemon.core.scores import GENERATED, PROMPT
from probemon.errors import AlignmentError
from probemon.tracking.align import DecoderForward, SequenceColumns


def listed(placed):
    return [(p.phase, list(zip(p.rows.tolist(), p.columns.tolist(), p.ids.tolist(), strict=True))) for p in placed]


def test_left_padding_is_not_a_token():
    ids = np.array([[0, 0, 7], [4, 5, 6]])
    placed = SequenceColumns(3).place(DecoderForward(0, ids, np.array([[0, 0, 1], [1, 1, 1]])))
    assert listed(placed) == [(PROMPT, [(0, 2, 7), (1, 0, 4), (1, 1, 5), (1, 2, 6)])]


def sampled(call, *done):
    call.ended(list(done))


def test_tokens_after_the_end_of_a_sequence_are_dropped():
    call = SequenceColumns(1)
    call.place(DecoderForward(0, np.array([[7], [8]]), None))
    sampled(call, True, False)  # row 0's first token is its last: it is still a token
    assert listed(call.place(DecoderForward(1, np.array([[2], [9]]), None))) == [(GENERATED, [(0, 1, 2), (1, 1, 9)])]
    sampled(call, True, True)
    assert listed(call.place(DecoderForward(2, np.array([[0], [9]]), None))) == [(GENERATED, [(1, 2, 9)])]
    assert call.last_column.tolist() == [1, 2]


def test_position_with_unknown_sequence_ends_is_refused():
    call = SequenceColumns(2)
    call.place(DecoderForward(0, np.array([[2, 5]]), None))
    with pytest.raises(AlignmentError, match="before the stopping criteria saw it"):
        call.place(DecoderForward(2, np.array([[6]]), None))


def test_uncached_forward_counts_only_the_new_position():
    call = SequenceColumns(2)
    call.place(DecoderForward(0, np.array([[3, 4]]), None))
    sampled(call, False)
    placed = call.place(DecoderForward(0, np.array([[3, 4, 5]]), None))
    assert listed(placed) == [(GENERATED, [(0, 2, 5)])] and placed[0].offsets.tolist() == [2]


def test_chunks_and_a_second_turn_continue_after_the_cache():
    call = SequenceColumns(9)
    assert listed(call.place(DecoderForward(5, np.array([[1, 2]]), None))) == [(PROMPT, [(0, 5, 1), (0, 6, 2)])]
    assert listed(call.place(DecoderForward(7, np.array([[3, 4]]), None))) == [(PROMPT, [(0, 7, 3), (0, 8, 4)])]
    sampled(call, False)
    assert listed(call.place(DecoderForward(9, np.array([[5]]), None))) == [(GENERATED, [(0, 9, 5)])]


@pytest.mark.parametrize(
    "second",
    [
        DecoderForward(4, np.array([[1]]), None),  # a gap
        DecoderForward(2, np.array([[1]]), None),  # nothing new
        DecoderForward(3, np.array([[1], [1]]), None),  # other rows
        DecoderForward(3, np.array([[1, 2]]), None),  # two generated at once
        DecoderForward(3, np.array([[1]]), np.ones((1, 2), dtype=int)),  # a mask too short
    ],
)
def test_inconsistent_forwards_are_refused(second):
    call = SequenceColumns(3)
    call.place(DecoderForward(0, np.array([[1, 2, 3]]), None))
    sampled(call, False)
    with pytest.raises(AlignmentError):
        call.place(second)
