"""A text that already begins with special tokens gets no second ones; tokens are counted without offsets."""

import numpy as np
import pytest
from transformers import ByT5Tokenizer

from corpora import make_tokenizer
from probemon.errors import ConfigError
from probemon.host.text_tokens import counted, ids_of
from probemon.lab.corpora.windows import encode


@pytest.mark.parametrize(
    ("text", "ids"),
    [("ab", [1, 4, 5, 2]), ("<s>ab", [1, 4, 5, 2]), ("<s><s>a", [1, 1, 4, 2]), ("", [1, 2]), ("a<s>", [1, 4, 1, 2])],
)
def test_text_that_begins_with_special_tokens_gets_no_second_ones(text, ids):
    assert ids_of(make_tokenizer(adds_bos=True), text) == ids
    assert ids_of(make_tokenizer(), text) == [i for i in make_tokenizer()(text).input_ids]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("special", ["bos", "tokenizer", "none"])
@pytest.mark.parametrize("text", ["<s>ab", "<s>", "ab<s>", "<s><s>b"])
def test_documents_have_one_bos_token(adds_bos, special, text):
    found = encode(make_tokenizer(adds_bos), text, special_tokens=special, parse_special=True)
    own = make_tokenizer()(text, add_special_tokens=False).input_ids
    assert found.ids.tolist() == own
    added = special != "none" and (adds_bos or special == "bos")
    assert found.prefix == ((1,) if added and own[0] != 1 else ())
    characters = encode(make_tokenizer(adds_bos), text, special_tokens=special)  # of which none is a beginning
    assert characters.prefix == ((1,) if added else ())


class Slow:
    """A tokenizer that does not say where its tokens stand, as those written in Python do not."""

    is_fast = False

    def __init__(self, tokenize):
        self._tokenize = tokenize

    def __call__(self, text, **options):
        return {"input_ids": self._tokenize(text)}


@pytest.mark.parametrize("ranges", [[(0, 2)], [(2, 5), (7, 9)], [(0, 9)], [(3, 3)], []])
def test_tokens_are_counted_by_where_they_begin(ranges):
    text, fast = "ab cdé gh", make_tokenizer()
    ids = fast(text, add_special_tokens=False).input_ids
    wanted = [any(a <= at < b for a, b in ranges) for at in range(len(text))]
    for tokenizer in (fast, Slow(lambda text: fast(text, add_special_tokens=False).input_ids)):
        assert counted(tokenizer, text, ids, ranges).tolist() == wanted
    bytes_ = ByT5Tokenizer()
    ids = bytes_(text, add_special_tokens=False).input_ids
    widths = [len(letter.encode()) for letter in text]
    assert counted(bytes_, text, ids, ranges).tolist() == np.repeat(wanted, widths).tolist()


def test_token_across_a_range_border_is_refused():
    pairs = Slow(lambda text: [text[i : i + 2] for i in range(0, len(text), 2)])
    assert counted(pairs, "abcdef", ["ab", "cd", "ef"], [(2, 4)]).tolist() == [False, True, False]
    with pytest.raises(ConfigError, match=r"Slow does not say where its tokens are .* across character 3: take a"):
        counted(pairs, "abcdef", ["ab", "cd", "ef"], [(3, 4)])
