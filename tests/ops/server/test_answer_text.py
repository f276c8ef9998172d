"""Text decoded token by token equals the text decoded at once, up to the first stop string."""

import numpy as np
import pytest

from probemon.ops.server.answer_text import AnswerText
from probemon.util.token_texts import TokenTexts
from running_server import demo_tokenizer

TEXTS = [
    "Whales sing 🐋🐳 in the 海, naïvely.\n\nThe end.",
    "  two  spaces\tand tabs \u202e reversed \x00 nul",
    "👩‍👩‍👧‍👦 family",
]


@pytest.fixture(scope="module")
def tokenizer():
    return demo_tokenizer()


@pytest.fixture(scope="module")
def decode(tokenizer):
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def sequences(tokenizer):
    """Texts, with special tokens between, and random bytes of which few are characters."""
    rng = np.random.default_rng(0)
    end = tokenizer.eos_token_id
    single = [i for i in range(len(tokenizer)) if len(tokenizer.convert_ids_to_tokens(i)) == 1]
    yield from (tokenizer(text)["input_ids"] for text in TEXTS)
    yield [end] * 6 + tokenizer("🐋")["input_ids"] + [end]
    yield tokenizer("🐋")["input_ids"][:-1]  # ends in the middle of a character
    partial = [i for i in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([i])]
    for _ in range(100):
        yield [partial[i] for i in rng.integers(0, len(partial), 12)]  # bytes that are hardly ever characters
    for _ in range(20):
        yield rng.integers(0, len(tokenizer), 30).tolist()
        yield [single[i] for i in rng.integers(0, len(single), 20)]


def test_incremental_pieces_join_to_the_whole_decoded_text(tokenizer, decode):
    for ids in sequences(tokenizer):
        pieces = TokenTexts(decode)
        texts = [pieces.add(token_id) for token_id in ids]
        assert "".join(texts) + pieces.finish() == decode(ids)


def taken(text, ids):
    """What is sent after each token, and at the end."""
    parts = []
    for i, token_id in enumerate(ids):
        text.add(token_id)
        text.allow(i)  # the scores of those before it are known
        parts.append(text.take())
        if text.met_stop:
            break
    text.allow(len(text.spans))
    text.end()
    return [*parts, text.take()]


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("stops", [(), ("in the",), ("a", "the", "\n\n"), ("sing 🐋🐳 in the 海, n", "🐳"), ("zzz",)])
def test_sent_text_ends_before_the_first_stop_string(tokenizer, decode, stops, hold):
    for ids in sequences(tokenizer):
        text, whole = AnswerText(decode, stops, hold=hold), decode(ids)
        parts = taken(text, ids)
        ends = [whole.index(stop) for stop in stops if stop in whole]
        sent = "".join(parts)
        assert sent == text.text
        assert not any(stop in sent for stop in stops)
        if not ends:
            assert sent == whole and not text.met_stop
        else:  # which of several that overlap comes first is known only as they come
            assert (
                text.met_stop and whole.startswith(sent) and len(sent) in [whole.index(s) for s in stops if s in whole]
            )
        spans = [text.span(i) for i in range(len(text.spans))]
        assert "".join(text.token_text(i) for i in range(len(spans))) == sent
        assert [start for start, _ in spans[1:]] == [end for _, end in spans[:-1]]


def test_held_text_has_only_allowed_tokens_and_ends_at_the_cut(tokenizer, decode):
    ids = tokenizer("Whales and ships and ports")["input_ids"]
    text = AnswerText(decode, hold=True)
    for i, token_id in enumerate(ids):
        text.add(token_id)
        assert text.take() == ""
        text.allow(i)
        assert text.text == decode(ids[:i])
        assert text.take() == decode(ids[:i])[len(decode(ids[: max(0, i - 1)])) :]
    text.cut_at_token(3)
    text.allow(len(ids))
    text.end()
    assert text.text == decode(ids[:3]) and text.take() == ""
